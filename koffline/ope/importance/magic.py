"""MAGIC: the blend of the model and weighted doubly robust estimates with the least estimated error."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy.optimize import nnls

from koffline.ope.importance.statistics import StepwiseMean

_RIDGE = 1e-10  # of the trace: equal estimates make the matrix singular, any of their blends is as good
_MOST_CUTS = 25
_BIAS_LEVEL = 0.5  # of the interval of the longest estimate, as in the paper


@dataclass(frozen=True, eq=False)
class Blend:
    """Σ_j x_j g_j, g_j the estimate that follows weighted residuals up to step j and the model from there.

    ``cuts``: last step of each, −1 is the model alone and None the whole log; ``mix`` (J,) sums to one.
    """

    whole: StepwiseMean
    cuts: tuple[int | None, ...]
    mix: Float[np.ndarray, " cut"]

    @property
    def value(self) -> float:
        """The blend."""
        return float(self.mix @ self.whole.partial_values(self.cuts))


def magic(whole: StepwiseMean, draws: Float[np.ndarray, " draw"]) -> Blend:
    """Blend the partial estimates of a weighted doubly robust one.

    Error of a mix x: xᵀ(Ω + b bᵀ)x with Ω the jackknife covariance of the g_j (the weights' noise included)
    and b_j how far g_j lies outside the bootstrap interval of the whole estimate at level 0.5.
    ``draws``: the whole estimate of resampled episodes, of which there are two at least.
    (Thomas and Brunskill 2016, algorithm 1)
    """
    cuts = cut_steps(whole.weights.horizon)
    values, deviations = whole.partial_values(cuts), whole.partial_deviations(cuts)
    low, high = np.quantile(draws, [0.5 - _BIAS_LEVEL / 2.0, 0.5 + _BIAS_LEVEL / 2.0])
    # The interval holds the whole estimate itself: its own bias is taken as none.
    low, high = min(low, values[-1]), max(high, values[-1])
    bias = np.maximum(values - high, 0.0) - np.maximum(low - values, 0.0)
    count = len(deviations)
    covariance = (count - 1) / count * deviations.T @ deviations  # (J, E) @ (E, J) = (J, J)
    return Blend(whole, cuts, least_error_mix(covariance + np.outer(bias, bias)))


def cut_steps(horizon: int) -> tuple[int | None, ...]:
    """−1, 0, 1, 2, 4, … and None for the whole log: at most 25, spread evenly in the logarithm."""
    inner = np.unique(np.round(np.geomspace(1, max(horizon - 1, 1), _MOST_CUTS - 2)).astype(int)) - 1
    return (-1, *(int(step) for step in inner if step < horizon - 1), None)


def least_error_mix(errors: Float[np.ndarray, "cut cut"]) -> Float[np.ndarray, " cut"]:
    """The x ≥ 0 with Σx = 1 of least xᵀ A x, A symmetric and positive semidefinite.

    Its direction is that of the y ≥ 0 that minimises ½ yᵀAy − Σy (the conditions of both optima agree), a
    non-negative least-squares problem: with A = LLᵀ minimise ‖Lᵀy − L⁻¹1‖².
    """
    size, trace = len(errors), float(np.trace(errors))
    if trace == 0.0:
        return np.full(size, 1.0 / size)
    scaled = errors / trace + _RIDGE * np.eye(size)
    factor = np.linalg.cholesky(scaled)
    mix, _ = nnls(factor.T, np.linalg.solve(factor, np.ones(size)), maxiter=50 * size)
    return mix / mix.sum()
