"""Run an estimator by its name, with its own interval or one of the requested kind."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from koffline.config import EvaluationSettings
from koffline.data.features import ACTIONS
from koffline.data.table.values import GAPS, ORDER
from koffline.data.transitions import Transitions
from koffline.errors import ConfigError, DataError, KofflineError, PolicyError
from koffline.ope import names
from koffline.ope.importance import estimate_one
from koffline.ope.importance.ratios import ESTIMATED
from koffline.ope.intervals import make_interval
from koffline.ope.intervals.base import IntervalResult
from koffline.ope.limits import contradiction
from koffline.ope.network_estimates import estimate_by_networks
from koffline.ope.out_of_bag import drl
from koffline.ope.results import BoundRow, Interval, PointEstimate, Verdict
from koffline.ope.verdict import FEW_EPISODES, judge
from koffline.ope.workspace import Workspace
from koffline.policies import ContinuousPolicy, DiscretePolicy

_FEW_ACTIONS = 8
_ATOM = 0.2  # share of episodes of one length above which it is no chance
_FEWEST_WEIGHTED, _ENOUGH_WEIGHTED = 2.0, 30.0  # effective numbers of episodes
_OTHER_STARTS = "is of the logged episodes, and other start states were given; leave them out"


def choose_estimator(workspace: Workspace) -> str:
    """Estimator of the settings; ``auto`` is ``dr`` for one-step logs with known probabilities, else kloss.

    In such logs ``dr`` is unbiased for any networks, and its weights are single ratios.
    """
    settings, facts, log = workspace.settings, workspace.facts, workspace.transitions
    if settings.estimator != names.AUTO:
        return settings.estimator
    one_step = log.has_episodes and facts.longest == 1 and facts.terminated == facts.rows
    known = log.behavior_log_probabilities is not None and settings.behavior != ESTIMATED
    if one_step and known and settings.interval == names.DEFAULT:
        with contextlib.suppress(DataError, PolicyError):
            found = estimate_by_importance(workspace, "wis")  # has the weights of dr but needs no network
            if (found.effective_sample_size or 0.0) >= _ENOUGH_WEIGHTED:
                return "dr"
    return "kloss"


def estimate_by_importance(workspace: Workspace, name: str) -> PointEstimate:
    """Estimate over episodes; doubly robust estimators use out-of-bag values of kernel-loss networks.

    Raises DataError and PolicyError where it does not apply.
    """
    if workspace.initial_observations is not None:
        raise DataError(f"{name} {_OTHER_STARTS}")
    episodes, settings = workspace.episodes, workspace.settings
    kind = settings.interval if settings.interval in names.EPISODE_KINDS else names.EPISODES_T
    model = workspace.row_values_of_episodes if name in names.WITH_MODEL else None
    return estimate_one(
        name, episodes, model, settings.level, kind, reward_range=settings.reward_bounds, seed=settings.seed
    )


def run_estimator(workspace: Workspace, name: str) -> PointEstimate:
    """Run an estimator with the requested interval, if the log allows one.

    Raises KofflineError where the estimator does not apply.
    """
    names.check_interval(name, workspace.settings.interval)
    if name in names.OVER_EPISODES:
        found = estimate_by_importance(workspace, name)
    elif name == "drl":
        found = drl(workspace.row_sums, workspace.fitted.spread, workspace.settings.level)
    else:
        found = estimate_by_networks(workspace, name)
    found = _with_interval(workspace, found)
    limits = workspace.limits.of_logged_returns() if name in names.OVER_EPISODES else workspace.limits
    return limits.settle(found, _reasons(workspace, found))  # drops intervals without evidence


def _reasons(workspace: Workspace, found: PointEstimate) -> list[str] | None:
    """Reasons against a calibrated interval; None for a certified one, which needs none of them."""
    if found.interval is None:
        return []
    if found.interval.kind in names.CERTIFIED_KINDS:
        return None
    by_rows = found.interval.kind in names.SYSTEM_KINDS and found.interval.kind != names.BOOTSTRAP_PIVOT
    reasons = workspace.limits.reasons_for_no_interval(by_rows)
    size = found.effective_sample_size
    if found.name in names.OVER_EPISODES and size is not None and size < _FEWEST_WEIGHTED:
        reasons.append(f"{size:.1f} episodes carry all the weight")
    elif found.name not in names.OVER_EPISODES:
        reasons += workspace.coverage.reasons
    if found.name not in names.WITHOUT_MODEL:
        fitted = workspace.fitted
        values = fitted.replica_values
        heads = {head: fitted.interval(values[head]) for head in fitted.estimate_by_head() if head != "lstd"}
        clash = contradiction(heads, fitted.problem.reward_scale)
        reasons += [clash] if clash else []
    return reasons


def _with_interval(workspace: Workspace, found: PointEstimate) -> PointEstimate:
    """The estimate with the requested kind of interval, and a warning if that excludes the estimate."""
    settings, kind = workspace.settings, workspace.settings.interval
    if kind in names.CERTIFIED_EPISODE_KINDS:
        interval, told = _say_guesses(settings, found.interval, with_norm=False)
        return dataclasses.replace(found, interval=interval, warnings=(*found.warnings, *told))
    if kind not in names.SYSTEM_KINDS:
        return found
    result = system_interval(workspace, kind)
    warnings = [*found.warnings, *result.warnings]
    if result.interval is not None and not result.interval.holds(found.value):
        own = "" if result.value is None else f": fixed features say {result.value:.4g}"
        warnings.append(f"The {kind} interval does not hold the estimate {found.value:.4g}{own}.")
    details = {key: part for key, part in result.as_dict().items() if key not in ("interval", "warnings")}
    found = dataclasses.replace(found, diagnostics={**found.diagnostics, "interval": details})
    return dataclasses.replace(found, interval=result.interval, warnings=tuple(warnings))


def system_interval(workspace: Workspace, kind: str) -> IntervalResult:
    """An interval for the value from the problem in fixed features, whatever the estimator."""
    settings, is_certified = workspace.settings, kind == names.KERNEL_CERTIFIED
    if is_certified and settings.history:
        raise ConfigError(
            f"{kind} certifies values of the logged state alone; leave history={settings.history} out"
        )
    system = workspace.fixed_system if is_certified else workspace.held_system
    asked = settings.model_dump(include={"level", "norm_bound", "reward_bounds", "seed"})
    result = make_interval(kind, system, **asked)
    if not is_certified:
        return result
    interval, told = _say_guesses(settings, result.interval, with_norm=True)
    return dataclasses.replace(result, interval=interval, warnings=(*result.warnings, *told))


def _say_guesses(
    settings: EvaluationSettings, interval: Interval | None, with_norm: bool
) -> tuple[Interval | None, tuple[str, ...]]:
    """The interval and a sentence, both of which say so if bounds that a certificate needs were not given."""
    needed = ("reward_bounds", "norm_bound") if with_norm else ("reward_bounds",)
    missing = [name for name in needed if getattr(settings, name) is None]
    if not missing:
        return interval, ()
    given, are = " and ".join(missing), "them was" if len(missing) > 1 else "it was"
    told = f"A certificate is one only with {given} given: what stands in for {are} read off the log."
    if interval is not None:
        interval = dataclasses.replace(interval, assumptions=names.READ_OFF + interval.assumptions)
    return interval, (told,)


def bounds_of(workspace: Workspace, estimates: dict[str, PointEstimate]) -> tuple[BoundRow, ...]:
    """Intervals that belong to no single estimator, and the certified ones from importance weights.

    Those that need a value function are left out if no estimator in the table has one.
    """
    kinds = [kind for kind in names.SYSTEM_KINDS if kind != names.BOOTSTRAP_PIVOT]
    rows = [_bound(workspace, kind) for kind in kinds if not set(estimates) <= set(names.OVER_EPISODES)]
    for kind in names.CERTIFIED_EPISODE_KINDS:
        for name in ("is", "pdis"):
            made = estimates[name].diagnostics["intervals"] if name in estimates else {}
            if kind in made:
                interval, _ = _say_guesses(workspace.settings, Interval(**made[kind]), with_norm=False)
                rows.append(BoundRow(f"{kind} ({name})", interval, None))
    return tuple(rows)


def _bound(workspace: Workspace, kind: str) -> BoundRow:
    """One interval in features, or the reason why there is none."""
    try:
        result = system_interval(workspace, kind)
    except (KofflineError, torch.linalg.LinAlgError) as error:
        return BoundRow(kind, None, str(error))
    limits, reasons = workspace.limits, []
    if kind not in names.CERTIFIED_KINDS:
        impossible = None if result.value is None else limits.impossible(result.value)
        reasons = limits.reasons_for_no_interval(by_rows=True) + workspace.coverage.reasons
        reasons += [impossible] if impossible else []
    if result.interval is not None and reasons:
        return BoundRow(kind, None, "; ".join(reasons))
    return BoundRow(kind, result.interval, " ".join(result.warnings) or None)


def verdict_on(workspace: Workspace, found: PointEstimate) -> Verdict:
    """Whether the log answers the question."""
    by_networks = found.name not in names.OVER_EPISODES
    sums = workspace.held_sums if by_networks else None  # all rows would need another pass
    robust = None if sums is None else drl(sums, workspace.fitted.spread, workspace.settings.level)
    gaps = [note for note in workspace.log.log.metadata.notes if note.startswith((GAPS, ORDER))]
    gaps += _unforeseen_end(workspace.transitions)
    if robust is not None and found.interval is not None:
        gaps += _assumptions(robust.value, found.interval, workspace)
    scale = workspace.problem.reward_scale
    return judge(found, workspace.limits, workspace.coverage, scale, robust, gaps)


def _unforeseen_end(log: Transitions) -> list[str]:
    """Reason for care if episodes end by themselves after a fixed number of steps that no feature tells."""
    if not log.has_episodes or (length := int(log.episode_lengths.max())) < 2:
        return []
    last = log.episode_ends[log.episode_lengths == length]
    if len(last) < max(FEW_EPISODES, _ATOM * log.n_episodes) or not log.terminated[last].all():
        return []
    rows = np.asarray(log.observations).reshape(len(log), -1)
    there, before = rows[last], np.delete(rows, last, axis=0)
    if np.any((there.min(axis=0) > before.max(axis=0)) | (there.max(axis=0) < before.min(axis=0))):
        return []
    told = f"horizon: {len(last)} of {log.n_episodes} episodes end by themselves after step {length}, none is"
    remedy = "flag it truncated if that is a limit of time, else add the step to the observation"
    return [f"{told} longer, and no feature tells that step; {remedy}"]


def _assumptions(value: float, interval: Interval, workspace: Workspace) -> Iterator[str]:
    """Yield reasons for care if the logged state is no state, or the world changes along the log."""
    shift, rows = workspace.memory_shift, (workspace.settings.history or 0) + 1
    if shift is not None and shift.matters(interval):
        before = "the row before" if rows == 1 else f"{rows} rows before"
        told = (
            f"{names.STATE}what happened earlier matters beyond the logged state; with {before} as part of it"
        )
        yield f"{told} the value would be about {value + shift.value:.4g}: try --set history={rows}"
    shift = workspace.drift_shift
    if shift is not None and shift.matters(interval):
        told = (
            f"{names.DRIFT}the world changes along the log; if evenly, the value where the log ends is about"
        )
        yield f"{told} {value + shift.value:.4g}: evaluate the later part of the log by itself"


def common_diagnostics(workspace: Workspace) -> dict[str, Any]:
    """Numbers about the log and the policy, whatever the estimator; units of the reward or the return."""
    facts, problem, log = workspace.facts, workspace.problem, workspace.transitions
    return {
        "coverage": workspace.coverage.fraction,
        "n_terminated": facts.terminated,
        "n_truncated": facts.truncated,
        "n_initial_states": len(problem.start_weights) if problem.fixed_starts else facts.starts,
        "reward_scale": problem.reward_scale,
        "logged_return": facts.returns.mean if facts.episodes else None,
        "logged_return_se": facts.returns.standard_error,
        "beyond_cuts": facts.beyond.mean if facts.episodes else None,
        **({} if workspace.log.is_whole else {"sample_rows": len(log)}),
        **_action_overlap(log, workspace.policy),
    }


def _action_overlap(log: Transitions, policy: DiscretePolicy | ContinuousPolicy) -> dict[str, Any]:
    """Discrete actions: how probable the logged ones are to the policy.

    Of few actions also how often the policy and the log take each: misnumbered actions show there.
    """
    if not isinstance(policy, DiscretePolicy):
        return {}
    probabilities, count = policy.probabilities(log.observations), policy.n
    taken = probabilities[np.arange(len(log)), log.actions]
    overlap: dict[str, Any] = {"mean_probability_of_logged_actions": float(taken.mean())}
    if count <= _FEW_ACTIONS:
        logged = np.bincount(log.actions, minlength=count) / len(log)
        shares = zip(probabilities.mean(axis=0).tolist(), logged.tolist(), strict=True)
        both = ({"policy": own, "log": seen} for own, seen in shares)
        overlap["actions"] = dict(
            zip(map(str, log.metadata.extra.get(ACTIONS) or range(count)), both, strict=True)
        )
    return overlap
