"""What making an interval returns: the interval, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from koffline.ope.interval import Interval, finite_or_none


@dataclass(frozen=True, eq=False)
class IntervalResult:
    """An interval and the evidence around it; ``interval`` is None where the class cannot explain the log.

    ``value``: the fitted value of the same class (None where the kind has none). ``threshold``: λ, what the
    kernel loss of the true values may be; ``least_loss``: the smallest kernel loss in the class. A class is
    ``misspecified`` when the second exceeds the first: an alarm about the class, not an error of the log.
    """

    kind: str
    interval: Interval | None
    value: float | None = None
    threshold: float | None = None
    least_loss: float | None = None
    norm_bound: float | None = None
    fitted_norm: float | None = None
    misspecified: bool = False
    warnings: tuple[str, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        numbers = {
            name: None if number is None else finite_or_none(number)
            for name, number in (
                ("value", self.value),
                ("threshold", self.threshold),
                ("least_loss", self.least_loss),
                ("norm_bound", self.norm_bound),
                ("fitted_norm", self.fitted_norm),
            )
        }
        return {
            "kind": self.kind,
            "interval": None if self.interval is None else self.interval.as_dict(),
            **numbers,
            "misspecified": self.misspecified,
            "warnings": list(self.warnings),
            "details": {name: _plain(value) for name, value in self.details.items()},
        }


def _plain(value: Any) -> Any:
    return finite_or_none(value) if isinstance(value, float) else value
