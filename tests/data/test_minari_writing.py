"""Writing Minari datasets: what Minari reads, and what comes back."""

import sys

import minari
import numpy as np
import pytest

from koffline.data.minari import write_minari
from koffline.data.sources import open_transitions
from koffline.data.transitions import Metadata
from koffline.errors import DataError
from tests.data.logs import assert_same_rows, roll_out

ENDS = ("truncated", "terminated", "truncated", "terminated", "truncated")
LENGTHS = (4, 3, 5, 1, 2)


class TestWriting:
    @pytest.mark.parametrize("discrete", [True, False])
    def test_minari_reads_it(self, tmp_path, discrete):
        rollout = roll_out(ENDS, LENGTHS, discrete=discrete)
        write_minari(rollout.transitions(), tmp_path / "walk", "walk/copy-v3")
        dataset = minari.MinariDataset(tmp_path / "walk" / "data")
        assert dataset.spec.dataset_id == "walk/copy-v3"
        assert dataset.total_episodes == 5
        assert dataset.total_steps == 15
        for index, episode in enumerate(dataset):
            rows = rollout.episode(index)
            np.testing.assert_array_equal(
                episode.observations,
                np.stack([row.observation for row in rows] + [rows[-1].next_observation]),
            )
            np.testing.assert_array_equal(episode.actions, np.stack([row.action for row in rows]))
            np.testing.assert_array_equal(episode.rewards, [row.reward for row in rows])
            np.testing.assert_array_equal(episode.terminations, [row.terminated for row in rows])
            np.testing.assert_array_equal(episode.truncations, [row.truncated for row in rows])
            assert dataset.action_space.contains(episode.actions[0])

    def test_everything_comes_back(self, tmp_path):
        log = roll_out(ENDS, LENGTHS).transitions(
            weights=np.arange(15.0),
            behavior_log_probabilities=-np.arange(15.0),
            metadata=Metadata(gamma=0.9, extra={"seed": 1}),
        )
        write_minari(log, tmp_path / "walk", "walk")
        again = open_transitions(tmp_path / "walk")
        assert_same_rows(again, log)
        assert again.sha256 == log.sha256
        assert again.metadata.gamma == 0.9
        assert again.metadata.extra == {"seed": 1}

    def test_images_are_not_compressed_lossily(self, tmp_path):
        log = roll_out(ENDS, LENGTHS, shape=(32, 32, 3), dtype=np.uint8).transitions()
        write_minari(log, tmp_path / "walk", "walk")
        again = open_transitions(tmp_path / "walk")
        assert again.observations.dtype == np.uint8
        assert again.sha256 == log.sha256

    def test_next_observations_that_do_not_chain_are_refused(self, tmp_path):
        log = roll_out(ENDS, LENGTHS).transitions()
        following = log.next_observations.copy()
        following[5] += 1
        with pytest.raises(DataError, match=r"next observation of row 5 is not .*write hdf5 or npz"):
            write_minari(log.replace(next_observations=following), tmp_path / "walk", "walk")
        assert list(tmp_path.iterdir()) == []

    def test_names_become_ids_minari_accepts(self, tmp_path):
        write_minari(roll_out().transitions(), tmp_path / "my log.d", "my log.d")
        assert minari.MinariDataset(tmp_path / "my log.d" / "data").spec.dataset_id == "my-log-d-v0"

    def test_only_datasets_are_replaced(self, tmp_path):
        first, second = roll_out(seed=1).transitions(), roll_out(seed=2).transitions()
        write_minari(first, tmp_path / "walk", "walk")
        with pytest.raises(DataError, match="exists already"):
            write_minari(second, tmp_path / "walk", "walk")
        write_minari(second, tmp_path / "walk", "walk", force=True)
        assert open_transitions(tmp_path / "walk").sha256 == second.sha256
        (tmp_path / "home").mkdir()
        (tmp_path / "home" / "letter.txt").write_text("dear")
        with pytest.raises(DataError, match="holds something else"):
            write_minari(second, tmp_path / "home", "walk", force=True)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "walk"]
        assert (tmp_path / "home" / "letter.txt").read_text() == "dear"

    def test_jax_is_not_imported(self, tmp_path):
        write_minari(roll_out().transitions(), tmp_path / "walk", "walk")
        assert "jax" not in sys.modules
