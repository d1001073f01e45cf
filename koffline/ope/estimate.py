"""What an evaluation returns: the estimate of one estimator, or a table of several."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from koffline.ope.results import Interval, PointEstimate, Record, percent, plain
from koffline.ope.value_functions import ValueFunction

__all__ = ["Estimate", "Evidence", "Interval", "plain"]


@dataclass(frozen=True, eq=False)
class Evidence:
    """What a person looks at beside the number; arrays for the plots of the report.

    Shapes: ``steps (T,)``, ``objective (R, T)``, ``values (R, T)`` over training for R replicas;
    ``residuals (N',)`` over a sample of the rows, in units of the reward; ``action_support (M,)`` with
    weights: distances of the policy's state-actions to the log, relative to the log's own spacing;
    ``initial_values (E,)`` over the initial states;
    ``replica_values (R,)`` with ``replica_roles`` naming each replica ``"full"`` or ``"resampled"``.
    """

    steps: np.ndarray
    objective: np.ndarray
    values: np.ndarray
    residuals: np.ndarray
    initial_values: np.ndarray
    action_support: np.ndarray
    support_weights: np.ndarray
    support_label: str
    replica_values: np.ndarray
    replica_roles: tuple[str, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class Estimate(Record):
    """What a policy is worth: the expected discounted return from the log's initial states.

    ``value`` is J = E_{s0, a~π} Q(s0, a) in units of the discounted return, ``interval`` says how far it
    can be trusted (None where the estimator has none), ``warnings`` are sentences a person should read
    before acting on it.
    """

    value: float
    interval: Interval | None
    estimator: str
    gamma: float
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
    evidence: Evidence | None = field(default=None, repr=False)
    value_function: ValueFunction | None = field(default=None, repr=False)

    def __str__(self) -> str:
        about = f"{self.estimator}, γ = {self.gamma:.10g}, {self.n_transitions} transitions"
        if self.interval is None:
            return f"{self.value:.4g}  (no interval, {about})"
        interval = self.interval
        return (
            f"{self.value:.4g}  [{interval.low:.4g}, {interval.high:.4g}] "
            f"({percent(interval.level)} {interval.kind}, {about})"
        )


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
