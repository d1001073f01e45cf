"""Intervals from all parameters whose kernel loss is within sampling error: certified
and simultaneous.

Sampling error of the kernel loss at the true Q: the residual δ_i = y_i − E[y_i | x_i]
is noise, with y = r + discount · E_{a'~π} Q(s', a') in an interval of length R. The
instruments have length one, so S = Σ w_i ψ(x_i) δ_i is a sum of steps of known
direction and random size, and n² V̂ = ‖S‖².
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float
from scipy import special
from torch import Tensor

from koffline.ope.intervals import base
from koffline.ope.intervals.base import IntervalResult, KernelIntervalSettings
from koffline.ope.intervals.feature_system import FeatureSystem
from koffline.ope.names import KERNEL_SIMULTANEOUS
from koffline.ope.results import Interval

NORM_FACTOR = 2.0  # the default ρ is this multiple of the fitted norm
NORM_RIDGE = 1e-4  # the ridge of the fit behind it, relative to the mean curvature
_GRID = np.logspace(-16.0, 6.0, 89)  # relative to the largest curvature

_CERTIFIED = (
    "Holds for any number of rows fixed beforehand: each next state and reward depend"
    " on the past only through (s, a), rows need not be independent; rewards within"
    " {rewards}, values within [{bounds[0]:.4g}, {bounds[1]:.4g}] ({values}); Q^π in"
    " the class, ‖θ − θ0‖ at most {norm:.4g} ({source}); row weights, standardisation"
    " and bandwidth as if fixed beforehand (the latter two come from the log's states);"
    " {starts}."
)
_SIMULTANEOUS = (
    "Asymptotic: all parameters whose kernel loss a wild bootstrap of the residuals"
    " explains, so it holds for every linear functional at once and is wide for one;"
    " Q^π in the class, ‖θ − θ0‖ at most {norm:.4g} ({source}); {starts}."
)
_BEYOND = (
    "all that the class allows lies outside [{low:.4g}, {high:.4g}], where rewards and γ put"
    " every value: the class is wrong; use richer features or a larger norm_bound"
)
_VACUOUS = (
    "the interval is all that rewards and γ allow: the log is too small for this kind"
    " of promise."
)


@dataclass(frozen=True, eq=False)
class Feasible:
    """{θ: V̂(θ) = ‖v − Bθ‖² ≤ λ, ‖θ − θ0‖ ≤ ρ} in the right singular basis of B, for
    any λ and ρ.

    ``squares (p,)``: curvatures, the squared singular values. ``pull (p,)``: Bᵀ(v −
    Bθ0). ``direction (p,)``: c. ``loss``: V̂(θ0). ``offset``: cᵀθ0.
    """

    squares: np.ndarray
    pull: np.ndarray
    direction: np.ndarray
    loss: float
    offset: float

    @classmethod
    def of(cls, system: FeatureSystem) -> Feasible:
        """The system's constraints around its best constant."""
        centre = base.best_constant(system)
        instruments, columns = system.projected.shape
        # With more parameters than instruments, empty instruments complete the basis.
        missing = max(columns - 1 - instruments, 0)
        projected = torch.nn.functional.pad(system.projected, (0, 0, 0, missing))
        matrix = projected[:, :-1]
        gap = projected[:, -1] - projected[:, :-1] @ centre
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        along = left.mT @ gap
        return cls(
            squares=values.square().numpy(),
            pull=(values * along).numpy(),
            direction=(right @ system.start_mean).numpy(),
            loss=float(along @ along) + float((gap - left @ along).norm()) ** 2,
            offset=system.value(centre),
        )

    @cached_property
    def taus(self) -> np.ndarray:
        """Grid (T,) of multipliers τ."""
        return _GRID * max(float(self.squares.max()), 1e-12)

    def least_loss(self, norm_bound: float) -> float:
        """Lower bound of V̂ in the ball: max over τ of min over θ of V̂ + τ(‖θ − θ0‖² −
        ρ²).
        """
        return max(
            0.0, float((self._losses(self.taus) - self.taus * norm_bound**2).max())
        )

    def value_range(
        self, threshold: float, norm_bound: float
    ) -> tuple[float, float] | None:
        """The extremes of cᵀθ; None if no θ is feasible.

        For any τ ≥ 0 the sum of both constraints is one ellipsoid around θ_τ = θ0 +
        (BᵀB + τI)⁻¹Bᵀ(v − Bθ0), so cᵀθ ≤ cᵀθ_τ + sqrt([λ + τρ² − min(V̂ + τ‖θ − θ0‖²)]
        · cᵀ(BᵀB + τI)⁻¹c). This is valid for every τ, and its minimum over τ is the
        maximum of cᵀθ (strong duality). Infinite τ: the ball alone. (Feng et al. 2020,
        the feature-space bound)
        """
        if np.any(
            threshold + self.taus * norm_bound**2 - self._losses(self.taus) < 0.0
        ):
            return None
        low, high = (self._extreme(threshold, norm_bound, sign) for sign in (-1.0, 1.0))
        return self.offset - low, self.offset + high

    def _losses(self, taus: np.ndarray) -> np.ndarray:
        """min over θ of V̂ + τ‖θ − θ0‖², (T,)."""
        return self.loss - (self.pull**2 / (self.squares + taus[:, None])).sum(axis=1)

    def _extreme(self, threshold: float, norm_bound: float, sign: float) -> float:
        """The smallest bound of ± (cᵀθ − cᵀθ0) near the best τ of the grid, or that of
        the ball alone.
        """
        from scipy.optimize import minimize_scalar

        def bounds_at(taus: np.ndarray) -> np.ndarray:
            curvature = self.squares + taus[:, None]
            centre = sign * (self.direction * self.pull / curvature).sum(axis=1)
            room = threshold + taus * norm_bound**2 - self._losses(taus)
            return centre + np.sqrt(
                np.maximum(room, 0.0) * (self.direction**2 / curvature).sum(axis=1)
            )

        bounds = bounds_at(self.taus)
        best = int(np.argmin(bounds))
        neighbours = [max(best - 1, 0), min(best + 1, len(bounds) - 1)]
        refined = minimize_scalar(
            lambda log: float(bounds_at(np.exp([log]))[0]),
            bounds=tuple(np.log(self.taus[neighbours])),
            method="bounded",
            options={"xatol": 1e-10},
        )
        ball = norm_bound * float(np.linalg.norm(self.direction))
        return min(float(bounds[best]), float(refined.fun), ball)


def target_range(
    rewards: tuple[float, float],
    values: tuple[float, float],
    gamma: float,
    may_end: bool,
) -> float:
    """R: the length of an interval that holds r + discount · V(s') for rewards and
    values in these ranges.

    ``may_end``: some rows are terminal and have no future. With rewards in [a, b] and
    values in [a, b]/(1 − γ) this is (b − a)/(1 − γ), since a + γ a/(1 − γ) = a/(1 − γ).
    """
    low = rewards[0] + gamma * values[0]
    high = rewards[1] + gamma * values[1]
    if may_end:
        return max(high, rewards[1]) - min(low, rewards[0])
    return high - low


def martingale_threshold(
    length: float, row_weights: Float[Tensor, " row"], delta: float
) -> float:
    """λ with V̂(Q^π) ≤ λ with probability 1 − delta; rows need not be independent.

    λ = R² log(2/δ) Σw² / (2n²). Derivation: E cosh(t‖S‖) grows by at most a factor
    exp(t² w_i² R²/8) per row. For a unit vector ψ, u(z) = cosh(t‖S + zψ‖) satisfies u''
    ≤ t²u and |u'| ≤ tu. Hence u(z) is at most u(0) cosh(tz) + u'(0) sinh(tz)/t, a
    non-negative mixture of exp(±tz); Hoeffding's lemma bounds the mean of each for z =
    w_i δ_i. So P(‖S‖ ≥ q) ≤ 2 exp(−2q²/(R² Σw²)). Without known directions, ‖w_i ψ_i
    δ_i‖ ≤ w_i R alone gives R² log(2/δ) · 2Σw²/n², four times as much (Pinelis 1994).
    (Feng et al. 2021, on the same statistic)
    """
    squares = float(row_weights.square().sum()) / len(row_weights) ** 2
    return length**2 * math.log(2.0 / delta) * squares / 2.0


def start_deviation(
    values: tuple[float, float], start_weights: Float[Tensor, " start"], delta: float
) -> float:
    """Bound on the error of the mean of V over sampled start states (Hoeffding,
    two-sided).
    """
    share = start_weights / start_weights.sum()
    return (values[1] - values[0]) * math.sqrt(
        math.log(2.0 / delta) * float(torch.square(share).sum()) / 2.0
    )


def feature_interval(
    system: FeatureSystem, kind: str, settings: KernelIntervalSettings
) -> IntervalResult:
    """The extremes of cᵀθ over {V̂(θ) ≤ λ, ‖θ − θ0‖ ≤ ρ}, widened for the sampling of
    start states.

    λ is a martingale bound for "kernel-certified", a wild-bootstrap quantile for
    "kernel-simultaneous". Half of the allowed error probability is spent on the start
    states, unless these are given. If no θ is feasible, there is no interval, and the
    result is ``misspecified``. (Feng et al. 2020)
    """
    feasible = Feasible.of(system)
    bounds = settings.values_within(system)
    ridged = feasible.squares + NORM_RIDGE * feasible.squares.mean()
    norm = settings.norm_bound
    if not norm:
        norm = NORM_FACTOR * float(np.linalg.norm(feasible.pull / ridged))
    threshold, margin = _chances(system, kind, settings)
    least = feasible.least_loss(norm)
    ends = feasible.value_range(threshold, norm)
    interval = None
    alarm = base.describe_misspecified(least, threshold)
    if ends is not None:
        low = ends[0] - margin
        high = ends[1] + margin
        alarm = _BEYOND.format(low=bounds[0], high=bounds[1])
        if low <= bounds[1] and high >= bounds[0]:
            text = _assumptions(system, kind, settings, bounds, norm)
            interval = Interval(low, high, settings.level, kind, text, norm)
            interval = interval.within(bounds)
            alarm = ""
            if (interval.low, interval.high) == bounds:
                alarm = _VACUOUS
    warnings: tuple[str, ...] = ()
    if alarm:
        warnings = (alarm,)
    return IntervalResult(
        kind,
        interval,
        threshold=threshold,
        least_loss=least,
        misspecified=interval is None,
        warnings=warnings,
    )


def _assumptions(
    system: FeatureSystem,
    kind: str,
    settings: KernelIntervalSettings,
    bounds: tuple[float, float],
    norm: float,
) -> str:
    """What an interval of this kind takes for granted, and which bounds were given."""
    text = _CERTIFIED
    if kind == KERNEL_SIMULTANEOUS:
        text = _SIMULTANEOUS
    source = "given"
    if settings.norm_bound is None:
        source = f"{NORM_FACTOR:g} times the fit's: a guess"
    rewards = "given bounds"
    if settings.reward_bounds is None:
        rewards = "those seen in the log"
    values = "given"
    if settings.value_bounds is None:
        values = "what these and γ imply"
    starts = base.describe_starts(
        system.fixed_starts, "start states drawn independently"
    )
    return text.format(
        bounds=bounds,
        norm=norm,
        source=source,
        starts=starts,
        rewards=rewards,
        values=values,
    )


def _chances(
    system: FeatureSystem, kind: str, settings: KernelIntervalSettings
) -> tuple[float, float]:
    """Threshold λ, and the sampling error of the mean over start states (0 if it has
    none).
    """
    is_exact = system.fixed_starts and system.start_draws == 1
    half = (1.0 - settings.level) / 2.0
    delta = half
    if is_exact:  # nothing is spent on the start states
        delta = 2.0 * half
    if kind == KERNEL_SIMULTANEOUS:
        profile = base.make_profile(system)
        starts = profile.influences[len(system) :]
        quantile = float(special.ndtri(1.0 - half / 2.0))
        margin = float(starts.square().sum()) ** 0.5 * quantile
        threshold = base.wild_threshold(
            system, profile, settings.draws, settings.seed, 1.0 - delta
        )
    else:
        values = settings.values_within(system)
        may_end = bool((system.discounts == 0.0).any())
        length = target_range(
            settings.rewards_within(system), values, system.gamma, may_end
        )
        threshold = martingale_threshold(length, system.row_weights, delta)
        draws = 1  # those in one state are not independent
        if system.fixed_starts:
            draws = system.start_draws
        margin = start_deviation(values, system.start_weights, half) / draws**0.5
    if is_exact:
        margin = 0.0
    return threshold, margin
