"""The kernel Bellman loss minimised exactly over value functions linear in given features; LSTD beside it.

value = solve_kernel_loss(table, RandomFourierFeatures(0.15, 400), Gaussian(0.1), ridge=1e-6)
value.values(states)   # (M,) float64
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from koffline.batches import Table
from koffline.errors import ConfigError, DataError
from koffline.kernels import Kernel
from koffline.solvers.features import FeatureMap, UnitBox
from koffline.solvers.linear import (
    KernelMap,
    LinearResidual,
    accumulate_forms,
    as_double,
    combine_features,
    normalised_weights,
)  # fmt: skip
from koffline.solvers.quadratic import RidgePath, check_ridge, mean_curvature

_BLOCK = 4096


@dataclass(frozen=True, eq=False)
class LinearValue:
    """A value function linear in features, and how it was found.

    scale: applied to inputs before the features. weights (p,) float64: as in `linear.combine_features`, the
    constant last. loss: what was minimised, on the rows it was fitted to, without the ridge.
    degrees_of_freedom: how many weights the data, rather than the ridge, decide. condition: of the ridged
    system, infinite where the data leave a direction open.
    kernel: None for LSTD. ridge: relative, as given.
    """

    features: FeatureMap
    weights: Float[Tensor, " parameter"]
    constant: bool
    outputs: int | None  # length of a readout; None: the values are the outputs
    loss: float
    degrees_of_freedom: float
    condition: float
    rows: int
    ridge: float
    kernel: Kernel | KernelMap | None = None
    scale: UnitBox | None = None

    @torch.no_grad()
    def values(self, inputs: Any, readout: Any = None) -> Float[Tensor, " row"]:
        """Values (M,) float64 of rows (M, d), an array or a tensor.

        readout (M, n): for Q functions, one-hot actions or a policy's probabilities. Raises DataError.
        """
        rows = as_double(inputs, self.weights.device)
        if rows.ndim != 2 or (readout is None) != (self.outputs is None):
            raise DataError(
                f"values received shape {tuple(rows.shape)} and {'no' if readout is None else 'a'} readout; "
                f"give (M, d){' and a readout (M, ' + str(self.outputs) + ')' if self.outputs else ''}"
            )
        rows = rows if self.scale is None else self.scale(rows)
        reads = None if readout is None else as_double(readout, self.weights.device)
        found = rows.new_zeros(len(rows))
        for start in range(0, len(rows), _BLOCK):
            block = slice(start, start + _BLOCK)
            features = self.features(rows[block]).double()
            read = None if reads is None else reads[block]
            found[block] = combine_features(features, 1, read, self.constant) @ self.weights
        return found


def solve_kernel_loss(
    table: Table,
    features: FeatureMap,
    kernel: Kernel | KernelMap,
    *,
    diag_weight: float | None = None,
    ridge: float = 0.0,
    constant: bool = True,
    row_weights: Float[Tensor, " row"] | None = None,
) -> LinearValue:
    """argmin_θ (1 − w) · U + w · mean(k_ii δ²) + λ‖θ‖², w = diag_weight; None: the V-statistic.

    kernel: exact, O(n² p) time in bounded memory, or a feature map ψ of it with m columns, O(n m p).
    ridge: λ relative to the mean curvature of the loss; the constant feature is not penalised.
    Raises ConfigError where the loss has no minimum: without its diagonal it may fall for ever.
    (Feng et al. 2019, equ:vstat)
    """
    check_ridge(ridge)
    residual = LinearResidual(table, features, constant, normalised_weights(row_weights, len(table)))
    loss = accumulate_forms(residual, kernel).loss(diag_weight)
    solution = RidgePath(loss, residual.free).solve(ridge)
    if not bool(torch.isfinite(solution.weights).all()):
        raise ConfigError(
            f"the kernel loss with diag_weight {diag_weight} and ridge {ridge} has no minimum on these rows; "
            f"raise the ridge or use diag_weight {1.0 / len(table):.3g} (1/n) or more"
        )
    freedom, least = solution.degrees_of_freedom, loss.at(solution.weights)
    return _value(
        residual,
        solution.weights,
        ridge,
        kernel,
        loss=least,
        degrees_of_freedom=freedom,
        condition=solution.condition,
    )


@torch.no_grad()
def solve_lstd(
    table: Table,
    features: FeatureMap,
    *,
    ridge: float = 0.0,
    constant: bool = True,
    row_weights: Float[Tensor, " row"] | None = None,
) -> LinearValue:
    """LSTD: θ with φᵀ(r − Zθ)/n = λθ, the minimiser of the kernel loss with the kernel φᵀφ.

    ridge: λ relative to the mean of |diag(φᵀZ/n)|. Its `loss` is that V-statistic, ‖φᵀδ‖²/n²; its
    `condition` that of the system with features and constant in one unit.
    (Feng et al. 2019, cor:same_as_td)
    """
    check_ridge(ridge)
    residual = LinearResidual(table, features, constant, normalised_weights(row_weights, len(table)))
    moments = residual.temporal() / len(residual)  # [A, b]
    matrix, vector, free = moments[:, :-1], moments[:, -1], residual.free
    added = ridge * mean_curvature(matrix.diagonal(), free)
    # Features and constant in one unit first: what is small beside the other must not pass for zero.
    unit = torch.ones_like(vector)
    for group in (free, ~free):
        largest = matrix.diagonal().abs()[group].max() if bool(group.any()) else unit[0]
        unit[group] = largest.sqrt() if float(largest) > 0.0 else 1.0
    ridged = (matrix + torch.diag(added * (~free))) / torch.outer(unit, unit)
    # The solution of least length: redundant features make the matrix singular.
    inverse = torch.linalg.pinv(ridged) / torch.outer(unit, unit)
    theta, spread = inverse @ vector, torch.linalg.svdvals(ridged)
    loss, freedom = (vector - matrix @ theta).square().sum(), (inverse @ matrix).trace()
    condition = spread[0] / spread[-1]
    return _value(residual, theta, ridge, loss=loss, degrees_of_freedom=freedom, condition=condition)


def _value(
    residual: LinearResidual, weights: Tensor, ridge: float, kernel: Any = None, **numbers: Tensor
) -> LinearValue:
    found: dict[str, Any] = {name: float(number) for name, number in numbers.items()}
    found.update(constant=residual.constant, outputs=residual.outputs, rows=len(residual))
    return LinearValue(residual.features, weights, ridge=ridge, kernel=kernel, **found)
