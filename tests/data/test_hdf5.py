"""Our flat HDF5."""

import json

import h5py
import numpy as np
import pytest

from koffline.data.hdf5 import write_hdf5
from koffline.data.sources import open_transitions
from koffline.data.transitions import Continuous, Discrete, Metadata
from koffline.errors import DataError
from tests.data.logs import assert_same_rows, d4rl_arrays, roll_out, write_arrays


def read_like_d4rl(path):
    """What D4RL's get_dataset does with a file: every array, by key, and its checks."""
    with h5py.File(path, "r") as file:
        keys = []
        file.visititems(lambda name, item: keys.append(name) if isinstance(item, h5py.Dataset) else None)
        data = {}
        for key in keys:
            try:
                data[key] = file[key][:]
            except ValueError:
                data[key] = file[key][()]
    n = data["observations"].shape[0]
    for key in ("observations", "actions", "rewards", "terminals"):
        assert key in data
    assert data["rewards"].shape == (n,)
    assert data["terminals"].shape == (n,)
    return data


class TestOurs:
    def test_keeps_everything(self, tmp_path):
        log = roll_out(ends=("both", "neither", "truncated", "terminated", "neither")).transitions(
            behavior_log_probabilities=-np.arange(15.0),
            weights=np.arange(15.0),
            metadata=Metadata(gamma=0.97, extra={"environment": "walk", "seed": 3}, notes=("for a test",)),
        )
        write_hdf5(log, tmp_path / "log.hdf5")
        again = open_transitions(tmp_path / "log.hdf5")
        assert_same_rows(again, log)
        np.testing.assert_array_equal(again.episode_ids, log.episode_ids)
        np.testing.assert_array_equal(again.behavior_log_probabilities, log.behavior_log_probabilities)
        np.testing.assert_array_equal(again.weights, log.weights)
        assert again.action_space == Discrete(3)
        assert again.observations.dtype == np.float32
        assert again.metadata.gamma == 0.97
        assert again.metadata.extra == {"environment": "walk", "seed": 3}
        assert again.metadata.notes == ("for a test",)
        assert again.metadata.sha256 == again.sha256 == log.sha256
        assert again.metadata.source == str(tmp_path / "log.hdf5")

    def test_bounds_come_back_exactly_also_infinite_ones(self, tmp_path):
        space = Continuous(2, [-4 / 3, -np.inf], [np.inf, 2.0])
        log = roll_out(discrete=False).transitions(action_space=space)
        write_hdf5(log, tmp_path / "log.hdf5")
        assert open_transitions(tmp_path / "log.hdf5").action_space == space

    def test_rows_without_episodes_stay_so(self, tmp_path):
        log = roll_out().transitions(episode_ids=None, steps=None)
        write_hdf5(log, tmp_path / "log.hdf5")
        assert not open_transitions(tmp_path / "log.hdf5").has_episodes

    def test_readers_of_d4rl_find_their_keys(self, tmp_path):
        log = roll_out(discrete=False).transitions(weights=np.ones(15))
        write_hdf5(log, tmp_path / "log.hdf5")
        data = read_like_d4rl(tmp_path / "log.hdf5")
        np.testing.assert_array_equal(data["observations"], log.observations)
        np.testing.assert_array_equal(data["next_observations"], log.next_observations)
        np.testing.assert_array_equal(data["actions"], log.actions)
        np.testing.assert_array_equal(data["rewards"], log.rewards)
        np.testing.assert_array_equal(data["terminals"], log.terminated)
        np.testing.assert_array_equal(data["timeouts"], log.truncated)

    def test_the_same_log_gives_the_same_bytes(self, tmp_path):
        log = roll_out().transitions()
        write_hdf5(log, tmp_path / "a.hdf5")
        write_hdf5(log, tmp_path / "b.hdf5")
        assert (tmp_path / "a.hdf5").read_bytes() == (tmp_path / "b.hdf5").read_bytes()

    def test_uncompressed_reads_the_same(self, tmp_path):
        log = roll_out().transitions()
        write_hdf5(log, tmp_path / "log.hdf5", compress=False)
        assert_same_rows(open_transitions(tmp_path / "log.hdf5"), log)

    def test_existing_files_are_replaced_only_by_force(self, tmp_path):
        first, second = roll_out(seed=1).transitions(), roll_out(seed=2).transitions()
        write_hdf5(first, tmp_path / "log.hdf5")
        with pytest.raises(DataError, match="exists already; choose another name"):
            write_hdf5(second, tmp_path / "log.hdf5")
        assert open_transitions(tmp_path / "log.hdf5").sha256 == first.sha256
        write_hdf5(second, tmp_path / "log.hdf5", force=True)
        assert open_transitions(tmp_path / "log.hdf5").sha256 == second.sha256

    def test_a_flipped_byte_is_noticed(self, tmp_path):
        log = roll_out(ends=["truncated"] * 40, lengths=[50] * 40).transitions()
        path = tmp_path / "log.hdf5"
        write_hdf5(log, path, compress=False)
        content = bytearray(path.read_bytes())
        content[content.index(log.observations[1000].tobytes())] ^= 0x01
        path.write_bytes(content)
        with pytest.raises(DataError, match="truncated or corrupt HDF5"):
            open_transitions(path)

    def test_an_edited_file_is_read_and_said_to_be_edited(self, tmp_path):
        path = tmp_path / "log.hdf5"
        write_hdf5(roll_out().transitions(), path)
        with h5py.File(path, "r+") as file:
            file["rewards"][0] = 100.0
        log = open_transitions(path)
        assert log.rewards[0] == 100.0
        assert any("edited" in note for note in log.metadata.notes)
        assert log.metadata.sha256 == log.sha256

    @pytest.mark.parametrize(
        "description",
        [
            "{",
            "[]",
            json.dumps({"format": 1}),
            json.dumps({"format": 1, "action_space": 3, "episodes": True}),
        ],
    )
    def test_a_damaged_description(self, tmp_path, description):
        path = tmp_path / "log.hdf5"
        write_hdf5(roll_out().transitions(), path)
        with h5py.File(path, "r+") as file:
            file.attrs["koffline"] = description
        with pytest.raises(DataError, match=r"damaged|cannot read"):
            open_transitions(path)

    def test_a_newer_format(self, tmp_path):
        path = tmp_path / "log.hdf5"
        write_hdf5(roll_out().transitions(), path)
        with h5py.File(path, "r+") as file:
            file.attrs["koffline"] = json.dumps({**json.loads(file.attrs["koffline"]), "format": 2})
        with pytest.raises(DataError, match="format 2, known is 1; update koffline"):
            open_transitions(path)

    def test_interleaved_episodes_are_put_in_order(self, tmp_path):
        log = roll_out().transitions()
        shuffle = np.random.default_rng(0).permutation(15)
        arrays = {key: array[shuffle] for key, array in d4rl_arrays(roll_out()).items()}
        path = write_arrays(
            tmp_path / "log.hdf5", arrays, episode_ids=log.episode_ids[shuffle], steps=log.steps[shuffle]
        )
        again = open_transitions(path)
        assert any("put in order" in note for note in again.metadata.notes)
        for episode in range(5):
            mine, theirs = again.episode_ids == episode, log.episode_ids == episode
            np.testing.assert_array_equal(again.observations[mine], log.observations[theirs])
            np.testing.assert_array_equal(again.next_observations[mine], log.next_observations[theirs])
