"""The benchmarks' worlds: Gymnasium's step for step, closed forms of the others, their
logs.
"""

from dataclasses import dataclass

import gymnasium
import numpy as np
import pytest

from koffline.envs.finite import FiniteMDP
from scripts.bench.classic import Acrobot, CartPole, MountainCar, Pendulum
from scripts.bench.finite_worlds import graph, gridworld
from scripts.bench.linear_quadratic import LinearGaussian, LinearQuadratic
from scripts.bench.rollouts import monte_carlo_value

CASES = [
    ("CartPole-v1", CartPole()),
    ("Acrobot-v1", Acrobot()),
    ("MountainCar-v0", MountainCar()),
    ("Pendulum-v1", Pendulum()),
]


def _spread(world, generator, n):
    """States far from the start as well as near it, actions over the whole space."""
    wide = {
        "CartPole": (2.0, 2.0, 0.2, 2.0),
        "Acrobot": (3.1, 3.1, 10.0, 20.0),
        "MountainCar": (0.6, 0.06),
    }
    half = np.asarray(wide.get(type(world).__name__, (6.0, 7.5)))
    state = generator.uniform(-half, half, size=(n, len(half)))
    if isinstance(world, MountainCar):
        state[:, 0] -= 0.3
    if world.n_actions:
        return state, generator.integers(world.n_actions, size=n)
    # beyond the bounds: both must clip
    return state, generator.uniform(-3.0, 3.0, size=(n, 1))


@pytest.mark.parametrize(("name", "world"), CASES, ids=[name for name, _ in CASES])
def test_equals_gymnasium_step_for_step(name, world):
    generator = np.random.default_rng(0)
    n = 20
    n_steps = 40
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
            np.testing.assert_allclose(
                following[i], copies[i].state, rtol=1e-9, atol=1e-9
            )
        running &= ~terminated
        states = following


def constant(mdp: FiniteMDP, chances: list[float]) -> np.ndarray:
    return np.tile(chances, (mdp.n_states, 1))


@pytest.mark.parametrize("length", [1, 4, 16])
@pytest.mark.parametrize("slip", [0.0, 0.25])
@pytest.mark.parametrize("first", [0.2, 0.5, 1.0])
def test_the_graph_against_its_formula(length, slip, first):
    gamma = 0.9
    table = [first, 1.0 - first]
    gain = 2.0 * (first * (1.0 - slip) + (1.0 - first) * slip) - 1.0
    dense = graph(length, True, slip)
    sparse = graph(length, False, slip)
    discounted = gain * (1.0 - gamma**length) / (1.0 - gamma)
    assert dense.policy_value(constant(dense, table), gamma) == pytest.approx(
        discounted, abs=1e-12
    )
    assert sparse.policy_value(constant(sparse, table), gamma) == pytest.approx(
        gain * gamma ** (length - 1), abs=1e-12
    )


def test_steps_of_a_drawn_grid_by_hand():
    mdp = gridworld(("s.", "hg"), slip=0.0)
    # up, right, down, left
    assert np.array_equal(mdp.transition[0, :, :].argmax(axis=1), [0, 1, 2, 0])
    assert np.array_equal(mdp.reward[0, 0], [-0.1, -0.1, -1.0, 4.0])
    assert np.array_equal(mdp.terminal, [False, False, False, True])
    right_then_down = np.zeros((4, 4))
    right_then_down[[0, 1, 2, 3], [1, 2, 0, 0]] = 1.0
    assert mdp.policy_value(right_then_down, 0.5) == pytest.approx(-0.1 + 0.5 * 4.0)
    assert np.allclose(
        gridworld(("s.", "hg"), slip=0.4).transition[0, 1], [0.2, 0.7, 0.1, 0.0]
    )


def test_a_noisy_scalar_system_by_hand():
    # x_t = 0.5^t x: cost Σ (0.9 · 0.25)^t x² = x² / 0.775
    # one step of noise variance v costs γ v P / (1 − γ) beyond the noiseless value;
    # offset adds 1 / (1 − γ)
    noisy = LinearQuadratic(
        drift=((0.5,),), control=((2.0,),), action_cost=3, noise=0.1, start=2, offset=1
    )
    policy = LinearGaussian(((0.0,),), deviation=0.4)
    variance = 0.1**2 + (2 * 0.4) ** 2
    rest = -(0.9 * variance / 0.775 + 3.0 * 0.4**2) / 0.1 + 10.0
    # E x² = 4
    assert noisy.policy_value(policy, 0.9) == pytest.approx(-4 / 0.775 + rest)
    values = noisy.state_values(np.array([[1.0], [3.0]]), policy, 0.9)
    np.testing.assert_allclose(values, [-1 / 0.775 + rest, -9 / 0.775 + rest])


@dataclass(frozen=True)
class Countdown:
    """State (id, left): reward = left; ends when left reaches 0; action 1 skips one
    count.
    """

    n_actions: int = 2
    bounds: None = None

    def reset(self, n, generator):
        return np.stack(
            [generator.random(n), generator.integers(2, 9, size=n).astype(float)],
            axis=1,
        )

    def step(self, state, action, generator):
        left = np.maximum(state[:, 1] - 1 - action, 0)
        return np.stack([state[:, 0], left], axis=1), state[:, 1].copy(), left == 0

    def observe(self, state):
        return state.astype(np.float32)


def skips(chance):
    return lambda observations: np.tile([1.0 - chance, chance], (len(observations), 1))


def test_value_of_a_deterministic_countdown_is_exact():
    start = np.array([[0.0, 3.0], [0.0, 1.0]])
    value = monte_carlo_value(
        Countdown(), skips(0.0), 0.5, start, np.random.default_rng(0)
    )
    # 3 + 2/2 + 1/4 = 4.25 and 1
    assert value.value == pytest.approx((4.25 + 1.0) / 2)
    assert value.error_given_starts == 0.0
    assert value.start_deviation == pytest.approx(np.std([4.25, 1.0], ddof=1))
    assert value.standard_error == pytest.approx(value.start_deviation / np.sqrt(2))


def test_value_separates_noise_from_starts():
    start = np.tile([[0.0, 6.0]], (4000, 1))
    value = monte_carlo_value(
        Countdown(), skips(0.5), 0.9, start, np.random.default_rng(0), repeats=4
    )
    # by hand: U(l) = l + 0.9 (U(l-1) + U(l-2)) / 2, U(l ≤ 0) = 0
    exact = [0.0, 1.0]
    for left in range(2, 7):
        exact.append(left + 0.45 * (exact[-1] + exact[-2]))
    assert value.value == pytest.approx(exact[6], abs=4 * value.error_given_starts)
    assert value.error_given_starts == pytest.approx(value.standard_error, rel=0.1)
    assert value.start_deviation < 0.1 * value.standard_error * np.sqrt(4000 * 4)
