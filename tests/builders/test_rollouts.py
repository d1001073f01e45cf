"""Rollouts against episodes played one by one by Gymnasium's own loop, without the
builder's code.
"""

import gymnasium
import numpy as np
import pytest

from koffline.builders.rollouts import RolloutSettings, build_rollouts
from koffline.envs.boxes import GYMNASIUM_IDS

COLUMNS = (
    "observations",
    "actions",
    "rewards",
    "next_observations",
    "terminated",
    "truncated",
)


def generators(seed, episode):
    """The environment's seed and the policy's stream of an episode."""
    first = np.random.SeedSequence(seed, spawn_key=(episode, 0)).generate_state(1)[0]
    return int(first) % 2**31, np.random.default_rng(
        np.random.SeedSequence(seed, spawn_key=(episode, 1))
    )


def play_one(env, choose, weights, seed, episode):
    """Rows of an episode; choose: (which policy, observation, stream) -> (action,
    log-probability).
    """
    env_seed, stream = generators(seed, episode)
    index = int(np.sum(stream.random() >= np.cumsum(weights)[:-1] / np.sum(weights)))
    observation, _ = env.reset(seed=env_seed)
    rows = []
    over = False
    while not over:
        action, log_probability = choose(index, observation, stream)
        following, reward, ended, cut, _ = env.step(action)
        rows.append(
            (
                observation.copy(),
                action,
                reward,
                following.copy(),
                ended,
                cut and not ended,
            )
        )
        rows[-1] += (log_probability, episode, len(rows) - 1)
        observation = following
        over = ended or cut
    return rows


def play_all(env_id, choose, weights, seed, episodes, time_limit=None):
    """Columns of all episodes, in the order of COLUMNS, then log-probabilities, episode
    numbers and steps.
    """
    options = {} if time_limit is None else {"max_episode_steps": time_limit}
    with gymnasium.make(env_id, **options) as env:
        rows = [
            row
            for episode in range(episodes)
            for row in play_one(env, choose, weights, seed, episode)
        ]
    return [np.array(column) for column in zip(*rows, strict=True)]


def choose_from(tables):
    """choose for discrete policies, each a function observation -> probabilities
    (A,).
    """

    def choose(index, observation, stream):
        chances = tables[index](observation)
        number = stream.random()
        action = next(
            i
            for i in range(len(chances))
            if number < sum(chances[: i + 1]) / sum(chances)
        )
        return action, np.log(chances[action])

    return choose


def assert_same_rows(log, expected, rtol=0.0, atol=0.0):
    """A log against the columns of play_all; numbers that are no whole ones may differ
    so much.
    """
    for name, column in zip(COLUMNS, expected, strict=False):
        np.testing.assert_allclose(getattr(log, name), column, rtol, atol, err_msg=name)
    np.testing.assert_array_equal(log.episode_ids, expected[7])
    np.testing.assert_array_equal(log.steps, expected[8])


def lean(observations):
    """Pushes mostly towards the side that the second last number points to."""
    right = 1.0 / (1.0 + np.exp(-9.0 * observations[:, -2].astype(np.float64)))
    return np.stack([1.0 - right, right], axis=1)


@pytest.mark.parametrize(("num_envs", "workers"), [(1, 1), (3, 1), (None, 1), (3, 2)])
def test_a_mixture_gives_the_rows_of_a_single_environment(num_envs, workers):
    settings = RolloutSettings(
        "CartPole-v1", 7, (1.0, 3.0), time_limit=30, num_envs=num_envs, seed=5
    )
    log = build_rollouts(settings, ["uniform", lean], workers=workers)
    choose = choose_from(
        [lambda observation: [0.5, 0.5], lambda observation: lean(observation[None])[0]]
    )
    expected = play_all("CartPole-v1", choose, (1.0, 3.0), 5, 7, time_limit=30)
    assert_same_rows(log, expected)
    np.testing.assert_allclose(log.behavior_log_probabilities, expected[6], rtol=1e-6)
    assert log.truncated.any()
    assert log.terminated.any()
    assert log.metadata.extra == {"task": "CartPole-v1", "time_limit": 30}


@pytest.mark.parametrize("name", GYMNASIUM_IDS)
def test_our_worlds_played_as_one_array_give_the_rows_of_gymnasium(name):
    env_id = GYMNASIUM_IDS[name]
    n = {"puddle_world": 4, "gymnasium_pole": 2}.get(name, 3)
    log = build_rollouts(
        RolloutSettings(name, 12, time_limit=80, num_envs=5, seed=2), ["uniform"]
    )
    expected = play_all(
        env_id,
        choose_from([lambda observation: [1.0] * n]),
        (1.0,),
        2,
        12,
        time_limit=80,
    )
    # Sines of arrays and of single numbers may differ in their last bits on some
    # processors.
    assert_same_rows(log, expected, rtol=1e-5, atol=1e-6)
    assert log.metadata.extra == {"task": env_id, "time_limit": 80}


def test_continuous_actions_are_sampled_by_each_episode_clipped_and_counted():
    def wide(observations, generator):
        return generator.normal(observations[:, :1], 2.0)

    def choose(index, observation, stream):
        drawn = stream.normal(float(observation[0]), 2.0)
        choose.clipped += abs(drawn) > 2.0
        return np.array([np.clip(drawn, -2.0, 2.0)], dtype=np.float32), 0.0

    choose.clipped = 0
    log = build_rollouts(
        RolloutSettings("Pendulum-v1", 4, time_limit=25, num_envs=3, seed=1), [wide]
    )
    assert_same_rows(log, play_all("Pendulum-v1", choose, (1.0,), 1, 4, time_limit=25))
    assert log.actions.dtype == np.float32
    assert log.behavior_log_probabilities is None
    assert choose.clipped > 10
    note = (
        f"{choose.clipped} actions were outside the action space; they are stored as"
        " clipped"
    )
    assert log.metadata.notes == (note,)
    assert log.truncated.sum() == 4


def test_an_array_that_is_used_again_and_actions_from_one():
    log = build_rollouts(
        RolloutSettings("koffline-tests/Odd-v0", 3, num_envs=2), ["uniform"]
    )
    np.testing.assert_allclose(
        log.observations[:, 0], np.tile([0, 0.1, 0.2, 0.3, 0.4], 3), atol=1e-6
    )
    np.testing.assert_allclose(
        log.next_observations[:, 0], log.observations[:, 0] + 0.1, atol=1e-6
    )
    np.testing.assert_array_equal(log.next_observations[:, 1], log.actions - 0.5)
    np.testing.assert_array_equal(log.rewards, log.actions + 1)
    assert set(log.actions) == {0, 1}
    assert log.metadata.extra == {"task": "koffline-tests/Odd-v0"}


def test_other_observations_are_flattened_and_boxes_of_actions_reshaped():
    log = build_rollouts(RolloutSettings("koffline-tests/Shapes-v0", 2), ["uniform"])
    np.testing.assert_array_equal(
        log.next_observations[:4, :3], np.eye(3)[[1, 2, 0, 1]]
    )
    sums = log.actions.reshape(-1, 2, 2).sum(axis=2)
    np.testing.assert_array_equal(log.next_observations[:, 3:], sums)
    np.testing.assert_array_equal(log.rewards, log.actions[:, 1])
    assert (log.action_space.k, log.action_space.low) == (4, (-1.0,) * 4)
    assert "one-hot" in log.metadata.notes[0]


def test_single_numbers_are_columns_and_a_limit_ends_what_is_endless():
    log = build_rollouts(
        RolloutSettings("koffline-tests/Endless-v0", 2, time_limit=3), ["uniform"]
    )
    np.testing.assert_array_equal(log.observations[:, 0], [0, 1, 2, 0, 1, 2])
    assert log.observations.dtype == np.float32
    np.testing.assert_array_equal(log.truncated, [False, False, True] * 2)
