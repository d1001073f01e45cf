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
from koffline.ope.ensemble import Ensemble
from koffline.ope.last_layer import accumulate_systems, minimise_kernel_loss, solve_temporal_difference
from koffline.ope.learning import fit_features, make_table, start_values
from koffline.ope.problem import EvaluationProblem
from koffline.replicas import StackedMLP

_PROBE_STARTS = 1000
_PROBE_DRAWS = 8
LSTD_RIDGE = 1e-3


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
    def head(self) -> str:
        """The estimator that was asked for where it is a head, kloss otherwise."""
        return self.settings.estimator if self.settings.estimator in self.heads else "kloss"

    @property
    def chosen(self) -> StackedMLP:
        """The networks of that head."""
        return self.heads[self.head]

    @property
    def alive(self) -> np.ndarray:
        """Which replicas neither diverged nor ended with a J that is no number, (R,)."""
        trained = np.array([step is None for step in self.record.diverged_at])
        return trained & np.isfinite(self.replica_values[self.head])

    @cached_property
    def replica_values(self) -> dict[str, Float[np.ndarray, " replica"]]:
        """J per head and replica: its own start states, as its sample weighs them; NaN if it diverged."""
        weights = self.ensemble.start_weights
        found = {}
        for name, network in self.heads.items():
            values = start_values(network, self.problem).cpu()
            found[name] = ((values * weights).sum(dim=1) / weights.sum(dim=1)).numpy()
        return found

    def estimate_by_head(self) -> dict[str, float]:
        """Mean of J over the replicas of the whole log that did not diverge; no head that is no number."""
        full = self.ensemble.full
        kept = self.alive[:full]
        means = {name: float(values[:full][kept].mean()) for name, values in self.replica_values.items()}
        return {name: mean for name, mean in means.items() if np.isfinite(mean)}

    def describe_diverged(self) -> str:
        """How many networks diverged, and from which step on."""
        steps = [step for step in self.record.diverged_at if step is not None]
        since = f", the first at step {min(steps)}" if steps else ""
        return f"{np.count_nonzero(~self.alive)} of {len(self.alive)} networks diverged{since}"


def fit_value_functions(
    problem: EvaluationProblem,
    ensemble: Ensemble,
    settings: EvaluationSettings,
    progress: Progress | None = None,
) -> FittedValues:
    """Train all replicas, then give each its last layers: exact kernel loss, LSTD, or as trained."""
    table = make_table(problem, settings.device)
    record = fit_features(table, problem, ensemble, settings, start_value_probe(problem), progress)
    generator = torch.Generator().manual_seed(settings.seed)
    kernel_inputs = torch.as_tensor(problem.kernel_inputs[problem.row_weights > 0.0])
    bandwidth = settings.bandwidth * median_bandwidth(kernel_inputs, generator=generator)
    instruments = random_fourier_features(
        Gaussian(bandwidth), kernel_inputs.shape[1], settings.instruments, generator
    )
    network = record.network
    systems = accumulate_systems(network, table, instruments, ensemble.row_weights.to(settings.device))
    heads = {
        "kloss": minimise_kernel_loss(network, systems, settings.ridge),
        "lstd": solve_temporal_difference(network, systems, LSTD_RIDGE),
        "fqe": network.with_flat(network.flat.double()),
    }
    return FittedValues(problem, ensemble, settings, table, heads, bandwidth, instruments, record)


def start_value_probe(problem: EvaluationProblem) -> Callable[[int, StackedMLP], Tensor]:
    """The mean value over (at most a thousand) start states, for the learning curve of the estimate."""
    counted = np.flatnonzero(problem.start_weights)
    some = counted[np.unique(np.linspace(0, len(counted) - 1, min(len(counted), _PROBE_STARTS)).astype(int))]
    probabilities = problem.start_probabilities
    fewer = dataclasses.replace(
        problem,
        start_inputs=problem.start_inputs[some, :_PROBE_DRAWS],
        start_probabilities=None if probabilities is None else probabilities[some],
    )
    share = torch.as_tensor(problem.start_weights[some] / problem.start_weights[some].sum())
    return lambda step, network: start_values(network, fewer).cpu().double() @ share
