"""What one estimator says about a policy's value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from koffline.ope.as_json import Record
from koffline.ope.interval import Interval


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
