"""The vectorised worlds against Gymnasium's own environments, step for step."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from koffline.envs.classic import Acrobot, CartPole, MountainCar, Pendulum

CASES = [
    ("CartPole-v1", CartPole()),
    ("Acrobot-v1", Acrobot()),
    ("MountainCar-v0", MountainCar()),
    ("Pendulum-v1", Pendulum()),
]


def _spread(world, generator, n):
    """States far from the start as well as near it, actions over the whole space."""
    wide = {"CartPole": (2.0, 2.0, 0.2, 2.0), "Acrobot": (3.1, 3.1, 10.0, 20.0), "MountainCar": (0.6, 0.06)}
    half = np.asarray(wide.get(type(world).__name__, (6.0, 7.5)))
    state = generator.uniform(-half, half, size=(n, len(half)))
    if isinstance(world, MountainCar):
        state[:, 0] -= 0.3
    if world.n_actions:
        return state, generator.integers(world.n_actions, size=n)
    return state, generator.uniform(-3.0, 3.0, size=(n, 1))  # beyond the bounds: both must clip


@pytest.mark.parametrize(("name", "world"), CASES, ids=[name for name, _ in CASES])
def test_equals_gymnasium_step_for_step(name, world):
    generator = np.random.default_rng(0)
    n, n_steps = 20, 40
    states, _ = _spread(world, generator, n)
    copies = [gymnasium.make(name).unwrapped for _ in range(n)]
    for copy, state in zip(copies, states, strict=True):
        copy.reset()
        copy.state = state.copy()
    running = np.ones(n, dtype=bool)
    for _ in range(n_steps):
        _, actions = _spread(world, generator, n)
        following, rewards, terminated = world.step(states, actions, generator)
        observed = world.observe(following)
        for i in np.flatnonzero(running):
            action = actions[i] if world.bounds else int(actions[i])
            theirs = copies[i].step(action)
            np.testing.assert_allclose(observed[i], theirs[0], rtol=2e-6, atol=2e-6)
            assert rewards[i] == pytest.approx(float(theirs[1]), rel=1e-10, abs=1e-10)
            assert bool(terminated[i]) == theirs[2]
            np.testing.assert_allclose(following[i], copies[i].state, rtol=1e-9, atol=1e-9)
        running &= ~terminated
        states = following


@pytest.mark.parametrize(("name", "world"), CASES, ids=[name for name, _ in CASES])
def test_starts_where_gymnasium_starts(name, world):
    ours = world.observe(world.reset(4000, np.random.default_rng(0)))
    env = gymnasium.make(name)
    theirs = np.stack([env.reset(seed=seed)[0] for seed in range(400)])
    assert ours.shape[1:] == theirs.shape[1:]
    assert ours.dtype == theirs.dtype == np.float32
    # 4000 uniform draws fill a range to 0.5 % of its width; 400 draws to 5 %
    width = np.ptp(ours, axis=0)
    assert np.all(np.abs(ours.min(axis=0) - theirs.min(axis=0)) <= 0.05 * width)
    assert np.all(np.abs(ours.max(axis=0) - theirs.max(axis=0)) <= 0.05 * width)


@pytest.mark.parametrize(
    "world",
    [CartPole(push_noise=5.0), MountainCar(noise=0.001), Pendulum(noise=0.1), Acrobot(torque_noise=0.5)],
)
def test_noise_changes_the_next_state_but_not_its_mean_much(world):
    generator = np.random.default_rng(0)
    state = np.tile(world.reset(1, generator), (2000, 1))
    action = np.ones(2000, dtype=np.int64) if world.n_actions else np.zeros((2000, 1))
    noisy, _, _ = world.step(state, action, generator)
    quiet, _, _ = type(world)().step(state[:1], action[:1], generator)
    spread = noisy.std(axis=0)
    assert spread.max() > 0
    # the mean of 2000 draws, five standard errors; a little more for the curvature of the dynamics
    assert np.all(np.abs(noisy.mean(axis=0) - quiet[0]) <= 5 * spread / np.sqrt(2000) + 1e-3)


def test_discrete_pendulum_applies_the_listed_torques():
    world, reference = Pendulum(torques=(-2.0, 0.0, 1.0)), Pendulum()
    generator = np.random.default_rng(0)
    state = reference.reset(3, generator)
    ours = world.step(state, np.array([0, 1, 2]), generator)
    theirs = reference.step(state, np.array([[-2.0], [0.0], [1.0]]), generator)
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine, other)
    assert (world.n_actions, world.bounds) == (3, None)
    assert (reference.n_actions, reference.bounds) == (None, ((-2.0,), (2.0,)))
