"""Means over episodes in three forms, each with its influence values and its bootstrap draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int
from scipy.sparse import csr_matrix

from koffline.ope.importance.weights import EpisodeWeights

Counts = Float[np.ndarray, "draw episode"]


@runtime_checkable
class EpisodeStatistic(Protocol):
    """An estimate made of E independent episodes.

    ``influence`` (E,): how the estimate moves with each episode's share, Σ share·influence = 0; its variance
    is about Σ share²·influence².
    """

    @property
    def value(self) -> float:
        """The estimate."""

    @property
    def influence(self) -> Float[np.ndarray, " episode"]:
        """(E,)"""

    @property
    def shares(self) -> Float[np.ndarray, " episode"]:
        """(E,), sum to one."""

    def resampled(self, counts: Counts) -> Float[np.ndarray, " draw"]:
        """(B,) the estimate when episode i counts ``counts[b, i]`` times; NaN where nothing is left."""


@dataclass(frozen=True, eq=False)
class EpisodeMean:
    """Σ share · y."""

    values: Float[np.ndarray, " episode"]
    shares: Float[np.ndarray, " episode"]

    @cached_property
    def value(self) -> float:
        """The mean."""
        return float(self.shares @ self.values)

    @property
    def influence(self) -> Float[np.ndarray, " episode"]:
        """(E,) y − mean."""
        return self.values - self.value

    def resampled(self, counts: Counts) -> Float[np.ndarray, " draw"]:
        """(B,) means of resampled episodes."""
        return (counts @ (self.shares * self.values)) / (counts @ self.shares)


@dataclass(frozen=True, eq=False)
class WeightedMean:
    """Σ share·w·y / Σ share·w, the weights given as logarithms; not all may be zero."""

    log_weights: Float[np.ndarray, " episode"]
    values: Float[np.ndarray, " episode"]
    shares: Float[np.ndarray, " episode"]

    @cached_property
    def _relative(self) -> Float[np.ndarray, " episode"]:
        """(E,) weights, on average one."""
        weights = np.exp(self.log_weights - self.log_weights.max())
        return weights / (self.shares @ weights)

    @cached_property
    def value(self) -> float:
        """The weighted mean."""
        return float((self.shares * self._relative) @ self.values)

    @property
    def influence(self) -> Float[np.ndarray, " episode"]:
        """(E,) (w / mean weight)(y − value)."""
        return self._relative * (self.values - self.value)

    def resampled(self, counts: Counts) -> Float[np.ndarray, " draw"]:
        """(B,) weighted means of resampled episodes."""
        weights = self.shares * self._relative
        with np.errstate(invalid="ignore", divide="ignore"):
            return (counts @ (weights * self.values)) / (counts @ weights)


@dataclass(frozen=True, eq=False)
class StepwiseMean:
    """Σ share·y0 + Σ_t γ^t Σ_i share·w_t·x_t / Σ_i share·w_t, up to a step.

    ``rows`` (N,) are x; ``first`` (E,) is y0. Ended episodes keep their last weight with x = 0. Steps at
    which no weight is left add nothing.
    """

    weights: EpisodeWeights
    rows: Float[np.ndarray, " row"]
    first: Float[np.ndarray, " episode"]
    gamma: float
    last_step: int | None = None  # included; −1: none, None: all

    @property
    def shares(self) -> Float[np.ndarray, " episode"]:
        """(E,)"""
        return self.weights.shares

    @cached_property
    def _powers(self) -> Float[np.ndarray, " step"]:
        """(T,) γ^t, zero after the last step."""
        powers = self.gamma ** np.arange(self.weights.horizon)
        if self.last_step is not None:
            powers[self.last_step + 1 :] = 0.0
        return powers

    @cached_property
    def step_means(self) -> Float[np.ndarray, " step"]:
        """(T,) weighted mean of x at each step."""
        w = self.weights
        return np.bincount(
            w.steps, weights=w.shares[w.episodes] * w.relative * self.rows, minlength=w.horizon
        )

    @cached_property
    def value(self) -> float:
        """The estimate."""
        return float(self.shares @ self.first + self._powers @ self.step_means)

    @cached_property
    def influence(self) -> Float[np.ndarray, " episode"]:
        """(E,) with the weights' own noise: (w_t / mean weight)(x_t − mean of x) summed over steps."""
        w = self.weights
        inside = self._powers[w.steps] * w.relative * (self.rows - self.step_means[w.steps])
        influence = self.first - self.shares @ self.first + w.episode_sums(inside)
        for group in ended_groups(w):
            later = slice(group.length, None)
            pull = (self._powers[later] * self.step_means[later]) @ group.relative
            influence[group.episodes] -= group.scaled * pull
        return influence

    def resampled(self, counts: Counts) -> Float[np.ndarray, " draw"]:
        """(B,) estimates from resampled episodes."""
        return resampled_steps(self, counts, [self.last_step])[:, 0]


@dataclass(frozen=True, eq=False)
class EndedGroup:
    """Episodes of one length: their later weights are ``scaled`` (n,) times ``relative`` (T − length,)."""

    length: int
    episodes: Int[np.ndarray, " member"]
    scaled: Float[np.ndarray, " member"]
    relative: Float[np.ndarray, " step"]


def ended_groups(weights: EpisodeWeights) -> list[EndedGroup]:
    """Episodes that end before the longest one and have weight left, by length.

    Each factor is at most one over a share: an ended episode is part of every later sum of weights.
    """
    groups = []
    for length in np.unique(weights.lengths):
        members = np.flatnonzero((weights.lengths == length) & (weights.last > -np.inf))
        if length == weights.horizon or not len(members):
            continue
        largest = weights.last[members].max()
        groups.append(
            EndedGroup(
                int(length),
                members,
                np.exp(weights.last[members] - largest),
                np.exp(largest - weights.log_totals[length:]),
            )
        )
    return groups


def resampled_steps(
    mean: StepwiseMean, counts: Counts, last_steps: Sequence[int | None]
) -> Float[np.ndarray, "draw cut"]:
    """(B, J) partial sums up to each of ``last_steps`` when episode i counts ``counts[b, i]`` times."""
    w = mean.weights
    shape = (w.n_episodes, w.horizon)
    masses = w.shares[w.episodes] * w.relative
    below = (csr_matrix((masses, (w.episodes, w.steps)), shape).T @ counts.T).T  # (B, T)
    above = (csr_matrix((masses * mean.rows, (w.episodes, w.steps)), shape).T @ counts.T).T
    for group in ended_groups(w):
        mass = counts[:, group.episodes] @ (w.shares[group.episodes] * group.scaled)  # (B,)
        below[:, group.length :] += mass[:, None] * group.relative
    powers = mean.gamma ** np.arange(w.horizon)
    steps = powers * np.divide(above, below, out=np.zeros_like(above), where=below > 0.0)
    sums = np.concatenate([np.zeros((len(counts), 1)), np.cumsum(steps, axis=1)], axis=1)
    picks = [w.horizon if last is None else last + 1 for last in last_steps]
    start = (counts @ (w.shares * mean.first)) / (counts @ w.shares)
    return start[:, None] + sums[:, picks]


def standard_error(statistic: EpisodeStatistic) -> float | None:
    """sqrt(E/(E−1) · Σ share²·influence²); None for a single episode."""
    count = len(statistic.shares)
    if count < 2:
        return None
    return float(np.sqrt(count / (count - 1) * np.square(statistic.shares * statistic.influence).sum()))
