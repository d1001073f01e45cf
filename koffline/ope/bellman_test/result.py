"""What a Bellman test says, and what it does not."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from koffline.ope.bellman_test.witness import Witness
from koffline.ope.interval import finite_or_none


@dataclass(frozen=True, eq=False)
class TestedRows:
    """What was tested, row by row (N,): ``residuals`` of one step, ``window_residuals`` of d, and ``values``.

    ``values`` are Q(s, a) or V(s); ``weights`` are the log's own, of mean one over the rows where they
    are positive. User's units.
    """

    __test__ = False  # not a test case

    residuals: np.ndarray
    window_residuals: np.ndarray
    values: np.ndarray
    weights: np.ndarray


@dataclass(frozen=True, eq=False)
class BellmanTest:
    """Test of H0: E[residual | state, action] = 0, that is of Q = Q^π where the log has rows.

    ``statistic`` is T = n·V̂ in squared units of the reward, ``p_value`` how often T is as large under H0.
    ``power`` is the chance of a rejection if values were off by ``alternative`` (everywhere, in units of the
    return; or once the function given); ``detectable`` the smallest such error found with 80 % power. ``n``
    rows count, ``units`` got a random sign of their own. ``kernel_loss`` is the U-statistic: free of bias for
    independent rows, may be negative. ``held_out``: no row was trained on; None: unknown. ``features``: 0 for
    the exact kernel. ``seconds``: wall clock.
    """

    statistic: float
    p_value: float
    method: str
    level: float
    power: float
    alternative: float
    alternative_name: str
    detectable: float | None
    n: int
    units: int
    held_out: bool | None
    value_function: str
    kind: str
    policy: str
    gamma: float
    window: int
    multipliers: str
    kernel_loss: float
    rms_residual: float
    mean_residual: float
    return_scale: float
    bandwidth: float | None
    features: int
    draws: int
    seed: int
    seconds: float
    warnings: tuple[str, ...] = ()
    witness: Witness | None = field(default=None, repr=False)
    rows: TestedRows | None = field(default=None, repr=False)

    @property
    def rejects(self) -> bool:
        """p ≤ level."""
        return self.p_value <= self.level

    @property
    def conclusion(self) -> str:
        """One or two sentences for a person."""
        numbers = f"p = {self.p_value:.3g}, level {self.level:g}"
        if self.rejects:
            return (
                f"rejected ({numbers}): {self.value_function} does not solve the Bellman equation of "
                f"{self.policy} where this log has rows"
            )
        return f"not rejected ({numbers}): {self._what_that_means()}"

    def _what_that_means(self) -> str:
        seen = (
            f"{self.alternative_name} would be found with probability {self.power:.2f}"
            if math.isfinite(self.power)
            else "its power is unknown"
        )
        smallest = (
            "no error of this kind can be found"
            if self.detectable is None
            else f"the smallest such error found with probability 0.8 is {self.detectable:.3g}"
        )
        return f"that is no proof; {seen}, {smallest}, and nothing is said of states without rows"

    def __str__(self) -> str:
        return "\n".join([self.conclusion, *(f"warning: {sentence}" for sentence in self.warnings)])

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types, without arrays; numbers that are not finite become None."""
        skipped = ("witness", "rows", "warnings")
        found = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in skipped}
        plain = {name: finite_or_none(v) if isinstance(v, float) else v for name, v in found.items()}
        return {
            **plain,
            "rejects": self.rejects,
            "conclusion": self.conclusion,
            "warnings": list(self.warnings),
        }
