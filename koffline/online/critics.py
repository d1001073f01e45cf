"""Four critics: the loss of each and its gradients in the values at both ends of a window, in closed form."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
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
    through_end: Float[Tensor, "run 1"],
) -> CriticGradients:
    """Mean squared residual over valid windows; through both ends (1: RG) or the start alone (0: TD(0), FVI).

    (Feng et al. 2019, equ:rg)
    """
    count = valid.sum(dim=1, keepdim=True)
    kept = residual * valid
    slope = kept * (2.0 / count)
    loss = (kept * kept).sum(dim=1) / count.squeeze(1)
    return CriticGradients(loss, -slope, slope * discount * through_end)


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
    median = _median_distance(squares, valid)
    scale = -1.0 / (bandwidth_scale.squeeze(1) * median).square()
    matrix = (squares * scale[:, None, None]).exp_()
    count = valid.sum(dim=1)
    total = torch.bmm(torch.bmm(valid.unsqueeze(1), matrix), valid.unsqueeze(2)).reshape(-1)
    return Gram(matrix, median, (total - count) / (count * (count - 1.0)))


def _squared_distances(inputs: Tensor) -> Tensor:
    """(R, M, M), zero on the diagonal."""
    centred = inputs - inputs.mean(dim=1, keepdim=True)
    norms = centred.square().sum(dim=2)
    squares = torch.baddbmm(norms.unsqueeze(1) + norms.unsqueeze(2), centred, centred.mT, alpha=-2.0).clamp_(
        min=0.0
    )
    # What is left of equal rows is rounding; it must not become the bandwidth.
    rounding = 8.0 * torch.finfo(squares.dtype).eps * (norms.unsqueeze(1) + norms.unsqueeze(2))
    squares.masked_fill_(squares < rounding, 0.0)
    squares.diagonal(dim1=1, dim2=2).zero_()
    return squares


def _median_distance(squares: Tensor, valid: Tensor) -> Tensor:
    """Median distance of each run's pairs of valid windows, (R,); numpy selects many times faster."""
    pairs = squares.flatten(1).numpy()[:, _upper(squares.shape[1])]  # (R, M(M−1)/2)
    if bool((valid > 0.0).all()):
        middle = [(pairs.shape[1] - 1) // 2, pairs.shape[1] // 2]
        found = np.sqrt(np.partition(pairs, middle, axis=1)[:, middle]).mean(axis=1)
    else:
        kept = valid.numpy() > 0.0
        both = (kept[:, :, None] & kept[:, None, :]).reshape(len(kept), -1)[:, _upper(squares.shape[1])]
        found = np.array([np.median(np.sqrt(row[keep])) for row, keep in zip(pairs, both, strict=True)])
    return torch.from_numpy(np.maximum(found, _SMALLEST_BANDWIDTH).astype(pairs.dtype))


@functools.cache
def _upper(rows: int) -> np.ndarray:
    """Where the entries above the diagonal lie in a flattened matrix."""
    return np.flatnonzero(np.triu(np.ones((rows, rows), dtype=bool), 1))
