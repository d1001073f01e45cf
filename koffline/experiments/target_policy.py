"""The policies whose values the benchmark asks for: optimal on a grid, made stochastic by a softmax."""

from __future__ import annotations

import numpy as np

from koffline.envs.boxes import make_world
from koffline.envs.grids import discretise
from koffline.envs.planning import value_iteration
from koffline.policies.grid_policy import GridPolicy

SHAPE = (40, 40)
SAMPLES = 32
TEMPERATURES = {"puddle_world": 0.3, "cart_pole": 0.003, "mountain_car": 0.1}
_SEED = 20190533


def learn_target_policy(world_name: str, gamma: float = 0.98) -> GridPolicy:
    """Value iteration on a 40×40 grid of the world, interpolated, π ∝ exp(Q / temperature); deterministic."""
    world = make_world(world_name)
    grid = discretise(world, SHAPE, np.random.default_rng(_SEED), SAMPLES, interpolate=True)
    action_values = value_iteration(grid.mdp, gamma)[:-1].reshape(*SHAPE, -1)
    return GridPolicy(grid.low, grid.high, action_values, TEMPERATURES[world_name])
