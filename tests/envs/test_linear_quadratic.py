"""Closed-form values of linear Gaussian policies by hand, by Bellman's equation and by rollouts."""

from __future__ import annotations

import numpy as np
import pytest

from koffline.envs.linear_quadratic import LinearGaussian, LinearQuadratic
from koffline.envs.rollouts import log_episodes, monte_carlo_value
from koffline.errors import ConfigError

SCALAR = LinearQuadratic(drift=((0.5,),), control=((1.0,),), action_cost=0.0, noise=0.0, start=2.0)
PLANE = LinearQuadratic(
    drift=((0.9, 0.2), (0.0, 0.8)), control=((0.0, 0.3), (0.5, 0.0)), noise=0.2, offset=1.5, start=0.7
)
POLICY = LinearGaussian(((-0.1, -0.4), (-0.5, 0.1)), deviation=0.3)


def test_scalar_by_hand():
    # x_t = 0.5^t x: cost Σ (0.9 · 0.25)^t x² = x² / 0.775; E x² = 4
    idle = LinearGaussian(((0.0,),))
    assert SCALAR.policy_value(idle, 0.9) == pytest.approx(-4 / 0.775)
    np.testing.assert_allclose(
        SCALAR.state_values(np.array([[1.0], [3.0]]), idle, 0.9), [-1 / 0.775, -9 / 0.775]
    )


def test_scalar_noise_by_hand():
    # one step of noise variance v costs γ v P / (1 − γ) beyond the noiseless value; offset adds 1 / (1 − γ)
    noisy = LinearQuadratic(
        drift=((0.5,),), control=((2.0,),), action_cost=3.0, noise=0.1, start=2.0, offset=1.0
    )
    value = noisy.policy_value(LinearGaussian(((0.0,),), deviation=0.4), 0.9)
    variance = 0.1**2 + (2 * 0.4) ** 2
    expected = -4 / 0.775 - (0.9 * variance / 0.775 + 3.0 * 0.4**2) / 0.1 + 10.0
    assert value == pytest.approx(expected)


def test_bellman_equation_in_expectation():
    generator = np.random.default_rng(0)
    state = np.tile([[0.5, -1.0]], (200_000, 1))
    action = POLICY.sample(state, generator)
    following, reward, terminated = PLANE.step(state, action, generator)
    backup = reward + 0.95 * PLANE.state_values(following, POLICY, 0.95)
    error = backup.std() / np.sqrt(len(backup))
    assert not terminated.any()
    assert backup.mean() == pytest.approx(PLANE.state_values(state[:1], POLICY, 0.95)[0], abs=4 * error)


def test_monte_carlo_agrees_with_lyapunov():
    start = PLANE.reset(3000, np.random.default_rng(1))
    value = monte_carlo_value(PLANE, POLICY, 0.9, start, np.random.default_rng(2))
    exact = PLANE.policy_value(POLICY, 0.9)
    # the world's states reach the policy in float32; four standard errors
    assert value.value == pytest.approx(exact, abs=4 * value.standard_error)
    given = PLANE.state_values(start, POLICY, 0.9).mean()
    assert value.value == pytest.approx(given, abs=4 * value.error_given_starts)
    assert value.start_deviation == pytest.approx(PLANE.state_values(start, POLICY, 0.9).std(), rel=0.15)


def test_log_has_unbounded_actions_of_k_columns():
    log = log_episodes(PLANE, POLICY, 100, 10, np.random.default_rng(0))
    assert log.actions.shape == (100, 2)
    assert PLANE.bounds == ((-np.inf, -np.inf), (np.inf, np.inf))
    assert LinearGaussian(((0.0,),)).deterministic
    assert not POLICY.deterministic


def test_infinite_cost_is_refused():
    with pytest.raises(ConfigError, match="infinite"):
        SCALAR.policy_value(LinearGaussian(((1.0,),)), 0.9)
