"""What a diagnosis of a value function holds, and its form as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from koffline.ope.as_json import as_json
from koffline.ope.bellman_test.result import BellmanTest, TestedRows
from koffline.ope.bellman_test.witness import Region, WitnessMap, WitnessValues
from koffline.ope.coverage import Coverage
from koffline.ope.diagnose.profiles import Profile
from koffline.ope.estimate import plain
from koffline.ope.interval import finite_or_none


@dataclass(frozen=True, eq=False)
class WitnessLine:
    """Over a grid ``x (Q,)`` of one-dimensional states: the mean residual there, for one action or all."""

    x: np.ndarray
    values: WitnessValues
    action: Any


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """Is this value function Q^π where the log has rows, and where is it not?

    ``value``: E_{s0, a~π} Q, what the value function says the policy is worth. ``kernel_loss``: the
    U-statistic on the tested rows, in squared units of the reward; ``kernel_ratio``: the V-statistic over its
    expectation if nothing were left to explain, so that 1 is perfect. ``regions``: where residuals of one
    sign gather, the strongest first. ``maps``/``lines``: the same over two-/one-dimensional states.
    ``by_step``: None where the log has no episodes. ``residuals``, ``regions``, ``maps`` and profiles are of
    all rows, or of those that ``shown`` names. ``findings`` say in sentences what was seen, ``warnings``
    what to keep in mind. User's units.
    """

    test: BellmanTest
    value: float
    behavior_return: float | None
    kernel_loss: float
    kernel_ratio: float
    coverage: Coverage
    residuals: TestedRows
    by_value: Profile
    by_step: Profile | None
    regions: tuple[Region, ...]
    maps: tuple[WitnessMap, ...] = ()
    lines: tuple[WitnessLine, ...] = ()
    shown: str | None = None
    findings: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    n_transitions: int = 0
    n_episodes: int = 0
    source: str | None = None
    data_sha256: str = ""
    seed: int = 0
    seconds: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types; maps and rows stay behind."""
        return {
            "model": self.test.value_function,
            "policy": self.test.policy,
            "gamma": self.test.gamma,
            "value": finite_or_none(self.value),
            "behavior_return": self.behavior_return,
            "test": plain(self.test.as_dict()),
            "kernel_loss": finite_or_none(self.kernel_loss),
            "kernel_ratio": finite_or_none(self.kernel_ratio),
            "coverage": finite_or_none(self.coverage.fraction),
            "findings": list(self.findings),
            "warnings": list(self.warnings),
            "shown": self.shown,
            "regions": [region_as_dict(region) for region in self.regions],
            "residual_by_value": self.by_value.as_dict(),
            "residual_by_step": None if self.by_step is None else self.by_step.as_dict(),
            "source": self.source,
            "n_transitions": self.n_transitions,
            "n_episodes": self.n_episodes,
            "data_sha256": self.data_sha256,
            "settings": plain(self.settings),
            "seed": self.seed,
            "versions": dict(self.versions),
            "seconds": round(self.seconds, 3),
        }

    def to_json(self, timing: bool = True) -> str:
        """One JSON object, keys in reading order. timing: with the seconds that it took."""
        return as_json(self.as_dict(), timing)

    def __str__(self) -> str:
        return "\n".join([*self.findings, *(f"warning: {sentence}" for sentence in self.warnings)])


def region_as_dict(region: Region) -> dict[str, Any]:
    """A region as plain JSON types; its row numbers stay behind."""
    return {
        "center": plain(region.center),
        "action": plain(region.action),
        "size": region.size,
        "mean_residual": finite_or_none(region.mean_residual),
        "standard_error": finite_or_none(region.standard_error),
        "z_score": finite_or_none(region.z_score),
        "threshold": finite_or_none(region.threshold),
        "is_significant": region.is_significant,
    }
