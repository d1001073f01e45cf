"""Four critics: the loss of each and its gradients in the values at both ends of a window, in closed form."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

_SMALLEST_BANDWIDTH = 1e-6


@dataclass(frozen=True, eq=False)
class CriticGradients:
    """loss (R,), and its gradients (R, M) in V(start) and in V(end); zero where no gradient flows."""

    loss: Tensor
    start: Tensor
    end: Tensor


@dataclass(frozen=True, eq=False)
class Gram:
    """Kernel matrices (R, M, M), the median distances (R,) and the mean off-diagonal values (R,)."""

    matrix: Tensor
    median: Tensor
    off_diagonal: Tensor


def squared_error_gradients(
    residual: Float[Tensor, "run window"],
    discount: Float[Tensor, "run window"],
    valid: Float[Tensor, "run window"],
    through_end: bool,
) -> CriticGradients:
    """Mean squared residual over valid windows; through both ends for RG, through the start for TD(0), FVI.

    (Feng et al. 2019, equ:rg)
    """
    count = valid.sum(dim=1, keepdim=True)
    kept = residual * valid
    slope = kept * (2.0 / count)
    loss = (kept * kept).sum(dim=1) / count.squeeze(1)
    return CriticGradients(loss, -slope, slope * discount if through_end else torch.zeros_like(slope))


def kernel_gradients(
    residual: Float[Tensor, "run window"],
    discount: Float[Tensor, "run window"],
    valid: Float[Tensor, "run window"],
    gram: Float[Tensor, "run window window"],
    diag_weight: Float[Tensor, "run 1"],
) -> CriticGradients:
    """(1 − w) U + w mean δ² over m valid windows; w = ``diag_weight``, NaN for 1/m. No target network.

    (Feng et al. 2019, sec:batch_lv)
    """
    count = valid.sum(dim=1, keepdim=True)
    weight = torch.where(diag_weight.isnan(), 1.0 / count, diag_weight)
    kept = residual * valid
    off = (1.0 - weight) / (count * (count - 1.0))
    product = torch.bmm(kept.unsqueeze(1), gram).squeeze(1)  # (R, 1, M) @ (R, M, M); the diagonal is one
    weighted = product * off + (weight / count - off) * kept
    weighted = weighted * valid
    loss = (weighted * kept).sum(dim=1)
    return CriticGradients(loss, -2.0 * weighted, 2.0 * weighted * discount)


def gaussian_gram(
    inputs: Float[Tensor, "run window column"],
    valid: Float[Tensor, "run window"],
    bandwidth_scale: Float[Tensor, "run 1"],
) -> Gram:
    """exp(−‖x − y‖² / h²), h = bandwidth_scale · the median distance of a run's valid windows.

    (Feng et al. 2019, sec:exp_detail)
    """
    squares = _squared_distances(inputs)
    rows = inputs.shape[1]
    upper = torch.triu_indices(rows, rows, 1)
    pairs = squares[:, upper[0], upper[1]]  # (R, M(M−1)/2)
    counted = valid[:, upper[0]] * valid[:, upper[1]]
    median = _median(pairs, counted).sqrt_().clamp_(min=_SMALLEST_BANDWIDTH)
    scale = -1.0 / (bandwidth_scale.squeeze(1) * median).square()
    matrix = (squares * scale[:, None, None]).exp_()
    number = counted.sum(dim=1)
    off_diagonal = (matrix[:, upper[0], upper[1]] * counted).sum(dim=1) / number
    return Gram(matrix, median, off_diagonal)


def _squared_distances(inputs: Tensor) -> Tensor:
    """(R, M, M), zero on the diagonal."""
    centred = inputs - inputs.mean(dim=1, keepdim=True)
    norms = centred.square().sum(dim=2)
    squares = torch.baddbmm(norms.unsqueeze(1) + norms.unsqueeze(2), centred, centred.mT, alpha=-2.0).clamp_(
        min=0.0
    )
    squares.diagonal(dim1=1, dim2=2).zero_()
    return squares


def _median(pairs: Tensor, counted: Tensor) -> Tensor:
    """Of each row's counted pairs, (R,); the mean of the two in the middle of an even number."""
    if bool(counted.all()):
        number = pairs.shape[1]
        low = pairs.kthvalue((number + 1) // 2, dim=1).values
        if number % 2:
            return low
        high = pairs.kthvalue(number // 2 + 1, dim=1).values
        return (0.5 * (low.sqrt() + high.sqrt())).square_()
    medians = [row[keep > 0].sqrt().quantile(0.5) for row, keep in zip(pairs, counted, strict=True)]
    return torch.stack(medians).square_()
