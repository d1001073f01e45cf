"""Rows of whole episodes, as they stand in a table, made into the columns of transitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from koffline.data.columns import counted
from koffline.data.raw import RawLog, settle_actions
from koffline.data.spaces import Discrete
from koffline.data.table.notes import TableCounts
from koffline.data.table.prepared import PreparedTable
from koffline.data.table.survey import number_dtype
from koffline.data.table.times import shown_time
from koffline.errors import DataError

_ROUNDING = 1e-4  # by so much probabilities may exceed 1
_TRUE, _FALSE = ("true", "t", "yes", "y", "1", "1.0"), ("false", "f", "no", "n", "0", "0.0")


def assemble(frame: pl.DataFrame, prepared: PreparedTable, counts: TableCounts) -> RawLog | None:
    """Aligned columns of a piece that holds whole episodes; None where no row is left.

    Episodes are in order of first appearance, rows in time order. Raises DataError.
    """
    return _Assembly(frame, prepared, counts).log()


class _Assembly:
    """Columns of one piece: rows in order (None: as they are), episode numbers (N,) of ordered rows."""

    def __init__(self, frame: pl.DataFrame, prepared: PreparedTable, counts: TableCounts) -> None:
        self._frame, self._prepared, self._counts = frame, prepared, counts
        self._roles, self._rows = prepared.roles, frame.height
        self._order: pl.Series | None = None
        self._ids: np.ndarray | None = None
        flags = {"terminated": self._roles.terminal, "truncated": self._roles.truncated}
        found = {flag: read_flags(frame, name, prepared.source) for flag, name in flags.items()}
        self._episodes = self._order_rows(found)
        self._log = {flag: self._sorted(column).to_numpy() for flag, column in found.items()}
        self._last = np.append(self._episodes[1:] != self._episodes[:-1], True)

    def log(self) -> RawLog | None:
        roles, log, counts = self._roles, self._log, self._counts
        log["observations"] = self._observations(roles.observations)
        log["actions"] = self._actions()
        log["rewards"] = self._single(roles.reward)
        if roles.weight is not None:
            log["weights"] = self._single(roles.weight)
        if roles.behavior is not None:
            log["behavior_log_probabilities"] = self._log_probabilities(roles.behavior)
        if not roles.stands_alone:
            self._check_flags()
            log["episode_ids"] = self._ids if self._ids is not None else counts.episodes + self._episodes
            counts.episodes += int(self._episodes[-1]) + 1
        if roles.next_observations:
            log["next_observations"] = self._observations(roles.next_observations)
            if roles.truncated is None and not roles.stands_alone:
                log["truncated"] = self._last & ~log["terminated"]
                counts.cut += int(log["truncated"].sum())
        else:
            self._derive_next()
        if not len(log["rewards"]):
            return None
        return RawLog(log, self._prepared.action_space, self._prepared.metadata)

    def _sorted(self, column: pl.Series) -> pl.Series:
        return column if self._order is None else column.rechunk().gather(self._order)

    def _order_rows(self, flags: dict[str, pl.Series]) -> np.ndarray:
        """Find the order; the number of each row's episode, in order of first appearance."""
        roles, frame = self._roles, self._frame
        if roles.stands_alone:
            return np.arange(self._rows)
        keys = pl.select(row=pl.int_range(self._rows))
        if roles.episode is not None:
            keys = keys.with_columns(frame[roles.episode].alias("id"))
            keys = keys.select("row", first=pl.col("row").first().over("id"))
        else:
            keys = keys.with_columns(first=pl.lit(0))
        if roles.time is not None:
            keys = keys.with_columns(frame[roles.time].alias("row"))
        keys = keys.select("first", time="row")
        same, later = pl.col("first").diff() == 0, pl.col("time") >= pl.col("time").shift()
        if not keys.select(((pl.col("first").diff() > 0) | (same & later)).all()).item():
            self._order = keys.select(pl.arg_sort_by("first", "time", maintain_order=True)).to_series()
            keys = keys[self._order]
            self._counts.reordered = True
        if roles.time is not None:
            self._check_times(keys)
        if roles.episode is None:
            ends = self._sorted(flags["terminated"] | flags["truncated"]).to_numpy()
            return np.append(0, np.cumsum(ends)[:-1])
        if frame[roles.episode].dtype.is_integer() and frame[roles.episode].dtype != pl.UInt64:
            self._ids = self._sorted(frame[roles.episode]).cast(pl.Int64).to_numpy()
        return keys["first"].rle_id().cast(pl.Int64).to_numpy()

    def _check_times(self, keys: pl.DataFrame) -> None:
        """Raise DataError for two rows of an episode at one time."""
        roles, prepared = self._roles, self._prepared
        inside = keys["first"].diff() == 0
        same = (inside & (keys["time"] == keys["time"].shift())).fill_null(False)
        if same.any():
            place = int(same.arg_max() or 0)
            row = place if self._order is None else int(self._order[place])
            where = f"{roles.time} {shown_time(keys['time'][place], keys['time'].dtype)}"
            remedy = "name the episode column (--episode)"
            if roles.episode is not None:
                where = f"episode {self._frame[roles.episode][row]!r}, {where}"
                remedy = "drop the doubles, or name a finer time column"
            raise DataError(
                f"{prepared.source}: {counted(int(same.sum()), 'row', 'has', 'have')} the time of another "
                f"row of their episode (first: {where}); {remedy}"
            )
        whole = keys["time"].to_physical()
        if whole.dtype.is_integer():
            self._counts.add_differences(whole.diff().filter(inside.fill_null(False)))

    def _observations(self, columns: tuple[str, ...]) -> np.ndarray:
        """(N, d) in row order, or in the shape of an observation that koffline wrote as lists."""
        dtype, shape = self._prepared.observation_dtype, self._prepared.observation_shape
        if columns[0] in self._prepared.survey.widths:
            found = self._lists(columns[0], dtype)
        else:
            found = np.empty((self._rows, len(columns)), dtype=dtype)
            for i, name in enumerate(columns):
                found[:, i] = self._imputed(self._sorted(self._frame[name]))
        if shape is None:
            return found
        if int(np.prod(shape)) != found.shape[1]:
            raise DataError(
                f"{self._prepared.source}: the koffline description is damaged; write the file again"
            )
        return found.reshape(len(found), *shape)

    def _lists(self, name: str, dtype: np.dtype) -> np.ndarray:
        width, column = self._prepared.survey.widths[name], self._sorted(self._frame[name])
        if column.null_count():  # a constant is asked for
            nothing = pl.Series([[None] * width], dtype=pl.List(column.dtype.inner))  # type: ignore[attr-defined]
            column = (
                column.cast(nothing.dtype).to_frame().select(pl.col(name).fill_null(nothing.first()))[name]
            )
        found = self._imputed(column.explode(empty_as_null=False))
        return np.asarray(found, dtype=dtype).reshape(self._rows, width)

    def _single(self, name: str) -> np.ndarray:
        column = self._sorted(self._frame[name])
        dtype = number_dtype([column.dtype])
        return np.asarray(self._imputed(column), dtype=np.float32 if dtype == np.uint8 else dtype)

    def _imputed(self, column: pl.Series) -> np.ndarray:
        """The column (rows in order) with missing values replaced as asked for. Raises DataError."""
        name, prepared = column.name, self._prepared
        if column.dtype.is_decimal() or column.dtype == pl.Boolean:
            column = column.cast(pl.Float64)
        how = prepared.roles.impute.get(name)
        if how is None or not prepared.survey.missing.get(name):
            return column.to_numpy()
        column = (
            column.cast(pl.Float64).fill_nan(None) if not column.dtype.is_float() else column.fill_nan(None)
        )
        count = column.null_count()
        if how == "forward":
            said = "the last value before"
            filled = pl.DataFrame({"it": column, "e": self._episodes}).select(
                pl.col("it").forward_fill().over("e")
            )
            column = filled.to_series()
            if column.null_count():
                raise DataError(
                    f"{prepared.source}: column {name} has {counted(column.null_count(), 'missing value')} "
                    f"with no earlier value in the episode; impute a number or the mean ({name}=mean)"
                )
        else:
            value = prepared.survey.means[name] if how == "mean" else 0.0 if how == "zero" else float(how)
            said, column = f"{'mean ' * (how == 'mean')}{value:.6g}", column.fill_null(value)
        if count:
            self._counts.imputed[name, said] += count
        return column.to_numpy()

    def _actions(self) -> np.ndarray:
        prepared, columns = self._prepared, self._roles.action
        first = self._frame[columns[0]]
        if prepared.categories:
            known = pl.Series(prepared.categories, dtype=first.dtype)
            found = first.replace_strict(
                known, range(len(known)), default=None, return_dtype=pl.Int64
            ).to_numpy()
        elif columns[0] in prepared.survey.widths:
            width = prepared.survey.widths[columns[0]]
            found = first.explode(empty_as_null=False).to_numpy().reshape(self._rows, width)
        elif len(columns) == 1:
            found = (first.cast(pl.Float64) if first.dtype.is_decimal() else first).to_numpy()
        else:
            found = self._frame.select(pl.col(columns).cast(pl.Float64)).to_numpy(order="c")
        found = found if prepared.categories else found.astype(prepared.action_dtype, copy=False)
        settled = settle_actions(found, prepared.action_space, None).actions
        return settled if self._order is None else settled[self._order.to_numpy()]

    def _log_probabilities(self, name: str) -> np.ndarray:
        found, is_log = self._single(name), self._roles.behavior_is_log
        remedy = "give the probability of the action that was taken, or --behavior-log-probability"
        if not is_log:
            self._refuse_rows(~(found > 0), "not above 0", remedy, name, found)
        if isinstance(self._prepared.action_space, Discrete):
            if is_log:
                remedy = "give natural logarithms of probabilities, or --behavior-probability"
            most = int(not is_log)
            self._refuse_rows(found > most + _ROUNDING, f"above {most}", remedy, name, found)
        return found if is_log else np.log(found)

    def _refuse_rows(self, wrong: np.ndarray, how: str, remedy: str, name: str, column: Any) -> None:
        if wrong.any():
            raise DataError(
                f"{self._prepared.source}: column {name} holds {column[wrong][0]:g} "
                f"({counted(int(wrong.sum()), 'row', 'is', 'are')} {how}); {remedy}"
            )

    def _check_flags(self) -> None:
        """Raise DataError where an episode goes on after its end."""
        for flag, column in {"terminated": self._roles.terminal, "truncated": self._roles.truncated}.items():
            inside = self._log[flag] & ~self._last
            if inside.any():
                episodes = counted(len(np.unique(self._episodes[inside])), "episode")
                raise DataError(
                    f"{self._prepared.source}: column {column} is set in {counted(int(inside.sum()), 'row')} "
                    f"whose episode goes on afterwards ({episodes}); drop what follows, or give it another "
                    "episode id"
                )

    def _derive_next(self) -> None:
        """Next observations from the rows below; last rows of open episodes are left out.

        After a termination the next observation has no influence: the row's own stands in for it.
        """
        log, last, counts = self._log, self._last, self._counts
        lost = last & ~log["terminated"]
        cut = lost if self._roles.truncated is None else lost & log["truncated"]
        moved = np.append(cut[1:] & ~last[:-1], False)
        if self._roles.truncated is None:
            counts.cut += int(moved.sum())
        log["truncated"] = log["truncated"] | moved
        counts.derived = True
        counts.left_out += int(lost.sum())
        kept = np.flatnonzero(~lost)
        following = log["observations"][kept + ~last[kept]]
        for name in log:
            log[name] = log[name][kept]
        log["next_observations"] = following


def read_flags(frame: pl.DataFrame, name: str | None, source: str) -> pl.Series:
    """Yes/no, 0/1, or texts such as true and false, as booleans. Raises DataError for anything else."""
    if name is None:
        return pl.repeat(False, frame.height, eager=True)
    column = frame[name]
    if column.dtype == pl.Boolean:
        return column
    if column.dtype == pl.String:
        lower = column.str.strip_chars().str.to_lowercase()
        yes, no = lower.is_in(_TRUE), lower.is_in(_FALSE)
    else:
        number = column.cast(pl.Float64)
        yes, no = number == 1, number == 0
    wrong = ~(yes | no)
    if wrong.any():
        count = counted(int(wrong.sum()), "row", "is", "are")
        raise DataError(
            f"{source}: column {name} holds {column[int(wrong.arg_max() or 0)]!r} ({count} neither yes nor "
            "no); give true and false, or 1 and 0"
        )
    return yes
