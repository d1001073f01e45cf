"""What a pass learns of the log itself: counts, the range of rewards, the behaviour's own returns."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from koffline.data.row_block import RowBlock
from koffline.ope.streaming.episodes import EndedEpisodes


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
    def standard_error(self) -> float | None:
        """Of the mean; None for fewer than two numbers."""
        if self.count < 2.0:
            return None
        return math.sqrt(self.squares / (self.count - 1.0) / self.count)


@dataclass(frozen=True)
class LogFacts:
    """Of the rows read. Rewards are of rows with weight; ``returns`` discounted, as episodes were cut."""

    rows: int = 0
    weighted_rows: int = 0
    terminated: int = 0
    truncated: int = 0
    reward_low: float = math.inf
    reward_high: float = -math.inf
    longest_episode: int = 0
    returns: Spread = Spread()

    @classmethod
    def of(cls, block: RowBlock, ended: EndedEpisodes) -> LogFacts:
        """Of a block, and of the episodes that ended in it."""
        counted = np.ones(len(block), np.bool_) if block.weights is None else block.weights > 0.0
        rewards = np.asarray(block.rewards)[counted]
        return cls(
            rows=len(block),
            weighted_rows=int(counted.sum()),
            terminated=int(block.terminated.sum()),
            truncated=int((block.truncated & ~block.terminated).sum()),
            reward_low=float(rewards.min(initial=math.inf)),
            reward_high=float(rewards.max(initial=-math.inf)),
            longest_episode=int(ended.lengths.max(initial=0)),
            returns=Spread.of(ended.returns),
        )

    def __add__(self, other: LogFacts) -> LogFacts:
        return LogFacts(
            rows=self.rows + other.rows,
            weighted_rows=self.weighted_rows + other.weighted_rows,
            terminated=self.terminated + other.terminated,
            truncated=self.truncated + other.truncated,
            reward_low=min(self.reward_low, other.reward_low),
            reward_high=max(self.reward_high, other.reward_high),
            longest_episode=max(self.longest_episode, other.longest_episode),
            returns=self.returns + other.returns,
        )

    def value_bounds(self, gamma: float) -> tuple[float, float]:
        """Bounds of any discounted sum of rewards like these; where an episode may end, zeros follow."""
        low, high = self.reward_low, self.reward_high
        if self.terminated:
            low, high = min(low, 0.0), max(high, 0.0)
        return low / (1.0 - gamma), high / (1.0 - gamma)
