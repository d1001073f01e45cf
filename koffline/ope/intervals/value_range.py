"""The extremes of cᵀθ over two ellipsoids, parameters that fit the data and are not too large; their dual."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from koffline.ope.features import FeatureSystem

_GRID = np.logspace(-16.0, 6.0, 89)  # relative to the largest curvature
_RIDGES = np.logspace(-14.0, 2.0, 33)  # of the closed-form weights that the dual search starts from
_NO_CURVATURE = 1e-14  # singular values below this share of the largest


class ValueRange(NamedTuple):
    """Lowest and highest value, and the multipliers τ of these bounds (inf: the ball alone)."""

    low: float
    high: float
    tau_low: float
    tau_high: float


@dataclass(frozen=True, eq=False)
class Feasible:
    """{θ: V̂(θ) = ‖v − Bθ‖² ≤ λ, ‖θ − θ0‖ ≤ ρ} in the singular basis of B, for any λ and ρ.

    ``squares (p,)``: squared singular values. ``pull (p,)``: Bᵀ(v − Bθ0), ``direction (p,)``: c, both in that
    basis. ``loss``: V̂(θ0). ``offset``: cᵀθ0.
    """

    squares: np.ndarray
    pull: np.ndarray
    direction: np.ndarray
    loss: float
    offset: float

    @cached_property
    def taus(self) -> np.ndarray:
        """The multipliers tried, (T,)."""
        return _GRID * max(float(self.squares.max()), 1e-12)

    def fitted_norm(self, ridge: float) -> float:
        """‖θ̂ − θ0‖ of the minimiser with this ridge, relative to the mean curvature."""
        return float(np.linalg.norm(self.pull / (self.squares + ridge * self.squares.mean())))

    def least_loss(self, norm_bound: float) -> float:
        """The smallest V̂ in the ball, from below: max over τ of min over θ of V̂ + τ(‖θ − θ0‖² − ρ²)."""
        return max(0.0, float((self._losses(self.taus) - self.taus * norm_bound**2).max()))

    def value_range(self, threshold: float, norm_bound: float) -> ValueRange | None:
        """The extremes of cᵀθ; None where no θ is feasible.

        For any τ ≥ 0 the sum of both constraints is one ellipsoid around θ_τ = θ0 + (BᵀB + τI)⁻¹Bᵀ(v − Bθ0),
        so cᵀθ ≤ cᵀθ_τ + sqrt([λ + τρ² − min(V̂ + τ‖θ − θ0‖²)] · cᵀ(BᵀB + τI)⁻¹c): valid for every τ, and the
        least of them is the maximum itself (strong duality).
        (Feng et al. 2020, the feature-space bound)
        """
        if np.any(threshold + self.taus * norm_bound**2 - self._losses(self.taus) < 0.0):
            return None
        high, tau_high = self._extreme(threshold, norm_bound, 1.0)
        low, tau_low = self._extreme(threshold, norm_bound, -1.0)
        return ValueRange(self.offset - low, self.offset + high, tau_low, tau_high)

    def _losses(self, taus: np.ndarray) -> np.ndarray:
        """min over θ of V̂ + τ‖θ − θ0‖², (T,)."""
        return self.loss - (self.pull**2 / (self.squares + taus[:, None])).sum(axis=1)

    def _bounds(self, taus: np.ndarray, threshold: float, norm_bound: float, sign: float) -> np.ndarray:
        """The upper bound of ± (cᵀθ − cᵀθ0) at each τ, (T,)."""
        curvature = self.squares + taus[:, None]
        centre = sign * (self.direction * self.pull / curvature).sum(axis=1)
        room = threshold + taus * norm_bound**2 - self.loss + (self.pull**2 / curvature).sum(axis=1)
        spread = (self.direction**2 / curvature).sum(axis=1)
        return centre + np.sqrt(np.maximum(room, 0.0) * spread)

    def _extreme(self, threshold: float, norm_bound: float, sign: float) -> tuple[float, float]:
        """The least bound near the best τ of the grid, or that of the ball alone, and its τ."""
        from scipy.optimize import minimize_scalar

        bounds = self._bounds(self.taus, threshold, norm_bound, sign)
        best = int(np.argmin(bounds))
        found = minimize_scalar(
            lambda log: float(self._bounds(np.exp([log]), threshold, norm_bound, sign)[0]),
            bounds=tuple(np.log(self.taus[[max(best - 1, 0), min(best + 1, len(bounds) - 1)]])),
            method="bounded",
            options={"xatol": 1e-10},
        )
        ball = (norm_bound * float(np.linalg.norm(self.direction)), math.inf)
        return min((float(bounds[best]), float(self.taus[best])), (float(found.fun), math.exp(found.x)), ball)


def feasible_set(system: FeatureSystem) -> Feasible:
    """The system's constraints around its best constant."""
    centre = best_constant(system)
    matrix, vector = system.projected[:, :-1], system.projected[:, -1]
    missing = matrix.shape[1] - matrix.shape[0]
    if missing > 0:  # more parameters than instruments: empty instruments complete the basis
        matrix = torch.cat([matrix, matrix.new_zeros(missing, matrix.shape[1])])
        vector = torch.cat([vector, vector.new_zeros(missing)])
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    gap = vector - matrix @ centre
    return Feasible(
        squares=values.square().numpy(),
        pull=(values * (left.mT @ gap)).numpy(),
        direction=(right @ system.start_mean).numpy(),
        loss=float(gap.square().sum()),
        offset=system.value(centre),
    )


def best_constant(system: FeatureSystem) -> Float[Tensor, " parameter"]:
    """θ0: the constant that solves the Bellman equation on average where the class has one, else zero."""
    weights = system.row_weights
    level = (weights @ system.rewards) / (weights @ (1.0 - system.discounts))
    return torch.where(system.free, level, torch.zeros_like(system.start_mean))


@dataclass(frozen=True, eq=False)
class DualProblem:
    """An upper bound of cᵀθ for weights ω = Ψα: offset + αᵀv + ρ‖c − Bᵀα‖ + sqrt(λ)‖α‖.

    It holds for every α at once, chosen by the data or not: cᵀθ = cᵀθ0 + αᵀv + (c − Bᵀα)ᵀ(θ − θ0) − αᵀg with
    v = (Ψᵀδ(θ0))/n, where ‖θ − θ0‖ ≤ ρ and g, the projected residual of θ, has ‖g‖² ≤ λ.
    ``matrix (m, p)``: B; ``vector (m,)``: v; ``direction (p,)``: c.
    (Feng et al. 2021, the dual bound)
    """

    matrix: np.ndarray
    vector: np.ndarray
    direction: np.ndarray
    offset: float
    norm_bound: float
    threshold: float

    @classmethod
    def of(cls, system: FeatureSystem, norm_bound: float, threshold: float) -> DualProblem:
        """The problem of a system, around its best constant."""
        centre, matrix = best_constant(system), system.projected[:, :-1]
        vector, direction = system.projected[:, -1] - matrix @ centre, system.start_mean
        offset = system.value(centre)
        return cls(matrix.numpy(), vector.numpy(), direction.numpy(), offset, norm_bound, threshold)

    def bound(self, alpha: np.ndarray) -> float:
        """The upper bound for any α (m,)."""
        balance = float(np.linalg.norm(self.direction - self.matrix.T @ alpha))
        noise = self.threshold**0.5 * float(np.linalg.norm(alpha))
        return self.offset + float(alpha @ self.vector) + self.norm_bound * balance + noise

    def mirrored(self) -> DualProblem:
        """The problem of −cᵀθ: minus its upper bound is a lower bound of cᵀθ."""
        return replace(self, direction=-self.direction, offset=-self.offset)

    def minimise(self, steps: int) -> np.ndarray:
        """α after at most ``steps`` iterations; 0: the best of the closed-form weights alone.

        Convex; searched in the span of B and v (whatever is orthogonal to it only adds noise), in
        coordinates in which the two norms have the same curvature.
        """
        starts = [(ridge, self.closed_form(ridge)) for ridge in _RIDGES]
        ridge, start = min(starts, key=lambda pair: self.bound(pair[1]))
        return start if steps == 0 else self._descend(start, ridge, steps)

    def closed_form(self, ridge: float) -> np.ndarray:
        """B(BᵀB + τI)⁻¹c, τ relative to the largest curvature: marginalised weights by ridge regression."""
        left, values, right = self._basis
        curvature = np.square(values)
        shrunk = values / (curvature + ridge * max(float(curvature.max()), 1e-300))
        return left @ (shrunk * (right @ self.direction))

    def _descend(self, start: np.ndarray, ridge: float, steps: int) -> np.ndarray:
        from scipy.optimize import minimize

        left, values, right = self._basis
        kept = values > _NO_CURVATURE * values.max()
        left, values, right = left[:, kept], values[kept], right[kept]
        rest = self.vector - left @ (left.T @ self.vector)
        length = float(np.linalg.norm(rest))
        span = np.column_stack([left, rest / length]) if length > 0.0 else left
        gain = np.append(values, 0.0)[: span.shape[1]]
        scale = 1.0 / np.sqrt(gain**2 + ridge * values.max() ** 2)
        direction, pull = right @ self.direction, span.T @ self.vector
        square = float(self.direction @ self.direction)
        missing, tiny = max(square - direction @ direction, 0.0), 1e-20 * max(square, 1e-300)

        def objective(point: np.ndarray) -> tuple[float, np.ndarray]:
            beta = scale * point
            gap = direction - (gain * beta)[: len(values)]
            balance = np.sqrt(gap @ gap + missing + tiny)
            size = np.sqrt(beta @ beta + tiny)
            slope = pull + self.threshold**0.5 * beta / size
            slope[: len(values)] -= self.norm_bound * values * gap / balance
            value = pull @ beta + self.norm_bound * balance + self.threshold**0.5 * size
            return float(value), scale * slope

        options = {"maxiter": steps, "maxfun": 3 * steps, "ftol": 1e-15, "gtol": 1e-12, "maxcor": 30}
        found = minimize(objective, (span.T @ start) / scale, jac=True, method="L-BFGS-B", options=options)
        alpha = span @ (scale * found.x)
        return alpha if self.bound(alpha) <= self.bound(start) else start

    @cached_property
    def _basis(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return np.linalg.svd(self.matrix, full_matrices=False)
