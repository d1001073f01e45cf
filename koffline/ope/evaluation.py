"""``koffline.evaluate``: from a log and a policy to an estimate, reading top to bottom."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import torch

from koffline.config import EvaluationSettings, make_settings
from koffline.data.transitions import Transitions
from koffline.errors import ConfigError, DataError, KofflineError
from koffline.fitting import Progress, threads
from koffline.ope.coverage import Coverage, measure_coverage
from koffline.ope.diagnostics import collect_diagnostics, collect_warnings, package_versions
from koffline.ope.estimate import Estimate, Evidence, Interval
from koffline.ope.fitted import FittedValues, fit_value_functions
from koffline.ope.learning import draw_ensemble, start_values
from koffline.ope.problem import prepare_problem
from koffline.ope.residuals import ResidualSummary, summarise_residuals
from koffline.policies import as_policy

_ASSUMPTIONS = (
    "Standard deviation over networks retrained on resampled {units}, Student t: it covers the choice of "
    "{units}, start states and training noise, not what the log or the network cannot express."
)


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
    _check_rows(transitions)
    if initial_observations is not None:
        initial_observations = _checked_starts(transitions, initial_observations)
    generator = np.random.default_rng(settings.seed)
    with torch.no_grad(), threads(settings.threads):
        problem = prepare_problem(
            transitions, policy, settings.gamma, settings.action_draws, generator, initial_observations
        )
        ensemble = draw_ensemble(problem, settings.full_replicas, settings.resampled_replicas, generator)
        fitted = fit_value_functions(problem, ensemble, settings, progress)
        value, interval = _value_and_interval(fitted)
        residuals = summarise_residuals(
            fitted.chosen, fitted.table, fitted.instruments, ensemble, fitted.alive, problem.reward_scale
        )
        coverage = measure_coverage(problem, generator)
        evidence = _evidence(fitted, residuals, coverage)
    diagnostics = collect_diagnostics(transitions, policy, fitted, residuals, coverage)
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
        warnings=collect_warnings(diagnostics, interval, transitions, fitted),
        evidence=evidence,
    )


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


def _check_rows(transitions: Transitions) -> None:
    """DataError for a single row, or a single one that counts."""
    if len(transitions) < 2:
        raise DataError("the log has 1 row; an estimate needs at least 2, an honest one hundreds")
    if transitions.weights is not None and np.count_nonzero(transitions.weights) < 2:
        raise DataError(
            "weights leave fewer than 2 rows; an estimate needs at least 2, an honest one hundreds"
        )


def _checked_starts(transitions: Transitions, given: Any) -> np.ndarray:
    """Start states from outside as the log's observations are, so that the policy sees what it is used to."""
    expected = transitions.observation_shape
    try:
        starts = np.asarray(given)
        numbers = starts.astype(np.float64)
    except (TypeError, ValueError):
        raise DataError("initial states are not an array of numbers; give one row per start state") from None
    if starts.ndim != len(expected) + 1 or starts.shape[1:] != expected or len(starts) == 0:
        raise DataError(
            f"initial states have shape {starts.shape}, observations {expected}; "
            "give (E, …) of the same shape"
        )
    if not np.isfinite(numbers).all():
        raise DataError("initial states hold NaN or infinite numbers; remove those rows")
    dtype = transitions.observations.dtype
    return numbers.astype(dtype) if dtype.kind == "f" else starts


def _value_and_interval(fitted: FittedValues) -> tuple[float, Interval]:
    """Mean over the replicas of the whole log, Student-t interval from the spread of the resampled ones."""
    from scipy import stats

    settings, ensemble, alive = fitted.settings, fitted.ensemble, fitted.alive
    values = fitted.replica_values[settings.estimator]
    full = values[: ensemble.full][alive[: ensemble.full]]
    resampled = values[ensemble.full :][alive[ensemble.full :]]
    if len(full) == 0 or len(resampled) < 2:
        raise KofflineError(
            f"{fitted.describe_diverged()}; "
            "lower learning_rate or look for outliers with 'koffline data validate'"
        )
    value, spread = float(full.mean()), float(resampled.std(ddof=1))
    quantile = float(stats.t.ppf(0.5 + settings.level / 2.0, df=len(resampled) - 1))
    half_width = quantile * spread * math.sqrt(1.0 + 1.0 / len(full))
    units = "episodes" if len(fitted.problem.episode_starts) < fitted.problem.n_rows else "rows"
    assumptions = _ASSUMPTIONS.format(units=units)
    return value, Interval(value - half_width, value + half_width, settings.level, "bootstrap", assumptions)


def _evidence(fitted: FittedValues, residuals: ResidualSummary, coverage: Coverage) -> Evidence:
    """Arrays for the plots."""
    record, full = fitted.record, fitted.ensemble.full
    steps = np.array(record.probe_steps)
    losses = record.losses.T.numpy()
    at = np.minimum(np.searchsorted(np.array(record.loss_steps), steps), losses.shape[1] - 1)
    starts = start_values(fitted.chosen, fitted.problem)[:full].cpu().numpy()[fitted.alive[:full]]
    starts, relevant = starts[:, fitted.problem.start_weights > 0.0], coverage.weights > 0.0
    return Evidence(
        steps=steps,
        objective=losses[:, at],
        values=torch.stack(record.probes).T.numpy(),
        residuals=residuals.sample,
        initial_values=starts.mean(axis=0),
        action_support=coverage.ratios[relevant],
        support_weights=coverage.weights[relevant],
        support_label="distance to the nearest logged row / the log's own spacing",
        replica_values=fitted.replica_values[fitted.settings.estimator],
        replica_roles=fitted.ensemble.roles,
    )
