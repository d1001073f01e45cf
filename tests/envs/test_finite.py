"""Finite processes and grids: values by hand, brute force and rollouts; cells, weights,
transitions.
"""

from itertools import product

import numpy as np
import pytest

from koffline.builders.uniform import discounted_returns
from koffline.envs import finite
from koffline.envs.boxes import WORLDS, PuddleWorld, make_world, uniform_states
from koffline.envs.finite import FiniteMDP, Grid, discretise, value_iteration
from koffline.errors import ConfigError
from scripts.bench.finite_worlds import random_mdp

GAMMA = 0.9


@pytest.fixture
def generator():
    return np.random.default_rng(0)


def two_states() -> FiniteMDP:
    """In 0: action 0 stays for reward 1, action 1 goes to 1 for nothing; state 1
    returns for 2.
    """
    transition = np.array([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [1.0, 0.0]]])
    return FiniteMDP(
        transition,
        np.array([[1.0, 0.0], [2.0, 2.0]]),
        np.zeros(2, bool),
        np.array([1.0, 0.0]),
    )


def test_values_by_hand():
    mdp = two_states()
    stay = np.array([[1.0, 0.0]] * 2)
    leave = np.array([[0.0, 1.0]] * 2)
    assert mdp.policy_value(stay, GAMMA) == pytest.approx(10.0)  # 1 / (1 − 0.9)
    # V0 = 0.9 V1, V1 = 2 + 0.9 V0: V0 = 1.8 / 0.19, V1 = 2 / 0.19
    np.testing.assert_allclose(mdp.state_values(leave, GAMMA), [1.8 / 0.19, 2 / 0.19])
    np.testing.assert_allclose(
        mdp.action_values(stay, GAMMA), [[10.0, 0.9 * 11.0], [11.0, 11.0]]
    )


def test_terminal_state_is_worth_nothing():
    # a coin: end with reward 1 or go on; V = 0.5 + 0.9 · 0.5 V
    moves = np.array([[[0.5, 0.5]], [[0.0, 1.0]]])
    rewards = np.array([[[0.0, 1.0]], [[7.0, 7.0]]])
    mdp = FiniteMDP(moves, rewards, np.array([False, True]), np.array([1.0, 0.0]))
    once = np.ones((2, 1))
    np.testing.assert_allclose(mdp.state_values(once, GAMMA), [0.5 / 0.55, 0.0])
    np.testing.assert_allclose(mdp.action_values(once, GAMMA), [[0.5 / 0.55], [0.0]])


def test_tuples_follow_the_tables(generator):
    mdp = random_mdp(4, 2, generator)
    states = np.array([0.5, 0.5, 0.0, 0.0])
    policy = np.array([[0.2, 0.8]] * 4)
    sample = mdp.sample_transitions(40_000, policy, generator, states)
    assert set(sample.states) == {0, 1}
    pair = (sample.states == 0) & (sample.actions == 1)
    # binomial: 40000 · 0.4 and, within it, each next state, four standard errors
    assert pair.mean() == pytest.approx(0.4, abs=4 * np.sqrt(0.24 / 40_000))
    share = np.bincount(sample.next_states[pair], minlength=4) / pair.sum()
    np.testing.assert_allclose(
        share, mdp.transition[0, 1], atol=4 * 0.5 / np.sqrt(pair.sum())
    )
    np.testing.assert_array_equal(
        sample.rewards, mdp.reward[sample.states, sample.actions, sample.next_states]
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"transition": np.full((1, 1, 1), 0.5)}, "sum one"),
        (
            {"initial": np.full(1, 0.4)},
            "initial over states that are not terminal must be",
        ),
    ],
)
def test_contradictions_are_refused(change, message):
    good = {"transition": np.ones((1, 1, 1)), "initial": np.ones(1)}
    with pytest.raises(ConfigError, match=message):
        FiniteMDP(
            reward=np.ones((1, 1)), terminal=np.zeros(1, bool), **{**good, **change}
        )


def best_values(mdp, gamma):
    """Action values of the best of all deterministic policies, tried one by one."""
    tables = [
        np.eye(mdp.n_actions)[list(policy)]
        for policy in product(range(mdp.n_actions), repeat=mdp.n_states)
    ]
    return np.max([mdp.action_values(table, gamma) for table in tables], axis=0)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("ending", [0.0, 0.2])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.95])
def test_value_iteration_finds_the_best_of_all_policies(seed, ending, gamma):
    mdp = random_mdp(5, 3, np.random.default_rng(seed), branching=3, ending=ending)
    np.testing.assert_allclose(
        value_iteration(mdp, gamma), best_values(mdp, gamma), atol=1e-8
    )


def test_the_tolerance_of_value_iteration_is_kept_and_large_values_do_not_hang():
    mdp = random_mdp(5, 2, np.random.default_rng(1))
    assert (
        np.abs(value_iteration(mdp, 0.99, tolerance=0.1) - best_values(mdp, 0.99)).max()
        <= 0.1
    )
    # values of 1e9 have steps of 1e-7: the tolerance of 1e-8 is out of reach
    large = FiniteMDP(mdp.transition, 1e8 * mdp.reward, mdp.terminal, mdp.initial)
    np.testing.assert_allclose(
        value_iteration(large, 0.9), best_values(large, 0.9), rtol=1e-12
    )


def test_tsitsiklis_and_van_roys_example_by_its_text():
    mdp = finite.tsitsiklis_van_roy()
    only = np.ones((5, 1))
    np.testing.assert_array_equal(mdp.terminal, [False, False, False, False, True])
    np.testing.assert_array_equal(mdp.initial, [0.25, 0.25, 0.25, 0.25, 0.0])
    # the only reward is 1 on leaving the second state, which the first reaches with
    # chance 0.8
    expected = [0.8, 1.0, 0.0, 0.0, 0.0]
    np.testing.assert_allclose(
        mdp.state_values(only, finite.TSITSIKLIS_GAMMA), expected, atol=1e-14
    )
    features = np.asarray(finite.TSITSIKLIS_FEATURES)
    np.testing.assert_allclose(
        features @ finite.TSITSIKLIS_WEIGHTS, expected, atol=1e-14
    )
    # the mean update of TD(0) along (0, 0, 1): 1 · (2 − 1) + 2 · (2 · 0.95 − 2) = 0.8
    # per four states, upward
    update = features[:4].T @ (mdp.transition[:4, 0] @ features - features[:4]) / 4
    assert update[2, 2] == pytest.approx(0.2)


MODES = pytest.mark.parametrize("mode", [{}, {"interpolate": True}], ids=str)


def test_cells_by_hand():
    grid = Grid((0.0, 0.0), (1.0, 1.0), (2, 4))
    expected = [(x, y) for x in (0.25, 0.75) for y in (0.125, 0.375, 0.625, 0.875)]
    np.testing.assert_allclose(grid.centres, expected)
    np.testing.assert_array_equal(grid.cell_of(grid.centres), np.arange(8))
    # the lower border belongs to a cell; the outermost border, and what lies beyond, to
    # the last one
    points = np.array([[0.0, 0.0], [0.5, 0.25], [0.49, 0.24], [1.0, 1.0], [7.0, -7.0]])
    np.testing.assert_array_equal(grid.cell_of(points), [0, 5, 0, 7, 4])


@pytest.mark.parametrize("shape", [(5, 7), (1, 4), (3, 1), (1, 1)])
def test_bilinear_weights_give_bilinear_functions_back(generator, shape):
    low = (-2.0, 1.0)
    high = (3.0, 2.0)
    states = generator.uniform(-3.0, 4.0, size=(300, 2))  # also beyond the box

    def value(x, y):
        return 1.0 + 2.0 * x - 3.0 * y + 0.5 * x * y

    axes = [
        a + (np.arange(n) + 0.5) * (b - a) / n
        for a, b, n in zip(low, high, shape, strict=True)
    ]
    table = value(*np.meshgrid(*axes, indexing="ij")).ravel()
    cells, weights = Grid(low, high, shape).weights_of(states)
    assert weights.min() >= 0.0
    np.testing.assert_allclose(weights.sum(axis=1), 1.0, atol=1e-12)
    inner = [
        np.clip(column, axis[0], axis[-1])
        for column, axis in zip(states.T, axes, strict=True)
    ]
    np.testing.assert_allclose(
        (table[cells] * weights).sum(axis=1), value(*inner), atol=1e-12
    )


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
    np.testing.assert_array_equal(
        grid.mdp.terminal, [*world.is_terminal(grid.centres), True]
    )
    np.testing.assert_allclose(
        grid.mdp.initial[~grid.mdp.terminal], 1.0 / np.sum(~grid.mdp.terminal)
    )


def test_quiet_steps_as_wide_as_a_cell_lead_to_the_next_cell(generator):
    grid = discretise(
        PuddleWorld(noise=0.0), (20, 20), generator, samples=1, interpolate=True
    )
    for action, (dx, dy) in enumerate([(0, 1), (1, 0), (0, -1), (-1, 0)]):
        for cell in range(400):
            x = min(max(cell // 20 + dx, 0), 19)
            y = min(max(cell % 20 + dy, 0), 19)
            # x + y ≥ 1.9 for the centres of these three and more cells; a step into
            # them ends the episode
            to = 400 if x + y + 1 >= 38 else 20 * x + y
            assert grid.mdp.transition[cell, action, to] == pytest.approx(1.0)
    # 0.225 + 0.05 is in no puddle; (0.225, 0.775) is 0.025 from the centre line
    assert grid.mdp.reward[20 * 4 + 14, 0, 0] == pytest.approx(-1.0 - 400.0 * 0.075)
    assert grid.mdp.reward[0, 0, 0] == -1.0


def test_starts_spread_over_the_cell_or_at_its_centre(generator):
    quiet = PuddleWorld(noise=0.0)
    samples = 4000
    spread = discretise(quiet, (5, 1), generator, samples=samples)
    # a step of 0.05 to the right leaves a cell of width 0.2 from a quarter of it
    assert spread.mdp.transition[1, 1, 2] == pytest.approx(
        0.25, abs=4 * np.sqrt(0.1875 / samples)
    )
    between = discretise(quiet, (5, 1), generator, samples=4, interpolate=True)
    np.testing.assert_allclose(
        between.mdp.transition[1, 1, [1, 2]], [0.75, 0.25], atol=1e-12
    )


def test_a_finer_grid_comes_nearer_to_rollouts(generator):
    """Values of the uniform policy, γ = 0.9, in a world noisy enough for a coarse grid
    to see it move.
    """
    world = PuddleWorld(noise=0.03)
    gamma = 0.9
    repeats = 400
    states = uniform_states(world, 60, generator)
    uniform = lambda rows: np.full((len(rows), 4), 0.25)  # noqa: E731
    table = discounted_returns(world, uniform, states, gamma, generator, repeats, 100)
    truth = table.mean(axis=0)
    noise = table.var(axis=0, ddof=1) / repeats
    errors = []
    for count in (6, 12, 24):
        grid = discretise(
            world, (count, count), generator, samples=128, interpolate=True
        )
        cells, weights = grid.weights_of(states)
        values = grid.mdp.state_values(np.full((count**2 + 1, 4), 0.25), gamma)[cells]
        errors.append(np.mean(((values * weights).sum(axis=1) - truth) ** 2))
    assert errors[0] > 2 * errors[1] > 4 * errors[2]
    # what is left is the noise of the rollouts and 1 % of the variance of the values
    assert errors[2] < 2 * noise.mean() + 0.01 * truth.var()
