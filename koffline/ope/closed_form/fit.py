"""A value linear in features and the weights behind it: one pair of linear systems, two readings.

Every closed form here chooses θ by instruments: minimise ‖v − Bθ‖² + λ‖θ‖² with B = CᵀZ-moments and
v = r-moments of some critics. Its value cᵀθ is linear in the rewards,

    cᵀθ = (1/n) Σ w_i ω_i r_i,    ω_i = critics(x_i)ᵀ B (BᵀB + λ)⁻¹ c,

and ω is at the same time the minimiser of ‖Bᵀα − c‖² + λ‖α‖² over weights ω = criticsᵀα: the marginalised
importance weights that balance (1/n) Σ w ω Z against c. So one fit is both a value function (minimax
Q-learning) and a density ratio d^π/μ (minimax weight learning), with d^π = Σ_t γ^t P(x_t = ·) unnormalised.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from koffline.kernels import FourierFeatures
from koffline.ope.closed_form.moments import BLOCK
from koffline.ope.features import FeatureSystem
from koffline.ope.row_values import RowValues
from koffline.solvers.quadratic import Quadratic, RidgePath


@dataclass(frozen=True, eq=False)
class LinearFit:
    """θ (p,), the coefficients α of the weights ω = criticsᵀα, and how they were found; float64, units of the
    return.

    ``critics``: of kernel inputs; None: the features themselves. ``scale``: that ω is multiplied by.
    ``degrees_of_freedom``: how many parameters the data, rather than the ridge, decide. ``ridge``: relative
    to the mean curvature. ``considered``: the ridges tried and their held-out scores, smaller is better.
    """

    theta: Float[Tensor, " parameter"]
    alpha: Float[Tensor, " critic"]
    critics: FourierFeatures | None
    ridge: float
    degrees_of_freedom: float
    considered: tuple[tuple[float, float], ...] = ()
    scale: float = 1.0

    def weights(self, system: FeatureSystem) -> Float[Tensor, " row"]:
        """ω of the rows of a system."""
        if self.critics is None:
            return self.scale * (system.now @ self.alpha)
        return self.scale * weights_of_rows(system, self.critics, self.alpha)

    def row_values(self, system: FeatureSystem, unseen: float = 0.0) -> RowValues:
        """Q of the rows, of their next states and of the start states."""
        return RowValues(
            now=(system.now @ self.theta).numpy(),
            later=(system.later @ self.theta).numpy(),
            starts=(system.starts @ self.theta).numpy(),
            unseen=unseen,
        )


@dataclass(frozen=True, eq=False)
class PrimalDual:
    """θ (p,) and the coefficients α (k,) of the weights, for one ridge."""

    theta: Float[Tensor, " parameter"]
    alpha: Float[Tensor, " critic"]
    degrees_of_freedom: float


class InstrumentPath:
    """θ and α for any ridge, from B (k, p), v (k,) and c (p,); free parameters are not penalised."""

    def __init__(
        self,
        matrix: Float[Tensor, "critic parameter"],
        vector: Float[Tensor, " critic"],
        start_mean: Float[Tensor, " parameter"],
        free: Bool[Tensor, " parameter"],
    ) -> None:
        self._matrix, self._curvature = matrix, matrix.mT @ matrix
        self._start_mean, self._free = start_mean, free
        self._primal = self._path(matrix.mT @ vector)

    @cached_property
    def _dual(self) -> RidgePath:
        return self._path(self._start_mean)

    def _path(self, slope: Float[Tensor, " parameter"]) -> RidgePath:
        return RidgePath(Quadratic(self._curvature, slope, slope.new_zeros(())), self._free)

    def solve_value(self, ridge: float) -> Float[Tensor, " parameter"]:
        """θ for one ridge, relative to the mean curvature."""
        return self._primal.solve(ridge).weights

    def solve(self, ridge: float) -> PrimalDual:
        """θ and α for one ridge."""
        primal = self._primal.solve(ridge)
        alpha = self._matrix @ self._dual.solve(ridge).weights
        return PrimalDual(primal.weights, alpha, float(primal.degrees_of_freedom))


def weights_of_rows(
    system: FeatureSystem,
    critics: FourierFeatures,
    alpha: Float[Tensor, " critic"],
    rows: Int[Tensor, " chosen"] | None = None,
) -> Float[Tensor, " chosen"]:
    """ω = critics(x)ᵀα of the chosen rows (default: all), in blocks."""
    inputs = system.kernel_inputs if rows is None else system.kernel_inputs[rows]
    return torch.cat([critics(block) @ alpha for block in inputs.split(BLOCK)])
