"""What a vectorised world is: n copies of one task, advanced together; and how a policy plays it.

Every array has the copies on its first axis. Time limits are no part of a world: they belong to whoever
writes a log. A policy here is plain: with discrete actions a callable from observations to probabilities
(N, n); with continuous ones an object with ``sample(observations, generator) -> (N, k)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Float32, Int, Shaped

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


@dataclass(frozen=True, eq=False)
class Step:
    """One step of every copy still running; ``index`` (n,) says which copies these are."""

    index: Int[np.ndarray, " copy"]
    observation: Observations
    action: Actions
    reward: Rewards
    next_observation: Observations
    terminated: Flags


def draw_categories(
    probabilities: Float[np.ndarray, "row category"], generator: np.random.Generator
) -> Int[np.ndarray, " row"]:
    """One category per row of (N, K) probabilities."""
    cumulative = np.cumsum(probabilities, axis=1)
    threshold = generator.random(len(cumulative))[:, None] * cumulative[:, -1:]
    return np.sum(cumulative[:, :-1] <= threshold, axis=1).astype(np.int64)


def draw_actions(policy: Any, observations: Observations, generator: np.random.Generator) -> Actions:
    """Sample one action per observation: (N,) int64 from probabilities, else (N, k)."""
    if hasattr(policy, "sample"):
        return policy.sample(observations, generator)
    return draw_categories(policy(observations), generator)


def play(
    world: World, policy: Any, state: States, limit: int, generator: np.random.Generator
) -> Iterator[Step]:
    """Yield step after step of every copy that still runs, for at most ``limit`` steps."""
    index = np.arange(len(state))
    observation = world.observe(state)
    for _ in range(limit):
        action = draw_actions(policy, observation, generator)
        state, reward, terminated = world.step(state, action, generator)
        next_observation = world.observe(state)
        yield Step(index, observation, action, reward, next_observation, terminated)
        running = ~terminated
        if not running.any():
            return
        index, state, observation = index[running], state[running], next_observation[running]


def discounted_returns(
    world: World,
    policy: Any,
    start: States,
    gamma: float,
    generator: np.random.Generator,
    repeats: int,
    horizon: int,
) -> Float[np.ndarray, "repeat start"]:
    """Returns of ``repeats`` rollouts from each start state (n, d), cut after ``horizon`` steps."""
    returns = np.zeros(repeats * len(start))
    for t, step in enumerate(play(world, policy, np.tile(start, (repeats, 1)), horizon, generator)):
        returns[step.index] += gamma**t * step.reward
    return returns.reshape(repeats, len(start))
