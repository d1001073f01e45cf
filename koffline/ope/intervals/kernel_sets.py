"""Intervals from all parameters with a kernel loss within sampling error: certified, simultaneous.

Sampling error of the kernel loss of the true value function: at the true Q the residual
δ_i = y_i − E[y_i | x_i] is noise, with y = r + discount · E_{a'~π} Q(s', a') inside an interval of length R.
The instruments have length one, so S = Σ w_i ψ(x_i) δ_i is a sum of steps of known direction and random size,
and n² V̂ = ‖S‖².
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from koffline.ope.features import FeatureSystem
from koffline.ope.intervals.calibrated import make_profile, wild_threshold
from koffline.ope.intervals.settings import (
    IntervalResult,
    KernelIntervalSettings,
    describe_misspecified,
    describe_starts,
)
from koffline.ope.intervals.value_range import Feasible
from koffline.ope.names import KERNEL_CERTIFIED, KERNEL_SIMULTANEOUS
from koffline.ope.results import Interval

NORM_FACTOR = 2.0  # the default ρ is this multiple of the fitted norm
NORM_RIDGE = 1e-4  # the ridge of the fit behind it, relative to the mean curvature

_CERTIFIED = (
    "Holds for any number of rows fixed beforehand: each next state and reward depend on the past only "
    "through (s, a), rows need not be independent; rewards within {rewards}, values within "
    "[{low:.4g}, {high:.4g}] ({values}); Q^π in the class, ‖θ − θ0‖ at most {norm:.4g} ({source}); row "
    "weights, standardisation and bandwidth as if fixed beforehand (the latter two come from the log's "
    "states); {starts}."
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
_VACUOUS = "the interval is all that rewards and γ allow: the log is too small for this kind of promise."


def target_range(
    rewards: tuple[float, float], values: tuple[float, float], gamma: float, may_end: bool
) -> float:
    """R: the length of an interval that holds r + discount · V(s') for rewards and values in these ranges.

    ``may_end``: some rows are terminal and have no future. With rewards in [a, b] and values in
    [a, b]/(1 − γ) this is (b − a)/(1 − γ), since a + γ a/(1 − γ) = a/(1 − γ).
    """
    low, high = rewards[0] + gamma * values[0], rewards[1] + gamma * values[1]
    return max(high, rewards[1]) - min(low, rewards[0]) if may_end else high - low


def martingale_threshold(length: float, row_weights: Float[Tensor, " row"], delta: float) -> float:
    """λ with V̂(Q^π) ≤ λ with probability 1 − delta; no independence between rows is needed.

    λ = R² log(2/δ) Σw² / (2n²). Derivation: E cosh(t‖S‖) grows by at most exp(t² w_i² R²/8) per row. For a
    unit vector ψ, u(z) = cosh(t‖S + zψ‖) satisfies u'' ≤ t²u and |u'| ≤ tu, hence u(z) is at most
    u(0) cosh(tz) + u'(0) sinh(tz)/t, a non-negative mixture of exp(±tz); Hoeffding's lemma bounds the mean of
    each for z = w_i δ_i. So P(‖S‖ ≥ q) ≤ 2 exp(−2q²/(R² Σw²)). A bound for steps of any direction with
    ‖w_i ψ_i δ_i‖ ≤ w_i R (Pinelis 1994) has R² log(2/δ) · 2Σw²/n², four times as much.
    (Feng et al. 2021, on the same statistic)
    """
    squares = float(row_weights.square().sum()) / len(row_weights) ** 2
    return length**2 * math.log(2.0 / delta) * squares / 2.0


def start_deviation(
    values: tuple[float, float], start_weights: Float[Tensor, " start"], delta: float
) -> float:
    """Bound of the error of the mean of V over drawn start states (Hoeffding, two-sided)."""
    share = start_weights / start_weights.sum()
    return (values[1] - values[0]) * math.sqrt(math.log(2.0 / delta) * float(torch.square(share).sum()) / 2.0)


def feature_interval(
    system: FeatureSystem,
    kind: str = KERNEL_CERTIFIED,
    settings: KernelIntervalSettings | None = None,
) -> IntervalResult:
    """The extremes of cᵀθ over {V̂(θ) ≤ λ, ‖θ − θ0‖ ≤ ρ}, widened for the choice of start states.

    λ by kind: a martingale bound for "kernel-certified", a wild bootstrap for "kernel-simultaneous". Half of
    the allowed probability goes to the start states, unless these are given. No feasible θ: no interval, and
    ``misspecified``. (Feng et al. 2020)
    """
    settings = settings or KernelIntervalSettings()
    feasible, bounds = Feasible.of(system), settings.values_within(system)
    fitted = feasible.fitted_norm(NORM_RIDGE)
    norm = NORM_FACTOR * fitted if settings.norm_bound is None else settings.norm_bound
    is_exact = system.fixed_starts and system.start_draws == 1  # c has no sampling error
    threshold, margin = _chances(system, kind, settings, settings.delta if is_exact else settings.delta / 2.0)
    margin = 0.0 if is_exact else margin
    least = feasible.least_loss(norm)
    ends = feasible.value_range(threshold, norm)
    interval, alarm = None, describe_misspecified(least, threshold)
    if ends is not None:
        low, high, alarm = ends.pop("low") - margin, ends.pop("high") + margin, _BEYOND.format(*bounds)
        if low <= bounds[1] and high >= bounds[0]:
            text = _assumptions(system, kind, settings, norm)
            interval = Interval(low, high, settings.level, kind, text, norm).within(bounds)
            alarm = _VACUOUS if (interval.low, interval.high) == bounds else ""
    return IntervalResult(
        kind,
        interval,
        threshold=threshold,
        least_loss=least,
        norm_bound=norm,
        fitted_norm=fitted,
        misspecified=interval is None,
        warnings=(alarm,) if alarm else (),
        details={**(ends or {}), "start_margin": margin},
    )


def _chances(
    system: FeatureSystem, kind: str, settings: KernelIntervalSettings, delta: float
) -> tuple[float, float]:
    """Threshold λ, and the sampling error of the mean over start states that are not given."""
    from scipy import stats

    if kind == KERNEL_SIMULTANEOUS:
        profile = make_profile(system)
        margin = float(profile.starts.square().sum()) ** 0.5 * float(
            stats.norm.ppf(1.0 - settings.delta / 4.0)
        )
        return wild_threshold(system, profile, settings.draws, settings.seed, 1.0 - delta), margin
    values, may_end = settings.values_within(system), bool((system.discounts == 0.0).any())
    length = target_range(settings.rewards_within(system), values, system.gamma, may_end)
    draws = system.start_draws if system.fixed_starts else 1  # else draws share the state
    margin = start_deviation(values, system.start_weights, settings.delta / 2.0) / draws**0.5
    return martingale_threshold(length, system.row_weights, delta), margin


def _assumptions(system: FeatureSystem, kind: str, settings: KernelIntervalSettings, norm: float) -> str:
    """Sentence on the assumptions of the interval."""
    low, high = settings.values_within(system)
    template = _SIMULTANEOUS if kind == KERNEL_SIMULTANEOUS else _CERTIFIED
    return template.format(
        norm=norm,
        source=f"{NORM_FACTOR:g} times the fit's: a guess" if settings.norm_bound is None else "given",
        starts=describe_starts(system.fixed_starts, "start states drawn independently"),
        rewards="those seen in the log" if settings.reward_bounds is None else "given bounds",
        values="what these and γ imply" if settings.value_bounds is None else "given",
        low=low,
        high=high,
    )
