"""True values of a policy at given states: the paper's coarse grid, and Monte Carlo with standard errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Shaped

from koffline.envs.boxes import BoxWorld
from koffline.envs.grids import discretise
from koffline.envs.rollouts import play

_CHUNK = 250_000  # copies of the world played together
_CUT = 1e-4  # returns are cut where gamma^t falls below

Probabilities = Callable[[np.ndarray], np.ndarray]  # observations (N, d) -> (N, A)
Points = Shaped[np.ndarray, "row 2"]


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
        returns = np.zeros(copies * count)
        start = np.tile(np.asarray(states, dtype=np.float64), (copies, 1))
        for t, step in enumerate(play(world, policy, start, horizon, generator)):
            returns[step.index] += gamma**t * step.reward
        table = returns.reshape(copies, count)
        sums += table.sum(axis=0)
        squares += (table**2).sum(axis=0)
        done += copies
    means = sums / repeats
    spread = np.maximum(squares / repeats - means**2, 0.0) * repeats / (repeats - 1)
    return StateValues(means, np.sqrt(spread / repeats))
