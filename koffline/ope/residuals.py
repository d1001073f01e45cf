"""Bellman residuals of fitted networks, and the kernel loss on rows a network has not seen."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from koffline.batches import Table
from koffline.kernels import FourierFeatures
from koffline.ope.features import FeatureSystem
from koffline.ope.fitted import FittedValues
from koffline.ope.importance.problem import RowValues
from koffline.ope.last_layer import compute_residuals, compute_values
from koffline.ope.learning import Ensemble, Resampling, make_table, row_blocks, start_values
from koffline.ope.problem import EvaluationProblem
from koffline.ope.working_log import Columns
from koffline.replicas import StackedMLP
from koffline.solvers.linear import kernel_inputs

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


def out_of_bag_values(fitted: FittedValues, head: str = "kloss", in_memory: bool = False) -> RowValues:
    """Means over the resampled replicas that did not draw a row's episode: cross-fitting at no extra cost.

    in_memory: of the rows that the networks were trained on alone.

    Rows that every replica drew (a few in a hundred with 12 replicas: 0.63^12 = 0.4 %) get the mean over all
    resampled replicas. Start states of the log belong to their episode; those from outside were seen by none.
    """
    of_part = OutOfBag.of(fitted, head)
    columns = of_part(fitted.problem, fitted.ensemble.units) if in_memory else fitted.fold(of_part)
    return _row_values(columns)


def _row_values(columns: Columns) -> RowValues:
    found = columns.joined()
    return RowValues(
        found["now"],
        found["later"],
        found["starts"],
        unseen=float(found["unseen"].mean()),
        weights=found["weights"],
    )


@dataclass(frozen=True, eq=False)
class OutOfBag:
    """R' networks, which units each of them was trained on, and the weights of rows that they give: ψᵀα."""

    network: StackedMLP
    resampling: Resampling
    instruments: FourierFeatures
    duals: Tensor

    @classmethod
    def of(cls, fitted: FittedValues, head: str = "kloss") -> OutOfBag:
        """Those resampled replicas of a head that did not diverge."""
        resampling, full = fitted.ensemble.resampling, fitted.ensemble.full
        chosen = np.flatnonzero(fitted.alive[full:])
        streams = tuple(resampling.streams[number] for number in chosen)
        replicas = (chosen + full).tolist()
        own = Resampling(resampling.seed, 0, streams)
        return cls(fitted.heads[head].select(replicas), own, fitted.instruments, fitted.duals[replicas])

    def in_features(self, system: FeatureSystem) -> RowValues:
        """Values of the rows of a system that is a part of a log."""
        assert system.problem is not None
        assert system.units is not None
        return _row_values(self(system.problem, system.units))

    def __call__(self, problem: EvaluationProblem, units: np.ndarray) -> Columns:
        """Values of a part's rows and start states."""
        table = make_table(problem, str(self.network.flat.device))
        left_out = torch.as_tensor(self.resampling.row_counts(problem, units) == 0).double()  # (R', N)
        share = _shares(left_out)
        now: list[Tensor] = []
        later: list[Tensor] = []
        omega: list[Tensor] = []
        compared = kernel_inputs(table)
        for rows in row_blocks(self.network, len(table), table.draws):
            for parts, inputs, readout in (
                (now, table.inputs, table.readout),
                (later, table.next_inputs, table.next_readout),
            ):
                values = compute_values(self.network, inputs, readout, rows)
                parts.append((values.cpu() * share[:, rows]).sum(dim=0))
            own = self.instruments(compared[rows].double()) @ self.duals.mT  # (B, R')
            omega.append((own.cpu() * share[:, rows].mT).sum(dim=1))
        low, high = problem.value_bounds
        starts = start_values(self.network, problem).cpu()  # (R', E), already in units of the return
        if problem.fixed_starts:
            start_mean = starts.mean(dim=0)
        else:
            start_mean = (starts * share[:, problem.episode_starts.tolist()]).sum(dim=0)
        return Columns(
            (
                {
                    "now": _bounded(now, low, high) * problem.reward_scale,
                    "later": _bounded(later, low, high) * problem.reward_scale,
                    "starts": start_mean.numpy(),
                    "unseen": (left_out.sum(dim=0) > 0).numpy(),
                    "weights": torch.cat(omega).numpy(),
                },
            )
        )


def _shares(left_out: Tensor) -> Tensor:
    """Weights (R', N) that average over the replicas which left a row out, over all where none did."""
    weights = torch.where(left_out.sum(dim=0, keepdim=True) > 0, left_out, 1.0)
    return weights / weights.sum(dim=0, keepdim=True)


def _bounded(parts: list[Tensor], low: float, high: float) -> np.ndarray:
    return torch.cat(parts).double().clamp(low, high).numpy()
