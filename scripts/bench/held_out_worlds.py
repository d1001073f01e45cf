"""Worlds of the held-out problems: navigation, stock keeping, queues, treatment,
changed rewards.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from koffline.envs.boxes import Actions, Observations, Outcome, States
from scripts.bench.classic import Around, PlainWorld

Array = np.ndarray
_MOVES = np.array([[0.0, 1.0], [1.0, 0.0], [0.0, -1.0], [-1.0, 0.0]])


@dataclass(frozen=True)
class Repriced(Around):
    """Another world with reward ``scale`` · reward + ``offset`` + ``at_end`` (on
    terminating steps).
    """

    scale: float = 1.0
    offset: float = 0.0
    at_end: float = 0.0

    def step(
        self, state: States, action: Actions, generator: np.random.Generator
    ) -> Outcome:
        following, reward, ended = self.world.step(state, action, generator)
        return Outcome(
            following, self.scale * reward + self.offset + self.at_end * ended, ended
        )


@dataclass(frozen=True)
class PuddleWorld(PlainWorld):
    """Boyan and Moore's puddle world: moves of 0.05 with noise 0.01, cost 1 a step, up
    to 40 in puddles.
    """

    n_actions: int = 4

    def reset(self, n: int, generator: np.random.Generator) -> States:
        return generator.uniform(0.0, 0.95, size=(n, 2))

    def step(
        self, state: States, action: Actions, generator: np.random.Generator
    ) -> Outcome:
        moved = (
            state
            + 0.05 * _MOVES[action]
            + 0.01 * generator.standard_normal(state.shape)
        )
        following = np.clip(moved, 0.0, 1.0)
        flat = np.hypot(
            state[:, 0] - np.clip(state[:, 0], 0.10, 0.45), state[:, 1] - 0.75
        )
        upright = np.hypot(
            state[:, 0] - 0.45, state[:, 1] - np.clip(state[:, 1], 0.40, 0.80)
        )
        depth = np.maximum(0.0, 0.1 - np.minimum(flat, upright))
        return Outcome(following, -1.0 - 400.0 * depth, following.sum(axis=1) >= 1.9)


@dataclass(frozen=True)
class Navigation:
    """A point mass with drag in the plane, pushed in any direction; reward near the
    origin, wind.
    """

    noise: float = 0.05
    n_actions: None = None
    bounds: tuple[tuple[float, ...], tuple[float, ...]] = ((-1.0, -1.0), (1.0, 1.0))

    def reset(self, n: int, generator: np.random.Generator) -> States:
        place = generator.uniform(1.0, 2.0, size=(n, 2))
        return np.concatenate([place, np.zeros((n, 2))], axis=1)

    def step(
        self, state: States, action: Actions, generator: np.random.Generator
    ) -> Outcome:
        place = state[:, :2]
        speed = state[:, 2:]
        wind = 0.3 * np.stack(
            [np.sin(2 * place[:, 1]), np.cos(2 * place[:, 0])], axis=1
        )
        push = np.clip(action, -1.0, 1.0) + wind - speed
        speed = speed + 0.2 * push + self.noise * generator.standard_normal(speed.shape)
        place = np.clip(place + 0.2 * speed, -3.0, 3.0)
        distance = np.sum(place**2, axis=1)
        reward = np.exp(-distance) - 0.1 * distance - 0.05 * np.sum(action**2, axis=1)
        return Outcome(
            np.concatenate([place, speed], axis=1),
            reward,
            np.zeros(len(state), dtype=bool),
        )

    def observe(self, state: States) -> Observations:
        return state.astype(np.float32)


@dataclass(frozen=True)
class Inventory:
    """A shop through the year: order 0, 5, 10, 15 or 20 units, which come next week;
    unmet demand is lost.

    Observed: stock / 20, ordered / 20, sine and cosine of the season. Reward in tens of
    money units.
    """

    n_actions: int = 5
    bounds: None = None

    def reset(self, n: int, generator: np.random.Generator) -> States:
        stock = generator.uniform(0.0, 30.0, size=n)
        return np.stack(
            [stock, np.zeros(n), generator.uniform(0.0, 52.0, size=n)], axis=1
        )

    def step(
        self, state: States, action: Actions, generator: np.random.Generator
    ) -> Outcome:
        stock, coming, week = state.T
        demand = generator.gamma(
            4.0, (8.0 + 4.0 * np.sin(2 * np.pi * week / 52.0)) / 4.0
        )
        sold = np.minimum(stock, demand)
        order = 5.0 * action
        money = 5.0 * sold - 0.5 * stock - 2.5 * order - 4.0 * (action > 0)
        stock = np.minimum(stock - sold + coming, 60.0)
        return Outcome(
            np.stack([stock, order, (week + 1.0) % 52.0], axis=1),
            money / 10.0,
            np.zeros(len(state), bool),
        )

    def observe(self, state: States) -> Observations:
        season = 2 * np.pi * state[:, 2] / 52.0
        columns = [
            state[:, 0] / 20.0,
            state[:, 1] / 20.0,
            np.sin(season),
            np.cos(season),
        ]
        return np.stack(columns, axis=1).astype(np.float32)


@dataclass(frozen=True)
class Queues:
    """One server, two queues of at most 20: serve the first, the second, or both in
    overtime.

    Reward 100 minus the cost of waiting (1 and 2 a head) and of overtime (4): a large
    constant part.
    """

    n_actions: int = 3
    bounds: None = None

    def reset(self, n: int, generator: np.random.Generator) -> States:
        return generator.integers(0, 6, size=(n, 2)).astype(np.float64)

    def step(
        self, state: States, action: Actions, generator: np.random.Generator
    ) -> Outcome:
        served = np.stack([action != 1, action != 0], axis=1) & (
            generator.random(state.shape) < (0.7, 0.6)
        )
        arrived = generator.random(state.shape) < (0.4, 0.25)
        following = np.clip(state - served + arrived, 0.0, 20.0)
        reward = 100.0 - state @ np.array([1.0, 2.0]) - 4.0 * (action == 2)
        return Outcome(following, reward, np.zeros(len(state), dtype=bool))

    def observe(self, state: States) -> Observations:
        return (state / 10.0).astype(np.float32)


@dataclass(frozen=True)
class Treatment:
    """A patient and four dose levels; discharge (+5) or death (−10) ends the stay, most
    within 60 days.

    Observed: severity, toxicity, resistance, frailty, and two laboratory values that
    follow from them.
    """

    n_actions: int = 4
    bounds: None = None

    def reset(self, n: int, generator: np.random.Generator) -> States:
        severity = generator.uniform(0.8, 2.0, size=n)
        return np.stack(
            [
                severity,
                np.zeros(n),
                generator.uniform(0, 0.3, size=n),
                generator.random(n),
            ],
            axis=1,
        )

    def step(
        self, state: States, action: Actions, generator: np.random.Generator
    ) -> Outcome:
        severity, toxicity, resistance, frailty = state.T
        dose = action / 3.0
        relief = 0.45 * dose * np.exp(-resistance)
        growth = 0.12 + 0.08 * frailty + 0.1 * generator.standard_normal(len(state))
        severity = np.clip(severity + growth - relief, 0.0, 4.0)
        toxicity = 0.85 * toxicity + 0.25 * dose
        resistance = np.minimum(resistance + 0.03 * dose, 1.5)
        risk = 1.0 / (
            1.0 + np.exp(-2.5 * (severity + 0.7 * toxicity + 0.5 * frailty - 4.2))
        )
        died = generator.random(len(state)) < risk
        healed = (severity < 0.3) & ~died
        reward = -0.1 * severity - 0.15 * toxicity - 10.0 * died + 5.0 * healed
        return Outcome(
            np.stack([severity, toxicity, resistance, frailty], axis=1),
            reward,
            died | healed,
        )

    def observe(self, state: States) -> Observations:
        laboratory = np.stack(
            [np.tanh(state[:, 0] - 1.5), np.sqrt(state[:, 1] + 0.1)], axis=1
        )
        return np.concatenate([state, laboratory], axis=1).astype(np.float32)
