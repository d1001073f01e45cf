"""HDF5 files made to do harm: refused in one line, other files stay unread, memory and time stay bounded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from koffline.data.sources import open_transitions
from koffline.errors import DataError
from koffline.untrusted.limits import machine_memory
from tests.fuzz import hostile


def read(path: Path, lazy: bool) -> None:
    log = open_transitions(path, lazy=lazy)
    list(log.blocks() if lazy else ())


@pytest.mark.parametrize("lazy", [False, True], ids=["whole", "lazy"])
@pytest.mark.parametrize("build", hostile.HDF5, ids=lambda build: build.__name__)
def test_a_hostile_file_is_one_line(tmp_path: Path, build, lazy, monkeypatch):
    monkeypatch.setenv("KOFFLINE_MAX_BYTES", "20000000")
    path = tmp_path / "log.hdf5"
    build(path)
    with pytest.raises(DataError) as error:
        read(path, lazy)
    assert str(path) in str(error.value)
    assert str(error.value).isprintable()
    assert (hostile.HDF5 | (hostile.LAZY if lazy else {}))[build] in str(error.value)


@pytest.mark.parametrize(
    "build", [hostile.external_link, hostile.external_storage, hostile.virtual_dataset],
    ids=lambda build: build.__name__,
)  # fmt: skip
def test_these_files_would_read_another_one(tmp_path: Path, build):
    """The attack works where nothing is checked: else the refusals above would prove nothing."""
    path = tmp_path / "log.hdf5"
    build(path)
    with h5py.File(path) as file:
        assert (file["rewards"][()] == hostile.SECRET).all()


def test_a_log_beyond_the_allowance_is_read_from_disk(tmp_path: Path, monkeypatch):
    path, values = tmp_path / "log.hdf5", np.random.default_rng(0).random((3000, 100))
    with hostile.flat(path) as file:
        for name in list(file):
            del file[name]
            array = values if "obs" in name else np.zeros(3000, "i1")
            file.create_dataset(name, data=array, chunks=(100, *array.shape[1:]), compression="gzip")
    needed = 2 * 3000 * 100 * 8 + 4 * 3000 * 8
    monkeypatch.setenv("KOFFLINE_MAX_BYTES", str(needed - 1))
    with pytest.raises(
        DataError, match=r"takes 4\.9 MB in memory, 4\.9 MB are allowed; read a log from disk"
    ):
        open_transitions(path)
    lazy = open_transitions(path, lazy=True)
    assert np.array_equal(np.concatenate([block.observations for block in lazy.blocks(500)]), values)
    monkeypatch.setenv("KOFFLINE_MAX_BYTES", "4000000")
    with pytest.raises(DataError, match=r"takes 4.* MB in memory"):
        lazy.load()
    monkeypatch.setenv("KOFFLINE_MAX_BYTES", str(needed))
    assert len(open_transitions(path)) == 3000


def test_the_allowance_is_a_quarter_of_the_memory(monkeypatch):
    monkeypatch.delenv("KOFFLINE_MAX_BYTES", raising=False)
    asked = "import resource; resource.setrlimit(resource.RLIMIT_AS, (4 * 10**9,) * 2)"
    code = f"{asked}; from koffline.untrusted.limits import memory_allowance as m; print(m())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == min(10**9, machine_memory() // 4)
