"""Quadratic functions of a parameter vector, minimised exactly with a ridge."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from koffline.errors import ConfigError


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
        bent = (self.curvature @ theta.unsqueeze(-1)).squeeze(-1)
        return (theta * (bent - 2.0 * self.slope)).sum(dim=-1) + self.constant

    def detach(self) -> Quadratic:
        """The same without a graph."""
        return Quadratic(self.curvature.detach(), self.slope.detach(), self.constant.detach())

    def ridge_scale(self, free: Bool[Tensor, " parameter"]) -> Float[Tensor, "*replica"]:
        """Mean curvature along the parameters that are not free: the unit of a relative ridge."""
        return mean_curvature(self.curvature.diagonal(dim1=-2, dim2=-1), free)


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
    """Minimisers of L(θ) + λ‖θ − toward‖² over the parameters that are not free, for any λ.

    λ = ridge · (mean curvature). One eigendecomposition serves all ridges; free parameters are eliminated
    first. With ridge 0, directions that the data leave open stay at `toward`.
    """

    def __init__(
        self,
        quadratic: Quadratic,
        free: Bool[Tensor, " parameter"],
        toward: Float[Tensor, "*replica parameter"] | None = None,
    ) -> None:
        self._quadratic, self._free = quadratic, free
        curvature = quadratic.curvature
        self._start = torch.zeros_like(quadratic.slope) if toward is None else toward.to(quadratic.slope)
        bound = ~free
        slope = quadratic.slope - (curvature @ self._start.unsqueeze(-1)).squeeze(-1)
        inner, self._cross = curvature[..., free, :][..., free], curvature[..., free, :][..., bound]
        broken = ~torch.isfinite(curvature).all(dim=-1).all(dim=-1) | ~torch.isfinite(slope).all(dim=-1)
        self._broken = broken
        self._inverse = torch.linalg.pinv(_defused(inner, broken), hermitian=True)
        self._free_slope = slope[..., free]
        outer = curvature[..., bound, :][..., bound] - self._cross.mT @ self._inverse @ self._cross
        pull = slope[..., bound] - _times(self._cross.mT @ self._inverse, self._free_slope)
        self._values, self._vectors = torch.linalg.eigh(_defused(0.5 * (outer + outer.mT), broken))
        largest = self._values.abs().amax(dim=-1)
        size = curvature.diagonal(dim1=-2, dim2=-1)[..., bound].abs().amax(dim=-1)  # before the subtraction
        self._tiny = torch.finfo(curvature.dtype).eps * curvature.shape[-1] * torch.maximum(largest, size)
        self._pull = _times(self._vectors.mT, pull)
        self._scale = quadratic.ridge_scale(free)

    def solve(self, ridge: float) -> RidgeSolution:
        """The minimiser for one ridge."""
        check_ridge(ridge)
        added = (ridge * self._scale).unsqueeze(-1)
        tiny = self._tiny.unsqueeze(-1)
        values = torch.where(self._values.abs() <= tiny, 0.0, self._values)
        total = values + added
        open_ = total <= tiny
        safe = torch.where(open_, 1.0, total)
        outer = _times(self._vectors, torch.where(open_, 0.0, self._pull / safe))
        inner = _times(self._inverse, self._free_slope - _times(self._cross, outer))
        weights = self._start.clone()
        weights[..., ~self._free] += outer
        weights[..., self._free] += inner
        unbounded = (total < -tiny).any(dim=-1) | self._broken
        rank = int(self._free.sum())
        largest, least = total.amax(dim=-1), total.amin(dim=-1)
        return RidgeSolution(
            weights=torch.where(unbounded.unsqueeze(-1), math.nan, weights),
            degrees_of_freedom=torch.where(open_, 0.0, values / safe).sum(dim=-1) + rank,
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
