"""Logs and Monte-Carlo values on a world whose every step is known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from koffline.envs.classic import CartPole
from koffline.envs.rollouts import draw_actions, log_episodes, monte_carlo_value, play


@dataclass(frozen=True)
class Countdown:
    """State (id, left): reward = left; ends when left reaches 0; action 1 skips one count."""

    n_actions: int = 2
    bounds: None = None

    def reset(self, n, generator):
        return np.stack([generator.random(n), generator.integers(2, 9, size=n).astype(float)], axis=1)

    def step(self, state, action, generator):
        left = np.maximum(state[:, 1] - 1 - action, 0)
        return np.stack([state[:, 0], left], axis=1), state[:, 1].copy(), left == 0

    def observe(self, state):
        return state.astype(np.float32)


def never(observations):
    return np.tile([1.0, 0.0], (len(observations), 1))


def sometimes(observations):
    return np.tile([0.5, 0.5], (len(observations), 1))


def test_log_rows_follow_each_other_within_an_episode():
    log = log_episodes(Countdown(), sometimes, 500, 4, np.random.default_rng(0))
    assert len(log) == 500
    starts = np.flatnonzero(log.steps == 0)
    np.testing.assert_array_equal(log.episode_ids[starts], np.arange(len(starts)))
    same = log.episode_ids[1:] == log.episode_ids[:-1]
    np.testing.assert_array_equal(log.observations[1:][same], log.next_observations[:-1][same])
    np.testing.assert_array_equal(np.diff(log.steps)[same], 1)
    ends = ~np.append(same, False)
    np.testing.assert_array_equal(log.terminated | log.truncated, ends)
    assert not np.any(log.terminated & log.truncated)
    np.testing.assert_array_equal(log.terminated, log.next_observations[:, 1] == 0)
    np.testing.assert_array_equal(log.observations[starts], log.start_states.astype(np.float32))


def test_log_rows_obey_the_dynamics():
    log = log_episodes(Countdown(), sometimes, 300, 100, np.random.default_rng(1))
    np.testing.assert_array_equal(log.rewards, log.observations[:, 1])
    expected = np.maximum(log.observations[:, 1] - 1 - log.actions, 0)
    np.testing.assert_array_equal(log.next_observations[:, 1], expected)


def test_time_limit_truncates_and_does_not_terminate():
    log = log_episodes(Countdown(), never, 400, 3, np.random.default_rng(2))
    assert log.steps.max() == 2
    full = log.truncated[:-1]
    assert np.all(log.steps[:-1][full] == 2)
    assert np.all(log.next_observations[:-1][full][:, 1] > 0)


def test_log_is_a_function_of_the_seed():
    one, same, other = (
        log_episodes(CartPole(), sometimes, 200, 50, np.random.default_rng(s)) for s in (3, 3, 4)
    )
    np.testing.assert_array_equal(one.observations, same.observations)
    assert not np.array_equal(one.observations, other.observations)


def test_value_of_a_deterministic_countdown_is_exact():
    start = np.array([[0.0, 3.0], [0.0, 1.0]])
    value = monte_carlo_value(Countdown(), never, 0.5, start, np.random.default_rng(0))
    # 3 + 2/2 + 1/4 = 4.25 and 1
    assert value.value == pytest.approx((4.25 + 1.0) / 2)
    assert value.error_given_starts == 0.0
    assert value.start_deviation == pytest.approx(np.std([4.25, 1.0], ddof=1))
    assert value.standard_error == pytest.approx(value.start_deviation / np.sqrt(2))


def test_value_separates_noise_from_starts():
    start = np.tile([[0.0, 6.0]], (4000, 1))
    value = monte_carlo_value(Countdown(), sometimes, 0.9, start, np.random.default_rng(0), repeats=4)
    # by hand: U(l) = l + 0.9 (U(l-1) + U(l-2)) / 2, U(l ≤ 0) = 0
    exact = [0.0, 1.0]
    for left in range(2, 7):
        exact.append(left + 0.45 * (exact[-1] + exact[-2]))
    assert value.value == pytest.approx(exact[6], abs=4 * value.error_given_starts)
    assert value.error_given_starts == pytest.approx(value.standard_error, rel=0.1)
    assert value.start_deviation < 0.1 * value.standard_error * np.sqrt(4000 * 4)


def test_horizon_cuts_the_return():
    start = np.array([[0.0, 5.0], [0.0, 5.0]])
    value = monte_carlo_value(Countdown(), never, 0.5, start, np.random.default_rng(0), horizon=2)
    assert value.value == pytest.approx(5 + 4 / 2)
    assert value.horizon == 2


def test_drawn_actions_have_the_given_probabilities():
    chances = np.array([0.2, 0.0, 0.5, 0.3])
    actions = draw_actions(
        lambda x: np.tile(chances, (len(x), 1)), np.zeros((20_000, 1), np.float32), np.random.default_rng(0)
    )
    share = np.bincount(actions, minlength=4) / 20_000
    assert share[1] == 0
    np.testing.assert_allclose(share, chances, atol=4 * 0.5 / np.sqrt(20_000))  # four standard errors


def test_play_drops_what_has_ended():
    state = np.array([[0.0, 1.0], [1.0, 3.0]])
    steps = list(play(Countdown(), never, state, 10, np.random.default_rng(0)))
    assert [list(step.index) for step in steps] == [[0, 1], [1], [1]]
