"""Value functions of one evaluation: features by fitted Q evaluation, then the last layer by each head."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from koffline.batches import Table
from koffline.config import EvaluationSettings
from koffline.fitting import FitRecord, Progress
from koffline.kernels import FourierFeatures, Gaussian, median_bandwidth, random_fourier_features
from koffline.ope.last_layer import accumulate_systems, minimise_kernel_loss, solve_temporal_difference
from koffline.ope.learning import Ensemble, fit_features, make_table, start_values
from koffline.ope.problem import EvaluationProblem
from koffline.replicas import StackedMLP

_PROBE_STARTS = 1000
_LSTD_RIDGE = 1e-3


@dataclass(frozen=True, eq=False)
class FittedValues:
    """The stacked networks by head: ``kloss``, ``lstd`` and ``fqe`` share their hidden layers."""

    problem: EvaluationProblem
    ensemble: Ensemble
    settings: EvaluationSettings
    table: Table
    heads: dict[str, StackedMLP]
    bandwidth: float
    instruments: FourierFeatures
    record: FitRecord

    @property
    def chosen(self) -> StackedMLP:
        """The networks of the estimator that was asked for."""
        return self.heads[self.settings.estimator]

    @property
    def alive(self) -> np.ndarray:
        """Which replicas did not diverge, (R,)."""
        return np.array([step is None for step in self.record.diverged_at])

    @cached_property
    def replica_values(self) -> dict[str, Float[np.ndarray, " replica"]]:
        """J per head and replica, start states as often as its sample holds them; NaN if diverged."""
        counts = self.ensemble.start_counts.double()
        found = {}
        for name, network in self.heads.items():
            values = start_values(network, self.problem).cpu()
            means = ((values * counts).sum(dim=1) / counts.sum(dim=1)).numpy()
            found[name] = np.where(self.alive, means, np.nan)
        return found

    def estimate_by_head(self) -> dict[str, float]:
        """Mean of J over the replicas of the whole log that did not diverge."""
        full = self.ensemble.full
        kept = self.alive[:full]
        return {
            name: float(values[:full][kept].mean()) if kept.any() else float("nan")
            for name, values in self.replica_values.items()
        }


def fit_value_functions(
    problem: EvaluationProblem,
    ensemble: Ensemble,
    settings: EvaluationSettings,
    progress: Progress | None = None,
) -> FittedValues:
    """Train all replicas, then give each its last layers: exact kernel loss, LSTD, or as trained."""
    table = make_table(problem, settings.device)
    record = fit_features(table, problem, ensemble, settings, _start_value_probe(problem), progress)
    generator = torch.Generator().manual_seed(settings.seed)
    kernel_inputs = torch.as_tensor(problem.kernel_inputs)
    bandwidth = settings.bandwidth * median_bandwidth(kernel_inputs, generator=generator)
    instruments = random_fourier_features(
        Gaussian(bandwidth), kernel_inputs.shape[1], settings.instruments, generator
    )
    network = _without_diverged(record)
    systems = accumulate_systems(network, table, instruments, ensemble.row_weights.to(settings.device))
    heads = {
        "kloss": minimise_kernel_loss(network, systems, settings.ridge),
        "lstd": solve_temporal_difference(network, systems, _LSTD_RIDGE),
        "fqe": network.with_flat(network.flat.double()),
    }
    return FittedValues(problem, ensemble, settings, table, heads, bandwidth, instruments, record)


def _start_value_probe(problem: EvaluationProblem) -> Callable[[int, StackedMLP], Tensor]:
    """The mean value over (at most a thousand) start states, for the learning curve of the estimate."""
    count = len(problem.start_inputs)
    some = np.unique(np.linspace(0, count - 1, min(count, _PROBE_STARTS)).astype(int))
    probabilities = problem.start_probabilities
    fewer = dataclasses.replace(
        problem,
        start_inputs=problem.start_inputs[some],
        start_probabilities=None if probabilities is None else probabilities[some],
    )
    return lambda step, network: start_values(network, fewer).mean(dim=1)


def _without_diverged(record: FitRecord) -> StackedMLP:
    """The trained stack; zeros stand in for a diverged replica, whose values are masked."""
    network: StackedMLP = record.network
    if all(step is None for step in record.diverged_at):
        return network
    return network.with_flat(torch.nan_to_num(network.flat))
