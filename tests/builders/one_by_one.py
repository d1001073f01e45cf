"""Episodes played one by one with Gymnasium's own loop: a reference that shares no code with the builder."""

import gymnasium
import numpy as np

COLUMNS = ("observations", "actions", "rewards", "next_observations", "terminated", "truncated")


def generators(seed, episode):
    """The environment's seed and the policy's stream of an episode."""
    first = np.random.SeedSequence(seed, spawn_key=(episode, 0)).generate_state(1)[0]
    return int(first) % 2**31, np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(episode, 1)))


def play_one(env, choose, weights, seed, episode):
    """Rows of an episode; choose: (which policy, observation, stream) -> (action, log-probability)."""
    env_seed, stream = generators(seed, episode)
    index = int(np.sum(stream.random() >= np.cumsum(weights)[:-1] / np.sum(weights)))
    observation, _ = env.reset(seed=env_seed)
    rows, over = [], False
    while not over:
        action, log_probability = choose(index, observation, stream)
        following, reward, ended, cut, _ = env.step(action)
        rows.append((observation.copy(), action, reward, following.copy(), ended, cut and not ended))
        rows[-1] += (log_probability, episode, len(rows) - 1)
        observation, over = following, ended or cut
    return rows


def play_all(env_id, choose, weights, seed, episodes, time_limit=None):
    """Columns of all episodes, in the order of COLUMNS, then log-probabilities, episode numbers and steps."""
    options = {} if time_limit is None else {"max_episode_steps": time_limit}
    with gymnasium.make(env_id, **options) as env:
        rows = [row for episode in range(episodes) for row in play_one(env, choose, weights, seed, episode)]
    return [np.array(column) for column in zip(*rows, strict=True)]


def choose_from(tables):
    """choose for discrete policies, each a function observation -> probabilities (A,)."""

    def choose(index, observation, stream):
        chances, number = tables[index](observation), stream.random()
        action = next(i for i in range(len(chances)) if number < sum(chances[: i + 1]) / sum(chances))
        return action, np.log(chances[action])

    return choose


def assert_same_rows(log, expected, rtol=0.0, atol=0.0):
    """A log against the columns of play_all; numbers that are no whole ones may differ so much."""
    for name, column in zip(COLUMNS, expected, strict=False):
        np.testing.assert_allclose(getattr(log, name), column, rtol, atol, err_msg=name)
    np.testing.assert_array_equal(log.episode_ids, expected[7])
    np.testing.assert_array_equal(log.steps, expected[8])
