"""Classic control tasks with vectorised dynamics, equal to Gymnasium's own step for
step.

Each has the methods of `koffline.envs.boxes.BoxWorld`; noise that Gymnasium's versions
lack is off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float

from koffline.envs.boxes import Actions, Observations, Outcome, States


@dataclass(frozen=True)
class PlainWorld:
    """What most worlds share: discrete actions, and states that are observed as they
    are.
    """

    bounds: ClassVar[None] = None

    def observe(self, state: States) -> Observations:
        """The state in single precision."""
        return state.astype(np.float32)


@dataclass(frozen=True)
class Around:
    """Another world as it is; subclasses change what it does."""

    world: Any

    @property
    def n_actions(self) -> int | None:
        return self.world.n_actions

    @property
    def bounds(self) -> Any:
        return self.world.bounds

    def reset(self, n: int, generator: np.random.Generator) -> States:
        return self.world.reset(n, generator)

    def step(
        self, state: States, action: Actions, generator: np.random.Generator
    ) -> Outcome:
        return self.world.step(state, action, generator)

    def observe(self, state: States) -> Observations:
        return self.world.observe(state)


@dataclass(frozen=True)
class CartPole(PlainWorld):
    """CartPole-v1: push the cart left (0) or right (1), reward 1 a step until the pole
    falls.

    ``push_noise`` is the standard deviation of a random force in newtons added to every
    push (0: Gymnasium).
    """

    push_noise: float = 0.0
    n_actions: int = 2

    def reset(self, n: int, generator: np.random.Generator) -> States:
        """All four coordinates uniform in ±0.05."""
        return generator.uniform(-0.05, 0.05, size=(n, 4))

    def step(
        self, state: States, action: Actions, generator: np.random.Generator
    ) -> Outcome:
        """One Euler step of 20 ms."""
        x, x_dot, theta, theta_dot = state.T
        force = np.where(action == 1, 10.0, -10.0)
        if self.push_noise:
            force = force + self.push_noise * generator.standard_normal(len(state))
        cos = np.cos(theta)
        sin = np.sin(theta)
        drive = (force + 0.05 * theta_dot**2 * sin) / 1.1
        theta_acc = (9.8 * sin - cos * drive) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
        x_acc = drive - 0.05 * theta_acc * cos / 1.1
        columns = (
            x + 0.02 * x_dot,
            x_dot + 0.02 * x_acc,
            theta + 0.02 * theta_dot,
            theta_dot + 0.02 * theta_acc,
        )
        following = np.stack(columns, axis=1)
        fallen = (np.abs(following[:, 0]) > 2.4) | (
            np.abs(following[:, 2]) > 12 * 2 * np.pi / 360
        )
        return Outcome(following, np.ones(len(state)), fallen)


@dataclass(frozen=True)
class MountainCar(PlainWorld):
    """MountainCar-v0: push left (0), coast (1) or push right (2), reward −1 a step
    until x ≥ 0.5.

    ``noise`` is the standard deviation of a Gaussian added to the velocity each step
    (0: Gymnasium's task).
    """

    noise: float = 0.0
    n_actions: int = 3

    def reset(self, n: int, generator: np.random.Generator) -> States:
        """At rest near the bottom of the valley."""
        return np.stack([generator.uniform(-0.6, -0.4, size=n), np.zeros(n)], axis=1)

    def step(
        self, state: States, action: Actions, generator: np.random.Generator
    ) -> Outcome:
        """One step; the left wall is inelastic."""
        position, velocity = state.T
        velocity = velocity + (action - 1) * 0.001 - 0.0025 * np.cos(3 * position)
        if self.noise:
            velocity = velocity + self.noise * generator.standard_normal(len(state))
        velocity = np.clip(velocity, -0.07, 0.07)
        position = np.clip(position + velocity, -1.2, 0.6)
        velocity = np.where((position == -1.2) & (velocity < 0), 0.0, velocity)
        terminated = (position >= 0.5) & (velocity >= 0)
        return Outcome(
            np.stack([position, velocity], axis=1),
            np.full(len(state), -1.0),
            terminated,
        )


@dataclass(frozen=True)
class Pendulum:
    """Pendulum-v1: swing up and hold, torque in ±2, reward −(angle² + 0.1 velocity² +
    0.001 torque²).

    ``torques`` lists the torques of a version with discrete actions (empty: continuous
    torque); ``noise`` is the standard deviation of a Gaussian added to the angular
    velocity each step.
    """

    torques: tuple[float, ...] = ()
    noise: float = 0.0

    @property
    def n_actions(self) -> int | None:
        """One action per torque of the discrete version."""
        return len(self.torques) or None

    @property
    def bounds(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """Torque bounds of the continuous version."""
        if self.torques:
            return None
        return ((-2.0,), (2.0,))

    def reset(self, n: int, generator: np.random.Generator) -> States:
        """Any angle, angular velocity uniform in ±1."""
        return generator.uniform((-np.pi, -1.0), (np.pi, 1.0), size=(n, 2))

    def step(
        self, state: States, action: Actions, generator: np.random.Generator
    ) -> Outcome:
        """One step of 50 ms; nothing ever terminates."""
        angle, velocity = state.T
        if self.torques:
            torque = np.asarray(self.torques)[action]
        else:
            torque = np.clip(action[:, 0], -2.0, 2.0)
        wrapped = (angle + np.pi) % (2 * np.pi) - np.pi
        reward = -(wrapped**2 + 0.1 * velocity**2 + 0.001 * torque**2)
        velocity = velocity + (15.0 * np.sin(angle) + 3.0 * torque) * 0.05
        if self.noise:
            velocity = velocity + self.noise * generator.standard_normal(len(state))
        velocity = np.clip(velocity, -8.0, 8.0)
        following = np.stack([angle + 0.05 * velocity, velocity], axis=1)
        return Outcome(following, reward, np.zeros(len(state), dtype=bool))

    def observe(self, state: States) -> Observations:
        """Cosine and sine of the angle, angular velocity."""
        return np.stack(
            [np.cos(state[:, 0]), np.sin(state[:, 0]), state[:, 1]], axis=1
        ).astype(np.float32)


@dataclass(frozen=True)
class Acrobot:
    """Acrobot-v1: torque −1, 0 or +1 on the elbow, reward −1 a step until the tip is
    high enough.

    ``torque_noise`` is the half-width of a uniform noise on the torque (0: Gymnasium's
    task).
    """

    torque_noise: float = 0.0
    n_actions: int = 3
    bounds: None = None

    def reset(self, n: int, generator: np.random.Generator) -> States:
        """Hanging down, all four coordinates uniform in ±0.1."""
        return generator.uniform(-0.1, 0.1, size=(n, 4))

    def step(
        self, state: States, action: Actions, generator: np.random.Generator
    ) -> Outcome:
        """One Runge–Kutta step of 0.2 s; the reward of the terminating step is 0."""
        torque = np.asarray(action) - 1.0
        if self.torque_noise:
            torque = torque + generator.uniform(
                -self.torque_noise, self.torque_noise, size=len(state)
            )
        k1 = _acrobot_derivative(state, torque)
        k2 = _acrobot_derivative(state + 0.1 * k1, torque)
        k3 = _acrobot_derivative(state + 0.1 * k2, torque)
        k4 = _acrobot_derivative(state + 0.2 * k3, torque)
        following = state + 0.2 / 6.0 * (k1 + 2 * k2 + 2 * k3 + k4)
        following[:, :2] = (following[:, :2] + np.pi) % (2 * np.pi) - np.pi
        limit = np.array([4 * np.pi, 9 * np.pi])
        following[:, 2:] = np.clip(following[:, 2:], -limit, limit)
        terminated = (
            -np.cos(following[:, 0]) - np.cos(following[:, 1] + following[:, 0]) > 1.0
        )
        return Outcome(following, np.where(terminated, 0.0, -1.0), terminated)

    def observe(self, state: States) -> Observations:
        """Cosine and sine of both angles, both angular velocities."""
        first = state[:, 0]
        second = state[:, 1]
        angles = [np.cos(first), np.sin(first), np.cos(second), np.sin(second)]
        return np.stack([*angles, state[:, 2], state[:, 3]], axis=1).astype(np.float32)


def _acrobot_derivative(
    state: Float[np.ndarray, "copy 4"], torque: Float[np.ndarray, " copy"]
) -> Float[np.ndarray, "copy 4"]:
    """Time derivative of (angle 1, angle 2, velocity 1, velocity 2); unit links, unit
    masses, inertia 1.
    """
    first, second, first_dot, second_dot = state.T
    inertia = 0.25 + (1.25 + np.cos(second)) + 2.0
    coupling = 0.25 + 0.5 * np.cos(second) + 1.0
    pull_second = 0.5 * 9.8 * np.cos(first + second - np.pi / 2)
    pull_first = (
        -0.5 * second_dot**2 * np.sin(second)
        - second_dot * first_dot * np.sin(second)
        + 1.5 * 9.8 * np.cos(first - np.pi / 2)
        + pull_second
    )
    ratio = coupling / inertia
    push = (
        torque + ratio * pull_first - 0.5 * first_dot**2 * np.sin(second) - pull_second
    )
    second_acc = push / (1.25 - coupling * ratio)
    first_acc = -(coupling * second_acc + pull_first) / inertia
    return np.stack([first_dot, second_dot, first_acc, second_acc], axis=1)
