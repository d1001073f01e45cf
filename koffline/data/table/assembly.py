"""Rows of whole episodes, as they stand in a table, made into the columns of transitions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from koffline.data.raw import RawLog, settle_actions
from koffline.data.spaces import Discrete
from koffline.data.table import values
from koffline.data.table.counts import TableCounts
from koffline.data.table.prepared import PreparedTable
from koffline.data.wording import counted
from koffline.errors import DataError

_ROUNDING = 1e-4  # by so much probabilities may exceed 1


@dataclass(frozen=True, eq=False)
class _Order:
    """Row order by episode and time (None: as they are), episode numbers by row, ids that are numbers."""

    rows: np.ndarray | None
    episodes: np.ndarray
    ids: np.ndarray | None

    @property
    def last(self) -> np.ndarray:
        """(N,) whether a row is the last of its episode."""
        return np.append(self.episodes[1:] != self.episodes[:-1], True)

    def sort(self, column: np.ndarray) -> np.ndarray:
        """The column in row order; itself where the rows are in order."""
        return column if self.rows is None else column[self.rows]


def assemble(table: Any, prepared: PreparedTable, counts: TableCounts) -> RawLog | None:
    """Aligned columns of a piece that holds whole episodes; None where no row is left.

    Episodes are in order of first appearance, rows in time order. Raises DataError.
    """
    roles = prepared.roles
    flags = _flags(table, prepared)
    order = _order_rows(table, prepared, flags, counts)
    log = {name: order.sort(column) for name, column in flags.items()}
    log["observations"] = _observations(roles.observations, table, prepared, order, counts)
    log["actions"] = order.sort(_actions(table, prepared))
    log["rewards"] = _single(roles.reward, table, prepared, order, counts)
    if roles.weight is not None:
        log["weights"] = _single(roles.weight, table, prepared, order, counts)
    if roles.behavior is not None:
        log["behavior_log_probabilities"] = _log_probabilities(table, prepared, order, counts)
    if not roles.stands_alone:
        _check_flags(log, order, prepared)
        log["episode_ids"] = order.ids if order.ids is not None else counts.episodes + order.episodes
        counts.episodes += int(order.episodes[-1]) + 1
    if roles.next_observations:
        log["next_observations"] = _observations(roles.next_observations, table, prepared, order, counts)
        _mark_cut(log, order, prepared, counts)
    else:
        _derive_next(log, order, prepared, counts)
    if not len(log["rewards"]):
        return None
    return RawLog(log, prepared.action_space, prepared.metadata)


def _flags(table: Any, prepared: PreparedTable) -> dict[str, np.ndarray]:
    roles, source = prepared.roles, prepared.source
    named = {"terminated": roles.terminal, "truncated": roles.truncated}
    return {
        flag: np.zeros(len(table), dtype=np.bool_)
        if column is None
        else values.flags(table.column(column), column, source)
        for flag, column in named.items()
    }


def _order_rows(
    table: Any, prepared: PreparedTable, flags: dict[str, np.ndarray], counts: TableCounts
) -> _Order:
    roles, ids = prepared.roles, None
    if roles.stands_alone:
        return _Order(None, np.arange(len(table)), None)
    codes = np.zeros(len(table), dtype=np.int64)
    if roles.episode is not None:
        codes, found = values.first_seen_codes(table.column(roles.episode))
        ids = _integer_ids(found)
    times = None if roles.time is None else values.sortable(table.column(roles.time))
    order = _Order(None, codes, None)
    if not _in_order(codes, times):
        rows = np.lexsort((codes,) if times is None else (times, codes))
        order = _Order(rows, codes[rows], None)
        counts.reordered = True
    codes = order.episodes
    if times is not None:
        _check_times(order.sort(times), order, table, prepared)
        if times.dtype.kind in "iu":
            counts.add_differences(np.diff(order.sort(times))[codes[1:] == codes[:-1]])
    if roles.episode is None:
        ends = order.sort(flags["terminated"] | flags["truncated"])
        codes = np.append(0, np.cumsum(ends)[:-1])
    return _Order(order.rows, codes, None if ids is None else ids[codes])


def _in_order(codes: np.ndarray, times: np.ndarray | None) -> bool:
    step = np.diff(codes)
    if (step < 0).any():
        return False
    return times is None or not ((step == 0) & (times[1:] < times[:-1])).any()


def _integer_ids(found: Any) -> np.ndarray | None:
    """Ids (E,) that are whole numbers stay; others are numbered."""
    import pyarrow as pa

    if not pa.types.is_integer(found.type) or found.type == pa.uint64():
        return None
    return np.asarray(found.to_numpy(zero_copy_only=False), dtype=np.int64)


def _check_times(times: np.ndarray, order: _Order, table: Any, prepared: PreparedTable) -> None:
    """Raise DataError for two rows of an episode at one time; ``times`` are in row order."""
    codes = order.episodes
    same = (codes[1:] == codes[:-1]) & (times[1:] == times[:-1])
    if not same.any():
        return
    column = prepared.roles.time
    place = int(order.sort(np.arange(len(times)))[int(np.argmax(same)) + 1])
    where = f"{column} {table.column(column)[place].cast('string').as_py()}"
    if prepared.roles.episode is not None:
        where = f"episode {table.column(prepared.roles.episode)[place].as_py()!r}, {where}"
        remedy = "drop the doubles, or name a finer time column"
    else:
        remedy = "name the episode column (--episode)"
    raise DataError(
        f"{prepared.source}: {counted(int(same.sum()), 'row', 'has', 'have')} the time of another row of "
        "their episode "
        f"(first: {where}); {remedy}"
    )


def _observations(
    columns: tuple[str, ...], table: Any, prepared: PreparedTable, order: _Order, counts: TableCounts
) -> np.ndarray:
    """(N, d) in row order, or in the shape of an observation that koffline wrote as lists."""
    dtype, width = prepared.kinds.observation_dtype, prepared.width
    if width is not None:
        found = order.sort(values.numbers(table.column(columns[0]), dtype, width))
        found = _imputed(columns[0], found, order, prepared, counts)
    else:
        found = np.empty((len(table), len(columns)), dtype=dtype)
        for i, name in enumerate(columns):
            column = order.sort(values.numbers(table.column(name), dtype))
            found[:, i] = _imputed(name, column, order, prepared, counts)
    shape = prepared.observation_shape
    if shape is None:
        return found
    if int(np.prod(shape)) != found.shape[1]:
        raise DataError(f"{prepared.source}: the koffline description is damaged; write the file again")
    return found.reshape(len(found), *shape)


def _single(name: str, table: Any, prepared: PreparedTable, order: _Order, counts: TableCounts) -> np.ndarray:
    dtype = values.number_dtype([prepared.kinds.types[name]])
    dtype = np.dtype(np.float32) if dtype == np.uint8 else dtype
    found = order.sort(values.numbers(table.column(name), dtype))
    return _imputed(name, found, order, prepared, counts)


def _imputed(
    name: str, column: np.ndarray, order: _Order, prepared: PreparedTable, counts: TableCounts
) -> np.ndarray:
    """The column (rows in order) with its NaNs replaced as asked for. Raises DataError."""
    how = prepared.roles.impute.get(name)
    if how is None or not prepared.survey.missing.get(name):
        return column
    missing = np.isnan(column)
    if not missing.any():
        return column
    if how == "forward":
        values_there, said = _values_before(name, column, missing, order, prepared), "the last value before"
    else:
        value = prepared.survey.means[name] if how == "mean" else 0.0 if how == "zero" else float(how)
        values_there, said = np.full_like(column, value), f"{'mean ' * (how == 'mean')}{value:.6g}"
    counts.imputed[name, said] += int(missing.sum())
    return np.where(missing, values_there, column).astype(column.dtype)


def _values_before(
    name: str, column: np.ndarray, missing: np.ndarray, order: _Order, prepared: PreparedTable
) -> np.ndarray:
    """(N,) the last value that is there, at or before each row of its episode. Raises DataError."""
    rows = np.arange(len(column))
    known = np.maximum.accumulate(np.where(missing, -1, rows))
    begins = np.append(True, order.last[:-1])
    lost = known < np.maximum.accumulate(np.where(begins, rows, 0))
    if lost.any():
        raise DataError(
            f"{prepared.source}: column {name} has {counted(int(lost.sum()), 'missing value')} with no "
            f"earlier value in the episode; impute a number or the mean ({name}=mean)"
        )
    return column[known]


def _actions(table: Any, prepared: PreparedTable) -> np.ndarray:
    import pyarrow as pa
    import pyarrow.compute as pc

    columns, kinds = prepared.roles.action, prepared.kinds
    first = values.plain(table.column(columns[0]))
    if prepared.categories:
        known = pa.array(prepared.categories, type=first.type)
        found = np.asarray(pc.index_in(first, value_set=known).to_numpy(zero_copy_only=False))
        return settle_actions(found.astype(np.int64), prepared.action_space, None).actions
    width = prepared.survey.widths.get(columns[0])
    if width is not None:
        found = values.numbers(first, kinds.action_dtype, width)
    elif len(columns) == 1:
        found = values.numbers(first, kinds.action_dtype)
    else:
        found = np.stack([values.numbers(table.column(n), kinds.action_dtype) for n in columns], axis=1)
    return settle_actions(found, prepared.action_space, None).actions


def _log_probabilities(table: Any, prepared: PreparedTable, order: _Order, counts: TableCounts) -> np.ndarray:
    name = prepared.roles.behavior
    assert name is not None, "called where a column is named"
    found, is_log = _single(name, table, prepared, order, counts), prepared.roles.behavior_is_log
    remedy = "give the probability of the action that was taken, or --behavior-log-probability"
    if not is_log:
        _refuse_rows(~(found > 0), "not above 0", remedy, name, found, prepared)
    if isinstance(prepared.action_space, Discrete):
        most = int(not is_log)
        if is_log:
            remedy = "give natural logarithms of probabilities, or --behavior-probability"
        _refuse_rows(found > most + _ROUNDING, f"above {most}", remedy, name, found, prepared)
    return found if is_log else np.log(found)


def _refuse_rows(
    wrong: np.ndarray, how: str, remedy: str, name: str, column: np.ndarray, prepared: PreparedTable
) -> None:
    if wrong.any():
        count = counted(int(wrong.sum()), "row", "is", "are")
        raise DataError(
            f"{prepared.source}: column {name} holds {column[wrong][0]:g} ({count} {how}); {remedy}"
        )


def _check_flags(log: dict[str, np.ndarray], order: _Order, prepared: PreparedTable) -> None:
    """Raise DataError where an episode goes on after its end."""
    names = {"terminated": prepared.roles.terminal, "truncated": prepared.roles.truncated}
    for flag, column in names.items():
        inside = log[flag] & ~order.last
        if inside.any():
            episodes = len(np.unique(order.episodes[inside]))
            rows = counted(int(inside.sum()), "row")
            raise DataError(
                f"{prepared.source}: column {column} is set in {rows} whose episode goes on afterwards "
                f"({counted(episodes, 'episode')}); drop what follows, or give it another episode id"
            )


def _mark_cut(
    log: dict[str, np.ndarray], order: _Order, prepared: PreparedTable, counts: TableCounts
) -> None:
    """Without a truncated column, an episode that did not terminate was cut where its rows end."""
    if prepared.roles.truncated is not None or prepared.roles.stands_alone:
        return
    log["truncated"] = order.last & ~log["terminated"]
    counts.cut += int(log["truncated"].sum())


def _derive_next(
    log: dict[str, np.ndarray], order: _Order, prepared: PreparedTable, counts: TableCounts
) -> None:
    """Next observations from the rows below; last rows of open episodes are left out.

    After a termination the next observation has no influence: the row's own stands in for it.
    """
    last = order.last
    counts.derived = True
    lost = last & ~log["terminated"]
    if prepared.roles.truncated is None:
        cut = lost
    else:
        cut = lost & log["truncated"]
    moved = np.append(cut[1:] & ~last[:-1], False)
    if prepared.roles.truncated is None:
        counts.cut += int(moved.sum())
    log["truncated"] = log["truncated"] | moved
    counts.left_out += int(lost.sum())
    kept = np.flatnonzero(~lost)
    following = log["observations"][kept + ~last[kept]]
    for name in log:
        log[name] = log[name][kept]
    log["next_observations"] = following
