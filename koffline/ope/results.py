"""What an estimator returns: a value, an interval and what stands behind them; records as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from koffline.errors import ConfigError

SECONDS = "seconds"


class Record:
    """A dataclass that a command prints or writes; fields with ``repr=False`` stay behind.

    A field's ``key`` in its metadata is its name in JSON.
    """

    def as_dict(self) -> dict[str, Any]:
        """The record as plain JSON types, in the order of its fields."""
        assert dataclasses.is_dataclass(self)
        shown = [field for field in dataclasses.fields(self) if field.repr]
        return {field.metadata.get("key", field.name): plain(getattr(self, field.name)) for field in shown}

    def to_json(self, timing: bool = True) -> str:
        """One JSON object, keys in reading order. timing: with seconds, which no two runs share."""
        return as_json(self.as_dict(), timing)


def plain(value: Any) -> Any:
    """Records, numpy scalars, arrays and nested containers as JSON types."""
    if isinstance(value, (Record, Mapping)):
        items = value.as_dict() if isinstance(value, Record) else value
        return {str(key): plain(item) for key, item in items.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [plain(item) for item in value]
    value = value.item() if isinstance(value, np.generic) else value
    return finite_or_none(value) if isinstance(value, float) else value


def finite_or_none(number: float) -> float | None:
    """JSON has no NaN: what is not finite becomes None."""
    return float(number) if math.isfinite(number) else None


def as_json(content: Mapping[str, Any], timing: bool = True) -> str:
    """One JSON object, keys in reading order. timing: with seconds, which no two runs share."""
    kept = content if timing else without_seconds(content)
    return json.dumps(kept, indent=2, allow_nan=False, ensure_ascii=False)


def without_seconds(content: Any) -> Any:
    """The same without the entries called ``seconds``, at any depth."""
    if isinstance(content, Mapping):
        return {key: without_seconds(part) for key, part in content.items() if key != SECONDS}
    return [without_seconds(part) for part in content] if isinstance(content, (list, tuple)) else content


__all__ = ["CALIBRATED", "CERTIFIED", "Interval", "check_level", "finite_or_none", "percent"]

CERTIFIED = "certified"
CALIBRATED = "calibrated"


@dataclass(frozen=True)
class Interval(Record):
    """An interval for the value and what stands behind it.

    ``kind`` says how it was made (``"bootstrap"``, ``"kernel-certified"`` …) and is never to be read without
    it: a calibrated interval is right on average over many logs (asymptotically, or by resampling), a
    certified one holds for any number of rows under the stated ``assumptions``. ``norm_bound`` is ρ, the
    largest norm a value function may have in the class behind the interval; None where there is no class.
    """

    low: float
    high: float
    level: float
    kind: str
    assumptions: str = ""
    norm_bound: float | None = None

    @property
    def width(self) -> float:
        """high − low."""
        return self.high - self.low

    def holds(self, value: float) -> bool:
        """Whether ``value`` lies inside, ends included."""
        return self.low <= value <= self.high

    def within(self, bounds: tuple[float, float]) -> Interval:
        """The part inside ``bounds`` that every value obeys; the nearest bound where nothing is inside."""
        low, high = bounds
        return dataclasses.replace(
            self, low=min(max(self.low, low), high), high=max(min(self.high, high), low)
        )


def check_level(level: float) -> None:
    """ConfigError unless 0 < level < 1."""
    if not 0.0 < level < 1.0:
        raise ConfigError(f"level is {level}; give a number between 0 and 1, as in 0.95")


def percent(share: float) -> str:
    """A level with the digits that it has: ``95%``, ``99.99%``."""
    return f"{100.0 * share:.10g}%"


@dataclass(frozen=True)
class Unavailable:
    """No estimate, because of ``reason``: one line for a person, with the remedy where there is one."""

    name: str
    reason: str


@dataclass(frozen=True, eq=False)
class PointEstimate(Record):
    """An estimate in units of the discounted return, with what is needed to judge it.

    ``standard_error`` is asymptotic, over the independent units of the log (episodes, or rows where there
    are none); None where the estimator has none. ``effective_sample_size`` counts units of the same kind:
    (Σw)²/Σw². ``warnings`` are sentences for a person; nothing is NaN without one.
    """

    name: str
    value: float
    standard_error: float | None = None
    interval: Interval | None = None
    effective_sample_size: float | None = None
    warnings: tuple[str, ...] = ()
    diagnostics: dict[str, Any] = field(default_factory=dict)
