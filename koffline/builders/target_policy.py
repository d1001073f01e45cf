"""Target policies of the worlds: value iteration on a grid, made stochastic by a softmax."""

from __future__ import annotations

import numpy as np

from koffline.envs.boxes import make_world
from koffline.envs.finite import value_iteration
from koffline.envs.grids import discretise
from koffline.errors import ConfigError
from koffline.policies.grid_policy import GridPolicy

SHAPE = (40, 40)
SAMPLES = 32
# Good but stochastic: entropies of 0.42, 0.49 and 0.62 of the largest, on average over the states.
TEMPERATURES = {"puddle_world": 0.3, "cart_pole": 0.003, "mountain_car": 0.1}
_SEED = 20190533


def learn_grid_policy(world_name: str, gamma: float = 0.98, temperature: float | None = None) -> GridPolicy:
    """Value iteration on a 40×40 grid of the world, interpolated; π ∝ exp(Q / temperature). Deterministic."""
    world = make_world(world_name)
    chosen = TEMPERATURES[world_name] if temperature is None else temperature
    if not 0.0 < chosen < float("inf"):
        raise ConfigError(f"temperature is {chosen}; give a positive number")
    grid = discretise(world, SHAPE, np.random.default_rng(_SEED), SAMPLES, interpolate=True)
    action_values = value_iteration(grid.mdp, gamma)[:-1].reshape(*SHAPE, -1)
    # Sums differ in their last bits with the processor and the number of threads; rounded values do not.
    return GridPolicy(grid.low, grid.high, np.round(action_values, 6), chosen)
