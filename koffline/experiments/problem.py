"""A policy-evaluation problem of the paper with everything that its methods share: log, judges, true values.

True values come from the paper's coarse grid, and from Monte Carlo with standard errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from koffline.batches import Table
from koffline.builders.uniform import draw_uniform_tuples, learn_grid_policy
from koffline.envs.boxes import BoxWorld, make_world, to_unit_square
from koffline.envs.grids import discretise
from koffline.envs.world import discounted_returns
from koffline.errors import ConfigError
from koffline.untrusted.arrays import read_arrays

GAMMA = 0.98  # (Feng et al. 2019, sec:exp_eval)
_BACKUP_STATES, _BACKUP_DRAWS = 500, 8

Column = Float[np.ndarray, " row"]
Points = Float[np.ndarray, "row 2"]
_CHUNK = 250_000  # copies of the world played together
_CUT = 1e-4  # returns are cut where gamma^t falls below
Probabilities = Callable[[np.ndarray], np.ndarray]  # observations (N, d) -> (N, A)


@dataclass(frozen=True)
class ProblemSettings:
    """What the problem is: world, noise (None: the world's own), tuples, seed of everything drawn.

    overrides: other fields of the world, as (name, value) pairs.
    """

    world: str
    noise: float | None = None
    overrides: tuple[tuple[str, Any], ...] = ()
    rows: int = 5000
    held_out_rows: int = 2000
    truth_repeats: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        make_world(self.world)
        if self.rows < 2 or self.held_out_rows < 2 or self.truth_repeats < 2:
            raise ConfigError(f"{self} is too small; give at least two rows and repeats")

    def build_world(self) -> BoxWorld:
        """The world with its noise."""
        changes: dict[str, Any] = dict(self.overrides)
        if self.noise is not None:
            changes["noise"] = self.noise
        world = make_world(self.world)
        return replace(world, **changes) if changes else world  # type: ignore[type-var]


@dataclass(frozen=True, eq=False)
class Tuples:
    """Independent tuples (s, r, s', ended) with s uniform over the state space and a ~ π, in native units."""

    states: Points
    rewards: Column
    next_states: Points
    terminated: Bool[np.ndarray, " row"]

    def table(self, world: BoxWorld, reward_scale: float, gamma: float = GAMMA) -> Table:
        """States on the unit square, rewards divided by ``reward_scale``, single precision."""
        states = torch.from_numpy(to_unit_square(world, self.states)).float()
        following = torch.from_numpy(to_unit_square(world, self.next_states)).float()
        discounts = torch.from_numpy(gamma * ~self.terminated).float()
        rewards = torch.from_numpy(self.rewards / reward_scale).float()
        return Table(states, following, rewards, discounts, kernel_inputs=states)


@dataclass(frozen=True, eq=False)
class Backups:
    """All actions and several draws from some of the log's states: what E[r + γV(s') | s] is computed from.

    Draws are exact in the actions (weights π(a|s)) and come in two independent halves, so that the product
    of the two residuals of a state is an unbiased estimate of its squared Bellman error.
    """

    states: Points  # (M, 2)
    weights: Float[np.ndarray, "row action"]
    rewards: Float[np.ndarray, "row action draw"]
    next_states: Float[np.ndarray, "row action draw 2"]
    terminated: Bool[np.ndarray, "row action draw"]


@dataclass(frozen=True, eq=False)
class Problem:
    """Built once from its settings by `build_problem`; the same settings give the same numbers."""

    settings: ProblemSettings
    log: Tuples
    held_out: Tuples
    backups: Backups
    paper: StateValues
    monte_carlo: StateValues

    @property
    def world(self) -> BoxWorld:
        """The world with its noise."""
        return self.settings.build_world()

    def save(self, path: Path) -> None:
        """Write the arrays to an .npz (the caller makes it atomic)."""
        arrays = {
            f"{part.name}.{name}": column
            for part in fields(self)
            if part.name != "settings"
            for name, column in vars(getattr(self, part.name)).items()
        }
        with path.open("wb") as file:
            np.savez(file, **arrays)

    @classmethod
    def load(cls, path: Path, settings: ProblemSettings) -> Problem:
        """Read what `save` wrote for these settings."""
        parts: dict[str, dict[str, np.ndarray]] = {}
        for name, array in read_arrays(path).items():
            part, _, column = name.partition(".")
            parts.setdefault(part, {})[column] = array
        return cls(
            settings,
            log=Tuples(**parts["log"]),
            held_out=Tuples(**parts["held_out"]),
            backups=Backups(**parts["backups"]),
            paper=StateValues(**parts["paper"]),
            monte_carlo=StateValues(**parts["monte_carlo"]),
        )


def build_problem(settings: ProblemSettings) -> Problem:
    """Learn the target policy, draw the logs, find both truths; some seconds to a minute."""
    world = settings.build_world()
    policy = learn_grid_policy(settings.world)
    streams = [np.random.default_rng(s) for s in np.random.SeedSequence(settings.seed).spawn(5)]
    log = draw_tuples(world, policy, settings.rows, streams[0])
    held_out = draw_tuples(world, policy, settings.held_out_rows, streams[1])
    return Problem(
        settings=settings,
        log=log,
        held_out=held_out,
        backups=_draw_backups(world, policy, log.states[:_BACKUP_STATES], streams[2]),
        paper=grid_values(world, policy, log.states, GAMMA, streams[3]),
        monte_carlo=monte_carlo_values(world, policy, log.states, GAMMA, streams[4], settings.truth_repeats),
    )


def draw_tuples(world: BoxWorld, policy: Probabilities, n: int, generator: np.random.Generator) -> Tuples:
    """n independent tuples of the policy from uniform states."""
    drawn = draw_uniform_tuples(world, policy, n, generator)
    return Tuples(drawn.states, drawn.outcome.reward, drawn.outcome.state, drawn.outcome.terminated)


def _draw_backups(
    world: BoxWorld, policy: Probabilities, states: Points, generator: np.random.Generator
) -> Backups:
    assert world.n_actions is not None
    shape = (len(states), world.n_actions, _BACKUP_DRAWS)
    start = np.repeat(states, math.prod(shape[1:]), axis=0)
    actions = np.tile(np.repeat(np.arange(shape[1]), shape[2]), shape[0])
    outcome = world.step(start, actions, generator)
    return Backups(
        states,
        policy(world.observe(states)).astype(np.float64),
        outcome.reward.reshape(shape),
        outcome.state.reshape(*shape, 2),
        outcome.terminated.reshape(shape),
    )


def to_tensor(array: np.ndarray, dtype: torch.dtype = torch.float32) -> Tensor:
    """The array as a tensor."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(dtype)


@dataclass(frozen=True, eq=False)
class StateValues:
    """V^π at n states and the standard errors of the estimates (zero for a grid)."""

    values: Float[np.ndarray, " row"]
    standard_errors: Float[np.ndarray, " row"]

    @property
    def noise(self) -> float:
        """Mean squared standard error: what the noise of the truth adds to a mean squared error."""
        return float(np.mean(self.standard_errors**2))

    @property
    def variance(self) -> float:
        """Variance of V^π over the states, without the noise: the error of the best constant."""
        return float(self.values.var()) - self.noise


def grid_values(
    world: BoxWorld,
    policy: Probabilities,
    states: Points,
    gamma: float,
    generator: np.random.Generator,
    samples: int = 256,
) -> StateValues:
    """The paper's truth: exact values of the policy on its coarse grid, read off at each state's cell.

    (Feng et al. 2019, sec:exp_eval)
    """
    grid = discretise(world, world.grid, generator, samples, aggregate=True)
    table = policy(world.observe(grid.centres))
    table = np.vstack([table, np.full((1, table.shape[1]), 1.0 / table.shape[1])])
    values = grid.values_at(grid.mdp.state_values(table, gamma), states)
    return StateValues(values, np.zeros_like(values))


def monte_carlo_values(
    world: BoxWorld,
    policy: Probabilities,
    states: Points,
    gamma: float,
    generator: np.random.Generator,
    repeats: int = 200,
) -> StateValues:
    """Mean discounted return of ``repeats`` ≥ 2 rollouts from every state, cut where gamma^t < 1e-4."""
    horizon = math.ceil(math.log(_CUT) / math.log(gamma))
    count = len(states)
    together = max(1, _CHUNK // count)
    sums, squares, done = np.zeros(count), np.zeros(count), 0
    while done < repeats:
        copies = min(together, repeats - done)
        start = np.asarray(states, dtype=np.float64)
        table = discounted_returns(world, policy, start, gamma, generator, copies, horizon)
        sums += table.sum(axis=0)
        squares += (table**2).sum(axis=0)
        done += copies
    means = sums / repeats
    spread = np.maximum(squares / repeats - means**2, 0.0) * repeats / (repeats - 1)
    return StateValues(means, np.sqrt(spread / repeats))
