"""Value functions of one evaluation: features by fitted Q evaluation, then the last layer by each head."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from koffline.batches import Table
from koffline.config import EvaluationSettings
from koffline.fitting import FitRecord, Progress
from koffline.kernels import FourierFeatures, Gaussian, median_bandwidth, random_fourier_features
from koffline.ope.ensemble import Ensemble, Resampling
from koffline.ope.last_layer import (
    LinearSystems,
    accumulate_systems,
    minimise_kernel_loss,
    solve_temporal_difference,
)
from koffline.ope.learning import fit_features, make_table, start_values
from koffline.ope.problem import EvaluationProblem
from koffline.ope.working_log import S
from koffline.replicas import StackedMLP

_PROBE_STARTS = 1000
_PROBE_DRAWS = 8
LSTD_RIDGE = 1e-3
ROUNDS = (2000, 6000, 8000)  # coverage was tested at the first: never fewer
_LEAST = 0.01  # of the rms return: less is no difference


@runtime_checkable
class Fold(Protocol):
    """The sum over parts of a log of what a function makes of each: of a part's problem and its units."""

    def __call__(self, summarise: Callable[[EvaluationProblem, np.ndarray], S], /) -> S:
        """Over the whole log."""
        ...


@dataclass(frozen=True, eq=False)
class SystemsOfPart:
    """The linear systems of all replicas' last layers, from a part of the log."""

    network: StackedMLP
    instruments: FourierFeatures
    resampling: Resampling

    def __call__(self, problem: EvaluationProblem, units: np.ndarray) -> LinearSystems:
        """Sums over its rows."""
        device = str(self.network.flat.device)
        weights = self.resampling.row_counts(problem, units) * problem.row_weights
        table = make_table(problem, device)
        return accumulate_systems(
            self.network, table, self.instruments, torch.as_tensor(weights, device=device)
        )


@dataclass(frozen=True, eq=False)
class StartSums:
    """Σ w and, by head, Σ w v of start states' values v, for every replica (R,)."""

    weights: Tensor
    values: dict[str, Tensor]

    def __add__(self, other: StartSums) -> StartSums:
        values = {name: value + other.values[name] for name, value in self.values.items()}
        return StartSums(self.weights + other.weights, values)

    @classmethod
    def of(cls, heads: dict[str, StackedMLP], problem: EvaluationProblem, weights: Tensor) -> StartSums:
        """Of weights (R, E)."""
        values = {}
        for name, network in heads.items():
            values[name] = (start_values(network, problem).cpu() * weights).sum(dim=1)
        return cls(weights.sum(dim=1), values)


@dataclass(frozen=True, eq=False)
class StartsOfPart:
    """The values of a part's start states by every head."""

    heads: dict[str, StackedMLP]
    resampling: Resampling

    def __call__(self, problem: EvaluationProblem, units: np.ndarray) -> StartSums:
        """Sums over its start states."""
        weights = self.resampling.start_counts(problem, units) * problem.start_weights
        return StartSums.of(self.heads, problem, torch.as_tensor(weights))


@dataclass(frozen=True, eq=False)
class FittedValues:
    """The stacked networks by head: ``kloss``, ``lstd`` and ``fqe`` share their hidden layers.

    ``problem``, ``ensemble`` and ``table`` are of the rows that networks were trained on; ``fold`` reaches
    the whole log, whose effective number of units is ``units``.
    """

    problem: EvaluationProblem
    ensemble: Ensemble
    settings: EvaluationSettings
    table: Table
    heads: dict[str, StackedMLP]
    bandwidth: float
    instruments: FourierFeatures
    record: FitRecord
    fold: Fold
    units: float

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
        if self.problem.fixed_starts:
            sums = StartSums.of(self.heads, self.problem, self.ensemble.start_weights)
        else:
            sums = self.fold(StartsOfPart(self.heads, self.ensemble.resampling))
        return {name: (values / sums.weights).numpy() for name, values in sums.values.items()}

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
    fold: Fold | None = None,
    effective_units: float | None = None,
) -> FittedValues:
    """Train all replicas, then give each its last layers: exact kernel loss, LSTD, or as trained.

    Unless the settings say how long, training goes on in rounds until the heads agree. fold: over the log
    that the problem is a sample of, None where it is all of it; last layers are solved, and start states
    valued, on the whole log. effective_units: of that log.
    """

    def in_memory(summarise: Callable[[EvaluationProblem, np.ndarray], S]) -> S:
        return summarise(problem, ensemble.units)

    table = make_table(problem, settings.device)
    generator = torch.Generator().manual_seed(settings.seed)
    kernel_inputs = torch.as_tensor(problem.kernel_inputs[problem.row_weights > 0.0])
    bandwidth = settings.bandwidth * median_bandwidth(kernel_inputs, generator=generator)
    instruments = random_fourier_features(
        Gaussian(bandwidth), kernel_inputs.shape[1], settings.instruments, generator
    )
    probe, record = start_value_probe(problem), None
    rounds = ROUNDS if settings.steps is None else (settings.steps,)
    for number, steps in enumerate(rounds, start=1):
        record = fit_features(table, problem, ensemble, settings, steps, probe, progress, record)
        of_part = SystemsOfPart(record.network, instruments, ensemble.resampling)
        is_last = number == len(rounds)
        if is_last and fold is not None:
            break
        heads = _heads(record.network, in_memory(of_part), settings.ridge)
        if is_last or _agree(heads, problem, ensemble, settings.agreement):
            break
    assert record is not None
    if fold is not None:
        heads = _heads(record.network, fold(of_part), settings.ridge)
    parts = problem.effective_units if effective_units is None else effective_units
    reach = in_memory if fold is None else fold
    return FittedValues(
        problem, ensemble, settings, table, heads, bandwidth, instruments, record, reach, parts
    )


def _heads(network: StackedMLP, systems: LinearSystems, ridge: float) -> dict[str, StackedMLP]:
    return {
        "kloss": minimise_kernel_loss(network, systems, ridge),
        "lstd": solve_temporal_difference(network, systems, LSTD_RIDGE),
        "fqe": network.with_flat(network.flat.double()),
    }


def _agree(
    heads: dict[str, StackedMLP], problem: EvaluationProblem, ensemble: Ensemble, share: float
) -> bool:
    """Whether the heads of replicas differ by a small share of the interval's width (root mean square).

    Replicas that diverged have no say; a hundredth of the rms return counts as nothing.
    """
    sums = StartSums.of(heads, problem, ensemble.start_weights)
    values = torch.stack([value / sums.weights for value in sums.values.values()]).numpy()  # (3, R)
    kept = np.isfinite(values).all(axis=0)
    gaps = np.ptp(values, axis=0)[kept]
    resampled = values[0, ensemble.full :][kept[ensemble.full :]]
    width = 4.0 * float(resampled.std(ddof=1)) if len(resampled) > 1 else 0.0
    tolerance = max(share * width, _LEAST * problem.reward_scale)
    return len(gaps) > 0 and float(np.sqrt(np.square(gaps).mean())) <= tolerance


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
