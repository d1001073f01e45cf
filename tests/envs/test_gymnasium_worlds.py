"""The worlds as Gymnasium environments: what Gymnasium itself checks, seeds, limits."""

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from koffline.envs import NOISY_MUJOCO
from koffline.envs.boxes import GYMNASIUM_IDS, TIME_LIMITS
from koffline.envs.make import make_env
from koffline.errors import ConfigError
from tests.refusals import one_line

EACH = pytest.mark.parametrize("identifier", GYMNASIUM_IDS.values())


@EACH
def test_gymnasium_has_no_complaints(identifier):
    check_env(gymnasium.make(identifier).unwrapped)


@pytest.mark.parametrize(
    ("identifier", "action"),
    [("koffline/PuddleWorld-v0", 2), ("koffline/NoisyMountainCar-v0", 1)],
)
def test_the_limit_truncates(identifier, action):
    """Going nowhere: into the wall, at the bottom of the valley."""
    env = gymnasium.make(identifier, noise=0.0)
    assert env.spec.max_episode_steps == TIME_LIMITS[env.spec.kwargs["world"]]
    env.reset(seed=0)
    for _ in range(env.spec.max_episode_steps - 1):
        assert env.step(action)[2:4] == (False, False)
    assert env.step(action)[2:4] == (False, True)


PENDULUM = "InvertedPendulum-v5"


def play_noisy(env: gymnasium.Env, seed: int, steps: int = 20) -> np.ndarray:
    observations = [env.reset(seed=seed)[0]]
    for _ in range(steps):
        observation, _, terminated, truncated, _ = env.step(
            np.zeros(env.action_space.shape, np.float32)
        )
        observations.append(observation)
        if terminated or truncated:
            break
    return np.stack(observations)


def noisy(noise: float) -> gymnasium.Env:
    return make_env(NOISY_MUJOCO, environment=PENDULUM, transition_noise=noise)


def test_noise_follows_the_seed_and_without_it_all_is_the_environments_own() -> None:
    env = noisy(0.05)
    plain = play_noisy(make_env(PENDULUM), 3)
    np.testing.assert_array_equal(play_noisy(noisy(0.0), 3), plain)
    first = play_noisy(env, 3)
    other = play_noisy(env, 4)
    np.testing.assert_array_equal(first, play_noisy(env, 3))
    np.testing.assert_array_equal(first[0], plain[0])
    assert not np.array_equal(first[1], plain[1])
    assert not np.array_equal(first[1] - first[0], other[1] - other[0])


def test_the_next_state_scatters_as_much_as_it_should() -> None:
    """From a fixed state: the spread of what comes next is that of the pushes, sent
    through one step.
    """
    noise = 0.02
    rest = np.zeros(2)
    action = np.zeros(1, np.float32)
    env = noisy(noise)
    plain = make_env(PENDULUM)
    env.reset(seed=0)
    plain.reset(seed=0)
    ends = []
    for _ in range(500):  # less than the time limit
        env.unwrapped.set_state(rest, rest)  # type: ignore[attr-defined]
        ends.append(env.step(action)[0])
    responses = []
    for push in noise * np.eye(2):
        pair = []
        for sign in (1.0, -1.0):
            plain.unwrapped.set_state(rest, sign * push)  # type: ignore[attr-defined]
            pair.append(plain.step(action)[0])
        responses.append((pair[0] - pair[1]) / 2.0)
    expected = np.sqrt(np.square(responses).sum(axis=0))
    # The standard error of a standard deviation of 500 draws is 3.2 %.
    np.testing.assert_allclose(np.std(ends, axis=0), expected, rtol=0.11)


@pytest.mark.parametrize(
    ("identifier", "settings", "message"),
    [
        (
            "koffline/PuddleWorld-v0",
            {"noise": -0.1},
            "noise is -0.1; give a number that is not negative",
        ),
        (
            "koffline/PuddleWorld-v0",
            {"nose": 0.1},
            "unexpected keyword argument 'nose'",
        ),
        (
            NOISY_MUJOCO,
            {"environment": "CartPole-v1"},
            "transition_noise needs an environment of MuJoCo",
        ),
        (
            NOISY_MUJOCO,
            {"environment": PENDULUM, "transition_noise": -0.1},
            "transition_noise is -0.1",
        ),
        (
            NOISY_MUJOCO,
            {"environment": "Pendlum-v1"},
            "the environment 'Pendlum-v1': there is none",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(identifier, settings, message) -> None:
    with one_line(ConfigError, match=message):
        make_env(identifier, **settings)
