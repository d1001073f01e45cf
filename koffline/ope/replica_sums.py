"""Sums over a part of a log for all replicas: linear systems of last layers, values of start states."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from koffline.kernels import FourierFeatures
from koffline.ope.last_layer import LinearSystems, accumulate_systems, last_layer_features
from koffline.ope.learning import Resampling, make_table, row_blocks, start_values
from koffline.ope.problem import EvaluationProblem
from koffline.ope.working_log import Sums
from koffline.replicas import StackedMLP


@dataclass(frozen=True, eq=False)
class PartSystems(Sums):
    """Sums over a part of the log for the last layers of all replicas.

    Linear systems, Σ w of rows (R,), Σ w φ(s0) (R, 2, p) and Σ w (R, 2) of start states; the axis of size 2:
    weights of each replica's sample, and of the log.
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
    """Last-layer sums of a part of the log."""
    device = str(network.flat.device)
    weights = torch.as_tensor(resampling.row_counts(problem, units) * problem.row_weights, device=device)
    systems = accumulate_systems(network, make_table(problem, device), instruments, weights)
    start_weights = resampling.start_weights(problem, units).to(device)
    starts = start_features(network, problem, start_weights)
    return PartSystems(systems, weights.sum(dim=1), starts, start_weights.sum(dim=2))


def start_features(
    network: StackedMLP, problem: EvaluationProblem, weights: Float[Tensor, "replica 2 start"]
) -> Float[Tensor, "replica 2 parameter"]:
    """Weighted sum over start states of E_{a~π} φ(s0, a)."""
    inputs = torch.as_tensor(problem.start_inputs).to(network.flat)
    read = problem.start_probabilities
    readout = None if read is None else torch.as_tensor(read).to(network.flat)
    double, total = network.with_flat(network.flat.double()), None
    for rows in row_blocks(network, len(inputs), inputs.shape[1]):
        found = last_layer_features(double, inputs[rows].double(), None if readout is None else readout[rows])
        part = weights[..., rows] @ found
        total = part if total is None else total + part
    assert total is not None  # a problem has start states
    return total


@dataclass(frozen=True, eq=False)
class StartSums(Sums):
    """Σ w (R, 2, G) and, by head, Σ w v (H, R, 2, G) of start states' values v, for each of G groups.

    The axis of size 2: weights of each replica's sample, and of the log.
    """

    weights: Tensor
    values: Tensor

    @classmethod
    def of(
        cls,
        heads: dict[str, StackedMLP],
        problem: EvaluationProblem,
        weights: Float[Tensor, "replica 2 start"],
        share: Float[Tensor, "start group"] | None = None,
    ) -> StartSums:
        """Sums by group. share: of each start state in each group; None for one group of all."""
        share = torch.ones(weights.shape[2], 1) if share is None else share
        share = share.to(weights)
        each = [start_values(network, problem).cpu().double() for network in heads.values()]  # (R, E)
        values = [(weights * v.unsqueeze(1)) @ share for v in each]  # (R, 2, E) @ (E, G)
        return cls(weights @ share, torch.stack(values))

    @property
    def by_group(self) -> np.ndarray:
        """Means (H, R, 2, G)."""
        return (self.values / self.weights).numpy()

    @property
    def means(self) -> np.ndarray:
        """Means (H, R, 2) over all groups together."""
        return (self.values.sum(dim=-1) / self.weights.sum(dim=-1)).numpy()


def starts_of_part(
    heads: dict[str, StackedMLP], resampling: Resampling, problem: EvaluationProblem, units: np.ndarray
) -> StartSums:
    """Sums of the values of a part's start states by every head."""
    return StartSums.of(heads, problem, resampling.start_weights(problem, units))
