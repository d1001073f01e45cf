"""Evaluators over columns: d3rlpy's numbers where d3rlpy is right, and the return in an environment."""

import numpy as np
import pytest
import torch

from koffline import ColumnarReplayBuffer, Discrete
from koffline.algos.evaluators import EnvironmentEvaluator, make_log_evaluator, own_randomness
from koffline.algos.from_config import build_networks, make_algorithm, resolve_params
from koffline.algos.loggers import quiet
from koffline.data.d3rlpy_import import import_d3rlpy
from koffline.errors import ConfigError
from tests.train.small_runs import make_log

metrics = import_d3rlpy().metrics


def make(kind, log, seed=1, **params):
    own = {"observation_scaler": "standard", "reward_scaler": "standard", "batch_size": 8, **params}
    with own_randomness(seed), quiet():
        algo = make_algorithm(kind, resolve_params(kind, own))
        build_networks(algo, ColumnarReplayBuffer(log, 0), kind)
    return algo


@pytest.mark.parametrize(
    ("kind", "theirs"),
    [
        ("td_error", metrics.TDErrorEvaluator),
        ("discounted_sum_of_advantage", metrics.DiscountedSumOfAdvantageEvaluator),
        ("average_value", metrics.AverageValueEstimationEvaluator),
        ("initial_value", metrics.InitialStateValueEstimationEvaluator),
    ],
)
@pytest.mark.parametrize("algo", ["dqn", "sac"])
def test_as_d3rlpys_on_short_episodes(kind, theirs, algo):
    log = make_log(discrete=algo == "dqn")
    made = make(algo, log)
    expected = theirs()(made, ColumnarReplayBuffer(log, 0))
    assert make_log_evaluator(kind, log, kind)(made) == pytest.approx(expected, rel=1e-5)


def test_soft_opc():
    log = make_log()
    made, threshold = make("dqn", log), float(np.median(log.returns()))
    expected = metrics.SoftOPCEvaluator(threshold)(made, ColumnarReplayBuffer(log, 0))
    evaluator = make_log_evaluator("soft_opc", log, "a", return_threshold=threshold)
    assert evaluator(made) == pytest.approx(expected, rel=1e-4)
    assert np.isnan(make_log_evaluator("soft_opc", log, "a", return_threshold=1e9)(made))


def test_actions_against_the_log_and_another_model(tmp_path):
    log, continuous = make_log(), make_log(discrete=False)
    dqn, sac = make("dqn", log), make("sac", continuous)
    buffer, other = ColumnarReplayBuffer(log, 0), ColumnarReplayBuffer(continuous, 0)
    match = make_log_evaluator("discrete_action_match", log, "a")(dqn)
    assert match == pytest.approx(metrics.DiscreteActionMatchEvaluator()(dqn, buffer))
    difference = make_log_evaluator("continuous_action_diff", continuous, "a")(sac)
    assert difference == pytest.approx(metrics.ContinuousActionDiffEvaluator()(sac, other), rel=1e-5)
    dqn.save(str(tmp_path / "dqn.d3"))
    sac.save(str(tmp_path / "sac.d3"))
    alike = make_log_evaluator("compare_discrete_action_match", log, "a", base=str(tmp_path / "dqn.d3"))
    assert alike(dqn) == 1.0
    far = make_log_evaluator("compare_continuous_action_diff", continuous, "a", base=str(tmp_path / "sac.d3"))
    assert far(sac) == 0.0
    assert far(make("td3", continuous, seed=2)) > 0.0


def test_long_episodes_are_one():
    """d3rlpy takes one state per 1024 rows and stops sums there, and fails where 1025 rows were cut."""
    log = make_log(episodes=2, length=1025)
    algo = make("dqn", log)
    starts = log.initial_observations()
    expected = algo.predict_value(starts, algo.predict(starts)).mean()
    assert make_log_evaluator("initial_value", log, "a")(algo) == pytest.approx(float(expected), rel=1e-5)
    actions = log.actions.reshape(-1, 1)
    advantages = algo.predict_value(log.observations, actions) - algo.predict_value(
        log.observations, algo.predict(log.observations)
    )
    total, sums = 0.0, []
    for row in reversed(range(len(log))):
        total = advantages[row] + (0.0 if log.steps[row] == 1024 else 0.99 * total)
        sums.append(total)
    measured = make_log_evaluator("discounted_sum_of_advantage", log, "a")(algo)
    assert measured == pytest.approx(np.mean(sums), rel=1e-4)


def test_rows_without_episodes():
    log = make_log().replace(episode_ids=None, steps=None)
    algo = make("dqn", log)
    assert np.isfinite(make_log_evaluator("initial_value", log, "a")(algo))
    assert np.isfinite(make_log_evaluator("discounted_sum_of_advantage", log, "a")(algo))
    with pytest.raises(ConfigError, match="soft_opc needs episodes"):
        make_log_evaluator("soft_opc", log, "a", return_threshold=0.0)


def test_training_draws_what_it_would_have_drawn():
    log = make_log(discrete=False)
    algo = make("bcq", log, reward_scaler=None)  # predict draws candidates
    evaluator = make_log_evaluator("average_value", log, "a")
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    first = evaluator(algo)
    assert torch.equal(torch.rand(3), expected)
    assert evaluator(algo) == first


class TestEnvironment:
    def log(self):
        generator = np.random.default_rng(0)
        observations = generator.normal(size=(20, 4)).astype(np.float32)
        from koffline import Transitions

        flags = np.zeros(20, dtype=bool)
        rest = (generator.integers(0, 2, 20), np.ones(20), observations, flags, flags, Discrete(2))
        return Transitions(observations, *rest)

    def test_mean_return_of_episodes_one_by_one(self):
        import gymnasium

        log = self.log()
        algo = make("dqn", log, reward_scaler=None)
        evaluator = EnvironmentEvaluator("CartPole-v1", log, episodes=4, seed=7)
        measured = evaluator(algo)
        returns = []
        for episode in range(4):
            env = gymnasium.make("CartPole-v1")
            observation, _ = env.reset(seed=7 + episode)
            over, total = False, 0.0
            while not over:
                observation, reward, ended, cut, _ = env.step(int(algo.predict(observation[None])[0]))
                total, over = total + reward, ended or cut
            returns.append(total)
        assert measured == np.mean(returns)
        assert evaluator(algo) == measured  # the same starts every time
        evaluator.close()

    def test_the_wrong_one(self):
        with pytest.raises(ConfigError, match="there is no environment 'CartPoll-v1'; did you mean CartPole"):
            EnvironmentEvaluator("CartPoll-v1", self.log())
