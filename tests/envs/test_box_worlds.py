"""The worlds of the paper's evaluation: against scalar references from the literature,
and their box.
"""

import math

import gymnasium
import numpy as np
import pytest
from scipy import stats

from koffline.envs import boxes
from koffline.envs.boxes import WORLDS, NoisyPole, PuddleWorld, make_world

EACH = pytest.mark.parametrize("name", WORLDS)
# sums of a dozen numbers of order one in another order
SAME = {
    "rtol": 1e-12,
    "atol": 1e-12,
}


def puddle_world(x: float, y: float, move: str) -> tuple[float, float, float, bool]:
    """Boyan & Moore 1995, with the costs of Sutton 1996: steps of 0.05, two puddles,
    goal in the corner.
    """
    dx, dy = {
        "up": (0.0, 0.05),
        "down": (0.0, -0.05),
        "right": (0.05, 0.0),
        "left": (-0.05, 0.0),
    }[move]
    x = min(max(x + dx, 0.0), 1.0)
    y = min(max(y + dy, 0.0), 1.0)
    # the horizontal puddle's centre line is y = 0.75, 0.10 <= x <= 0.45; the vertical
    # one's x = 0.45
    horizontal = math.hypot(x - min(max(x, 0.10), 0.45), y - 0.75)
    vertical = math.hypot(x - 0.45, y - min(max(y, 0.40), 0.80))
    inside = max(0.0, 0.1 - min(horizontal, vertical))
    return x, y, -1.0 - 400.0 * inside, x + y >= 1.9


def inverted_pendulum(
    angle: float, velocity: float, force: float
) -> tuple[float, float, float, bool]:
    """Lagoudakis & Parr 2003, section 9.2: Euler steps of 0.1 s; the fall is an angle
    beyond pi / 2.

    What is beyond the box (velocities of 4) is cut.
    """
    gravity = 9.8
    mass = 2.0
    cart = 8.0
    length = 0.5
    alpha = 1.0 / (mass + cart)
    numerator = (
        gravity * math.sin(angle)
        - alpha * mass * length * velocity**2 * math.sin(2.0 * angle) / 2.0
        - alpha * math.cos(angle) * force
    )
    acceleration = numerator / (
        4.0 * length / 3.0 - alpha * mass * length * math.cos(angle) ** 2
    )
    angle = angle + 0.1 * velocity
    velocity = velocity + 0.1 * acceleration
    fallen = abs(angle) > math.pi / 2.0
    upright = math.pi / 2.0
    return (
        min(max(angle, -upright), upright),
        min(max(velocity, -4.0), 4.0),
        -float(fallen),
        fallen,
    )


def mountain_car(x: float, v: float, throttle: int) -> tuple[float, float, float, bool]:
    """Sutton 1996; throttle -1, 0 or 1; the goal is the right hilltop."""
    v = min(max(v + 0.001 * throttle - 0.0025 * math.cos(3.0 * x), -0.07), 0.07)
    x = min(max(x + v, -1.2), 0.6)
    if x == -1.2:
        v = max(v, 0.0)
    return x, v, -1.0, x >= 0.5


@pytest.fixture
def generator():
    return np.random.default_rng(0)


def anywhere(world, n, generator):
    """Points of the whole box, its corners first."""
    corners = [
        (a, b)
        for a in (world.low[0], world.high[0])
        for b in (world.low[1], world.high[1])
    ]
    return np.concatenate(
        [corners, generator.uniform(world.low, world.high, size=(n - 4, 2))]
    )


def balancing(*step):
    angle, velocity, reward, fallen = inverted_pendulum(*step)
    return angle, velocity, 1.0 + reward, fallen


@pytest.mark.parametrize(
    ("world", "actions", "reference"),
    [
        (PuddleWorld(noise=0.0), ("up", "right", "down", "left"), puddle_world),
        (NoisyPole(noise=0.0), (-50.0, 0.0, 50.0), inverted_pendulum),
        (NoisyPole(noise=0.0, reward="balance"), (-50.0, 0.0, 50.0), balancing),
        (boxes.NoisyMountainCar(noise=0.0), (-1, 0, 1), mountain_car),
    ],
    ids=["puddle", "pole", "balance", "car"],
)
def test_steps_against_the_reference(world, actions, reference, generator):
    state = anywhere(world, 2000, generator)
    action = generator.integers(len(actions), size=2000)
    actual = np.column_stack(world.step(state, action, generator))
    expected = [reference(*state[i], actions[action[i]]) for i in range(2000)]
    np.testing.assert_allclose(actual, np.array(expected, dtype=float), **SAME)
    assert 10 < actual[:, 3].sum() < 1000  # both kinds were seen


def test_gymnasiums_pole_moves_as_in_gymnasium(generator):
    world = boxes.GymnasiumPole(noise=0.0)
    env = gymnasium.make("CartPole-v1").unwrapped
    env.reset(seed=0)
    state = anywhere(world, 500, generator)
    action = generator.integers(2, size=500)
    actual = world.step(state, action, generator)
    for i in range(500):
        env.state = np.array([0.0, generator.normal(), *state[i]])
        env.steps_beyond_terminated = None
        _, _, fallen, _, _ = env.step(int(action[i]))
        np.testing.assert_allclose(
            actual.state[i], np.clip(env.state[2:], world.low, world.high), **SAME
        )
        assert actual.terminated[i] == fallen
    assert 10 < actual.terminated.sum() < 250


def test_puddle_noise_is_normal_per_axis(generator):
    start = np.tile([[0.7, 0.3]], (4000, 1))
    following, _, _ = PuddleWorld(noise=0.02).step(start, np.full(4000, 1), generator)
    noise = (following - [0.75, 0.3]) / 0.02
    for axis in noise.T:
        assert stats.kstest(axis, "norm").pvalue > 1e-3
    # independent axes: the correlation of 4000 pairs has standard error 0.016
    assert abs(np.corrcoef(noise.T)[0, 1]) < 4 / math.sqrt(4000)


def test_pole_noise_is_a_uniform_force(generator):
    start = np.tile([[0.3, 1.0]], (4000, 1))
    following, _, _ = NoisyPole(noise=10.0).step(start, np.full(4000, 2), generator)
    # the push is felt in the velocity only
    np.testing.assert_allclose(following[:, 0], 0.4, **SAME)
    at_rest = inverted_pendulum(0.3, 1.0, 0.0)[1]
    pushed = inverted_pendulum(0.3, 1.0, 1.0)[1]
    # velocity is linear in the force
    force = (following[:, 1] - at_rest) / (pushed - at_rest)
    assert stats.kstest(force, "uniform", args=(40.0, 20.0)).pvalue > 1e-3


def test_mountain_car_noise_jolts_the_velocity(generator):
    start = np.tile([[-0.5, 0.01]], (4000, 1))
    following, _, _ = boxes.NoisyMountainCar(noise=0.002).step(
        start, np.full(4000, 0), generator
    )
    np.testing.assert_allclose(following[:, 0], -0.5 + following[:, 1], **SAME)
    jolt = (following[:, 1] - mountain_car(-0.5, 0.01, -1)[1]) / 0.002
    assert stats.kstest(jolt, "norm").pvalue > 1e-3


@EACH
def test_no_state_ever_leaves_the_box(name, generator):
    world = make_world(name)
    assert isinstance(world, boxes.BoxWorld)
    state = np.concatenate(
        [anywhere(world, 500, generator), world.reset(500, generator)]
    )
    for _ in range(200):
        action = generator.integers(world.n_actions, size=len(state))
        state, reward, terminated = world.step(state, action, generator)
        assert np.all((state >= world.low) & (state <= world.high))
        assert np.all(np.isfinite(reward))
        if "pole" not in name:  # whose fallen states lie on the border of the box
            np.testing.assert_array_equal(terminated, world.is_terminal(state))
        state = np.where(terminated[:, None], world.reset(len(state), generator), state)


@EACH
def test_uniform_states_go_on_and_fill_what_is_left_of_the_box(name, generator):
    world = make_world(name)
    states = boxes.uniform_states(world, 20_000, generator)
    assert states.shape == (20_000, 2)
    assert not world.is_terminal(states).any()
    # a 10 × 10 histogram of the part that has no terminal corner is flat
    edges = [
        np.linspace(low, high, 11)
        for low, high in zip(world.low, world.high, strict=True)
    ]
    counts, _, _ = np.histogram2d(*states.T, bins=edges)
    corners = np.stack(
        np.meshgrid(edges[0][1:], edges[1][1:], indexing="ij"), axis=-1
    ).reshape(-1, 2)
    whole = ~world.is_terminal(corners - 1e-9).reshape(10, 10)
    assert whole.sum() >= 85
    assert stats.chisquare(counts[whole]).pvalue > 1e-3
