"""Value and policy iteration against all policies tried one by one; softmax by hand."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from koffline.envs.finite import FiniteMDP, chain, grid, random_mdp
from koffline.envs.planning import policy_iteration, softmax_policy, value_iteration
from koffline.errors import ConfigError

GAMMA = 0.9


def best_values(mdp, gamma):
    """The largest value of each state over all deterministic policies."""
    tables = (
        np.eye(mdp.n_actions)[list(choice)] for choice in product(range(mdp.n_actions), repeat=mdp.n_states)
    )
    return np.max([mdp.state_values(table, gamma) for table in tables], axis=0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ending", [0.0, 0.2])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.95])
def test_both_find_the_best_of_all_policies(seed, ending, gamma):
    mdp = random_mdp(5, 3, np.random.default_rng(seed), branching=3, ending=ending)
    expected = best_values(mdp, gamma)
    by_values = value_iteration(mdp, gamma)
    policy, by_policies = policy_iteration(mdp, gamma)
    np.testing.assert_allclose(by_values.max(axis=1), expected, atol=1e-8)
    np.testing.assert_allclose(by_policies.max(axis=1), expected, atol=1e-10)
    np.testing.assert_allclose(by_values, by_policies, atol=1e-8)
    np.testing.assert_array_equal(np.sort(policy, axis=1)[:, -1], 1.0)
    np.testing.assert_allclose(mdp.state_values(policy, gamma), expected, atol=1e-10)


def test_action_values_by_hand():
    # 0: stay for 1, or leave to 1 for 0; 1: whatever one does, 2 and back to 0: staying is worth 10 + …
    transition = np.array([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [1.0, 0.0]]])
    mdp = FiniteMDP(transition, np.array([[1.0, 0.0], [3.0, 3.0]]), np.zeros(2, bool), np.array([1.0, 0.0]))
    # always leaving: V0 = 0.9 V1, V1 = 3 + 0.9 V0, so V0 = 2.7 / 0.19 = 14.2 > 10 = 1 / (1 − 0.9)
    v0, v1 = 2.7 / 0.19, 3.0 / 0.19
    np.testing.assert_allclose(value_iteration(mdp, GAMMA), [[1 + 0.9 * v0, 0.9 * v1], [v1, v1]], atol=1e-8)


def test_the_way_out_of_a_corridor():
    policy, _ = policy_iteration(chain(9, slip=0.1, end_rewards=(0.0, 1.0)), GAMMA)
    np.testing.assert_array_equal(policy[1:-1], np.tile([0.0, 1.0], (7, 1)))


def test_actions_that_are_all_alike_do_not_run_in_circles():
    mdp = random_mdp(6, 1, np.random.default_rng(0))
    twins = FiniteMDP(
        np.repeat(mdp.transition, 3, axis=1), np.repeat(mdp.reward, 3, axis=1), mdp.terminal, mdp.initial
    )
    _, values = policy_iteration(twins, 0.99)
    np.testing.assert_allclose(values, np.repeat(mdp.action_values(np.ones((6, 1)), 0.99), 3, axis=1))


def test_the_tolerance_is_kept_and_large_values_do_not_hang():
    mdp = random_mdp(8, 2, np.random.default_rng(1))
    exact = policy_iteration(mdp, 0.99)[1]
    assert np.abs(value_iteration(mdp, 0.99, tolerance=0.1) - exact).max() <= 0.1
    # values of 1e9 have steps of 1e-7: the tolerance of 1e-8 is out of reach
    large = FiniteMDP(mdp.transition, 1e8 * mdp.reward, mdp.terminal, mdp.initial)
    np.testing.assert_allclose(value_iteration(large, 0.9), policy_iteration(large, 0.9)[1], rtol=1e-12)


@pytest.mark.parametrize("gamma", [1.0, -0.1, float("nan")])
def test_a_discount_without_a_limit_is_refused(gamma):
    with pytest.raises(ConfigError, match=r"gamma is .*; value iteration needs it in \[0, 1\)"):
        value_iteration(chain(4), gamma)


def test_softmax_by_hand():
    values = np.array([[0.0, np.log(2.0)], [5.0, 5.0], [1e6, -1e6]])
    np.testing.assert_allclose(softmax_policy(values, 1.0), [[1 / 3, 2 / 3], [0.5, 0.5], [1.0, 0.0]])
    np.testing.assert_allclose(softmax_policy(values[:1], 0.5), [[0.2, 0.8]])  # 1 : 2²
    with pytest.raises(ConfigError, match=r"temperature is 0\.0; give a positive number"):
        softmax_policy(values, 0.0)


@pytest.mark.parametrize("mdp", [grid(4, 3), chain(6), random_mdp(7, 2, np.random.default_rng(3))])
def test_the_stationary_distribution_is_where_powers_end(mdp):
    policy = np.random.default_rng(0).dirichlet(np.ones(mdp.n_actions), size=mdp.n_states)
    moves = np.einsum("sa,sat->st", policy, mdp.transition)
    moves[mdp.terminal] = mdp.initial  # an ended episode starts anew
    lazy = 0.5 * (np.eye(mdp.n_states) + moves)  # the same stationary distribution, without cycles
    share = np.where(mdp.terminal, 0.0, mdp.initial @ np.linalg.matrix_power(lazy, 4096))
    np.testing.assert_allclose(mdp.stationary_distribution(policy), share / share.sum(), atol=1e-10)
