"""LSTD-Q: the kernel loss with the linear kernel φᵀφ, whose critics are the features themselves."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from koffline.ope.closed_form.fit import PrimalDual
from koffline.solvers.quadratic import check_ridge, mean_curvature


class TemporalPath:
    """θ = (A + λD)⁻¹b and α = (A + λD)⁻ᵀc for any ridge: A = φᵀWZ/n, b = φᵀWr/n, D spares free parameters.

    (Feng et al. 2019, cor:same_as_td)
    """

    def __init__(
        self,
        matrix: Float[Tensor, "parameter parameter"],
        vector: Float[Tensor, " parameter"],
        start_mean: Float[Tensor, " parameter"],
        free: Bool[Tensor, " parameter"],
    ) -> None:
        self._matrix, self._vector, self._start_mean = matrix, vector, start_mean
        self._bound = (~free).to(matrix)
        self._scale = mean_curvature(matrix.diagonal(), free)

    def solve_value(self, ridge: float) -> Float[Tensor, " parameter"]:
        """θ for one ridge, relative to the mean |diagonal|."""
        return self._inverse(ridge) @ self._vector

    def solve(self, ridge: float) -> PrimalDual:
        """θ and α for one ridge; the shortest ones where the rows leave them open."""
        inverse = self._inverse(ridge)
        return PrimalDual(
            theta=inverse @ self._vector,
            alpha=inverse.mT @ self._start_mean,
            degrees_of_freedom=float((inverse * self._matrix.mT).sum()),
        )

    def _inverse(self, ridge: float) -> Float[Tensor, "parameter parameter"]:
        check_ridge(ridge)
        ridged = self._matrix + torch.diag(ridge * self._scale * self._bound)
        inverse, info = torch.linalg.inv_ex(ridged)
        return torch.linalg.pinv(ridged) if ridge == 0.0 or int(info) else inverse
