"""What is in a log, added up block by block and shard by shard, in memory that does not grow with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from koffline.data import columns as checks
from koffline.data.row_block import ROW_COLUMNS, RowBlock
from koffline.data.spaces import ActionSpace, Discrete
from koffline.data.transitions import Transitions

if TYPE_CHECKING:
    from koffline.data.disk.log import LazyTransitions


@dataclass(frozen=True)
class Spread:
    """Least, mean and greatest of some numbers."""

    min: float
    mean: float
    max: float


class Spreads:
    """Least, mean and greatest of k columns of numbers; the means are rounded once, at the end."""

    def __init__(self, columns: int) -> None:
        self.count = 0
        self.low, self.high = np.full(columns, np.inf), np.full(columns, -np.inf)
        self._sums = ExactSums(columns)

    def add(self, values: np.ndarray) -> None:
        """Rows (B, k)."""
        if not len(values):
            return
        self.count += len(values)
        self.low = np.minimum(self.low, values.min(axis=0))
        self.high = np.maximum(self.high, values.max(axis=0))
        self._sums.add(values)

    def merge(self, other: Spreads) -> None:
        """Add other rows."""
        self.count += other.count
        self.low, self.high = np.minimum(self.low, other.low), np.maximum(self.high, other.high)
        self._sums.merge(other._sums)

    def spreads(self) -> tuple[Spread, ...]:
        """(k)."""
        means = [total / self.count for total in self._sums.values()]
        return tuple(
            Spread(float(low), mean, float(high))
            for low, mean, high in zip(self.low, means, self.high, strict=True)
        )


class EpisodeTally:
    """Episodes of one shard after another: returns, lengths, and how they end."""

    def __init__(self) -> None:
        self.returns, self.lengths = Spreads(1), Spreads(1)
        self.unfinished = 0
        self.shortest_cut, self.longest_cut = np.inf, -np.inf
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
            total, length, terminated, truncated = self._open
            flags = np.array([terminated]), np.array([truncated])
            self._take(np.array([total]), np.array([length]), *flags)
        self._open = None

    def merge(self, other: EpisodeTally) -> None:
        """Add other episodes."""
        self.returns.merge(other.returns)
        self.lengths.merge(other.lengths)
        self.unfinished += other.unfinished
        self.shortest_cut = min(self.shortest_cut, other.shortest_cut)
        self.longest_cut = max(self.longest_cut, other.longest_cut)

    @property
    def time_limit(self) -> int | None:
        """The length that all cut episodes share and none exceeds."""
        shared = self.shortest_cut == self.longest_cut == self.lengths.high[0]
        return int(self.longest_cut) if shared else None

    def _take(
        self, returns: np.ndarray, lengths: np.ndarray, terminated: np.ndarray, truncated: np.ndarray
    ) -> None:
        self.returns.add(returns[:, None])
        self.lengths.add(lengths[:, None])
        self.unfinished += int(np.sum(~(terminated | truncated)))
        cut = lengths[truncated & ~terminated].astype(np.float64)
        self.shortest_cut = float(cut.min(initial=self.shortest_cut))
        self.longest_cut = float(cut.max(initial=self.longest_cut))


class LogTally:
    """Everything that a summary says about rows."""

    def __init__(self, space: ActionSpace, has_episodes: bool) -> None:
        self.rows = self.terminated = self.truncated = 0
        self.rewards = Spreads(1)
        self.episodes = EpisodeTally() if has_episodes else None
        discrete = isinstance(space, Discrete)
        self.action_counts = np.zeros(space.n, dtype=np.int64) if isinstance(space, Discrete) else None
        self.actions = None if discrete else Spreads(space.k)  # type: ignore[union-attr]

    def add(self, block: RowBlock) -> None:
        """The next rows of a shard."""
        self.rows += len(block)
        self.terminated += int(block.terminated.sum())
        self.truncated += int(np.sum(block.truncated & ~block.terminated))
        self.rewards.add(block.rewards[:, None])
        if self.action_counts is not None:
            self.action_counts += np.bincount(block.actions, minlength=len(self.action_counts))
        if self.actions is not None:
            self.actions.add(block.actions)
        if self.episodes is not None:
            self.episodes.add(block)

    def end_shard(self) -> None:
        """No episode goes on in the next shard."""
        if self.episodes is not None:
            self.episodes.end_shard()

    def merge(self, other: LogTally) -> None:
        """Add the rows of other shards."""
        self.rows += other.rows
        self.terminated += other.terminated
        self.truncated += other.truncated
        self.rewards.merge(other.rewards)
        if self.action_counts is not None and other.action_counts is not None:
            self.action_counts += other.action_counts
        if self.actions is not None and other.actions is not None:
            self.actions.merge(other.actions)
        if self.episodes is not None and other.episodes is not None:
            self.episodes.merge(other.episodes)


def tally_log(log: Transitions) -> LogTally:
    """The tally of a log in memory."""
    tally = LogTally(log.action_space, log.has_episodes)
    for block in blocks_of(log):
        tally.add(block)
    tally.end_shard()
    return tally


def tally_shard(log: LazyTransitions, shard: int) -> LogTally:
    """The tally of one shard, for ``PassSettings.map``. Raises DataError."""
    tally = LogTally(log.action_space, log.has_episodes)
    for block in log.shard_blocks(shard):
        tally.add(block)
    tally.end_shard()
    return tally


def blocks_of(log: Transitions) -> Iterator[RowBlock]:
    """A log in memory as the blocks of one shard; nothing is copied."""
    present = {name: getattr(log, name) for name in ROW_COLUMNS}
    columns = {name: column for name, column in present.items() if column is not None}
    for rows in checks.blocks(len(log)):
        picked = {name: column[rows] for name, column in columns.items()}
        steps = None if log.steps is None else log.steps[rows]
        units = np.arange(rows.start, rows.stop)
        if steps is not None:
            units = np.searchsorted(log.episode_starts, units, side="right") - 1
        yield RowBlock(0, rows.start, steps=steps, units=units, **picked)


# float64 is a whole number of 53 bits times 2^(e − 53), with e at least −1073; all are whole at this scale.
_MANTISSA_BITS, _HALF_BITS, _SCALE_BITS = 53, 27, 1126
# So many halves of a mantissa add up exactly in float64, which bincount counts in.
_MOST_ROWS = 2**25


class ExactSums:
    """Sums of k columns. ``float`` of one is what ``math.fsum`` gives for the same numbers."""

    def __init__(self, columns: int) -> None:
        self._totals = [0] * columns

    def add(self, values: np.ndarray) -> None:
        """Rows (B, k) of finite numbers."""
        for start in range(0, len(values), _MOST_ROWS):
            for i, column in enumerate(np.asarray(values[start : start + _MOST_ROWS], dtype=np.float64).T):
                self._totals[i] += _scaled_sum(column)

    def merge(self, other: ExactSums) -> None:
        """Add the sums of other rows."""
        self._totals = [a + b for a, b in zip(self._totals, other._totals, strict=True)]

    def values(self) -> list[float]:
        """(k) sums, rounded once. Raises OverflowError above the largest float."""
        return [total / (1 << _SCALE_BITS) for total in self._totals]


def _scaled_sum(column: np.ndarray) -> int:
    """Σ x · 2^1126 as a whole number: mantissas are added up by exponent, in two halves."""
    fractions, exponents = np.frexp(column)
    mantissas = np.ldexp(fractions, _MANTISSA_BITS).astype(np.int64)
    lowest = int(exponents.min(initial=0))
    places = exponents - lowest
    total = 0
    for halves, shift in ((mantissas >> _HALF_BITS, _HALF_BITS), (mantissas & (2**_HALF_BITS - 1), 0)):
        sums = np.bincount(places, weights=halves)
        for place in np.flatnonzero(sums):
            power = lowest + int(place) - _MANTISSA_BITS + _SCALE_BITS + shift
            total += int(sums[place]) << power
    return total
