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
from koffline.data.table.rows import number_dtype
from koffline.data.table.survey import Table, action_dtype
from koffline.data.table.times import shown_time
from koffline.errors import DataError

_ROUNDING = 1e-4  # by so much probabilities may exceed 1
_TRUE, _FALSE = ("true", "t", "yes", "y", "1", "1.0"), ("false", "f", "no", "n", "0", "0.0")
# More different time differences than this are no regular clock.
_MOST_GAPS = 1000
# A clock is regular where so many of its differences are one and the same.
_REGULAR = 0.9


@dataclass
class TableCounts:
    """What was done to the rows, summed over all pieces of a table."""

    episodes: int = 0
    left_out: int = 0
    reordered: bool = False
    cut: int = 0
    derived: bool = False
    imputed: Counter[tuple[str, str]] = field(default_factory=Counter)
    differences: Counter[int] = field(default_factory=Counter)  # of times, until there are too many

    def sentences(self) -> tuple[str, ...]:
        """Notes for people, in the order in which things were done."""
        notes = [
            f"{counted(count, 'missing value')} in {column} {_were(count)} replaced ({how})"
            for (column, how), count in sorted(self.imputed.items())
        ]
        if self.reordered:
            notes.append("the rows of each episode were put together and in time order")
        if 0 < len(self.differences) <= _MOST_GAPS:
            total = self.differences.total()
            usual, count = max(self.differences.items(), key=lambda item: (item[1], -item[0]))
            longer = sum(n for difference, n in self.differences.items() if difference > usual)
            if longer and count >= _REGULAR * total:
                notes.append(
                    f"{longer} of {counted(total, 'step')} within episodes span more time than the usual "
                    "one: where rows are missing, a next observation is the one after the gap"
                )
        if self.derived:
            lost = (
                f"; {counted(self.left_out, 'row', 'was', 'were')} left out: the last step of an episode "
                "that did not terminate has no next observation in this table"
            )
            lost = lost if self.left_out else ""
            notes.append(f"next observations were taken from the rows that follow in time{lost}")
        if self.cut:
            ending = counted(self.cut, "episode", "that ends", "that end")
            notes.append(f"{ending} without a flag {_were(self.cut)} marked as truncated")
        return tuple(notes)


def _were(count: int) -> str:
    return "was" if count == 1 else "were"


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows in order (None: as they are), the number of each one's episode, ids where those are numbers."""

    frame: pl.DataFrame
    order: pl.Series | None
    episodes: np.ndarray
    ids: np.ndarray | None = None

    def column(self, name: str) -> pl.Series:
        return _sorted(self.frame[name], self.order)


def _sorted(column: pl.Series, order: pl.Series | None) -> pl.Series:
    return column if order is None else column.rechunk().gather(order)


def assemble(frame: pl.DataFrame, table: Table, counts: TableCounts) -> RawLog | None:
    """Aligned columns of a piece that holds whole episodes; None where no row is left.

    Episodes are in order of first appearance, rows in time order. Raises DataError.
    """
    roles = table.roles
    named = {"terminated": roles.terminal, "truncated": roles.truncated}
    flags = {flag: read_flags(frame, name, table.source) for flag, name in named.items()}
    rows = _ordered(frame, table, flags["terminated"] | flags["truncated"], counts)
    log = {flag: _sorted(column, rows.order).to_numpy() for flag, column in flags.items()}
    last = np.append(rows.episodes[1:] != rows.episodes[:-1], True)
    log["observations"] = _observations(roles.observations, rows, table, counts)
    log["actions"] = _actions(rows, table)
    log["rewards"] = _single(roles.reward or "", rows, table, counts)
    if roles.weight is not None:
        log["weights"] = _single(roles.weight, rows, table, counts)
    if roles.behavior is not None:
        found = _single(roles.behavior, rows, table, counts)
        log["behavior_log_probabilities"] = _log_probabilities(found, table)
    if not roles.stands_alone:
        for flag, name in named.items():
            inside = log[flag] & ~last
            if inside.any():
                which = counted(int(inside.sum()), "row")
                episodes = counted(len(np.unique(rows.episodes[inside])), "episode")
                said = f"is set in {which} whose episode goes on afterwards ({episodes})"
                remedy = "drop what follows, or give it another episode id"
                raise column_fault(table.source, name, f"{said}; {remedy}")
        log["episode_ids"] = rows.ids if rows.ids is not None else counts.episodes + rows.episodes
        counts.episodes += int(rows.episodes[-1]) + 1
    if not roles.next_observations:
        log = _with_next(log, last, roles.truncated is not None, counts)
    else:
        log["next_observations"] = _observations(roles.next_observations, rows, table, counts)
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


def _ordered(frame: pl.DataFrame, table: Table, ends: pl.Series, counts: TableCounts) -> _Rows:
    """Rows by episode, in order of first appearance, and time."""
    roles = table.roles
    row = pl.int_range(frame.height, dtype=pl.Int64, eager=True)
    if roles.stands_alone:
        return _Rows(frame, None, row.to_numpy())
    keys = pl.DataFrame({"first": row, "time": row if roles.time is None else frame[roles.time]})
    if roles.episode is None:
        keys = keys.with_columns(first=pl.lit(0))
    else:
        keys = keys.with_columns(id=frame[roles.episode])
        keys = keys.select(pl.col("first").first().over("id"), "time")
    same, later = pl.col("first").diff() == 0, pl.col("time") >= pl.col("time").shift()
    order = None
    if not keys.select(((pl.col("first").diff() > 0) | (same & later)).all()).item():
        order = keys.select(pl.arg_sort_by("first", "time", maintain_order=True)).to_series()
        keys, counts.reordered = keys[order], True
    if roles.time is not None:
        _check_times(keys, _Rows(frame, order, row.to_numpy()), table, counts)
    if roles.episode is None:
        return _Rows(frame, order, np.append(0, np.cumsum(_sorted(ends, order).to_numpy())[:-1]))
    ids, kind = None, frame[roles.episode].dtype
    if kind.is_integer() and kind != pl.UInt64:
        ids = _sorted(frame[roles.episode], order).cast(pl.Int64).to_numpy()
    return _Rows(frame, order, keys["first"].rle_id().cast(pl.Int64).to_numpy(), ids)


def _check_times(keys: pl.DataFrame, rows: _Rows, table: Table, counts: TableCounts) -> None:
    """Count differences of times; raise DataError for two rows of an episode at one time."""
    roles, time = table.roles, keys["time"]
    inside = (keys["first"].diff() == 0).fill_null(False)
    same = inside & (time == time.shift()).fill_null(False)
    if same.any():
        place = int(same.arg_max() or 0)
        where = f"{roles.time} {shown_time(time[place], time.dtype)}"
        remedy = "name the episode column (--episode)"
        if roles.episode is not None:
            where = f"episode {rows.column(roles.episode)[place]!r}, {where}"
            remedy = "drop the doubles, or name a finer time column"
        said = f"{counted(int(same.sum()), 'row', 'has', 'have')} the time of another row of their episode"
        raise DataError(f"{table.source}: {said} (first: {where}); {remedy}")
    whole = time.to_physical()
    if whole.dtype.is_integer() and len(counts.differences) <= _MOST_GAPS:
        found = whole.diff().filter(inside).value_counts(name="n").head(2 * _MOST_GAPS)
        counts.differences.update(dict(found.iter_rows()))


def _observations(columns: tuple[str, ...], rows: _Rows, table: Table, counts: TableCounts) -> np.ndarray:
    """(N, d) in row order, or in the shape of an observation that koffline wrote as lists."""
    n_rows, width, shape = rows.frame.height, table.widths.get(columns[0]), table.observation_shape
    if width is None:
        found = np.empty((n_rows, len(columns)), dtype=table.observation_dtype)
        for i, name in enumerate(columns):
            found[:, i] = _imputed(rows.column(name), rows, table, counts)
    else:
        column = rows.column(columns[0])
        if column.null_count():  # a constant is asked for
            nothing = pl.Series([[None] * width], dtype=pl.List(column.dtype.inner))  # type: ignore[attr-defined]
            column = (
                column.cast(nothing.dtype)
                .to_frame("it")
                .select(pl.col("it").fill_null(nothing.first()))["it"]
            )
            column = column.alias(columns[0])
        numbers = _imputed(column.explode(empty_as_null=False), rows, table, counts)
        found = np.asarray(numbers, dtype=table.observation_dtype).reshape(n_rows, width)
    if shape is not None and int(np.prod(shape)) != found.shape[1]:
        raise DataError(f"{table.source}: the koffline description is damaged; write the file again")
    return found if shape is None else found.reshape(n_rows, *shape)


def _single(name: str, rows: _Rows, table: Table, counts: TableCounts) -> np.ndarray:
    column = rows.column(name)
    return np.asarray(_imputed(column, rows, table, counts), dtype=number_dtype([column.dtype]))


def _imputed(column: pl.Series, rows: _Rows, table: Table, counts: TableCounts) -> np.ndarray:
    """The column (rows in order) with missing values replaced as asked for. Raises DataError."""
    name, how = column.name, table.impute.get(column.name)
    if column.dtype.is_decimal() or column.dtype == pl.Boolean:
        column = column.cast(pl.Float64)
    if how is None or not table.missing[name]:
        return column.to_numpy()
    column = (column if column.dtype.is_float() else column.cast(pl.Float64)).fill_nan(None)
    count = column.null_count()
    if how == "forward":
        said = "the last value before"
        pairs = pl.DataFrame({"it": column, "episode": rows.episodes})
        column = pairs.select(pl.col("it").forward_fill().over("episode")).to_series()
        if column.null_count():
            said = f"has {counted(column.null_count(), 'missing value')} with no earlier value in the episode"
            raise column_fault(table.source, name, f"{said}; impute a number or the mean ({name}=mean)")
    else:
        value = table.means[name] if how == "mean" else 0.0 if how == "zero" else float(how)
        said, column = f"{'mean ' * (how == 'mean')}{value:.6g}", column.fill_null(value)
    counts.imputed.update({(name, said): count} if count else {})
    return column.to_numpy()


def _actions(rows: _Rows, table: Table) -> np.ndarray:
    names, frame = table.roles.action, rows.frame
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
        column = column.cast(pl.Float64) if column.dtype.is_decimal() else column
        found = column.to_numpy().reshape((frame.height, -1) if is_list else -1)
    found = found if table.categories else found.astype(action_dtype(table), copy=False)
    settled = shaped_actions(found, table.action_space)
    return settled if rows.order is None else settled[rows.order.to_numpy()]


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
