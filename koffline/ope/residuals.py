"""A pass over rows with the fitted networks: out-of-bag values and weights, residuals, held-out loss."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from koffline.kernels import FourierFeatures
from koffline.ope.fitted import FittedValues
from koffline.ope.importance.problem import RowValues
from koffline.ope.last_layer import compute_values
from koffline.ope.learning import Resampling, make_table, row_blocks, start_values
from koffline.ope.problem import EvaluationProblem
from koffline.ope.working_log import Columns, Sums
from koffline.replicas import StackedMLP

_SAMPLE_ROWS = 20_000


@dataclass(frozen=True, eq=False)
class ResidualSummary:
    """Residuals and held-out losses in units of the reward.

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


@dataclass(frozen=True, eq=False)
class PassOverRows(Sums):
    """Columns and sums of one pass of the networks over rows.

    ``columns`` by row: ``now`` and ``later``, mean values by the networks that did not see its episode (by
    all resampled ones where each did: 0.63^12 = 0.4 % with 12), ``weights`` ω by the same, ``unseen`` whether
    there were any, ``residual`` of the mean network of the whole log, ``weight``; by start state: ``starts``.
    ``projected (R', m)``: ψᵀδ of the rows a resampled network did not draw, ``squares (R',)`` Σ δ² of them,
    ``counts (R',)`` their number, none of weight zero.
    """

    columns: Columns
    projected: Tensor
    squares: Tensor
    counts: Tensor

    @property
    def values(self) -> RowValues:
        """Out-of-bag values and weights of the rows."""
        found = self.columns.joined()
        unseen = float(found["unseen"].mean())
        return RowValues(found["now"], found["later"], found["starts"], unseen, found["weights"])

    def residuals(self, reward_scale: float) -> ResidualSummary:
        """The residuals of rows, and the held-out loss of replicas that left at least two rows out."""
        found = self.columns.joined()
        residual, share = found["residual"] * reward_scale, found["weight"] / found["weight"].sum()
        sample, loss, ratio = residual[share > 0.0], math.nan, math.nan
        enough = self.counts >= 2
        if bool(enough.any()):
            norms, squares = self.projected.square().sum(dim=1)[enough], self.squares[enough]
            counts = self.counts[enough]
            loss = float(((norms - squares) / (counts * (counts - 1))).mean())  # k(x, x) = 1
            ratio = float((norms / squares.clamp_min(torch.finfo(squares.dtype).tiny)).mean())
        return ResidualSummary(
            held_out_kernel_loss=loss * reward_scale**2,
            held_out_ratio=ratio,
            rms=float(np.sqrt(share @ residual**2)),
            mean=float(share @ residual),
            sample=sample[:: max(1, len(sample) // _SAMPLE_ROWS)],
        )


@dataclass(frozen=True, eq=False)
class RowReader:
    """F' networks of the whole log and R' of resampled units, with the duals of their row weights ψᵀα."""

    network: StackedMLP
    full: int
    resampling: Resampling
    instruments: FourierFeatures
    duals: Tensor

    @classmethod
    def of(cls, fitted: FittedValues, head: str) -> RowReader:
        """Reader with the replicas of a head that did not diverge."""
        whole, full = fitted.ensemble.resampling, fitted.ensemble.full
        kept = np.flatnonzero(fitted.alive)
        streams = tuple(whole.streams[number - full] for number in kept if number >= full)
        count, duals = len(kept) - len(streams), fitted.duals[kept.tolist()]
        resampling = Resampling(whole.seed, 0, streams)
        return cls(
            fitted.heads[head].select(kept.tolist()), count, resampling, fitted.instruments, duals[count:]
        )

    def __call__(self, problem: EvaluationProblem, units: np.ndarray) -> PassOverRows:
        """Pass over the rows of a part of a log."""
        table, full = make_table(problem, str(self.network.flat.device)), self.full
        own = torch.as_tensor(problem.row_weights)
        left_out = torch.as_tensor(self.resampling.row_counts(problem, units) == 0)  # (R', N)
        share, held_out = _shares(left_out.double()), (left_out & (own > 0.0)).double()
        parts: list[Tensor] = []
        projected, squares = torch.zeros_like(self.duals), self.duals.new_zeros(len(self.duals))
        compared = table.compared
        for rows in row_blocks(self.network, len(table), table.draws):
            now = compute_values(self.network, table.inputs, table.readout, rows)
            later = compute_values(self.network, table.next_inputs, table.next_readout, rows)
            residual = table.rewards[rows].to(now) + table.discounts[rows].to(now) * later - now
            unseen = residual[full:] * held_out[:, rows].to(now)
            psi = self.instruments(compared[rows].double())  # (B, m)
            projected, squares = projected + unseen @ psi, squares + unseen.square().sum(dim=1)
            mean = share[:, rows].to(now)
            omega = ((psi @ self.duals.mT) * mean.mT).sum(dim=1)
            by_row = ((now[full:] * mean).sum(dim=0), (later[full:] * mean).sum(dim=0), omega)
            parts.append(torch.stack([*by_row, residual[:full].mean(dim=0)]).cpu())
        now, later, omega, residual = torch.cat(parts, dim=1)
        low, high = problem.value_bounds
        starts = start_values(self.network, problem).cpu()[full:]  # (R', E), already in units of the return
        if problem.fixed_starts:
            start_mean = starts.mean(dim=0)
        else:
            start_mean = (starts * share[:, problem.episode_starts.tolist()]).sum(dim=0)
        columns = {
            "now": now.clamp(low, high) * problem.reward_scale,
            "later": later.clamp(low, high) * problem.reward_scale,
            "starts": start_mean,
            "unseen": left_out.any(dim=0),
            "weights": omega,
            "residual": residual,
            "weight": own,
        }
        arrays = {name: column.numpy() for name, column in columns.items()}
        return PassOverRows(Columns((arrays,)), projected.cpu(), squares.cpu(), held_out.sum(dim=1))


def _shares(left_out: Tensor) -> Tensor:
    """Weights (R', N) that average over the replicas which left a row out, over all where none did."""
    weights = torch.where(left_out.sum(dim=0, keepdim=True) > 0, left_out, 1.0)
    return weights / weights.sum(dim=0, keepdim=True)
