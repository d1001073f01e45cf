"""Results of `koffline.improve` as JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Refusal:
    """A log that is too small to be divided: the present policy is kept."""

    reason: str
    recommended: bool = False
    name: str | None = None
    uplift: float | None = None
    interval: None = None
    candidates: tuple[Any, ...] = ()


def text_of(reason: Any) -> str:
    """A reason as a text, empty where there is none."""
    if reason is None:
        return ""
    return str(reason)


def number_of(value: Any) -> float | None:
    """A finite number, also of an estimate that has it as ``value``; else None."""
    number = getattr(value, "value", value)
    if number is None or not math.isfinite(number):
        return None
    return float(number)


def ends_of(interval: Any) -> list[float] | None:
    """Both ends of an interval, which has ``low`` and ``high`` or is a pair."""
    if interval is None:
        return None
    if hasattr(interval, "low"):
        return [float(interval.low), float(interval.high)]
    low, high = interval
    return [float(low), float(high)]
