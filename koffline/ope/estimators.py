"""Run an estimator by its name, with its own interval beside it or one of the kind that is asked for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from koffline.config import EvaluationSettings
from koffline.data.columns import counted
from koffline.data.transitions import Transitions
from koffline.errors import KofflineError
from koffline.ope.closed_form import closed_form, drl
from koffline.ope.coverage import LOW_COVERAGE
from koffline.ope.importance import estimate_one
from koffline.ope.intervals import IntervalResult, make_interval
from koffline.ope.intervals.resampling import last_layer_bootstrap
from koffline.ope.limits import MUCH_UNSEEN, NOTABLE, contradiction
from koffline.ope.names import (
    BOOTSTRAP_PIVOT,
    CERTIFIED_EPISODE_KINDS,
    CERTIFIED_KINDS,
    CERTIFIED_SYSTEM_KINDS,
    EPISODE_KINDS,
    EPISODES_T,
    FITTED,
    OVER_EPISODES,
    SYSTEM_KINDS,
    WITH_MODEL,
    check_interval,
)
from koffline.ope.residuals import OutOfBag
from koffline.ope.results import BoundRow, Interval, PointEstimate, Unavailable, Verdict, plain
from koffline.ope.verdict import FEW_EPISODES, judge
from koffline.ope.workspace import Workspace
from koffline.policies import ContinuousPolicy, DiscretePolicy

_FEWEST_WEIGHTED = 2.0  # episodes
_LARGE_RESIDUAL = 3.0  # times the rms return; a value function that is zero everywhere stays below one
_OTHER_STARTS = (
    "it estimates the return of the logged episodes, and other start states were given; leave them out"
)


def estimate_by_networks(workspace: Workspace, head: str) -> PointEstimate:
    """Mean over the replicas of the whole log; interval from the spread of the resampled ones."""
    fitted, residuals = workspace.fitted, workspace.residuals
    interval, heads = fitted.interval(head), fitted.estimate_by_head()
    agreeing = [value for name, value in heads.items() if name in ("kloss", "fqe", head)]
    full, resampled = fitted.kept_values(head)
    diagnostics = {
        "held_out_kernel_loss": residuals.held_out_kernel_loss,
        "held_out_kernel_ratio": residuals.held_out_ratio,
        "effective_bandwidth": fitted.bandwidth,
        "estimates_by_head": heads,
        "head_disagreement": max(agreeing) - min(agreeing),
        "replica_standard_deviation": float(fitted.kept_values(fitted.head)[1].std(ddof=1)),
        "residual_rms": residuals.rms,
        "residual_mean": residuals.mean,
        "training_steps": fitted.record.steps,
    }
    diagnostics = {name: plain(value) for name, value in diagnostics.items()}
    return PointEstimate(
        name=head,
        value=float(full.mean()),
        standard_error=float(resampled.std(ddof=1)),
        interval=interval,
        warnings=tuple(_doubts(workspace, diagnostics, interval)),
        diagnostics=diagnostics,
    )


def _doubts(workspace: Workspace, diagnostics: dict[str, Any], interval: Interval) -> Iterator[str]:
    """Reasons to distrust the trained networks."""
    fitted, scale, rms = workspace.fitted, workspace.problem.reward_scale, diagnostics["residual_rms"]
    if diagnostics["head_disagreement"] > max(0.5 * interval.width, NOTABLE * scale):
        heads = ", ".join(f"{name} {value:.4g}" for name, value in diagnostics["estimates_by_head"].items())
        yield f"Estimators that should agree do not ({heads}); train longer or collect more data."
    if not fitted.alive.all():
        yield f"{fitted.describe_diverged()}, and were left out; lower learning_rate."
    if rms is None or rms > _LARGE_RESIDUAL * scale:
        yield (
            f"Bellman residuals (rms {math.inf if rms is None else rms:.3g}) are larger than the logged "
            f"returns themselves (rms {scale:.3g}): the values mean nothing; look at coverage first, since "
            "what the log does not show cannot be learnt, then at outliers, then lower learning_rate."
        )


def estimate_by_importance(workspace: Workspace, name: str) -> PointEstimate | Unavailable:
    """One of the estimators over episodes; doubly robust ones lean on out-of-bag kernel-loss networks."""
    if workspace.initial_observations is not None:
        return Unavailable(name, _OTHER_STARTS)
    episodes = workspace.episodes
    if isinstance(episodes, str):
        return Unavailable(name, episodes)
    settings = workspace.settings
    kind = settings.interval if settings.interval in EPISODE_KINDS else EPISODES_T
    model = workspace.row_values_of_episodes if name in WITH_MODEL else None
    return estimate_one(
        name, episodes, model, settings.level, kind, reward_range=settings.reward_bounds, seed=settings.seed
    )


def estimate_in_features(workspace: Workspace, name: str) -> PointEstimate:
    """One of the closed forms in the features of the settings; ``drl`` by the networks, out of bag."""
    level = workspace.settings.level
    if name != "drl":
        return closed_form(name, workspace.system, level, workspace.settings.seed)
    values = workspace.row_values if workspace.log.is_whole else OutOfBag.of(workspace.fitted).in_features
    return drl(workspace.constants, values, level)


def run_estimator(workspace: Workspace, name: str) -> PointEstimate | Unavailable:
    """The estimate with the interval that the settings ask for, as far as the log allows one."""
    check_interval(name, workspace.settings.interval)
    run = estimate_by_networks if name in FITTED else estimate_in_features
    found = estimate_by_importance(workspace, name) if name in OVER_EPISODES else run(workspace, name)
    if isinstance(found, Unavailable):
        return found
    found = _with_interval(workspace, name, found)
    limits = workspace.limits.of_logged_returns() if name in OVER_EPISODES else workspace.limits
    return limits.settle(found, _reasons(workspace, found))  # no interval that would be made up or impossible


def _reasons(workspace: Workspace, found: PointEstimate) -> list[str] | None:
    """Why there is no calibrated interval; None for a certified one, which holds whatever the log lacks."""
    if found.interval is None:
        return []
    if found.interval.kind in CERTIFIED_KINDS:
        return None
    by_rows = found.interval.kind in SYSTEM_KINDS and found.interval.kind != BOOTSTRAP_PIVOT
    reasons = workspace.limits.reasons_for_no_interval(by_rows)
    size = found.effective_sample_size
    if found.name in OVER_EPISODES and size is not None and size < _FEWEST_WEIGHTED:
        reasons.append(f"{size:.1f} episodes carry all the weight")
    elif found.name not in OVER_EPISODES:
        reasons += workspace.coverage.reasons
    if found.name in (*FITTED, *WITH_MODEL, "drl"):
        fitted = workspace.fitted
        heads = {head: fitted.interval(head) for head in fitted.estimate_by_head() if head != "lstd"}
        clash = contradiction(heads, fitted.problem.reward_scale)
        reasons += [clash] if clash else []
    return reasons


def _with_interval(workspace: Workspace, name: str, found: PointEstimate) -> PointEstimate:
    """The estimate with the kind of interval that the settings ask for."""
    settings, kind = workspace.settings, workspace.settings.interval
    if kind in CERTIFIED_EPISODE_KINDS:
        warnings = (*found.warnings, *_guesses(settings, with_norm=False))
        return dataclasses.replace(found, warnings=warnings)
    if kind not in SYSTEM_KINDS or (found.interval is not None and found.interval.kind == kind):
        return found
    if kind == BOOTSTRAP_PIVOT and name in FITTED:
        interval = last_layer_bootstrap(workspace.fitted, name, settings.level, settings.seed)
        return dataclasses.replace(found, interval=interval)
    return _with_result(found, system_interval(workspace, kind))


def system_interval(workspace: Workspace, kind: str) -> IntervalResult:
    """An interval for the value from the problem in fixed features, whatever the estimator."""
    settings, is_certified = workspace.settings, kind in CERTIFIED_SYSTEM_KINDS
    result = make_interval(
        kind,
        workspace.fixed_system if is_certified else workspace.held_system,
        level=settings.level,
        norm_bound=settings.norm_bound,
        reward_bounds=settings.reward_bounds,
        seed=settings.seed,
    )
    guesses = _guesses(settings, with_norm=True) if is_certified else ()
    return dataclasses.replace(result, warnings=(*result.warnings, *guesses))


def _guesses(settings: EvaluationSettings, with_norm: bool) -> tuple[str, ...]:
    """What a certificate needs and was not told."""
    missing = ["reward_bounds"] if settings.reward_bounds is None else []
    missing += ["norm_bound"] if with_norm and settings.norm_bound is None else []
    if not missing:
        return ()
    return (
        f"A certificate is one only with {' and '.join(missing)} given: what stands in for "
        f"{'them was' if len(missing) > 1 else 'it was'} read off the log.",
    )


def bounds_of(workspace: Workspace, estimates: dict[str, PointEstimate]) -> tuple[BoundRow, ...]:
    """Every interval that no single estimator owns; certified ones from importance weights with them.

    Those that rest on a value function are left out where no estimator in the table has one.
    """
    kinds = [kind for kind in SYSTEM_KINDS if kind != BOOTSTRAP_PIVOT]
    rows = [_bound(workspace, kind) for kind in kinds if not set(estimates) <= set(OVER_EPISODES)]
    for kind in CERTIFIED_EPISODE_KINDS:
        for name in ("is", "pdis"):
            made = estimates[name].diagnostics["intervals"] if name in estimates else {}
            rows += [BoundRow(f"{kind} ({name})", Interval(**made[kind]), None)] if kind in made else []
    return tuple(rows)


def _bound(workspace: Workspace, kind: str) -> BoundRow:
    """One interval in features, or why there is none."""
    try:
        result = system_interval(workspace, kind)
    except (KofflineError, torch.linalg.LinAlgError) as error:
        return BoundRow(kind, None, str(error))
    limits = workspace.limits
    doubts = [*limits.reasons_for_no_interval(by_rows=True), *workspace.coverage.reasons]
    reasons = [] if kind in CERTIFIED_KINDS else doubts
    impossible = None if result.value is None or kind in CERTIFIED_KINDS else limits.impossible(result.value)
    reasons += [impossible] if impossible else []
    if result.interval is not None and reasons:
        return BoundRow(kind, None, "; ".join(reasons))
    return BoundRow(kind, result.interval, " ".join(result.warnings) or None)


def _with_result(found: PointEstimate, result: IntervalResult) -> PointEstimate:
    """The estimate with that interval, what it rests on, and a word where the two do not agree."""
    warnings = [*found.warnings, *result.warnings]
    if result.interval is not None and not result.interval.holds(found.value):
        own = "" if result.value is None else f": fixed features say {result.value:.4g}"
        warnings.append(f"The {result.kind} interval does not hold the estimate {found.value:.4g}{own}.")
    details = {key: part for key, part in result.as_dict().items() if key not in ("interval", "warnings")}
    diagnostics = {**found.diagnostics, "interval": details}
    return dataclasses.replace(
        found, interval=result.interval, warnings=tuple(warnings), diagnostics=diagnostics
    )


def verdict_on(workspace: Workspace, found: PointEstimate) -> Verdict:
    """Whether the log answers the question."""
    has_robust = found.name in FITTED and workspace.log.is_whole  # else it would take another pass
    robust = estimate_in_features(workspace, "drl") if has_robust else None
    return judge(found, workspace.limits, workspace.coverage, workspace.problem.reward_scale, robust)


def common_diagnostics(workspace: Workspace) -> dict[str, Any]:
    """Numbers about the log and the policy, whatever the estimator; units of the reward or the return."""
    facts, problem, log = workspace.facts, workspace.problem, workspace.transitions
    overlap = _logged_action_overlap(log, workspace.policy)
    if "effective_sample_size" in overlap:
        overlap["effective_sample_size"] *= facts.rows / len(log)  # of the whole log
    return {
        "coverage": workspace.coverage.fraction,
        "n_terminated": facts.terminated,
        "n_truncated": facts.truncated,
        "n_initial_states": len(problem.start_weights) if problem.fixed_starts else facts.starts,
        "reward_scale": problem.reward_scale,
        "behavior_return": facts.returns.mean if facts.episodes else None,
        "behavior_return_se": facts.returns.standard_error,
        **({} if workspace.log.is_whole else {"sample_rows": len(log)}),
        **overlap,
    }


def common_warnings(workspace: Workspace, diagnostics: dict[str, Any]) -> list[str]:
    """Reasons to distrust any estimate from this log."""
    log, merged, limits = workspace.transitions, workspace.log.merged, workspace.limits
    coverage, episodes, found = diagnostics["coverage"], workspace.facts.episodes, []
    if coverage < LOW_COVERAGE:
        found.append(
            f"Only {coverage:.0%} of the policy's actions lie near logged ones "
            "(95 % on-policy); the rest of the estimate is extrapolation."
        )
    if log.has_episodes and episodes < FEW_EPISODES:
        kind = "different episode" if workspace.log.is_whole and merged.merged else "episode"
        found.append(f"The log has {counted(episodes, kind)}; resampling so few says little about spread.")
    if limits.unseen >= MUCH_UNSEEN:  # every episode is cut early
        found.append(
            f"The longest episode has {limits.longest} steps: with γ = {limits.gamma:.10g}, "
            f"{limits.unseen:.0%} of a constant reward's value lies beyond what any episode shows."
        )
    found += merged.notes if workspace.log.is_whole else []
    found += [f"Reader: {note}" for note in log.metadata.notes]
    return [*found, *(f"Left out: {reason}" for reason in workspace.log.skipped)]


def _logged_action_overlap(
    transitions: Transitions, policy: DiscretePolicy | ContinuousPolicy
) -> dict[str, Any]:
    """Discrete actions: how probable the logged actions are to the policy, and the effective sample size.

    That is (Σ ρ)² / Σ ρ² of the ratios ρ = π(a|s) / β(a|s) of rows; 0 when all ratios are.
    """
    if not isinstance(policy, DiscretePolicy):
        return {}
    taken = policy.probabilities(transitions.observations)[np.arange(len(transitions)), transitions.actions]
    overlap = {"mean_probability_of_logged_actions": float(taken.mean())}
    if transitions.behavior_log_probabilities is not None:
        possible = taken > 0.0
        behavior = np.asarray(transitions.behavior_log_probabilities, dtype=np.float64)[possible]
        logarithms = np.log(taken[possible]) - behavior
        ratios = np.exp(logarithms - logarithms.max(initial=-math.inf))  # their common factor cancels
        size = float(ratios.sum() ** 2 / np.square(ratios).sum()) if len(ratios) else 0.0
        overlap["effective_sample_size"] = size
    return overlap
