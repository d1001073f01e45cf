"""All errors and warnings of a log, not only the first one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from koffline.data import columns as checks
from koffline.data import remote
from koffline.data.disk.log import AnyLog, LazyTransitions, joined
from koffline.data.ends import rows_are_linked
from koffline.data.raw import RawLog
from koffline.data.spaces import Discrete
from koffline.data.statistics import ColumnStatistics, LogTally, tally_of
from koffline.data.structure import Structure, is_small, symptoms_of_log
from koffline.data.transitions import Transitions
from koffline.data.units import Part
from koffline.errors import DataError, counted, listed
from koffline.jobs import PassSettings
from koffline.store.files import digest_of

_FEW_EPISODES = 10
_FAR = 30.0  # standard deviations


@dataclass(frozen=True)
class Finding:
    """An error (koffline refuses the log) or a warning (it accepts the log)."""

    severity: Literal["error", "warning"]
    message: str


@dataclass
class RowCount:
    """Number of affected rows, and the first of them."""

    count: int = 0
    first: int = -1

    def add(self, is_so: np.ndarray, start: int) -> None:
        """Add the rows marked ``is_so`` in a block that begins at row ``start``; blocks
        come in order.
        """
        if is_so.any():
            self.merge(RowCount(int(is_so.sum()), int(is_so.argmax())), start)

    def merge(self, other: RowCount, start: int) -> None:
        """Add the count of a later part of the log that begins at row ``start``."""
        if not other.count:
            return
        if not self.count:
            self.first = start + other.first
        self.count += other.count

    def __str__(self) -> str:
        if self.count == 1:
            return f"row {self.first}"
        return f"{self.count} rows (first: row {self.first})"


class WarningTally(LogTally):
    """Statistics for warnings about valid rows; rows are numbered across all shards."""

    def __init__(self, log: AnyLog) -> None:
        super().__init__(log.action_space, log.observation_shape)
        self.weights = ColumnStatistics(())
        self._broken = RowCount()
        self._shifted = RowCount()
        self._first: Transitions | None = None  # first and last row so far
        self._last: Transitions | None = None
        self.structures = list[Structure]()
        self._has_parts = not is_small(log)
        # errors, and notes on shards that were edited
        self.errors = list[str]()
        self.edited = list[str]()

    def add_shard(self, log: AnyLog, shard: int, part: Part | None) -> None:
        """Add all rows of a shard, or collect its errors."""
        try:
            super().add_shard(log, shard, part)
            self.edited += _edited(log, shard)
        except DataError as error:
            assert isinstance(log, LazyTransitions), "rows in memory were checked"
            self.errors += _all_errors(log, shard) or [str(error)]

    def add(self, block: Transitions) -> None:
        """Add the next rows of a shard."""
        if block.weights is not None:
            self.weights.add(block.weights)
        if block.steps is not None:
            # Copies, not views: the block can then leave the memory.
            first = block.part(np.array([0]))
            last = block.part(np.array([len(block) - 1]))
            if self._last is not None:
                # Is the last row of the block before linked to the first one here?
                self._add_links(joined([self._last, first]), self.rows - 1)
            self._add_links(block, self.rows)
            if self._first is None:
                self._first = first
            self._last = last
        if self._has_parts:
            self.structures.append(Structure.of(block))
        super().add(block)

    def _add_links(self, rows: Transitions, start: int) -> None:
        """Count rows inside episodes that are not linked to the next row, and rows at
        cuts that are. rows: consecutive ones. start: the number of the first one.
        """
        linked = rows_are_linked(rows.observations, rows.next_observations)
        ends = rows.columns["steps"][1:] == 0
        self._broken.add(~linked & ~ends, start)
        self._shifted.add(linked & ends & ~rows.terminated[:-1], start)

    def merge(self, other: Any) -> None:
        """Add the tally of a later shard."""
        if self._last is not None and other._first is not None:
            self._add_links(joined([self._last, other._first]), self.rows - 1)
        self._broken.merge(other._broken, self.rows)
        self._shifted.merge(other._shifted, self.rows)
        self._first = self._first or other._first
        self._last = other._last or self._last
        super().merge(other)

    def messages(self, log: AnyLog) -> Iterator[str]:
        """Yield one sentence per warning about the log that was tallied."""
        count = self.episodes.lengths.count
        unfinished = self.episodes.unfinished
        if not count:
            yield (
                "no episodes: every row counts as an initial state, and intervals"
                " resample single rows"
            )
        elif count < _FEW_EPISODES:
            yield (
                f"only {counted(count, 'episode')}: an interval from so few is rough,"
                " or none"
            )
        if unfinished:
            yield (
                f"{counted(unfinished, 'episode', 'ends', 'end')} without a flag; taken"
                " as cut"
            )
        if self._broken.count:
            where = f"{self._broken} inside episodes"
            yield f"next observation is not the observation of the row below in {where}"
        symptoms = symptoms_of_log(log, parts=self.structures)
        yield from (symptom.text for symptom in symptoms)
        is_explained = any(
            symptom.test == "next observations of resets" for symptom in symptoms
        )
        if self._shifted.count and not is_explained:
            yield (
                "the next observation is the first one of the following episode in"
                f" {self._shifted}; is it one stream cut into pieces, or was it exported"
                " by shifting the observations by one?"
            )
        yield from self._messages_on_columns()
        if self.action_counts is not None:
            missing = np.flatnonzero(self.action_counts == 0)
            if missing.size:
                yield (
                    f"actions {listed(missing)} never appear: nothing can be learnt of"
                    " them"
                )
        space = log.action_space
        is_bounded = (
            isinstance(space, Discrete) or np.isfinite([*space.low, *space.high]).all()
        )
        if not is_bounded:
            yield (
                "action bounds are infinite; declare them (--continuous LOW HIGH) for"
                " uniform policies"
            )

    def _messages_on_columns(self) -> Iterator[str]:
        """Yield sentences on numbers that never change, and on those far from
        others."""
        if self.rows < 2:
            return
        statistics: dict[str, ColumnStatistics | None] = {}
        statistics["observations"] = self.observations
        if self.action_counts is None:
            statistics["actions"] = self.actions
        statistics["rewards"] = self.rewards
        for name, of_column in statistics.items():
            if of_column is None:
                continue
            constant = np.flatnonzero(of_column.minimum == of_column.maximum)
            n_columns = of_column.minimum.size
            if constant.size == n_columns == 1:
                yield f"{name} are all {of_column.minimum.item():g}"
            elif constant.size:
                yield (
                    f"{name}: {constant.size} of {n_columns} columns are constant"
                    f" ({listed(constant, 8)})"
                )
            yield from _extremes(name, of_column)


def _extremes(name: str, statistics: ColumnStatistics) -> Iterator[str]:
    """Yield a sentence if some numbers of a column lie far from the mean; 0/1 flags of
    rare categories are ignored.
    """
    above = np.ravel(statistics.maximum - statistics.mean)
    below = np.ravel(statistics.mean - statistics.minimum)
    is_flag = np.ravel((statistics.minimum == 0.0) & (statistics.maximum == 1.0))
    is_far = np.maximum(above, below) > _FAR * np.ravel(statistics.deviation)
    far = np.flatnonzero(is_far & ~is_flag)
    if not far.size:
        return
    first = far[0]
    extreme = np.ravel(statistics.minimum)[first]
    if above[first] > below[first]:
        extreme = np.ravel(statistics.maximum)[first]
    columns = ""
    if is_flag.size > 1:
        columns = f" in column {listed(far, 8)}"
    yield (
        f"{name}{columns} reach {extreme:g}, more than {_FAR:.0f} standard deviations"
        " from the mean; check whether that is an error"
    )


def inspect_log(
    log: RawLog | AnyLog, settings: PassSettings | None = None, progress: bool = False
) -> list[Finding]:
    """List all errors, each with the number of rows and the first row; warnings only if
    there are no errors.

    For a log on disk, the errors of all shards are found in one pass of bounded memory,
    and each names its shard. Rows in warnings are numbered across all shards. settings:
    where the pass runs.
    """
    if isinstance(log, RawLog):
        try:
            return inspect_log(log.transitions(), settings, progress)
        except DataError as error:
            messages = _all_errors(log, 0) or [str(error)]
            return [Finding("error", message) for message in messages]
    total = tally_of(log, WarningTally(log), settings=settings, progress=progress)
    if not total.errors and total.weights.maximum == 0:
        total.errors.append(
            "weights are all 0; give at least one row a positive weight"
        )
    if total.errors:
        return [Finding("error", message) for message in total.errors]
    warnings = (*total.edited, *total.messages(log))
    return [Finding("warning", message) for message in warnings]


def _all_errors(log: RawLog | LazyTransitions, shard: int) -> list[str]:
    """All errors in the values of a shard; empty if the error is of another kind."""
    counts: dict[str, tuple[RowCount, str]] = {}
    where = ""
    if not isinstance(log, RawLog):
        where = f"{log.shards[shard].name}: "
    unreadable = list[str]()
    try:
        for start, columns in _raw_blocks(log, shard):
            for fault in checks.value_faults(columns, log.action_space):
                rows, _ = counts.setdefault(
                    f"{fault.column}: {fault.problem} in", (RowCount(), fault.remedy)
                )
                is_bad = fault.is_bad.reshape(len(fault.is_bad), -1)
                rows.add(np.any(is_bad, axis=1), start)
    except DataError as error:  # a row that cannot be read
        unreadable = [str(error)]
    errors = [
        f"{where}{problem} {rows}; {remedy}"
        for problem, (rows, remedy) in counts.items()
        if rows.count
    ]
    return errors + unreadable


def _raw_blocks(
    log: RawLog | LazyTransitions, shard: int
) -> Iterator[tuple[int, Mapping[str, np.ndarray]]]:
    """Unchecked columns of a shard's rows in blocks, each with the number of its first
    row.
    """
    if isinstance(log, RawLog):
        for rows in checks.blocks(len(log.columns["rewards"])):
            block = {name: column[rows] for name, column in log.columns.items()}
            yield rows.start, block
        return
    with log.open_shard(shard) as opened:
        for rows in checks.blocks(log.shards[shard].rows):
            yield rows.start, opened.columns(rows.start, rows.stop)


def _edited(log: AnyLog, shard: int) -> list[str]:
    """A sentence if the rows or the file have changed since writing, according to their
    digest.
    """
    problem = "the rows are not those the file was written with: it was edited"
    if isinstance(log, Transitions):
        if log.metadata.sha256 not in (None, log.sha256):
            return [problem]
        return []
    info = log.shards[shard]
    if info.sha256 is None:
        return []
    with remote.local_file(info.name) as path:
        if digest_of(path) != info.sha256:
            return [f"{info.name}: {problem}"]
        return []
