"""Intervals for a policy's value, each labelled as certified or calibrated."""

from __future__ import annotations

from typing import Any

from koffline.config import read_section
from koffline.errors import ConfigError
from koffline.ope.features import FeatureSystem
from koffline.ope.intervals.calibrated import calibrated_interval
from koffline.ope.intervals.kernel_sets import feature_interval
from koffline.ope.intervals.resampling import pivot_interval
from koffline.ope.intervals.settings import IntervalResult, KernelIntervalSettings, enough_draws
from koffline.ope.names import BOOTSTRAP_PIVOT, KERNEL_CALIBRATED, SYSTEM_KINDS

__all__ = ["IntervalResult", "KernelIntervalSettings", "make_interval"]


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
