"""ColumnarReplayBuffer: the right rows as d3rlpy hands them over, for its own
algorithms and evaluators.
"""

import numpy as np
import pytest
import structlog

from koffline.data import import_d3rlpy
from koffline.data.replay import ColumnarReplayBuffer, from_d3rlpy, to_d3rlpy
from koffline.data.transitions import Continuous, Discrete, Transitions
from koffline.errors import DataError
from tests.data.logs import assert_same_rows, roll_out

d3rlpy = import_d3rlpy()
ENDS = ("truncated", "terminated", "truncated", "terminated", "neither")
ALONE = {"episode_ids": None, "steps": None}
QUIET = {"show_progress": False, "logger_adapter": d3rlpy.logging.NoopAdapterFactory()}
DISCRETE = pytest.mark.parametrize("discrete", [True, False])
EPISODES = pytest.mark.parametrize("episodes", [True, False])


def make_log(discrete=True, **changes) -> Transitions:
    return roll_out(ENDS, discrete=discrete).transitions(**changes)


def long_log(discrete=True, episodes=True) -> Transitions:
    rollout = roll_out(
        ("terminated", "truncated") * 10, (12, 9) * 10, discrete=discrete
    )
    return rollout.transitions(**({} if episodes else ALONE))


def rows_of(batch, log) -> np.ndarray:
    """Which rows a batch holds, told by the rewards, all of them different."""
    assert len(np.unique(log.rewards.astype(np.float32))) == len(log)
    order = np.argsort(log.rewards.astype(np.float32))
    return order[
        np.searchsorted(
            log.rewards.astype(np.float32)[order], batch.rewards.reshape(-1)
        )
    ]


@pytest.fixture(autouse=True, scope="module")
def quiet_d3rlpy():
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    yield
    structlog.reset_defaults()


class TestBatches:
    @DISCRETE
    @EPISODES
    def test_every_column_is_of_the_same_row(self, discrete, episodes):
        log = make_log(discrete, **({} if episodes else ALONE))
        batch = ColumnarReplayBuffer(log, seed=0).sample_transition_batch(200)
        rows = rows_of(batch, log)
        # the last rows of cut episodes are drawn too
        assert set(rows) == set(range(15))
        actions = log.actions.reshape(15, -1).astype(np.float32)
        following = [
            row + 1 if episodes and row + 1 < 15 and log.steps[row + 1] else row
            for row in rows
        ]
        np.testing.assert_array_equal(batch.observations, log.observations[rows])
        np.testing.assert_array_equal(batch.actions, actions[rows])
        np.testing.assert_array_equal(
            batch.next_observations, log.next_observations[rows]
        )
        np.testing.assert_array_equal(batch.next_actions, actions[following])
        np.testing.assert_array_equal(
            batch.terminals, log.terminated[rows].reshape(-1, 1)
        )
        np.testing.assert_array_equal(batch.intervals, np.ones((200, 1)))
        assert batch.rewards.shape == (200, 1)

    def test_rows_are_drawn_uniformly_or_in_proportion_to_weights(self):
        for log, share in (
            (make_log(), np.ones(15)),
            (make_log(weights=np.arange(15.0)), np.arange(15.0)),
        ):
            batch = ColumnarReplayBuffer(log, seed=0).sample_transition_batch(15_000)
            counts = np.bincount(rows_of(batch, log), minlength=15)
            expected = 15_000 * share / share.sum()
            # each count is binomial: five standard deviations, and none without weight
            assert (np.abs(counts - expected) <= 5 * np.sqrt(expected)).all()

    def test_seeds(self):
        log = make_log()

        def draw(seed):
            return (
                ColumnarReplayBuffer(log, seed=seed).sample_transition_batch(20).rewards
            )

        np.testing.assert_array_equal(draw(1), draw(1))
        assert not np.array_equal(draw(1), draw(2))
        d3rlpy.seed(3)
        first = draw(None)
        assert not np.array_equal(first, draw(None))
        d3rlpy.seed(3)
        np.testing.assert_array_equal(first, draw(None))

    def test_returns_to_go_reach_the_end_of_the_episode(self):
        log = make_log()
        buffer = ColumnarReplayBuffer(log, seed=0)
        batch = buffer.sample_transition_batch(40)
        transition = buffer.sample_transition()
        rows = [
            *rows_of(batch, log),
            *np.flatnonzero(log.rewards.astype(np.float32) == transition.reward[0]),
        ]
        for row, seen in zip(rows, [*batch.transitions, transition], strict=True):
            np.testing.assert_array_equal(seen.observation, log.observations[row])
            np.testing.assert_array_equal(
                seen.next_observation, log.next_observations[row]
            )
            end = next((i for i in range(row + 1, 15) if log.steps[i] == 0), 15)
            np.testing.assert_array_equal(
                seen.rewards_to_go.reshape(-1), np.float32(log.rewards[row:end])
            )
        alone = ColumnarReplayBuffer(make_log(**ALONE)).sample_transition_batch(2)
        with pytest.raises(
            DataError, match="returns-to-go and trajectories need episodes"
        ):
            _ = alone.transitions[0]

    def test_trajectories_match_d3rlpys(self):
        log = make_log()
        batch = ColumnarReplayBuffer(log, seed=0).sample_trajectory_batch(50, 3)
        assert batch.observations.shape == (50, 3, 3)
        rewards = log.rewards.astype(np.float32)
        for i in range(50):
            row = int(np.flatnonzero(rewards == batch.rewards[i, -1, 0])[0])
            real = int(batch.masks[i].sum())
            assert real == min(3, log.steps[row] + 1)
            rows = np.arange(row - real + 1, row + 1)
            np.testing.assert_array_equal(
                batch.observations[i, -real:], log.observations[rows]
            )
            np.testing.assert_array_equal(
                batch.actions[i, -real:, 0], log.actions[rows]
            )
            np.testing.assert_array_equal(
                batch.timesteps[i, -real:], log.steps[rows] + 1
            )
            returns = log.returns_to_go()[rows]
            np.testing.assert_allclose(
                batch.returns_to_go[i, -real:, 0], returns, rtol=1e-5, atol=1e-6
            )


@pytest.mark.parametrize("grow", ["append", "append_episode", "clip_episode"])
def test_growing_is_refused_with_the_remedy(grow):
    with pytest.raises(
        DataError, match=r"cannot grow; for online training use .*to_d3r"
    ):
        getattr(ColumnarReplayBuffer(make_log()).buffer, grow)(None)


@DISCRETE
def test_to_d3rlpy_and_back(discrete):
    log = make_log(discrete)
    stock = to_d3rlpy(log)
    assert stock.transition_count == 15
    again = from_d3rlpy(stock)
    cut = np.append(log.truncated[:-1], True)
    expected = log.replace(rewards=log.rewards.astype(np.float32), truncated=cut)
    assert_same_rows(again, expected, terminal_next=False)
    assert again.action_space == (Discrete(3) if discrete else Continuous(2))
    assert from_d3rlpy(ColumnarReplayBuffer(log)) is log


def weights_of(algo) -> np.ndarray:
    return np.concatenate(
        [p.detach().numpy().reshape(-1) for p in algo.impl.q_function.parameters()]
    )


def make_algo(name, **options):
    d3rlpy.seed(0)
    return getattr(d3rlpy.algos, f"{name}Config")(batch_size=16, **options).create()


@DISCRETE
def test_the_same_rows_give_the_same_update_as_in_d3rlpys_buffer(discrete):
    log = long_log(discrete)
    ours = ColumnarReplayBuffer(log, seed=0)
    batch = ours.sample_transition_batch(16)
    stock = to_d3rlpy(log)
    results = []
    picked = [
        stock.transition_picker(*stock.buffer[int(row)]) for row in rows_of(batch, log)
    ]
    theirs = d3rlpy.dataset.TransitionMiniBatch.from_transitions(picked)
    for buffer, taken in ((ours, batch), (stock, theirs)):
        algo = make_algo("DQN" if discrete else "SAC")
        algo.build_with_dataset(buffer)
        algo.update(taken)
        results.append(weights_of(algo))
    np.testing.assert_allclose(results[0], results[1], rtol=1e-6, atol=1e-7)


@pytest.fixture(scope="module")
def dqn():
    algo = make_algo("DQN")
    algo.build_with_dataset(ColumnarReplayBuffer(long_log()))
    return algo


class TestEvaluatorsAndScalers:
    @EPISODES
    def test_evaluators_by_hand(self, dqn, episodes):
        log = long_log(episodes=episodes)
        buffer = ColumnarReplayBuffer(log)
        observations = log.observations
        following = log.next_observations
        greedy = dqn.predict(observations)
        values = dqn.predict_value(observations, greedy)
        logged = dqn.predict_value(observations, log.actions)
        target = dqn.predict_value(following, dqn.predict(following)) * ~log.terminated
        starts = log.episode_starts if episodes else [0]
        metrics = d3rlpy.metrics
        expected = {
            metrics.AverageValueEstimationEvaluator(): values.mean(),
            metrics.DiscreteActionMatchEvaluator(): np.mean(greedy == log.actions),
            metrics.TDErrorEvaluator(): np.mean(
                (logged - log.rewards - dqn.gamma * target) ** 2
            ),
            metrics.InitialStateValueEstimationEvaluator(): values[starts].mean(),
        }
        for evaluator, value in expected.items():
            assert evaluator(dqn, buffer) == pytest.approx(value, rel=1e-4), type(
                evaluator
            ).__name__

    def test_an_episode_that_was_cut_fills_whole_batches(self, dqn):
        """d3rlpy's evaluators go by 1024 rows, and would ask for a batch of the step
        that only ends it.
        """
        buffer = ColumnarReplayBuffer(roll_out(("truncated",), (1024,)).transitions())
        assert np.isfinite(d3rlpy.metrics.TDErrorEvaluator()(dqn, buffer))

    @EPISODES
    def test_scalers_see_every_row(self, episodes):
        log = long_log(discrete=False, episodes=episodes)
        buffer = ColumnarReplayBuffer(log)
        pre = d3rlpy.preprocessing
        algo = make_algo(
            "SAC",
            observation_scaler=pre.StandardObservationScaler(),
            action_scaler=pre.MinMaxActionScaler(),
            reward_scaler=pre.StandardRewardScaler(),
        )
        algo.fit(buffer, n_steps=1, n_steps_per_epoch=1, **QUIET)
        observed = log.observations.astype(np.float64)
        np.testing.assert_allclose(
            algo.observation_scaler.mean, observed.mean(axis=0), rtol=1e-4, atol=1e-6
        )
        np.testing.assert_allclose(
            algo.observation_scaler.std, observed.std(axis=0), rtol=1e-4
        )
        np.testing.assert_allclose(algo.action_scaler.minimum, log.actions.min(axis=0))
        assert algo.reward_scaler.mean == pytest.approx(log.rewards.mean(), rel=1e-4)
        if episodes:
            scaler = pre.MinMaxObservationScaler()
            scaler.fit_with_trajectory_slicer(buffer.episodes, buffer.trajectory_slicer)
            np.testing.assert_array_equal(scaler.maximum, log.observations.max(axis=0))
