"""Finite processes: values by hand, by brute force, by rollouts, and identities between them."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from koffline.envs.finite import (
    TSITSIKLIS_FEATURES,
    TSITSIKLIS_GAMMA,
    TSITSIKLIS_WEIGHTS,
    FiniteMDP,
    tsitsiklis_van_roy,
    value_iteration,
)
from koffline.errors import ConfigError
from scripts.bench.finite_worlds import random_mdp

GAMMA = 0.9


@pytest.fixture
def generator():
    return np.random.default_rng(0)


def two_states() -> FiniteMDP:
    """In 0: action 0 stays for reward 1, action 1 goes to 1 for nothing; state 1 returns for 2."""
    transition = np.array([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [1.0, 0.0]]])
    return FiniteMDP(transition, np.array([[1.0, 0.0], [2.0, 2.0]]), np.zeros(2, bool), np.array([1.0, 0.0]))


def test_values_by_hand():
    mdp = two_states()
    stay, leave = np.array([[1.0, 0.0]] * 2), np.array([[0.0, 1.0]] * 2)
    assert mdp.policy_value(stay, GAMMA) == pytest.approx(10.0)  # 1 / (1 − 0.9)
    # V0 = 0.9 V1, V1 = 2 + 0.9 V0: V0 = 1.8 / 0.19, V1 = 2 / 0.19
    np.testing.assert_allclose(mdp.state_values(leave, GAMMA), [1.8 / 0.19, 2 / 0.19])
    np.testing.assert_allclose(mdp.action_values(stay, GAMMA), [[10.0, 0.9 * 11.0], [11.0, 11.0]])


def test_terminal_state_is_worth_nothing():
    # a coin: end with reward 1 or go on; V = 0.5 + 0.9 · 0.5 V
    mdp = FiniteMDP(
        np.array([[[0.5, 0.5]], [[0.0, 1.0]]]),
        np.array([[[0.0, 1.0]], [[7.0, 7.0]]]),
        np.array([False, True]),
        np.array([1.0, 0.0]),
    )
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
    np.testing.assert_allclose(share, mdp.transition[0, 1], atol=4 * 0.5 / np.sqrt(pair.sum()))
    np.testing.assert_array_equal(
        sample.rewards, mdp.reward[sample.states, sample.actions, sample.next_states]
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"transition": np.full((1, 1, 1), 0.5)}, "sum to one"),
        ({"initial": np.full(1, 0.4)}, "initial over states that are not terminal must be"),
    ],
)
def test_contradictions_are_refused(change, message):
    good = {"transition": np.ones((1, 1, 1)), "initial": np.ones(1)}
    with pytest.raises(ConfigError, match=message):
        FiniteMDP(reward=np.ones((1, 1)), terminal=np.zeros(1, bool), **{**good, **change})


def best_values(mdp, gamma):
    """Action values of the best of all deterministic policies, tried one by one."""
    tables = [
        np.eye(mdp.n_actions)[list(choice)] for choice in product(range(mdp.n_actions), repeat=mdp.n_states)
    ]
    return np.max([mdp.action_values(table, gamma) for table in tables], axis=0)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("ending", [0.0, 0.2])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.95])
def test_value_iteration_finds_the_best_of_all_policies(seed, ending, gamma):
    mdp = random_mdp(5, 3, np.random.default_rng(seed), branching=3, ending=ending)
    np.testing.assert_allclose(value_iteration(mdp, gamma), best_values(mdp, gamma), atol=1e-8)


def test_the_tolerance_of_value_iteration_is_kept_and_large_values_do_not_hang():
    mdp = random_mdp(5, 2, np.random.default_rng(1))
    assert np.abs(value_iteration(mdp, 0.99, tolerance=0.1) - best_values(mdp, 0.99)).max() <= 0.1
    # values of 1e9 have steps of 1e-7: the tolerance of 1e-8 is out of reach
    large = FiniteMDP(mdp.transition, 1e8 * mdp.reward, mdp.terminal, mdp.initial)
    np.testing.assert_allclose(value_iteration(large, 0.9), best_values(large, 0.9), rtol=1e-12)


def test_tsitsiklis_and_van_roys_example_by_its_text():
    mdp, only = tsitsiklis_van_roy(), np.ones((5, 1))
    np.testing.assert_array_equal(mdp.terminal, [False, False, False, False, True])
    np.testing.assert_array_equal(mdp.initial, [0.25, 0.25, 0.25, 0.25, 0.0])
    # the only reward is 1 on leaving the second state, which the first reaches with chance 0.8
    expected = [0.8, 1.0, 0.0, 0.0, 0.0]
    np.testing.assert_allclose(mdp.state_values(only, TSITSIKLIS_GAMMA), expected, atol=1e-14)
    np.testing.assert_allclose(np.asarray(TSITSIKLIS_FEATURES) @ TSITSIKLIS_WEIGHTS, expected, atol=1e-14)
    # the mean update of TD(0) along (0, 0, 1): 1 · (2 − 1) + 2 · (2 · 0.95 − 2) = 0.8 per four states, upward
    features = np.asarray(TSITSIKLIS_FEATURES)
    update = features[:4].T @ (mdp.transition[:4, 0] @ features - features[:4]) / 4
    assert update[2, 2] == pytest.approx(0.2)
