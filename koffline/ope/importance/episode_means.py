"""Means over episodes, with what intervals need.

``value``: the estimate. ``deviations`` (E,): the estimate minus the estimate without
the episode; NaN if nothing would be left. With ``clusters`` (E,) the same for leaving
out clusters, (C,), to first order. ``resampled(counts)`` (B,): the estimate when
episode i counts ``counts[b, i]`` times; NaN if nothing is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import nnls

from koffline.data.units import cluster_sums
from koffline.ope.importance.episodes import EpisodeProblem

Counts = Float[np.ndarray, "draw episode"]
_ALL = 1.0 - 1e-9  # an episode with this share of the weight leaves none for the others
# Constants of MAGIC.
_RIDGE = 1e-10  # relative to the trace: equal estimates make the matrix singular
_MOST_CUTS = 25
_BIAS_LEVEL = 0.5  # level of the interval of the whole estimate, as in the paper


@dataclass(frozen=True, eq=False)
class WeightedMean:
    """Σ share·w·y / Σ share·w, with weights given as logarithms; not all weights may be
    zero.
    """

    log_weights: Float[np.ndarray, " episode"]
    values: Float[np.ndarray, " episode"]
    shares: Float[np.ndarray, " episode"]
    clusters: np.ndarray | None = None

    @cached_property
    def _parts(self) -> Float[np.ndarray, " episode"]:
        """Share (E,) of each episode in the weights, with sum one."""
        parts = self.shares * np.exp(self.log_weights - self.log_weights.max())
        return parts / parts.sum()

    @cached_property
    def value(self) -> float:
        """The weighted mean."""
        return float(self._parts @ self.values)

    @cached_property
    def deviations(self) -> Float[np.ndarray, " episode"]:
        """Deviations (E,): p (y − mean) / (1 − p), with p the episode's part of the
        weights.
        """
        rest = np.where(self._parts < _ALL, 1.0 - self._parts, np.nan)
        return _of_clusters(
            self.clusters, self._parts * (self.values - self.value) / rest
        )

    def resampled(self, counts: Counts) -> Float[np.ndarray, " draw"]:
        """(B,) weighted means of resampled episodes."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return (counts @ (self._parts * self.values)) / (counts @ self._parts)


@dataclass(frozen=True, eq=False)
class StepwiseMean:
    """Σ share·y0 + Σ_t γ^t Σ_i share·w_t·x_t / Σ_i share·w_t.

    ``rows`` (N,) are x; ``first`` (E,) is y0. Ended episodes keep their last weight
    with x = 0. Steps without weight add nothing. A partial sum is y0 plus the first
    steps: 0 steps give y0 alone, T steps the whole.
    """

    episodes: EpisodeProblem
    rows: Float[np.ndarray, " row"]
    first: Float[np.ndarray, " episode"]

    @property
    def clusters(self) -> np.ndarray | None:
        """Numbers (E,) of the episodes' clusters."""
        return self.episodes.clusters

    @cached_property
    def value(self) -> float:
        """The estimate."""
        return float(self.partial_values([self.episodes.horizon])[0])

    @cached_property
    def deviations(self) -> Float[np.ndarray, " episode"]:
        """Estimate minus that without each episode, (E,)."""
        return self.partial_deviations([self.episodes.horizon])[:, 0]

    def resampled(self, counts: Counts) -> Float[np.ndarray, " draw"]:
        """(B,) estimates from resampled episodes."""
        shares = self.episodes.shares
        totals = (counts @ (shares * self.first)) / (counts @ shares)
        for steps, parts, x in self._blocks():
            below = counts @ parts  # (B, E) @ (E, b) = (B, b)
            means = np.divide(
                counts @ (parts * x), below, out=np.zeros_like(below), where=below > 0.0
            )
            totals += means @ self.episodes.gamma**steps
        return totals

    def partial_values(self, cuts: Sequence[int]) -> Float[np.ndarray, " cut"]:
        """Partial sums (J,) for these numbers of steps."""
        means = np.concatenate(
            [(parts * x).sum(axis=0) for _, parts, x in self._blocks()]
        )
        sums = np.cumsum(self.episodes.gamma ** np.arange(len(means)) * means)
        return self.episodes.shares @ self.first + np.append(0.0, sums)[list(cuts)]

    def partial_deviations(
        self, cuts: Sequence[int]
    ) -> Float[np.ndarray, "episode cut"]:
        """Partial sums minus those without the episode, (E, J).

        If p is an episode's part of a step's weights, leaving it out moves the mean of
        x by p (x − mean) / (1 − p). A step that would be left without weight loses its
        mean.
        """
        shares = self.episodes.shares
        wanted = np.asarray(cuts)
        total = _pull(shares, self.first, shares @ self.first)
        deviations = np.repeat(total[:, None], len(wanted), axis=1)
        for steps, parts, x in self._blocks():
            moves = self.episodes.gamma**steps * _pull(
                parts, x, (parts * x).sum(axis=0)
            )
            sums = total[:, None] + np.cumsum(moves, axis=1)
            here = np.isin(wanted - 1, steps)
            deviations[:, here] = sums[:, wanted[here] - 1 - steps[0]]
            total = sums[:, -1]
        return _of_clusters(self.clusters, deviations)

    def _blocks(
        self,
    ) -> Iterator[tuple[Int[np.ndarray, " step"], np.ndarray, np.ndarray]]:
        """Blocks of steps: their numbers, the parts (E, b) of episodes in the weights,
        and x (E, b).
        """
        for steps, rows, parts in self.episodes.blocks():
            yield (
                steps,
                parts,
                np.where(steps < self.episodes.lengths[:, None], self.rows[rows], 0.0),
            )


EpisodeStatistic = WeightedMean | StepwiseMean


def plain_mean(
    values: Float[np.ndarray, " episode"],
    shares: Float[np.ndarray, " episode"],
    clusters: Any = None,
) -> WeightedMean:
    """Mean Σ share·y without importance weights."""
    return WeightedMean(np.zeros(len(values)), values, shares, clusters)


def _of_clusters(clusters: np.ndarray | None, deviations: np.ndarray) -> np.ndarray:
    """Deviations (C, …) for leaving out clusters, from those (E, …) for episodes; exact
    for equal weights.
    """
    if clusters is None:
        return deviations
    rest = len(deviations) - cluster_sums(clusters, np.ones(len(deviations)))
    factor = (len(deviations) - 1.0) / np.where(rest > 0.0, rest, np.nan)
    return (factor * cluster_sums(clusters, deviations).T).T


def _pull(
    parts: np.ndarray, values: np.ndarray | float, means: np.ndarray | float
) -> np.ndarray:
    """By how much a weighted mean exceeds the mean without an entry, p (x − mean) / (1
    − p), for each entry x with the part p of the weight.

    parts: p. values: x. means: with all entries. An entry that has all the weight takes
    the whole mean with it.
    """
    has_all = parts >= _ALL
    rest = np.where(has_all, 1.0, 1.0 - parts)
    moves = parts * (values - means) / rest
    return np.where(has_all, means, moves)


def standard_error(deviations: Float[np.ndarray, " episode"]) -> float | None:
    """Jackknife standard error sqrt((E − 1)/E · Σ deviation²); None if one episode has
    all the weight.

    For a plain mean it is the textbook s / √E. (Efron 1982)
    """
    count = len(deviations)
    if count < 2 or np.isnan(deviations).any():
        return None
    return float(np.sqrt((count - 1) / count * np.square(deviations).sum()))


def magic(
    whole: StepwiseMean, draws: Float[np.ndarray, " draw"]
) -> tuple[list[int], Float[np.ndarray, " cut"]]:
    """Cuts and shares x of a blend Σ_j x_j g_j of partial estimates of a weighted
    doubly robust estimator.

    g_j uses weighted residuals for j steps and then the model: 0 is the model alone, T
    the whole log. Shares sum to one.

    The error of a blend x is xᵀ(Ω + b bᵀ)x, with Ω the jackknife covariance of the g_j
    (including the weights' noise) and b_j the distance of g_j from the bootstrap
    interval of the whole estimate at level 0.5. ``draws``: the whole estimate on
    resampled episodes. There must be at least two episodes. (Thomas and Brunskill 2016,
    algorithm 1)
    """
    cuts = cut_steps(whole.episodes.horizon)
    values = whole.partial_values(cuts)
    deviations = whole.partial_deviations(cuts)
    low, high = np.quantile(draws, [0.5 - _BIAS_LEVEL / 2.0, 0.5 + _BIAS_LEVEL / 2.0])
    # The interval contains the whole estimate, whose own bias counts as zero.
    low = min(low, values[-1])
    high = max(high, values[-1])
    bias = np.maximum(values - high, 0.0) - np.maximum(low - values, 0.0)
    count = len(deviations)
    # (J, E) @ (E, J) = (J, J)
    covariance = (count - 1) / count * deviations.T @ deviations
    return cuts, least_error_mix(covariance + np.outer(bias, bias))


def cut_steps(horizon: int) -> list[int]:
    """Numbers of steps 0, 1, 2, 4, … and the horizon: at most 25, spread evenly in the
    logarithm.
    """
    inner = np.round(np.geomspace(1, max(horizon - 1, 1), _MOST_CUTS - 2)).astype(int)
    return [0, *np.unique(inner[inner < horizon]).tolist(), horizon]


def least_error_mix(errors: Float[np.ndarray, "cut cut"]) -> Float[np.ndarray, " cut"]:
    """The x ≥ 0 with Σx = 1 that minimises xᵀ A x, A symmetric and positive
    semidefinite.

    Its direction is that of the y ≥ 0 that minimises ½ yᵀAy − Σy (both problems have
    the same optimality conditions), a non-negative least-squares problem: with A = LLᵀ
    minimise ‖Lᵀy − L⁻¹1‖².
    """
    size = len(errors)
    trace = float(np.trace(errors))
    if trace == 0.0:
        return np.full(size, 1.0 / size)
    scaled = errors / trace + _RIDGE * np.eye(size)
    factor = np.linalg.cholesky(scaled)
    mix, _ = nnls(factor.T, np.linalg.solve(factor, np.ones(size)), maxiter=50 * size)
    return mix / mix.sum()
