"""Values of every logged row by networks that have not seen its episode, for doubly robust estimators."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from koffline.ope.blocks import row_blocks
from koffline.ope.ensemble import Resampling
from koffline.ope.features import FeatureSystem
from koffline.ope.fitted import FittedValues
from koffline.ope.learning import make_table, start_values
from koffline.ope.problem import EvaluationProblem
from koffline.ope.residuals import compute_values
from koffline.ope.row_values import RowValues
from koffline.ope.working_log import Columns
from koffline.replicas import StackedMLP


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
    return RowValues(found["now"], found["later"], found["starts"], float(found["unseen"].mean()))


@dataclass(frozen=True, eq=False)
class OutOfBag:
    """R' networks, and which units each of them was trained on."""

    network: StackedMLP
    resampling: Resampling

    @classmethod
    def of(cls, fitted: FittedValues, head: str = "kloss") -> OutOfBag:
        """Those resampled replicas of a head that did not diverge."""
        resampling, full = fitted.ensemble.resampling, fitted.ensemble.full
        chosen = np.flatnonzero(fitted.alive[full:])
        streams = tuple(resampling.streams[number] for number in chosen)
        network = fitted.heads[head].select((chosen + full).tolist())
        return cls(network, Resampling(resampling.seed, 0, streams))

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
        for rows in row_blocks(self.network, len(table), table.draws):
            for parts, inputs, readout in (
                (now, table.inputs, table.readout),
                (later, table.next_inputs, table.next_readout),
            ):
                values = compute_values(self.network, inputs, readout, rows)
                parts.append((values.cpu() * share[:, rows]).sum(dim=0))
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
                },
            )
        )


def _shares(left_out: Tensor) -> Tensor:
    """Weights (R', N) that average over the replicas which left a row out, over all where none did."""
    weights = torch.where(left_out.sum(dim=0, keepdim=True) > 0, left_out, 1.0)
    return weights / weights.sum(dim=0, keepdim=True)


def _bounded(parts: list[Tensor], low: float, high: float) -> np.ndarray:
    return torch.cat(parts).double().clamp(low, high).numpy()
