"""The paper's policy-evaluation worlds, whose state is a point of a box: Puddle World, pole, Mountain Car."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Shaped

from koffline.envs.classic import MountainCar
from koffline.envs.world import Actions, Flags, Observations, Outcome, States, World
from koffline.errors import ConfigError, nearest_name

MOVES = ((0.0, 0.05), (0.05, 0.0), (0.0, -0.05), (-0.05, 0.0))  # up, right, down, left
PUDDLES = (((0.10, 0.75), (0.45, 0.75)), ((0.45, 0.40), (0.45, 0.80)))  # segments that puddles surround
RADIUS = 0.1
PUDDLE_GOAL = 1.9  # episodes end where x + y reaches it
FORCES = (-50.0, 0.0, 50.0)  # newtons
POLE_MASS, CART_MASS, HALF_LENGTH, GRAVITY, STEP_SECONDS = 2.0, 8.0, 0.5, 9.8, 0.1
FALL_ANGLE = math.pi / 2
FASTEST = 4.0  # radians per second; the state stays in the box
GYMNASIUM_IDS = {
    "puddle_world": "koffline/PuddleWorld-v0",
    "cart_pole": "koffline/NoisyPole-v0",
    "mountain_car": "koffline/NoisyMountainCar-v0",
}
TIME_LIMITS = {"puddle_world": 300, "cart_pole": 500, "mountain_car": 300}  # steps


@dataclass(frozen=True)
class PuddleWorld:
    """Walk to the upper right corner of the unit square, around two puddles.

    State (x, y); ``noise`` is the standard deviation of each step, per axis. Reward −1 a step, and −400 per
    unit of depth in a puddle. (Boyan & Moore 1995; reward of the state that is entered, as in Sutton 1996)
    """

    noise: float = 0.01
    low: tuple[float, float] = (0.0, 0.0)
    high: tuple[float, float] = (1.0, 1.0)
    grid: tuple[int, int] = (25, 25)
    reward_scale: float = 20.0
    n_actions: int = 4
    bounds: None = None

    def __post_init__(self) -> None:
        _check_noise(self.noise)

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
        return state.sum(axis=1) >= PUDDLE_GOAL


def puddle_depth(state: Float[np.ndarray, "row 2"]) -> Float[np.ndarray, " row"]:
    """How deep states stand in the nearest puddle: 0 outside, 0.1 on its centre line."""
    depth = np.zeros(len(state))
    for start, end in np.asarray(PUDDLES):
        along = end - start
        share = np.clip((state - start) @ along / (along @ along), 0.0, 1.0)
        distance = np.linalg.norm(state - start - share[:, None] * along, axis=1)
        depth = np.maximum(depth, RADIUS - distance)
    return depth


@dataclass(frozen=True)
class NoisyPole:
    """Balance a pole with three forces on its cart: the paper's "CartPole", two-dimensional.

    State (angle, angular velocity) in radians and seconds, angle 0 upright; falls at ± π/2. ``noise`` is the
    half-width in newtons of a uniform force added to every push.
    ``reward``: "fall" pays −1 for the fall alone, "balance" +1 for every step until then.
    (Lagoudakis & Parr 2003, the inverted pendulum)
    """

    noise: float = 10.0
    reward: Literal["fall", "balance"] = "fall"
    low: tuple[float, float] = (-FALL_ANGLE, -FASTEST)
    high: tuple[float, float] = (FALL_ANGLE, FASTEST)
    grid: tuple[int, int] = (20, 25)
    n_actions: int = 3
    bounds: None = None

    def __post_init__(self) -> None:
        _check_noise(self.noise)
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


@dataclass(frozen=True)
class NoisyMountainCar:
    """Leave a valley by swinging in a weak car whose velocity is jolted at every step.

    State (position, velocity); push left (0), coast (1), push right (2); −1 a step until position ≥ 0.5.
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
        _check_noise(self.noise)

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
        return state[:, 0] >= 0.5


@runtime_checkable
class BoxWorld(World, Protocol):
    """A world whose states (n, d) fill a box; observations are the states themselves, in native units."""

    @property
    def low(self) -> tuple[float, ...]:
        """Lower corner of the box, (d,)."""

    @property
    def high(self) -> tuple[float, ...]:
        """Upper corner of the box, (d,)."""

    @property
    def grid(self) -> tuple[int, int]:
        """Cells per axis of the grid on which the paper computes true values."""

    @property
    def reward_scale(self) -> float:
        """Rewards are divided by it for training, so that values are of order one."""

    def is_terminal(self, state: States) -> Flags:
        """Whether episodes end in these states."""


WORLDS: dict[str, type[BoxWorld]] = {
    "puddle_world": PuddleWorld,
    "cart_pole": NoisyPole,
    "mountain_car": NoisyMountainCar,
}


def make_world(name: str) -> BoxWorld:
    """The world of a name or a Gymnasium id, with its default noise. Raises ConfigError."""
    return WORLDS[world_name(name)]()


def world_name(name: str) -> str:
    """The name of a world from itself or its Gymnasium id. Raises ConfigError."""
    key = {identifier: key for key, identifier in GYMNASIUM_IDS.items()}.get(name, name)
    if key not in WORLDS:
        known = [*WORLDS, *GYMNASIUM_IDS.values()]
        raise ConfigError(f"there is no world '{name}'; {nearest_name(name, known)}")
    return key


def uniform_states(world: BoxWorld, n: int, generator: np.random.Generator) -> Float[np.ndarray, "copy d"]:
    """n states uniform over the part of the box where episodes go on."""
    if n < 1:
        raise ConfigError(f"n is {n}; give a positive number of states")
    parts: list[np.ndarray] = []
    missing = n
    while missing:
        drawn = generator.uniform(world.low, world.high, size=(max(2 * missing, 16), len(world.low)))
        kept = drawn[~world.is_terminal(drawn)][:missing]
        parts.append(kept)
        missing -= len(kept)
    return np.concatenate(parts)


def to_unit_square(world: BoxWorld, states: Shaped[np.ndarray, "row d"]) -> Float[np.ndarray, "row d"]:
    """States in native units as points of [0, 1]^d."""
    low, high = np.asarray(world.low), np.asarray(world.high)
    return (np.asarray(states, dtype=np.float64) - low) / (high - low)


def _check_noise(noise: float) -> None:
    if not 0.0 <= noise < math.inf:
        raise ConfigError(f"noise is {noise}; give a number that is not negative")
