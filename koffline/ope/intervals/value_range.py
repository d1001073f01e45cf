"""The extremes of cᵀθ over two ellipsoids, parameters that fit the data and are not too large."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from koffline.ope.features import FeatureSystem

_GRID = np.logspace(-16.0, 6.0, 89)  # relative to the largest curvature


@dataclass(frozen=True, eq=False)
class Feasible:
    """{θ: V̂(θ) = ‖v − Bθ‖² ≤ λ, ‖θ − θ0‖ ≤ ρ} in the singular basis of B, for any λ and ρ.

    ``values (p,)``: singular values. ``gap (p,)``: v − Bθ0 along the left vectors, ``rest``: its length
    beside them. ``direction (p,)``: c along the right ones. ``offset``: cᵀθ0.
    """

    values: np.ndarray
    gap: np.ndarray
    rest: float
    direction: np.ndarray
    offset: float

    @classmethod
    def of(cls, system: FeatureSystem) -> Feasible:
        """The system's constraints around its best constant."""
        centre = best_constant(system)
        matrix, vector = system.projected[:, :-1], system.projected[:, -1]
        missing = matrix.shape[1] - matrix.shape[0]
        if missing > 0:  # more parameters than instruments: empty instruments complete the basis
            matrix = torch.cat([matrix, matrix.new_zeros(missing, matrix.shape[1])])
            vector = torch.cat([vector, vector.new_zeros(missing)])
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        gap = vector - matrix @ centre
        along = left.mT @ gap
        return cls(
            values=values.numpy(),
            gap=along.numpy(),
            rest=float((gap - left @ along).norm()),
            direction=(right @ system.start_mean).numpy(),
            offset=system.value(centre),
        )

    @cached_property
    def squares(self) -> np.ndarray:
        """Curvatures (p,): squared singular values."""
        return np.square(self.values)

    @cached_property
    def pull(self) -> np.ndarray:
        """Bᵀ(v − Bθ0) along the right vectors, (p,)."""
        return self.values * self.gap

    @cached_property
    def loss(self) -> float:
        """Loss V̂(θ0)."""
        return float(self.gap @ self.gap) + self.rest**2

    @cached_property
    def taus(self) -> np.ndarray:
        """Grid (T,) of multipliers τ."""
        return _GRID * max(float(self.squares.max()), 1e-12)

    def fitted_norm(self, ridge: float) -> float:
        """‖θ̂ − θ0‖ of the minimiser with this ridge, relative to the mean curvature."""
        return float(np.linalg.norm(self.pull / (self.squares + ridge * self.squares.mean())))

    def least_loss(self, norm_bound: float) -> float:
        """The smallest V̂ in the ball, from below: max over τ of min over θ of V̂ + τ(‖θ − θ0‖² − ρ²)."""
        return max(0.0, float((self._losses(self.taus) - self.taus * norm_bound**2).max()))

    def value_range(self, threshold: float, norm_bound: float) -> dict[str, float] | None:
        """The extremes of cᵀθ as ``low`` and ``high``, with their τ; None where no θ is feasible.

        For any τ ≥ 0 the sum of both constraints is one ellipsoid around θ_τ = θ0 + (BᵀB + τI)⁻¹Bᵀ(v − Bθ0),
        so cᵀθ ≤ cᵀθ_τ + sqrt([λ + τρ² − min(V̂ + τ‖θ − θ0‖²)] · cᵀ(BᵀB + τI)⁻¹c): valid for every τ, and the
        least of them is the maximum itself (strong duality); infinite τ: the ball alone.
        (Feng et al. 2020, the feature-space bound)
        """
        if np.any(threshold + self.taus * norm_bound**2 - self._losses(self.taus) < 0.0):
            return None
        high, tau_high = self._extreme(threshold, norm_bound, 1.0)
        low, tau_low = self._extreme(threshold, norm_bound, -1.0)
        ends = {"low": self.offset - low, "high": self.offset + high}
        return {**ends, "tau_low": tau_low, "tau_high": tau_high}

    def _losses(self, taus: np.ndarray) -> np.ndarray:
        """min over θ of V̂ + τ‖θ − θ0‖², (T,)."""
        return self.loss - (self.pull**2 / (self.squares + taus[:, None])).sum(axis=1)

    def _extreme(self, threshold: float, norm_bound: float, sign: float) -> tuple[float, float]:
        """The least bound of ± (cᵀθ − cᵀθ0) near the best τ of the grid, or that of the ball alone; its τ."""
        from scipy.optimize import minimize_scalar

        def bounds_at(taus: np.ndarray) -> np.ndarray:
            curvature = self.squares + taus[:, None]
            centre = sign * (self.direction * self.pull / curvature).sum(axis=1)
            room = threshold + taus * norm_bound**2 - self._losses(taus)
            return centre + np.sqrt(np.maximum(room, 0.0) * (self.direction**2 / curvature).sum(axis=1))

        bounds = bounds_at(self.taus)
        best = int(np.argmin(bounds))
        found = minimize_scalar(
            lambda log: float(bounds_at(np.exp([log]))[0]),
            bounds=tuple(np.log(self.taus[[max(best - 1, 0), min(best + 1, len(bounds) - 1)]])),
            method="bounded",
            options={"xatol": 1e-10},
        )
        ball = (norm_bound * float(np.linalg.norm(self.direction)), math.inf)
        return min((float(bounds[best]), float(self.taus[best])), (float(found.fun), math.exp(found.x)), ball)


def best_constant(system: FeatureSystem) -> Float[Tensor, " parameter"]:
    """θ0: the constant that solves the Bellman equation on average where the class has one, else zero."""
    weights = system.row_weights
    level = (weights @ system.rewards) / (weights @ (1.0 - system.discounts))
    return torch.where(system.free, level, torch.zeros_like(system.start_mean))
