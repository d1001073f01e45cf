"""The kernel Bellman loss: quadratic forms of a residual in a kernel.

Residuals are (N,) and give a scalar, or (R, N) with a replica axis and give (R,). Gram matrices are (N, N),
or (R, N, N) where every replica has its own rows. All but the blockwise form are differentiable.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from koffline.errors import ConfigError, DataError
from koffline.kernels import Gaussian, Kernel


def v_statistic(
    residual: Float[Tensor, "*replica row"], gram: Float[Tensor, "*grams row row"]
) -> Float[Tensor, "*replica"]:
    """(1/n²) Σ_ij k_ij δ_i δ_j, never negative for a positive-definite kernel.

    (Feng et al. 2019, equ:vstat)
    """
    rows = _checked_rows(residual, gram)
    return quadratic_form(residual, gram) / rows**2


def u_statistic(
    residual: Float[Tensor, "*replica row"], gram: Float[Tensor, "*grams row row"]
) -> Float[Tensor, "*replica"]:
    """(1/(n(n−1))) Σ_{i≠j} k_ij δ_i δ_j, unbiased for independent rows, may be negative; needs two rows.

    (Feng et al. 2019, sec:batch_lv)
    """
    rows = _checked_rows(residual, gram, least=2)
    off_diagonal = quadratic_form(residual, gram) - _diagonal_sum(residual, gram)
    return off_diagonal / (rows * (rows - 1))


def kernel_loss(
    residual: Float[Tensor, "*replica row"], gram: Float[Tensor, "*grams row row"], diag_weight: float
) -> Float[Tensor, "*replica"]:
    """(1 − w) · U + w · mean_i(k_ii δ_i²), w = diag_weight in [0, 1]: every member of the paper's family.

    w = 0 is the U-statistic, 1/n the V-statistic, 1 the residual-gradient loss (for k_ii = 1).
    (Feng et al. 2019, sec:batch_lv)
    """
    check_diag_weight(diag_weight)
    rows = _checked_rows(residual, gram, least=2)
    diagonal = _diagonal_sum(residual, gram)
    off_diagonal = quadratic_form(residual, gram) - diagonal
    return (1.0 - diag_weight) * off_diagonal / (rows * (rows - 1)) + diag_weight * diagonal / rows


def mini_batch_v_statistic(
    residual: Float[Tensor, "*replica row"], gram: Float[Tensor, "*grams row row"], population: int
) -> Float[Tensor, "*replica"]:
    """L_KV: the V-statistic of `population` rows estimated from m of them.

    (1/(mn)) [Σ_i k_ii δ_i² + ((n−1)/(m−1)) Σ_{i≠j} k_ij δ_i δ_j], which is kernel_loss with w = 1/n.
    (Feng et al. 2019, sec:batch_lv)
    """
    rows = _checked_rows(residual, gram, least=2)
    diagonal = _diagonal_sum(residual, gram)
    off_diagonal = quadratic_form(residual, gram) - diagonal
    scale = (population - 1) / (rows - 1)
    return (diagonal + scale * off_diagonal) / (rows * population)


def mixture_diag_weight(alpha: float, population: int) -> float:
    """The `diag_weight` of the paper's mixture alpha · L_KV + (1 − alpha) · L_KU over `population` rows.

    (Feng et al. 2019, sec:batch_lv)
    """
    if not 0.0 <= alpha <= 1.0 or population < 1:
        raise ConfigError(
            f"alpha is {alpha}, population {population}; give alpha in [0, 1] and a positive number of rows"
        )
    return alpha / population


def feature_v_statistic(
    features: Float[Tensor, "*maps row feature"], residual: Float[Tensor, "*replica row"]
) -> Float[Tensor, "*replica"]:
    """‖ψᵀδ‖²/n²: the V-statistic of the kernel ψ(x)ᵀψ(y) in linear time.

    (Feng et al. 2019, thm:eigen)
    """
    rows = residual.shape[-1]
    if features.shape[-2] != rows or features.ndim > max(2, residual.ndim + 1):
        raise DataError(
            f"features has shape {tuple(features.shape)}, residual {tuple(residual.shape)}; "
            "give (N, m) and (N,) or (R, N)"
        )
    projected = (residual.unsqueeze(-2) @ features).squeeze(-2)  # (…, 1, N) @ (…, N, m) = (…, 1, m)
    return projected.square().sum(dim=-1) / rows**2


def quadratic_form(residual: Tensor, gram: Tensor) -> Tensor:
    """δᵀKδ, (…): a row product, because a batched product with one column is an order slower."""
    return ((residual.unsqueeze(-2) @ gram).squeeze(-2) * residual).sum(dim=-1)


def check_diag_weight(diag_weight: float) -> None:
    """Raise ConfigError outside [0, 1]."""
    if not 0.0 <= diag_weight <= 1.0:
        raise ConfigError(f"diag_weight is {diag_weight}; give a number in [0, 1]")


@torch.no_grad()
def blockwise_v_statistic(
    x: Float[Tensor, "row d"],
    residual: Float[Tensor, "*replica row"],
    kernel: Kernel,
    block_size: int = 1024,
) -> Float[Tensor, "*replica"]:
    """The exact V-statistic of all rows with one block of the Gram matrix in memory at a time; float64.

    Blocks are computed in the dtype of `x`, above the diagonal only, and summed in float64. Time O(n² d),
    memory O(block_size²). No gradient.
    (Feng et al. 2019, equ:vstat)
    """
    if x.ndim != 2 or residual.ndim not in (1, 2) or residual.shape[-1] != len(x):
        raise DataError(
            f"x has shape {tuple(x.shape)}, residual {tuple(residual.shape)}; give (N, d) and (N,) or (R, N)"
        )
    if block_size < 1:
        raise ConfigError(f"block_size is {block_size}; give a positive number of rows")
    rows = len(x)
    columns = residual.reshape(-1, rows).to(x).T.contiguous()  # (N, R)
    blocks = _BlockGram(x, kernel, min(block_size, rows))
    total = torch.zeros(columns.shape[1], dtype=torch.float64, device=x.device)
    for start in range(0, rows, block_size):
        here = slice(start, min(start + block_size, rows))
        for other_start in range(start, rows, block_size):
            there = slice(other_start, min(other_start + block_size, rows))
            product = blocks.compute(here, there) @ columns[there]  # (b, b) @ (b, R) = (b, R)
            part = (product.double() * columns[here]).sum(dim=0)
            total += part if other_start == start else 2.0 * part
    return (total / rows**2).reshape(residual.shape[:-1])


class _BlockGram:
    """Blocks of a Gram matrix, computed in one reused buffer where the kernel allows it."""

    def __init__(self, x: Tensor, kernel: Kernel, block_size: int) -> None:
        self._x, self._kernel = x, kernel
        self._columns = kernel.exponent_columns(x) if isinstance(kernel, Gaussian) else None
        self._buffer = x.new_empty(block_size * block_size) if self._columns else None

    def compute(self, here: slice, there: slice) -> Tensor:
        """k(x_i, x_j) for i in `here`, j in `there`; overwritten by the next call."""
        if self._columns is None or self._buffer is None:
            return self._kernel.gram(self._x[here], self._x[there])
        left, right = self._columns[0][here], self._columns[1][there]
        block = self._buffer[: len(left) * len(right)].view(len(left), len(right))
        torch.mm(left, right.T, out=block).exp2_()
        if here == there:
            block.diagonal().fill_(1.0)  # exactly, whatever the rounding of the exponent
        return block


def _diagonal_sum(residual: Tensor, gram: Tensor) -> Tensor:
    """Σ_i k_ii δ_i², (…)."""
    return (gram.diagonal(dim1=-2, dim2=-1) * residual.square()).sum(dim=-1)


def _checked_rows(residual: Tensor, gram: Tensor, least: int = 1) -> int:
    """n, after checking that nothing would broadcast silently."""
    rows = residual.shape[-1] if residual.ndim in (1, 2) else 0
    square = gram.ndim in (2, 3) and gram.shape[-1] == gram.shape[-2] == rows
    if not square or (gram.ndim == 3 and gram.shape[0] != residual.shape[0]):
        raise DataError(
            f"residual has shape {tuple(residual.shape)}, gram {tuple(gram.shape)}; "
            "give (N,) or (R, N), and (N, N) or (R, N, N)"
        )
    if residual.dtype != gram.dtype:
        raise DataError(f"residual is {residual.dtype}, gram {gram.dtype}; convert one with .to(dtype)")
    if rows < least:
        raise DataError(f"residual has {rows} rows; give at least {least}")
    return rows
