"""Everything that is wrong with a log, not only the first thing."""

from __future__ import annotations

from collections.abc import Mapping
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
    from koffline.jobs.mapping import PassSettings

_MOST_HASHES = 2**20  # of different rows of a log on disk


@dataclass(frozen=True)
class Finding:
    """An error (koffline refuses the log) or a warning (it does not, but look)."""

    severity: Literal["error", "warning"]
    message: str


@dataclass(frozen=True, eq=False)
class ShardFindings:
    """Errors of one shard; without any, what its rows add to the warnings.

    edited: says so where the rows are not those that were written.
    """

    errors: tuple[str, ...]
    warnings: WarningTally | None = None
    edited: str | None = None


def inspect_log(
    log: RawLog | LazyTransitions, settings: PassSettings | None = None, progress: bool = False
) -> list[Finding]:
    """Look for all errors, each with the number of rows and the first of them; warnings only on sound logs.

    Of a log on disk the errors of all shards, each naming its shard, in one pass whose memory does not grow
    with the log: where more than a million rows differ, the number of repeated rows is an estimate. Rows in
    warnings are numbered through all shards. settings: where the pass runs.
    """
    from koffline.jobs.mapping import PassSettings

    names = ["the log"] if isinstance(log, RawLog) else [shard.name for shard in log.shards]
    passes = settings or PassSettings()
    warnings: WarningTally | None = None
    errors: list[str] = []
    edited: list[str] = []
    for mapped in passes.map(inspect_shard, range(len(names)), log, lambda shard: names[shard], progress):
        if mapped.failure is not None:
            errors.append(mapped.failure.reason)
            continue
        errors += mapped.value.errors
        edited += [mapped.value.edited] if mapped.value.edited else []
        if warnings is None or errors:
            warnings = mapped.value.warnings
        else:
            warnings.merge(mapped.value.warnings)
    if not errors and warnings is not None:
        if not warnings.is_weightless:
            return [Finding("warning", message) for message in (*edited, *warnings.messages())]
        errors.append("weights are all 0; give at least one row a positive weight")
    return [Finding("error", message) for message in errors]


def inspect_shard(log: RawLog | LazyTransitions, shard: int) -> ShardFindings:
    """Look through one shard, for ``PassSettings.map``; a log in memory is one."""
    try:
        rows = log.transitions() if isinstance(log, RawLog) else log
        most_hashes = None if isinstance(log, RawLog) else _MOST_HASHES
        tally = WarningTally(rows.action_space, rows.has_episodes, most_hashes)
        for block in blocks_of(rows, shard):
            tally.add(block)
        tally.end_shard()
        return ShardFindings((), tally, _edited(rows, shard))
    except DataError as error:
        return ShardFindings(tuple(_all_errors(log, shard) or [str(error)]))


def _all_errors(log: RawLog | LazyTransitions, shard: int) -> list[str]:
    """All that is wrong with the values of a shard; empty where it is something else."""
    tally = ErrorTally(log.action_space)
    if isinstance(log, RawLog):
        for rows in checks.blocks(len(log.columns["rewards"])):
            tally.add({name: column[rows] for name, column in log.columns.items()}, rows.start)
        return tally.messages()
    name, unreadable = log.shards[shard].name, []
    try:
        with log.open_shard(shard) as opened:
            for rows in checks.blocks(log.shards[shard].rows):
                tally.add(opened.columns(rows.start, rows.stop), rows.start)
    except DataError as error:  # from some row on
        unreadable = [str(error)]
    return [*(f"{name}: {message}" for message in tally.messages()), *unreadable]


def _edited(log: Transitions | LazyTransitions, shard: int) -> str | None:
    """A sentence where the rows, or the file, are others than those that were written."""
    said = "the rows are not those the file was written with: it was edited"
    if isinstance(log, Transitions):
        return said if log.metadata.sha256 not in (None, log.sha256) else None
    info = log.shards[shard]
    if info.sha256 is None:
        return None
    with remote.local_file(info.name) as path:
        return f"{info.name}: {said}" if digest_of(path) != info.sha256 else None


class ErrorTally:
    """Errors in columns as they were read, values unchecked; blocks of any size, in order."""

    def __init__(self, space: ActionSpace) -> None:
        self._space = space
        self._found: dict[tuple[tuple[int, int], str, str], RowCount] = {}

    def add(self, columns: Mapping[str, np.ndarray], start: int) -> None:
        """The next rows, the first of which is row ``start``."""
        for i, (name, column) in enumerate(columns.items()):
            if column.dtype.kind == "f":
                bad = _rows_of(~np.isfinite(column))
                self._count((0, i), f"{name}: NaN or infinite in", "drop or mend them", bad, start)
        self._add_actions(columns["actions"], start)
        for i, name in enumerate(("terminated", "truncated")):
            bad = _rows_of((columns[name] != 0) & (columns[name] != 1))
            self._count((2, i), f"{name}: neither true nor false in", "give 0 or 1", bad, start)
        if "weights" in columns:
            bad = _rows_of(columns["weights"] < 0)
            self._count((3, 0), "weights: negative in", "give weights of at least 0", bad, start)

    def messages(self) -> list[str]:
        """One sentence for each kind of error."""
        ordered = sorted(self._found.items(), key=lambda item: item[0][0])
        return [f"{what} {rows}; {remedy}" for (_, what, remedy), rows in ordered]

    def _add_actions(self, actions: np.ndarray, start: int) -> None:
        space = self._space
        if isinstance(space, Discrete):
            if actions.ndim != 1:
                return  # the record says what is wrong with the shape
            finite = np.isfinite(actions)
            fractions = finite & (np.trunc(np.where(finite, actions, 0)) != actions)
            what = "actions: not whole numbers in"
            self._count((1, 0), what, "count actions from 0", _rows_of(fractions), start)
            outside = finite & ((actions < 0) | (actions >= space.n))
        elif actions.shape[1:] == (space.k,):
            low, high = checks.tolerant_bounds(space)
            outside = (actions < low) | (actions > high)
        else:
            return
        remedy = "declare the space anew or mend them"
        self._count((1, 1), f"actions: outside {space} in", remedy, _rows_of(outside), start)

    def _count(self, place: tuple[int, int], what: str, remedy: str, rows: np.ndarray, start: int) -> None:
        if rows.size:
            self._found.setdefault((place, what, remedy), RowCount()).add(rows, start)


def _rows_of(bad: np.ndarray) -> np.ndarray:
    """Rows in which anything is true."""
    flat = np.asarray(bad).reshape(len(bad), -1)
    return np.flatnonzero(flat.any(axis=1))
