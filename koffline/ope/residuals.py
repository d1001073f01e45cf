"""Bellman residuals of fitted networks, and the kernel loss on rows a network has not seen."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from koffline.batches import Table
from koffline.ope.blocks import row_blocks
from koffline.ope.ensemble import Ensemble
from koffline.replicas import StackedMLP

_SAMPLE_ROWS = 20_000


@dataclass(frozen=True, eq=False)
class ResidualSummary:
    """In units of the reward.

    ``held_out_kernel_loss`` is the U-statistic on the episodes that a resampled replica did not draw,
    averaged over those replicas: unbiased for the kernel loss of its network. ``held_out_ratio`` divides the
    V-statistic by its expectation under a perfect value function, so that 1 means nothing left to explain.
    ``sample (M,)``: residuals of the mean network over (at most 20,000) rows.
    """

    held_out_kernel_loss: float
    held_out_ratio: float
    rms: float
    mean: float
    sample: np.ndarray


def compute_residuals(network: StackedMLP, table: Table, rows: slice) -> Float[Tensor, "replica row"]:
    """r + discount · E Q(s', a') − Q(s, a) for a block of rows, in the network's precision."""
    dtype = network.flat.dtype
    now = compute_values(network, table.inputs, table.readout, rows)
    later = compute_values(network, table.next_inputs, table.next_readout, rows)
    return table.rewards[rows].to(dtype) + table.discounts[rows].to(dtype) * later - now


def compute_values(
    network: StackedMLP, inputs: Tensor, readout: Tensor | None, rows: slice
) -> Float[Tensor, "replica row"]:
    """Outputs of a block of rows (N, d) or (N, m, d), averaged over draws and read out."""
    block = inputs[rows].to(network.flat.dtype)
    outputs = network.forward(block.reshape(-1, block.shape[-1])).unflatten(1, (len(block), -1)).mean(dim=2)
    return outputs.squeeze(-1) if readout is None else (outputs * readout[rows].to(outputs)).sum(dim=-1)


def summarise_residuals(
    network: StackedMLP,
    table: Table,
    instruments: Callable[[Tensor], Tensor],
    ensemble: Ensemble,
    alive: np.ndarray,
    reward_scale: float,
) -> ResidualSummary:
    """One pass over the rows in blocks. ``alive (R,)``: the replicas that count, a full one among them.

    Rows of weight zero are no evidence.
    """
    assert table.kernel_inputs is not None
    device = network.flat.device
    network = network.select(np.flatnonzero(alive).tolist())
    full = int(alive[: ensemble.full].sum())
    weights = ensemble.row_weights[0]
    drawn = ensemble.row_counts[ensemble.full :][torch.as_tensor(alive[ensemble.full :])]
    unseen = ((drawn == 0) & (weights > 0.0)).to(device)
    projected = torch.zeros(len(unseen), 1, dtype=torch.float64, device=device)
    squares = torch.zeros(len(unseen), dtype=torch.float64, device=device)
    parts = []
    for rows in row_blocks(network, len(table), table.draws):
        residual = compute_residuals(network, table, rows)
        held_out = residual[full:] * unseen[:, rows]
        projected = projected + held_out @ instruments(table.kernel_inputs[rows].double())  # (R', m)
        squares += held_out.square().sum(dim=1)
        parts.append(residual[:full].mean(dim=0).cpu())
    loss, ratio = _held_out(projected, squares, unseen.sum(dim=1))
    mean_residual = torch.cat(parts).numpy() * reward_scale
    share = (weights / weights.sum()).numpy()
    sample = mean_residual[share > 0.0]
    return ResidualSummary(
        held_out_kernel_loss=loss * reward_scale**2,
        held_out_ratio=ratio,
        rms=float(np.sqrt(share @ mean_residual**2)),
        mean=float(share @ mean_residual),
        sample=sample[:: max(1, len(sample) // _SAMPLE_ROWS)],
    )


def _held_out(projected: Tensor, squares: Tensor, counts: Tensor) -> tuple[float, float]:
    """U-statistic and ratio, averaged over replicas that left at least two rows out; k(x, x) = 1."""
    enough = counts >= 2
    if not bool(enough.any()):
        return math.nan, math.nan
    norms, squares, counts = projected.square().sum(dim=1)[enough], squares[enough], counts[enough]
    u_statistic = (norms - squares) / (counts * (counts - 1))
    ratio = norms / squares.clamp_min(torch.finfo(squares.dtype).tiny)
    return float(u_statistic.mean()), float(ratio.mean())
