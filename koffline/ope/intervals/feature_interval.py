"""The feature-space interval: the values of all parameters whose kernel loss chance can explain."""

from __future__ import annotations

from typing import Any

from koffline.ope.features import FeatureSystem
from koffline.ope.interval import Interval
from koffline.ope.intervals.calibrated import describe_misspecified, wild_threshold
from koffline.ope.intervals.concentration import (
    independent_threshold,
    martingale_threshold,
    start_deviation,
)
from koffline.ope.intervals.profile import make_profile
from koffline.ope.intervals.result import IntervalResult
from koffline.ope.intervals.settings import NORM_FACTOR, NORM_RIDGE, KernelIntervalSettings
from koffline.ope.intervals.value_range import Feasible, feasible_set
from koffline.ope.names import KERNEL_CERTIFIED, KERNEL_CERTIFIED_IID, KERNEL_SIMULTANEOUS

_CERTIFIED = (
    "Holds for any number of rows fixed beforehand: {rows}; {bounds}; Q^π in the class, ‖θ − θ0‖ at most "
    "{norm:.4g} ({source}); row weights, standardisation and bandwidth as if fixed beforehand{inputs}; "
    "{starts}."
)
_SIMULTANEOUS = (
    "Asymptotic: all parameters whose kernel loss a wild bootstrap of the residuals explains, so it holds "
    "for every linear functional at once and is wide for one; Q^π in the class, ‖θ − θ0‖ at most {norm:.4g} "
    "({source}); {starts}."
)
_BEYOND = (
    "all that the class allows lies outside [{:.4g}, {:.4g}], where rewards and γ put every value: the class "
    "is wrong; use richer features or a larger norm_bound"
)
_ROWS = {
    KERNEL_CERTIFIED: "each next state and reward depend on the past only through (s, a), rows need not be "
    "independent",
    KERNEL_CERTIFIED_IID: "rows are independent",
}


def feature_interval(
    system: FeatureSystem, kind: str = KERNEL_CERTIFIED, settings: KernelIntervalSettings | None = None
) -> IntervalResult:
    """The extremes of cᵀθ over {V̂(θ) ≤ λ, ‖θ − θ0‖ ≤ ρ}, widened for the choice of start states.

    λ by kind: "kernel-certified" (martingale bound), "kernel-certified-iid" (Hoeffding), or
    "kernel-simultaneous" (wild bootstrap). Half of the allowed probability goes to the start states unless
    they are given. No feasible θ: no interval, and ``misspecified``.
    (Feng et al. 2020)
    """
    settings = settings or KernelIntervalSettings()
    feasible = feasible_set(system)
    norm, fitted = norm_bound(feasible, settings)
    threshold = loss_threshold(system, kind, settings)
    spread = start_margin(system, kind, settings)
    found = feasible.value_range(threshold, norm)
    least = feasible.least_loss(norm)
    shared: dict[str, Any] = {
        "threshold": threshold,
        "least_loss": least,
        "norm_bound": norm,
        "fitted_norm": fitted,
    }
    bounds = settings.values_within(system)
    if found is None or found.low - spread > bounds[1] or found.high + spread < bounds[0]:
        alarm = describe_misspecified(least, threshold) if found is None else _BEYOND.format(*bounds)
        return IntervalResult(kind, None, misspecified=True, warnings=(alarm,), **shared)
    interval = Interval(
        found.low - spread,
        found.high + spread,
        settings.level,
        kind,
        assumptions(system, kind, settings, norm),
        norm,
    ).within(bounds)
    return IntervalResult(
        kind,
        interval,
        warnings=vacuous_warning(interval, bounds),
        details={"tau_low": found.tau_low, "tau_high": found.tau_high, "start_margin": spread},
        **shared,
    )


def norm_bound(feasible: Feasible, settings: KernelIntervalSettings) -> tuple[float, float]:
    """ρ and the norm of the fit behind its default."""
    fitted = feasible.fitted_norm(NORM_RIDGE)
    if settings.norm_bound is not None:
        return settings.norm_bound, fitted
    return NORM_FACTOR * fitted, fitted


def loss_threshold(system: FeatureSystem, kind: str, settings: KernelIntervalSettings) -> float:
    """λ of a kind, at the share of the probability that rows get."""
    delta = settings.delta if starts_are_exact(system) else settings.delta / 2.0
    if kind == KERNEL_SIMULTANEOUS:
        return wild_threshold(system, make_profile(system), settings, 1.0 - delta)
    length = settings.residual_length(system)
    if kind == KERNEL_CERTIFIED_IID:
        return independent_threshold(length, system.row_weights, delta)
    return martingale_threshold(length, system.row_weights, delta)


def start_margin(system: FeatureSystem, kind: str, settings: KernelIntervalSettings) -> float:
    """How far the mean over start states may be from its expectation.

    0 where they are given and no action is drawn there.
    """
    from scipy import stats

    if starts_are_exact(system):
        return 0.0
    if kind == KERNEL_SIMULTANEOUS:
        spread = float(make_profile(system).starts.square().sum()) ** 0.5
        return spread * float(stats.norm.ppf(1.0 - settings.delta / 4.0))
    draws = system.start_draws if system.fixed_starts else 1  # else a state's draws share its choice
    deviation = start_deviation(settings.values_within(system), system.start_weights, settings.delta / 2.0)
    return deviation / draws**0.5


def starts_are_exact(system: FeatureSystem) -> bool:
    """Whether c has no sampling error."""
    return system.fixed_starts and system.start_draws == 1


def assumptions(system: FeatureSystem, kind: str, settings: KernelIntervalSettings, norm: float) -> str:
    """What the interval rests on, in a sentence."""
    chosen = "given" if settings.norm_bound is not None else f"{NORM_FACTOR:g} times the fit's: a guess"
    starts = "given start states as they are" if system.fixed_starts else "start states drawn independently"
    if kind == KERNEL_SIMULTANEOUS:
        return _SIMULTANEOUS.format(norm=norm, source=chosen, starts=starts)
    return _CERTIFIED.format(
        rows=_ROWS.get(kind, _ROWS[KERNEL_CERTIFIED]),
        bounds=settings.describe_bounds(system),
        norm=norm,
        source=chosen,
        starts=starts,
        inputs="" if kind == KERNEL_CERTIFIED_IID else " (the latter two come from the log's states)",
    )


def vacuous_warning(interval: Interval, bounds: tuple[float, float]) -> tuple[str, ...]:
    """A sentence when the interval is all that the bounds allow."""
    if interval.low > bounds[0] or interval.high < bounds[1]:
        return ()
    return ("the interval is all that rewards and γ allow: the log is too small for this kind of promise.",)
