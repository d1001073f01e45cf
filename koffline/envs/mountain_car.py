"""Noisy Mountain Car: a weak car leaves a valley by swinging; its velocity is jolted at every step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from koffline.envs.classic import MountainCar
from koffline.envs.world import Actions, Flags, Observations, Outcome, States, check_noise

GOAL = 0.5


@dataclass(frozen=True)
class NoisyMountainCar:
    """State (position, velocity); push left (0), coast (1), push right (2); −1 a step until position ≥ 0.5.

    ``noise`` is the standard deviation of a Gaussian added to the velocity each step.
    """

    noise: float = 0.001
    low: tuple[float, float] = (-1.2, -0.07)
    high: tuple[float, float] = (0.6, 0.07)
    grid: tuple[int, int] = (30, 25)
    reward_scale: float = 10.0
    n_actions: int = 3
    bounds: None = None

    def __post_init__(self) -> None:
        check_noise(self.noise)

    def reset(self, n: int, generator: np.random.Generator) -> States:
        """At rest near the bottom of the valley."""
        return MountainCar().reset(n, generator)

    def step(self, state: States, action: Actions, generator: np.random.Generator) -> Outcome:
        """One step; the left wall is inelastic, the right end is the goal whatever the speed."""
        following, reward, _ = MountainCar(self.noise).step(state, action, generator)
        return Outcome(following, reward, self.is_terminal(following))

    def observe(self, state: States) -> Observations:
        """The state itself."""
        return state.astype(np.float32)

    def is_terminal(self, state: States) -> Flags:
        """Whether the car is out of the valley."""
        return state[:, 0] >= GOAL
