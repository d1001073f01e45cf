"""``koffline.evaluate``: from a log and a policy to an estimate; the file reads from
top to bottom.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from koffline.config import EvaluationSettings, make_settings
from koffline.data.disk.log import AnyLog
from koffline.data.sources import LogMapping, LogSource, open_log, open_log_by
from koffline.data.spaces import ACTIONS, SpaceRequest
from koffline.data.transitions import Transitions
from koffline.errors import ConfigError, KofflineError, chance, counted
from koffline.fitting import Progress
from koffline.json_types import JsonObject
from koffline.ope import names as known
from koffline.ope.assumptions.markov import Shift
from koffline.ope.estimators.contract import Estimator
from koffline.ope.estimators.registry import name_of
from koffline.ope.estimators.running import choose_estimator, run_estimator
from koffline.ope.estimators.system_intervals import bounds_of
from koffline.ope.groups import (
    By,
    GroupValue,
    GroupValues,
    check_by,
    groups_of,
    values_by_group,
)
from koffline.ope.log.facts import usual_gamma
from koffline.ope.networks.resampling import start_values
from koffline.ope.results import (
    BoundRow,
    Diagnostics,
    Estimate,
    EstimateRow,
    EstimateTable,
    Evidence,
)
from koffline.ope.stream_settings import StreamSettings
from koffline.ope.verdict import verdict_on, without_guess, without_guesswork
from koffline.ope.workspace import (
    SharedByPolicies,
    SharedPasses,
    Workspace,
    open_workspace,
)
from koffline.policies import DiscretePolicy, Policy
from koffline.policies.base import PolicySource

_FEW_ACTIONS = 8


def evaluate(  # noqa: PLR0913
    transitions: LogSource,
    policy: PolicySource,
    gamma: float | None = None,
    *,
    mapping: LogMapping = None,
    action_space: SpaceRequest | None = None,
    initial_observations: np.ndarray | None = None,
    settings: EvaluationSettings | Mapping[str, Any] | None = None,
    stream: StreamSettings | None = None,
    progress: Progress | None = None,
    by: By | None = None,
    **options: Any,
) -> Estimate:
    """Estimate what a policy is worth from the log's initial states: J = E_{s0, a~π}
    Q(s0, a).

    transitions: a log, or anything that `koffline.open_transitions` reads: a path, a
    pandas, polars or Arrow frame, a dict of arrays, a d3rlpy buffer, a Minari dataset,
    a list of episodes. mapping: what the columns of a table are; action_space: in place
    of what the log declares. policy: anything ``koffline.load_policy`` reads, a policy
    object, or a callable from observations (N, …) to probabilities (N, n), action
    numbers (N,) or actions (N, k). gamma: the discount factor in (0, 1); None: the
    log's own hint. initial_observations (E, …): start states that replace the first
    steps of the log's episodes (all rows if there are no episodes). settings: a
    ``koffline.config.EvaluationSettings``; options: some of its fields, such as level,
    seed and estimator (a name, "package.module:name", or an object with the contract of
    `koffline.ope.estimators.contract.Estimator`). Storage (``open_transitions(path,
    lazy=True)``) does not change the estimate. Of a log with more than ``sample_rows``
    rows, networks train on a sample of whole episodes; last layers, start states and
    importance weights use all rows. stream: how passes over such a log run. by: a
    feature's name or number, or ``{"segment": labels}`` with one label per episode; the
    result's ``groups`` then hold the value of each group of start states, by
    networks. progress: called with the steps done, all steps and a note. Raises
    KofflineError (DataError, PolicyError, ConfigError) with a message of one line. The
    same arguments give the same result on the same machine; other processors may round
    differently. (Feng et al. 2019, equ:vstat)
    """
    log, by = open_log_by(transitions, action_space, mapping, by)
    settings = merge_settings(log, settings, {"gamma": gamma, **options})
    return evaluate_one_of_several(
        log,
        policy,
        settings,
        SharedByPolicies(),
        initial_observations=initial_observations,
        stream=stream,
        progress=progress,
        by=by,
    )


def evaluate_one_of_several(
    log: AnyLog,
    policy: PolicySource,
    settings: EvaluationSettings,
    shared: SharedByPolicies,
    *,
    initial_observations: np.ndarray | None = None,
    stream: StreamSettings | None = None,
    progress: Progress | None = None,
    by: By | None = None,
) -> Estimate:
    """`evaluate` with merged settings, and with what evaluations of other policies on
    the same log have computed.

    shared: read, and filled with what is computed here. Other arguments: as in
    `evaluate`. The estimate is the same to the digit as by `evaluate`. Raises
    KofflineError.
    """
    known.check_interval(settings.estimator, settings.interval)
    looks_back = may_look_back(settings.estimator, settings.interval, settings.history)
    if by is not None:
        of_groups = settings.estimator
        if of_groups == known.AUTO:
            of_groups = known.default_head(settings.steps)
        check_by(by, of_groups, settings.interval)

    def estimate_by(settings: EvaluationSettings) -> tuple[Estimate, Shift | None]:
        with open_workspace(
            log,
            policy,
            settings,
            initial_observations,
            stream,
            progress,
            shared,
        ) as workspace:
            return _estimate(workspace, by)

    estimate, shift = estimate_by(settings)
    if shift is None or not shift.rows or not looks_back:
        return estimate
    with_history, _ = estimate_by(settings.model_copy(update={"history": shift.rows}))
    if shift.rows == 1:
        before = "the row before is"
    else:
        before = f"the {shift.rows} rows before are"
    note = (
        "What happened earlier matters beyond the logged state"
        f" ({chance(shift.p_value)}), so that {before} part of it here"
        f" (history={shift.rows}); without it the value would be {estimate.value:.4g}."
    )
    return dataclasses.replace(
        with_history,
        warnings=(note, *with_history.warnings),
        seconds=round(estimate.seconds + with_history.seconds, 3),
    )


def may_look_back(estimator: str, interval: str, history: int | None) -> bool:
    """Whether earlier rows may be added to the state: `auto`, no given history, and no
    certified interval.
    """
    return (
        estimator == known.AUTO
        and history is None
        and interval not in known.CERTIFIED_KINDS
    )


def _estimate(workspace: Workspace, by: By | None) -> tuple[Estimate, Shift | None]:
    """The estimate, and the shift by earlier rows if it matters."""
    groups = None
    if by is not None:
        groups = groups_of(workspace, by)
    name = choose_estimator(workspace)
    estimate = run_estimator(workspace, name)
    has_networks = name in known.FITTED
    evidence = None
    if has_networks:
        evidence = _evidence(workspace)
    verdict = verdict_on(workspace, estimate)
    group_values: tuple[GroupValue, ...] = ()
    if groups is not None:  # each group has a verdict of its own
        by_networks = estimate
        if not has_networks:
            head = known.default_head(workspace.settings.steps)
            by_networks = run_estimator(workspace, head)
        group_values = values_by_group(workspace, groups, by_networks)
    estimate = without_guesswork(estimate, verdict)
    shift = None
    if has_networks and estimate.interval is not None:
        shift = workspace.memory_shift
        if shift is not None and not shift.matters(estimate.interval):
            shift = None
    value_function = None
    if has_networks and not workspace.settings.history:
        value_function = workspace.fitted.value_function(workspace.transitions)
    behavior_value = None
    if estimate.uplift is not None:
        behavior_value = estimate.uplift.behavior_value
    result = Estimate(
        verdict=verdict,
        value=estimate.value,
        interval=estimate.interval,
        behavior_value=behavior_value,
        uplift=estimate.uplift,
        by=None if groups is None else groups.by,
        groups=GroupValues(group_values),
        estimator=name,
        diagnostics={**common_diagnostics(workspace), **estimate.diagnostics},
        warnings=(*workspace.log.copies, *estimate.warnings),
        evidence=evidence,
        value_function=value_function,
        **workspace.describe(),
    )
    return result, shift


def common_diagnostics(workspace: Workspace) -> Diagnostics:
    """Diagnostics of log and policy that do not depend on the estimator; units of the
    reward or return.
    """
    facts = workspace.facts
    problem = workspace.problem
    log = workspace.transitions
    diagnostics: Diagnostics = {
        "coverage": workspace.coverage.fraction,
        "coverage_of_starts": workspace.coverage.of_starts,
        "n_terminated": facts.terminated,
        "n_truncated": facts.truncated,
        "n_initial_states": facts.starts,
        "reward_scale": problem.reward_scale,
        "logged_return": None,
        "logged_return_se": None,
    }
    if problem.fixed_starts:
        diagnostics["n_initial_states"] = len(problem.start_weights)
    if facts.episodes:
        diagnostics["logged_return"] = float(facts.returns.mean)
    if facts.clusters is None:
        diagnostics["logged_return_se"] = facts.returns.standard_error
    else:  # episodes of a cluster are not independent
        diagnostics["n_clusters"] = len(facts.clusters[0])
    diagnostics["beyond_cuts"] = None
    if facts.episodes:
        diagnostics["beyond_cuts"] = float(facts.beyond.mean)
    if not workspace.log.is_whole:
        diagnostics["sample_rows"] = len(log)
    return diagnostics | _action_overlap(log, workspace.policy)


def _action_overlap(log: Transitions, policy: Policy) -> Diagnostics:
    """For discrete actions: the mean probability that the policy gives to the logged
    actions.

    Names of actions are in the order in which a policy's array is read. With few
    actions also how often policy and log take each action, which shows misnumbered
    actions.
    """
    if not isinstance(policy, DiscretePolicy):
        return {}
    probabilities = policy.probabilities(log.observations, log.action_mask)
    count = policy.n
    taken = probabilities[np.arange(len(log)), log.actions]
    overlap: Diagnostics = {"mean_probability_of_logged_actions": float(taken.mean())}
    # the space may have been declared anew
    named = list(log.metadata.extra.get(ACTIONS) or ())[:count]
    names = list(map(str, [*named, *range(len(named), count)]))
    if named:
        overlap["action_names"] = names
    if count <= _FEW_ACTIONS:
        logged = np.bincount(log.actions, minlength=count) / len(log)
        rows = zip(
            names, probabilities.mean(axis=0).tolist(), logged.tolist(), strict=True
        )
        overlap["actions"] = {
            name: {"policy": of_policy, "log": of_log}
            for name, of_policy, of_log in rows
        }
    return overlap


def _evidence(workspace: Workspace) -> Evidence:
    """Collect the arrays for the plots."""
    fitted = workspace.fitted
    coverage = workspace.coverage
    values = start_values(fitted.network_of(fitted.head), fitted.problem)
    starts = values.cpu().numpy()[fitted.alive]
    starts = starts[:, fitted.problem.start_weights > 0.0]
    relevant = coverage.weights > 0.0
    return Evidence(
        residuals=workspace.held_pass.sample(fitted.problem.reward_scale),
        initial_values=starts.mean(axis=0),
        action_support=coverage.ratios[relevant],
        support_weights=coverage.weights[relevant],
        replica_values=fitted.values_of(fitted.head)[:, 0],
        replica_roles=fitted.resampling.roles,
    )


def merge_settings(
    transitions: AnyLog,
    settings: EvaluationSettings | Mapping[str, Any] | None,
    arguments: dict[str, Any],
) -> EvaluationSettings:
    """Merge settings: explicit arguments win, then ``settings``, then the log's hint,
    then the defaults.
    """
    if arguments.get("estimator") is not None:
        arguments = {**arguments, "estimator": name_of(arguments["estimator"])}
    base: JsonObject = {}
    if isinstance(settings, EvaluationSettings):
        base = settings.model_dump(exclude_unset=True)
    elif settings is not None:
        base = dict(settings)
    gamma = usual_gamma(transitions, arguments.get("gamma") or base.get("gamma"))
    if gamma is None and transitions.has_episodes:
        rows = counted(len(transitions), "row")
        raise ConfigError(
            f"gamma is missing, and the {rows} of the log make"
            f" {counted(transitions.n_episodes, 'episode')}, in which later rewards"
            " count less; give the"
            f" {EvaluationSettings.model_fields['gamma'].description}"
        )
    merged = make_settings({"gamma": gamma}, base, arguments)
    return merged.model_copy(update={"estimator": name_of(merged.estimator)})


def estimate_all(  # noqa: PLR0913
    transitions: LogSource,
    policy: PolicySource,
    gamma: float | None = None,
    *,
    mapping: LogMapping = None,
    action_space: SpaceRequest | None = None,
    names: str | Estimator | Sequence[str | Estimator] | None = None,
    bounds: bool = True,
    initial_observations: np.ndarray | None = None,
    settings: EvaluationSettings | Mapping[str, Any] | None = None,
    stream: StreamSettings | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> EstimateTable:
    """Estimate a policy's value by several estimators, each with its interval, and
    compute bounds.

    names: one or more of ``koffline.ope.names.ESTIMATORS``, or estimators of your own
    (`koffline.ope.estimators.contract.Estimator`); None: all of koffline's. bounds:
    also compute the kernel intervals, which belong to no single estimator. transitions,
    policy, gamma, mapping, action_space, initial_observations, settings, stream,
    progress and options: as in `koffline.evaluate`. Estimators share intermediate results, so all of them
    cost little more than ``kloss`` alone. An estimator that does not apply to this log
    (no episodes, no probabilities …) gives a row with the reason. Raises ConfigError
    for unknown names, and KofflineError if no estimator applies.
    """
    log = open_log(transitions, action_space, mapping)
    settings = merge_settings(log, settings, {"gamma": gamma, **options})
    wanted = known.having(settings.interval, _names_of(names))
    passes = SharedPasses.of(wanted, settings, bounds)
    with open_workspace(
        log, policy, settings, initial_observations, stream, progress, passes=passes
    ) as workspace:
        rows = [_row(name, workspace) for name in wanted]
        estimates = {row.name: row.estimate for row in rows if row.estimate is not None}
        if not estimates:
            raise KofflineError(
                f"no estimator applies to this log; {rows[0].name}: {rows[0].reason}"
            )
        judged = choose_estimator(workspace)
        if judged not in estimates:
            judged = next(iter(estimates))
        rows.sort(key=lambda row: row.name != judged)
        verdict = verdict_on(workspace, estimates[judged])
        bound_rows: tuple[BoundRow, ...] = ()
        if bounds:
            bound_rows = bounds_of(workspace, estimates)
        kept = {
            name: without_guesswork(estimate, verdict)
            for name, estimate in estimates.items()
        }
        diagnostics = common_diagnostics(workspace)
    return EstimateTable(
        verdict=verdict,
        rows=tuple(
            dataclasses.replace(row, estimate=kept.get(row.name)) for row in rows
        ),
        bounds=tuple(without_guess(bound, verdict) for bound in bound_rows),
        level=settings.level,
        diagnostics=diagnostics,
        warnings=workspace.log.copies,
        **workspace.describe(),
    )


def _names_of(
    estimators: str | Estimator | Sequence[str | Estimator] | None,
) -> list[str] | None:
    """Names of one or more estimators; None for none."""
    if estimators is None:
        return None
    if isinstance(estimators, str) or not isinstance(estimators, Sequence):
        return [name_of(estimators)]
    return [name_of(estimator) for estimator in estimators]


def _row(name: str, workspace: Workspace) -> EstimateRow:
    """One estimator's row; if it fails on this log, a row with the reason."""
    started = time.perf_counter()
    estimate = None
    reason = None
    try:
        estimate = run_estimator(workspace, name)
    except (KofflineError, torch.linalg.LinAlgError) as error:
        reason = str(error)
    return EstimateRow(
        name=name,
        family=known.find(name).family,
        estimate=estimate,
        reason=reason,
        seconds=time.perf_counter() - started,
    )
