"""An interval for a policy's value and what stands behind it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from koffline.errors import ConfigError
from koffline.ope.as_json import Record, finite_or_none

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
