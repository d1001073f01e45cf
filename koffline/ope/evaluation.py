"""``koffline.evaluate``: from a log and a policy to an estimate, reading top to bottom."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from koffline.config import EvaluationSettings, make_settings
from koffline.data.disk.log import LazyTransitions
from koffline.data.transitions import Transitions
from koffline.errors import ConfigError, DataError, KofflineError
from koffline.fitting import Progress, threads
from koffline.ope.coverage import common_diagnostics, common_warnings
from koffline.ope.direct import fitted_value_function, make_evidence
from koffline.ope.estimate import Estimate, EstimateRow, EstimateTable
from koffline.ope.estimators import bounds_of, run_estimator, sensitivity_to_norm
from koffline.ope.limits import NOTABLE
from koffline.ope.names import (
    DEFAULT,
    ESTIMATORS,
    FITTED,
    KERNEL_CERTIFIED,
    check_estimator,
    check_interval,
    kinds_for,
)
from koffline.ope.results import Interval, PointEstimate, Unavailable
from koffline.ope.stream_settings import StreamSettings
from koffline.ope.working_log import hold
from koffline.ope.workspace import Workspace
from koffline.policies import DiscretePolicy, Policy
from koffline.policy_specs import as_policy

_TOLD_APART_BY = 1000  # states


def evaluate(
    transitions: Transitions | LazyTransitions,
    policy: Any,
    gamma: float | None = None,
    *,
    estimator: str | None = None,
    level: float | None = None,
    seed: int | None = None,
    initial_observations: np.ndarray | None = None,
    settings: EvaluationSettings | None = None,
    stream: StreamSettings | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Estimate:
    """What is the policy worth from the log's initial states? J = E_{s0, a~π} Q(s0, a).

    policy: anything ``koffline.load_policy`` reads, a policy object, or a callable from observations (N, …)
    to probabilities (N, n) or actions (N, k). gamma: the discount, inside (0, 1); the log's own hint when
    None. initial_observations (E, …): start states that replace the first steps of the log's episodes (all
    rows, where there are no episodes). estimator, level, seed and further ``options`` are fields of
    ``koffline.config.EvaluationSettings``. Where the log lies (``open_transitions(path, lazy=True)``)
    changes nothing. Of one with more than ``sample_rows`` rows, networks are trained on whole episodes of
    about so many, and their last layers, start states and importance weights come from passes over all of
    it; ``stream`` says how it is read.
    Raises KofflineError (DataError, PolicyError, ConfigError) in one line. Same arguments, same result on
    the same machine; other processors may round differently.
    (Feng et al. 2019, equ:vstat)
    """
    given = {"gamma": gamma, "estimator": estimator, "level": level, "seed": seed, **options}
    settings = merge_settings(transitions, settings, given)
    check_interval(settings.estimator, settings.interval)
    with open_workspace(transitions, policy, settings, initial_observations, stream, progress) as workspace:
        found = run_estimator(workspace, settings.estimator)
        if isinstance(found, Unavailable):
            raise DataError(f"{found.name}: {found.reason}")
        diagnostics = {**common_diagnostics(workspace), **found.diagnostics}
        warnings = [*common_warnings(workspace, diagnostics), *found.warnings]
        is_fitted = settings.estimator in FITTED
        evidence = make_evidence(workspace) if is_fitted else None
        sensitivity = sensitivity_to_norm(workspace, settings.interval)
    return Estimate(
        value=found.value,
        interval=found.interval,
        estimator=settings.estimator,
        diagnostics=diagnostics,
        settings=settings.model_dump(exclude={"gamma", "estimator", "seed"}),
        warnings=tuple(warnings),
        evidence=evidence,
        value_function=fitted_value_function(workspace.fitted, workspace.transitions) if is_fitted else None,
        sensitivity=sensitivity,
        **workspace.describe(),
    )


@contextlib.contextmanager
def open_workspace(
    transitions: Transitions | LazyTransitions,
    policy: Any,
    settings: EvaluationSettings,
    initial_observations: np.ndarray | None = None,
    stream: StreamSettings | None = None,
    progress: Progress | None = None,
) -> Iterator[Workspace]:
    """Check the log, the policy and the start states against each other, and read what is held in memory.

    Inside, threads are those of the settings and workers are kept. Raises KofflineError.
    """
    policy = as_policy(policy, transitions.action_space, transitions.observation_shape)
    stream = stream or StreamSettings()
    with torch.no_grad(), threads(settings.threads), stream.passes.kept():
        log = hold(transitions, settings.sample_rows, settings.seed, stream, progress)
        _check_rows(log.sample.transitions)
        if initial_observations is not None:
            initial_observations = _checked_starts(log.sample.transitions, initial_observations)
        if stream.partial is not None and not log.is_whole:
            log = dataclasses.replace(log, answers=_answers(policy, log.sample.transitions.observations))
        yield Workspace(log, policy, settings, initial_observations, progress)


def _answers(policy: Policy, observations: np.ndarray) -> bytes:
    """Actions of a policy in some logged states, drawn with a seed, and their probabilities."""
    some = observations[:_TOLD_APART_BY]
    if isinstance(policy, DiscretePolicy):
        return policy.name.encode() + policy.probabilities(some).tobytes()
    return policy.name.encode() + policy.sample(some, np.random.default_rng(0)).tobytes()


def merge_settings(
    transitions: Transitions | LazyTransitions, settings: EvaluationSettings | None, given: dict[str, Any]
) -> EvaluationSettings:
    """Explicit arguments win over ``settings``, which win over the log's hint and the defaults."""
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


def estimate_all(
    transitions: Transitions | LazyTransitions,
    policy: Any,
    gamma: float | None = None,
    *,
    names: str | Sequence[str] | None = None,
    bounds: bool = True,
    level: float | None = None,
    seed: int | None = None,
    initial_observations: np.ndarray | None = None,
    settings: EvaluationSettings | None = None,
    stream: StreamSettings | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> EstimateTable:
    """What each estimator says the policy is worth, with its interval, and bounds beside them.

    names: one or more of ``koffline.ope.names.ESTIMATORS``; None: all. bounds: intervals of the
    kernel kind too. All else as in `koffline.evaluate`; estimators share what they can, so all of them cost
    little more than ``kloss`` alone. One that does not apply to this log (no episodes, no probabilities …)
    is a row with its reason. Raises KofflineError for what concerns them all.
    """
    settings = merge_settings(
        transitions, settings, {"gamma": gamma, "level": level, "seed": seed, **options}
    )
    if isinstance(names, str):
        names = (names,)
    wanted = list(names or ESTIMATORS)
    for name in wanted:
        check_estimator(name)
    if settings.interval != DEFAULT:
        wanted = [name for name in wanted if settings.interval in kinds_for(name)]
    with open_workspace(transitions, policy, settings, initial_observations, stream, progress) as workspace:
        rows = tuple(_row(name, ESTIMATORS[name], workspace) for name in wanted)
        found = {row.name: row.estimate for row in rows if row.estimate is not None}
        if not found:
            raise KofflineError(f"no estimator applies to this log; {rows[0].name}: {rows[0].reason}")
        bound_rows = bounds_of(workspace, found) if bounds else ()
        sensitivity = sensitivity_to_norm(workspace, KERNEL_CERTIFIED) if bounds else None
        diagnostics = common_diagnostics(workspace)
        warnings = [*common_warnings(workspace, diagnostics), *_disagreement(rows, workspace)]
    return EstimateTable(
        rows=rows,
        bounds=bound_rows,
        level=settings.level,
        diagnostics=diagnostics,
        settings=settings.model_dump(exclude={"gamma", "estimator", "seed", "level"}),
        warnings=tuple(warnings),
        sensitivity=sensitivity,
        **workspace.describe(),
    )


def _row(name: str, family: str, workspace: Workspace) -> EstimateRow:
    """An estimator that fails on this log is a row with its reason."""
    started = time.perf_counter()
    try:
        found: PointEstimate | Unavailable = run_estimator(workspace, name)
    except (KofflineError, torch.linalg.LinAlgError) as error:
        found = Unavailable(name, str(error))
    seconds = time.perf_counter() - started
    if isinstance(found, Unavailable):
        return EstimateRow(name, family, None, found.reason, seconds)
    return EstimateRow(name, family, found, None, seconds)


def _disagreement(rows: Sequence[EstimateRow], workspace: Workspace) -> list[str]:
    """A sentence on the two families whose intervals lie farthest apart, where they do not meet."""
    least = NOTABLE * workspace.problem.reward_scale
    worst, found = least, []
    for one in rows:
        for other in rows:
            low, high = (row.estimate.interval if row.estimate else None for row in (one, other))
            if one.family == other.family or low is None or high is None:
                continue
            gap = high.low - low.high
            if gap > worst:
                worst = gap
                found = [
                    f"Families disagree: {one.name} ({one.family}) says {_span(low)}, {other.name} "
                    f"({other.family}) {_span(high)}; their assumptions cannot all hold on this log: look at "
                    "coverage, effective sample sizes and `koffline diagnose` before trusting either."
                ]
    return found


def _span(interval: Interval) -> str:
    return f"[{interval.low:.4g}, {interval.high:.4g}]"
