"""Intervals from a feature system, and bounds that belong to no single estimator."""

from __future__ import annotations

import dataclasses
import math

import torch

from koffline.config import EvaluationSettings
from koffline.errors import ConfigError, KofflineError
from koffline.ope import names
from koffline.ope.intervals import make_interval
from koffline.ope.intervals.base import IntervalResult
from koffline.ope.results import BoundRow, Interval, PointEstimate
from koffline.ope.workspace import Workspace

_REACH = (
    "Widened for the features, which are one network's: those of others move the value"
    " by {:.3g}."
)


def system_interval(workspace: Workspace, kind: str) -> IntervalResult:
    """An interval for the value from a feature system; it does not depend on the
    estimator.
    """
    settings = workspace.settings
    is_certified = kind == names.KERNEL_CERTIFIED
    if is_certified and settings.history:
        raise ConfigError(
            f"{kind} is for the logged state alone; leave"
            f" history={settings.history} out"
        )
    if kind != names.BOOTSTRAP_PIVOT and workspace.problem.kind == "clusters":
        raise ConfigError(
            f"{kind} takes rows for independent, and this log has clusters; use another"
            " kind"
        )
    if is_certified:
        system = workspace.fixed_system
    else:
        system = workspace.held_system
    options = settings.model_dump(
        include={"level", "norm_bound", "reward_bounds", "seed"}
    )
    result = make_interval(kind, system, **options)
    if not is_certified:
        if settings.feature_source == "random":
            return result
        return _widened(workspace, result)
    interval, notes = state_guesses(settings, result.interval, with_norm=True)
    return dataclasses.replace(
        result, interval=interval, warnings=(*result.warnings, *notes)
    )


def _widened(workspace: Workspace, result: IntervalResult) -> IntervalResult:
    """Widen an interval from one network's features by the variation between networks'
    features.
    """
    value = result.value
    # without a value, it covers the whole class already
    if result.interval is None or value is None:
        return result
    interval = result.interval.as_measured
    reach = workspace.fitted.feature_reach
    low = value - math.hypot(value - interval.low, reach)
    high = value + math.hypot(interval.high - value, reach)
    text = f"{interval.assumptions} {_REACH.format(reach)}"
    wider = dataclasses.replace(interval, low=low, high=high, assumptions=text)
    return dataclasses.replace(result, interval=wider.within(workspace.limits.bounds))


def state_guesses(
    settings: EvaluationSettings, interval: Interval | None, with_norm: bool
) -> tuple[Interval | None, tuple[str, ...]]:
    """The interval and a warning, both saying which bounds of a certificate were read
    off the log.
    """
    bounds = ["reward_bounds"]
    if with_norm:
        bounds.append("norm_bound")
    missing = [name for name in bounds if getattr(settings, name) is None]
    if not missing:
        return interval, ()
    stand_in = "it was"
    if len(missing) > 1:
        stand_in = "them was"
    note = (
        f"A certificate is one only with {' and '.join(missing)} given: what stands in"
        f" for {stand_in} read off the log."
    )
    if interval is not None:
        text = f"Bounds were read off the log. {interval.assumptions}"
        interval = dataclasses.replace(interval, assumptions=text, is_guess=True)
    return interval, (note,)


def bounds_of(
    workspace: Workspace, estimates: dict[str, PointEstimate]
) -> tuple[BoundRow, ...]:
    """Intervals that belong to no single estimator, and certified intervals from
    importance weights.

    Intervals that need a value function are left out if no estimator in the table has
    one.
    """
    rows = []
    if any(names.EPISODES not in names.needs_of(name) for name in estimates):
        rows += [
            _bound(workspace, kind)
            for kind in names.SYSTEM_KINDS
            if kind != names.BOOTSTRAP_PIVOT
        ]
    for kind in names.CERTIFIED_EPISODE_KINDS:
        for name, estimate in _certifiable(estimates).items():
            intervals = estimate.diagnostics["intervals"]
            if kind in intervals:
                interval, _ = state_guesses(
                    workspace.settings, intervals[kind], with_norm=False
                )
                rows.append(BoundRow(f"{kind} ({name})", interval, None))
    return tuple(rows)


def _certifiable(estimates: dict[str, PointEstimate]) -> dict[str, PointEstimate]:
    """The estimates of koffline's own estimators that may have certified intervals."""
    return {
        name: estimates[name]
        for name in names.OVER_EPISODES
        if name in estimates and names.HOEFFDING in names.kinds_for(name)
    }


def _bound(workspace: Workspace, kind: str) -> BoundRow:
    """One interval from a feature system, or the reason why there is none."""
    try:
        result = system_interval(workspace, kind)
    except (KofflineError, torch.linalg.LinAlgError) as error:
        return BoundRow(kind, None, str(error))
    if result.interval is not None and kind not in names.CERTIFIED_KINDS:
        limits = workspace.limits
        reasons = [
            *limits.reasons_for_no_interval(by_rows=True),
            *workspace.coverage.reasons,
        ]
        if result.value is not None:
            impossible = limits.impossible(result.value)
            if impossible:
                reasons.append(impossible)
        if reasons:
            return BoundRow(kind, None, "; ".join(reasons))
    return BoundRow(kind, result.interval, " ".join(result.warnings) or None)
