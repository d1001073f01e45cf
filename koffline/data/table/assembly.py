"""Rows of whole episodes, as they stand in a table, made into the columns of transitions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from koffline.data.raw import RawLog, settle_actions
from koffline.data.table import values
from koffline.data.table.counts import TableCounts
from koffline.data.table.prepared import PreparedTable
from koffline.errors import DataError


@dataclass(frozen=True, eq=False)
class _Order:
    """Row order by episode and time, each ordered row's episode number, and ids where they are numbers."""

    rows: np.ndarray
    episodes: np.ndarray
    ids: np.ndarray | None

    @property
    def last(self) -> np.ndarray:
        """(N,) whether a row is the last of its episode."""
        return np.append(self.episodes[1:] != self.episodes[:-1], True)


def assemble(table: Any, prepared: PreparedTable, counts: TableCounts) -> RawLog | None:
    """Aligned columns of a piece that holds whole episodes; None where no row is left.

    Episodes are in order of first appearance, rows in time order. Raises DataError.
    """
    roles = prepared.roles
    flags = _flags(table, prepared)
    order = _order_rows(table, prepared, flags, counts)
    log = {name: column[order.rows] for name, column in flags.items()}
    log["observations"] = _observations(roles.observations, table, prepared, order, counts)
    log["actions"] = _actions(table, prepared)[order.rows]
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
    roles, n_rows = prepared.roles, len(table)
    rows, ids = np.arange(n_rows), None
    if roles.stands_alone:
        return _Order(rows, rows, None)
    codes = np.zeros(n_rows, dtype=np.int64)
    if roles.episode is not None:
        codes, found = values.first_seen_codes(table.column(roles.episode))
        ids = _integer_ids(found)
    times = None if roles.time is None else values.sortable(table.column(roles.time))
    if not _in_order(codes, times):
        rows = np.lexsort((codes,) if times is None else (times, codes))
        counts.reordered = True
    codes = codes[rows]
    if times is not None:
        _check_times(times[rows], codes, rows, table, prepared)
        if times.dtype.kind in "iu" and not values.is_text(prepared.kinds.types[roles.time or ""]):
            inside = codes[1:] == codes[:-1]
            counts.add_differences(np.diff(times[rows])[inside])
    if roles.episode is None:
        ends = (flags["terminated"] | flags["truncated"])[rows]
        codes = np.append(0, np.cumsum(ends)[:-1])
    return _Order(rows, codes, None if ids is None else ids[codes])


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


def _check_times(
    times: np.ndarray, codes: np.ndarray, rows: np.ndarray, table: Any, prepared: PreparedTable
) -> None:
    same = (codes[1:] == codes[:-1]) & (times[1:] == times[:-1])
    if not same.any():
        return
    column = prepared.roles.time
    place = int(rows[int(np.argmax(same)) + 1])
    where = f"{column} {table.column(column)[place].as_py()}"
    if prepared.roles.episode is not None:
        where = f"episode {table.column(prepared.roles.episode)[place].as_py()!r}, {where}"
        remedy = "drop the doubles, or name a finer time column"
    else:
        remedy = "name the episode column (--episode)"
    raise DataError(
        f"{prepared.source}: {int(same.sum())} rows have the time of another row of their episode "
        f"(first: {where}); {remedy}"
    )


def _observations(
    columns: tuple[str, ...], table: Any, prepared: PreparedTable, order: _Order, counts: TableCounts
) -> np.ndarray:
    """(N, d) in row order, or in the shape of an observation that koffline wrote as lists."""
    dtype, width = prepared.kinds.observation_dtype, prepared.width
    if width is not None:
        found = values.numbers(table.column(columns[0]), dtype, width)[order.rows]
        _impute(columns[0], found, order, prepared, counts)
    else:
        found = np.empty((len(order.rows), len(columns)), dtype=dtype)
        for i, name in enumerate(columns):
            found[:, i] = values.numbers(table.column(name), dtype)[order.rows]
            _impute(name, found[:, i], order, prepared, counts)
    shape = prepared.observation_shape
    if shape is None:
        return found
    if int(np.prod(shape)) != found.shape[1]:
        raise DataError(f"{prepared.source}: the koffline description is damaged; write the file again")
    return found.reshape(len(found), *shape)


def _single(name: str, table: Any, prepared: PreparedTable, order: _Order, counts: TableCounts) -> np.ndarray:
    dtype = values.number_dtype([prepared.kinds.types[name]])
    dtype = np.dtype(np.float32) if dtype == np.uint8 else dtype
    found = values.numbers(table.column(name), dtype)[order.rows]
    _impute(name, found, order, prepared, counts)
    return found


def _impute(
    name: str, found: np.ndarray, order: _Order, prepared: PreparedTable, counts: TableCounts
) -> None:
    """Replace the NaNs of a column (rows in order) in place, as asked for. Raises DataError."""
    how = prepared.roles.impute.get(name)
    if how is None or not prepared.survey.missing.get(name):
        return
    missing = np.isnan(found)
    if not missing.any():
        return
    if how == "forward":
        known = np.where(missing, -1, np.arange(len(found)))
        earlier = np.maximum.accumulate(known)
        starts = np.flatnonzero(np.append(True, order.last[:-1]))
        start = np.repeat(starts, np.diff(np.append(starts, len(found))))
        lost = missing & (earlier < start)
        if lost.any():
            raise DataError(
                f"{prepared.source}: column {name} has {int(lost.sum())} missing values with no earlier "
                f"value in their episode; impute a number or the mean ({name}=mean)"
            )
        found[missing] = found[earlier[missing]]
        said = "the last value before in the episode"
    else:
        value = prepared.survey.means[name] if how == "mean" else 0.0 if how == "zero" else float(how)
        found[missing] = value
        said = f"mean {value:.6g}" if how == "mean" else f"{value:.6g}"
    counts.imputed[name, said] += int(missing.sum())


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
    found = _single(name, table, prepared, order, counts)
    if prepared.roles.behavior_is_log:
        return found
    wrong = ~(found > 0)
    if wrong.any():
        raise DataError(
            f"{prepared.source}: column {name} holds {found[wrong][0]:g} ({int(wrong.sum())} rows are not "
            "above 0); give the probability of the action that was taken, or --behavior-log-probability"
        )
    return np.log(found)


def _check_flags(log: dict[str, np.ndarray], order: _Order, prepared: PreparedTable) -> None:
    """Raise DataError where an episode goes on after its end."""
    names = {"terminated": prepared.roles.terminal, "truncated": prepared.roles.truncated}
    for flag, column in names.items():
        inside = log[flag] & ~order.last
        if inside.any():
            episodes = len(np.unique(order.episodes[inside]))
            raise DataError(
                f"{prepared.source}: column {column} is set in {int(inside.sum())} rows whose episode goes "
                f"on afterwards ({episodes} episodes); drop what follows, or give it another episode id"
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
    observations, last = log["observations"], order.last
    following = np.empty_like(observations)
    following[:-1] = observations[1:]
    following[last] = observations[last]
    log["next_observations"] = following
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
    for name in log:
        log[name] = log[name][~lost]
