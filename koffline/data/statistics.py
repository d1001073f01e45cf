"""Statistics of rows and episodes, added block by block in bounded memory; the summary
of a log.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import numpy as np

from koffline.data import columns as checks
from koffline.data.disk.log import AnyLog, LazyTransitions, in_whole_units
from koffline.data.raw import space_to_json
from koffline.data.spaces import ActionSpace, Discrete
from koffline.data.structure import Structure, is_small, symptoms_of_log
from koffline.data.transitions import Transitions
from koffline.data.units import Part
from koffline.jobs import PassSettings
from koffline.json_types import JsonObject


class Tally:
    """Base of statistics that can be merged with those of other rows."""

    def merge(self, other: Any) -> None:
        """Add the statistics of later rows: numbers are added, lists extended, tallies
        merged.
        """
        for name, value in vars(other).items():
            if isinstance(value, Tally):
                getattr(self, name).merge(value)
            elif isinstance(value, (int, list, np.ndarray)):
                setattr(self, name, getattr(self, name) + value)


class ColumnStatistics(Tally):
    """Mean, standard deviation (of the population), smallest and largest of the rows
    (B, ...) of a column.

    (Chan, Golub and LeVeque 1983, the pairwise update)
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.count = 0
        self.mean = np.zeros(shape)
        self._squares = np.zeros(shape)
        self.minimum = np.full(shape, np.inf)
        self.maximum = np.full(shape, -np.inf)

    @classmethod
    def of(cls, column: np.ndarray) -> ColumnStatistics:
        """Statistics of a column in memory."""
        statistics = cls(column.shape[1:])
        for rows in checks.blocks(len(column)):
            statistics.add(column[rows])
        return statistics

    @property
    def range(self) -> tuple[float, float]:
        """Smallest and largest value of a scalar column; (∞, −∞) without rows."""
        return float(self.minimum), float(self.maximum)

    @property
    def deviation(self) -> np.ndarray:
        """Standard deviation over all rows so far; at least one row is needed."""
        return np.asarray(np.sqrt(self._squares / self.count))

    @property
    def effective_count(self) -> float:
        """Effective count (Σx)² / Σx² of a scalar column: the count if all x are equal,
        0 without any.
        """
        total = float(self._squares + self.count * self.mean**2)
        if total > 0.0:
            return float(self.count * self.mean) ** 2 / total
        return 0.0

    @property
    def standard_error(self) -> float | None:
        """Standard error of the mean of a scalar column; None for fewer than two
        rows.
        """
        if self.count > 1:
            return float(np.sqrt(self._squares / (self.count - 1) / self.count))
        return None

    def spreads(self) -> list[dict[str, float]]:
        """Smallest, mean and largest value (``min``, ``mean``, ``max``) of each number
        of a row.
        """
        spreads = []
        for minimum, mean, maximum in zip(
            self.minimum.ravel().tolist(),
            self.mean.ravel().tolist(),
            self.maximum.ravel().tolist(),
            strict=True,
        ):
            spreads.append({"min": minimum, "mean": mean, "max": maximum})
        return spreads

    def add(self, values: np.ndarray) -> None:
        """Add rows (B, ...)."""
        if not len(values):
            return
        rows = np.asarray(values, dtype=np.float64)
        block = ColumnStatistics(values.shape[1:])
        block.count = len(values)
        block.mean = rows.mean(axis=0)
        with np.errstate(over="ignore"):
            block._squares = np.square(rows - block.mean).sum(axis=0)
        block.minimum = rows.min(axis=0)
        block.maximum = rows.max(axis=0)
        self.merge(block)

    def __add__(self, other: ColumnStatistics) -> ColumnStatistics:
        """Statistics of both together."""
        both = copy.copy(self)
        both.merge(other)
        return both

    def merge(self, other: Any) -> None:
        """Add the statistics of other rows."""
        if not self.count:
            vars(self).update(vars(other))
            return
        if not other.count:
            return
        count = self.count + other.count
        difference = other.mean - self.mean
        self.mean = self.mean + difference * (other.count / count)
        with np.errstate(over="ignore"):
            between = difference**2 * (self.count * other.count / count)
        self._squares = self._squares + other._squares + between
        self.minimum = np.minimum(self.minimum, other.minimum)
        self.maximum = np.maximum(self.maximum, other.maximum)
        self.count = count


class EpisodeTally(Tally):
    """Statistics of whole episodes: returns, lengths, and how they end."""

    def __init__(self) -> None:
        self.returns = ColumnStatistics(())
        self.lengths = ColumnStatistics(())
        self.cuts = ColumnStatistics(())  # lengths of cut episodes
        self.unfinished = 0

    def add(self, block: Transitions) -> None:
        """Add the episodes of a block."""
        episode = block.units - block.units[0]
        last = block.episode_ends
        lengths = block.episode_lengths
        terminated = block.terminated[last]
        truncated = block.truncated[last]
        # bincount adds in row order, so that returns do not depend on the cuts between
        # blocks
        self.returns.add(np.bincount(episode, weights=block.rewards))
        self.lengths.add(lengths)
        self.cuts.add(lengths[truncated & ~terminated])
        self.unfinished += int(np.sum(~(terminated | truncated)))

    def time_limit(self, lost: bool) -> int | None:
        """Steps of all cut episodes, if equal, and no episode has more; lost: without
        last rows.
        """
        least = self.cuts.minimum + lost
        most = self.cuts.maximum + lost
        if least == most >= self.lengths.maximum:
            return int(most)
        return None


class LogTally(Tally):
    """Statistics of a log or a part of it, added shard by shard.

    observation_shape: None leaves out the observations, which take most of the time.
    """

    def __init__(
        self, space: ActionSpace, observation_shape: tuple[int, ...] | None = None
    ) -> None:
        self.rows = 0
        self.terminated = 0
        self.truncated = 0
        self.rewards = ColumnStatistics(())
        self.observations: ColumnStatistics | None = None
        if observation_shape is not None:
            self.observations = ColumnStatistics(observation_shape)
        self.episodes = EpisodeTally()
        self.action_counts: np.ndarray | None = None
        action_shape: tuple[int, ...] = ()
        if isinstance(space, Discrete):
            self.action_counts = np.zeros(space.n, dtype=np.int64)
        else:
            action_shape = (space.k,)
        self.actions = ColumnStatistics(action_shape)

    def add(self, block: Transitions) -> None:
        """Add the next rows of a shard, in whole units."""
        self.rows += len(block)
        self.terminated += int(block.terminated.sum())
        self.truncated += int(np.sum(block.truncated & ~block.terminated))
        self.rewards.add(block.rewards)
        if self.action_counts is not None:
            self.action_counts += np.bincount(
                block.actions, minlength=len(self.action_counts)
            )
        self.actions.add(block.actions)
        if self.observations is not None:
            self.observations.add(block.observations)
        if block.has_episodes and len(block):
            self.episodes.add(block)

    def add_shard(self, log: AnyLog, shard: int, part: Part | None) -> None:
        """Add all rows of a shard, or those of ``part``. Raises DataError."""
        for block in in_whole_units(log.shard_blocks(shard)):
            if part is None:
                self.add(block)
            else:
                self.add(block.part(part.holds(shard, block.units)))

    @property
    def returns(self) -> tuple[float, float] | None:
        """Smallest and largest return of the episodes; None without episodes."""
        returns = self.episodes.returns
        if returns.count:
            return (float(returns.minimum), float(returns.maximum))
        return None


class _SummaryTally(LogTally):
    """Statistics of a log without those of its observations, and the structure of its
    parts.
    """

    def __init__(self, log: AnyLog) -> None:
        super().__init__(log.action_space)
        self.structures = list[Structure]()
        self._has_parts = not is_small(log)

    def add(self, block: Transitions) -> None:
        """Add the next rows of a shard, in whole units."""
        super().add(block)
        if self._has_parts:
            self.structures.append(Structure.of(block))


_Tally = TypeVar("_Tally", bound=LogTally)


def statistics_of(log: LazyTransitions, part: Part | None = None) -> LogTally:
    """Statistics of a log on disk in one pass; with ``part``, of its units only.

    Raises DataError.
    """
    return tally_of(log, LogTally(log.action_space, log.observation_shape), part)


def tally_of(
    log: AnyLog,
    empty: _Tally,
    part: Part | None = None,
    settings: PassSettings | None = None,
    progress: bool = False,
) -> _Tally:
    """A copy of ``empty`` with all rows, or those of ``part``, added in one pass of
    bounded memory.

    settings: where the pass over the shards of a log on disk runs. Raises DataError.
    """
    names = log.shard_names
    total = copy.deepcopy(empty)
    passes = settings or PassSettings()
    shared = (log, empty, part)
    tallies = passes.map(
        _tally_shard, range(len(names)), shared, names.__getitem__, progress
    )
    for tally in tallies:
        total.merge(tally)
    return total


def _tally_shard(shared: tuple[AnyLog, _Tally, Part | None], shard: int) -> _Tally:
    """The tally of one shard. shared: the log, an empty tally, and what to add."""
    log, empty, part = shared
    tally = copy.deepcopy(empty)
    tally.add_shard(log, shard, part)
    return tally


def summarise(
    log: AnyLog, settings: PassSettings | None = None, progress: bool = False
) -> JsonObject:
    """Summary as plain values: rows, episodes, spaces, returns, ends, coverage of
    actions, source.

    ``time_limit``: the steps of all cut episodes, with a last row that was left out, if
    no episode has more.
    ``action_counts`` (n): for discrete actions; ``action_ranges`` (k): for continuous
    ones. Returns are undiscounted, of whole episodes as logged. ``structure``: signs
    that the log is not what it says, with remedies. ``shards``: number of files, if
    more than one. One pass in bounded memory; settings: where it runs. Raises
    DataError.
    """
    tally = tally_of(log, _SummaryTally(log), settings=settings, progress=progress)
    episodes = tally.episodes
    returns = None
    lengths = None
    if log.has_episodes:
        returns = episodes.returns.spreads()[0]
        lengths = episodes.lengths.spreads()[0]
    action_counts = None
    action_ranges = None
    if tally.action_counts is not None:
        action_counts = tally.action_counts.tolist()
    else:
        action_ranges = tally.actions.spreads()
    symptoms = symptoms_of_log(log, parts=tally.structures)
    summary = {
        "source": log.metadata.source,
        "sha256": log.sha256,
        "rows": tally.rows,
        "episodes": episodes.lengths.count,
        "observation_shape": log.observation_shape,
        "observation_dtype": str(log.columns["observations"].dtype),
        "action_space": space_to_json(log.action_space),
        "rewards": tally.rewards.spreads()[0],
        "returns": returns,
        "lengths": lengths,
        "terminated": tally.terminated,
        "truncated": tally.truncated,
        "unfinished": episodes.unfinished,
        "time_limit": episodes.time_limit(log.metadata.lost_last_rows),
        "action_counts": action_counts,
        "action_ranges": action_ranges,
        "has_log_probabilities": "behavior_log_probabilities" in log.columns,
        "has_weights": "weights" in log.columns,
        "has_clusters": "clusters" in log.columns,
        "has_action_masks": "action_mask" in log.columns,
        "gamma": log.metadata.gamma,
        "extra": dict(log.metadata.extra),
        "notes": log.metadata.notes,
        "structure": [symptom.text for symptom in symptoms],
    }
    n_shards = len(log.shard_names)
    if n_shards > 1:
        summary["shards"] = n_shards
    return summary
