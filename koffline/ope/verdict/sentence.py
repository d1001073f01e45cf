"""The verdict's sentence on a policy's value."""

from __future__ import annotations

import math

from koffline.errors import percent
from koffline.ope.results import Interval, PointEstimate


def sentence_on_value(estimate: PointEstimate, interval: Interval) -> str:
    """The policy's value, compared with the behavior policy's if known; without a full
    stop.

    interval: the estimate's.
    """
    worth = f"The policy is worth {plus_minus(estimate.value, interval)}"
    level = percent(interval.level)
    if estimate.uplift is None or estimate.uplift.interval is None:
        return f"{worth} ({level} interval)"
    comparison = _comparison(estimate.uplift.value, estimate.uplift.interval)
    return (
        f"{worth}, {comparison} than the policy that wrote the log ({level} intervals)"
    )


def _comparison(uplift: float, interval: Interval) -> str:
    """How much more or less, as in ``3.1 ± 0.4 less``."""
    if interval.holds(0.0):
        return f"not clearly more or less ({plus_minus(uplift, interval)})"
    if uplift >= 0.0:
        return f"{plus_minus(uplift, interval)} more"
    mirrored = Interval(-interval.high, -interval.low, interval.level, interval.kind)
    return f"{plus_minus(-uplift, mirrored)} less"


def plus_minus(value: float, interval: Interval) -> str:
    """``42.73 ± 0.83``, two digits of the half width; with both ends if the value is
    not in the middle.
    """
    half_width = 0.5 * interval.width
    digits = 3
    if half_width > 0.0:
        digits = max(0, 1 - math.floor(math.log10(half_width)))
    digits = min(digits, 12)
    shown = f"{value:,.{digits}f}"
    middle = 0.5 * (interval.low + interval.high)
    if abs(value - middle) <= 0.02 * half_width:
        return f"{shown} ± {half_width:,.{digits}f}"
    return f"{shown} ({interval.low:,.{digits}f} to {interval.high:,.{digits}f})"
