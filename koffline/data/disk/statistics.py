"""Means, deviations and extents of a log's columns, which scalers are fitted to: in memory or in one pass."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from koffline.data.disk.samples import Part
from koffline.data.row_block import RowBlock
from koffline.data.streaming_summary import EpisodeTally
from koffline.errors import DataError

if TYPE_CHECKING:
    from koffline.data.disk.log import LazyTransitions
    from koffline.jobs.mapping import PassSettings


@dataclass(frozen=True, eq=False)
class ColumnStatistics:
    """Mean, standard deviation (of the population), least and greatest over the rows of a column."""

    mean: np.ndarray
    deviation: np.ndarray
    minimum: np.ndarray
    maximum: np.ndarray

    @classmethod
    def of(cls, column: np.ndarray) -> ColumnStatistics:
        """Of a column in memory, moments of its numbers as float32, which is what d3rlpy sees."""
        seen = np.asarray(column, dtype=np.float32)
        moments = seen.mean(axis=0, dtype=np.float64), seen.std(axis=0, dtype=np.float64)
        return cls(*(np.asarray(v) for v in (*moments, column.min(axis=0), column.max(axis=0))))


@dataclass(frozen=True, eq=False)
class LogStatistics:
    """Of a log or of one part of it; ``returns`` are the least and the greatest of its episodes."""

    rows: int
    observations: ColumnStatistics
    actions: ColumnStatistics
    rewards: ColumnStatistics
    returns: tuple[float, float] | None


def statistics_of(
    log: LazyTransitions, part: Part | None = None, settings: PassSettings | None = None
) -> LogStatistics:
    """The statistics of a log on disk in one pass, over the units of ``part`` alone if given.

    Raises DataError where a shard cannot be read or the part is empty.
    """
    from koffline.jobs.mapping import PassSettings

    names = [shard.name for shard in log.shards]
    passes, total = settings or PassSettings(), None
    for mapped in passes.map(_tally, range(len(names)), (log, part), lambda shard: names[shard]):
        if mapped.failure is None:
            total = mapped.value if total is None else total.merged(mapped.value)
    if total is None or not total.rewards.count:
        raise DataError("no row is left in that part of the log; hold out another share of it")
    returns = total.episodes.returns if log.has_episodes else None
    return LogStatistics(
        rows=total.rewards.count,
        observations=total.observations.statistics(),
        actions=total.actions.statistics(),
        rewards=total.rewards.statistics(),
        returns=None if returns is None else (float(returns.low[0]), float(returns.high[0])),
    )


class Moments:
    """Count, mean, sum of squared deviations, least and greatest of a column's numbers, added up by blocks.

    (Chan, Golub and LeVeque 1979, the pairwise update)
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.count = 0
        self._mean, self._squares = np.zeros(shape), np.zeros(shape)
        self._minimum, self._maximum = np.full(shape, np.inf), np.full(shape, -np.inf)

    def add(self, values: np.ndarray) -> None:
        """Rows (B, ...)."""
        if len(values):
            seen = np.asarray(values, dtype=np.float32)  # which is what d3rlpy sees
            block = Moments(values.shape[1:])
            block.count = len(values)
            block._mean = seen.mean(axis=0, dtype=np.float64)
            block._squares = np.square(seen - block._mean).sum(axis=0, dtype=np.float64)
            block._minimum, block._maximum = values.min(axis=0), values.max(axis=0)
            self.merge(block)

    def merge(self, other: Moments) -> None:
        """Add other rows."""
        count = self.count + other.count
        if not other.count:
            return
        apart = other._mean - self._mean
        self._mean = self._mean + apart * (other.count / count)
        self._squares = self._squares + other._squares + apart**2 * (self.count * other.count / count)
        self._minimum = np.minimum(self._minimum, other._minimum)
        self._maximum = np.maximum(self._maximum, other._maximum)
        self.count = count

    def statistics(self) -> ColumnStatistics:
        """Of all rows so far, of which there are some."""
        deviation = np.sqrt(self._squares / self.count)
        found = (self._mean, deviation, self._minimum, self._maximum)
        return ColumnStatistics(*(np.asarray(values) for values in found))


@dataclass(frozen=True, eq=False)
class _Tally:
    observations: Moments
    actions: Moments
    rewards: Moments
    episodes: EpisodeTally

    def merged(self, other: _Tally) -> _Tally:
        for field in dataclasses.fields(self):
            getattr(self, field.name).merge(getattr(other, field.name))
        return self


def _tally(shared: tuple[LazyTransitions, Part | None], shard: int) -> _Tally:
    """One shard, for ``PassSettings.map``."""
    log, part = shared
    tally = None
    for block in log.shard_blocks(shard):
        rows = np.arange(len(block)) if part is None else np.flatnonzero(part.holds(shard, block.units))
        if tally is None:
            tally = _Tally(
                Moments(block.observations.shape[1:]),
                Moments(block.actions.shape[1:]),
                Moments(()),
                EpisodeTally(),
            )
        _add(tally, block, rows)
    assert tally is not None, "a shard has rows"
    tally.episodes.end_shard()
    return tally


def _add(tally: _Tally, block: RowBlock, rows: np.ndarray) -> None:
    whole = len(rows) == len(block)
    for name in ("observations", "actions", "rewards"):
        column = getattr(block, name)
        getattr(tally, name).add(column if whole else column[rows])
    if block.steps is not None and rows.size:
        names = [field.name for field in dataclasses.fields(block)]
        columns = {name: getattr(block, name) for name in names}
        kept = {
            name: value[rows]
            for name, value in columns.items()
            if isinstance(value, np.ndarray) and not whole
        }
        tally.episodes.add(dataclasses.replace(block, **kept))
