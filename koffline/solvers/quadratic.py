"""Quadratic functions of a parameter vector, minimised exactly with a ridge; the kernel loss as one of them.

With A = [Z, r] a linear residual is A[−θ; 1], and δᵀKδ = [−θ; 1]ᵀ(AᵀKA)[−θ; 1]. One pass over the data gives
these (p + 1) × (p + 1) forms; every `diag_weight`, ridge and θ afterwards costs nothing that grows with rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from koffline.errors import ConfigError, DataError
from koffline.kernel_loss import check_diag_weight


@dataclass(frozen=True, eq=False)
class Quadratic:
    """L(θ) = θᵀCθ − 2 sᵀθ + c, for one parameter vector or a stack of R."""

    curvature: Float[Tensor, "*replica parameter parameter"]
    slope: Float[Tensor, "*replica parameter"]
    constant: Float[Tensor, "*replica"]

    @classmethod
    def of_residual(cls, matrix: Float[Tensor, "*replica column column"]) -> Quadratic:
        """From a form in [Z, r]: L(θ) = [−θ; 1]ᵀ matrix [−θ; 1]."""
        return cls(matrix[..., :-1, :-1], matrix[..., :-1, -1], matrix[..., -1, -1])

    def at(self, theta: Float[Tensor, "*replica parameter"]) -> Float[Tensor, "*replica"]:
        """L(θ)."""
        return (theta * (_times(self.curvature, theta) - 2.0 * self.slope)).sum(dim=-1) + self.constant

    def detach(self) -> Quadratic:
        """The same without a graph."""
        return Quadratic(self.curvature.detach(), self.slope.detach(), self.constant.detach())

    def ridge_scale(self, free: Bool[Tensor, " parameter"]) -> Float[Tensor, "*replica"]:
        """Mean curvature along the parameters that are not free: the unit of a relative ridge."""
        return mean_curvature(self.curvature.diagonal(dim1=-2, dim2=-1), free)


@dataclass(frozen=True, eq=False)
class ResidualForms:
    """Forms (…, p + 1, p + 1) of rows a_i with weights w_i.

    total: Σ_ij w_i w_j k_ij a_i a_jᵀ. own: its part i = j. square: Σ_i w_i k_ii a_i a_iᵀ.
    weight, weight_squares: Σ w_i and Σ w_i² (the number of rows, without weights).
    """

    total: Float[Tensor, "*fold column column"]
    own: Float[Tensor, "*fold column column"]
    square: Float[Tensor, "*fold column column"]
    weight: float
    weight_squares: float

    def loss(self, diag_weight: float | None = None) -> Quadratic:
        """(1 − w) · U + w · mean_i(k_ii δ_i²) as a function of θ; None: the V-statistic (w = 1/n).

        (Feng et al. 2019, sec:batch_lv)
        """
        if diag_weight is None:
            return Quadratic.of_residual(self.total / self.weight**2)
        check_diag_weight(diag_weight)
        pairs = self.weight**2 - self.weight_squares
        if diag_weight < 1.0 and pairs <= 0.0:
            raise DataError("the U-statistic needs two rows; give more rows or diag_weight 1")
        off = 0.0 if diag_weight == 1.0 else (1.0 - diag_weight) / pairs
        own = self.square * (diag_weight / self.weight)
        return Quadratic.of_residual((self.total - self.own) * off + own)


@dataclass(frozen=True, eq=False)
class RidgeSolution:
    """A minimiser. degrees_of_freedom: Σ e/(e + λ) over eigenvalues e of the curvature, free ones count one.

    condition: largest over smallest curvature of what was minimised, infinite where the data leave a
    direction open. weights are NaN where there is no minimum.
    """

    weights: Float[Tensor, "*replica parameter"]
    degrees_of_freedom: Float[Tensor, "*replica"]
    condition: Float[Tensor, "*replica"]


class RidgePath:
    """Minimisers of L(θ) + λ‖θ‖² over the parameters that are not free, for any λ = ridge · (mean curvature).

    One eigendecomposition serves all ridges; free parameters are eliminated first. With ridge 0, directions
    that the data leave open stay at zero.
    """

    def __init__(self, quadratic: Quadratic, free: Bool[Tensor, " parameter"]) -> None:
        self._free = free
        curvature, slope, bound = quadratic.curvature, quadratic.slope, ~free
        inner, self._cross = curvature[..., free, :][..., free], curvature[..., free, :][..., bound]
        self._broken = ~torch.isfinite(curvature).all(dim=-1).all(dim=-1) | ~torch.isfinite(slope).all(dim=-1)
        self._inverse = torch.linalg.pinv(_defused(inner, self._broken), hermitian=True)
        self._free_slope = slope[..., free]
        outer = curvature[..., bound, :][..., bound] - self._cross.mT @ self._inverse @ self._cross
        pull = slope[..., bound] - _times(self._cross.mT @ self._inverse, self._free_slope)
        self._values, self._vectors = torch.linalg.eigh(_defused(0.5 * (outer + outer.mT), self._broken))
        largest = self._values.abs().amax(dim=-1)
        size = curvature.diagonal(dim1=-2, dim2=-1)[..., bound].abs().amax(dim=-1)  # before the subtraction
        self._tiny = torch.finfo(curvature.dtype).eps * curvature.shape[-1] * torch.maximum(largest, size)
        self._pull = _times(self._vectors.mT, pull)
        self._scale = quadratic.ridge_scale(free)

    def solve(self, ridge: float) -> RidgeSolution:
        """The minimiser for one ridge."""
        check_ridge(ridge)
        tiny = self._tiny.unsqueeze(-1)
        values = torch.where(self._values.abs() <= tiny, 0.0, self._values)
        total = values + (ridge * self._scale).unsqueeze(-1)
        open_ = total <= tiny
        safe = torch.where(open_, 1.0, total)
        outer = _times(self._vectors, torch.where(open_, 0.0, self._pull / safe))
        inner = _times(self._inverse, self._free_slope - _times(self._cross, outer))
        weights = outer.new_zeros(*outer.shape[:-1], len(self._free))
        weights[..., ~self._free], weights[..., self._free] = outer, inner
        unbounded = (total < -tiny).any(dim=-1) | self._broken
        largest, least = total.amax(dim=-1), total.amin(dim=-1)
        return RidgeSolution(
            weights=torch.where(unbounded.unsqueeze(-1), math.nan, weights),
            degrees_of_freedom=torch.where(open_, 0.0, values / safe).sum(dim=-1) + int(self._free.sum()),
            condition=torch.where(least <= self._tiny, math.inf, largest / least),
        )


def mean_curvature(
    diagonal: Float[Tensor, "*replica parameter"], free: Bool[Tensor, " parameter"]
) -> Float[Tensor, "*replica"]:
    """Mean absolute entry over the parameters that are not free."""
    return diagonal[..., ~free].abs().mean(dim=-1)


def check_ridge(ridge: float) -> None:
    """Raise ConfigError for a negative or infinite ridge."""
    if not (math.isfinite(ridge) and ridge >= 0.0):
        raise ConfigError(f"ridge is {ridge}; give a number that is not negative")


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def _defused(matrix: Tensor, broken: Tensor) -> Tensor:
    """The matrices, zeros in place of broken ones: one diverged replica must not stop the others."""
    return torch.where(broken[..., None, None], 0.0, matrix)
