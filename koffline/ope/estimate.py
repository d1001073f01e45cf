"""The record that an evaluation returns, and its form as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from koffline.ope.as_json import as_json
from koffline.ope.interval import Interval, finite_or_none, percent
from koffline.ope.intervals.sensitivity import NormSensitivity
from koffline.ope.value_functions import ValueFunction

__all__ = ["Estimate", "Evidence", "Interval"]


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


@dataclass(frozen=True, eq=False)
class Estimate:
    """What a policy is worth: the expected discounted return from the log's initial states.

    ``value`` is J = E_{s0, a~π} Q(s0, a) in units of the discounted return, ``interval`` says how far it
    can be trusted (None where the estimator has none), ``warnings`` are sentences a person should read
    before acting on it. ``sensitivity``: the interval for other ρ, where its kind assumes one.
    """

    value: float
    interval: Interval | None
    estimator: str
    gamma: float
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
    evidence: Evidence | None = None
    value_function: ValueFunction | None = field(default=None, repr=False)
    sensitivity: NormSensitivity | None = field(default=None, repr=False)

    def as_dict(self) -> dict[str, Any]:
        """The estimate as plain JSON types; the evidence stays behind."""
        return {
            "value": finite_or_none(self.value),
            "interval": None if self.interval is None else self.interval.as_dict(),
            "estimator": self.estimator,
            "gamma": self.gamma,
            "n_transitions": self.n_transitions,
            "n_episodes": self.n_episodes,
            "policy": self.policy,
            "source": self.source,
            "diagnostics": {key: plain(value) for key, value in self.diagnostics.items()},
            "warnings": list(self.warnings),
            "settings": {key: plain(value) for key, value in self.settings.items()},
            "seed": self.seed,
            "versions": dict(self.versions),
            "data_sha256": self.data_sha256,
            "seconds": round(self.seconds, 3),
        }

    def to_json(self, timing: bool = True) -> str:
        """One JSON object, keys in reading order. timing: with the seconds that it took."""
        return as_json(self.as_dict(), timing)

    def __str__(self) -> str:
        about = f"{self.estimator}, γ = {self.gamma:.10g}, {self.n_transitions} transitions"
        if self.interval is None:
            return f"{self.value:.4g}  (no interval, {about})"
        interval = self.interval
        return (
            f"{self.value:.4g}  [{interval.low:.4g}, {interval.high:.4g}] "
            f"({percent(interval.level)} {interval.kind}, {about})"
        )


def plain(value: Any) -> Any:
    """Numpy scalars, arrays and nested containers as JSON types."""
    if isinstance(value, (np.bool_, bool)):
        return bool(value)
    if isinstance(value, (np.integer, int)):
        return int(value)
    if isinstance(value, (np.floating, float)):
        return finite_or_none(float(value))
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [plain(item) for item in value]
    return value
