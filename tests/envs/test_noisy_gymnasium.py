import gymnasium
import numpy as np
import pytest

from koffline.envs.gymnasium_worlds import NOISY_MUJOCO
from koffline.envs.make import make_env
from koffline.errors import ConfigError

PENDULUM = "InvertedPendulum-v5"


def play(env: gymnasium.Env, seed: int, steps: int = 20) -> np.ndarray:
    observations = [env.reset(seed=seed)[0]]
    for _ in range(steps):
        observation, _, terminated, truncated, _ = env.step(np.zeros(env.action_space.shape, np.float32))
        observations.append(observation)
        if terminated or truncated:
            break
    return np.stack(observations)


def noisy(noise: float, environment: str = PENDULUM) -> gymnasium.Env:
    return make_env(NOISY_MUJOCO, environment=environment, transition_noise=noise)


def test_without_noise_it_is_the_environment_itself() -> None:
    np.testing.assert_array_equal(play(noisy(0.0), 3), play(make_env(PENDULUM), 3))


def test_a_seed_gives_the_same_noise_and_another_seed_another() -> None:
    env = noisy(0.05)
    first = play(env, 3)
    np.testing.assert_array_equal(first, play(env, 3))
    assert not np.array_equal(first[1], play(make_env(PENDULUM), 3)[1])
    np.testing.assert_array_equal(first[0], play(make_env(PENDULUM), 3)[0])  # the start is the seed's own
    assert not np.array_equal(first[1] - first[0], play(env, 4)[1] - play(env, 4)[0])


def test_the_next_state_scatters_as_much_as_it_should() -> None:
    """From a fixed state: the spread of what comes next is that of the pushes, sent through one step."""
    noise, rest, action = 0.02, np.zeros(2), np.zeros(1, np.float32)
    env, plain = noisy(noise), make_env(PENDULUM)
    env.reset(seed=0)
    plain.reset(seed=0)
    ends = []
    for _ in range(900):  # less than the time limit
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
    # The standard error of a standard deviation of 900 draws is 2.4 %.
    np.testing.assert_allclose(np.std(ends, axis=0), expected, rtol=0.08)


def test_the_time_limit_of_the_environment_stays() -> None:
    env = noisy(0.0, "Swimmer-v5")
    env.reset(seed=0)
    steps = 0
    for _ in range(2000):
        steps += 1
        if env.step(np.zeros(2))[3]:
            break
    assert steps == 1000


@pytest.mark.parametrize(
    ("environment", "noise", "message"),
    [
        ("CartPole-v1", 0.1, "transition_noise needs an environment of MuJoCo"),
        (PENDULUM, -0.1, "transition_noise is -0.1"),
        (PENDULUM, float("nan"), "transition_noise is nan"),
        ("NoSuchPendulum-v5", 0.1, "NoSuchPendulum"),
    ],
)
def test_refusals(environment: str, noise: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        noisy(noise, environment)
    assert "\n" not in str(caught.value)
