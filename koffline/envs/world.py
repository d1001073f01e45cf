"""What a vectorised world is: n copies of one task, advanced together.

Every array has the copies on its first axis. Time limits are no part of a world: they belong to whoever
writes a log (:mod:`koffline.envs.rollouts`).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Float32, Shaped

States = Shaped[np.ndarray, "copy *state"]  # (n, d) float64; (n,) state numbers of a finite process
Observations = Float32[np.ndarray, "copy *observation"]
Actions = Shaped[np.ndarray, "copy *action"]  # (n,) whole numbers or (n, k)
Rewards = Float[np.ndarray, " copy"]
Flags = Bool[np.ndarray, " copy"]


class Outcome(NamedTuple):
    """What one step of every copy leads to."""

    state: States
    reward: Rewards
    terminated: Flags


@runtime_checkable
class World(Protocol):
    """Vectorised dynamics; implemented by frozen records whose fields are the task's constants."""

    @property
    def n_actions(self) -> int | None:
        """Number of discrete actions; None where actions are continuous."""

    @property
    def bounds(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """Lowest and highest action, each of length k; None where actions are discrete."""

    def reset(self, n: int, generator: np.random.Generator) -> States:
        """Draw n start states."""

    def step(self, state: States, action: Actions, generator: np.random.Generator) -> Outcome:
        """Advance every copy once."""

    def observe(self, state: States) -> Observations:
        """What the log records of the states."""
