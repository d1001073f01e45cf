"""Grids over continuous worlds: cells and weights by hand, transitions by hand, values against rollouts."""

from __future__ import annotations

import numpy as np
import pytest

from koffline.builders.uniform import discounted_returns
from koffline.envs.boxes import WORLDS, PuddleWorld, make_world, uniform_states
from koffline.envs.finite import Grid, discretise

MODES = pytest.mark.parametrize("mode", [{}, {"interpolate": True}], ids=str)


@pytest.fixture
def generator():
    return np.random.default_rng(0)


def test_cells_by_hand():
    grid = Grid((0.0, 0.0), (1.0, 1.0), (2, 4))
    expected = [(x, y) for x in (0.25, 0.75) for y in (0.125, 0.375, 0.625, 0.875)]
    np.testing.assert_allclose(grid.centres, expected)
    np.testing.assert_array_equal(grid.cell_of(grid.centres), np.arange(8))
    # the lower border belongs to a cell; the outermost border, and what lies beyond, to the last one
    points = np.array([[0.0, 0.0], [0.5, 0.25], [0.49, 0.24], [1.0, 1.0], [7.0, -7.0]])
    np.testing.assert_array_equal(grid.cell_of(points), [0, 5, 0, 7, 4])
    np.testing.assert_allclose(grid.cell_size, [0.5, 0.25])


@pytest.mark.parametrize("shape", [(5, 7), (1, 4), (3, 1), (1, 1)])
def test_bilinear_weights_give_bilinear_functions_back(generator, shape):
    low, high = (-2.0, 1.0), (3.0, 2.0)
    states = generator.uniform(-3.0, 4.0, size=(300, 2))  # also beyond the box

    def value(x, y):
        return 1.0 + 2.0 * x - 3.0 * y + 0.5 * x * y

    axes = [a + (np.arange(n) + 0.5) * (b - a) / n for a, b, n in zip(low, high, shape, strict=True)]
    table = value(*np.meshgrid(*axes, indexing="ij")).ravel()
    cells, weights = Grid(low, high, shape).weights_of(states)
    assert weights.min() >= 0.0
    np.testing.assert_allclose(weights.sum(axis=1), 1.0, atol=1e-12)
    inner = [np.clip(column, axis[0], axis[-1]) for column, axis in zip(states.T, axes, strict=True)]
    np.testing.assert_allclose((table[cells] * weights).sum(axis=1), value(*inner), atol=1e-12)


@MODES
@pytest.mark.parametrize("name", WORLDS)
def test_every_row_is_a_distribution(name, mode, generator):
    world = make_world(name)
    grid = discretise(world, (7, 6), generator, samples=9, **mode)
    table = grid.mdp.transition
    assert table.shape == (43, world.n_actions, 43)
    assert table.min() >= 0.0
    np.testing.assert_allclose(table.sum(axis=2), 1.0, atol=1e-12)
    np.testing.assert_array_equal(table[42, :, 42], 1.0)
    np.testing.assert_array_equal(grid.mdp.terminal, [*world.is_terminal(grid.centres), True])
    np.testing.assert_allclose(grid.mdp.initial[~grid.mdp.terminal], 1.0 / np.sum(~grid.mdp.terminal))


def test_quiet_steps_as_wide_as_a_cell_lead_to_the_next_cell(generator):
    grid = discretise(PuddleWorld(noise=0.0), (20, 20), generator, samples=1, interpolate=True)
    for action, (dx, dy) in enumerate([(0, 1), (1, 0), (0, -1), (-1, 0)]):
        for cell in range(400):
            x, y = min(max(cell // 20 + dx, 0), 19), min(max(cell % 20 + dy, 0), 19)
            # x + y ≥ 1.9 for the centres of these three and more cells; a step into them ends the episode
            to = 400 if x + y + 1 >= 38 else 20 * x + y
            assert grid.mdp.transition[cell, action, to] == pytest.approx(1.0)
    # 0.225 + 0.05 is in no puddle; (0.225, 0.775) is 0.025 from the centre line
    assert grid.mdp.reward[20 * 4 + 14, 0, 0] == pytest.approx(-1.0 - 400.0 * 0.075)
    assert grid.mdp.reward[0, 0, 0] == -1.0


def test_starts_spread_over_the_cell_or_at_its_centre(generator):
    quiet, samples = PuddleWorld(noise=0.0), 4000
    spread = discretise(quiet, (5, 1), generator, samples=samples)
    # a step of 0.05 to the right leaves a cell of width 0.2 from a quarter of it
    assert spread.mdp.transition[1, 1, 2] == pytest.approx(0.25, abs=4 * np.sqrt(0.1875 / samples))
    between = discretise(quiet, (5, 1), generator, samples=4, interpolate=True)
    np.testing.assert_allclose(between.mdp.transition[1, 1, [1, 2]], [0.75, 0.25], atol=1e-12)


def test_a_finer_grid_comes_nearer_to_rollouts(generator):
    """Values of the uniform policy, γ = 0.9, in a world noisy enough for a coarse grid to see it move."""
    world, gamma, repeats = PuddleWorld(noise=0.03), 0.9, 400
    states = uniform_states(world, 60, generator)
    uniform = lambda rows: np.full((len(rows), 4), 0.25)  # noqa: E731
    table = discounted_returns(world, uniform, states, gamma, generator, repeats, 100)
    truth, noise = table.mean(axis=0), table.var(axis=0, ddof=1) / repeats
    errors = []
    for count in (6, 12, 24):
        grid = discretise(world, (count, count), generator, samples=128, interpolate=True)
        cells, weights = grid.weights_of(states)
        values = grid.mdp.state_values(np.full((count**2 + 1, 4), 0.25), gamma)[cells]
        errors.append(np.mean(((values * weights).sum(axis=1) - truth) ** 2))
    assert errors[0] > 2 * errors[1] > 4 * errors[2]
    # what is left is the noise of the rollouts and 1 % of the variance of the values
    assert errors[2] < 2 * noise.mean() + 0.01 * truth.var()
