"""What a part of a log leaves of all replicas: the linear systems of last layers, values of start states."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from koffline.kernels import FourierFeatures
from koffline.ope.last_layer import LinearSystems, accumulate_systems
from koffline.ope.learning import Resampling, make_table, row_blocks, start_values
from koffline.ope.problem import EvaluationProblem
from koffline.ope.working_log import Sums
from koffline.replicas import StackedMLP
from koffline.solvers.linear import last_layer_features


@dataclass(frozen=True, eq=False)
class PartSystems(Sums):
    """What a part of the log leaves of all replicas' last layers.

    Their linear systems, Σ w of rows (R,), Σ w φ(s0) (R, p) and Σ w of start states (R,).
    """

    systems: LinearSystems
    row_weight: Tensor
    starts: Tensor
    start_weight: Tensor


def systems_of_part(
    network: StackedMLP,
    instruments: FourierFeatures,
    resampling: Resampling,
    problem: EvaluationProblem,
    units: np.ndarray,
) -> PartSystems:
    """Of a part of the log."""
    device = str(network.flat.device)
    weights = torch.as_tensor(resampling.row_counts(problem, units) * problem.row_weights, device=device)
    systems = accumulate_systems(network, make_table(problem, device), instruments, weights)
    start_weights = torch.as_tensor(resampling.start_counts(problem, units) * problem.start_weights)
    starts = start_features(network, problem, start_weights.to(device))
    return PartSystems(systems, weights.sum(dim=1), starts, start_weights.sum(dim=1))


def start_features(
    network: StackedMLP, problem: EvaluationProblem, weights: Float[Tensor, "replica start"]
) -> Float[Tensor, "replica parameter"]:
    """Σ w E_{a~π} φ(s0, a)."""
    inputs = torch.as_tensor(problem.start_inputs).to(network.flat)
    read = problem.start_probabilities
    readout = None if read is None else torch.as_tensor(read).to(network.flat)
    double, total = network.with_flat(network.flat.double()), None
    for rows in row_blocks(network, len(inputs), inputs.shape[1]):
        found = last_layer_features(double, inputs[rows].double(), None if readout is None else readout[rows])
        part = (weights[:, rows].unsqueeze(1) @ found).squeeze(1)
        total = part if total is None else total + part
    assert total is not None  # a problem has start states
    return total


@dataclass(frozen=True, eq=False)
class StartSums(Sums):
    """Σ w and, by head, Σ w v of start states' values v, for every replica: (R,) and (H, R)."""

    weights: Tensor
    values: Tensor

    @classmethod
    def of(cls, heads: dict[str, StackedMLP], problem: EvaluationProblem, weights: Tensor) -> StartSums:
        """Of weights (R, E)."""
        values = [(start_values(network, problem).cpu() * weights).sum(dim=1) for network in heads.values()]
        return cls(weights.sum(dim=1), torch.stack(values))


def starts_of_part(
    heads: dict[str, StackedMLP], resampling: Resampling, problem: EvaluationProblem, units: np.ndarray
) -> StartSums:
    """The values of a part's start states by every head."""
    weights = resampling.start_counts(problem, units) * problem.start_weights
    return StartSums.of(heads, problem, torch.as_tensor(weights))
