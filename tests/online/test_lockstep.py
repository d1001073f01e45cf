"""Runs in lock-step: alone or stacked, stopped and resumed, what they play and what they keep."""

import contextlib
import copy
import io
import math
from dataclasses import fields

import gymnasium
import numpy as np
import pytest
import torch
from scipy import stats

from koffline.errors import ConfigError
from koffline.online.config import CRITICS, OnlineConfig, OnlineRun
from koffline.online.lockstep import LockStep
from koffline.online.networks import Actor, AgentStack, InputMoments, Shape
from tests.online import reference_trust_pcl as reference
from tests.online.stacks import STATE, fill, make_agents

SMALL = {"hidden": (6, 5), "batch_size": 4, "learning_starts": 5, "capacity": 12, "evaluation_episodes": 1}
ENVIRONMENTS = ["Pendulum-v1", "CartPole-v1"]


def make_runs(environment, count=4, **changes):
    """One run of each critic, each with settings of its own."""
    own = [
        {
            "critic": CRITICS[k % 4],
            "window_length": (10, 3, 1, 5)[k % 4],
            "recency": (0.0, 0.1, 0.5, 0.01)[k % 4],
            "entropy_coef": 0.01 * k,
            "entropy_decay": 0.1,
            "learning_rate": 0.003 * (k + 1),
        }
        for k in range(count)
    ]
    configs = [OnlineConfig(environment, **{**SMALL, **one, **changes}) for one in own]
    return [OnlineRun(config, seed=10 + k) for k, config in enumerate(configs)]


@contextlib.contextmanager
def playing(runs, **others):
    with contextlib.closing(LockStep(runs, **others)) as stack:
        yield stack


def iterate(stack, count):
    for _ in range(count):
        stack.iterate()
    return stack


def agent_arrays(agent):
    """Every number of an agent by name."""
    found = {}
    for part in fields(agent):
        value = getattr(agent, part.name)
        if isinstance(value, tuple):
            value = np.concatenate([array.reshape(-1) for layer in value for array in layer])
        if part.name != "shape" and value is not None:
            found[part.name] = np.asarray(value)
    return found


def everything(stack):
    """What a user can see of every run; taking it twice would empty the metrics."""
    found = []
    evaluations, metrics = stack.evaluate(), stack.take_metrics()
    for run in range(len(stack.runs)):
        held = stack.replay.held(run).columns()
        numbers = {**agent_arrays(stack.agent(run)), **{f"replay.{k}": v for k, v in held.items()}}
        numbers |= {f"evaluation.{k}": np.asarray(v) for k, v in vars(evaluations[run]).items()}
        numbers |= {f"metrics.{k}": np.asarray(v) for k, v in metrics[run].items()}
        found.append(numbers)
    return found


def check_same(left, right, **tolerance):
    """Equal to the bit, or within a tolerance."""
    assert left.keys() == right.keys()
    for name in left:
        if tolerance and left[name].dtype.kind == "f":
            np.testing.assert_allclose(left[name], right[name], err_msg=name, **tolerance)
        else:
            np.testing.assert_array_equal(left[name], right[name], err_msg=name)


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_a_run_in_a_stack_is_the_run_alone(environment):
    """In float64, where the rounding of stacked products has no time to grow."""
    runs = make_runs(environment)
    with playing(runs, dtype=torch.float64) as stack:
        together = everything(iterate(stack, 30))
    for place, run in enumerate(runs):
        with playing([run], dtype=torch.float64) as alone:
            [single] = everything(iterate(alone, 30))
        check_same(together[place], single, rtol=1e-6, atol=1e-8)


def test_a_run_does_not_depend_on_its_place_or_its_neighbours():
    runs = make_runs("Pendulum-v1")
    with playing(runs, dtype=torch.float64) as stack:
        first = everything(iterate(stack, 20))
    with playing([runs[3], *make_runs("Pendulum-v1", 2)[:2]], dtype=torch.float64) as stack:
        second = everything(iterate(stack, 20))
    check_same(first[3], second[0], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("environment", ENVIRONMENTS)
@pytest.mark.parametrize("capacity", [12, None])
def test_resuming_changes_nothing(environment, capacity):
    """In the middle of an episode, through a file, bit for bit, and again after a second stop."""
    runs = make_runs(environment, capacity=capacity, n_environments=2)
    with playing(runs) as stack:
        iterate(stack, 17)
        first = written(stack.state_dict())
        iterate(stack, 6)
        second = written(stack.state_dict())
        iterate(stack, 9)
        expected, counters = everything(stack), (stack.steps, stack.iterations)
    for state, rest in ((first, 15), (second, 9)):
        with playing(runs) as stack:
            iterate(stack, 3)  # all of it must be overwritten
            stack.evaluate()
            assert stack.load_state_dict(state)
            iterate(stack, rest)
            assert (stack.steps, stack.iterations) == counters
            for left, right in zip(expected, everything(stack), strict=True):
                check_same(left, right)


def written(state):
    """The state as it comes back from a file."""
    file = io.BytesIO()
    torch.save(copy.deepcopy(state), file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_evaluating_and_looking_change_nothing():
    runs = make_runs("CartPole-v1")
    with playing(runs) as quiet, playing(runs) as watched:
        iterate(quiet, 20)
        for _ in range(20):
            watched.iterate()
            watched.evaluate()
            watched.state_dict()
            watched.agent(0)
        watched_numbers, quiet_numbers = everything(watched), everything(quiet)
        for left, right in zip(quiet_numbers, watched_numbers, strict=True):
            # What was earned by sampling is told once: since the last evaluation.
            left.pop("evaluation.sampled_return"), right.pop("evaluation.sampled_return")
            check_same(left, right)


def test_evaluation_plays_the_mean_action():
    """Every run's own episodes again, with ordinary modules, in an environment of its own."""
    with playing(make_runs("Pendulum-v1", evaluation_episodes=2), dtype=torch.float64) as stack:
        iterate(stack, 12)
        found = stack.evaluate()
        agents = [stack.agent(run) for run in range(4)]
    for agent, evaluation in zip(agents, found, strict=True):
        returns = [play_mean_action(agent, 10_000 + episode) for episode in range(2)]
        assert evaluation.mean_return == pytest.approx(np.mean(returns), rel=1e-5)
        assert evaluation.length == 200.0
        assert evaluation.step == 120


def play_mean_action(agent, seed):
    environment = gymnasium.make("Pendulum-v1")
    observation, _ = environment.reset(seed=seed)
    total, over = 0.0, False
    while not over:
        mean = forward(agent.policy, (observation - agent.observation_mean) / agent.observation_std)
        observation, reward, terminated, truncated, _ = environment.step(np.clip(mean, -2.0, 2.0))
        total, over = total + reward, terminated or truncated
    environment.close()
    return total


def forward(layers, inputs):
    for weight, bias in layers[:-1]:
        inputs = np.tanh(inputs @ weight + bias)
    return inputs @ layers[-1][0] + layers[-1][1]


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


def test_discrete_actions_follow_the_policy():
    """Each action's count against the sum of its probabilities, in units of its deviation."""
    runs = make_runs("CartPole-v1", learning_rate=0.0, standardise=False, capacity=None)
    with playing(runs) as stack:
        iterate(stack, 100)
        for run in range(4):
            held, agent = stack.replay.held(run), stack.agent(run)
            inside = np.arange(10) < held.lengths[:, None]
            logits = forward(agent.policy, held.observations[:, :-1][inside])
            chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
            surplus = (held.actions[inside] - chances[:, 1]).sum()
            assert abs(surplus) < 3.5 * math.sqrt((chances[:, 0] * chances[:, 1]).sum())
            order = np.argsort(chances[:, 1])
            low, high = held.actions[inside][order[:300]].mean(), held.actions[inside][order[-300:]].mean()
            expected = chances[order[-300:], 1].mean() - chances[order[:300], 1].mean()
            assert high - low == pytest.approx(expected, abs=0.13)  # 3.2 deviations


@pytest.mark.parametrize("discrete", [False, True], ids=["box", "discrete"])
def test_acting_is_sampling_from_the_policy(discrete):
    """The numpy policies against ordinary modules: means or probabilities, and the law of what is drawn."""
    from koffline.data.transitions import Continuous, Discrete

    shape = Shape(STATE, Discrete(2) if discrete else Continuous(2), (7, 5))
    agents = make_agents(2, discrete)
    stack = AgentStack.initialise(shape, [(0, 0)] * 2, torch.float64)
    actor = Actor(stack)
    for run, agent in enumerate(agents):  # after the actor was made: it must see what changes
        agent.mean, agent.std = torch.zeros(STATE), torch.ones(STATE)
        fill(stack, run, agent.policy, agent.log_std, agent.value)
    rng = np.random.default_rng(0)
    states, draws = rng.normal(size=(2, 1, STATE)), 4000
    many = np.tile(states, (1, draws, 1))
    noise = rng.random((2, draws)) if discrete else rng.standard_normal((2, draws, 2))
    actions, best = actor.sample(many, noise), actor.best(states)
    for run, agent in enumerate(agents):
        outputs = agent.policy(torch.as_tensor(states[run, 0])).detach().numpy()
        np.testing.assert_allclose(actor.outputs(states)[run, 0], outputs, rtol=1e-12)
        if discrete:
            chances = np.exp(outputs) / np.exp(outputs).sum()
            assert stats.chisquare(np.bincount(actions[run], minlength=2), chances * draws).pvalue > 1e-3
            assert best[run, 0] == chances.argmax()
            naive = math.log(chances[1])
            found = agent.log_probability(states[run, 0], 1)
        else:
            spread = agent.log_std.exp().detach().numpy()
            for k in range(2):
                assert stats.kstest((actions[run, :, k] - outputs[k]) / spread[k], "norm").pvalue > 1e-3
            np.testing.assert_allclose(best[run, 0], outputs)
            naive = stats.norm.logpdf(actions[run, 0], outputs, spread).sum()
            found = agent.log_probability(states[run, 0], actions[run, 0])
        assert float(found.detach()) == pytest.approx(naive)


@pytest.mark.parametrize("noise", [0.0, np.nextafter(1.0, 0.0)])
def test_the_edges_of_a_uniform_number(noise):
    """An impossible action is never taken and the last one never passed."""
    shape = Shape(1, make_space(3), ())
    stack = AgentStack.initialise(shape, [(0, 0)], torch.float32)
    stack.flat.zero_()
    stack.policy.layers(stack.policy.flat)[-1][1][0, 0] = torch.tensor([-1e4, 0.0, -1e4])
    assert Actor(stack).sample(np.zeros((1, 1, 1), np.float32), np.full((1, 1), noise)).item() == 1


def make_space(n):
    from koffline.data.transitions import Discrete

    return Discrete(n)


def test_moments_are_those_of_all_observations_acted_on():
    rng = np.random.default_rng(0)
    moments = InputMoments(3, 2, [True, False, True])
    seen = [[], [], []]
    for size in (1, 4, 2, 7):
        batch = rng.normal(size=(3, size, 2)) * [1.0, 50.0] + [1e3, 0.0]
        valid = rng.random((3, size)) < 0.7
        valid[0] = True
        valid[2] &= size > 4  # nothing valid for a while
        moments.update(batch, valid)
        for run in range(3):
            seen[run].extend(batch[run][valid[run]])
    for run in (0, 2):
        rows = np.array(seen[run])
        np.testing.assert_allclose(moments.mean[run], rows.mean(axis=0), rtol=1e-12)
        np.testing.assert_allclose(moments.std[run], rows.std(axis=0), rtol=1e-9)
    assert (moments.mean[1].tolist(), moments.std[1].tolist()) == ([0.0, 0.0], [1.0, 1.0])


def test_moments_of_a_stack():
    with playing(make_runs("Pendulum-v1", capacity=None)) as stack:
        iterate(stack, 30)
        for run in range(4):
            held, agent = stack.replay.held(run), stack.agent(run)
            rows = held.observations[:, :-1][np.arange(10) < held.lengths[:, None]]
            np.testing.assert_allclose(agent.observation_mean, rows.mean(axis=0), rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(agent.observation_std, rows.std(axis=0), rtol=1e-4)


def test_the_trust_region_follows_the_last_episodes():
    """CartPole with rewards of one: the coefficient from its last 20 episodes, smoothed every iteration."""
    runs = make_runs("CartPole-v1", capacity=None, learning_rate=0.0, kl_coef_min=0.0)
    with playing(runs) as stack:
        smoothed, wanted, episodes = [500.0] * 4, [500.0] * 4, [[] for _ in runs]
        for _ in range(40):
            stack.iterate()
            for run in range(4):
                fresh = episodes_of(stack.replay.held(run))
                if len(fresh) > len(episodes[run]):
                    last = fresh[-20:]
                    allowed = runs[run].config.max_divergence * np.mean(last)
                    wanted[run] = root_or_500(last, allowed)
                episodes[run] = fresh
                smoothed[run] = 0.99 * smoothed[run] + 0.01 * wanted[run]
                assert stack.agent(run).kl_coef == pytest.approx(smoothed[run], abs=0.05)
    assert min(len(finished) for finished in episodes) > 9


def root_or_500(returns, allowed):
    """By bisection of the naive divergence."""
    if len(returns) <= 8:
        return 500.0
    low, high = 1e-6, 1000.0
    for _ in range(40):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if reference.divergence(returns, middle) > allowed else (low, middle)
    return low


def episodes_of(paths):
    """Lengths, which are the returns, of the finished episodes."""
    over = paths.terminated | paths.truncated
    return [float(f + n) for f, n, o in zip(paths.first_steps, paths.lengths, over, strict=True) if o]


def test_learning_begins_late_and_targets_begin_as_copies():
    with playing([*make_runs("Pendulum-v1", 1), OnlineRun(odd := make_odd(), 10)]) as stack:
        first = [agent_arrays(stack.agent(run)) for run in range(2)]
        iterate(stack, 4)
        before = [agent_arrays(stack.agent(run)) for run in range(2)]
        assert stack.take_metrics() == [{}, {}]
        stack.iterate()
        after = [agent_arrays(stack.agent(run)) for run in range(2)]
    assert odd.learning_starts == 5
    for run in range(2):
        np.testing.assert_array_equal(first[run]["policy"], before[run]["policy"])
        assert not np.array_equal(before[run]["policy"], after[run]["policy"])
        assert not np.array_equal(before[run]["value"], after[run]["value"])
    np.testing.assert_array_equal(first[0]["policy"], first[0]["target_policy"])
    np.testing.assert_array_equal(first[0]["value"], first[0]["target_value"])
    np.testing.assert_array_equal(first[0]["policy"], first[1]["policy"])  # the same seed
    assert not np.isclose(first[1]["policy"], first[1]["target_policy"]).any()
    assert not np.isclose(first[1]["value"], first[1]["target_value"]).any()


def make_odd():
    return make_runs("Pendulum-v1", 1)[0].config.with_changes(legacy_targets=True)


def test_the_entropy_coefficient_decays_smoothly():
    config = OnlineConfig("Pendulum-v1", entropy_coef=0.1, entropy_decay=0.1, **SMALL)
    constant = config.with_changes(entropy_decay=None)
    with playing([OnlineRun(config, 0), OnlineRun(constant, 0)]) as stack:
        for iterations, expected in ((0, 0.1), (1250, 0.1 * math.sqrt(0.1)), (2500, 0.01), (5000, 0.001)):
            stack.iterations = iterations
            assert stack.agent(0).entropy_coef == pytest.approx(expected)
            assert stack.agent(1).entropy_coef == 0.1


def test_settings_that_cannot_share_a_stack():
    config = OnlineConfig("Pendulum-v1", **SMALL)
    with pytest.raises(
        ConfigError, match=r"batch_size is 4 in one run and 5 in another; put them in separate"
    ):
        LockStep([OnlineRun(config, 0), OnlineRun(config.with_changes(batch_size=5), 1)])
    with pytest.raises(ConfigError, match="runs is empty"):
        LockStep([])
