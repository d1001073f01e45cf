"""Values of every logged row by networks that have not seen its episode, for doubly robust estimators."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from koffline.ope.blocks import row_blocks
from koffline.ope.fitted import FittedValues
from koffline.ope.learning import start_values
from koffline.ope.residuals import compute_values
from koffline.ope.row_values import RowValues


def out_of_bag_values(fitted: FittedValues, head: str = "kloss") -> RowValues:
    """Means over the resampled replicas that did not draw a row's episode: cross-fitting at no extra cost.

    Rows that every replica drew (a few in a hundred with 12 replicas: 0.63^12 = 0.4 %) get the mean over all
    resampled replicas. Start states of the log belong to their episode; those from outside were seen by none.
    """
    full, problem = fitted.ensemble.full, fitted.problem
    chosen = np.flatnonzero(fitted.alive[full:]) + full
    network = fitted.heads[head].select(chosen.tolist())
    left_out = (fitted.ensemble.row_counts[chosen] == 0).double()  # (R', N)
    share = _shares(left_out)
    now: list[Tensor] = []
    later: list[Tensor] = []
    for rows in row_blocks(network, len(fitted.table), fitted.table.draws):
        table = fitted.table
        for parts, inputs, readout in (
            (now, table.inputs, table.readout),
            (later, table.next_inputs, table.next_readout),
        ):
            values = compute_values(network, inputs, readout, rows)
            parts.append((values.cpu() * share[:, rows]).sum(dim=0))
    low, high = problem.value_bounds
    starts = start_values(network, problem).cpu()  # (R', E), already in units of the return
    if problem.fixed_starts:
        start_mean = starts.mean(dim=0)
    else:
        start_mean = (starts * share[:, problem.episode_starts.tolist()]).sum(dim=0)
    return RowValues(
        now=_bounded(now, low, high) * problem.reward_scale,
        later=_bounded(later, low, high) * problem.reward_scale,
        starts=start_mean.numpy(),
        unseen=float((left_out.sum(dim=0) > 0).double().mean()),
    )


def _shares(left_out: Tensor) -> Tensor:
    """Weights (R', N) that average over the replicas which left a row out, over all where none did."""
    weights = torch.where(left_out.sum(dim=0, keepdim=True) > 0, left_out, 1.0)
    return weights / weights.sum(dim=0, keepdim=True)


def _bounded(parts: list[Tensor], low: float, high: float) -> np.ndarray:
    return torch.cat(parts).double().clamp(low, high).numpy()
