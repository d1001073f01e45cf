"""What all rows of a log say without any model: counts, the range of rewards, the behaviour's own returns."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from koffline.ope.limits import reward_range
from koffline.ope.working_log import LogPart


@dataclass(frozen=True)
class MeanAndSpread:
    """Count, mean and sum of squared deviations; two of them add up to that of both samples."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: np.ndarray) -> MeanAndSpread:
        """Of some numbers."""
        if not len(values):
            return cls()
        mean = float(values.mean())
        return cls(float(len(values)), mean, float(np.square(values - mean).sum()))

    def __add__(self, other: MeanAndSpread) -> MeanAndSpread:
        """(Chan, Golub and LeVeque 1983)"""
        count = self.count + other.count
        if count == 0.0:
            return self
        gap = other.mean - self.mean
        squares = self.squares + other.squares + gap * gap * self.count * other.count / count
        return MeanAndSpread(count, self.mean + gap * other.count / count, squares)

    @property
    def effective_count(self) -> float:
        """(Σ)² / Σ² of the numbers, their count where all are equal; 0 of none."""
        total = self.squares + self.count * self.mean**2
        return (self.count * self.mean) ** 2 / total if total > 0.0 else 0.0

    @property
    def standard_error(self) -> float | None:
        """Of the mean; None for fewer than two numbers."""
        if self.count < 2.0:
            return None
        return math.sqrt(self.squares / (self.count - 1.0) / self.count)


@dataclass(frozen=True)
class LogFacts:
    """``returns``: of episodes, discounted, as they were cut. ``weights``: of units, the mean of their rows.

    ``starts``: start states with weight. ``going_on`` and ``final``: range of the rewards of rows with
    weight, of those after which an episode goes on and of those that end one; None where there are none.
    """

    rows: int
    episodes: int
    terminated: int
    truncated: int
    starts: int
    longest: int
    going_on: tuple[float, float] | None
    final: tuple[float, float] | None
    returns: MeanAndSpread
    weights: MeanAndSpread

    def __add__(self, other: LogFacts) -> LogFacts:
        return LogFacts(
            rows=self.rows + other.rows,
            episodes=self.episodes + other.episodes,
            terminated=self.terminated + other.terminated,
            truncated=self.truncated + other.truncated,
            starts=self.starts + other.starts,
            longest=max(self.longest, other.longest),
            going_on=_joined(self.going_on, other.going_on),
            final=_joined(self.final, other.final),
            returns=self.returns + other.returns,
            weights=self.weights + other.weights,
        )


def log_facts(part: LogPart, gamma: float) -> LogFacts:
    """Facts of whole units."""
    log = part.transitions
    weights = np.ones(len(log)) if log.weights is None else np.asarray(log.weights, dtype=np.float64)
    firsts = log.episode_starts if log.has_episodes else np.arange(len(log))
    lengths = np.diff(np.append(firsts, len(log)))
    rewards, terminated = np.asarray(log.rewards, dtype=np.float64), np.asarray(log.terminated)
    counted = weights > 0.0
    return LogFacts(
        rows=len(log),
        episodes=log.n_episodes,
        terminated=int(terminated.sum()),
        truncated=int((log.truncated & ~terminated).sum()),
        starts=int(np.count_nonzero(weights[firsts])),
        longest=int(lengths.max()) if log.has_episodes else 0,
        going_on=reward_range(rewards[counted & ~terminated]),
        final=reward_range(rewards[counted & terminated]),
        returns=MeanAndSpread.of(log.returns(gamma) if log.has_episodes else np.zeros(0)),
        weights=MeanAndSpread.of(np.add.reduceat(weights, firsts) / lengths),
    )


def _joined(one: tuple[float, float] | None, other: tuple[float, float] | None) -> tuple[float, float] | None:
    if one is None or other is None:
        return one or other
    return min(one[0], other[0]), max(one[1], other[1])
