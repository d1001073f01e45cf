"""The extremes of cᵀθ over two ellipsoids: parameters that fit the data and are not too large."""

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


@dataclass(frozen=True)
class ValueRange:
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
        curvature = self.squares[None] + self.taus[:, None]  # (T, p)
        losses = self.loss - (self.pull**2 / curvature).sum(axis=1) - self.taus * norm_bound**2
        return max(0.0, float(losses.max()))

    def value_range(self, threshold: float, norm_bound: float) -> ValueRange | None:
        """The extremes of cᵀθ; None where no θ is feasible.

        For any τ ≥ 0 the sum of both constraints is one ellipsoid around θ_τ = θ0 + (BᵀB + τI)⁻¹Bᵀ(v − Bθ0),
        so cᵀθ ≤ cᵀθ_τ + sqrt([λ + τρ² − min(V̂ + τ‖θ − θ0‖²)] · cᵀ(BᵀB + τI)⁻¹c): valid for every τ, and the
        least of them is the maximum itself (strong duality).
        (Feng et al. 2020, the feature-space bound)
        """
        curvature = self.squares[None] + self.taus[:, None]
        losses = self.loss - (self.pull**2 / curvature).sum(axis=1)
        if np.any(threshold + self.taus * norm_bound**2 - losses < 0.0):
            return None
        highs = self._bounds(self.taus, threshold, norm_bound, 1.0)
        lows = self._bounds(self.taus, threshold, norm_bound, -1.0)
        high, tau_high = self._polish(highs, threshold, norm_bound, 1.0)
        low, tau_low = self._polish(lows, threshold, norm_bound, -1.0)
        return ValueRange(self.offset - low, self.offset + high, tau_low, tau_high)

    def _bounds(self, taus: np.ndarray, threshold: float, norm_bound: float, sign: float) -> np.ndarray:
        """The upper bound of ± (cᵀθ − cᵀθ0) at each τ, (T,)."""
        curvature = self.squares[None] + taus[:, None]
        centre = sign * (self.direction * self.pull / curvature).sum(axis=1)
        room = threshold + taus * norm_bound**2 - self.loss + (self.pull**2 / curvature).sum(axis=1)
        spread = (self.direction**2 / curvature).sum(axis=1)
        return centre + np.sqrt(np.maximum(room, 0.0) * spread)

    def _polish(
        self, bounds: np.ndarray, threshold: float, norm_bound: float, sign: float
    ) -> tuple[float, float]:
        """The least bound near the best grid point, or that of the ball alone."""
        from scipy.optimize import minimize_scalar

        best = int(np.argmin(bounds))
        ends = np.log(self.taus[[max(best - 1, 0), min(best + 1, len(bounds) - 1)]])
        found = minimize_scalar(
            lambda log: float(self._bounds(np.exp([log]), threshold, norm_bound, sign)[0]),
            bounds=(float(ends[0]), float(ends[1])),
            method="bounded",
            options={"xatol": 1e-10},
        )
        options = [(float(bounds[best]), float(self.taus[best])), (float(found.fun), math.exp(found.x))]
        options.append((norm_bound * float(np.linalg.norm(self.direction)), math.inf))
        return min(options)


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
