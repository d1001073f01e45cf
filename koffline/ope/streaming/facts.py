"""What a pass learns of the log itself: counts, the range of rewards, the behaviour's own returns."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from koffline.data.row_block import RowBlock
from koffline.ope.limits import Limits
from koffline.ope.problem import reward_range, value_bounds
from koffline.ope.streaming.episodes import EndedEpisodes
from koffline.ope.streaming.sampling import Request


@dataclass(frozen=True)
class Spread:
    """Count, mean and sum of squared deviations; two of them add up to that of both samples."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: np.ndarray) -> Spread:
        """Of some numbers."""
        if not len(values):
            return cls()
        mean = float(values.mean())
        return cls(float(len(values)), mean, float(np.square(values - mean).sum()))

    def __add__(self, other: Spread) -> Spread:
        """(Chan, Golub and LeVeque 1983)"""
        count = self.count + other.count
        if count == 0.0:
            return self
        gap = other.mean - self.mean
        squares = self.squares + other.squares + gap * gap * self.count * other.count / count
        return Spread(count, self.mean + gap * other.count / count, squares)

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
    """Of the rows read. ``returns``: of episodes, discounted, as they were cut.

    ``weights``: of episodes, of rows where there are none.
    ``going_on`` and ``final``: range of the rewards of rows with weight, of those after which an episode goes
    on and of those that end one; None where there are none.
    """

    rows: int = 0
    terminated: int = 0
    truncated: int = 0
    going_on: tuple[float, float] | None = None
    final: tuple[float, float] | None = None
    longest_episode: int = 0
    returns: Spread = Spread()
    weights: Spread = Spread()

    @classmethod
    def of(cls, block: RowBlock, ended: EndedEpisodes) -> LogFacts:
        """Of a block, and of the episodes that ended in it."""
        weights = np.ones(len(block)) if block.weights is None else np.asarray(block.weights)
        counted = weights > 0.0
        rewards, terminated = np.asarray(block.rewards), np.asarray(block.terminated)
        return cls(
            rows=len(block),
            terminated=int(block.terminated.sum()),
            truncated=int((block.truncated & ~block.terminated).sum()),
            going_on=reward_range(rewards[counted & ~terminated]),
            final=reward_range(rewards[counted & terminated]),
            longest_episode=int(ended.lengths.max(initial=0)),
            returns=Spread.of(ended.returns),
            weights=Spread.of(weights if block.steps is None else ended.shares),
        )

    def __add__(self, other: LogFacts) -> LogFacts:
        return LogFacts(
            rows=self.rows + other.rows,
            terminated=self.terminated + other.terminated,
            truncated=self.truncated + other.truncated,
            going_on=_joined(self.going_on, other.going_on),
            final=_joined(self.final, other.final),
            longest_episode=max(self.longest_episode, other.longest_episode),
            returns=self.returns + other.returns,
            weights=self.weights + other.weights,
        )

    def limits(self, request: Request, copies: float) -> Limits:
        """What the log can say at all. copies: share of rows that are copies of others."""
        given, has_episodes = request.settings.reward_bounds, request.log.has_episodes
        going_on, final = self.going_on, self.final
        if given is not None:
            going_on, final = given, None if final is None else given
        return Limits(
            units=self.weights.effective_count,
            by_episode=has_episodes,
            fixed_starts=request.initial_observations is not None,
            longest=self.longest_episode if has_episodes else None,
            ending_rate=self.terminated / self.rows,
            gamma=request.settings.gamma,
            bounds=value_bounds(going_on, final, request.settings.gamma),
            copies=copies,
        )


def _joined(one: tuple[float, float] | None, other: tuple[float, float] | None) -> tuple[float, float] | None:
    if one is None or other is None:
        return one or other
    return min(one[0], other[0]), max(one[1], other[1])
