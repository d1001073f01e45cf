"""Rows of whole episodes, as they stand in a table, made into the columns of transitions."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import polars as pl

from koffline.data.columns import counted
from koffline.data.raw import RawLog, shaped_actions
from koffline.data.spaces import Discrete
from koffline.data.table.mapping import column_fault
from koffline.data.table.survey import Table, action_dtype, number_dtype
from koffline.errors import DataError

_ROUNDING = 1e-4  # by so much probabilities may exceed 1
_TRUE, _FALSE = ("true", "t", "yes", "y", "1", "1.0"), ("false", "f", "no", "n", "0", "0.0")


@dataclass
class TableCounts:
    """What was done to the rows, summed over all pieces of a table."""

    episodes: int = 0
    left_out: int = 0
    reordered: bool = False
    cut: int = 0
    derived: bool = False
    imputed: Counter[tuple[str, str]] = field(default_factory=Counter)

    def sentences(self) -> tuple[str, ...]:
        """Notes for people, in the order in which things were done."""
        notes = [
            f"{counted(count, 'missing value', f'in {column} was', f'in {column} were')} replaced ({how})"
            for (column, how), count in sorted(self.imputed.items())
        ]
        if self.reordered:
            notes.append("the rows of each episode were put together and in time order")
        if self.derived:
            lost = f"; {counted(self.left_out, 'row', 'was', 'were')} left out: the last step of an episode"
            lost = f"{lost} that did not terminate has no next observation in this table"
            taken = "next observations were taken from the rows that follow in time"
            notes.append(taken + (lost if self.left_out else ""))
        if self.cut:
            ending = counted(self.cut, "episode", "that ends", "that end")
            notes.append(f"{ending} without a flag {'was' if self.cut == 1 else 'were'} marked as truncated")
        return tuple(notes)


def assemble(frame: pl.DataFrame, table: Table, counts: TableCounts) -> RawLog | None:
    """Aligned columns of a piece that holds whole episodes; None where no row is left.

    Episodes are in order of first appearance, rows in time order. Raises DataError.
    """
    roles = table.roles
    frame = frame if roles.stands_alone else _ordered(frame, table, counts)
    named = {"terminated": roles.terminal, "truncated": roles.truncated}
    log = {flag: read_flags(frame, name, table.source).to_numpy() for flag, name in named.items()}
    if roles.stands_alone:
        episodes = np.arange(frame.height)
    elif roles.episode is None:
        episodes = np.append(0, np.cumsum(log["terminated"] | log["truncated"])[:-1])
    else:
        episodes = frame[roles.episode].rle_id().cast(pl.Int64).to_numpy()
    last = np.append(episodes[1:] != episodes[:-1], True)
    observed = _Columns(frame, episodes, table, counts)
    log["observations"] = observed.vectors(roles.observations)
    log["actions"] = _actions(frame, table)
    log["rewards"] = observed.single(roles.reward or "")
    if roles.weight is not None:
        log["weights"] = observed.single(roles.weight)
    if roles.behavior is not None:
        log["behavior_log_probabilities"] = _log_probabilities(observed.single(roles.behavior), table)
    if not roles.stands_alone:
        for flag, name in named.items():
            inside = log[flag] & ~last
            if inside.any():
                which = counted(int(inside.sum()), "row")
                goes_on = counted(len(np.unique(episodes[inside])), "episode")
                said = f"is set in {which} whose episode goes on afterwards ({goes_on})"
                remedy = "drop what follows, or give it another episode id"
                raise column_fault(table.source, name, f"{said}; {remedy}")
        log["episode_ids"] = counts.episodes + episodes
        kind = frame.schema.get(roles.episode or "", pl.String())
        if kind.is_integer() and kind != pl.UInt64:
            log["episode_ids"] = frame[roles.episode or ""].cast(pl.Int64).to_numpy()
        counts.episodes += int(episodes[-1]) + 1
    if not roles.next_observations:
        log = _with_next(log, last, roles.truncated is not None, counts)
    else:
        log["next_observations"] = observed.vectors(roles.next_observations)
        if roles.truncated is None and not roles.stands_alone:
            log["truncated"] = last & ~log["terminated"]
            counts.cut += int(log["truncated"].sum())
    return RawLog(log, table.action_space, table.metadata) if len(log["rewards"]) else None


def _with_next(
    log: dict[str, np.ndarray], last: np.ndarray, has_truncated: bool, counts: TableCounts
) -> dict[str, np.ndarray]:
    """Next observations from the rows below; last rows of open episodes are left out.

    After a termination the next observation has no influence: the row's own stands in for it.
    """
    lost = last & ~log["terminated"]
    cut = lost & log["truncated"] if has_truncated else lost
    moved = np.append(cut[1:] & ~last[:-1], False)
    counts.cut += 0 if has_truncated else int(moved.sum())
    counts.derived, counts.left_out = True, counts.left_out + int(lost.sum())
    log["truncated"] = log["truncated"] | moved
    kept = np.flatnonzero(~lost)
    following = log["observations"][kept + ~last[kept]]
    return {**{name: column[kept] for name, column in log.items()}, "next_observations": following}


def _ordered(frame: pl.DataFrame, table: Table, counts: TableCounts) -> pl.DataFrame:
    """Rows by episode, in order of first appearance, and time. Raises DataError for two at one time."""
    roles = table.roles
    row = pl.int_range(frame.height, dtype=pl.Int64, eager=True)
    keys = pl.DataFrame({"first": row, "time": row if roles.time is None else frame[roles.time]})
    if roles.episode is None:
        keys = keys.with_columns(first=pl.lit(0))
    else:
        keys = keys.with_columns(id=frame[roles.episode])
        keys = keys.select(pl.col("first").first().over("id"), "time")
    same, later = pl.col("first").diff() == 0, pl.col("time") >= pl.col("time").shift()
    if not keys.select(((pl.col("first").diff() > 0) | (same & later)).all()).item():
        order = keys.select(pl.arg_sort_by("first", "time", maintain_order=True)).to_series()
        keys, counts.reordered = keys[order], True
        frame = pl.DataFrame([column.rechunk().gather(order) for column in frame])
    doubles = keys.select(same & (pl.col("time") == pl.col("time").shift())).to_series()
    if roles.time is not None and doubles.any():
        place = int(doubles.arg_max() or 0)
        where = f"{roles.time} {keys['time'].cast(pl.String)[place]}"
        remedy = "name the episode column (--episode)"
        if roles.episode is not None:
            where = f"episode {frame[roles.episode][place]!r}, {where}"
            remedy = "drop the doubles, or name a finer time column"
        said = f"{counted(int(doubles.sum()), 'row', 'has', 'have')} the time of another row of their episode"
        raise DataError(f"{table.source}: {said} (first: {where}); {remedy}")
    return frame


@dataclass(frozen=True, eq=False)
class _Columns:
    """Columns of a frame in order as numbers, missing ones replaced as asked for."""

    frame: pl.DataFrame
    episodes: np.ndarray
    table: Table
    counts: TableCounts

    def vectors(self, columns: tuple[str, ...]) -> np.ndarray:
        """(N, d) in row order, or in the shape of an observation that koffline wrote as lists."""
        table, n_rows = self.table, self.frame.height
        width, shape = table.widths.get(columns[0]), table.observation_shape
        if width is None:
            found = np.empty((n_rows, len(columns)), dtype=table.observation_dtype)
            for i, name in enumerate(columns):
                found[:, i] = self._imputed(self.frame[name])
        else:
            numbers = self._imputed(self.frame[columns[0]].explode(empty_as_null=False))
            found = np.asarray(numbers, dtype=table.observation_dtype).reshape(n_rows, width)
        if shape is not None and int(np.prod(shape)) != found.shape[1]:
            raise DataError(f"{table.source}: the koffline description is damaged; write the file again")
        return found if shape is None else found.reshape(n_rows, *shape)

    def single(self, name: str) -> np.ndarray:
        """(N,)."""
        column = self.frame[name]
        return np.asarray(self._imputed(column), dtype=number_dtype([column.dtype]))

    def _imputed(self, column: pl.Series) -> np.ndarray:
        name, table, how = column.name, self.table, self.table.roles.impute.get(column.name)
        if column.dtype == pl.Boolean:
            column = column.cast(pl.Float64)
        if how is None or not table.missing[name]:
            return column.to_numpy()
        column = (column if column.dtype.is_float() else column.cast(pl.Float64)).fill_nan(None)
        count = column.null_count()
        if how == "forward":
            said = "the last value before"
            pairs = pl.DataFrame({"it": column, "episode": self.episodes})
            column = pairs.select(pl.col("it").forward_fill().over("episode")).to_series()
            if column.null_count():
                missing = counted(column.null_count(), "missing value")
                remedy = f"impute a number or the mean ({name}=mean)"
                raise column_fault(table.source, name, f"has {missing} with no earlier value; {remedy}")
        else:
            value = table.means[name] if how == "mean" else 0.0 if how == "zero" else float(how)
            said, column = f"{'mean ' * (how == 'mean')}{value:.6g}", column.fill_null(value)
        self.counts.imputed.update({(name, said): count} if count else {})
        return column.to_numpy()


def _actions(frame: pl.DataFrame, table: Table) -> np.ndarray:
    names = table.roles.action
    column = frame[names[0]]
    if table.categories:
        known = pl.Series(table.categories, dtype=column.dtype)
        column = column.replace_strict(known, range(len(known)), default=None, return_dtype=pl.Int64)
        found = column.to_numpy()
    elif len(names) > 1:
        found = frame.select(pl.col(names).cast(pl.Float64)).to_numpy(order="c")
    else:
        is_list = names[0] in table.widths
        column = column.explode(empty_as_null=False) if is_list else column
        found = column.to_numpy().reshape((frame.height, -1) if is_list else -1)
    found = found if table.categories else found.astype(action_dtype(table), copy=False)
    return shaped_actions(found, table.action_space)


def _log_probabilities(found: np.ndarray, table: Table) -> np.ndarray:
    is_log, is_discrete = table.roles.behavior_probability is None, isinstance(table.action_space, Discrete)
    above = found > (0 if is_log else 1) + _ROUNDING if is_discrete else np.zeros(len(found), bool)
    wrong = above if is_log else above | ~(found > 0)
    if wrong.any():
        rows = counted(int(wrong.sum()), "row", "holds", "hold")
        what = f"{'logarithm of a ' * is_log}probability of an action that was taken"
        remedy = "give --behavior-probability, or natural logarithms with --behavior-log-probability"
        said = f"holds {found[wrong][0]:g} ({rows} no {what}); {remedy}"
        raise column_fault(table.source, table.roles.behavior, said)
    return found if is_log else np.log(found)


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
        said = f"holds {column[int(wrong.arg_max() or 0)]!r} ({count} neither yes nor no)"
        raise column_fault(source, name, f"{said}; give true and false, or 1 and 0")
    return yes
