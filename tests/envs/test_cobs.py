"""The Graph against its formula, the drawn grid against hand-worked steps."""

import numpy as np
import pytest

from koffline.envs.cobs import GRIDWORLD, graph, graph_world, grid_world, gridworld
from koffline.envs.finite import FiniteMDP
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
