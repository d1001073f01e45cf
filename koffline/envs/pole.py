"""The noisy pole: balance an inverted pendulum with three forces on its cart.

The paper's "CartPole", whose true values live on a two-dimensional grid.
(Lagoudakis & Parr 2003, the inverted pendulum)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from koffline.envs.world import Actions, Flags, Observations, Outcome, States, check_noise
from koffline.errors import ConfigError

FORCES = (-50.0, 0.0, 50.0)  # newtons
POLE_MASS, CART_MASS, HALF_LENGTH, GRAVITY, STEP_SECONDS = 2.0, 8.0, 0.5, 9.8, 0.1
FALL_ANGLE = math.pi / 2
FASTEST = 4.0  # radians per second; the state stays in the box


@dataclass(frozen=True)
class NoisyPole:
    """State (angle, angular velocity) in radians and seconds, angle 0 upright; falls at ± π/2.

    ``noise`` is the half-width in newtons of a uniform force added to every push.
    ``reward``: "fall" pays −1 for the fall alone, "balance" +1 for every step until then.
    """

    noise: float = 10.0
    reward: Literal["fall", "balance"] = "fall"
    low: tuple[float, float] = (-FALL_ANGLE, -FASTEST)
    high: tuple[float, float] = (FALL_ANGLE, FASTEST)
    grid: tuple[int, int] = (20, 25)
    n_actions: int = 3
    bounds: None = None

    def __post_init__(self) -> None:
        check_noise(self.noise)
        if self.reward not in ("fall", "balance"):
            raise ConfigError(f"reward is '{self.reward}'; use 'fall' or 'balance'")

    @property
    def reward_scale(self) -> float:
        """1 for the fall; 20 where every step pays."""
        return 1.0 if self.reward == "fall" else 20.0

    def reset(self, n: int, generator: np.random.Generator) -> States:
        """Nearly upright and at rest: both coordinates uniform in ±0.05."""
        return generator.uniform(-0.05, 0.05, size=(n, 2))

    def step(self, state: States, action: Actions, generator: np.random.Generator) -> Outcome:
        """One Euler step of 0.1 s."""
        angle, velocity = state.T
        force = np.asarray(FORCES)[action]
        if self.noise:
            force = force + generator.uniform(-self.noise, self.noise, size=len(state))
        following_angle = angle + STEP_SECONDS * velocity
        following_velocity = velocity + STEP_SECONDS * _acceleration(angle, velocity, force)
        fallen = np.abs(following_angle) > FALL_ANGLE
        following = np.clip(np.stack([following_angle, following_velocity], axis=1), self.low, self.high)
        reward = np.where(fallen, -1.0, 0.0) if self.reward == "fall" else np.where(fallen, 0.0, 1.0)
        return Outcome(following, reward, fallen)

    def observe(self, state: States) -> Observations:
        """The state itself."""
        return state.astype(np.float32)

    def is_terminal(self, state: States) -> Flags:
        """Whether the pole lies beyond ± π/2; no state of the box does."""
        return np.abs(state[:, 0]) > FALL_ANGLE


def _acceleration(angle: np.ndarray, velocity: np.ndarray, force: np.ndarray) -> np.ndarray:
    """Angular acceleration of the pole, rad/s²."""
    share = 1.0 / (POLE_MASS + CART_MASS)
    swing = share * POLE_MASS * HALF_LENGTH * velocity**2 * np.sin(2.0 * angle) / 2.0
    drive = GRAVITY * np.sin(angle) - swing - share * np.cos(angle) * force
    return drive / (4.0 * HALF_LENGTH / 3.0 - share * POLE_MASS * HALF_LENGTH * np.cos(angle) ** 2)
