"""Truths against exact values: a world that is a finite chain in disguise, and a one-line world."""

from dataclasses import dataclass

import numpy as np
import pytest

from koffline.envs.boxes import BoxWorld, make_world
from koffline.envs.world import Outcome
from koffline.experiments.problem import grid_values, monte_carlo_values


@dataclass(frozen=True)
class Corridor(BoxWorld):
    """Cells 0 … 4 along the first axis; action 1 moves right with probability 0.8; the last cell ends."""

    noise: float = 0.0
    low, high, grid = (0.0, 0.0), (5.0, 1.0), (5, 1)
    reward_scale, n_actions = 1.0, 2

    def reset(self, n, generator):
        return np.full((n, 2), 0.5)

    def step(self, state, action, generator):
        moved = (generator.random(len(state)) < 0.8) & (action == 1)
        following = state + np.stack([moved, np.zeros(len(state))], axis=1)
        return Outcome(following, -1.0 - state[:, 0] // 1, self.is_terminal(following))

    def is_terminal(self, state):
        return state[:, 0] >= 4.0


def half(observations):
    return np.full((len(observations), 2), 0.5)


def exact(gamma):
    """V of cells 0 … 3 by hand: −1 − i + γ (0.4 V(i + 1) + 0.6 V(i))."""
    values = [0.0]
    for cell in (3, 2, 1, 0):
        values.append((-1.0 - cell + gamma * 0.4 * values[-1]) / (1.0 - gamma * 0.6))
    return np.array(values[:0:-1])


STATES = np.array([[0.5, 0.2], [1.5, 0.9], [2.5, 0.5], [3.5, 0.1]])


def test_the_grid_is_exact_where_cells_are_states():
    found = grid_values(Corridor(), half, STATES, 0.9, np.random.default_rng(0), samples=20_000)
    np.testing.assert_allclose(found.values, exact(0.9), atol=0.15)
    assert found.noise == 0.0


def test_monte_carlo_agrees_within_its_standard_errors():
    found = monte_carlo_values(Corridor(), half, STATES, 0.9, np.random.default_rng(0), repeats=4000)
    distance = (found.values - exact(0.9)) / found.standard_errors
    assert np.abs(distance).max() < 4.0  # four standard errors; one in 4000 such tests of four states fails
    assert np.all(found.standard_errors < 0.2)


def test_standard_errors_are_those_of_the_mean():
    """Means of independent repetitions scatter by the reported error."""
    generator = np.random.default_rng(1)
    runs = [monte_carlo_values(Corridor(), half, STATES, 0.9, generator, repeats=50) for _ in range(200)]
    scatter = np.std([run.values for run in runs], axis=0, ddof=1)
    reported = np.mean([run.standard_errors for run in runs], axis=0)
    np.testing.assert_allclose(scatter, reported, rtol=0.2)  # 200 draws: a standard error of 5 %


def test_variance_leaves_the_noise_out():
    generator = np.random.default_rng(2)
    noisy = monte_carlo_values(Corridor(), half, np.repeat(STATES, 4000, axis=0), 0.9, generator, repeats=3)
    assert noisy.variance == pytest.approx(exact(0.9).var(), rel=0.15)  # three standard errors
    assert noisy.values.var() > 1.5 * noisy.variance


@pytest.mark.parametrize("name", ["puddle_world", "cart_pole", "mountain_car"])
def test_both_truths_of_a_world_are_near_each_other(name):
    world = make_world(name)
    generator = np.random.default_rng(0)
    states = generator.uniform(world.low, world.high, size=(60, 2))
    states = states[~world.is_terminal(states)]

    def uniform(observations):
        return np.full((len(observations), world.n_actions), 1.0 / world.n_actions)

    paper = grid_values(world, uniform, states, 0.98, generator, samples=64)
    sampled = monte_carlo_values(world, uniform, states, 0.98, generator, repeats=100)
    assert np.corrcoef(paper.values, sampled.values)[0, 1] > 0.8
