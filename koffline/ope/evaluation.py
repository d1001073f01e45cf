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
from koffline.errors import ConfigError, DataError, KofflineError, PolicyError
from koffline.fitting import Progress, threads
from koffline.ope.estimators import (
    bounds_of,
    choose_estimator,
    common_diagnostics,
    run_estimator,
    verdict_on,
)
from koffline.ope.groups import By, check_by, groups_of, values_by_group
from koffline.ope.learning import start_values
from koffline.ope.markov import Shift
from koffline.ope.names import (
    AUTO,
    CERTIFIED_KINDS,
    DEFAULT,
    ESTIMATORS,
    FITTED,
    check_estimator,
    check_interval,
    kinds_for,
)
from koffline.ope.results import Estimate, EstimateRow, EstimateTable, Evidence
from koffline.ope.stream_settings import StreamSettings
from koffline.ope.verdict import without_guess, without_guesswork
from koffline.ope.working_log import hold
from koffline.ope.workspace import Workspace
from koffline.policies import DiscretePolicy, Policy
from koffline.policy_specs import as_policy

_TOLD_APART_BY = 1000  # states
_ANY_GAMMA = 0.5


def evaluate(
    transitions: Transitions | LazyTransitions,
    policy: Any,
    gamma: float | None = None,
    *,
    initial_observations: np.ndarray | None = None,
    settings: EvaluationSettings | None = None,
    stream: StreamSettings | None = None,
    progress: Progress | None = None,
    by: By | None = None,
    **options: Any,
) -> Estimate:
    """What is the policy worth from the log's initial states? J = E_{s0, a~π} Q(s0, a).

    policy: anything ``koffline.load_policy`` reads, a policy object, or a callable from observations (N, …)
    to probabilities (N, n) or actions (N, k). gamma: the discount, inside (0, 1); the log's own hint when
    None. initial_observations (E, …): start states that replace the first steps of the log's episodes (all
    rows, where there are no episodes). options: fields of ``koffline.config.EvaluationSettings``, such as
    estimator, level and seed. Where the log lies (``open_transitions(path, lazy=True)``)
    changes nothing. Of one with more than ``sample_rows`` rows, networks are trained on whole episodes of
    about so many, and their last layers, start states and importance weights come from passes over all of
    it; ``stream`` says how it is read. by: a feature's name or number, or ``{"segment": labels}`` of the
    log's episodes: then ``groups`` says what each group of start states is worth, by the same networks.
    Raises KofflineError (DataError, PolicyError, ConfigError) in one line. Same arguments, same result on
    the same machine; other processors may round differently.
    (Feng et al. 2019, equ:vstat)
    """
    settings = merge_settings(transitions, settings, {"gamma": gamma, **options})
    check_interval(settings.estimator, settings.interval)
    looks_back = may_look_back(settings.estimator, settings.interval, settings.history)
    if by is not None:
        settings = settings.model_copy(update={"estimator": FITTED[0]} if settings.estimator == AUTO else {})
        check_by(by, settings.estimator, settings.interval)

    def ask(settings: EvaluationSettings) -> tuple[Estimate, Shift | None]:
        log = transitions, policy, settings, initial_observations, stream, progress
        with open_workspace(*log) as workspace:
            return _estimate(workspace, by)

    found, shift = ask(settings)
    if shift is None or not looks_back:
        return found
    again, _ = ask(settings.model_copy(update={"history": 1}))
    note = (
        f"What happened in the row before matters beyond the logged state (p = {shift.p_value:.1g}), so that "
        f"row is part of it here (history=1); without it the value would be {found.value:.4g}."
    )
    seconds = round(found.seconds + again.seconds, 3)
    return dataclasses.replace(again, warnings=(note, *again.warnings), seconds=seconds)


def may_look_back(estimator: str, interval: str, history: int | None) -> bool:
    """Whether settings leave it open if the row before is part of the state; a certificate does not."""
    return estimator == AUTO and history is None and interval not in CERTIFIED_KINDS


def _estimate(workspace: Workspace, by: By | None) -> tuple[Estimate, Shift | None]:
    """The estimate, and what the row before changes if that matters."""
    groups, name = None if by is None else groups_of(workspace, by), choose_estimator(workspace)
    found = run_estimator(workspace, name)
    evidence = _evidence(workspace) if name in FITTED else None
    verdict = verdict_on(workspace, found)
    found = without_guesswork(found, verdict)
    value_function = None
    if evidence and not workspace.settings.history:
        value_function = workspace.fitted.value_function(workspace.transitions)
    shift = workspace.memory_shift if evidence and found.interval is not None else None
    matters = shift is not None and found.interval is not None and shift.matters(found.interval)
    estimate = Estimate(
        verdict=verdict,
        value=found.value,
        interval=found.interval,
        behavior_value=None if found.uplift is None else found.uplift.behavior_value,
        uplift=found.uplift,
        by=None if groups is None else groups.by,
        groups=() if groups is None else values_by_group(workspace, groups, found),
        estimator=name,
        diagnostics={**common_diagnostics(workspace), **found.diagnostics},
        warnings=(*workspace.log.copies, *found.warnings),
        evidence=evidence,
        value_function=value_function,
        **workspace.describe(),
    )
    return estimate, shift if matters else None


def _evidence(workspace: Workspace) -> Evidence:
    """Collect the arrays for the plots."""
    fitted, coverage = workspace.fitted, workspace.coverage
    starts = start_values(fitted.chosen, fitted.problem).cpu().numpy()[fitted.alive]
    starts, relevant = starts[:, fitted.problem.start_weights > 0.0], coverage.weights > 0.0
    return Evidence(
        residuals=workspace.held_pass.sample(fitted.problem.reward_scale),
        initial_values=starts.mean(axis=0),
        action_support=coverage.ratios[relevant],
        support_weights=coverage.weights[relevant],
        replica_values=fitted.replica_values[fitted.head][:, 0],
        replica_roles=fitted.resampling.roles,
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
    about = transitions.action_space, transitions.observation_shape, None, transitions.metadata.features
    policy = as_policy(policy, *about)
    stream = stream or StreamSettings()
    with torch.no_grad(), threads(settings.threads), stream.kept():
        log = hold(transitions, settings.sample_rows, settings.seed, stream, progress)
        if len(log.sample.transitions) < 2:
            raise DataError("the log has 1 row; an estimate needs at least 2, an honest one hundreds")
        if initial_observations is not None:
            initial_observations = _checked_starts(log.sample.transitions, initial_observations)
        answers, again = (_answers(policy, log.sample.transitions.observations) for _ in range(2))
        if not np.allclose(answers, again, rtol=1e-3, atol=1e-6):
            raise PolicyError(
                f"{policy.name} answers the same states in another way each time; return probabilities, or "
                "draw with the generator that it is given"
            )
        if stream.partial is not None and not log.is_whole:
            log = dataclasses.replace(log, answers=policy.name.encode() + answers.tobytes())
        yield Workspace(log, policy, settings, initial_observations)


def _answers(policy: Policy, observations: np.ndarray) -> np.ndarray:
    """Probabilities, or draws from one seed, in some logged states."""
    some = observations[:_TOLD_APART_BY]
    if isinstance(policy, DiscretePolicy):
        return policy.probabilities(some)
    return policy.sample(some, np.random.default_rng(0))


def merge_settings(
    transitions: Transitions | LazyTransitions, settings: EvaluationSettings | None, given: dict[str, Any]
) -> EvaluationSettings:
    """Merge settings: explicit arguments win over ``settings``, then the log's hint, then the defaults.

    Where every row ends its episode no reward is discounted, and any gamma gives the same.
    """
    base: dict[str, Any] = {"gamma": transitions.metadata.gamma}
    if settings is not None:
        base.update(settings.model_dump(exclude_unset=True))
    if base["gamma"] is None and given.get("gamma") is None and _is_one_step(transitions):
        base["gamma"] = _ANY_GAMMA
    made = make_settings(base, given)
    if made.device != "cpu" and not torch.cuda.is_available():
        raise ConfigError(f"device is '{made.device}', but torch sees no CUDA device here; use cpu")
    return made


def _is_one_step(log: Transitions | LazyTransitions) -> bool:
    """Whether every row is terminal; reading stops at the first that is not."""
    shards = range(len(log.shard_names))
    return all(bool(block.terminated.all()) for shard in shards for block in log.shard_blocks(shard))


def _checked_starts(transitions: Transitions, given: Any) -> np.ndarray:
    """Given start states in the shape and dtype of the log's observations. Raises DataError."""
    starts, expected = np.asarray(given), transitions.observation_shape
    has_shape = starts.dtype.kind in "biuf" and starts.shape == (len(given), *expected)
    if not has_shape or not len(starts) or not np.isfinite(starts).all():
        received = f"initial states have shape {starts.shape} and dtype {starts.dtype}, or NaN among them"
        raise DataError(f"{received}; give finite numbers (E, …), each of the observations' shape {expected}")
    dtype = transitions.observations.dtype
    return starts.astype(dtype) if dtype.kind == "f" else starts


def estimate_all(
    transitions: Transitions | LazyTransitions,
    policy: Any,
    gamma: float | None = None,
    *,
    names: str | Sequence[str] | None = None,
    bounds: bool = True,
    initial_observations: np.ndarray | None = None,
    settings: EvaluationSettings | None = None,
    stream: StreamSettings | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> EstimateTable:
    """Estimate a policy's value by several estimators, each with its interval, and by bounds.

    names: one or more of ``koffline.ope.names.ESTIMATORS``; None: all. bounds: intervals of the
    kernel kind too. All else as in `koffline.evaluate`; estimators share what they can, so all of them cost
    little more than ``kloss`` alone. One that does not apply to this log (no episodes, no probabilities …)
    is a row with its reason. Raises KofflineError for what concerns them all.
    """
    settings = merge_settings(transitions, settings, {"gamma": gamma, **options})
    wanted = [names] if isinstance(names, str) else list(names or ESTIMATORS)
    for name in wanted:
        check_estimator(name)
    if settings.interval != DEFAULT:
        wanted = [name for name in wanted if settings.interval in kinds_for(name)]
    with open_workspace(transitions, policy, settings, initial_observations, stream, progress) as workspace:
        rows = tuple(_row(name, ESTIMATORS[name], workspace) for name in wanted)
        found = {row.name: row.estimate for row in rows if row.estimate is not None}
        if not found:
            raise KofflineError(f"no estimator applies to this log; {rows[0].name}: {rows[0].reason}")
        verdict = verdict_on(workspace, found.get(choose_estimator(workspace)) or next(iter(found.values())))
        bound_rows = bounds_of(workspace, found) if bounds else ()
        kept = {name: without_guesswork(estimate, verdict) for name, estimate in found.items()}
        diagnostics = common_diagnostics(workspace)
    return EstimateTable(
        verdict=verdict,
        rows=tuple(dataclasses.replace(row, estimate=kept.get(row.name)) for row in rows),
        bounds=tuple(without_guess(bound, verdict) for bound in bound_rows),
        level=settings.level,
        diagnostics=diagnostics,
        warnings=workspace.log.copies,
        **workspace.describe(),
    )


def _row(name: str, family: str, workspace: Workspace) -> EstimateRow:
    """Row of one estimator; if it fails on this log, with the reason."""
    started = time.perf_counter()
    try:
        estimate = run_estimator(workspace, name)
    except (KofflineError, torch.linalg.LinAlgError) as error:
        return EstimateRow(name, family, None, str(error), time.perf_counter() - started)
    return EstimateRow(name, family, estimate, None, time.perf_counter() - started)
