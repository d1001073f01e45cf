"""Run an estimator, with its own interval or one of the requested kind."""

from __future__ import annotations

import contextlib
import dataclasses
import math

from koffline.errors import ConfigError, DataError, PolicyError
from koffline.ope import names, thresholds
from koffline.ope.estimators.contract import Estimator
from koffline.ope.estimators.importance import WIS
from koffline.ope.estimators.registry import find_estimator
from koffline.ope.estimators.system_intervals import state_guesses, system_interval
from koffline.ope.log.facts import contradiction
from koffline.ope.results import PointEstimate
from koffline.ope.workspace import Workspace
from koffline.untrusted.user_code import user_code


def choose_estimator(workspace: Workspace) -> str:
    """Estimator of the settings; ``auto``: ``dr`` for one-step logs with known
    probabilities, else a head.

    In such logs ``dr`` is unbiased whatever the networks; it needs an effective sample
    size of at least 30.
    """
    settings = workspace.settings
    facts = workspace.facts
    log = workspace.transitions
    if settings.estimator != names.AUTO:
        return settings.estimator
    is_one_step = (
        log.has_episodes and facts.longest == 1 and facts.terminated == facts.rows
    )
    has_probabilities = (
        log.behavior_log_probabilities is not None and not settings.estimates_behavior
    )
    if is_one_step and has_probabilities and settings.interval == names.DEFAULT:
        with contextlib.suppress(DataError, PolicyError):
            # has the weights of dr but needs no network
            weighted = WIS.estimate(workspace)
            if (weighted.effective_sample_size or 0.0) >= thresholds.ENOUGH_WEIGHTED:
                return "dr"
    return names.default_head(settings.steps)


def run_estimator(workspace: Workspace, name: str) -> PointEstimate:
    """Run an estimator with the requested interval, if the log allows one.

    Raises KofflineError if the estimator does not apply.
    """
    estimator = find_estimator(name)
    if name in names.ESTIMATORS:
        estimate = estimator.estimate(workspace)
    else:
        estimate = _estimate_by_user(workspace, estimator)
    estimate = _with_interval(workspace, estimate)
    if names.EPISODES in estimator.needs:
        limits = workspace.limits.of_logged_returns()
    else:
        limits = workspace.limits
    # drops intervals that the log does not support
    return limits.settle(estimate, _reasons(workspace, estimator, estimate))


def _estimate_by_user(workspace: Workspace, estimator: Estimator) -> PointEstimate:
    """The estimate of a user's estimator, under the name of the contract.

    Raises ConfigError, in one line, for whatever goes wrong in it.
    """
    name = estimator.name
    remedy = "call its estimate with koffline.ope.workspace.open_workspace to see where"
    with user_code(f"estimator {name}", "it failed", remedy, ConfigError):
        estimate = estimator.estimate(workspace)
    if not isinstance(estimate, PointEstimate):
        raise ConfigError(
            f"estimator {name} returned a {type(estimate).__name__}; return a"
            " koffline.ope.results.PointEstimate"
        )
    if not math.isfinite(estimate.value):
        raise DataError(
            f"estimator {name} has the value {estimate.value}; return a finite number,"
            " or raise koffline.errors.DataError with the reason"
        )
    return dataclasses.replace(estimate, name=name)


def _reasons(
    workspace: Workspace, estimator: Estimator, estimate: PointEstimate
) -> list[str] | None:
    """Reasons against a calibrated interval; None for a certified one, to which they do
    not apply.
    """
    interval = estimate.interval
    if interval is None:
        return []
    if interval.kind in names.CERTIFIED_KINDS:
        return None
    by_rows = (
        interval.kind in names.SYSTEM_KINDS and interval.kind != names.BOOTSTRAP_PIVOT
    )
    reasons = workspace.limits.reasons_for_no_interval(by_rows)
    if names.EPISODES in estimator.needs:
        size = estimate.effective_sample_size
        if size is not None and size < thresholds.FEWEST_WEIGHTED:
            reasons.append(f"{size:.1f} episodes carry all the weight")
    else:
        reasons += workspace.coverage.reasons
    # In a one-step log, estimators over episodes predict rewards by other networks.
    predicts_rewards = names.EPISODES in estimator.needs and (
        workspace.problem.is_one_step
    )
    if names.NETWORKS in estimator.needs and not predicts_rewards:
        fitted = workspace.fitted
        heads = {
            head: fitted.interval(fitted.values_of(head))
            for head in fitted.estimate_by_head()
        }
        reasons += contradiction(
            heads, fitted.problem.reward_scale, fitted.record.steps
        )
    return reasons


def _with_interval(workspace: Workspace, estimate: PointEstimate) -> PointEstimate:
    """The estimate with the requested kind of interval, and a warning if the estimate
    lies outside.
    """
    settings = workspace.settings
    kind = settings.interval
    if kind in names.CERTIFIED_EPISODE_KINDS:
        interval, notes = state_guesses(settings, estimate.interval, with_norm=False)
        return dataclasses.replace(
            estimate, interval=interval, warnings=(*estimate.warnings, *notes)
        )
    if kind not in names.SYSTEM_KINDS:
        return estimate
    result = system_interval(workspace, kind)
    warnings = [*estimate.warnings, *result.warnings]
    interval = result.interval
    if interval is not None and not interval.as_measured.holds(estimate.value):
        features = ""
        if result.value is not None:
            features = f": fixed features say {result.value:.4g}"
        warnings.append(
            f"The {kind} interval does not hold the estimate"
            f" {estimate.value:.4g}{features}."
        )
    details = {
        key: part
        for key, part in result.as_dict().items()
        if key not in ("interval", "warnings")
    }
    return dataclasses.replace(
        estimate,
        interval=interval,
        diagnostics={**estimate.diagnostics, "interval": details},
        warnings=tuple(warnings),
    )
