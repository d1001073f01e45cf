"""Run an estimator by its name, with its own interval beside it or one of the kind that is asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import torch

from koffline.config import EvaluationSettings
from koffline.errors import KofflineError
from koffline.ope.closed_form import closed_form, drl
from koffline.ope.direct import estimate_by_networks, replica_interval
from koffline.ope.estimate import BoundRow
from koffline.ope.importance import estimate_one
from koffline.ope.intervals import IntervalResult, make_interval
from koffline.ope.intervals.resampling import last_layer_bootstrap
from koffline.ope.limits import contradiction
from koffline.ope.names import (
    BOOTSTRAP_PIVOT,
    CERTIFIED_EPISODE_KINDS,
    CERTIFIED_KINDS,
    CERTIFIED_SYSTEM_KINDS,
    DEFAULT,
    EPISODE_KINDS,
    EPISODES_T,
    FITTED,
    OVER_EPISODES,
    SYSTEM_KINDS,
    WITH_MODEL,
    check_interval,
)
from koffline.ope.residuals import OutOfBag
from koffline.ope.results import Interval, PointEstimate, Unavailable
from koffline.ope.workspace import Workspace

_OTHER_STARTS = (
    "it estimates the return of the logged episodes, and other start states were given; leave them out"
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
    """One of the closed forms in the features of the settings."""
    settings = workspace.settings
    return closed_form(name, workspace.system, settings.level, settings.seed)


def estimate_doubly_robust_marginal(workspace: Workspace) -> PointEstimate:
    """Marginalised weights in features beside the kernel-loss networks, the networks out of bag."""
    settings = workspace.settings
    values = workspace.row_values if workspace.log.is_whole else OutOfBag.of(workspace.fitted).in_features
    return drl(workspace.system, values, settings.level, settings.seed)


RUN: dict[str, Callable[[Workspace], PointEstimate | Unavailable]] = {
    **{name: partial(estimate_by_networks, head=name) for name in FITTED},
    **{name: partial(estimate_in_features, name=name) for name in ("mql", "lstdq", "mwl", "dualdice")},
    **{name: partial(estimate_by_importance, name=name) for name in OVER_EPISODES},
    "drl": estimate_doubly_robust_marginal,
}


def run_estimator(workspace: Workspace, name: str) -> PointEstimate | Unavailable:
    """The estimate with the interval that the settings ask for, as far as the log allows one."""
    check_interval(name, workspace.settings.interval)
    found = RUN[name](workspace)
    if isinstance(found, Unavailable):
        return found
    return _settle(workspace, _with_interval(workspace, name, found))


def _settle(workspace: Workspace, found: PointEstimate) -> PointEstimate:
    """Leave an interval out that would be made up, and cut one to the values that are possible."""
    limits = workspace.limits
    if found.name in OVER_EPISODES:
        limits = limits.of_logged_returns()
    return limits.settle(found, _reasons(workspace, found))


def _reasons(workspace: Workspace, found: PointEstimate) -> list[str] | None:
    """Why there is no calibrated interval; None for a certified one, which holds whatever the log lacks."""
    if found.interval is None:
        return []
    if found.interval.kind in CERTIFIED_KINDS:
        return None
    by_rows = found.interval.kind in SYSTEM_KINDS and found.interval.kind != BOOTSTRAP_PIVOT
    reasons = workspace.limits.reasons_for_no_interval(by_rows)
    if found.name in (*FITTED, *WITH_MODEL, "drl"):
        fitted = workspace.fitted
        heads = {head: replica_interval(fitted, head) for head in fitted.estimate_by_head()}
        clash = contradiction(heads, fitted.problem.reward_scale)
        reasons += [clash] if clash else []
    return reasons


def _with_interval(workspace: Workspace, name: str, found: PointEstimate) -> PointEstimate:
    """The estimate with the kind of interval that the settings ask for."""
    kind = workspace.settings.interval
    if kind == DEFAULT:
        return found
    if kind in EPISODE_KINDS:
        guesses = _guesses(workspace.settings, with_norm=False) if kind in CERTIFIED_KINDS else ()
        return dataclasses.replace(found, warnings=(*found.warnings, *guesses))
    if found.interval is not None and found.interval.kind == kind:
        return found
    if kind == BOOTSTRAP_PIVOT and name in FITTED:
        settings = workspace.settings
        interval = last_layer_bootstrap(workspace.fitted, name, settings.level, settings.seed)
        return dataclasses.replace(found, interval=interval)
    return _with_result(found, system_interval(workspace, kind))


def system_interval(workspace: Workspace, kind: str) -> IntervalResult:
    """An interval for the value from the problem in fixed features, whatever the estimator."""
    settings = workspace.settings
    system = workspace.fixed_system if kind in CERTIFIED_SYSTEM_KINDS else workspace.held_system
    result = make_interval(
        kind,
        system,
        level=settings.level,
        norm_bound=settings.norm_bound,
        reward_bounds=settings.reward_bounds,
        seed=settings.seed,
    )
    guesses = _guesses(settings, with_norm=True) if kind in CERTIFIED_SYSTEM_KINDS else ()
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
        made = [
            (name, estimates[name].diagnostics["intervals"][kind])
            for name in ("is", "pdis")
            if name in estimates and kind in estimates[name].diagnostics["intervals"]
        ]
        rows += [BoundRow(f"{kind} ({name})", Interval(**interval), None) for name, interval in made]
    return tuple(rows)


def _bound(workspace: Workspace, kind: str) -> BoundRow:
    """One interval in features, or why there is none."""
    try:
        result = system_interval(workspace, kind)
    except (KofflineError, torch.linalg.LinAlgError) as error:
        return BoundRow(kind, None, str(error))
    limits = workspace.limits
    reasons = [] if kind in CERTIFIED_KINDS else limits.reasons_for_no_interval(by_rows=True)
    impossible = None if result.value is None or kind in CERTIFIED_KINDS else limits.impossible(result.value)
    reasons += [impossible] if impossible else []
    if result.interval is not None and reasons:
        return BoundRow(kind, None, "; ".join(reasons))
    return BoundRow(kind, result.interval, " ".join(result.warnings) or None)


def _with_result(found: PointEstimate, result: IntervalResult) -> PointEstimate:
    """The estimate with that interval, what it rests on, and a word where the two do not agree."""
    warnings = [*found.warnings, *result.warnings]
    if result.interval is not None and not result.interval.holds(found.value):
        warnings.append(
            f"The {result.kind} interval does not hold the estimate {found.value:.4g}: it comes from fixed "
            f"features, whose own fit says {result.value:.4g}."
            if result.value is not None
            else f"The {result.kind} interval does not hold the estimate {found.value:.4g}."
        )
    details = result.as_dict()
    details.pop("interval")
    details.pop("warnings")
    return dataclasses.replace(
        found,
        interval=result.interval,
        warnings=tuple(warnings),
        diagnostics={**found.diagnostics, "interval": details},
    )
