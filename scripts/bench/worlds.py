"""Worlds of the evaluation benchmark that no library ships: same interface as
scripts.bench.classic.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from koffline.envs.boxes import Actions, Observations, Outcome, States
from scripts.bench.classic import PlainWorld

Array = np.ndarray
_MOVES = np.array([[0.0, 1.0], [1.0, 0.0], [0.0, -1.0], [-1.0, 0.0]])


@dataclass(frozen=True)
class NoisyGrid(PlainWorld):
    """Continuous grid: the unit square, four moves with Gaussian noise, goal corner
    ends the episode.

    Reward −1 a step, −5 in a swamp in the middle, +20 at the goal (x + y ≥ 1.8).
    """

    stride: float = 0.08
    noise: float = 0.03
    n_actions: int = 4

    def reset(self, n: int, generator: np.random.Generator) -> States:
        return generator.uniform(0.0, 0.3, size=(n, 2))

    def step(
        self, state: States, action: Actions, generator: np.random.Generator
    ) -> Outcome:
        moved = (
            state
            + self.stride * _MOVES[action]
            + self.noise * generator.standard_normal(state.shape)
        )
        following = np.clip(moved, 0.0, 1.0)
        goal = following.sum(axis=1) >= 1.8
        depth = np.exp(-np.sum((following - 0.5) ** 2, axis=1) / 0.15**2)
        return Outcome(following, -1.0 - 4.0 * depth + 20.0 * goal, goal)


@dataclass(frozen=True)
class Chain:
    """A line of length 10: step left (0) or right (1) of about 1, slipping; the ends
    pay 1 and 10.
    """

    slip: float = 0.1
    length: float = 10.0
    n_actions: int = 2
    bounds: None = None

    def reset(self, n: int, generator: np.random.Generator) -> States:
        return generator.uniform(2.0, 5.0, size=(n, 1))

    def step(
        self, state: States, action: Actions, generator: np.random.Generator
    ) -> Outcome:
        slipped = generator.random(len(state)) < self.slip
        direction = np.where((action == 1) ^ slipped, 1.0, -1.0)
        place = state[:, 0] + direction * generator.uniform(0.5, 1.5, size=len(state))
        left = place <= 0.0
        right = place >= self.length
        reward = 1.0 * left + 10.0 * right - 0.05
        return Outcome(np.clip(place, 0.0, self.length)[:, None], reward, left | right)

    def observe(self, state: States) -> Observations:
        return (state / self.length).astype(np.float32)


@dataclass(frozen=True)
class Clicks(PlainWorld):
    """One step each: eight features of a visitor, five offers, a click (1) with a
    logistic chance.
    """

    key: int = 0
    n_actions: int = 5

    def reset(self, n: int, generator: np.random.Generator) -> States:
        return generator.standard_normal((n, 8))

    def step(
        self, state: States, action: Actions, generator: np.random.Generator
    ) -> Outcome:
        clicked = (
            generator.random(len(state))
            < self.chances(state)[np.arange(len(state)), action]
        )
        return Outcome(
            state, clicked.astype(np.float64), np.ones(len(state), dtype=bool)
        )

    def chances(self, observations: Array) -> Array:
        """Of a click, (N, 5)."""
        generator = np.random.default_rng([417, self.key])
        slopes, bends = generator.standard_normal((2, 8, self.n_actions)) / 8**0.5
        logits = observations @ slopes + np.square(observations) @ (0.3 * bends) - 1.5
        return 1.0 / (1.0 + np.exp(-logits))


@dataclass(frozen=True)
class BestOffer:
    """The offer that is clicked most often by such a visitor, always."""

    world: Clicks

    def __call__(self, observations: Array) -> Array:
        return np.eye(self.world.n_actions)[
            self.world.chances(observations.astype(np.float64)).argmax(axis=1)
        ]
