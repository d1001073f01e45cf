"""Everything that is wrong with a log, not only the first thing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from koffline.data import columns as checks
from koffline.data import remote
from koffline.data.log_warnings import RowCount, WarningTally
from koffline.data.raw import RawLog
from koffline.data.spaces import ActionSpace, Discrete
from koffline.data.statistics import blocks_of
from koffline.data.transitions import Transitions
from koffline.errors import DataError
from koffline.store.run_record import digest_of

if TYPE_CHECKING:
    from koffline.data.disk.log import LazyTransitions
    from koffline.jobs import PassSettings

_MOST_HASHES = 2**20  # of different rows of a log on disk


@dataclass(frozen=True)
class Finding:
    """An error (koffline refuses the log) or a warning (it does not, but look)."""

    severity: Literal["error", "warning"]
    message: str


def inspect_log(
    log: RawLog | LazyTransitions, settings: PassSettings | None = None, progress: bool = False
) -> list[Finding]:
    """Look for all errors, each with the number of rows and the first of them; warnings only on sound logs.

    Of a log on disk the errors of all shards, each naming its shard, in one pass whose memory does not grow
    with the log: where more than a million rows differ, the number of repeated rows is an estimate. Rows in
    warnings are numbered through all shards. settings: where the pass runs.
    """
    from koffline.jobs import PassSettings

    names = ["the log"] if isinstance(log, RawLog) else [shard.name for shard in log.shards]
    passes = settings or PassSettings()
    tally: WarningTally | None = None
    errors: list[str] = []
    edited: list[str] = []
    for mapped in passes.map(inspect_shard, range(len(names)), log, lambda shard: names[shard], progress):
        if mapped.failure is not None:
            errors.append(mapped.failure.reason)
        elif isinstance(mapped.value, list):
            errors += mapped.value
        else:
            one, said = mapped.value
            edited += said
            if tally is None:
                tally = one
            else:
                tally.merge(one)
    if not errors and tally is not None and tally.is_weightless:
        errors.append("weights are all 0; give at least one row a positive weight")
    if errors or tally is None:
        return [Finding("error", message) for message in errors]
    return [Finding("warning", message) for message in (*edited, *tally.messages())]


def inspect_shard(log: RawLog | LazyTransitions, shard: int) -> list[str] | tuple[WarningTally, list[str]]:
    """Errors of one shard; without any, what its rows add to the warnings, and whether they were edited.

    For ``PassSettings.map``; a log in memory is one shard.
    """
    try:
        rows = log.transitions() if isinstance(log, RawLog) else log
        most_hashes = None if isinstance(log, RawLog) else _MOST_HASHES
        tally = WarningTally(rows.action_space, rows.has_episodes, most_hashes)
        for block in blocks_of(rows, shard):
            tally.add(block)
        tally.end_shard()
        return tally, _edited(rows, shard)
    except DataError as error:
        return _all_errors(log, shard) or [str(error)]


def _all_errors(log: RawLog | LazyTransitions, shard: int) -> list[str]:
    """All that is wrong with the values of a shard; empty where it is something else."""
    counts: dict[tuple[str, str], RowCount] = {}
    where, unreadable = "", []

    def count(columns: Mapping[str, np.ndarray], start: int) -> None:
        for what, remedy, bad in _wrong(columns, log.action_space):
            in_row = np.any(bad.reshape(len(bad), -1), axis=1)
            counts.setdefault((what, remedy), RowCount()).add(in_row, start)

    if isinstance(log, RawLog):
        for rows in checks.blocks(len(log.columns["rewards"])):
            count({name: column[rows] for name, column in log.columns.items()}, rows.start)
    else:
        where = f"{log.shards[shard].name}: "
        try:
            with log.open_shard(shard) as opened:
                for rows in checks.blocks(log.shards[shard].rows):
                    count(opened.columns(rows.start, rows.stop), rows.start)
        except DataError as error:  # from some row on
            unreadable = [str(error)]
    found = [f"{where}{what} {rows}; {remedy}" for (what, remedy), rows in counts.items() if rows.count]
    return found + unreadable


def _wrong(columns: Mapping[str, np.ndarray], space: ActionSpace) -> Iterator[tuple[str, str, np.ndarray]]:
    """What may be wrong with columns as they were read, its remedy, and where it is so, by row (and more)."""
    for name, column in columns.items():
        if column.dtype.kind == "f":
            yield f"{name}: NaN or infinite in", "drop or mend them", ~np.isfinite(column)
    actions, outside = columns["actions"], None
    if isinstance(space, Discrete) and actions.ndim == 1:  # of another shape: the record says so
        whole = np.trunc(np.where(np.isfinite(actions), actions, 0))
        fractions = np.isfinite(actions) & (whole != actions)
        yield "actions: not whole numbers in", "count actions from 0", fractions
        outside = np.isfinite(actions) & ((actions < 0) | (actions >= space.n))
    elif not isinstance(space, Discrete) and actions.shape[1:] == (space.k,):
        low, high = checks.tolerant_bounds(space)
        outside = (actions < low) | (actions > high)
    if outside is not None:
        yield f"actions: outside {space} in", "declare the space anew or mend them", outside
    for name in ("terminated", "truncated"):
        yield f"{name}: neither true nor false in", "give 0 or 1", (columns[name] != 0) & (columns[name] != 1)
    if "weights" in columns:
        yield "weights: negative in", "give weights of at least 0", columns["weights"] < 0


def _edited(log: Transitions | LazyTransitions, shard: int) -> list[str]:
    """A sentence where the rows, or the file, are others than those that were written."""
    said = "the rows are not those the file was written with: it was edited"
    if isinstance(log, Transitions):
        return [said] if log.metadata.sha256 not in (None, log.sha256) else []
    info = log.shards[shard]
    if info.sha256 is None:
        return []
    with remote.local_file(info.name) as path:
        return [f"{info.name}: {said}"] if digest_of(path) != info.sha256 else []
