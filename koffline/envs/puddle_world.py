"""Puddle World: walk across the unit square to the upper right corner, around two puddles.

(Boyan & Moore 1995; reward of the state that is entered, as in Sutton 1996)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from koffline.envs.world import Actions, Flags, Observations, Outcome, States, check_noise

MOVES = ((0.0, 0.05), (0.05, 0.0), (0.0, -0.05), (-0.05, 0.0))  # up, right, down, left
PUDDLES = (((0.10, 0.75), (0.45, 0.75)), ((0.45, 0.40), (0.45, 0.80)))  # segments that puddles surround
RADIUS = 0.1
GOAL = 1.9  # episodes end where x + y reaches it


@dataclass(frozen=True)
class PuddleWorld:
    """State (x, y) in the unit square; ``noise`` is the standard deviation of each step, per axis.

    Reward −1 a step, and −400 per unit of depth in a puddle.
    """

    noise: float = 0.01
    low: tuple[float, float] = (0.0, 0.0)
    high: tuple[float, float] = (1.0, 1.0)
    grid: tuple[int, int] = (25, 25)
    reward_scale: float = 20.0
    n_actions: int = 4
    bounds: None = None

    def __post_init__(self) -> None:
        check_noise(self.noise)

    def reset(self, n: int, generator: np.random.Generator) -> States:
        """Anywhere but in the goal, uniformly."""
        state = generator.uniform(size=(n, 2))
        outside = self.is_terminal(state)
        while outside.any():
            state[outside] = generator.uniform(size=(int(outside.sum()), 2))
            outside = self.is_terminal(state)
        return state

    def step(self, state: States, action: Actions, generator: np.random.Generator) -> Outcome:
        """One noisy move, held back by the walls."""
        moved = state + np.asarray(MOVES)[action] + self.noise * generator.standard_normal(state.shape)
        following = np.clip(moved, 0.0, 1.0)
        return Outcome(following, -1.0 - 400.0 * puddle_depth(following), self.is_terminal(following))

    def observe(self, state: States) -> Observations:
        """The state itself."""
        return state.astype(np.float32)

    def is_terminal(self, state: States) -> Flags:
        """Whether the goal is reached."""
        return state.sum(axis=1) >= GOAL


def puddle_depth(state: Float[np.ndarray, "row 2"]) -> Float[np.ndarray, " row"]:
    """How deep states stand in the nearest puddle: 0 outside, 0.1 on its centre line."""
    depth = np.zeros(len(state))
    for start, end in np.asarray(PUDDLES):
        along = end - start
        share = np.clip((state - start) @ along / (along @ along), 0.0, 1.0)
        distance = np.linalg.norm(state - start - share[:, None] * along, axis=1)
        depth = np.maximum(depth, RADIUS - distance)
    return depth
