"""Cumulative importance weights of whole episodes, in logarithms: nothing overflows before it must."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float, Int

from koffline.data.transitions import Transitions
from koffline.errors import ConfigError, DataError

_NEVER = -np.inf


@dataclass(frozen=True, eq=False)
class EpisodeWeights:
    """w_t = Π_{u ≤ t} π(a_u|s_u) / β(a_u|s_u) of E episodes, row by row.

    ``log_weights`` (N,) may be −inf, where the policy would not have acted so. ``shares`` (E,) sum to one:
    the log's own weights of episodes. An episode that is over keeps its last weight for all later steps, with
    rewards of zero.
    """

    log_weights: Float[np.ndarray, " row"]
    steps: Int[np.ndarray, " row"]
    starts: Int[np.ndarray, " episode"]
    lengths: Int[np.ndarray, " episode"]
    shares: Float[np.ndarray, " episode"]

    @property
    def n_episodes(self) -> int:
        """E."""
        return len(self.starts)

    @property
    def horizon(self) -> int:
        """T, steps of the longest episode."""
        return int(self.lengths.max())

    @cached_property
    def episodes(self) -> Int[np.ndarray, " row"]:
        """(N,) number of the episode of each row."""
        return np.repeat(np.arange(self.n_episodes), self.lengths)

    @cached_property
    def last(self) -> Float[np.ndarray, " episode"]:
        """(E,) logarithm of the weight of each whole episode."""
        return self.log_weights[self.starts + self.lengths - 1]

    @cached_property
    def log_shares(self) -> Float[np.ndarray, " episode"]:
        """(E,)"""
        return np.log(self.shares)

    @cached_property
    def log_totals(self) -> Float[np.ndarray, " step"]:
        """(T,) log Σ_i share_i · w_t of episode i; −inf from the step on where no weight is left."""
        return self._log_sums(1)

    @cached_property
    def effective_sizes(self) -> Float[np.ndarray, " step"]:
        """(T,) (Σw)² / Σw² over episodes at each step; 0 where no weight is left."""
        totals = self.log_totals
        present = totals > _NEVER
        sizes = np.zeros(self.horizon)
        sizes[present] = np.exp(2.0 * totals[present] - self._log_sums(2)[present])
        return sizes

    @cached_property
    def relative(self) -> Float[np.ndarray, " row"]:
        """(N,) w_t / Σ_i share_i w_t: self-normalised weights, on average one."""
        totals = self.log_totals[self.steps]
        present = totals > _NEVER
        relative = np.zeros(len(totals))
        relative[present] = np.exp(self.log_weights[present] - totals[present])
        return relative

    def episode_sums(self, rows: Float[np.ndarray, " row"]) -> Float[np.ndarray, " episode"]:
        """(E,) sums over the rows of each episode."""
        return np.add.reduceat(rows, self.starts)

    def _log_sums(self, power: int) -> Float[np.ndarray, " step"]:
        """(T,) log Σ_i (share_i w_t)^power, ended episodes with their last weight."""
        rows = power * (self.log_weights + self.log_shares[self.episodes])
        ending = power * (self.last + self.log_shares)
        over = np.logaddexp.accumulate(_log_sums_by(ending, self.lengths, self.horizon + 1))
        return np.logaddexp(_log_sums_by(rows, self.steps, self.horizon), over[: self.horizon])


def make_weights(
    transitions: Transitions, log_ratios: Float[np.ndarray, " row"], clip: float | None = None
) -> EpisodeWeights:
    """Products of ratios along each episode; ``clip`` caps the cumulative weights.

    Raises DataError for a log without episodes and for row weights that vary inside an episode; ConfigError
    for a clip that is not positive.
    """
    if not transitions.has_episodes:
        raise DataError(
            "importance weights need whole episodes, this log has rows that stand alone; add episode_ids"
        )
    if clip is not None and not clip > 0.0:
        raise ConfigError(f"clip is {clip}; give a positive cap of the weights, or None")
    starts = np.asarray(transitions.episode_starts)
    log_weights = np.concatenate([np.cumsum(part) for part in np.split(log_ratios, starts[1:])])
    if clip is not None:
        log_weights = np.minimum(log_weights, math.log(clip))
    assert transitions.steps is not None, "a log with episodes has steps"
    return EpisodeWeights(
        log_weights=log_weights,
        steps=np.asarray(transitions.steps),
        starts=starts,
        lengths=np.asarray(transitions.episode_lengths),
        shares=_shares(transitions),
    )


def effective_size(log_weights: Float[np.ndarray, " unit"]) -> float:
    """(Σw)² / Σw² of weights given as logarithms; 0 when all are zero."""
    largest = float(np.max(log_weights, initial=_NEVER))
    if largest == _NEVER:
        return 0.0
    weights = np.exp(log_weights - largest)
    return float(weights.sum() ** 2 / np.square(weights).sum())


def _shares(transitions: Transitions) -> Float[np.ndarray, " episode"]:
    starts, lengths = transitions.episode_starts, transitions.episode_lengths
    if transitions.weights is None:
        return np.full(len(starts), 1.0 / len(starts))
    weights = np.asarray(transitions.weights, dtype=np.float64)
    own = weights[starts]
    uneven = np.flatnonzero(weights != np.repeat(own, lengths))
    if len(uneven):
        raise DataError(
            f"weights change inside an episode (row {int(uneven[0])}); importance weights belong to whole "
            "episodes: give all rows of an episode the same weight"
        )
    if not (own > 0.0).all():
        raise DataError("some episodes have weight zero; leave them out with select_episodes")
    return own / own.sum()


def _log_sums_by(
    logs: Float[np.ndarray, " entry"], groups: Int[np.ndarray, " entry"], size: int
) -> Float[np.ndarray, " group"]:
    """(size,) log Σ exp over the entries of each group; −inf for a group of zeros or of nothing."""
    largest = np.full(size, _NEVER)
    np.maximum.at(largest, groups, logs)
    shift = np.where(largest > _NEVER, largest, 0.0)
    sums = np.bincount(groups, weights=np.exp(logs - shift[groups]), minlength=size)
    with np.errstate(divide="ignore"):
        return np.log(sums) + shift
