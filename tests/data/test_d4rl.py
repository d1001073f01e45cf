"""D4RL's flat files, with and without what they may lack."""

import h5py
import numpy as np
import pytest

from koffline.data.hdf5 import read_hdf5, write_hdf5
from koffline.data.sources import open_transitions
from koffline.data.transitions import Continuous, Discrete
from koffline.errors import DataError
from tests.data.logs import assert_same_rows, d4rl_arrays, roll_out, write_arrays

ENDS = ("terminated", "truncated", "truncated", "terminated", "truncated")
LENGTHS = (4, 3, 5, 1, 2)


class TestD4RL:
    def test_with_next_observations_every_row_is_kept(self, tmp_path):
        rollout = roll_out(ENDS, LENGTHS, discrete=False)
        path = write_arrays(tmp_path / "d4rl.hdf5", d4rl_arrays(rollout))
        log = open_transitions(path, Continuous(2, -1, 1))
        expected = rollout.transitions(rewards=rollout.transitions().rewards.astype(np.float32))
        assert_same_rows(log, expected)
        assert log.action_space == Continuous(2, -1, 1)
        assert log.metadata.notes == ()

    def test_without_next_observations_they_follow_inside_episodes_only(self, tmp_path):
        rollout = roll_out(ENDS, LENGTHS, discrete=False)
        path = write_arrays(tmp_path / "d4rl.hdf5", d4rl_arrays(rollout, next_observations=False))
        log = open_transitions(path, Continuous(2, -1, 1))
        # episodes 1, 2, 4 end by timeout: their last rows have no next observation in the file
        kept = [row for row in rollout.rows if row.terminated or not row.truncated]
        assert len(log) == 15 - 3
        for i, row in enumerate(kept):
            np.testing.assert_array_equal(log.observations[i], row.observation)
            np.testing.assert_array_equal(log.actions[i], row.action)
            assert log.rewards[i] == np.float32(row.reward)
            if row.terminated:
                np.testing.assert_array_equal(log.next_observations[i], row.observation)
            else:
                np.testing.assert_array_equal(log.next_observations[i], row.next_observation)
            assert log.terminated[i] == row.terminated
            assert log.steps[i] == row.step
        np.testing.assert_array_equal(log.episode_lengths, [4, 2, 4, 1, 1])
        # the row above a row left out is now the one where the recording stopped
        np.testing.assert_array_equal(np.flatnonzero(log.truncated), [5, 9, 11])
        assert any("3 rows were left out" in note for note in log.metadata.notes)

    def test_an_episode_of_one_cut_row_vanishes(self, tmp_path):
        rollout = roll_out(("terminated", "truncated", "terminated"), (2, 1, 2))
        log = open_transitions(write_arrays(tmp_path / "d", d4rl_arrays(rollout, next_observations=False)))
        np.testing.assert_array_equal(log.episode_lengths, [2, 2])
        np.testing.assert_array_equal(log.truncated, [False] * 4)

    @pytest.mark.parametrize("next_observations", [True, False])
    def test_a_file_that_stops_inside_an_episode(self, tmp_path, next_observations):
        rollout = roll_out(("terminated", "neither"), (2, 3))
        log = open_transitions(write_arrays(tmp_path / "d", d4rl_arrays(rollout, next_observations)))
        assert len(log) == (5 if next_observations else 4)
        assert not log.truncated.any()  # nobody said so
        np.testing.assert_array_equal(log.observations[-1], rollout.rows[len(log) - 1].observation)
        np.testing.assert_array_equal(log.next_observations[-1], rollout.rows[len(log) - 1].next_observation)

    def test_terminated_wins_where_both_flags_are_set(self, tmp_path):
        rollout = roll_out(("both", "truncated"), (2, 2))
        log = open_transitions(write_arrays(tmp_path / "d", d4rl_arrays(rollout, next_observations=False)))
        np.testing.assert_array_equal(log.terminated, [False, True, False])
        np.testing.assert_array_equal(log.episode_lengths, [2, 1])

    def test_timeouts_are_optional_and_cuts_show_in_next_observations(self, tmp_path):
        rollout = roll_out(ENDS, LENGTHS)
        log = open_transitions(write_arrays(tmp_path / "d", d4rl_arrays(rollout, timeouts=False)))
        expected = rollout.transitions().truncated.copy()
        expected[-1] = False  # the end of the file shows nothing
        np.testing.assert_array_equal(log.truncated, expected)
        np.testing.assert_array_equal(log.episode_lengths, LENGTHS)
        assert any("2 rows were marked as truncated" in note for note in log.metadata.notes)

    def test_without_both_the_doubt_is_put_on_record(self, tmp_path):
        rollout = roll_out(("terminated", "terminated"), (3, 2))
        path = write_arrays(tmp_path / "d", d4rl_arrays(rollout, next_observations=False, timeouts=False))
        log = open_transitions(path)
        np.testing.assert_array_equal(log.episode_lengths, [3, 2])
        np.testing.assert_array_equal(log.next_observations[0], rollout.rows[0].next_observation)
        assert any("episodes were taken to end at terminals only" in note for note in log.metadata.notes)

    @pytest.mark.parametrize("zero_timeouts", [True, False])
    def test_shuffled_rows_are_not_taken_for_episodes(self, tmp_path, zero_timeouts):
        rollout = roll_out(("terminated",) * 20, (5,) * 20)
        shuffle = np.random.default_rng(0).permutation(100)
        arrays = {key: array[shuffle] for key, array in d4rl_arrays(rollout, timeouts=False).items()}
        if zero_timeouts:
            arrays["timeouts"] = np.zeros(100, dtype=bool)
        log = open_transitions(write_arrays(tmp_path / "d", arrays))
        assert not log.has_episodes
        assert any("rows stand alone" in note for note in log.metadata.notes)
        np.testing.assert_array_equal(log.next_observations, arrays["next_observations"])

    def test_given_timeouts_are_trusted(self, tmp_path):
        arrays = d4rl_arrays(roll_out(ENDS, LENGTHS))
        arrays["next_observations"] = arrays["next_observations"] + 1.0
        log = open_transitions(write_arrays(tmp_path / "d", arrays))
        np.testing.assert_array_equal(log.episode_lengths, LENGTHS)
        assert any("the flags were trusted" in note for note in log.metadata.notes)

    def test_log_probabilities_in_infos(self, tmp_path):
        rollout = roll_out(ENDS, LENGTHS, discrete=False)
        path = tmp_path / "d"
        write_arrays(path, d4rl_arrays(rollout, next_observations=False))
        with h5py.File(path, "r+") as file:
            file["infos/action_log_probs"] = np.arange(15.0)
            file["infos/qpos"] = np.zeros((15, 2))
        log = open_transitions(path, Continuous(2, -1, 1))
        kept = [i for i, row in enumerate(rollout.rows) if row.terminated or not row.truncated]
        np.testing.assert_array_equal(log.behavior_log_probabilities, kept)
        with h5py.File(path, "r+") as file:
            file["infos/action_log_probs"][3] = -np.inf
        log = open_transitions(path, Continuous(2, -1, 1))
        assert log.behavior_log_probabilities is None
        assert any("infos/action_log_probs was left out" in note for note in log.metadata.notes)

    def test_columns_of_one_are_squeezed(self, tmp_path):
        rollout = roll_out(ENDS, LENGTHS)
        arrays = d4rl_arrays(rollout)
        for key in ("rewards", "terminals", "timeouts", "actions"):
            arrays[key] = arrays[key].reshape(-1, 1)
        log = open_transitions(write_arrays(tmp_path / "d", arrays))
        assert_same_rows(log, rollout.transitions(rewards=arrays["rewards"].reshape(-1)))

    def test_single_numbers_as_observations_get_an_axis(self, tmp_path):
        arrays = d4rl_arrays(roll_out(ENDS, LENGTHS, shape=(1,)))
        for key in ("observations", "next_observations"):
            arrays[key] = arrays[key].reshape(-1)
        assert open_transitions(write_arrays(tmp_path / "d", arrays)).observation_shape == (1,)

    def test_undeclared_spaces_are_assumptions_on_record(self, tmp_path):
        arrays = d4rl_arrays(roll_out(ENDS, LENGTHS))
        arrays["actions"] = np.minimum(arrays["actions"], 1)
        log = open_transitions(write_arrays(tmp_path / "d", arrays))
        assert log.action_space == Discrete(2)
        assert "assumed Discrete(2)" in log.metadata.notes[0]
        assert open_transitions(tmp_path / "d", Discrete(3)).action_space == Discrete(3)

        log = open_transitions(write_arrays(tmp_path / "c", d4rl_arrays(roll_out(discrete=False))))
        assert log.action_space == Continuous(2)
        assert "assumed Continuous(2, -inf … inf)" in log.metadata.notes[0]

    def test_a_space_other_than_declared_is_said(self, tmp_path):
        write_hdf5(roll_out().transitions(), tmp_path / "log.hdf5")
        log = open_transitions(tmp_path / "log.hdf5", Discrete(5))
        assert log.action_space == Discrete(5)
        assert "the file declares Discrete(3)" in log.metadata.notes[0]

    def test_episode_terminals_of_d3rlpy_1(self, tmp_path):
        rollout = roll_out(ENDS, LENGTHS)
        arrays = d4rl_arrays(rollout, timeouts=False)
        log = rollout.transitions()
        arrays["episode_terminals"] = (log.terminated | log.truncated).astype(np.float32)
        arrays["terminals"] = log.terminated.astype(np.float32)
        read = open_transitions(write_arrays(tmp_path / "d", arrays))
        np.testing.assert_array_equal(read.truncated, log.truncated)

    def test_wrong_keys_are_listed(self, tmp_path):
        path = write_arrays(
            tmp_path / "log.hdf5", {"obs": np.zeros(3), "act": np.zeros(3), "dones": np.zeros(3)}
        )
        with pytest.raises(DataError, match="found keys act, dones, obs; expected observations, actions"):
            read_hdf5(path)

    def test_lengths_that_differ(self, tmp_path):
        arrays = d4rl_arrays(roll_out())
        arrays["rewards"] = arrays["rewards"][:-2]
        with pytest.raises(DataError, match="rewards has 13 rows, observations 15"):
            open_transitions(write_arrays(tmp_path / "log.hdf5", arrays))
        arrays = {key: array[:-1] for key, array in d4rl_arrays(roll_out(), False).items()}
        arrays["observations"] = d4rl_arrays(roll_out())["observations"]
        with pytest.raises(DataError, match="one per step and a last one"):
            open_transitions(write_arrays(tmp_path / "more.hdf5", arrays))

    def test_nothing_left(self, tmp_path):
        rollout = roll_out(("truncated", "truncated"), (1, 1))
        with pytest.raises(DataError, match="no row has a next observation"):
            open_transitions(
                write_arrays(tmp_path / "log.hdf5", d4rl_arrays(rollout, next_observations=False))
            )

    def test_integer_vectors_need_a_declared_space(self, tmp_path):
        arrays = d4rl_arrays(roll_out())
        arrays["actions"] = np.zeros((15, 2), dtype=np.int64)
        path = write_arrays(tmp_path / "log.hdf5", arrays)
        with pytest.raises(DataError, match="declares no action space"):
            open_transitions(path)
        assert open_transitions(path, Continuous(2, -1, 1)).actions.dtype == np.float32

    def test_negative_integers_need_a_declared_space(self, tmp_path):
        arrays = d4rl_arrays(roll_out())
        arrays["actions"] = arrays["actions"] - 1
        with pytest.raises(DataError, match="from -1 up"):
            open_transitions(write_arrays(tmp_path / "log.hdf5", arrays))
