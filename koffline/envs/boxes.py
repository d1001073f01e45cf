"""Puddle World, pole and Mountain Car, the worlds that the paper names for policy
evaluation; their noise, rewards and bounds, which it does not state, are ours.

A world is n copies of one task, advanced together: every array has the copies on its
first axis. Time limits are left to the writers of logs. A policy here is a callable
from observations to probabilities (N, n) for discrete actions, or an object with
``sample(observations, generator) -> (N, k)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import (
    ClassVar,
    Literal,
    NamedTuple,
    Protocol,
    TypeAlias,
    runtime_checkable,
)

import numpy as np
from jaxtyping import Bool, Float, Float32, Int, Shaped

from koffline.errors import ConfigError

# (n, d) float64; (n,) state numbers of a finite process
States = Shaped[np.ndarray, "copy *state"]
Observations = Float32[np.ndarray, "copy *observation"]
Actions = Shaped[np.ndarray, "copy *action"]  # (n,) whole numbers or (n, k)
Rewards = Float[np.ndarray, " copy"]
Flags = Bool[np.ndarray, " copy"]


@runtime_checkable
class Draws(Protocol):
    """A policy that draws actions itself."""

    def sample(
        self, observations: np.ndarray, generator: np.random.Generator
    ) -> np.ndarray:
        """Actions (N, k), or indices (N,), one for each observation."""


# draws actions, or maps observations (N, …) to probabilities (N, n)
WorldPolicy: TypeAlias = Draws | Callable[[np.ndarray], np.ndarray]


class Outcome(NamedTuple):
    """Result of one step of every copy."""

    state: States
    reward: Rewards
    terminated: Flags


@dataclass(frozen=True, eq=False)
class Tuples:
    """Independent transitions: states, actions, rewards, next states and
    terminations.
    """

    states: States
    actions: Actions
    rewards: Rewards
    next_states: States
    terminated: Flags


Pair = tuple[float, float]
MOVES = ((0.0, 0.05), (0.05, 0.0), (0.0, -0.05), (-0.05, 0.0))  # up, right, down, left
# centre lines of the puddles
PUDDLES = (
    ((0.10, 0.75), (0.45, 0.75)),
    ((0.45, 0.40), (0.45, 0.80)),
)
RADIUS = 0.1
PUDDLE_GOAL = 1.9  # episodes end where x + y reaches it
GRAVITY = 9.8
HALF_LENGTH = 0.5
FASTEST = 4.0  # radians per second, the poles' usual bound on the velocity


@dataclass(frozen=True)
class BoxWorld:
    """A world with states (n, d) in a box; observations are the states themselves, in
    native units.

    low, high: its corners. grid: cells per axis of the grid on which the paper computes
    true values. reward_scale: divisor of rewards in training, so that values are of
    order one.
    """

    noise: float
    low: ClassVar[Pair]
    high: ClassVar[Pair]
    grid: ClassVar[tuple[int, int]]
    n_actions: ClassVar[int]
    bounds: ClassVar[None] = None
    reward_scale: ClassVar[float]

    def __post_init__(self) -> None:
        if not 0.0 <= self.noise < math.inf:
            raise ConfigError(
                f"noise is {self.noise}; give a number that is not negative"
            )

    def reset(self, n: int, generator: np.random.Generator) -> States:
        """Draw n start states."""
        raise NotImplementedError

    def draw_noise(self, n: int, generator: np.random.Generator) -> np.ndarray:
        """Draw the noise of n steps, one row per step."""
        raise NotImplementedError

    def move(self, state: States, action: Actions, noise: np.ndarray) -> Outcome:
        """Advance every copy by one step from states (N, d), given actions (N,) and the
        noise of `draw_noise`.
        """
        raise NotImplementedError

    def step(
        self, state: States, action: Actions, generator: np.random.Generator
    ) -> Outcome:
        """Advance every copy by one step from states (N, d) with actions (N,); the
        noise is drawn from ``generator``.
        """
        return self.move(state, action, self.draw_noise(len(state), generator))

    def is_terminal(self, state: States) -> Flags:
        """Whether episodes end in these states."""
        raise NotImplementedError

    def observe(self, state: States) -> Observations:
        """The state itself."""
        return state.astype(np.float32)


@dataclass(frozen=True)
class PuddleWorld(BoxWorld):
    """Walk to the upper right corner of the unit square, around two puddles.

    State (x, y); ``noise``: standard deviation of each step, per axis. Reward −1 per
    step, and −400 per unit of depth in a puddle. (Boyan & Moore 1995; the reward is
    that of the new state, as in Sutton 1996)
    """

    noise: float = 0.01
    low: ClassVar[Pair] = (0.0, 0.0)
    high: ClassVar[Pair] = (1.0, 1.0)
    grid: ClassVar[tuple[int, int]] = (25, 25)
    n_actions: ClassVar[int] = 4
    reward_scale: ClassVar[float] = 20.0

    def reset(self, n: int, generator: np.random.Generator) -> States:
        """Draw n start states uniformly outside the goal."""
        state = generator.uniform(size=(n, 2))
        while (outside := self.is_terminal(state)).any():
            state[outside] = generator.uniform(size=(int(outside.sum()), 2))
        return state

    def draw_noise(self, n: int, generator: np.random.Generator) -> np.ndarray:
        """Normal on both axes."""
        return self.noise * generator.standard_normal((n, 2))

    def move(self, state: States, action: Actions, noise: np.ndarray) -> Outcome:
        """Move one noisy step; walls stop the move."""
        following = np.clip(state + np.asarray(MOVES)[action] + noise, 0.0, 1.0)
        return Outcome(
            following,
            -1.0 - 400.0 * puddle_depth(following),
            self.is_terminal(following),
        )

    def is_terminal(self, state: States) -> Flags:
        """Whether the goal is reached."""
        return state.sum(axis=1) >= PUDDLE_GOAL


def puddle_depth(state: Float[np.ndarray, "row 2"]) -> Float[np.ndarray, " row"]:
    """Depth of states in the nearest puddle: 0 outside, 0.1 on its centre line."""
    depth = np.zeros(len(state))
    for start, end in np.asarray(PUDDLES):
        along = end - start
        share = np.clip((state - start) @ along / (along @ along), 0.0, 1.0)
        depth = np.maximum(
            depth,
            RADIUS - np.linalg.norm(state - start - share[:, None] * along, axis=1),
        )
    return depth


@dataclass(frozen=True)
class NoisyPole(BoxWorld):
    """Balance a pole with three forces on its cart: what we take for the paper's
    "CartPole", whose grid of 20 × 25 states has two dimensions.

    State (angle, angular velocity) in radians and seconds, angle 0 upright; the pole
    falls at ± π/2. ``noise``: half-width in newtons of a uniform force added to every
    push. ``reward``: "fall" gives −1 for the fall only, "balance" +1 for every step
    before it. ``fastest``: bound on the velocity, in radians per second; the task as
    published has none, and a box needs one. (Lagoudakis & Parr 2003, the inverted
    pendulum)
    """

    noise: float = 10.0
    reward: Literal["fall", "balance"] = "fall"
    fastest: float = FASTEST
    widest: ClassVar[float] = math.pi / 2  # largest angle, in radians
    grid: ClassVar[tuple[int, int]] = (20, 25)
    n_actions: ClassVar[int] = 3
    forces: ClassVar[tuple[float, ...]] = (-50.0, 0.0, 50.0)  # newtons
    masses: ClassVar[Pair] = (2.0, 8.0)  # of pole and cart, kilograms
    seconds: ClassVar[float] = 0.1  # of a step
    # at a fall, before
    rewards: ClassVar[dict[str, Pair]] = {
        "fall": (-1.0, 0.0),
        "balance": (0.0, 1.0),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.fastest < math.inf:
            raise ConfigError(
                f"fastest is {self.fastest}; give a positive number of radians per"
                " second"
            )

    @property
    def low(self) -> Pair:  # type: ignore[override]
        """Lower corner of the box."""
        return -self.widest, -self.fastest

    @property
    def high(self) -> Pair:  # type: ignore[override]
        """Upper corner of the box."""
        return self.widest, self.fastest

    @property
    def reward_scale(self) -> float:  # type: ignore[override]
        """Divisor of rewards: 1 for reward "fall", 20 for "balance"."""
        if self.reward == "fall":
            return 1.0
        return 20.0

    def reset(self, n: int, generator: np.random.Generator) -> States:
        """Draw n states nearly upright and at rest: both coordinates uniform in
        ±0.05.
        """
        return generator.uniform(-0.05, 0.05, size=(n, 2))

    def draw_noise(self, n: int, generator: np.random.Generator) -> np.ndarray:
        """Uniform forces."""
        if self.noise:
            return generator.uniform(-self.noise, self.noise, size=n)
        return np.zeros(n)

    def move(self, state: States, action: Actions, noise: np.ndarray) -> Outcome:
        """One Euler step."""
        angle, velocity = state.T
        force = np.asarray(self.forces)[action] + noise
        pole = self.masses[0]
        share = 1.0 / sum(self.masses)
        swing = share * pole * HALF_LENGTH * velocity**2 * np.sin(2.0 * angle) / 2.0
        drive = GRAVITY * np.sin(angle) - swing - share * np.cos(angle) * force
        inertia = (
            4.0 * HALF_LENGTH / 3.0 - share * pole * HALF_LENGTH * np.cos(angle) ** 2
        )
        following_angle = angle + self.seconds * velocity
        following_velocity = velocity + self.seconds * (drive / inertia)
        fallen = np.abs(following_angle) > self.widest
        following = np.clip(
            np.stack([following_angle, following_velocity], axis=1), self.low, self.high
        )
        return Outcome(following, np.where(fallen, *self.rewards[self.reward]), fallen)

    def is_terminal(self, state: States) -> Flags:
        """Whether the pole is outside the box; never true for states in the box."""
        return np.abs(state[:, 0]) > self.widest


@dataclass(frozen=True)
class GymnasiumPole(NoisyPole):
    """The pole of Gymnasium's CartPole: light, steps of 0.02 s, a fall at ± 12°; the
    cart has no limits.

    Push left (0) or right (1) with 10 N; the noise is the same share of the push as in
    `NoisyPole`.
    """

    noise: float = 2.0
    widest: ClassVar[float] = math.radians(12.0)
    n_actions: ClassVar[int] = 2
    forces: ClassVar[tuple[float, ...]] = (-10.0, 10.0)
    masses: ClassVar[Pair] = (0.1, 1.0)
    seconds: ClassVar[float] = 0.02


@dataclass(frozen=True)
class NoisyMountainCar(BoxWorld):
    """Leave a valley by swinging in a weak car, with noise on its velocity.

    State (position, velocity); push left (0), coast (1), push right (2); reward −1 per
    step until position ≥ 0.5. ``noise``: standard deviation of a Gaussian added to the
    velocity at each step. (Gymnasium's task)
    """

    noise: float = 0.001
    low: ClassVar[Pair] = (-1.2, -0.07)
    high: ClassVar[Pair] = (0.6, 0.07)
    grid: ClassVar[tuple[int, int]] = (30, 25)
    n_actions: ClassVar[int] = 3
    reward_scale: ClassVar[float] = 10.0

    def reset(self, n: int, generator: np.random.Generator) -> States:
        """Draw n states at rest near the bottom of the valley."""
        return np.stack([generator.uniform(-0.6, -0.4, size=n), np.zeros(n)], axis=1)

    def draw_noise(self, n: int, generator: np.random.Generator) -> np.ndarray:
        """Normal jolts."""
        if self.noise:
            return self.noise * generator.standard_normal(n)
        return np.zeros(n)

    def move(self, state: States, action: Actions, noise: np.ndarray) -> Outcome:
        """One step; the left wall stops the car, the right end is the goal at any
        speed.
        """
        position, velocity = state.T
        velocity = (
            velocity + (action - 1) * 0.001 - 0.0025 * np.cos(3 * position) + noise
        )
        velocity = np.clip(velocity, -0.07, 0.07)
        position = np.clip(position + velocity, -1.2, 0.6)
        velocity = np.where((position == -1.2) & (velocity < 0), 0.0, velocity)
        following = np.stack([position, velocity], axis=1)
        return Outcome(
            following, np.full(len(state), -1.0), self.is_terminal(following)
        )

    def is_terminal(self, state: States) -> Flags:
        """Whether the car has left the valley."""
        return state[:, 0] >= 0.5


WORLDS: dict[str, type[BoxWorld]] = {
    "puddle_world": PuddleWorld,
    "cart_pole": NoisyPole,
    "gymnasium_pole": GymnasiumPole,
    "mountain_car": NoisyMountainCar,
}
GYMNASIUM_IDS = {
    name: f"koffline/{world.__name__}-v0" for name, world in WORLDS.items()
}
NAMES = {name: name for name in WORLDS} | {
    identifier: name for name, identifier in GYMNASIUM_IDS.items()
}
# steps
TIME_LIMITS = {
    "puddle_world": 300,
    "cart_pole": 500,
    "gymnasium_pole": 500,
    "mountain_car": 300,
}


def make_world(name: str) -> BoxWorld:
    """The world with this name or Gymnasium id, with its default noise.

    Raises ConfigError.
    """
    return WORLDS[world_name(name)]()  # type: ignore[call-arg]


def world_name(name: str) -> str:
    """The name of a world from its name or Gymnasium id. Raises ConfigError."""
    if name not in NAMES:
        known = (
            f"{', '.join(GYMNASIUM_IDS.values())} (any environment: koffline build"
            " rollouts)"
        )
        raise ConfigError(
            f"there is no world '{name}' that can start in any state; known are {known}"
        )
    return NAMES[name]


def uniform_states(
    world: BoxWorld, n: int, generator: np.random.Generator
) -> Float[np.ndarray, "copy d"]:
    """n states uniform over the non-terminal part of the box."""
    states = np.empty((0, len(world.low)))
    while len(states) < n:
        count = max(2 * (n - len(states)), 16)
        drawn = generator.uniform(world.low, world.high, size=(count, len(world.low)))
        states = np.concatenate([states, drawn[~world.is_terminal(drawn)]])[:n]
    return states


def draw_categories(
    probabilities: Float[np.ndarray, "row category"], generator: np.random.Generator
) -> Int[np.ndarray, " row"]:
    """Draw one category per row of probabilities (N, K)."""
    cumulative = np.cumsum(probabilities, axis=1)
    threshold = generator.random(len(cumulative))[:, None] * cumulative[:, -1:]
    return np.sum(cumulative[:, :-1] <= threshold, axis=1).astype(np.int64)


def draw_actions(
    policy: WorldPolicy, observations: Observations, generator: np.random.Generator
) -> Actions:
    """Sample one action per observation (N, …): indices (N,) int64 from a policy's
    probabilities, else the actions (N, k) of its ``sample``.
    """
    if hasattr(policy, "sample"):
        return policy.sample(observations, generator)
    return draw_categories(policy(observations), generator)
