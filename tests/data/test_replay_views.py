"""Episodes and windows as d3rlpy asks for them, and its own buffers made of ours."""

import numpy as np
import pytest
import structlog

from koffline.data.d3rlpy_import import import_d3rlpy
from koffline.data.replay import ColumnarReplayBuffer, ReadOnlyBufferError, from_d3rlpy, to_d3rlpy
from koffline.data.replay_views import EpisodeView, RowWindow
from koffline.data.transitions import Continuous, Discrete
from koffline.errors import DataError, KofflineError
from tests.data.logs import assert_same_rows, roll_out
from tests.data.replay_logs import long_log, make_log

d3rlpy = import_d3rlpy()


@pytest.fixture(autouse=True, scope="module")
def quiet_d3rlpy():
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    yield
    structlog.reset_defaults()


class TestViews:
    @pytest.mark.parametrize("discrete", [True, False])
    def test_d3rlpys_picker_finds_every_row_of_an_episode(self, discrete):
        log = make_log(discrete)
        buffer = ColumnarReplayBuffer(log)
        picker = d3rlpy.dataset.BasicTransitionPicker()
        assert type(buffer.transition_picker) is d3rlpy.dataset.BasicTransitionPicker
        row = 0
        for episode in buffer.episodes:
            assert len(episode) == episode.size() == episode.transition_count
            for index in range(episode.transition_count):
                seen = picker(episode, index)
                np.testing.assert_array_equal(seen.observation, log.observations[row])
                np.testing.assert_array_equal(seen.action.reshape(log.actions[row].shape), log.actions[row])
                assert seen.terminal == log.terminated[row]
                if not seen.terminal:
                    np.testing.assert_array_equal(seen.next_observation, log.next_observations[row])
                row += 1
        assert row == 15

    def test_episodes_as_d3rlpy_asks_for_them(self):
        log = make_log()
        buffer = ColumnarReplayBuffer(log)
        assert buffer.size() == len(buffer.episodes) == 5
        assert buffer.transition_count == len(buffer.buffer) == buffer.buffer.transition_count == 15
        episode, index = buffer.buffer[5]
        assert isinstance(episode, EpisodeView)
        assert index == 1
        np.testing.assert_array_equal(episode.observations[1], log.observations[5])
        np.testing.assert_allclose([e.compute_return() for e in buffer.buffer.episodes], log.returns())
        assert [e.terminated for e in buffer.episodes[:3]] == [False, True, False]
        assert buffer.episodes[-1].rewards.shape == (2, 1)
        assert episode.observation_signature == buffer.dataset_info.observation_signature
        assert episode.action_signature == buffer.dataset_info.action_signature
        assert episode.reward_signature == buffer.dataset_info.reward_signature
        with pytest.raises(IndexError):
            _ = buffer.episodes[5]

    def test_the_declared_space_counts_not_the_actions_seen(self):
        info = ColumnarReplayBuffer(make_log(action_space=Discrete(9))).dataset_info
        assert info.action_size == 9
        assert info.action_space == d3rlpy.ActionSpace.DISCRETE
        info = ColumnarReplayBuffer(make_log(False)).dataset_info
        assert info.action_size == 2
        assert info.action_space == d3rlpy.ActionSpace.CONTINUOUS

    def test_episodes_fill_a_stock_buffer(self):
        log = make_log()
        stock = d3rlpy.dataset.create_infinite_replay_buffer(
            episodes=list(ColumnarReplayBuffer(log).episodes)
        )
        assert stock.transition_count == 15
        for row in range(15):
            seen = stock.transition_picker(*stock.buffer[row])
            np.testing.assert_array_equal(seen.observation, log.observations[row])

    def test_dump_and_load(self, tmp_path):
        log = make_log()
        with (tmp_path / "buffer.h5").open("w+b") as file:
            ColumnarReplayBuffer(log).dump(file)
        with (tmp_path / "buffer.h5").open("rb") as file:
            stock = ColumnarReplayBuffer.load(file, d3rlpy.dataset.InfiniteBuffer())
        assert type(stock) is d3rlpy.dataset.ReplayBuffer
        assert stock.transition_count == 15
        views = [view.serialize() for view in ColumnarReplayBuffer(log).episodes]
        for episode, view in zip(stock.episodes, views, strict=True):
            for name, value in episode.serialize().items():
                np.testing.assert_array_equal(value, view[name])

    def test_windows_refuse_to_be_trajectories(self):
        buffer = ColumnarReplayBuffer(make_log(episode_ids=None, steps=None))
        window = buffer.episodes[0]
        assert isinstance(window, RowWindow)
        for misuse in (
            lambda: d3rlpy.dataset.BasicTransitionPicker()(window, 0),
            lambda: d3rlpy.dataset.BasicTrajectorySlicer()(window, 1, 2),
            window.serialize,
        ):
            with pytest.raises(DataError, match="form no trajectory"):
                misuse()

    def test_windows_cover_all_rows_once(self):
        rollout = roll_out(("terminated", "truncated") * 500, (3, 2) * 500)
        log = rollout.transitions(episode_ids=None, steps=None)
        buffer = ColumnarReplayBuffer(log)
        assert [len(window) for window in buffer.episodes] == [1024, 1024, 452]
        row = 0
        for window in buffer.episodes:
            for index in range(window.transition_count):
                seen = buffer.transition_picker(window, index)
                np.testing.assert_array_equal(seen.next_observation, log.next_observations[row])
                assert seen.terminal == log.terminated[row]
                row += 1
        assert row == len(log) == 2500

    def test_growing_is_refused_with_the_remedy(self):
        buffer = ColumnarReplayBuffer(make_log())
        for grow in (
            lambda: buffer.append(np.zeros(3), 0, 0.0),
            lambda: buffer.append_episode(buffer.episodes[0]),
            lambda: buffer.clip_episode(True),
            lambda: buffer.buffer.append(buffer.episodes[0], 0),
        ):
            with pytest.raises(
                ReadOnlyBufferError, match=r"cannot grow; for online training use .*to_d3rlpy"
            ):
                grow()
        assert issubclass(ReadOnlyBufferError, KofflineError)
        assert issubclass(ReadOnlyBufferError, NotImplementedError)


class TestConversion:
    @pytest.mark.parametrize("discrete", [True, False])
    def test_to_d3rlpy_and_back(self, discrete):
        log = make_log(discrete)
        stock = to_d3rlpy(log)
        assert stock.transition_count == 15
        again = from_d3rlpy(stock)
        assert_same_rows(
            again,
            log.replace(rewards=log.rewards.astype(np.float32), truncated=[*log.truncated[:-1], True]),
            terminal_next=False,
        )
        assert again.action_space == (Discrete(3) if discrete else Continuous(2))

    def test_ours_back_is_the_log_itself(self):
        log = make_log()
        assert from_d3rlpy(ColumnarReplayBuffer(log)) is log

    def test_the_stock_buffer_may_grow(self):
        stock = to_d3rlpy(make_log())
        stock.append(np.zeros(3, dtype=np.float32), 1, 0.0)
        stock.append(np.ones(3, dtype=np.float32), 2, 0.0)
        stock.clip_episode(True)
        assert stock.transition_count == 17

    def test_mixed_with_a_growing_buffer(self):
        log = long_log()
        mixed = d3rlpy.dataset.MixedReplayBuffer(
            to_d3rlpy(make_log()), ColumnarReplayBuffer(log, seed=0), secondary_mix_ratio=0.5
        )
        assert mixed.sample_transition_batch(8).observations.shape == (8, 3)
