"""Every estimator's answer in one table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from koffline.ope.as_json import as_json
from koffline.ope.estimate import plain
from koffline.ope.interval import Interval, finite_or_none
from koffline.ope.intervals.sensitivity import NormSensitivity
from koffline.ope.point_estimate import PointEstimate


@dataclass(frozen=True, eq=False)
class EstimateRow:
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
            "value": finite_or_none(found.value),
            "standard_error": plain(found.standard_error),
            "interval": None if found.interval is None else found.interval.as_dict(),
            "effective_sample_size": plain(found.effective_sample_size),
            "warnings": list(found.warnings),
            "diagnostics": plain(found.diagnostics),
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True, eq=False)
class BoundRow:
    """An interval for the value that no single estimator owns, or why there is none."""

    kind: str
    interval: Interval | None
    reason: str | None

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "kind": self.kind,
            "interval": None if self.interval is None else self.interval.as_dict(),
            "reason": self.reason,
        }


@dataclass(frozen=True, eq=False)
class EstimateTable:
    """What every estimator says the policy is worth, and the bounds that hold whatever they say.

    ``warnings`` concern all rows (coverage, the log); each row has its own as well.
    ``sensitivity``: the certified interval for other ρ.
    """

    rows: tuple[EstimateRow, ...]
    bounds: tuple[BoundRow, ...]
    gamma: float
    level: float
    n_transitions: int
    n_episodes: int
    policy: str
    source: str | None
    seed: int
    seconds: float
    data_sha256: str
    diagnostics: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    sensitivity: NormSensitivity | None = None

    def __getitem__(self, name: str) -> EstimateRow:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "estimates": [row.as_dict() for row in self.rows],
            "bounds": [row.as_dict() for row in self.bounds],
            "gamma": self.gamma,
            "level": self.level,
            "n_transitions": self.n_transitions,
            "n_episodes": self.n_episodes,
            "policy": self.policy,
            "source": self.source,
            "diagnostics": plain(self.diagnostics),
            "warnings": list(self.warnings),
            "settings": plain(self.settings),
            "seed": self.seed,
            "versions": dict(self.versions),
            "data_sha256": self.data_sha256,
            "seconds": round(self.seconds, 3),
        }

    def to_json(self, timing: bool = True) -> str:
        """One JSON object, keys in reading order. timing: with the seconds that it took."""
        return as_json(self.as_dict(), timing)

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
