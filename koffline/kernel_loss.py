"""Bellman residuals and their kernel loss: quadratic forms of a residual in a kernel.

The Bellman residual is δ = reward + discount · next value − value. Terminations enter
once, through the discount. Nothing here detaches: gradients flow through both values.

Residuals are (N,) and give a scalar, or (R, N) with a replica axis and give (R,). Gram
matrices are (N, N), or (R, N, N) if every replica has its own rows. All functions are
differentiable. Shapes that do not fit raise DataError, numbers out of range
ConfigError.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from koffline.errors import ConfigError, DataError

Residual = Float[Tensor, "*replica row"]
Gram = Float[Tensor, "*grams row row"]
Loss = Float[Tensor, "*replica"]


def discount(
    gamma: float,
    terminated: Shaped[Tensor, " row"],
    interval: int | Shaped[Tensor, " row"] = 1,
) -> Float[Tensor, " row"]:
    """gamma ** interval (N,) if the episode goes on, zero if it terminated; float64.

    terminated (N,): flags. `interval`: number of steps between a row and its next row.
    A time limit is no termination. Raises ConfigError unless gamma is in [0, 1].
    """
    if not 0.0 <= gamma <= 1.0:
        raise ConfigError(f"gamma is {gamma}; give a discount factor in [0, 1]")
    going_on = 1.0 - terminated.to(torch.float64)
    if isinstance(interval, Tensor):
        interval = interval.to(torch.float64)
    return going_on * gamma**interval


def state_value_residual(
    reward: Float[Tensor, "*rewards row"],
    discount: Float[Tensor, "*discounts row"],
    value: Float[Tensor, "*replica row"],
    next_value: Float[Tensor, "*replica row"],
) -> Float[Tensor, "*replica row"]:
    """δ = r + discount · V(s') − V(s), for logs whose actions are the evaluated
    policy's.

    reward: r (N,). discount (N,): as by `discount`. value, next_value: V(s) and V(s'),
    (N,) or (R, N) of R replicas. (Feng et al. 2019, equ:rg)
    """
    _check_rows(reward=reward, discount=discount, value=value, next_value=next_value)
    return reward + discount * next_value - value


def v_statistic(residual: Residual, gram: Gram) -> Loss:
    """(1/n²) Σ_ij k_ij δ_i δ_j; never negative for a positive-definite kernel.

    (Feng et al. 2019, equ:vstat)
    """
    rows = _checked_rows(residual, gram)
    return _quadratic_form(residual, gram) / rows**2


def u_statistic(residual: Residual, gram: Gram) -> Loss:
    """(1/(n(n−1))) Σ_{i≠j} k_ij δ_i δ_j; unbiased for independent rows, may be
    negative; needs two rows.

    (Feng et al. 2019, sec:batch_lv)
    """
    return kernel_loss(residual, gram, diag_weight=0.0)


def kernel_loss(residual: Residual, gram: Gram, diag_weight: float) -> Loss:
    """(1 − w) · U + w · mean_i(k_ii δ_i²) with w = diag_weight in [0, 1].

    residual: δ (..., N). gram: k (N, N) of the rows. w = 0 is the U-statistic, 1/N the
    V-statistic of these rows, 1 the residual-gradient loss (for k_ii = 1). The paper's
    mixtures have w of at most 1/n, n the rows of the whole log of which these are a
    mini-batch (`mixture_diag_weight`).

    (Feng et al. 2019, sec:batch_lv)
    """
    check_diag_weight(diag_weight)
    rows = _checked_rows(residual, gram, least=2)
    # Σ_i k_ii δ_i², (…)
    diagonal = (gram.diagonal(dim1=-2, dim2=-1) * residual.square()).sum(dim=-1)
    off_diagonal = _quadratic_form(residual, gram) - diagonal
    return (1.0 - diag_weight) * off_diagonal / (
        rows * (rows - 1)
    ) + diag_weight * diagonal / rows


def mixture_diag_weight(alpha: float, population: int) -> float:
    """The `diag_weight` of the paper's mixture alpha · L_KV + (1 − alpha) · L_KU over
    `population` rows.

    Raises ConfigError unless alpha is in [0, 1] and population at least 1.
    (Feng et al. 2019, sec:batch_lv)
    """
    if not 0.0 <= alpha <= 1.0 or population < 1:
        raise ConfigError(
            f"alpha is {alpha}, population {population}; give alpha in [0, 1] and a"
            " positive number of rows"
        )
    return alpha / population


def feature_v_statistic(
    features: Float[Tensor, "*maps row feature"], residual: Residual
) -> Loss:
    """‖ψᵀδ‖²/n²: the V-statistic of the kernel ψ(x)ᵀψ(y) in linear time.

    (Feng et al. 2019, thm:eigen)
    """
    _check_rows(
        residual=residual, rows_of_features=features.new_empty(features.shape[:-1])
    )
    # (…, 1, N) @ (…, N, m) = (…, 1, m)
    projected = (residual.unsqueeze(-2) @ features).squeeze(-2)
    return projected.square().sum(dim=-1) / residual.shape[-1] ** 2


def check_diag_weight(diag_weight: float) -> None:
    """Raise ConfigError outside [0, 1]."""
    if not 0.0 <= diag_weight <= 1.0:
        raise ConfigError(f"diag_weight is {diag_weight}; give a number in [0, 1]")


def _quadratic_form(residual: Tensor, gram: Tensor) -> Tensor:
    """δᵀKδ, (…): a row product, because a batched product with one column is ten times
    slower.
    """
    return ((residual.unsqueeze(-2) @ gram).squeeze(-2) * residual).sum(dim=-1)


def _checked_rows(residual: Tensor, gram: Tensor, least: int = 1) -> int:
    """Number of rows n, after checking that no shapes would broadcast silently.

    residual: (n,) or (R, n). gram: (n, n) or (R, n, n). Raises DataError for others,
    and for fewer than ``least`` rows.
    """
    rows = 0
    if residual.ndim in (1, 2):
        rows = residual.shape[-1]
    square = gram.ndim in (2, 3) and gram.shape[-1] == gram.shape[-2] == rows
    if not square or (gram.ndim == 3 and gram.shape[0] != residual.shape[0]):
        raise DataError(
            f"residual has shape {tuple(residual.shape)}, gram {tuple(gram.shape)}; "
            "give (N,) or (R, N), and (N, N) or (R, N, N)"
        )
    if rows < least:
        raise DataError(f"residual has {rows} rows; give at least {least}")
    return rows


def _check_rows(**columns: Tensor) -> None:
    """Raise DataError for unequal shapes: (N, 1) with (N,) would broadcast to (N, N)
    silently.
    """
    shapes = {name: tuple(column.shape) for name, column in columns.items()}
    ends = {shape[-1:] for shape in shapes.values()}
    fronts = {shape[:-1] for shape in shapes.values()} - {()}
    if len(ends) != 1 or () in ends or len(fronts) > 1:
        raise DataError(
            f"residual received shapes {shapes}; give (N,) or (R, N) with equal N and R"
        )
