"""What runs play and keep: every stored step, the log of them, the law of their
actions.
"""

import itertools
import math

import gymnasium
import numpy as np
import pytest
import torch
from scipy import stats

from koffline import Continuous
from koffline.errors import DataError
from koffline.online.paths import replay_transitions
from tests.online.lockstep_runs import (
    ENVIRONMENTS,
    forward,
    iterate,
    make_runs,
    playing,
)

COLUMNS = (
    "observations",
    "actions",
    "rewards",
    "next_observations",
    "terminated",
    "truncated",
    "steps",
)


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_what_is_kept_is_what_happened(environment):
    """Every stored step again in a naive environment: true final observations, no path
    across a reset.

    Inputs are standardised by the moments of all observations that were acted on.
    """
    with playing(make_runs(environment, num_envs=2, capacity=10_000)) as stack:
        iterate(stack, 60)
        kept = [stack.replay.held(run) for run in range(5)]
        agents = [stack.agent(run) for run in range(5)]
    world = gymnasium.make(environment)
    world.reset(seed=0)
    for paths, agent in zip(kept, agents, strict=True):
        assert int(paths.lengths.sum()) == 600
        seen = paths.observations[:, :-1][
            np.arange(10) < paths.lengths[:, None]
        ].astype(float)
        np.testing.assert_allclose(agent.mean, seen.mean(axis=0), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(agent.std, seen.std(axis=0), rtol=1e-9)
        ended = 0
        for row in range(len(paths.lengths)):
            for t in range(paths.lengths[row]):
                last = t + 1 == paths.lengths[row]
                seen = paths.observations[row, t]
                following, reward, terminated = replayed(
                    world, seen, paths.actions[row, t]
                )
                np.testing.assert_allclose(
                    paths.observations[row, t + 1], following, rtol=2e-4, atol=2e-4
                )
                assert paths.rewards[row, t] == pytest.approx(
                    reward, rel=1e-3, abs=1e-3
                )
                assert bool(last and paths.terminated[row]) == terminated
            ended += int(paths.terminated[row] | paths.truncated[row])
        assert ended > 0
        assert paths.truncated.any() == (environment == "Pendulum-v1")
    world.close()


def replayed(world, observation, action):
    """One step from the state that the observation tells."""
    inner = world.unwrapped
    if isinstance(action, np.ndarray):
        cosine, sine, speed = observation.astype(float)
        inner.state = np.array([math.atan2(sine, cosine), speed])
        action = np.clip(action, -2.0, 2.0)
    else:
        inner.state = observation.astype(float)
        inner.steps_beyond_terminated = None
        action = int(action)
    return inner.step(action)[:3]


def test_played_actions_follow_the_policy():
    """At learning rate 0: what the replay holds, seen through the policy, is a standard
    normal sample.
    """
    runs = make_runs(
        "Pendulum-v1", 4, learning_rate=0.0, standardise=False, capacity=10_000
    )
    with playing(runs) as stack:
        for run, spread in enumerate((0.5, 1.0, 2.0, 1.5)):
            stack.learner.online.log_std[run] = math.log(spread)
        iterate(stack, 100)
        for run, spread in enumerate((0.5, 1.0, 2.0, 1.5)):
            held = stack.replay.held(run)
            agent = stack.agent(run)
            assert agent.online.log_std.numpy() == pytest.approx(math.log(spread))
            inside = np.arange(10) < held.lengths[:, None]
            means = forward(agent.online.policy, held.observations[:, :-1][inside])
            noise = ((held.actions[inside] - means) / spread).reshape(-1)
            assert len(noise) == 1000
            assert stats.kstest(noise, "norm").pvalue > 1e-3
            # 3.8 deviations
            assert abs(stats.spearmanr(noise[1:], noise[:-1]).statistic) < 0.12


def test_discrete_actions_follow_the_softmax():
    """Where the policy of the naive forward pass finds an action likely, and where
    unlikely.
    """
    with playing(
        make_runs(
            "CartPole-v1", 4, learning_rate=0.0, standardise=False, capacity=10_000
        )
    ) as stack:
        policy = stack.learner.online.policy
        policy.layers(policy.flat)[-1][1][:, 0] += torch.tensor([0.5, -0.5])
        iterate(stack, 100)
        for run in range(len(stack.runs)):
            held = stack.replay.held(run)
            inside = np.arange(10) < held.lengths[:, None]
            outputs = forward(
                stack.agent(run).online.policy, held.observations[:, :-1][inside]
            )
            chances = np.exp(outputs[:, 1]) / np.exp(outputs).sum(axis=1)
            for part in (chances < np.median(chances), chances >= np.median(chances)):
                surprise = (held.actions[inside] - chances)[part].sum()
                deviation = np.sqrt((chances * (1.0 - chances))[part].sum())
                assert abs(surprise) < 4.0 * deviation


@pytest.mark.parametrize("capacity", [10_000, 45])
@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_the_replay_as_a_log(environment, capacity):
    """Against lists of rows; episodes whose beginning was overwritten are left out, and
    it says so.
    """
    with playing(make_runs(environment, num_envs=2, capacity=capacity)) as stack:
        iterate(stack, 60)
        losses = []
        for run in range(len(stack.runs)):
            log = replay_transitions(stack.replay, run)
            episodes, lost = episodes_of(
                stack.replay.held(run), stack.shape.action_space
            )
            losses.append(lost)
            note = f"{lost} episodes whose beginning was overwritten were left out"
            assert log.metadata.notes == ((note,) if lost else ())
            assert log.episode_lengths.tolist() == [len(rows) for rows in episodes]
            for name, column in zip(
                COLUMNS, zip(*itertools.chain(*episodes), strict=True), strict=True
            ):
                np.testing.assert_array_equal(
                    getattr(log, name), np.asarray(column), name
                )
    assert any(losses) == (capacity == 45)


def episodes_of(paths, space):
    """Rows of every whole episode, and how many have lost their first step."""
    episodes = {}
    for row, length in enumerate(paths.lengths):
        copy_of = int(paths.environments[row])
        number = int(paths.episodes[row])
        episode = episodes.setdefault((copy_of, number), [])
        if episode:  # it joins on, and nothing follows an end
            np.testing.assert_array_equal(paths.observations[row, 0], episode[-1][3])
            assert episode[-1][4:] == [False, False, paths.first_steps[row] - 1]
        elif (copy_of, number - 1) in episodes:
            assert any(episodes[copy_of, number - 1][-1][4:6])
            assert paths.first_steps[row] == 0
        for t in range(length):
            (now, then), action = (
                paths.observations[row, t : t + 2],
                paths.actions[row, t],
            )
            if isinstance(space, Continuous):
                action = np.clip(action, space.low, space.high)
            step = int(paths.first_steps[row]) + t
            episode.append(
                [now, action, paths.rewards[row, t], then, False, False, step]
            )
        episode[-1][4:6] = bool(paths.terminated[row]), bool(paths.truncated[row])
    whole = [rows for rows in episodes.values() if rows[0][-1] == 0]
    for rows in whole:
        rows[-1][5] = not rows[-1][4]
    return whole, len(episodes) - len(whole)


def test_no_whole_episode_is_no_log():
    with playing(make_runs("Pendulum-v1", 1, capacity=5)) as stack:
        iterate(stack, 10)
        with pytest.raises(DataError, match="larger capacity"):
            replay_transitions(stack.replay, 0)
