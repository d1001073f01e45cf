"""Finite processes in continuous coordinates: nothing but the appearance changes."""

from __future__ import annotations

import numpy as np
import pytest

from koffline.envs.embedded import EmbeddedMDP
from koffline.envs.finite_worlds import chain, grid
from koffline.envs.rollouts import log_episodes, monte_carlo_value
from koffline.errors import ConfigError


def make(jitter=0.2):
    mdp = grid(4, 3)
    x, y = np.arange(12) % 4, np.arange(12) // 4
    return EmbeddedMDP(mdp, np.stack([x, y], axis=1), jitter)


def test_states_are_recognised_under_jitter():
    world = make(0.49)
    generator = np.random.default_rng(0)
    state = world.reset(500, generator)
    for _ in range(10):
        action = generator.integers(4, size=500)
        np.testing.assert_array_equal(world.states_of(world.observe(state)), state[:, 0])
        state, _, _ = world.step(state, action, generator)


def test_jitter_moves_observations_but_not_the_log():
    table = np.full((12, 4), 0.25)
    logs = [
        log_episodes(w, w.policy(table), 400, 20, np.random.default_rng(1)) for w in (make(0.0), make(0.3))
    ]
    for name in ("actions", "rewards", "terminated", "truncated"):
        np.testing.assert_array_equal(getattr(logs[0], name), getattr(logs[1], name))
    assert np.all(logs[0].observations == np.round(logs[0].observations))
    assert np.abs(logs[1].observations - np.round(logs[1].observations)).max() > 0.25
    inside = ~(logs[1].terminated | logs[1].truncated)[:-1]
    np.testing.assert_array_equal(logs[1].next_observations[:-1][inside], logs[1].observations[1:][inside])


def test_monte_carlo_agrees_with_the_linear_solve():
    world = make()
    table = np.random.default_rng(2).dirichlet(np.ones(4), size=12)
    start = world.reset(3000, np.random.default_rng(3))
    value = monte_carlo_value(world, world.policy(table), 0.9, start, np.random.default_rng(4))
    exact = world.mdp.policy_value(table, 0.9)
    assert value.value == pytest.approx(exact, abs=4 * value.standard_error)
    assert value.standard_error < 0.05 * abs(exact)


def test_tuples_agree_with_the_tables():
    world = make()
    table = np.full((12, 4), 0.25)
    log = world.log_tuples(table, 300, np.random.default_rng(0))
    at, to = world.states_of(log.observations), world.states_of(log.next_observations)
    assert np.all(world.mdp.transition[at, log.actions, to] > 0)
    np.testing.assert_array_equal(log.rewards, world.mdp.reward[at, log.actions, to])
    np.testing.assert_array_equal(log.terminated, world.mdp.terminal[to])


def test_what_cannot_be_told_apart_is_refused():
    with pytest.raises(ConfigError, match="mixes states"):
        make(0.5)
    with pytest.raises(ConfigError, match="one per state"):
        EmbeddedMDP(chain(4), np.zeros((3, 1)))
    with pytest.raises(ConfigError, match="mixes states"):
        EmbeddedMDP(chain(4), np.zeros((4, 1)))
