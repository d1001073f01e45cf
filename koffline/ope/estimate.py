"""The record that an evaluation returns, and its form as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from koffline.ope.as_json import Record, plain
from koffline.ope.interval import Interval, percent
from koffline.ope.intervals.sensitivity import NormSensitivity
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
    diagnostics: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    seed: int
    versions: dict[str, str] = field(default_factory=dict)
    data_sha256: str
    seconds: float
    evidence: Evidence | None = field(default=None, repr=False)
    value_function: ValueFunction | None = field(default=None, repr=False)
    sensitivity: NormSensitivity | None = field(default=None, repr=False)

    def __str__(self) -> str:
        about = f"{self.estimator}, γ = {self.gamma:.10g}, {self.n_transitions} transitions"
        if self.interval is None:
            return f"{self.value:.4g}  (no interval, {about})"
        interval = self.interval
        return (
            f"{self.value:.4g}  [{interval.low:.4g}, {interval.high:.4g}] "
            f"({percent(interval.level)} {interval.kind}, {about})"
        )
