"""Statistics of rows and episodes, added up block by block in memory that does not grow with the log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from koffline.data import columns as checks
from koffline.data.disk.samples import Part
from koffline.data.row_block import RowBlock
from koffline.data.transitions import Transitions
from koffline.errors import DataError

if TYPE_CHECKING:
    from koffline.data.disk.log import LazyTransitions
    from koffline.jobs import PassSettings


# float64 is a whole number of 53 bits times 2^(e − 53), with e at least −1073; all are whole at this scale.
_MANTISSA_BITS, _HALF_BITS, SCALE_BITS = 53, 27, 1126
# So many halves of a mantissa add up exactly in float64, which bincount counts in.
_MOST_ROWS = 2**25


def exact_sum(column: np.ndarray) -> int:
    """Σ x · 2^1126 of finite numbers as a whole number: mantissas are added up by exponent, in two halves."""
    total = 0
    for start in range(0, len(column), _MOST_ROWS):
        part = np.asarray(column[start : start + _MOST_ROWS], dtype=np.float64)
        fractions, exponents = np.frexp(part)
        mantissas = np.ldexp(fractions, _MANTISSA_BITS).astype(np.int64)
        lowest = int(exponents.min(initial=0))
        halves = (mantissas >> _HALF_BITS, _HALF_BITS), (mantissas & (2**_HALF_BITS - 1), 0)
        for half, shift in halves:
            sums = np.bincount(exponents - lowest, weights=half)
            for place in np.flatnonzero(sums):
                power = lowest + int(place) - _MANTISSA_BITS + SCALE_BITS + shift
                total += int(sums[place]) << power
    return total


class Tally:
    """Counts of some rows, to which those of others can be added."""

    def merge(self, other: Any) -> None:
        """Add other rows: numbers are summed, tallies merged."""
        for name, value in vars(other).items():
            if isinstance(value, Tally):
                getattr(self, name).merge(value)
            elif value is not None:
                setattr(self, name, getattr(self, name) + value)


@dataclass(frozen=True)
class Spread:
    """Least, mean and greatest of some numbers."""

    min: float
    mean: float
    max: float


class Spreads(Tally):
    """Least, mean and greatest of k columns of numbers; the means are rounded once, at the end."""

    def __init__(self, columns: int) -> None:
        self.count = 0
        self.low, self.high = np.full(columns, np.inf), np.full(columns, -np.inf)
        self._sums = [0] * columns

    def add(self, values: np.ndarray) -> None:
        """Rows (B, k)."""
        if len(values):
            block = Spreads(0)
            block.count, block.low, block.high = len(values), values.min(axis=0), values.max(axis=0)
            block._sums = [exact_sum(column) for column in values.T]
            self.merge(block)

    def merge(self, other: Any) -> None:
        """Add other rows."""
        self.count += other.count
        self.low, self.high = np.minimum(self.low, other.low), np.maximum(self.high, other.high)
        self._sums = [a + b for a, b in zip(self._sums, other._sums, strict=True)]

    def spreads(self) -> tuple[Spread, ...]:
        """(k). Raises OverflowError for a sum above the largest float."""
        means = [total / (1 << SCALE_BITS) / self.count for total in self._sums]
        return tuple(map(Spread, self.low.tolist(), means, self.high.tolist()))


class EpisodeTally(Tally):
    """Episodes of one shard after another: returns, lengths, and how they end."""

    def __init__(self) -> None:
        self.returns, self.lengths, self.cuts = Spreads(1), Spreads(1), Spreads(1)
        self.unfinished = 0
        # of the episode that goes on in the next block: return and length so far, flags of its last row
        self._open: tuple[float, int, bool, bool] | None = None

    def add(self, block: RowBlock) -> None:
        """The next rows of a shard."""
        assert block.steps is not None, "called for logs with episodes"
        begins = block.steps == 0
        segment = np.cumsum(begins)
        carried = self._open or (0.0, 0, False, False)
        # bincount adds from first to last, so that returns do not depend on where blocks are cut
        returns = np.bincount(np.append(0, segment), weights=np.append(carried[0], block.rewards))
        lengths = np.bincount(segment, minlength=len(returns))
        lengths[0] += carried[1]
        last = np.flatnonzero(np.append(begins[1:], True))
        terminated, truncated = block.terminated[last], block.truncated[last]
        if begins[0]:  # the open episode ended with the block before
            terminated, truncated = np.append(carried[2], terminated), np.append(carried[3], truncated)
        self._open = float(returns[-1]), int(lengths[-1]), bool(terminated[-1]), bool(truncated[-1])
        # with no episode open, what comes before the first step is none
        ended = slice(int(carried[1] == 0), -1)
        self._take(returns[ended], lengths[ended], terminated[ended], truncated[ended])

    def end_shard(self) -> None:
        """The open episode is over."""
        if self._open is not None:
            self._take(*(np.array([value]) for value in self._open))
        self._open = None

    @property
    def time_limit(self) -> int | None:
        """The length that all cut episodes share and none exceeds."""
        shared = self.cuts.low[0] == self.cuts.high[0] == self.lengths.high[0]
        return int(self.cuts.high[0]) if shared else None

    def _take(
        self, returns: np.ndarray, lengths: np.ndarray, terminated: np.ndarray, truncated: np.ndarray
    ) -> None:
        self.returns.add(returns[:, None])
        self.lengths.add(lengths[:, None])
        self.cuts.add(lengths[truncated & ~terminated, None])
        self.unfinished += int(np.sum(~(terminated | truncated)))


class ColumnStatistics(Tally):
    """Mean, standard deviation (of the population), least and greatest of the rows (B, ...) of a column.

    Means and deviations are of the numbers as float32, which is what d3rlpy sees.
    (Chan, Golub and LeVeque 1979, the pairwise update)
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.count = 0
        self.mean, self._squares = np.zeros(shape), np.zeros(shape)
        self.minimum, self.maximum = np.full(shape, np.inf), np.full(shape, -np.inf)

    @classmethod
    def of(cls, column: np.ndarray) -> ColumnStatistics:
        """Of a column in memory."""
        found = cls(column.shape[1:])
        for rows in checks.blocks(len(column)):
            found.add(column[rows])
        return found

    @property
    def deviation(self) -> np.ndarray:
        """Of all rows so far, of which there are some."""
        return np.asarray(np.sqrt(self._squares / self.count))

    def add(self, values: np.ndarray) -> None:
        """Rows (B, ...)."""
        if len(values):
            seen = np.asarray(values, dtype=np.float32)
            block = ColumnStatistics(values.shape[1:])
            block.count = len(values)
            block.mean = seen.mean(axis=0, dtype=np.float64)
            block._squares = np.square(seen - block.mean).sum(axis=0, dtype=np.float64)
            block.minimum, block.maximum = values.min(axis=0), values.max(axis=0)
            self.merge(block)

    def merge(self, other: Any) -> None:
        """Add other rows."""
        count = self.count + other.count
        if not other.count:
            return
        apart = other.mean - self.mean
        self.mean = self.mean + apart * (other.count / count)
        self._squares = self._squares + other._squares + apart**2 * (self.count * other.count / count)
        self.minimum = np.minimum(self.minimum, other.minimum)
        self.maximum = np.maximum(self.maximum, other.maximum)
        self.count = count


class LogStatistics(Tally):
    """The statistics of a log's columns or of one part of it, shard after shard."""

    def __init__(self, log: LazyTransitions) -> None:
        self.observations = ColumnStatistics(log.columns["observations"].shape)
        self.actions = ColumnStatistics(log.columns["actions"].shape)
        self.rewards = ColumnStatistics(())
        self.episodes = EpisodeTally()

    @property
    def rows(self) -> int:
        """Rows so far."""
        return self.rewards.count

    @property
    def returns(self) -> tuple[float, float] | None:
        """The least and the greatest of the episodes; None without episodes."""
        returns = self.episodes.returns
        return (float(returns.low[0]), float(returns.high[0])) if returns.count else None

    def add(self, block: RowBlock) -> None:
        """The next rows of a shard, whole units each."""
        for name in ("observations", "actions", "rewards"):
            getattr(self, name).add(getattr(block, name))
        if block.steps is not None and len(block):
            self.episodes.add(block)


def statistics_of(
    log: LazyTransitions, part: Part | None = None, settings: PassSettings | None = None
) -> LogStatistics:
    """The statistics of a log on disk in one pass, over the units of ``part`` alone if given.

    Raises DataError where a shard cannot be read or the part is empty.
    """
    from koffline.jobs import PassSettings

    names, total = shard_names(log), LogStatistics(log)
    passes = settings or PassSettings()
    for mapped in passes.map(_of_shard, range(len(names)), (log, part), lambda shard: names[shard]):
        if mapped.failure is None:
            total.merge(mapped.value)
    if not total.rows:
        raise DataError("no row is left in that part of the log; hold out another share of it")
    return total


def shard_names(log: Transitions | LazyTransitions) -> list[str]:
    """What errors call the shards; a log in memory is one."""
    return ["the log"] if isinstance(log, Transitions) else [shard.name for shard in log.shards]


def _of_shard(shared: tuple[LazyTransitions, Part | None], shard: int) -> LogStatistics:
    """One shard, for ``PassSettings.map``."""
    log, part = shared
    found = LogStatistics(log)
    for block in log.shard_blocks(shard):
        found.add(block if part is None else block.part(part.holds(shard, block.units)))
    found.episodes.end_shard()
    return found


def blocks_of(log: Transitions | LazyTransitions, shard: int = 0) -> Iterator[RowBlock]:
    """The blocks of a shard; a log in memory is one shard, of which nothing is copied."""
    if not isinstance(log, Transitions):
        yield from log.shard_blocks(shard)
        return
    for rows in checks.blocks(len(log)):
        columns: dict[str, Any] = {name: column[rows] for name, column in log.columns.items()}
        columns.pop("episode_ids", None)
        units = np.arange(rows.start, rows.stop)
        if log.has_episodes:
            units = np.searchsorted(log.episode_starts, units, side="right") - 1
        yield RowBlock(0, rows.start, units=units, **{"steps": None, **columns})
