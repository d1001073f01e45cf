"""The benchmark's evaluation problems: log, held-out tuples, two truths, and the
measures on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.random import Generator
from torch import Tensor

from koffline.batches import Table
from koffline.builders.uniform import (
    discounted_returns,
    draw_tuples,
    learn_grid_policy,
    learn_softmax_policy,
    random_policy,
)
from koffline.envs.boxes import BoxWorld, Tuples, make_world
from koffline.envs.finite import discretise
from koffline.experiments.result_files import digest_of, read_result, write_result
from koffline.kernel_loss import state_value_residual, u_statistic
from koffline.kernels import Gaussian
from koffline.policies import GridPolicy
from koffline.replicas import StackedMLP

FORMAT = 2  # version of the files; part of the digest
GAMMA = 0.98  # (Feng et al. 2019, sec:exp_eval)
MEASURES = (
    "mse_monte_carlo",
    "mse_paper",
    "bellman_error",
    "kernel_loss",
    "l2_loss",
    "largest_value",
)
_BACKUP_STATES = 500
_BACKUP_DRAWS = 8
_GRID_SAMPLES = 256
_CHUNK = 250_000  # copies of the world that are stepped together
_CUT = 1e-4  # returns are cut where gamma^t falls below this
_JUDGE = Gaussian(0.5)  # one kernel judges all methods and settings
_LOSS_ROWS = 2000

Column = Float[np.ndarray, " row"]
Points = Float[np.ndarray, "row 2"]
Probabilities = Callable[[np.ndarray], np.ndarray]  # observations (N, d) -> (N, A)


# other fields of a world, as (name, value)
Overrides: TypeAlias = tuple[tuple[str, float | str], ...]


@dataclass(frozen=True)
class ProblemSettings:
    """Settings of a problem: world, noise (None: the world's own), number of tuples,
    seed.

    overrides: other fields of the world, as (name, value) pairs.
    """

    world: str
    noise: float | None = None
    overrides: Overrides = ()
    rows: int = 5000
    held_out_rows: int = 2000
    truth_repeats: int = 200
    seed: int = 0

    @property
    def name(self) -> str:
        """Short unique name: world and a digest of all settings."""
        return f"problem-{self.world}-{digest_of(FORMAT, self)}"

    def build_world(self) -> BoxWorld:
        """The world with its noise."""
        changes: dict[str, Any] = dict(self.overrides)
        if self.noise is not None:
            changes["noise"] = self.noise
        return replace(make_world(self.world), **changes)

    def target_policy(self) -> Probabilities:
        """The policy to evaluate: the world's usual one, whatever the noise and the
        other fields.
        """
        return _usual_policy(self.world)


@dataclass(frozen=True)
class SoftmaxProblem(ProblemSettings):
    """A problem whose target policy has a temperature of its own; infinite: the random
    policy.

    The policy is learned in the world with its usual noise and the overridden fields. A
    record of its own, because a new field in `ProblemSettings` would rename all
    problems that lie in users' folders.
    """

    temperature: float = 1.0

    def target_policy(self) -> Probabilities:
        """π ∝ exp(Q / temperature), Q optimal in the world with its usual noise."""
        if math.isinf(self.temperature):
            return random_policy(self.build_world())
        return replace(
            _softmax_policy(self.world, self.overrides), temperature=self.temperature
        )


@cache
def _usual_policy(world: str) -> GridPolicy:
    return learn_grid_policy(world)


@cache
def _softmax_policy(world: str, overrides: Overrides) -> GridPolicy:
    """The policy of temperature one: another temperature needs no new Q."""
    changes: dict[str, Any] = dict(overrides)
    return learn_softmax_policy(replace(make_world(world), **changes), temperature=1.0)


@dataclass(frozen=True, eq=False)
class Scaling:
    """The affine map from states in native units to inputs of networks and kernels."""

    centre: Float[np.ndarray, " dimension"]
    spread: Float[np.ndarray, " dimension"]

    @classmethod
    def to_unit_square(cls, world: BoxWorld) -> Scaling:
        """The map of the world's box onto [0, 1]^d."""
        low = np.asarray(world.low)
        high = np.asarray(world.high)
        return cls(centre=low, spread=high - low)

    @classmethod
    def to_z_scores(cls, states: Points) -> Scaling:
        """The map that gives these states mean zero and standard deviation one on each
        axis.
        """
        return cls(centre=states.mean(axis=0), spread=states.std(axis=0))

    def __call__(self, states: np.ndarray) -> np.ndarray:
        """Inputs (…, d) of states (…, d)."""
        return (np.asarray(states, dtype=np.float64) - self.centre) / self.spread


def scaling_of(name: str, problem: Problem) -> Scaling:
    """The scaling by its name: "unit", the unit square, or "z", z-scores of the log's
    states.
    """
    if name == "unit":
        return Scaling.to_unit_square(problem.world)
    assert name == "z"
    return Scaling.to_z_scores(problem.log.states)


def as_table(
    tuples: Tuples,
    world: BoxWorld,
    reward_scale: float = 1.0,
    scaling: Scaling | None = None,
) -> Table:
    """Scaled states (None: on the unit square), rewards divided by ``reward_scale``,
    single precision.
    """
    scale = scaling or Scaling.to_unit_square(world)
    states = _tensor(scale(tuples.states))
    following = _tensor(scale(tuples.next_states))
    discounts = _tensor(GAMMA * ~tuples.terminated)
    rewards = _tensor(tuples.rewards / reward_scale)
    return Table(states, following, rewards, discounts, kernel_inputs=states)


@dataclass(frozen=True, eq=False)
class Backups:
    """Rewards and next states drawn for all actions in some of the log's states, to
    estimate E[r + γV(s')|s].

    Actions are averaged exactly (weights π(a|s)). The draws form two independent
    halves, so that the product of a state's two residuals is an unbiased estimate of
    its squared Bellman error.
    """

    states: Points  # (M, 2)
    weights: Float[np.ndarray, "row action"]
    rewards: Float[np.ndarray, "row action draw"]
    next_states: Float[np.ndarray, "row action draw 2"]
    terminated: Bool[np.ndarray, "row action draw"]


@dataclass(frozen=True, eq=False)
class StateValues:
    """V^π at n states, and the standard errors of the estimates (zero for a grid)."""

    values: Float[np.ndarray, " row"]
    standard_errors: Float[np.ndarray, " row"]

    @property
    def noise(self) -> float:
        """Mean squared standard error, i.e. what errors of the truth add to a mean
        squared error.
        """
        return float(np.mean(self.standard_errors**2))

    @property
    def variance(self) -> float:
        """Variance of V^π over the states, noise subtracted; the mean squared error of
        the best constant.
        """
        return float(self.values.var()) - self.noise


@dataclass(frozen=True, eq=False)
class Problem:
    """An evaluation problem, built by `build_problem`; the same settings give the same
    numbers.
    """

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

    @staticmethod
    def write(path: Path, settings: ProblemSettings) -> None:
        """Build a problem and write its arrays to an .npz."""
        built = build_problem(settings)
        write_result(path, {name: vars(getattr(built, name)) for name in _PARTS})

    @classmethod
    def load(cls, path: Path, settings: ProblemSettings) -> Problem:
        """Read what `write` wrote for these settings.

        Raises ConfigError if the file is damaged.
        """
        return read_result(
            path,
            lambda **parts: cls(
                settings, **{name: kind(**parts[name]) for name, kind in _PARTS.items()}
            ),
        )


_PARTS: dict[str, Any] = {
    "log": Tuples,
    "held_out": Tuples,
    "backups": Backups,
    "paper": StateValues,
    "monte_carlo": StateValues,
}


def build_problem(settings: ProblemSettings) -> Problem:
    """Learn the target policy, draw the logs, compute both truths.

    Takes up to a minute.
    """
    world = settings.build_world()
    policy = settings.target_policy()
    streams = [
        np.random.default_rng(s) for s in np.random.SeedSequence(settings.seed).spawn(5)
    ]
    log = draw_tuples(world, policy, settings.rows, streams[0])
    states = log.states[:_BACKUP_STATES]
    shape = (len(states), world.n_actions, _BACKUP_DRAWS)
    actions = np.tile(np.repeat(np.arange(shape[1]), shape[2]), shape[0])
    outcome = world.step(
        np.repeat(states, math.prod(shape[1:]), axis=0), actions, streams[2]
    )
    backups = Backups(
        states,
        policy(world.observe(states)).astype(np.float64),
        outcome.reward.reshape(shape),
        outcome.state.reshape((*shape, 2)),
        outcome.terminated.reshape(shape),
    )
    return Problem(
        settings,
        log,
        draw_tuples(world, policy, settings.held_out_rows, streams[1]),
        backups,
        grid_values(world, policy, log.states, GAMMA, streams[3], _GRID_SAMPLES),
        monte_carlo_values(
            world, policy, log.states, GAMMA, streams[4], settings.truth_repeats
        ),
    )


def grid_values(
    world: BoxWorld,
    policy: Probabilities,
    states: Points,
    gamma: float,
    generator: Generator,
    samples: int,
) -> StateValues:
    """The paper's truth: exact values of the policy on its coarse grid, looked up at
    each state's cell.

    samples: transitions drawn per cell.
    (Feng et al. 2019, sec:exp_eval)
    """
    grid = discretise(world, world.grid, generator, samples)
    table = policy(world.observe(grid.centres))
    table = np.vstack([table, np.full((1, table.shape[1]), 1.0 / table.shape[1])])
    values = grid.mdp.state_values(table, gamma)[grid.cell_of(states)]
    return StateValues(values, np.zeros_like(values))


def monte_carlo_values(
    world: BoxWorld,
    policy: Probabilities,
    states: Points,
    gamma: float,
    generator: Generator,
    repeats: int,
) -> StateValues:
    """Mean discounted return of ``repeats`` ≥ 2 rollouts from every state, truncated
    where gamma^t < 1e-4.
    """
    horizon = math.ceil(math.log(_CUT) / math.log(gamma))
    count = len(states)
    sums = np.zeros(count)
    squares = np.zeros(count)
    together = max(1, _CHUNK // count)
    for done in range(0, repeats, together):
        copies = min(together, repeats - done)
        table = discounted_returns(
            world, policy, states, gamma, generator, copies, horizon
        )
        sums += table.sum(axis=0)
        squares += (table**2).sum(axis=0)
    means = sums / repeats
    spread = np.maximum(squares / repeats - means**2, 0.0) * repeats / (repeats - 1)
    return StateValues(means, np.sqrt(spread / repeats))


class Metrics:
    """Callable as a probe of `fitting.fit`: (step, network) -> (R, len(MEASURES)), in
    native reward units.

    scaling: the inputs that the network takes; None: the unit square. The kernel that
    judges sees the unit square always, so that its losses are comparable.

    The noise of the truth (its mean squared standard error) is subtracted from the
    errors against Monte Carlo. The squared Bellman error is unbiased and may be
    slightly negative.
    """

    def __init__(
        self, problem: Problem, reward_scale: float, scaling: Scaling | None = None
    ) -> None:
        world = problem.world
        backups = problem.backups
        square = Scaling.to_unit_square(world)  # of what the judging kernel sees
        scale = scaling or square  # of what the network sees
        self._scale = reward_scale
        self._noise = problem.monte_carlo.noise
        self._table = as_table(problem.log, world, scaling=scale)
        self._held_out = as_table(problem.held_out, world, scaling=scale)
        self._truths = [
            _tensor(truth.values) for truth in (problem.monte_carlo, problem.paper)
        ]
        self._gram = _JUDGE.gram(_tensor(square(problem.log.states[:_LOSS_ROWS])))
        self._held_out_judged = _tensor(square(problem.held_out.states))
        self._states = _tensor(scale(backups.states))
        self._following = _tensor(scale(backups.next_states.reshape(-1, 2)))
        self._rewards = _tensor(backups.rewards)
        self._discounts = _tensor(GAMMA * ~backups.terminated)
        self._weights = _tensor(backups.weights)

    def __call__(self, step: int, network: StackedMLP) -> Tensor:
        """Measures (R, len(MEASURES)); NaN for diverged replicas."""
        table = self._table
        rows = slice(0, _LOSS_ROWS)
        value = self._values(network, table.inputs)
        following = self._values(network, table.next_inputs[rows])
        errors = [(value - truth).square().mean(dim=1) for truth in self._truths]
        errors[0] = errors[0] - self._noise
        rewards = table.rewards[rows].expand_as(following)
        discounts = table.discounts[rows].expand_as(following)
        residual = state_value_residual(rewards, discounts, value[:, rows], following)
        kernel = ((residual @ self._gram) * residual).mean(dim=1) / residual.shape[1]
        losses = (kernel, residual.square().mean(dim=1))
        return torch.stack(
            [*errors, self._bellman_error(network), *losses, value.abs().amax(dim=1)],
            dim=1,
        )

    def _values(
        self, network: StackedMLP, states: Tensor
    ) -> Float[Tensor, "replica row"]:
        return network.forward(states).squeeze(-1) * self._scale

    def _bellman_error(self, network: StackedMLP) -> Float[Tensor, " replica"]:
        """Mean over states of (B₁V − V)(B₂V − V), with the two backups from independent
        draws.
        """
        value = self._values(network, self._states)
        # (R, M, A, K)
        following = self._values(network, self._following).unflatten(
            1, self._rewards.shape
        )
        backups = self._rewards + self._discounts * following
        errors = [
            (half.mean(dim=-1) * self._weights).sum(dim=-1) - value
            for half in backups.chunk(2, dim=-1)
        ]
        return (errors[0] * errors[1]).mean(dim=1)

    @torch.no_grad()
    def values_at_backups(
        self, network: StackedMLP
    ) -> Float[np.ndarray, "replica row"]:
        """Values at the states of the backups, which are the log's first ones, in
        native reward units.
        """
        return self._values(network, self._states).numpy()

    @torch.no_grad()
    def held_out_loss(self, network: StackedMLP) -> Float[np.ndarray, " replica"]:
        """Kernel loss (U-statistic, bandwidth 0.5) on held-out tuples; needs no true
        values.
        """
        table = self._held_out
        value = network.forward(table.inputs).squeeze(-1).double() * self._scale
        following = (
            network.forward(table.next_inputs).squeeze(-1).double() * self._scale
        )
        rewards = table.rewards.double().expand_as(value)
        discounts = table.discounts.double().expand_as(value)
        residual = state_value_residual(rewards, discounts, value, following)
        return u_statistic(
            residual, _JUDGE.gram(self._held_out_judged.double())
        ).numpy()


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).float()


def to_unit_square(world: BoxWorld, states: np.ndarray) -> np.ndarray:
    """Map states from native units to [0, 1]^d."""
    return Scaling.to_unit_square(world)(states)
