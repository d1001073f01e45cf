"""The Graph against its formula, the drawn grid by hand, Tsitsiklis and Van Roy's example by its text."""

import numpy as np
import pytest

from koffline.envs.finite import FiniteMDP
from koffline.envs.finite_worlds import (
    GRIDWORLD,
    TSITSIKLIS_FEATURES,
    TSITSIKLIS_GAMMA,
    TSITSIKLIS_WEIGHTS,
    graph,
    graph_world,
    grid_world,
    gridworld,
    tsitsiklis_van_roy,
)
from koffline.errors import ConfigError


def constant(mdp: FiniteMDP, chances: list[float]) -> np.ndarray:
    return np.tile(chances, (mdp.n_states, 1))


def test_the_known_value_of_the_graph():
    mdp = graph(4)
    assert mdp.policy_value(constant(mdp, [0.8, 0.2]), 0.98) == pytest.approx(1.164, abs=5e-4)


@pytest.mark.parametrize("length", [1, 4, 16])
@pytest.mark.parametrize("slip", [0.0, 0.25])
@pytest.mark.parametrize("first", [0.2, 0.5, 1.0])
def test_the_graph_against_its_formula(length, slip, first):
    gamma, table = 0.9, [first, 1.0 - first]
    gain = 2.0 * (first * (1.0 - slip) + (1.0 - first) * slip) - 1.0
    dense, sparse = graph(length, True, slip), graph(length, False, slip)
    discounted = gain * (1.0 - gamma**length) / (1.0 - gamma)
    assert dense.policy_value(constant(dense, table), gamma) == pytest.approx(discounted, abs=1e-12)
    assert sparse.policy_value(constant(sparse, table), gamma) == pytest.approx(
        gain * gamma ** (length - 1), abs=1e-12
    )


def test_a_policy_that_looks_at_the_side_of_the_graph():
    # Start and upper nodes: action 0; lower nodes: action 1. Step 1: +0.5; after an upper node +0.5, after a
    # lower one −0.5: step 2 pays 0.75 · 0.5 − 0.25 · 0.5 = 0.25.
    mdp = graph(2)
    table = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.5, 0.5], [0.5, 0.5]])
    assert mdp.policy_value(table, 0.5) == pytest.approx(0.5 + 0.5 * 0.25)


def test_episodes_of_the_graph_have_its_length():
    world, generator = graph_world(5), np.random.default_rng(0)
    sample = world.mdp.sample_episodes(7, constant(world.mdp, [0.5, 0.5]), 99, generator)
    assert len(sample) == 35
    assert sample.terminated.sum() == 7
    assert not sample.truncated.any()
    assert np.array_equal(world.coordinates[[0, 1, 2, 9, 10]], [[0, 0], [0.2, 1], [0.2, -1], [1, 1], [1, -1]])


def test_steps_of_a_drawn_grid_by_hand():
    mdp = gridworld(("s.", "hg"), slip=0.0)
    assert np.array_equal(mdp.transition[0, :, :].argmax(axis=1), [0, 1, 2, 0])  # up, right, down, left
    assert np.array_equal(mdp.reward[0, 0], [-0.1, -0.1, -1.0, 4.0])
    assert np.array_equal(mdp.terminal, [False, False, False, True])
    right_then_down = np.zeros((4, 4))
    right_then_down[[0, 1, 2, 3], [1, 2, 0, 0]] = 1.0
    assert mdp.policy_value(right_then_down, 0.5) == pytest.approx(-0.1 + 0.5 * 4.0)
    slippery = gridworld(("s.", "hg"), slip=0.4)
    assert np.allclose(slippery.transition[0, 1], [0.2, 0.7, 0.1, 0.0])


def test_the_default_grid_has_its_starts_and_one_goal():
    mdp = gridworld()
    assert mdp.n_states == 64
    assert np.count_nonzero(mdp.initial) == "".join(GRIDWORLD).count("s") == 7
    assert mdp.terminal.nonzero()[0].tolist() == [63]
    assert grid_world().coordinates[63].tolist() == [0.875, 0.875]


@pytest.mark.parametrize("rows", [(), ("s.", "g"), ("s?", ".g"), ("..", ".g"), ("s.", "..")])
def test_grids_that_cannot_be_are_refused(rows):
    with pytest.raises(ConfigError, match="draw"):
        gridworld(rows)


def test_graphs_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="length is 0"):
        graph(0)
    with pytest.raises(ConfigError, match="give a probability"):
        graph(2, slip=1.5)


ONLY = np.ones((5, 1))
# state: (next state, probability, reward); 4 is the end
ARROWS = {
    0: [(1, 0.8, 0.0), (2, 0.2, 0.0)],
    1: [(4, 1.0, 1.0)],
    2: [(3, 1.0, 0.0)],
    3: [(3, 0.95, 0.0), (4, 0.05, 0.0)],
}


def test_the_arrows():
    mdp = tsitsiklis_van_roy()
    assert (mdp.n_states, mdp.n_actions, TSITSIKLIS_GAMMA) == (5, 1, 1.0)
    for state, arrows in ARROWS.items():
        row = np.zeros(5)
        for to, probability, reward in arrows:
            row[to] = probability
            assert mdp.reward[state, 0, to] == reward
        np.testing.assert_allclose(mdp.transition[state, 0], row)
    np.testing.assert_array_equal(mdp.terminal, [False, False, False, False, True])
    np.testing.assert_array_equal(mdp.initial, [0.25, 0.25, 0.25, 0.25, 0.0])


def test_values_are_linear_and_exact_at_the_known_weights():
    # the only reward is 1 on leaving the second state, which the first reaches with chance 0.8
    expected = [0.8, 1.0, 0.0, 0.0, 0.0]
    np.testing.assert_allclose(
        tsitsiklis_van_roy().state_values(ONLY, TSITSIKLIS_GAMMA), expected, atol=1e-14
    )
    np.testing.assert_allclose(np.asarray(TSITSIKLIS_FEATURES) @ TSITSIKLIS_WEIGHTS, expected, atol=1e-14)
    assert np.linalg.matrix_rank(TSITSIKLIS_FEATURES) == 3  # so no other weights are


def test_least_squares_finds_the_weights_and_td_runs_away():
    sample = tsitsiklis_van_roy().sample_transitions(2000, ONLY, np.random.default_rng(0))
    assert set(sample.states) == {0, 1, 2, 3}
    features = np.asarray(TSITSIKLIS_FEATURES)
    now, step = features[sample.states], features[sample.states] - features[sample.next_states]
    found = np.linalg.solve(now.T @ step, now.T @ sample.rewards)
    # the chance of 0.8 is known to its standard error over some 500 rows, the reward exactly
    np.testing.assert_allclose(found, TSITSIKLIS_WEIGHTS, atol=4 * np.sqrt(0.16 / 500))
    # the mean update of TD(0) along (0, 0, 1): 1 · (2 − 1) + 2 · (2 · 0.95 − 2) = 0.8 per four states, upward
    drift = -(now.T @ step)[2, 2] / 2000
    assert drift > 0.15
