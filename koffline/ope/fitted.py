"""Value functions of one evaluation: features by fitted Q evaluation, then the last layer by each head."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from koffline.batches import Table
from koffline.config import EvaluationSettings
from koffline.data.transitions import Transitions
from koffline.errors import ConfigError, KofflineError
from koffline.fitting import FitRecord, Progress, threads
from koffline.kernels import FourierFeatures, Gaussian, median_bandwidth, random_fourier_features
from koffline.ope.last_layer import (
    LinearSystems,
    StartSums,
    dual_weights,
    minimise_kernel_loss,
    solve_temporal_difference,
    start_features,
    starts_of_part,
    systems_of_part,
)
from koffline.ope.learning import Ensemble, draw_ensemble, make_table
from koffline.ope.names import BOOTSTRAP
from koffline.ope.problem import EvaluationProblem, Measures, prepare_problem
from koffline.ope.results import Interval
from koffline.ope.rounds import train_in_rounds
from koffline.ope.value_functions import ValueFunction, counted_rows
from koffline.ope.working_log import S
from koffline.policies import Policy
from koffline.replicas import StackedMLP

LSTD_RIDGE = 1e-3


Summarise = Callable[[EvaluationProblem, np.ndarray], S]  # summary of a part of a log
Fold = Callable[[Summarise[Any]], Any]  # sum of a summary over all parts of a log
_ASSUMPTIONS = (
    "How much the value varies when {units} are redrawn and networks retrained (standard deviation, "
    "Student's t). It shows no error from what the log lacks or the network cannot express."
)


@dataclass(frozen=True)
class ReplicaMean:
    """Summary of J over replicas: ``full`` on the whole log, ``resampled`` with a finite J.

    ``value``: the mean over all, each from the log's own start states. ``deviation``: of the resampled ones,
    each from start states as its sample weighs them.
    """

    value: float
    deviation: float
    full: int
    resampled: int


@dataclass(frozen=True, eq=False)
class FittedValues:
    """Stacked networks by head: ``kloss``, ``lstd`` and ``fqe`` share their hidden layers.

    ``problem``, ``ensemble`` and ``table`` are of the rows that networks were trained on; ``fold`` reaches
    the whole log of ``rows`` rows, whose effective number of units is ``units``. ``systems``: of their last
    layers, means over its rows; ``start_features (R, 2, p)``: mean φ of start states as each replica's sample
    weighs them, and as the log does.
    """

    problem: EvaluationProblem
    ensemble: Ensemble
    settings: EvaluationSettings
    table: Table
    heads: dict[str, StackedMLP]
    systems: LinearSystems
    start_features: Tensor
    bandwidth: float
    instruments: FourierFeatures
    record: FitRecord
    fold: Fold
    units: float
    rows: float

    @property
    def head(self) -> str:
        """The requested estimator if it is a head, else kloss."""
        return self.settings.estimator if self.settings.estimator in self.heads else "kloss"

    @property
    def chosen(self) -> StackedMLP:
        """The networks of that head."""
        return self.heads[self.head]

    @property
    def alive(self) -> np.ndarray:
        """Mask (R,) of replicas that did not diverge and have a finite J."""
        trained = np.array([step is None for step in self.record.diverged_at])
        return trained & np.isfinite(self.replica_values[self.head]).all(axis=1)

    @cached_property
    def duals(self) -> Float[Tensor, "replica instrument"]:
        """Coefficients of a row's weight in its instruments, see `koffline.ope.last_layer.dual_weights`."""
        return dual_weights(self.record.network, self.systems, self.start_features[:, 1], self.settings.ridge)

    @cached_property
    def replica_values(self) -> dict[str, Float[np.ndarray, "replica 2"]]:
        """J per head and replica, start states as its sample weighs them and as the log does.

        NaN if it diverged.
        """
        return dict(zip(self.heads, self.sum_starts(self.heads).means, strict=True))

    def sum_starts(
        self, heads: dict[str, StackedMLP], share_of: Callable[[np.ndarray], Tensor] | None = None
    ) -> StartSums:
        """Sums of the values of start states, by groups of units (or of given start states)."""
        asked = partial(starts_of_part, heads, self.ensemble.resampling, share_of)
        if self.problem.fixed_starts:  # start states of a part are meaningless then
            return asked(self.problem, np.arange(len(self.problem.start_inputs)))
        return self.fold(asked)

    @property
    def spread(self) -> float:
        """Standard deviation of the kernel-loss values of the resampled networks."""
        return self.summarise(self.replica_values["kloss"]).deviation

    def summarise(self, values: Float[np.ndarray, "replica 2"]) -> ReplicaMean:
        """Summarise J over replicas. Raises KofflineError if too few are finite."""
        full, kept = self.ensemble.full, self.alive & np.isfinite(values).all(axis=1)
        if not kept[:full].any() or np.count_nonzero(kept[full:]) < 2:
            told = f"{np.count_nonzero(~kept)} of {len(kept)} networks diverged or give no number"
            raise KofflineError(
                f"{told}; lower learning_rate or look for outliers with 'koffline data validate'"
            )
        resampled = values[full:, 0][kept[full:]]
        spread = float(resampled.std(ddof=1))
        return ReplicaMean(float(values[kept, 1].mean()), spread, int(kept[:full].sum()), len(resampled))

    def interval(
        self, values: Float[np.ndarray, "replica 2"], level: float | None = None, units: float | None = None
    ) -> Interval:
        """Student-t interval around J with the spread of the resampled replicas.

        Resampling U units shows (U − 1)/U of the variance of a mean, with at most U − 1 degrees of freedom.
        It is as wide as for the mean of the replicas of the whole log alone. level, units: where they are not
        the settings' and the log's.
        """
        from scipy import stats

        found = self.summarise(values)
        level, parts = level or self.settings.level, max(2.0, units or self.units)
        quantile = float(stats.t.ppf(0.5 + level / 2.0, df=min(found.resampled, parts) - 1))
        half_width = quantile * found.deviation * math.sqrt((1.0 + 1.0 / found.full) * parts / (parts - 1.0))
        kind = "episodes" if len(self.problem.episode_starts) < self.problem.n_rows else "rows"
        assumptions = _ASSUMPTIONS.format(units=kind)
        return Interval(found.value - half_width, found.value + half_width, level, BOOTSTRAP, assumptions)

    def estimate_by_head(self) -> dict[str, float]:
        """Mean of J over the replicas that did not diverge, by head, if it is finite."""
        means = {name: float(values[self.alive, 1].mean()) for name, values in self.replica_values.items()}
        return {name: mean for name, mean in means.items() if np.isfinite(mean)}

    def describe_diverged(self) -> str:
        """Text on how many networks diverged, and from which step on."""
        steps = [step for step in self.record.diverged_at if step is not None]
        since = f", the first at step {min(steps)}" if steps else ""
        return f"{np.count_nonzero(~self.alive)} of {len(self.alive)} networks diverged{since}"

    def value_function(self, transitions: Transitions) -> ValueFunction:
        """The mean network of the chosen head, fitted to ``transitions``."""
        kept = np.flatnonzero(self.alive).tolist()
        return ValueFunction(
            name=self.head,
            function=partial(_mean_values, self.chosen.select(kept), Measures(**self.problem.measures)),
            action_space=transitions.action_space,
            observation_shape=transitions.observation_shape,
            trained_on=counted_rows(transitions),
        )


@torch.no_grad()
def _mean_values(
    network: StackedMLP, problem: Measures, observations: np.ndarray, actions: np.ndarray
) -> np.ndarray:
    """Mean of Q(s, a) (M,) over networks, within the bounds of any discounted return; in its units."""
    inputs = torch.as_tensor(problem.standardise(observations, actions)).to(network.flat)
    outputs = network.forward(inputs).mean(dim=0).cpu().double().numpy()  # (M, n)
    taken = np.zeros(len(outputs), dtype=np.int64) if problem.n_actions is None else np.asarray(actions)
    values = np.take_along_axis(outputs, taken[:, None], axis=1)[:, 0]
    return np.clip(values, *problem.value_bounds) * problem.reward_scale


def fit_value_functions(
    problem: EvaluationProblem,
    ensemble: Ensemble,
    settings: EvaluationSettings,
    progress: Progress | None = None,
    fold: Fold | None = None,
    effective_units: float | None = None,
) -> FittedValues:
    """Train all replicas in rounds, then give each its last layers: exact kernel loss, LSTD, or as trained.

    fold: over the log that the problem is a sample of, None where it is all of it; last layers are solved,
    and start states valued, on the whole log. effective_units: of that log, by default its units.
    """

    def in_memory(summarise: Summarise[S]) -> S:
        return summarise(problem, ensemble.units)

    table = make_table(problem, settings.device)
    generator = torch.Generator().manual_seed(settings.seed)
    kernel_inputs = torch.as_tensor(problem.kernel_inputs[problem.row_weights > 0.0])
    bandwidth = settings.bandwidth * median_bandwidth(kernel_inputs, generator=generator)
    instruments = random_fourier_features(
        Gaussian(bandwidth), kernel_inputs.shape[1], settings.instruments, generator
    )
    record = train_in_rounds(table, problem, ensemble, settings, instruments, progress)
    network, reach = record.network, in_memory if fold is None else fold
    sums = reach(partial(systems_of_part, network, instruments, ensemble.resampling))
    systems = sums.systems.mean(sums.row_weight)
    heads = {
        "kloss": minimise_kernel_loss(network, systems, settings.ridge),
        "lstd": solve_temporal_difference(network, systems, LSTD_RIDGE),
        "fqe": network.with_flat(network.flat.double()),
    }
    starts = sums.starts / sums.start_weight.to(sums.starts).unsqueeze(-1)
    if problem.fixed_starts:  # start states of a part are meaningless then
        given = ensemble.start_weights.to(sums.starts)
        starts = start_features(network, problem, given / given.sum(dim=2, keepdim=True))
    return FittedValues(
        problem=problem,
        ensemble=ensemble,
        settings=settings,
        table=table,
        heads=heads,
        systems=systems,
        start_features=starts,
        bandwidth=bandwidth,
        instruments=instruments,
        record=record,
        fold=reach,
        units=effective_units or float(len(problem.episode_starts)),
        rows=float(sums.row_weight[0]),
    )


def fit_value_function(
    transitions: Transitions, policy: Policy, settings: EvaluationSettings, progress: Progress | None = None
) -> ValueFunction:
    """Q^π by the estimator of the settings, kloss or fqe, from the whole log; no replicas are resampled."""
    if settings.history:
        raise ConfigError("diagnose and value functions are of the logged state; leave history out")
    with torch.no_grad(), threads(settings.threads):
        generator = np.random.default_rng(settings.seed)
        problem = prepare_problem(transitions, policy, settings.gamma, settings.action_draws, generator)
        ensemble = draw_ensemble(problem, settings.full_replicas, 0, settings.seed)
        return fit_value_functions(problem, ensemble, settings, progress).value_function(transitions)
