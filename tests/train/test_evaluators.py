"""d3rlpy's evaluators over a log of their own, and the return in an environment."""

import gymnasium
import numpy as np
import pytest

from koffline import ColumnarReplayBuffer, Discrete, Transitions
from koffline.algos.options import resolve_params
from koffline.algos.training import (
    LogEvaluator,
    build_networks,
    make_algorithm,
    own_randomness,
)
from koffline.data import quiet
from koffline.errors import ConfigError
from koffline.train.prepare import EnvironmentEvaluator
from tests.train.small_runs import make_log


def make(kind, log, seed=1, **params):
    own = {"observation_scaler": "standard", "reward_scaler": "standard", "batch_size": 8, **params}
    with own_randomness(seed), quiet():
        algo = make_algorithm(kind, resolve_params(kind, own))
        build_networks(algo, ColumnarReplayBuffer(log, 0), kind)
    return algo


def test_soft_opc():
    log = make_log()
    made, threshold = make("dqn", log), float(np.median(log.returns()))
    values = made.predict_value(log.observations, log.actions.reshape(-1, 1))
    good = np.repeat(log.returns() >= threshold, log.episode_lengths)
    measured = LogEvaluator("soft_opc", log, "a", return_threshold=threshold)(made)
    assert measured == pytest.approx(values[good].mean() - values.mean(), rel=1e-4)
    assert np.isnan(LogEvaluator("soft_opc", log, "a", return_threshold=1e9)(made))


def test_rows_without_episodes():
    log = make_log().replace(episode_ids=None, steps=None)
    algo = make("dqn", log)
    for kind in ("initial_value", "td_error", "discounted_sum_of_advantage"):
        assert np.isfinite(LogEvaluator(kind, log, "a")(algo))
    with pytest.raises(ConfigError, match="soft_opc needs episodes"):
        LogEvaluator("soft_opc", log, "a", return_threshold=0.0)
    with pytest.raises(ConfigError, match="for other actions"):
        LogEvaluator("continuous_action_diff", log, "a")


def test_mean_return_of_episodes_one_by_one():
    rows = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    flags = np.zeros(20, dtype=bool)
    log = Transitions(rows, np.arange(20) % 2, np.ones(20), rows, flags, flags, Discrete(2))
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
