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
        if other.count:
            self.first = self.first if self.count else start + other.first
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
            # copies
            first = block.part(np.array([0]))
            last = block.part(np.array([len(block) - 1]))
            if self._last is not None:
                self._add_links(joined([self._last, first]), self.rows - 1)
            self._add_links(block, self.rows)
            self._first = self._first or first
            self._last = last
        if self._has_parts:
            self.structures.append(Structure.of(block))
        super().add(block)

    def _add_links(self, rows: Transitions, start: int) -> None:
        """Count rows inside episodes that are not linked to the next row, and rows at
        cuts that are.
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
        space = log.action_space
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
            cause = (
                "one stream cut into pieces, or was it exported by shifting the"
                " observations by one"
            )
            first = f"the first one of the following episode in {self._shifted}"
            yield f"the next observation is {first}; is it {cause}?"
        actions = self.actions if self.action_counts is None else None
        named = {
            "observations": self.observations,
            "actions": actions,
            "rewards": self.rewards,
        }
        for name, found in named.items():
            if found is None or self.rows < 2:
                continue
            constant = np.flatnonzero(found.minimum == found.maximum)
            if constant.size == found.minimum.size == 1:
                yield f"{name} are all {found.minimum.item():g}"
            elif constant.size:
                shown = f"{constant.size} of {found.minimum.size} columns are constant"
                yield f"{name}: {shown} ({listed(constant, 8)})"
            yield from _extremes(name, found)
        if (
            self.action_counts is not None
            and (missing := np.flatnonzero(self.action_counts == 0)).size
        ):
            yield (
                f"actions {listed(missing)} never appear: nothing can be learnt of them"
            )
        if (
            not isinstance(space, Discrete)
            and not np.isfinite([*space.low, *space.high]).all()
        ):
            yield (
                "action bounds are infinite; declare them (--continuous LOW HIGH) for"
                " uniform policies"
            )


def _extremes(name: str, found: ColumnStatistics) -> Iterator[str]:
    """Yield a sentence if some numbers lie far from the mean; 0/1 flags of rare
    categories are ignored.
    """
    gaps = np.ravel(found.maximum - found.mean), np.ravel(found.mean - found.minimum)
    is_flag = np.ravel((found.minimum == 0.0) & (found.maximum == 1.0))
    far = np.flatnonzero(
        (np.maximum(*gaps) > _FAR * np.ravel(found.deviation)) & ~is_flag
    )
    if far.size:
        if gaps[0][far[0]] > gaps[1][far[0]]:
            side = found.maximum
        else:
            side = found.minimum
        if is_flag.size > 1:
            columns = f" in column {listed(far, 8)}"
        else:
            columns = ""
        said = (
            f"{name}{columns} reach {np.ravel(side)[far[0]]:g}, more than {_FAR:.0f}"
            " standard deviations"
        )
        yield f"{said} from the mean; check whether that is an error"


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
            return [
                Finding("error", said) for said in _all_errors(log, 0) or [str(error)]
            ]
    total = tally_of(log, WarningTally(log), settings=settings, progress=progress)
    if not total.errors and total.weights.maximum == 0:
        total.errors.append(
            "weights are all 0; give at least one row a positive weight"
        )
    if total.errors:
        return [Finding("error", said) for said in total.errors]
    return [Finding("warning", said) for said in (*total.edited, *total.messages(log))]


def _all_errors(log: RawLog | LazyTransitions, shard: int) -> list[str]:
    """All errors in the values of a shard; empty if the error is of another kind."""
    counts: dict[str, tuple[RowCount, str]] = {}
    if isinstance(log, RawLog):
        where = ""
    else:
        where = f"{log.shards[shard].name}: "
    unreadable = list[str]()
    try:
        for start, columns in _raw_blocks(log, shard):
            for name, what, remedy, bad in checks.value_faults(
                columns, log.action_space
            ):
                counted_rows, _ = counts.setdefault(
                    f"{name}: {what} in", (RowCount(), remedy)
                )
                counted_rows.add(np.any(bad.reshape(len(bad), -1), axis=1), start)
    except DataError as error:  # a row that cannot be read
        unreadable = [str(error)]
    found = [
        f"{where}{said} {rows}; {remedy}"
        for said, (rows, remedy) in counts.items()
        if rows.count
    ]
    return found + unreadable


def _raw_blocks(
    log: RawLog | LazyTransitions, shard: int
) -> Iterator[tuple[int, Mapping[str, np.ndarray]]]:
    """Unchecked columns of a shard's rows in blocks, each with the number of its first
    row.
    """
    if isinstance(log, RawLog):
        for rows in checks.blocks(len(log.columns["rewards"])):
            yield (
                rows.start,
                {name: column[rows] for name, column in log.columns.items()},
            )
        return
    with log.open_shard(shard) as opened:
        for rows in checks.blocks(log.shards[shard].rows):
            yield rows.start, opened.columns(rows.start, rows.stop)


def _edited(log: AnyLog, shard: int) -> list[str]:
    """A sentence if the rows or the file have changed since writing, according to their
    digest.
    """
    said = "the rows are not those the file was written with: it was edited"
    if isinstance(log, Transitions):
        if log.metadata.sha256 not in (None, log.sha256):
            return [said]
        return []
    info = log.shards[shard]
    if info.sha256 is None:
        return []
    with remote.local_file(info.name) as path:
        if digest_of(path) != info.sha256:
            return [f"{info.name}: {said}"]
        return []
