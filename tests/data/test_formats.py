"""Every format but d3rlpy's: all of a log comes back, whatever the file's name; nothing
is lost by chance.
"""

import shutil
import sys

import h5py
import minari
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from koffline.data.flat import write_hdf5
from koffline.data.sources import open_transitions, write_transitions
from koffline.data.transitions import Continuous, Metadata
from koffline.errors import DataError
from tests.data.logs import assert_same_rows, drawn_logs, roll_out

NAMES = {
    **{name: f"log.{name}" for name in ("hdf5", "npz", "parquet", "arrow")},
    "minari": "log-v0",
}
FORMATS = pytest.mark.parametrize("format", sorted(NAMES))


def through(log, folder, format):
    if (format, minari.__version__, log.observations.dtype) == (
        "minari",
        "0.5.3",
        np.uint8,
    ):
        pytest.skip("Minari 0.5.3, the last on Python 3.10, keeps pictures as JPEG")
    write_transitions(log, folder / NAMES[format], format, force=True)
    return open_transitions(folder / NAMES[format])


def assert_equal(read_back, expected):
    assert_same_rows(read_back, expected)
    assert read_back.sha256 == read_back.metadata.sha256 == expected.sha256
    assert read_back.action_space == expected.action_space
    assert read_back.observations.dtype == expected.observations.dtype
    for name in ("gamma", "extra", "notes"):
        assert getattr(read_back.metadata, name) == getattr(expected.metadata, name)
    for name in ("behavior_log_probabilities", "weights"):
        np.testing.assert_array_equal(getattr(read_back, name), getattr(expected, name))


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    drawn=drawn_logs(),
    formats=st.lists(st.sampled_from(sorted(NAMES)), min_size=1, max_size=3),
)
def test_a_chain_of_formats(tmp_path, drawn, formats):
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    log = changed = drawn.log()
    for format in formats:
        changed = through(changed, tmp_path, format)
    assert_equal(changed, log)
    # nothing temporary is left behind
    assert len(list(tmp_path.iterdir())) == len(set(formats))


@FORMATS
def test_bounds_pictures_and_lone_rows_come_back(tmp_path, format):
    space = Continuous(2, [-4 / 3, -np.inf], [np.inf, 2.0])
    images = roll_out(shape=(32, 32, 3), dtype=np.uint8)
    for log in (
        roll_out(discrete=False).transitions(action_space=space),
        images.transitions(
            metadata=Metadata(gamma=0.9, extra={"task": "walk"}, notes=("by hand",))
        ),
        roll_out(shape=(1001,)).transitions(),
        roll_out().transitions(episode_ids=None, steps=None),
    ):
        assert_equal(through(log, tmp_path, format), log)


@settings(max_examples=6, deadline=None)
@given(drawn=drawn_logs())
def test_numbers_come_back_from_csv(tmp_path_factory, drawn):
    log = drawn.log()
    path = tmp_path_factory.mktemp("t") / "log.csv"
    if len(log.observation_shape) > 1:
        with pytest.raises(DataError, match="write parquet"):
            write_transitions(log, path)
        assert not path.exists()
        return
    write_transitions(log, path)
    read_back = open_transitions(path, log.action_space)
    # CSV has no types
    assert read_back.sha256 == log.sha256 or log.observations.dtype == np.uint8


@FORMATS
def test_existing_files_are_replaced_only_by_force(tmp_path, format):
    first = roll_out(seed=1).transitions()
    second = roll_out(seed=2).transitions()
    target = tmp_path / NAMES[format]
    write_transitions(first, target, format)
    with pytest.raises(DataError, match="exists already; choose another name"):
        write_transitions(second, target, format)
    assert open_transitions(target).sha256 == first.sha256
    assert through(second, tmp_path, format).sha256 == second.sha256
    assert [path.name for path in tmp_path.iterdir()] == [NAMES[format]]


@pytest.mark.parametrize("format", ["minari", "d3rlpy"])
def test_next_observations_that_do_not_chain_are_refused(tmp_path, format):
    log = roll_out().transitions()
    following = log.next_observations.copy()
    following[5] += 1
    with pytest.raises(
        DataError, match=r"next observation of row 5 is not .*write hdf5 or npz"
    ):
        write_transitions(
            log.replace(next_observations=following), tmp_path / "log", format
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("target", "format", "words"),
    [
        ("log.hdf5", "xls", "format 'xls' is unknown"),
        ("minari:walk-v0", "npz", "names a Minari dataset but the format is npz"),
        ("minari:a b", None, "is no Minari id"),
        ("home", "minari", "home holds letter.txt, which"),
    ],
)
def test_targets_that_make_no_sense(tmp_path, monkeypatch, target, format, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    with pytest.raises(DataError, match=words):
        write_transitions(roll_out().transitions(), target, format, force=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["home", "letter.txt"]


class TestHDF5:
    @pytest.fixture
    def path(self, tmp_path):
        write_hdf5(roll_out().transitions(), tmp_path / "log.hdf5")
        return tmp_path / "log.hdf5"

    def test_readers_of_d4rl_find_their_keys(self, path):
        log = roll_out().transitions()
        with h5py.File(path) as file:
            arrays = {key: file[key][:] for key in file}
        names = {"terminals": "terminated", "timeouts": "truncated"}
        assert {
            "observations",
            "next_observations",
            "actions",
            "rewards",
            *names,
        } <= arrays.keys()
        for key, array in arrays.items():
            np.testing.assert_array_equal(array, getattr(log, names.get(key, key)))

    def test_an_edited_file_is_read_and_said_to_be_edited(self, path):
        with h5py.File(path, "r+") as file:
            file["rewards"][0] = 100.0
        log = open_transitions(path)
        assert log.rewards[0] == 100.0
        assert any("edited" in note for note in log.metadata.notes)
        assert log.metadata.sha256 == log.sha256

    @pytest.mark.parametrize(
        ("described", "words"),
        [
            ("{", "description is damaged"),
            ('{"format": 2}', "format 2, known is 1; update koffline"),
        ],
    )
    def test_a_description_that_cannot_be_read(self, path, described, words):
        with h5py.File(path, "r+") as file:
            file.attrs["koffline"] = described
        with pytest.raises(DataError, match=words):
            open_transitions(path)


class TestMinari:
    @pytest.mark.parametrize("discrete", [True, False])
    def test_minari_reads_it(self, tmp_path, discrete):
        rollout = roll_out(discrete=discrete)
        write_transitions(rollout.transitions(), tmp_path / "walk copy-v3", "minari")
        dataset = minari.MinariDataset(tmp_path / "walk copy-v3" / "data")
        assert dataset.spec.dataset_id == "walk-copy-v3"
        assert (dataset.total_episodes, dataset.total_steps) == (5, 15)
        for index, episode in enumerate(dataset):
            rows = rollout.episode(index)
            seen = [row.observation for row in rows] + [rows[-1].next_observation]
            np.testing.assert_array_equal(episode.observations, np.stack(seen))
            fields = ("action", "reward", "terminated", "truncated")
            for name, field in zip(
                ("actions", "rewards", "terminations", "truncations"),
                fields,
                strict=True,
            ):
                np.testing.assert_array_equal(
                    getattr(episode, name), [getattr(row, field) for row in rows]
                )
            assert dataset.action_space.contains(episode.actions[0])
        assert "jax" not in sys.modules

    def test_ids_are_targets_and_sources(self, tmp_path, monkeypatch):
        monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))
        log = roll_out().transitions()
        write_transitions(log, "minari:walk/test-v0")
        read_back = open_transitions("minari:walk/test-v0")
        assert (read_back.sha256, read_back.metadata.source) == (
            log.sha256,
            "minari:walk/test-v0",
        )
        folder = tmp_path / "datasets" / "walk" / "test-v0"
        for part in ("", "data", "data/main_data.hdf5"):
            assert open_transitions(folder / part).sha256 == log.sha256
        for name, words in (
            ("walk/other-v0", "minari download walk/other-v0"),
            ("../etc", "no Minari id"),
        ):
            with pytest.raises(DataError, match=words):
                open_transitions(f"minari:{name}")
