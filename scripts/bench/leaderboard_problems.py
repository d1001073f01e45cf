"""Problems of the leaderboard: one log each, several policies to rank, and what they
are really worth.

Every log keeps the probabilities with which its actions were drawn. Some policies are
greedy, because some estimators know no others. Values of finite problems are exact, the
others by Monte Carlo. They are values from the world's start distribution: the draw of
a log's own start states is part of every estimator's error.

``python -m scripts.bench.leaderboard_problems`` prints the table.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from koffline.data.transitions import Metadata, Transitions
from koffline.policies import Policy
from scripts.bench import controllers as c
from scripts.bench.classic import CartPole, Pendulum
from scripts.bench.embedded import EmbeddedMDP
from scripts.bench.finite_worlds import graph_world, grid_world
from scripts.bench.held_out_worlds import PuddleWorld
from scripts.bench.rollouts import as_transitions, log_episodes
from scripts.bench.specs import Spec, policy_of

Array = np.ndarray
_BOX = ((-2.0,), (2.0,))


@dataclass(frozen=True)
class Greedy:
    """The most probable action of another policy, always."""

    policy: Any

    def __call__(self, observations: Array) -> Array:
        probabilities = self.policy(observations)
        return np.eye(probabilities.shape[1])[probabilities.argmax(axis=1)]


@dataclass(frozen=True)
class UpFirst:
    """Four moves (up, right, down, left): up until the second coordinate is 0.9, then
    right.
    """

    def __call__(self, observations: Array) -> Array:
        return np.eye(4)[np.where(observations[:, 1] < 0.9, 0, 1)]


@dataclass(frozen=True)
class Truncated:
    """Continuous policy: normal around a controller's action, truncated to the bounds,
    mixed with uniform.

    Its density is known, which that of a clipped normal is not.
    """

    controller: Any
    deviation: float
    uniform: float = 0.0
    low: float = -2.0
    high: float = 2.0
    deterministic: bool = False

    def mean(self, observations: Array) -> Array:
        middle = (self.low + self.high) / 2.0
        normal = self._normal(observations).mean()
        return (1.0 - self.uniform) * normal + self.uniform * middle

    def sample(self, observations: Array, generator: np.random.Generator) -> Array:
        normal = self._normal(observations).ppf(
            generator.random((len(observations), 1))
        )
        flat = generator.uniform(self.low, self.high, size=normal.shape)
        return np.where(
            generator.random(normal.shape) < self.uniform,
            flat,
            np.clip(normal, self.low, self.high),
        )

    def log_density(self, observations: Array, actions: Array) -> Array:
        normal = self._normal(observations).pdf(actions)[:, 0]
        return np.log(
            (1.0 - self.uniform) * normal + self.uniform / (self.high - self.low)
        )

    def _normal(self, observations: Array) -> Any:
        from scipy import stats

        centre = np.clip(self.controller(observations), self.low, self.high)
        low = (self.low - centre) / self.deviation
        high = (self.high - centre) / self.deviation
        return stats.truncnorm(low, high, loc=centre, scale=self.deviation)


@dataclass(frozen=True)
class Still:
    """Continuous policy: a controller's action, always."""

    controller: Any
    deterministic: bool = True

    def mean(self, observations: Array) -> Array:
        return np.asarray(self.controller(observations))

    def sample(self, observations: Array, generator: np.random.Generator) -> Array:
        return self.mean(observations)


@dataclass(frozen=True, eq=False)
class BoardProblem:
    """A world, who writes the log, who is evaluated.

    ``reward_noise``: normal noise on logged rewards.
    """

    name: str
    world: Any
    behavior: Any
    targets: dict[str, Any]
    gamma: float
    time_limit: int
    n_rows: int
    greedy: tuple[str, ...]
    reward_noise: float = 0.0
    n_starts: int = 40_000

    def log(self, seed: int, n_rows: int | None = None) -> Transitions:
        """Episodes with the probabilities of the logged actions; a function of the seed
        alone.
        """
        key = int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:4], "little")
        generator = np.random.default_rng([seed, key])
        log = log_episodes(
            self.world, self.behavior, n_rows or self.n_rows, self.time_limit, generator
        )
        rewards = log.rewards + self.reward_noise * generator.standard_normal(len(log))
        transitions = as_transitions(
            log, self.world, metadata=Metadata(gamma=self.gamma, source=self.name)
        )
        return dataclasses.replace(
            transitions,
            rewards=rewards,
            behavior_log_probabilities=self._log_probabilities(transitions),
        )

    def policy(self, name: str) -> Policy:
        """One of the targets as koffline's policy."""
        return policy_of(self.world, self.targets[name], name)

    def truth(self, name: str) -> tuple[float, float]:
        """Value over the world's start distribution, and its standard error (0 where it
        is exact).
        """
        target = self.targets[name]
        if isinstance(self.world, EmbeddedMDP):
            table = target(self.world.coordinates.astype(np.float32))
            return self.world.mdp.policy_value(table, self.gamma), 0.0
        label = f"board-{self.name}-{name.replace(' ', '-')}"
        spec = Spec(
            label, self.world, None, target, self.gamma, self.time_limit, self.n_starts
        )
        value = spec.truth()
        return value.value, value.standard_error

    def _log_probabilities(self, log: Transitions) -> Array | None:
        """None of continuous actions whose density is not written down."""
        if hasattr(self.behavior, "log_density"):
            return np.asarray(self.behavior.log_density(log.observations, log.actions))
        if hasattr(self.behavior, "sample"):
            return None
        chances = self.behavior(log.observations)
        return np.log(chances[np.arange(len(log)), log.actions])


def _graph(
    name: str, length: int, dense: bool, behavior: float, noise: float, rows: int
) -> BoardProblem:
    """COBS's Graph.

    "turns late": action 0, but at the last two steps action 1 from lower nodes.
    """
    world = graph_world(length, dense)
    turns = (world.coordinates[:, 1] < 0.0) & (
        world.coordinates[:, 0] >= (length - 2) / length
    )
    late = world.policy(np.where(turns[:, None], [0.0, 1.0], [1.0, 0.0]))
    targets: dict[str, Any] = {
        f"first {chance:g}": c.Fixed((chance, 1.0 - chance))
        for chance in (0.7, 0.8, 0.9)
    }
    targets.update({"first 1": c.Fixed((1.0, 0.0)), "turns late": late})
    return BoardProblem(
        name,
        world,
        c.Fixed((behavior, 1.0 - behavior)),
        targets,
        gamma=0.98,
        time_limit=length + 1,
        n_rows=rows,
        greedy=("first 1", "turns late"),
        reward_noise=noise,
    )


def _grid() -> BoardProblem:
    """COBS's kind of grid: fields, holes, a goal. Moves up, right, down, left."""
    world = grid_world()
    best = _best_actions(world, 0.98)
    wander = c.Fixed((0.1, 0.4, 0.4, 0.1))
    targets = {
        "wander": wander,
        "half best": c.Mixed(0.5, world.policy(best)),
        "nearly best": c.Mixed(0.15, world.policy(best)),
        "best": world.policy(best),
        "right, then down": world.policy(
            np.eye(4)[np.where(world.coordinates[:, 0] < 0.8, 1, 2)]
        ),
    }
    return BoardProblem(
        "grid",
        world,
        c.Fixed((0.2, 0.3, 0.3, 0.2)),
        targets,
        0.98,
        100,
        8000,
        ("best", "right, then down"),
    )


def _best_actions(world: EmbeddedMDP, gamma: float) -> Array:
    """Policy iteration: one-hot (S, A)."""
    table = np.full(
        (world.mdp.n_states, world.mdp.n_actions), 1.0 / world.mdp.n_actions
    )
    for _ in range(50):
        table = np.eye(world.mdp.n_actions)[
            world.mdp.action_values(table, gamma).round(9).argmax(axis=1)
        ]
    return table


def _puddle() -> BoardProblem:
    diagonal = c.GoDiagonal(4.0)
    targets = {
        "diagonal 0.1": c.Mixed(0.1, diagonal),
        "diagonal 0.4": c.Mixed(0.4, diagonal),
        "up and right": c.Fixed((0.4, 0.4, 0.1, 0.1)),
        "diagonal": Greedy(diagonal),
        "up first": UpFirst(),
    }
    behavior = c.Fixed((0.35, 0.35, 0.15, 0.15))
    return BoardProblem(
        "puddle",
        PuddleWorld(),
        behavior,
        targets,
        0.98,
        100,
        10_000,
        ("diagonal", "up first"),
    )


def _cartpole() -> BoardProblem:
    balance = c.LinearSoftmax((0.5, 1.0, 15.0, 4.0))
    targets = {
        "balance 0.1": c.Mixed(0.1, balance),
        "balance 0.3": c.Mixed(0.3, balance),
        "balance 0.6": c.Mixed(0.6, balance),
        "balance": Greedy(balance),
        "angle": Greedy(c.LinearSoftmax((0.0, 0.0, 1.0, 0.0))),
    }
    behavior = c.Mixed(0.4, c.LinearSoftmax((0.3, 0.5, 10.0, 2.0)))
    return BoardProblem(
        "cartpole",
        CartPole(),
        behavior,
        targets,
        0.99,
        500,
        10_000,
        ("balance", "angle"),
    )


def _pendulum() -> BoardProblem:
    targets = {
        "swing 0.3": Truncated(c.SwingUp(), 0.3),
        "swing 0.8": Truncated(c.SwingUp(), 0.8),
        "weak 0.5": Truncated(c.SwingUp(0.5), 0.5),
        "swing": Still(c.SwingUp()),
        "weak": Still(c.SwingUp(0.4)),
    }
    behavior = Truncated(c.SwingUp(0.7), 0.8, uniform=0.3)
    return BoardProblem(
        "pendulum", Pendulum(), behavior, targets, 0.97, 200, 10_000, ("swing", "weak")
    )


BOARD: dict[str, Callable[[], BoardProblem]] = {
    "graph short": lambda: _graph("graph short", 4, True, 0.2, 0.0, 1024),
    "graph long, noisy": lambda: _graph("graph long, noisy", 16, True, 0.6, 1.0, 4096),
    "graph long, sparse": lambda: _graph(
        "graph long, sparse", 16, False, 0.6, 0.0, 4096
    ),
    "grid": _grid,
    "puddle": _puddle,
    "cartpole": _cartpole,
    "pendulum": _pendulum,
}


def print_problem(problem: Any) -> None:
    """Rows, episodes, the log's own return and the truths."""
    log = problem.log(0)
    returns = log.returns(problem.gamma)
    print(
        f"{problem.name}: {len(log)} rows, {log.n_episodes} episodes, γ ="
        f" {problem.gamma}",
        end="",
    )
    print(
        f", the log's own return {returns.mean():.4g} ±"
        f" {returns.std() / len(returns) ** 0.5:.2g}"
    )
    for name in problem.targets:
        value, error = problem.truth(name)
        print(f"    {name:<18}{value:>9.4g} ± {error:.2g}", flush=True)


if __name__ == "__main__":
    for make in BOARD.values():
        print_problem(make())
