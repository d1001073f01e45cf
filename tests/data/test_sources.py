"""Opening and writing by content and format; every bad source is one line with a remedy."""

import os
import pickle
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest

from koffline.data.sources import Written, open_transitions, write_transitions
from koffline.data.spaces import Bounds
from koffline.data.transitions import Continuous, Discrete
from koffline.errors import DataError
from tests.data.logs import roll_out


@pytest.fixture
def log():
    return roll_out().transitions()


def spoil_text(path, log):
    path.write_text("episode,reward\n0,1.0\n")


def spoil_missing(path, log):
    pass


def spoil_empty(path, log):
    path.touch()


def spoil_truncated_hdf5(path, log):
    write_transitions(log, path, "hdf5")
    path.write_bytes(path.read_bytes()[:-500])


def spoil_hdf5_header(path, log):
    path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))


def spoil_hdf5_signature_cut(path, log):
    path.write_bytes(b"\x89HDF")


def spoil_truncated_npz(path, log):
    write_transitions(log, path, "npz")
    path.write_bytes(path.read_bytes()[:-200])


def spoil_corrupt_npz(path, log):
    write_transitions(log, path, "npz")
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        member = archive.getinfo("rewards.npy")
        following = archive.getinfo("next_observations.npy")
    assert following.header_offset > member.header_offset
    content[following.header_offset - member.compress_size // 2] ^= 0xFF
    path.write_bytes(content)


def spoil_zip(path, log):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", "x")


def spoil_pickle(path, log):
    path.write_bytes(pickle.dumps({"observations": [1]}))


def spoil_gzip(path, log):
    path.write_bytes(b"\x1f\x8b" + bytes(50))


def spoil_binary(path, log):
    path.write_bytes(bytes(range(256)))


def spoil_keys(path, log):
    with h5py.File(path, "w") as file:
        file["obs"] = np.zeros(3)


def spoil_no_keys(path, log):
    h5py.File(path, "w").close()


def spoil_groups_for_arrays(path, log):
    with h5py.File(path, "w") as file:
        for key in ("observations", "actions", "rewards", "terminals"):
            file.create_group(key)


def spoil_directory(path, log):
    path.mkdir()


def spoil_strings(path, log):
    with h5py.File(path, "w") as file:
        for key in ("observations", "actions", "rewards", "terminals"):
            file[key] = ["a", "b"]


def spoil_scalars(path, log):
    with h5py.File(path, "w") as file:
        for key in ("observations", "actions", "rewards", "terminals"):
            file[key] = 1.0


def spoil_no_rows(path, log):
    with h5py.File(path, "w") as file:
        file["observations"] = np.zeros((0, 3))
        for key in ("actions", "rewards", "terminals"):
            file[key] = np.zeros(0)


def write_arrays(path, log, **changes):
    arrays = {
        "observations": log.observations,
        "actions": log.actions,
        "rewards": log.rewards,
        "next_observations": log.next_observations,
        "terminals": log.terminated,
        "timeouts": log.truncated,
    }
    with h5py.File(path, "w") as file:
        for key, array in {**arrays, **changes}.items():
            file[key] = array


def spoil_lengths(path, log):
    write_arrays(path, log, rewards=log.rewards[:-1])


def spoil_nan(path, log):
    write_arrays(path, log, rewards=np.where(np.arange(15) == 7, np.nan, log.rewards))


def spoil_action(path, log):
    write_arrays(path, log, actions=np.where(np.arange(15) == 7, 3, log.actions))


def spoil_both_flags_in_the_middle(path, log):
    write_arrays(path, log, terminals=np.full(15, 2))


BAD = {
    spoil_missing: "does not exist; check the path",
    spoil_text: "is a text file, whatever its name says; give a koffline, D4RL or d3rlpy HDF5",
    spoil_empty: "is empty",
    spoil_truncated_hdf5: "truncated or corrupt HDF5 file .*; copy or export it again",
    spoil_hdf5_header: "truncated or corrupt HDF5",
    spoil_hdf5_signature_cut: "truncated or corrupt HDF5",
    spoil_truncated_npz: "truncated or corrupt NPZ",
    spoil_corrupt_npz: "truncated or corrupt NPZ",
    spoil_zip: "lacks observations, actions, rewards, terminals: found keys archive/data.pkl",
    spoil_pickle: "is a Python pickle, which koffline never opens",
    spoil_gzip: "is a gzip file",
    spoil_binary: "is no data file koffline knows",
    spoil_keys: "lacks observations, .*: found keys obs; expected observations, actions, rewards, terminals",
    spoil_no_keys: "found keys none",
    spoil_groups_for_arrays: "found keys none",
    spoil_directory: "holds no Minari dataset",
    spoil_strings: "holds texts; give numbers",
    spoil_scalars: "has no rows|single value",
    spoil_no_rows: "has no rows",
    spoil_lengths: "rewards has 14 rows, observations 15; re-export",
    spoil_nan: "rewards holds nan in row 7; drop or mend",
    spoil_action: r"action 3 in row 7 is outside 0 … 2; declare Discrete\(4\)",
    spoil_both_flags_in_the_middle: "terminated holds 2 in row 0",
}


@pytest.mark.parametrize("spoil", BAD, ids=lambda spoil: spoil.__name__.removeprefix("spoil_"))
def test_each_bad_source_is_one_line(tmp_path, log, spoil):
    path = tmp_path / "log.hdf5"
    spoil(path, log)
    with pytest.raises(DataError, match=BAD[spoil]) as error:
        open_transitions(path, Discrete(3))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", ""])
def test_names_that_cannot_be_files(name):
    with pytest.raises(DataError):
        open_transitions(name)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_files(tmp_path, log):
    path = tmp_path / "log.hdf5"
    write_transitions(log, path)
    path.chmod(0)
    with pytest.raises(DataError, match="no permission"):
        open_transitions(path)


def test_minaris_own_file_far_from_its_metadata(tmp_path, log):
    write_transitions(log, tmp_path / "walk", "minari")
    (tmp_path / "walk" / "data" / "main_data.hdf5").rename(tmp_path / "main_data.hdf5")
    with pytest.raises(DataError, match=r"lacks observations.*found keys episode_0/actions"):
        open_transitions(tmp_path / "main_data.hdf5")


def test_strings_and_paths_and_logs_are_sources(tmp_path, log):
    write_transitions(log, tmp_path / "log.hdf5")
    for source in (tmp_path / "log.hdf5", str(tmp_path / "log.hdf5"), log):
        assert open_transitions(source).sha256 == log.sha256
    assert open_transitions(log) is log
    assert open_transitions(log, Discrete(7)).action_space == Discrete(7)


def test_bounds_take_the_number_of_columns_from_the_log(tmp_path):
    log = roll_out(discrete=False).transitions(action_space=Continuous(2))
    write_transitions(log, tmp_path / "log.npz")
    assert open_transitions(tmp_path / "log.npz", Bounds(-1, 1)).action_space == Continuous(2, -1, 1)
    assert open_transitions(log, Bounds(-1, 1)).action_space == Continuous(2, -1, 1)


def test_the_package_offers_it(tmp_path, log):
    import koffline

    write_transitions(log, tmp_path / "log.hdf5")
    assert koffline.open_transitions(tmp_path / "log.hdf5").sha256 == log.sha256


@pytest.mark.parametrize(
    ("target", "format", "expected"),
    [
        ("log.hdf5", None, "hdf5"),
        ("log.h5", None, "hdf5"),
        ("LOG.HDF5", None, "hdf5"),
        ("log.npz", None, "npz"),
        ("log.h5", "d3rlpy", "d3rlpy"),
        ("log-v0", "minari", "minari"),
    ],
)
def test_formats(tmp_path, log, target, format, expected):
    path = tmp_path / target
    assert write_transitions(log, path, format) == Written(str(path), expected)
    assert open_transitions(path).sha256 == log.sha256


def test_minari_ids_are_targets(tmp_path, log, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))
    write_transitions(log, "minari:walk/test-v0")
    assert open_transitions("minari:walk/test-v0").sha256 == log.sha256
    assert Path(tmp_path / "datasets" / "walk" / "test-v0" / "data").is_dir()


@pytest.mark.parametrize(
    ("target", "format", "words"),
    [
        ("log.xls", None, r"does not tell its format; choose one of hdf5, minari, .*, csv \(--format\)"),
        ("log.hdf5", "xls", "format 'xls' is unknown"),
        ("minari:walk-v0", "npz", "names a Minari dataset but the format is npz"),
        ("minari:a b", None, "is no Minari id"),
        ("absent/log.hdf5", None, "the folder absent does not exist; create it"),
    ],
)
def test_targets_that_make_no_sense(tmp_path, log, monkeypatch, target, format, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=words):
        write_transitions(log, target, format)
    assert list(tmp_path.iterdir()) == []
