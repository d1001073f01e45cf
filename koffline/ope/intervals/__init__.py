"""Intervals for a policy's value, each labelled with what it promises: certified, or calibrated."""

from __future__ import annotations

from typing import Any

from koffline.errors import ConfigError
from koffline.ope.features import FeatureSystem
from koffline.ope.intervals.calibrated import calibrated_interval
from koffline.ope.intervals.dual import dual_interval
from koffline.ope.intervals.feature_interval import feature_interval
from koffline.ope.intervals.pivot import pivot_interval
from koffline.ope.intervals.result import IntervalResult
from koffline.ope.intervals.settings import KernelIntervalSettings, enough_draws
from koffline.ope.names import BOOTSTRAP_PIVOT, DUAL, KERNEL_CALIBRATED, SYSTEM_KINDS

__all__ = ["IntervalResult", "KernelIntervalSettings", "make_interval"]


def make_interval(kind: str, system: FeatureSystem, **options: Any) -> IntervalResult:
    """The interval of a kind for the value of a policy, with what it rests on.

    kind: one of ``koffline.ope.names.SYSTEM_KINDS``. options: fields of `KernelIntervalSettings`
    (level, norm_bound, value_bounds, reward_bounds, draws, seed); draws: 999, or more where the level needs
    them. An infeasible class is no error: ``result.interval`` is None and ``result.misspecified`` true.
    Raises ConfigError.
    """
    draws = enough_draws(options.get("level", KernelIntervalSettings.level))
    settings = KernelIntervalSettings(**{"draws": draws, **options})
    if kind not in SYSTEM_KINDS:
        raise ConfigError(f"interval is '{kind}'; give one of {', '.join(SYSTEM_KINDS)}")
    if kind == KERNEL_CALIBRATED:
        return calibrated_interval(system, settings)
    if kind == BOOTSTRAP_PIVOT:
        return pivot_interval(system, settings)
    if kind == DUAL:
        return dual_interval(system, settings)
    return feature_interval(system, kind, settings)
