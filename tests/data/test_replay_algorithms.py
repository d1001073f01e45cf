"""Stock algorithms, evaluators and scalers of d3rlpy, unchanged on our buffer."""

import numpy as np
import pytest
import structlog

from koffline.data.d3rlpy_import import import_d3rlpy
from koffline.data.replay import ColumnarReplayBuffer, to_d3rlpy
from tests.data.logs import roll_out
from tests.data.replay_logs import long_log, rows_of

d3rlpy = import_d3rlpy()

QUIET = {"show_progress": False, "logger_adapter": d3rlpy.logging.NoopAdapterFactory()}


@pytest.fixture(autouse=True, scope="module")
def quiet_d3rlpy():
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    yield
    structlog.reset_defaults()


def weights_of(algo) -> np.ndarray:
    modules = algo.impl.q_function
    return np.concatenate([p.detach().numpy().reshape(-1) for p in modules.parameters()])


DISCRETE = {
    "DQN": lambda **k: d3rlpy.algos.DQNConfig(batch_size=16, **k),
    "DiscreteSAC": lambda **k: d3rlpy.algos.DiscreteSACConfig(batch_size=16, **k),
    "DiscreteCQL": lambda **k: d3rlpy.algos.DiscreteCQLConfig(batch_size=16, **k),
}
CONTINUOUS = {
    "SAC": lambda **k: d3rlpy.algos.SACConfig(batch_size=16, **k),
    "TD3PlusBC": lambda **k: d3rlpy.algos.TD3PlusBCConfig(batch_size=16, **k),
    "CQL": lambda **k: d3rlpy.algos.CQLConfig(batch_size=16, **k),
    "CalQL": lambda **k: d3rlpy.algos.CalQLConfig(batch_size=16, **k),
    "ReBRAC": lambda **k: d3rlpy.algos.ReBRACConfig(batch_size=16, **k),
}


class TestStockAlgorithms:
    @pytest.mark.parametrize("name", [*DISCRETE, *CONTINUOUS])
    @pytest.mark.parametrize("episodes", [True, False])
    def test_fit(self, name, episodes):
        if name == "CalQL" and not episodes:
            pytest.skip("CalQL needs returns-to-go")
        d3rlpy.seed(0)
        config = {**DISCRETE, **CONTINUOUS}[name]
        algo = config().create()
        buffer = ColumnarReplayBuffer(long_log(name in DISCRETE, episodes), seed=0)
        algo.build_with_dataset(buffer)
        before = weights_of(algo)
        history = algo.fit(buffer, n_steps=2, n_steps_per_epoch=2, **QUIET)
        assert len(history) == 1
        assert all(np.isfinite(value) for value in history[0][1].values())
        assert not np.array_equal(before, weights_of(algo))

    @pytest.mark.parametrize("discrete", [True, False])
    def test_fit_of_fqe(self, discrete):
        d3rlpy.seed(0)
        buffer = ColumnarReplayBuffer(long_log(discrete), seed=0)
        policy = (DISCRETE["DQN"] if discrete else CONTINUOUS["TD3PlusBC"])().create()
        policy.build_with_dataset(buffer)
        estimator = d3rlpy.ope.DiscreteFQE if discrete else d3rlpy.ope.FQE
        fqe = estimator(policy, d3rlpy.ope.FQEConfig(batch_size=16))
        history = fqe.fit(
            buffer,
            n_steps=3,
            n_steps_per_epoch=3,
            evaluators={"initial": d3rlpy.metrics.InitialStateValueEstimationEvaluator()},
            **QUIET,
        )
        assert np.isfinite(history[0][1]["loss"])
        assert np.isfinite(history[0][1]["initial"])

    @pytest.mark.parametrize("discrete", [True, False])
    def test_the_same_rows_give_the_same_update_as_in_d3rlpys_buffer(self, discrete):
        log = long_log(discrete)
        stock, ours = to_d3rlpy(log), ColumnarReplayBuffer(log, seed=0)
        batch = ours.sample_transition_batch(16)
        same = d3rlpy.dataset.TransitionMiniBatch.from_transitions(
            [stock.transition_picker(*stock.buffer[int(row)]) for row in rows_of(batch, log)]
        )
        results = []
        for buffer, taken in ((ours, batch), (stock, same)):
            d3rlpy.seed(0)
            algo = (DISCRETE["DQN"] if discrete else CONTINUOUS["SAC"])().create()
            algo.build_with_dataset(buffer)
            algo.update(taken)
            results.append(weights_of(algo))
        np.testing.assert_allclose(results[0], results[1], rtol=1e-6, atol=1e-7)


@pytest.fixture(scope="module")
def dqn():
    d3rlpy.seed(0)
    algo = DISCRETE["DQN"]().create()
    algo.build_with_dataset(ColumnarReplayBuffer(long_log()))
    return algo


class TestEvaluatorsAndScalers:
    @pytest.mark.parametrize("episodes", [True, False])
    def test_evaluators_by_hand(self, dqn, episodes):
        log = long_log(episodes=episodes)
        buffer = ColumnarReplayBuffer(log)
        observations, following = log.observations, log.next_observations
        greedy = dqn.predict(observations)
        values = dqn.predict_value(observations, greedy)
        logged = dqn.predict_value(observations, log.actions)
        target = dqn.predict_value(following, dqn.predict(following)) * ~log.terminated
        metrics = d3rlpy.metrics
        expected = {
            metrics.AverageValueEstimationEvaluator(): values.mean(),
            metrics.DiscreteActionMatchEvaluator(): np.mean(greedy == log.actions),
            metrics.TDErrorEvaluator(): np.mean((logged - log.rewards - dqn.gamma * target) ** 2),
            metrics.InitialStateValueEstimationEvaluator(): values[
                log.episode_starts if episodes else [0]
            ].mean(),
        }
        for evaluator, value in expected.items():
            assert evaluator(dqn, buffer) == pytest.approx(value, rel=1e-4), type(evaluator).__name__
        soft = metrics.SoftOPCEvaluator(return_threshold=-1e9)(dqn, buffer)
        assert soft == pytest.approx(0.0, abs=1e-6)
        assert np.isfinite(metrics.DiscountedSumOfAdvantageEvaluator()(dqn, buffer))

    def test_an_episode_of_1025_steps(self, dqn):
        """d3rlpy's evaluators fail on a cut episode of this length in d3rlpy's own buffer."""
        log = roll_out(("truncated",), (1025,)).transitions()
        evaluator = d3rlpy.metrics.AverageValueEstimationEvaluator()
        cut = d3rlpy.dataset.Episode(
            log.observations, log.actions.reshape(-1, 1), log.rewards.reshape(-1, 1), False
        )
        stock = d3rlpy.dataset.create_infinite_replay_buffer(episodes=[cut])
        with pytest.raises(IndexError):
            evaluator(dqn, stock)
        expected = dqn.predict_value(log.observations, dqn.predict(log.observations)).mean()
        assert evaluator(dqn, ColumnarReplayBuffer(log)) == pytest.approx(expected, rel=1e-4)

    @pytest.mark.parametrize("episodes", [True, False])
    def test_scalers_see_every_row(self, episodes):
        log = long_log(discrete=False, episodes=episodes)
        buffer = ColumnarReplayBuffer(log)
        pre = d3rlpy.preprocessing
        algo = CONTINUOUS["SAC"](
            observation_scaler=pre.StandardObservationScaler(),
            action_scaler=pre.MinMaxActionScaler(),
            reward_scaler=pre.StandardRewardScaler(),
        ).create()
        algo.fit(buffer, n_steps=1, n_steps_per_epoch=1, **QUIET)
        observed = log.observations.astype(np.float64)
        np.testing.assert_allclose(algo.observation_scaler.mean, observed.mean(axis=0), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(algo.observation_scaler.std, observed.std(axis=0), rtol=1e-4)
        np.testing.assert_allclose(algo.action_scaler.minimum, log.actions.min(axis=0))
        np.testing.assert_allclose(algo.action_scaler.maximum, log.actions.max(axis=0))
        assert algo.reward_scaler.mean == pytest.approx(log.rewards.mean(), rel=1e-4)

    def test_scalers_by_trajectories(self):
        log = long_log(discrete=False)
        buffer = ColumnarReplayBuffer(log)
        scaler = d3rlpy.preprocessing.MinMaxObservationScaler()
        scaler.fit_with_trajectory_slicer(buffer.episodes, buffer.trajectory_slicer)
        np.testing.assert_array_equal(scaler.minimum, log.observations.min(axis=0))
        np.testing.assert_array_equal(scaler.maximum, log.observations.max(axis=0))
