"""ColumnarReplayBuffer draws the right rows, and hands them over as d3rlpy does."""

import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from koffline.data.d3rlpy_import import import_d3rlpy
from koffline.data.replay import ColumnarReplayBuffer, to_d3rlpy
from koffline.errors import DataError
from tests.data.logs import roll_out
from tests.data.replay_logs import ENDS, LENGTHS, make_log, rows_of

d3rlpy = import_d3rlpy()


class TestBatches:
    @pytest.mark.parametrize("discrete", [True, False])
    @pytest.mark.parametrize("episodes", [True, False])
    def test_every_column_is_of_the_same_row(self, discrete, episodes):
        log = make_log(discrete, **({} if episodes else {"episode_ids": None, "steps": None}))
        batch = ColumnarReplayBuffer(log, seed=0).sample_transition_batch(200)
        rows = rows_of(batch, log)
        assert set(rows) == set(range(15))  # the last rows of cut episodes are drawn too
        actions = log.actions.reshape(15, -1)
        following = [row + 1 if episodes and row + 1 < 15 and log.steps[row + 1] else row for row in rows]
        np.testing.assert_array_equal(batch.observations, log.observations[rows])
        np.testing.assert_array_equal(batch.actions, actions[rows].astype(np.float32))
        np.testing.assert_array_equal(batch.next_observations, log.next_observations[rows])
        np.testing.assert_array_equal(batch.next_actions, actions[following].astype(np.float32))
        np.testing.assert_array_equal(batch.terminals.reshape(-1), log.terminated[rows])
        np.testing.assert_array_equal(batch.intervals, np.ones((200, 1)))
        assert batch.terminals.shape == batch.rewards.shape == (200, 1)

    def test_agrees_with_d3rlpys_own_batches(self):
        """The same rows through d3rlpy's picker: equal where d3rlpy has a value to compare with."""
        log = make_log(False)
        ours = ColumnarReplayBuffer(log, seed=0).sample_transition_batch(60)
        stock, rows = to_d3rlpy(log), rows_of(ours, log)
        theirs = d3rlpy.dataset.TransitionMiniBatch.from_transitions(
            [stock.transition_picker(*stock.buffer[int(row)]) for row in rows]
        )
        running = ours.terminals.reshape(-1) == 0
        for name in ("observations", "actions", "rewards", "terminals", "intervals"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
            assert getattr(ours, name).dtype == getattr(theirs, name).dtype
        for name in ("next_observations", "next_actions"):
            np.testing.assert_array_equal(getattr(ours, name)[running], getattr(theirs, name)[running])

    def test_wide_and_strided_columns_and_bytes_are_handed_over_as_float32(self):
        wide = roll_out(ENDS, LENGTHS, dtype=np.float64).transitions()
        padded = np.zeros((15, 6))
        padded[:, ::2] = wide.observations
        strided = wide.replace(observations=padded[:, ::2])
        assert not strided.observations.flags.c_contiguous
        batch = ColumnarReplayBuffer(strided, seed=0).sample_transition_batch(30)
        np.testing.assert_array_equal(
            batch.observations, wide.observations[rows_of(batch, wide)].astype(np.float32)
        )
        images = roll_out(ENDS, LENGTHS, shape=(2, 4, 4), dtype=np.uint8).transitions()
        batch = ColumnarReplayBuffer(images, seed=0).sample_transition_batch(30)
        np.testing.assert_array_equal(batch.observations, images.observations[rows_of(batch, images)])
        assert batch.observations.dtype == np.float32

    def test_rows_are_drawn_uniformly(self):
        log = make_log()
        batch = ColumnarReplayBuffer(log, seed=0).sample_transition_batch(15_000)
        counts = np.bincount(rows_of(batch, log), minlength=15)
        # each count is binomial(15000, 1/15): standard deviation 31, five of them
        assert np.abs(counts - 1000).max() < 155

    def test_rows_are_drawn_in_proportion_to_weights(self):
        log = make_log(weights=np.arange(15.0))
        batch = ColumnarReplayBuffer(log, seed=0).sample_transition_batch(10_500)
        counts = np.bincount(rows_of(batch, log), minlength=15)
        assert counts[0] == 0
        # the largest standard deviation is below 36; five of them
        assert np.abs(counts - 100 * np.arange(15)).max() < 180

    def test_seeds(self):
        log = make_log()

        def draw(seed):
            return ColumnarReplayBuffer(log, seed=seed).sample_transition_batch(20).rewards

        np.testing.assert_array_equal(draw(1), draw(1))
        assert not np.array_equal(draw(1), draw(2))
        d3rlpy.seed(3)
        first = draw(None)
        assert not np.array_equal(first, draw(None))
        d3rlpy.seed(3)
        np.testing.assert_array_equal(first, draw(None))

    def test_nothing_is_copied(self):
        log = roll_out(("truncated",) * 20, (500,) * 20, shape=(50,)).transitions()
        tracemalloc.start()
        buffer = ColumnarReplayBuffer(log, seed=0)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < log.observations.nbytes / 20
        assert buffer.transition_count == 10_000

    def test_one_transition(self):
        log = make_log()
        drawn = ColumnarReplayBuffer(log, seed=0).sample_transition()
        row = int(np.flatnonzero(log.rewards.astype(np.float32) == drawn.reward[0])[0])
        np.testing.assert_array_equal(drawn.observation, log.observations[row])
        np.testing.assert_array_equal(drawn.next_observation, log.next_observations[row])
        assert drawn.observation_signature.shape == [(3,)]
        assert drawn.action.shape == (1,)

    def test_returns_to_go_reach_the_end_of_the_episode(self):
        log = make_log()
        batch = ColumnarReplayBuffer(log, seed=0).sample_transition_batch(40)
        for row, transition in zip(rows_of(batch, log), batch.transitions, strict=True):
            expected = [log.rewards[row]]
            while row + 1 < 15 and log.steps[row + 1]:
                row += 1
                expected.append(log.rewards[row])
            np.testing.assert_array_equal(transition.rewards_to_go.reshape(-1), np.float32(expected))
        alone = ColumnarReplayBuffer(make_log(episode_ids=None, steps=None)).sample_transition_batch(2)
        with pytest.raises(DataError, match="returns-to-go need episodes"):
            _ = alone.transitions[0]

    def test_trajectories_match_d3rlpys(self):
        log = make_log()
        buffer = ColumnarReplayBuffer(log, seed=0)
        batch = buffer.sample_trajectory_batch(50, 3)
        assert batch.observations.shape == (50, 3, 3)
        rewards = log.rewards.astype(np.float32)
        for i in range(50):
            row = int(np.flatnonzero(rewards == batch.rewards[i, -1, 0])[0])
            real = int(batch.masks[i].sum())
            assert real == min(3, log.steps[row] + 1)
            rows = np.arange(row - real + 1, row + 1)
            np.testing.assert_array_equal(batch.observations[i, -real:], log.observations[rows])
            np.testing.assert_array_equal(batch.actions[i, -real:, 0], log.actions[rows])
            np.testing.assert_array_equal(batch.timesteps[i, -real:], log.steps[rows] + 1)
            np.testing.assert_allclose(
                batch.returns_to_go[i, -real:, 0], log.returns_to_go()[rows], rtol=1e-5, atol=1e-6
            )
        with pytest.raises(DataError, match="form no trajectory"):
            ColumnarReplayBuffer(make_log(episode_ids=None, steps=None)).sample_trajectory(3)


class TestImport:
    def test_d3rlpy_comes_silently_and_only_with_the_bridge(self):
        program = (
            "import sys, koffline, koffline.data.sources, koffline.data.d3rlpy_dump, koffline.cli.data\n"
            "assert 'd3rlpy' not in sys.modules, 'too early'\n"
            "from koffline import ColumnarReplayBuffer\n"
            "assert 'd3rlpy' in sys.modules\n"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    def test_a_d3rlpy_that_is_there_already_is_taken(self):
        assert import_d3rlpy() is sys.modules["d3rlpy"]
