"""Every estimator's answer in one table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from koffline.ope.as_json import Record
from koffline.ope.interval import Interval
from koffline.ope.intervals.sensitivity import NormSensitivity
from koffline.ope.point_estimate import PointEstimate


@dataclass(frozen=True, eq=False)
class EstimateRow(Record):
    """One estimator's answer, or why it has none.

    ``estimate`` is None exactly where ``reason`` is not; ``seconds`` count what was computed for this row
    only: what several estimators share is paid by the first.
    """

    name: str
    family: str
    estimate: PointEstimate | None
    reason: str | None
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        found, entry = self.estimate, {"estimator": self.name, "family": self.family}
        if found is None:
            return {**entry, "value": None, "reason": self.reason}
        return {
            **entry,
            **{name: value for name, value in found.as_dict().items() if name != "name"},
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True, eq=False)
class BoundRow(Record):
    """An interval for the value that no single estimator owns, or why there is none."""

    kind: str
    interval: Interval | None
    reason: str | None


@dataclass(frozen=True, eq=False, kw_only=True)
class EstimateTable(Record):
    """What every estimator says the policy is worth, and the bounds that hold whatever they say.

    ``warnings`` concern all rows (coverage, the log); each row has its own as well.
    ``sensitivity``: the certified interval for other ρ.
    """

    rows: tuple[EstimateRow, ...] = field(metadata={"key": "estimates"})
    bounds: tuple[BoundRow, ...]
    gamma: float
    level: float
    n_transitions: int
    n_episodes: int
    policy: str
    source: str | None
    diagnostics: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    seed: int
    versions: dict[str, str] = field(default_factory=dict)
    data_sha256: str
    seconds: float
    sensitivity: NormSensitivity | None = field(default=None, repr=False)

    def __getitem__(self, name: str) -> EstimateRow:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    def __str__(self) -> str:
        lines = [f"{self.policy}: γ = {self.gamma:.10g}, {self.n_transitions} transitions"]
        for row in self.rows:
            if row.estimate is None:
                lines.append(f"  {row.name:<10} –  {row.reason}")
                continue
            interval = row.estimate.interval
            text = "" if interval is None else f"  [{interval.low:.4g}, {interval.high:.4g}] {interval.kind}"
            lines.append(f"  {row.name:<10} {row.estimate.value:.4g}{text}")
        return "\n".join(lines)
