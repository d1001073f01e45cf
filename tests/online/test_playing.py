"""What runs play and keep: every stored step, the law of their actions, the moments of what they saw."""

import math

import gymnasium
import numpy as np
import pytest
import torch
from scipy import stats

from koffline.data.transitions import Discrete
from koffline.online.networks import Actor, AgentStack, InputMoments, Shape
from tests.online.lockstep_runs import ENVIRONMENTS, forward, iterate, make_runs, playing
from tests.online.stacks import STATE, fill, make_agents


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_what_is_kept_is_what_happened(environment):
    """Every stored step again in a naive environment: true final observations, no path across a reset."""
    with playing(make_runs(environment, n_environments=2, capacity=None)) as stack:
        iterate(stack, 60)
        kept = [stack.replay.held(run) for run in range(4)]
    world = gymnasium.make(environment)
    world.reset(seed=0)
    for paths in kept:
        assert int(paths.lengths.sum()) == 600
        ended = 0
        for row in range(len(paths.lengths)):
            for t in range(paths.lengths[row]):
                last = t + 1 == paths.lengths[row]
                following, reward, terminated = replayed(
                    world, paths.observations[row, t], paths.actions[row, t]
                )
                np.testing.assert_allclose(paths.observations[row, t + 1], following, rtol=2e-4, atol=2e-4)
                assert paths.rewards[row, t] == pytest.approx(reward, rel=1e-3, abs=1e-3)
                assert bool(last and paths.terminated[row]) == terminated
            ended += int(paths.terminated[row] | paths.truncated[row])
        check_episodes(paths)
        assert ended > 0
        assert paths.truncated.any() == (environment == "Pendulum-v1")
    world.close()


def replayed(world, observation, action):
    """One step from the state that the observation tells."""
    inner = world.unwrapped
    if isinstance(action, np.ndarray):
        cosine, sine, speed = observation.astype(float)
        inner.state = np.array([math.atan2(sine, cosine), speed])
        following, reward, terminated, _, _ = inner.step(np.clip(action, -2.0, 2.0))
        return following, reward, terminated
    inner.state, inner.steps_beyond_terminated = observation.astype(float), None
    following, reward, terminated, _, _ = inner.step(int(action))
    return following, reward, terminated


def check_episodes(paths):
    """Paths of an episode join end to end; an episode begins at step 0 and after an end only."""
    running = {}
    for row in range(len(paths.lengths)):
        copy_of, episode, first = (
            int(getattr(paths, name)[row]) for name in ("environments", "episodes", "first_steps")
        )
        if copy_of in running:
            before, observation, length, over = running[copy_of]
            assert (episode, first) == ((before + 1, 0) if over else (before, length))
            if not over:
                np.testing.assert_array_equal(paths.observations[row, 0], observation)
        else:
            assert (episode, first) == (0, 0)
        final = paths.observations[row, paths.lengths[row]]
        over = bool(paths.terminated[row] | paths.truncated[row])
        running[copy_of] = episode, final, first + int(paths.lengths[row]), over


def test_played_actions_follow_the_policy():
    """At learning rate 0: what the replay holds, seen through the policy, is a standard normal sample."""
    runs = make_runs("Pendulum-v1", learning_rate=0.0, standardise=False, capacity=None)
    with playing(runs) as stack:
        for run, spread in enumerate((0.5, 1.0, 2.0, 1.5)):
            stack.learner.online.log_std[run] = math.log(spread)
        iterate(stack, 100)
        for run, spread in enumerate((0.5, 1.0, 2.0, 1.5)):
            held, agent = stack.replay.held(run), stack.agent(run)
            assert agent.log_std == pytest.approx(math.log(spread))
            inside = np.arange(10) < held.lengths[:, None]
            means = forward(agent.policy, held.observations[:, :-1][inside])
            noise = ((held.actions[inside] - means) / spread).reshape(-1)
            assert len(noise) == 1000
            assert stats.kstest(noise, "norm").pvalue > 1e-3
            assert abs(stats.spearmanr(noise[1:], noise[:-1]).statistic) < 0.12  # 3.8 deviations


def test_discrete_actions_follow_the_softmax():
    """The numpy policies against ordinary modules: probabilities, and the law of what is drawn."""
    agents = make_agents(2, discrete=True)
    stack = AgentStack.initialise(Shape(STATE, Discrete(2), (7, 5)), [(0, 0)] * 2, torch.float64)
    actor = Actor(stack)
    for run, agent in enumerate(agents):  # after the actor was made: it must see what changes
        agent.mean, agent.std = torch.zeros(STATE), torch.ones(STATE)
        fill(stack, run, agent.policy, agent.log_std, agent.value)
    rng = np.random.default_rng(0)
    states, draws = rng.normal(size=(2, 1, STATE)), 4000
    actions = actor.sample(np.tile(states, (1, draws, 1)), rng.random((2, draws)))
    for run, agent in enumerate(agents):
        outputs = agent.policy(torch.as_tensor(states[run, 0])).detach().numpy()
        chances = np.exp(outputs) / np.exp(outputs).sum()
        assert stats.chisquare(np.bincount(actions[run], minlength=2), chances * draws).pvalue > 1e-3
        assert actor.best(states)[run, 0] == chances.argmax()
        found = agent.log_probability(states[run, 0], 1)
        assert float(found.detach()) == pytest.approx(math.log(chances[1]))


def test_moments_are_those_of_all_observations_acted_on():
    rng = np.random.default_rng(0)
    moments = InputMoments(2, 2, [True, False])
    seen = [rng.normal(size=(2, size, 2)) * [1.0, 50.0] + [1e3, 0.0] for size in (1, 4, 2, 7)]
    for batch in seen:
        moments.update(batch)
    rows = np.concatenate(seen, axis=1)[0]
    np.testing.assert_allclose(moments.mean[0], rows.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(moments.std[0], rows.std(axis=0), rtol=1e-9)
    assert (moments.mean[1].tolist(), moments.std[1].tolist()) == ([0.0, 0.0], [1.0, 1.0])
