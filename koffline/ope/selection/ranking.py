"""The record that a selection returns, and its form as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from koffline.ope.as_json import as_json
from koffline.ope.estimate import Estimate
from koffline.ope.interval import Interval, finite_or_none
from koffline.ope.selection.comparisons import Comparison
from koffline.ope.selection.metrics import SelectionMetrics


@dataclass(frozen=True, eq=False)
class RankedPolicy:
    """One policy's place. ``maybe_best``: no other policy is significantly better. ``interval`` is None where
    the estimator has none.

    ``above_threshold``: whether the interval lies above (True) or below (False) the threshold that was
    given; None when it holds it or none was given.
    """

    rank: int
    name: str
    value: float
    interval: Interval | None
    truth: float | None = None
    maybe_best: bool = True
    above_threshold: bool | None = None
    warnings: tuple[str, ...] = ()
    estimate: Estimate | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "rank": self.rank,
            "name": self.name,
            "value": finite_or_none(self.value),
            "interval": None if self.interval is None else self.interval.as_dict(),
            "truth": self.truth,
            "maybe_best": self.maybe_best,
            "above_threshold": self.above_threshold,
            "warnings": list(self.warnings),
        }


@dataclass(frozen=True, eq=False)
class PolicyRanking:
    """Policies from the best estimate down, which of them differ, and how good the choice is if known.

    ``unranked`` names policies that could not be evaluated, with the reason. ``assumptions`` say what stands
    behind the comparisons.
    """

    policies: tuple[RankedPolicy, ...]
    comparisons: tuple[Comparison, ...]
    estimator: str
    gamma: float
    level: float
    seed: int
    n_transitions: int
    n_episodes: int
    source: str | None
    data_sha256: str
    seconds: float
    assumptions: str
    metrics: SelectionMetrics | None = None
    threshold: float | None = None
    unranked: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def best(self) -> RankedPolicy:
        """The policy with the largest estimate."""
        return self.policies[0]

    @property
    def candidates(self) -> tuple[RankedPolicy, ...]:
        """The policies that may be the best: none is significantly better."""
        return tuple(policy for policy in self.policies if policy.maybe_best)

    def as_dict(self) -> dict[str, Any]:
        """The ranking as plain JSON types."""
        return {
            "policies": [policy.as_dict() for policy in self.policies],
            "comparisons": [comparison.as_dict() for comparison in self.comparisons],
            "metrics": None if self.metrics is None else self.metrics.as_dict(),
            "threshold": self.threshold,
            "unranked": [{"name": name, "reason": reason} for name, reason in self.unranked],
            "estimator": self.estimator,
            "gamma": self.gamma,
            "level": self.level,
            "assumptions": self.assumptions,
            "n_transitions": self.n_transitions,
            "n_episodes": self.n_episodes,
            "source": self.source,
            "warnings": list(self.warnings),
            "settings": self.settings,
            "seed": self.seed,
            "versions": dict(self.versions),
            "data_sha256": self.data_sha256,
            "seconds": round(self.seconds, 3),
        }

    def to_json(self, timing: bool = True) -> str:
        """One JSON object, keys in reading order. timing: with the seconds that it took."""
        return as_json(self.as_dict(), timing)

    def __str__(self) -> str:
        lines = []
        for policy in self.policies:
            interval = policy.interval
            ends = "" if interval is None else f"  [{interval.low:.4g}, {interval.high:.4g}]"
            note = "" if policy.maybe_best else "   significantly worse than another"
            lines.append(f"{policy.rank}. {policy.name}  {policy.value:.4g}{ends}{note}")
        return "\n".join(lines)
