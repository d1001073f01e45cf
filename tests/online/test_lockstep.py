"""Runs in lock-step: alone or stacked, stopped and resumed, evaluated; the trust
region's coefficient.
"""

import math

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from koffline.online.config import OnlineConfig, OnlineRun
from koffline.online.paths import replay_transitions
from koffline.online.trust_region import TrustRegion, solve_coefficients
from tests.online import lockstep_runs
from tests.online import reference_trust_pcl as reference
from tests.online.lockstep_runs import ENVIRONMENTS, SMALL, iterate, make_runs, playing


@pytest.mark.parametrize(
    "runs",
    [
        *map(make_runs, ENVIRONMENTS),
        # where one run played one path and another two
        make_runs("CartPole-v1", streaming=True),
        [
            OnlineRun(
                OnlineConfig("CartPole-v1", critic="td0", exploration=x, **SMALL), 3
            )
            for x in (0, 1, 2)
        ],
    ],
    ids=[*ENVIRONMENTS, "streaming", "exploring"],
)
def test_a_run_in_a_stack_is_the_run_alone(runs):
    """In float64, where the rounding of stacked products has no time to grow."""
    with playing(runs, dtype=torch.float64) as stack:
        together = lockstep_runs.everything(iterate(stack, 30))
    for place, run in enumerate(runs):
        with playing([run], dtype=torch.float64) as alone:
            [single] = lockstep_runs.everything(iterate(alone, 30))
        lockstep_runs.check_same(together[place], single, rtol=1e-6, atol=1e-8)
    moved = [
        np.abs(together[0]["value"] - other_run["value"]).max()
        for other_run in together[1:]
    ]
    assert min(moved) > 1e-4


def test_evaluating_and_looking_change_nothing():
    runs = make_runs("CartPole-v1")
    with playing(runs) as quiet, playing(runs) as watched:
        iterate(quiet, 20)
        for _ in range(20):
            watched.iterate()
            watched.evaluate()
            watched.state_dict()
            watched.agent(0)
        for left, right in zip(
            *map(lockstep_runs.everything, (quiet, watched)), strict=True
        ):
            # What was earned by sampling is told once: since the last evaluation.
            (
                left.pop("evaluation.sampled_return"),
                right.pop("evaluation.sampled_return"),
            )
            lockstep_runs.check_same(left, right)


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_evaluation_plays_the_best_action(environment):
    """Every run's own episodes again, with ordinary modules, in an environment of its
    own.
    """
    with playing(
        make_runs(environment, evaluation_episodes=2), dtype=torch.float64
    ) as stack:
        iterate(stack, 12)
        actual = stack.evaluate()
        agents = [stack.agent(run) for run in range(len(stack.runs))]
    for agent, value, length in zip(
        agents, actual["return"], actual["length"], strict=True
    ):
        returns = [
            play_best_action(environment, agent, 10_000 + episode)
            for episode in range(2)
        ]
        assert value == pytest.approx(np.mean(returns), rel=1e-5)
        assert length == (200.0 if environment == "Pendulum-v1" else np.mean(returns))


def play_best_action(environment, agent, seed):
    environment = gymnasium.make(environment)
    observation, _ = environment.reset(seed=seed)
    total = 0.0
    over = False
    while not over:
        best = lockstep_runs.forward(
            agent.online.policy, (observation - agent.mean) / agent.std
        )
        best = best.argmax() if len(best) > 1 else np.clip(best, -2.0, 2.0)
        observation, reward, terminated, truncated, _ = environment.step(best)
        total = total + reward
        over = terminated or truncated
    environment.close()
    return total


@pytest.mark.parametrize(("unit", "allowance"), [("episode", 0.5), ("step", 0.01)])
def test_the_trust_region_follows_the_last_episodes(unit, allowance):
    """CartPole with rewards of one: the coefficient from its last 20 episodes, smoothed
    every iteration.
    """
    settings = {
        "divergence_per": unit,
        "max_divergence": allowance,
        "learning_rate": 0.0,
        "kl_coef": 0.0,
    }
    runs = make_runs("CartPole-v1", 4, capacity=10_000, **settings)
    with playing(runs) as stack:
        smoothed = [500.0] * 4
        wanted = [500.0] * 4
        episodes = [[] for _ in runs]
        for _ in range(40):
            stack.iterate()
            for run in range(len(stack.runs)):
                fresh = episodes_of(stack.replay.held(run))
                if len(fresh) > len(episodes[run]):
                    last = fresh[-20:]
                    allowed = allowance * (np.mean(last) if unit == "step" else 1.0)
                    wanted[run] = (
                        reference.root(last, allowed) if len(last) > 8 else 500.0
                    )
                episodes[run] = fresh
                smoothed[run] = 0.99 * smoothed[run] + 0.01 * wanted[run]
                assert stack.agent(run).kl_coef == pytest.approx(
                    smoothed[run], abs=0.07
                )
    assert min(len(finished) for finished in episodes) > 9


def episodes_of(paths):
    """Lengths, which are the returns, of the finished episodes."""
    over = paths.terminated | paths.truncated
    return [
        float(f + n)
        for f, n, o in zip(paths.first_steps, paths.lengths, over, strict=True)
        if o
    ]


def test_learning_begins_late_and_targets_begin_as_copies():
    with playing(make_runs("Pendulum-v1", 1)) as stack:
        first = lockstep_runs.agent_arrays(stack.agent(0))
        iterate(stack, 4)
        before = lockstep_runs.agent_arrays(stack.agent(0))
        assert stack.take_metrics() == {}
        stack.iterate()
        after = lockstep_runs.agent_arrays(stack.agent(0))
    for name in ("policy", "value"):
        np.testing.assert_array_equal(first[name], before[name])
        np.testing.assert_array_equal(first[name], first[f"target_{name}"])
        assert not np.array_equal(before[name], after[name])


def test_the_entropy_coefficient_decays_smoothly():
    config = OnlineConfig("Pendulum-v1", entropy_coef=0.1, entropy_decay=0.1, **SMALL)
    constant = config.with_changes(entropy_decay=None)
    with playing([OnlineRun(config, 0), OnlineRun(constant, 0)]) as stack:
        for iterations, expected in (
            (0, 0.1),
            (1250, 0.1 * math.sqrt(0.1)),
            (2500, 0.01),
            (5000, 0.001),
        ):
            stack.iterations = iterations
            assert stack.agent(0).entropy_coef == pytest.approx(expected)
            assert stack.agent(1).entropy_coef == 0.1


def test_a_world_that_does_not_repeat_begins_anew():
    with playing(make_runs("Pendulum-v1", 2, capacity=10_000)) as stack:
        state = iterate(stack, 6).state_dict()
        state["_collector"]["_observations"] += 1.0
        assert not stack.load_state_dict(state)
        log = replay_transitions(iterate(stack, 25).replay, 0)
        assert log.episode_lengths.tolist() == [60, 200, 50]


def test_streaming_is_a_replay_of_the_last_path():
    """Pendulum's paths are whole iterations: learning from them is learning from a
    replay that holds one.
    """
    critics = [("td0", 3), ("rg", 10), ("memory", 4), ("fvi", 1)]
    last = {
        **SMALL,
        "capacity": 1,
        "batch_size": 1,
        "learning_starts": 1,
        "windows_per_path": 0,
    }
    weights = []
    for changes in ({**SMALL, "streaming": True}, last):
        configs = [
            OnlineConfig("Pendulum-v1", critic=c, window_length=d, **changes)
            for c, d in critics
        ]
        with playing(
            [OnlineRun(config, seed) for seed, config in enumerate(configs)]
        ) as stack:
            iterate(stack, 30)
            weights.append(
                [lockstep_runs.agent_arrays(stack.agent(run)) for run in range(4)]
            )
    for left, right in zip(*weights, strict=True):
        lockstep_runs.check_same(left, right)


def test_streaming_learns_from_every_step_once():
    """CartPole's iterations hold one path or several; each is learned from when it was
    played.
    """
    runs = make_runs("CartPole-v1", 5, streaming=True, num_envs=2)
    learned = []
    with playing(runs) as stack:
        sample = stack.learner.windows.sample
        stack.learner.windows.sample = lambda paths, *arguments: (
            learned.append(paths) or sample(paths, *arguments)
        )
        iterate(stack, 40)
    lengths = np.concatenate(
        [paths.lengths.sum(axis=1, keepdims=True) for paths in learned], axis=1
    )
    assert (lengths == 10).all()
    assert len({paths.lengths.shape for paths in learned}) > 1


HALVED = 1000.0 / 2**14  # width of the last interval


def solve(returns, allowed):
    return float(solve_coefficients(np.asarray(returns)[None], np.array([allowed]))[0])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(9, 20),
    spread=st.sampled_from([0.1, 5.0, 300.0, 1e4]),
    shift=st.sampled_from([-1e4, 0.0, 1e5]),
    allowed=st.sampled_from([1e-3, 0.02, 0.5, 2.0, 10.0]),
)
def test_coefficient_is_the_root(seed, count, spread, shift, allowed):
    returns = (shift + spread * np.random.default_rng(seed).normal(size=count)).tolist()
    actual = solve(returns, allowed)
    assert 0.0 <= actual <= 1000.0
    # The answer is the middle of the last interval; rounding of 1e5-large returns adds
    # a little.
    root = reference.root(returns, allowed)
    assert actual == pytest.approx(root, abs=0.51 * HALVED + 1e-6 * abs(shift) ** 0.5)


@pytest.mark.parametrize(("count", "expected"), [(0, 500.0), (8, 500.0), (9, 0.0)])
def test_few_or_equal_returns(count, expected):
    """Up to eight episodes say nothing; equal ones allow any step."""
    assert solve(np.full(count, 7.0), 0.01) == pytest.approx(expected, abs=HALVED)


@pytest.mark.parametrize(("length", "inert"), [(20, False), (400, True)])
def test_a_region_wider_than_episodes_can_diverge_is_known(length, inert):
    """Twenty weighted episodes diverge by ln 20 = 3 at most; 0.05 a step allows 1 in 20
    steps, 20 in 400.
    """
    region = TrustRegion(
        [OnlineConfig("none", divergence_per="step", max_divergence=0.05)]
    )
    region.update([[(float(k), length) for k in range(20)]], np.array([True]))
    assert region.is_inert.tolist() == [inert]
    assert (region.wanted[0] < 0.1) == inert
