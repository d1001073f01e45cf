"""Calibrated intervals: the wild bootstrap of the fitted value, or of the kernel loss itself."""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from koffline.ope.features import FeatureSystem
from koffline.ope.interval import Interval
from koffline.ope.intervals.profile import Profile, make_profile
from koffline.ope.intervals.result import IntervalResult
from koffline.ope.intervals.settings import KernelIntervalSettings
from koffline.ope.names import KERNEL_CALIBRATED

_BLOCK = 4096
_NORMAL_FROM = 200.0  # influences that count: from here the bootstrap is its normal limit to 0.1 %
_ALARM_DRAWS = 199  # enough for an alarm
_FEW = 30.0
_FEW_STARTS = 10
_SIGNED = 1000  # the largest influences get signs of their own, the sum of the rest is normal
_STREAM = 6063  # of random numbers: not that of a log simulated from the same seed

_ASSUMPTIONS = (
    "Asymptotic: a wild bootstrap test of each value over rows and {starts}; "
    "Q^π in the class, residuals without memory (any log of single steps), reward and next state as the "
    "environment draws them. It does not know what the class cannot express."
)


def calibrated_interval(
    system: FeatureSystem, settings: KernelIntervalSettings, check_class: bool = True
) -> IntervalResult:
    """All values η that a wild-bootstrap test of "cᵀθ = η" does not reject.

    For each η the residuals are those of the parameters on a path with cᵀθ = η, so the interval is not
    symmetric: the statistic (η̂ − η)² / Σ a(η)² is compared with q², a quadratic inequality in η. Residuals
    are scaled for leverage (HC2). check_class: warn when even the best θ leaves a kernel loss that the wild
    bootstrap does not (an alarm that the class does not hold Q^π).
    """
    profile = make_profile(system)
    quantile, counted = studentised_quantile(profile.influences, settings)
    below, above = invert_test(profile.influences, profile.slopes, quantile)
    low, high = settings.values_within(system)
    starts = "given start states as they are" if system.fixed_starts else "start states"
    interval = Interval(
        profile.value + below,
        profile.value + above,
        settings.level,
        KERNEL_CALIBRATED,
        _ASSUMPTIONS.format(starts=starts),
    ).within((low, high))
    warnings = []
    if counted < _FEW:
        warnings.append(
            f"the interval rests on {counted:.0f} rows or start states that count; with so few the level "
            f"{settings.level:g} is not to be relied on"
        )
    few = int((system.start_weights > 0.0).sum())
    if not system.fixed_starts and few < _FEW_STARTS:
        warnings.append(
            f"{few} start states are too few to tell how start states vary; give initial_observations"
        )
    if interval.low == low and interval.high == high:
        warnings.append("the log says too little: the interval is all that rewards and γ allow")
    misspecified = False
    threshold = wild_threshold(system, profile, settings.for_alarm(_ALARM_DRAWS)) if check_class else None
    if threshold is not None and profile.loss > threshold:
        misspecified = True
        warnings.append(describe_misspecified(profile.loss, threshold))
    return IntervalResult(
        kind=KERNEL_CALIBRATED,
        interval=interval,
        value=profile.value,
        threshold=threshold,
        least_loss=profile.loss,
        misspecified=misspecified,
        warnings=tuple(warnings),
        details={
            "standard_error": profile.standard_error,
            "quantile": quantile,
            "rows_that_count": counted,
            "largest_leverage": float(profile.leverage.max()),
        },
    )


def studentised_quantile(
    influences: Float[Tensor, " influence"], settings: KernelIntervalSettings
) -> tuple[float, float]:
    """The level's quantile of |Σ ±a| / sqrt(Σa²) over random signs, and how many influences count.

    That number is (Σa²)²/Σa⁴; where it is large the quantile is the normal one.
    """
    from scipy import stats

    squares = influences.square()
    total = float(squares.sum())
    if total == 0.0:
        return float(stats.norm.ppf(0.5 + settings.level / 2.0)), 0.0
    share = squares / total
    counted = 1.0 / float(share.square().sum())
    if counted >= _NORMAL_FROM:
        return float(stats.norm.ppf(0.5 + settings.level / 2.0)), counted
    generator = np.random.default_rng([settings.seed, _STREAM])
    ordered = torch.sqrt(share).sort(descending=True).values
    largest, rest = ordered[:_SIGNED], float(ordered[_SIGNED:].square().sum())
    draws = _signs(settings.draws, len(largest), generator) @ largest
    draws += math.sqrt(rest) * torch.as_tensor(generator.standard_normal(settings.draws))
    return _upper_quantile(draws.abs(), settings.level), counted


def invert_test(
    influences: Float[Tensor, " influence"], slopes: Float[Tensor, " influence"], quantile: float
) -> tuple[float, float]:
    """All t with t² ≤ q² Σ (a + t·slope)²: both ends, infinite where no t is rejected far out."""
    constant = quantile**2 * float(influences.square().sum())
    linear = quantile**2 * float(influences @ slopes)
    quadratic = 1.0 - quantile**2 * float(slopes.square().sum())
    if quadratic <= 0.0:
        return -math.inf, math.inf
    root = math.sqrt(max(linear**2 + quadratic * constant, 0.0))
    return (linear - root) / quadratic, (linear + root) / quadratic


@torch.no_grad()
def wild_threshold(
    system: FeatureSystem, profile: Profile, settings: KernelIntervalSettings, level: float | None = None
) -> float:
    """λ: the level's quantile of V̂ of residuals with random signs, ‖n⁻¹ Σ ±w_i ψ_i δ̂_i‖²."""
    generator = np.random.default_rng([settings.seed, _STREAM])
    scaled = profile.residuals * system.row_weights / len(system)
    totals: Tensor | None = None
    for begin in range(0, len(system), _BLOCK):
        rows = slice(begin, begin + _BLOCK)
        psi = system.instruments(system.kernel_inputs[rows])
        signs = _signs(settings.draws, len(psi), generator)
        part = (signs * scaled[rows]) @ psi  # (draws, B) @ (B, m)
        totals = part if totals is None else totals.add_(part)
    assert totals is not None  # a system has rows
    return _upper_quantile(totals.square().sum(dim=1), settings.level if level is None else level)


def describe_misspecified(loss: float, threshold: float) -> str:
    """The alarm as a sentence."""
    return (
        f"the class cannot explain the log: its smallest kernel loss {loss:.3g} exceeds {threshold:.3g}, "
        "what the true values would leave by chance; use richer features or a larger norm_bound"
    )


def _signs(draws: int, count: int, generator: np.random.Generator) -> Float[Tensor, "draw row"]:
    """Random signs, from one random bit each."""
    needed = draws * count
    bits = np.unpackbits(np.frombuffer(generator.bytes(-(-needed // 8)), dtype=np.uint8), count=needed)
    return torch.from_numpy(bits).to(torch.float64).mul_(2.0).sub_(1.0).view(draws, count)


def _upper_quantile(draws: Float[Tensor, " draw"], level: float) -> float:
    """The ⌈level · (draws + 1)⌉-th smallest: exceeded by a fresh draw with probability 1 − level at most."""
    rank = min(math.ceil(level * (len(draws) + 1) - 1e-9), len(draws))
    return float(draws.kthvalue(rank).values)
