"""What the kernel loss depends on when the residual is linear: (p + 1) × (p + 1) forms in [Z, r].

With A = [Z, r] the residual is A[−θ; 1], and δᵀKδ = [−θ; 1]ᵀ(AᵀKA)[−θ; 1]. One pass over the data gives the
forms; every `diag_weight`, ridge and θ afterwards costs nothing that grows with the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from koffline.errors import ConfigError, DataError
from koffline.kernel_loss import check_diag_weight
from koffline.kernels import Kernel
from koffline.solvers.linear import LinearResidual
from koffline.solvers.quadratic import Quadratic

KernelMap = Callable[[Tensor], Tensor]  # ψ with ψ(x)ᵀψ(y) = k(x, y): (N, k) -> (N, m)


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
        return Quadratic.of_residual(
            (self.total - self.own) * off + self.square * (diag_weight / self.weight)
        )


@torch.no_grad()
def accumulate_forms(
    residual: LinearResidual,
    kernel: Kernel | KernelMap,
    row_weights: Float[Tensor, " row"] | None = None,
    block_size: int = 1024,
) -> ResidualForms:
    """The forms of all rows: with a kernel in O(n² p) time, with a map ψ of m columns in O(n m p).

    Memory is bounded by blocks of `block_size` rows and what `LinearResidual.stored` allows.
    Raises DataError, ConfigError.
    """
    if block_size < 1:
        raise ConfigError(f"block_size is {block_size}; give a positive number of rows")
    weights = normalised_weights(row_weights, len(residual))
    rows = _WeightedRows(residual, weights)
    if isinstance(kernel, Kernel):
        total = _exact_total(rows, kernel, block_size)
        own, square = _accumulate_own(rows, kernel.diagonal)
    else:
        projected = _project(rows, kernel)
        total = projected.mT @ projected
        own, square = _accumulate_own(rows, lambda x: kernel(x).square().sum(dim=-1))
    count = float(len(residual))  # the mean weight is one
    return ResidualForms(
        total=total,
        own=own,
        square=square,
        weight=count,
        weight_squares=count if weights is None else float(weights.square().sum()),
    )


def project(
    residual: LinearResidual, kernel: KernelMap, weights: Float[Tensor, " row"] | None = None
) -> Float[Tensor, "instrument column"]:
    """ψᵀW[Z, r] (m, p + 1), summed over rows in blocks: what disjoint sets of rows give adds up."""
    return _project(_WeightedRows(residual, weights), kernel)


def accumulate_own(
    residual: LinearResidual, weights: Float[Tensor, " row"] | None = None
) -> tuple[Float[Tensor, "column column"], Float[Tensor, "column column"]]:
    """Σ w_i² a_i a_iᵀ and Σ w_i a_i a_iᵀ: `own` and `square` where k(x, x) = 1; they add up likewise."""
    return _accumulate_own(_WeightedRows(residual, weights), lambda x: x.new_ones(len(x)))


def normalised_weights(weights: Tensor | None, rows: int) -> Tensor | None:
    """Weights in float64, their mean one; None where all are equal. Raises DataError."""
    if weights is None:
        return None
    if (
        weights.shape != (rows,)
        or not bool((weights >= 0.0).all())
        or not bool(torch.isfinite(weights).all())
    ):
        raise DataError(
            f"row_weights has shape {tuple(weights.shape)}; give {rows} finite numbers that are not negative"
        )
    if not bool(weights.any()):
        raise DataError("row_weights are all zero; give at least one row a positive weight")
    relative = weights.double() / weights.max()
    return None if bool((relative == 1.0).all()) else relative / relative.mean()


class _WeightedRows:
    """Rows a_i = [Z, r]_i, stored where they fit, computed again where they do not."""

    def __init__(self, residual: LinearResidual, weights: Tensor | None) -> None:
        self._residual, self.weights = residual, weights
        self._stored = residual.stored()
        self._kernel_inputs = residual.kernel_inputs.double()

    def __len__(self) -> int:
        return len(self._residual)

    def plain(self, rows: slice) -> Tensor:
        """a_i, (B, p + 1)."""
        return self._residual.augmented(rows) if self._stored is None else self._stored[rows]

    def weighted(self, rows: slice) -> Tensor:
        """w_i a_i, (B, p + 1)."""
        return self.plain(rows) if self.weights is None else self.plain(rows) * self.weights[rows, None]

    def kernel_inputs(self, rows: slice) -> Tensor:
        """(B, k)"""
        return self._kernel_inputs[rows]

    def blocks(self) -> Iterator[slice]:
        """Slices that cover the rows."""
        return self._residual.blocks()


def _exact_total(rows: _WeightedRows, kernel: Kernel, block_size: int) -> Tensor:
    """AᵀKA, blocks of K above the diagonal only."""
    starts = range(0, len(rows), block_size)
    half: Tensor | None = None
    for start in starts:
        here = slice(start, min(start + block_size, len(rows)))
        x, columns = rows.kernel_inputs(here), rows.weighted(here)
        product = 0.5 * (kernel.gram(x) @ columns)  # (b, b) @ (b, p + 1)
        for other in starts[start // block_size + 1 :]:
            there = slice(other, min(other + block_size, len(rows)))
            product.addmm_(kernel.gram(x, rows.kernel_inputs(there)), rows.weighted(there))
        part = columns.mT @ product
        half = part if half is None else half.add_(part)
    assert half is not None  # a table has rows
    return half + half.mT


def _accumulate_own(rows: _WeightedRows, diagonal: KernelMap) -> tuple[Tensor, Tensor]:
    """Σ w_i² k_ii a_i a_iᵀ and Σ w_i k_ii a_i a_iᵀ."""
    own: Tensor | None = None
    square: Tensor | None = None
    for block in rows.blocks():
        columns, own_kernel = rows.plain(block), diagonal(rows.kernel_inputs(block)).unsqueeze(1)
        if rows.weights is None:
            part = other = columns.mT @ (columns * own_kernel)
        else:
            weight = rows.weights[block, None]
            part = columns.mT @ (columns * (weight.square() * own_kernel))
            other = columns.mT @ (columns * (weight * own_kernel))
        own = part if own is None else own + part
        square = other if square is None else square + other
    assert own is not None, "a table has rows"
    assert square is not None, "a table has rows"
    return own, square


def _project(rows: _WeightedRows, kernel: KernelMap) -> Tensor:
    total: Tensor | None = None
    for block in rows.blocks():
        part = kernel(rows.kernel_inputs(block)).mT @ rows.weighted(block)  # (m, B) @ (B, p + 1)
        total = part if total is None else total.add_(part)
    assert total is not None  # a table has rows
    return total
