"""Intervals from all parameters whose kernel loss chance can explain: certified, simultaneous, and dual.

How large the kernel loss of the true value function can be by chance: at the true Q the residual
δ_i = y_i − E[y_i | x_i] is noise, with y = r + discount · E_{a'~π} Q(s', a') inside an interval of length R.
The instruments have length one, so S = Σ w_i ψ(x_i) δ_i is a sum of steps of known direction and random size,
and n² V̂ = ‖S‖².
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

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
from koffline.ope.intervals.value_range import DualProblem, Feasible, feasible_set
from koffline.ope.names import DUAL, KERNEL_CERTIFIED, KERNEL_CERTIFIED_IID, KERNEL_SIMULTANEOUS
from koffline.ope.results import Interval

DUAL_STEPS = 500
NORM_FACTOR = 2.0  # the default ρ is this multiple of the fitted norm
NORM_RIDGE = 1e-4  # the ridge of the fit behind it, relative to the mean curvature

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
_ROWS = {  # whether rows are independent
    False: (
        "each next state and reward depend on the past only through (s, a), rows need not be independent",
        " (the latter two come from the log's states)",
    ),
    True: ("rows are independent", ""),
}
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


def independent_threshold(length: float, row_weights: Float[Tensor, " row"], delta: float) -> float:
    """λ with V̂(Q^π) ≤ λ with probability 1 − delta for independent rows, by Hoeffding's U-statistic bound.

    V̂ = (1 − 1/n) Û + n⁻² Σ w_i² δ_i² with E Û = 0 and |w_i w_j δ_i k_ij δ_j| ≤ R² max w², so
    λ = R² [(1 − 1/n) 2 max w² sqrt(log(1/δ) / (2⌊n/2⌋)) + Σw²/n²]. It falls as n^(−1/2), the martingale
    bound as 1/n under weaker assumptions: this one is kept for comparison.
    (Feng et al. 2020, on the same statistic; one side is enough as the true loss is zero)
    """
    n, largest = len(row_weights), float(row_weights.max()) ** 2
    pairs = math.sqrt(math.log(1.0 / delta) / (2.0 * max(n // 2, 1)))
    own = float(row_weights.square().sum()) / n**2
    return length**2 * ((1.0 - 1.0 / n) * 2.0 * largest * pairs + own)


def start_deviation(
    values: tuple[float, float], start_weights: Float[Tensor, " start"], delta: float
) -> float:
    """How far the mean of V over drawn start states may be from its expectation (Hoeffding, both sides)."""
    share = start_weights / start_weights.sum()
    return (values[1] - values[0]) * math.sqrt(math.log(2.0 / delta) * float(torch.square(share).sum()) / 2.0)


@dataclass(frozen=True, eq=False)
class KernelSet:
    """{V̂(θ) ≤ λ, ‖θ − θ0‖ ≤ ρ} of a kind, and what its intervals share.

    ``threshold``: λ at the share of the probability that rows get. ``margin``: how far the mean over start
    states may be from its expectation, 0 where they are given and no action is drawn there.
    """

    system: FeatureSystem
    kind: str
    settings: KernelIntervalSettings
    feasible: Feasible
    fitted_norm: float
    norm_bound: float
    threshold: float
    margin: float
    bounds: tuple[float, float]

    @classmethod
    def of(cls, system: FeatureSystem, kind: str, settings: KernelIntervalSettings) -> KernelSet:
        """Half of the allowed probability goes to the start states, unless these are given."""
        feasible = feasible_set(system)
        fitted = feasible.fitted_norm(NORM_RIDGE)
        norm = NORM_FACTOR * fitted if settings.norm_bound is None else settings.norm_bound
        bounds = settings.values_within(system)
        exact = system.fixed_starts and system.start_draws == 1  # c has no sampling error
        delta = settings.delta if exact else settings.delta / 2.0
        threshold, margin = _chances(system, kind, settings, delta)
        return cls(
            system, kind, settings, feasible, fitted, norm, threshold, 0.0 if exact else margin, bounds
        )

    def result(
        self, ends: tuple[float, float] | None, alarm: str | None = None, **evidence: Any
    ) -> IntervalResult:
        """The interval between two ends, widened and cut; without any the alarm. evidence: other fields."""
        interval = None
        if ends is not None:
            low, high = ends[0] - self.margin, ends[1] + self.margin
            made = Interval(low, high, self.settings.level, self.kind, self.assumptions(), self.norm_bound)
            interval = made.within(self.bounds)
            alarm = _VACUOUS if (interval.low, interval.high) == self.bounds else None
        return IntervalResult(
            self.kind,
            interval,
            threshold=self.threshold,
            norm_bound=self.norm_bound,
            fitted_norm=self.fitted_norm,
            misspecified=interval is None,
            warnings=() if alarm is None else (alarm,),
            **evidence,
        )

    def assumptions(self) -> str:
        """What the interval rests on, in a sentence."""
        settings = self.settings
        chosen = "given" if settings.norm_bound is not None else f"{NORM_FACTOR:g} times the fit's: a guess"
        starts = describe_starts(self.system.fixed_starts, "start states drawn independently")
        if self.kind == KERNEL_SIMULTANEOUS:
            return _SIMULTANEOUS.format(norm=self.norm_bound, source=chosen, starts=starts)
        rewards = "given bounds" if settings.reward_bounds is not None else "those seen in the log"
        source = "given" if settings.value_bounds is not None else "what these and γ imply"
        low, high = self.bounds
        rows, inputs = _ROWS[self.kind == KERNEL_CERTIFIED_IID]
        return _CERTIFIED.format(
            rows=rows,
            bounds=f"rewards within {rewards}, values within [{low:.4g}, {high:.4g}] ({source})",
            norm=self.norm_bound,
            source=chosen,
            starts=starts,
            inputs=inputs,
        )


def _chances(
    system: FeatureSystem, kind: str, settings: KernelIntervalSettings, delta: float
) -> tuple[float, float]:
    """λ, and the margin of start states that are not known exactly."""
    from scipy import stats

    if kind == KERNEL_SIMULTANEOUS:
        profile = make_profile(system)
        margin = float(profile.starts.square().sum()) ** 0.5 * float(
            stats.norm.ppf(1.0 - settings.delta / 4.0)
        )
        return wild_threshold(system, profile, settings.draws, settings.seed, 1.0 - delta), margin
    values, may_end = settings.values_within(system), bool((system.discounts == 0.0).any())
    length = target_range(settings.rewards_within(system), values, system.gamma, may_end)
    draws = system.start_draws if system.fixed_starts else 1  # else a state's draws share its choice
    margin = start_deviation(values, system.start_weights, settings.delta / 2.0) / draws**0.5
    bound = independent_threshold if kind == KERNEL_CERTIFIED_IID else martingale_threshold
    return bound(length, system.row_weights, delta), margin


def feature_interval(
    system: FeatureSystem, kind: str = KERNEL_CERTIFIED, settings: KernelIntervalSettings | None = None
) -> IntervalResult:
    """The extremes of cᵀθ over {V̂(θ) ≤ λ, ‖θ − θ0‖ ≤ ρ}, widened for the choice of start states.

    λ by kind: "kernel-certified" (martingale bound), "kernel-certified-iid" (Hoeffding), or
    "kernel-simultaneous" (wild bootstrap). No feasible θ: no interval, and ``misspecified``.
    (Feng et al. 2020)
    """
    found = KernelSet.of(system, kind, settings or KernelIntervalSettings())
    least = found.feasible.least_loss(found.norm_bound)
    ends = found.feasible.value_range(found.threshold, found.norm_bound)
    if ends is None:
        return found.result(None, describe_misspecified(least, found.threshold), least_loss=least)
    if ends.low - found.margin > found.bounds[1] or ends.high + found.margin < found.bounds[0]:
        return found.result(None, _BEYOND.format(*found.bounds), least_loss=least)
    details = {"tau_low": ends.tau_low, "tau_high": ends.tau_high, "start_margin": found.margin}
    return found.result((ends.low, ends.high), least_loss=least, details=details)


def dual_interval(
    system: FeatureSystem, settings: KernelIntervalSettings | None = None, steps: int = DUAL_STEPS
) -> IntervalResult:
    """Bounds from weights found in at most ``steps`` iterations: valid after any number, tighter with more.

    At the optimum it is the "kernel-certified" interval (strong duality). Bounds that cross prove that no θ
    of the class explains the log: no interval, and ``misspecified``.
    (Feng et al. 2021)
    """
    found = KernelSet.of(system, DUAL, settings or KernelIntervalSettings())
    problem = DualProblem.of(system, found.norm_bound, found.threshold)
    mirrored = problem.mirrored()
    high, low = problem.bound(problem.minimise(steps)), -mirrored.bound(mirrored.minimise(steps))
    details = {"steps": steps, "start_margin": found.margin}
    if low <= high:
        return found.result((low, high), details=details)
    least = found.feasible.least_loss(found.norm_bound)
    alarm = describe_misspecified(least, found.threshold)
    return found.result(None, alarm, least_loss=least, details=details)
