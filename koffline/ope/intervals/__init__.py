"""Intervals for a policy's value, each labelled as certified or calibrated; the calibrated one is made here.

It is that of a wild bootstrap of the fitted value, a weighted sum of residuals.
"""

from __future__ import annotations

import math
from typing import Any

from koffline.config import read_section
from koffline.errors import ConfigError
from koffline.ope.features import FeatureSystem
from koffline.ope.intervals.base import (
    IntervalResult,
    KernelIntervalSettings,
    describe_misspecified,
    describe_starts,
    enough_draws,
    invert_test,
    make_profile,
    studentised_quantile,
    wild_threshold,
)
from koffline.ope.intervals.kernel_sets import feature_interval
from koffline.ope.intervals.resampling import pivot_interval
from koffline.ope.names import BOOTSTRAP_PIVOT, KERNEL_CALIBRATED, SYSTEM_KINDS
from koffline.ope.results import Interval

_ALARM_DRAWS = 199  # draws, enough for a warning
_FEW = 30.0
_FEW_STARTS = 10
_ASSUMPTIONS = (
    "Asymptotic: a wild bootstrap test of each value over rows and {starts}; "
    "Q^π in the class, residuals without memory (any log of single steps), reward and next state as the "
    "environment draws them. It does not know what the class cannot express."
)


def make_interval(kind: str, system: FeatureSystem, **options: Any) -> IntervalResult:
    """Make the interval of a kind for the value of a policy, with its assumptions.

    kind: one of ``koffline.ope.names.SYSTEM_KINDS``. options: fields of `KernelIntervalSettings`
    (level, norm_bound, value_bounds, reward_bounds, draws, seed). An infeasible class is no error:
    ``result.interval`` is None and ``result.misspecified`` true. Raises ConfigError.
    """
    if kind not in SYSTEM_KINDS:
        raise ConfigError(f"interval is '{kind}'; give one of {', '.join(SYSTEM_KINDS)}")
    settings = read_section(KernelIntervalSettings, options)
    settings = settings.model_copy(update={"draws": enough_draws(settings.level, settings.draws)})
    made = {KERNEL_CALIBRATED: calibrated_interval, BOOTSTRAP_PIVOT: pivot_interval}
    return made[kind](system, settings) if kind in made else feature_interval(system, kind, settings)


def calibrated_interval(
    system: FeatureSystem, settings: KernelIntervalSettings, check_class: bool = True
) -> IntervalResult:
    """All values η that a wild-bootstrap test of "cᵀθ = η" does not reject.

    For each η the residuals are those of the parameters on a path with cᵀθ = η, so the interval is not
    symmetric: the statistic (η̂ − η)² / Σ a(η)² is compared with q², a quadratic inequality in η. Residuals
    are scaled for leverage (HC2). check_class: warn when even the best θ leaves a kernel loss that the wild
    bootstrap does not (an alarm that the class does not hold Q^π).
    """
    profile, level = make_profile(system), settings.level
    quantile, counted = studentised_quantile(profile.influences, settings)
    below, above = invert_test(profile.influences, profile.slopes, quantile)
    bounds = settings.values_within(system)
    text = _ASSUMPTIONS.format(starts=describe_starts(system.fixed_starts, "start states"))
    interval = Interval(profile.value + below, profile.value + above, level, KERNEL_CALIBRATED, text)
    interval, threshold = interval.within(bounds), math.inf
    if check_class:
        draws = enough_draws(level, min(settings.draws, _ALARM_DRAWS))
        threshold = wild_threshold(system, profile, draws, settings.seed, level)
    starts = int((system.start_weights > 0.0).sum())
    sentences = {
        f"the interval rests on {counted:.0f} rows or start states that count; with so few the level "
        f"{level:g} is not to be relied on": counted < _FEW,
        f"{starts} start states are too few to tell how start states vary; give initial_observations": (
            not system.fixed_starts and starts < _FEW_STARTS
        ),
        "the log says too little: the interval is all that rewards and γ allow": (
            (interval.low, interval.high) == bounds
        ),
        describe_misspecified(profile.loss, threshold): profile.loss > threshold,
    }
    return IntervalResult(
        KERNEL_CALIBRATED,
        interval,
        value=profile.value,
        threshold=threshold,
        least_loss=profile.loss,
        misspecified=profile.loss > threshold,
        warnings=tuple(sentence for sentence, applies in sentences.items() if applies),
    )
