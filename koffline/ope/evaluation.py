"""``koffline.evaluate``: from a log and a policy to an estimate, reading top to bottom."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from koffline.batches import Table
from koffline.config import EvaluationSettings, make_settings
from koffline.data.transitions import Transitions
from koffline.errors import ConfigError, DataError, KofflineError
from koffline.fitting import FitRecord, Progress, threads
from koffline.kernels import FourierFeatures, Gaussian, median_bandwidth, random_fourier_features
from koffline.ope.coverage import Coverage, measure_coverage
from koffline.ope.diagnostics import collect_diagnostics, collect_warnings, package_versions
from koffline.ope.estimate import Estimate, Evidence, Interval
from koffline.ope.last_layer import accumulate_systems, minimise_kernel_loss, solve_temporal_difference
from koffline.ope.learning import Ensemble, draw_ensemble, fit_features, make_table, start_values
from koffline.ope.problem import EvaluationProblem, prepare_problem
from koffline.ope.residuals import ResidualSummary, summarise_residuals
from koffline.policies import as_policy
from koffline.replicas import StackedMLP

_PROBE_STARTS = 1000
_LSTD_RIDGE = 1e-3
_ASSUMPTIONS = (
    "Standard deviation over networks retrained on resampled {units}, Student t: it covers the choice of "
    "{units}, start states and training noise, not what the log or the network cannot express."
)


@dataclass(frozen=True, eq=False)
class FittedValues:
    """The stacked networks by head: ``kloss``, ``lstd`` and ``fqe`` share their hidden layers."""

    heads: dict[str, StackedMLP]
    bandwidth: float
    instruments: FourierFeatures
    record: FitRecord


def evaluate(
    transitions: Transitions,
    policy: Any,
    gamma: float | None = None,
    *,
    estimator: str | None = None,
    level: float | None = None,
    seed: int | None = None,
    initial_observations: np.ndarray | None = None,
    settings: EvaluationSettings | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Estimate:
    """What is the policy worth from the log's initial states? J = E_{s0, a~π} Q(s0, a).

    policy: anything ``koffline.load_policy`` reads, a policy object, or a callable from observations (N, …)
    to probabilities (N, n) or actions (N, k). gamma: the discount, inside (0, 1); the log's own hint when
    None. initial_observations (E, …): start states that replace the first steps of the log's episodes (all
    rows, where there are no episodes). estimator, level, seed and further ``options`` are fields of
    ``koffline.config.EvaluationSettings``.
    Raises KofflineError (DataError, PolicyError, ConfigError) in one line. Same arguments, same result on
    the same machine; other processors may round differently.
    (Feng et al. 2019, equ:vstat)
    """
    started = time.perf_counter()
    settings = _settings(transitions, gamma, estimator, level, seed, settings, options)
    policy = as_policy(policy, transitions.action_space, transitions.observation_shape)
    _check_starts(transitions, initial_observations)
    generator = np.random.default_rng(settings.seed)
    with torch.no_grad(), threads(settings.threads):
        problem = prepare_problem(
            transitions, policy, settings.gamma, settings.action_draws, generator, initial_observations
        )
        ensemble = draw_ensemble(problem, settings.full_replicas, settings.resampled_replicas, generator)
        table = make_table(problem, settings.device)
        fitted = fit_value_functions(table, problem, ensemble, settings, progress)
        chosen = fitted.heads[settings.estimator]
        residuals = summarise_residuals(chosen, table, fitted.instruments, ensemble, problem.reward_scale)
        coverage = measure_coverage(problem, generator)
        by_head = {name: _replica_values(head, problem, ensemble) for name, head in fitted.heads.items()}
    value, interval, spread = _aggregate(
        by_head[settings.estimator], ensemble, problem, settings, fitted.record
    )
    diagnostics = collect_diagnostics(
        transitions,
        policy,
        problem,
        ensemble,
        settings,
        fitted.bandwidth,
        residuals,
        coverage,
        by_head,
        spread,
    )
    return Estimate(
        value=value,
        interval=interval,
        estimator=settings.estimator,
        gamma=settings.gamma,
        n_transitions=len(transitions),
        n_episodes=transitions.n_episodes,
        policy=policy.name,
        source=transitions.metadata.source,
        seed=settings.seed,
        seconds=time.perf_counter() - started,
        data_sha256=transitions.sha256,
        diagnostics=diagnostics,
        settings=settings.model_dump(exclude={"gamma", "estimator", "seed"}),
        versions=package_versions(),
        warnings=collect_warnings(diagnostics, interval, transitions, settings, fitted.record.diverged_at),
        evidence=_evidence(fitted.record, chosen, problem, ensemble, residuals, coverage, by_head, settings),
    )


def fit_value_functions(
    table: Table,
    problem: EvaluationProblem,
    ensemble: Ensemble,
    settings: EvaluationSettings,
    progress: Progress | None = None,
) -> FittedValues:
    """Features by fitted Q evaluation; then the last layer: exact kernel loss, LSTD, or as trained."""
    probe = _start_value_probe(problem)
    record = fit_features(table, problem, ensemble, settings, probe, progress)
    generator = torch.Generator().manual_seed(settings.seed)
    kernel_inputs = torch.as_tensor(problem.kernel_inputs)
    bandwidth = settings.bandwidth * median_bandwidth(kernel_inputs, generator=generator)
    instruments = random_fourier_features(
        Gaussian(bandwidth), kernel_inputs.shape[1], settings.instruments, generator
    )
    network = _without_diverged(record)
    systems = accumulate_systems(
        network, table, instruments, ensemble.row_counts.to(settings.device, torch.float64)
    )
    heads = {
        "kloss": minimise_kernel_loss(network, systems, settings.ridge),
        "lstd": solve_temporal_difference(network, systems, _LSTD_RIDGE),
        "fqe": network.with_flat(network.flat.double()),
    }
    return FittedValues(heads, bandwidth, instruments, record)


def _settings(
    transitions: Transitions,
    gamma: float | None,
    estimator: str | None,
    level: float | None,
    seed: int | None,
    settings: EvaluationSettings | None,
    options: dict[str, Any],
) -> EvaluationSettings:
    """Explicit arguments win over ``settings``, which win over the log's hint and the defaults."""
    given = {"gamma": gamma, "estimator": estimator, "level": level, "seed": seed, **options}
    base: dict[str, Any] = {"gamma": transitions.metadata.gamma}
    if settings is not None:
        base.update(settings.model_dump(exclude_unset=True))
    made = make_settings(base, given)
    if made.device != "cpu" and not torch.cuda.is_available():
        raise ConfigError(f"device is '{made.device}', but torch sees no CUDA device here; use cpu")
    return made


def _check_starts(transitions: Transitions, initial_observations: np.ndarray | None) -> None:
    """DataError when start states from outside do not look like the log's observations."""
    if initial_observations is None:
        return
    shape, expected = np.shape(initial_observations), transitions.observation_shape
    if len(shape) != len(expected) + 1 or shape[1:] != tuple(expected) or shape[0] == 0:
        raise DataError(
            f"initial states have shape {shape}, observations {expected}; give (E, …) of the same shape"
        )
    if not np.isfinite(np.asarray(initial_observations, dtype=np.float64)).all():
        raise DataError("initial states hold NaN or infinite numbers; remove those rows")


def _start_value_probe(problem: EvaluationProblem) -> Callable[[int, StackedMLP], Tensor]:
    """The mean value over (at most a thousand) start states, for the learning curve of the estimate."""
    import dataclasses

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
    """The trained stack; zeros stand in for a diverged replica, whose values are masked later."""
    network: StackedMLP = record.network
    if all(step is None for step in record.diverged_at):
        return network
    return network.with_flat(torch.nan_to_num(network.flat))


def _replica_values(network: StackedMLP, problem: EvaluationProblem, ensemble: Ensemble) -> np.ndarray:
    """J per replica (R,): its own start states, as often as its sample holds them."""
    values = start_values(network, problem).cpu()
    counts = ensemble.start_counts.double()
    return ((values * counts).sum(dim=1) / counts.sum(dim=1)).numpy()


def _aggregate(
    values: np.ndarray,
    ensemble: Ensemble,
    problem: EvaluationProblem,
    settings: EvaluationSettings,
    record: FitRecord,
) -> tuple[float, Interval, float]:
    """Mean over the replicas of the whole log, Student-t interval from the spread of the resampled ones."""
    from scipy import stats

    alive = np.array([step is None for step in record.diverged_at])
    full = values[: ensemble.full][alive[: ensemble.full]]
    resampled = values[ensemble.full :][alive[ensemble.full :]]
    if len(full) == 0 or len(resampled) < 2:
        steps = sorted(step for step in record.diverged_at if step is not None)
        raise KofflineError(
            f"{len(steps)} of {len(alive)} networks diverged, the first at step {steps[0]}; "
            "lower learning_rate or look for outliers with 'koffline data validate'"
        )
    value, spread = float(full.mean()), float(resampled.std(ddof=1))
    quantile = float(stats.t.ppf(0.5 + settings.level / 2.0, df=len(resampled) - 1))
    half_width = quantile * spread * math.sqrt(1.0 + 1.0 / len(full))
    units = "episodes" if len(problem.episode_starts) < problem.n_rows else "rows"
    interval = Interval(
        value - half_width, value + half_width, settings.level, "bootstrap", _ASSUMPTIONS.format(units=units)
    )
    return value, interval, spread


def _evidence(
    record: FitRecord,
    network: StackedMLP,
    problem: EvaluationProblem,
    ensemble: Ensemble,
    residuals: ResidualSummary,
    coverage: Coverage,
    by_head: dict[str, np.ndarray],
    settings: EvaluationSettings,
) -> Evidence:
    """Arrays for the plots."""
    starts = start_values(network, problem)[: ensemble.full].mean(dim=0).cpu().numpy()
    steps = np.array(record.probe_steps)
    losses = record.losses.T.numpy()
    at = np.minimum(np.searchsorted(np.array(record.loss_steps), steps), losses.shape[1] - 1)
    relevant = coverage.weights > 0
    return Evidence(
        steps=steps,
        objective=losses[:, at],
        values=torch.stack(record.probes).T.numpy(),
        residuals=residuals.sample,
        initial_values=starts,
        action_support=coverage.ratios[relevant],
        support_weights=coverage.weights[relevant],
        support_label="distance to the nearest logged row / the log's own spacing",
        replica_values=by_head[settings.estimator],
        replica_roles=ensemble.roles,
    )
