"""HDF5 files made to do harm: refused in one line, other files stay unread, memory and
time stay bounded.
"""

import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

import koffline
from koffline.data.sources import open_transitions
from koffline.data.transitions import Discrete, Transitions
from koffline.errors import DataError
from koffline.untrusted.limits import machine_memory
from tests.fuzz import hostile
from tests.refusals import one_line


@pytest.mark.parametrize(
    ("build", "words", "is_shard"),
    [
        (*case, is_shard)
        for is_shard, cases in enumerate((hostile.HDF5, hostile.SHARDS))
        for case in cases.items()
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_hostile_file_is_one_line_also_as_a_shard(
    tmp_path: Path, build, words, is_shard, monkeypatch
):
    monkeypatch.setenv("KOFFLINE_MAX_BYTES", "20000000")
    path = tmp_path / "log.hdf5"
    build(path)
    folder = hostile.in_a_folder(path) if is_shard else tmp_path
    with one_line(DataError, str(folder / "log.hdf5"), words):
        (
            list(open_transitions(folder, lazy=True).blocks())
            if is_shard
            else open_transitions(path)
        )


@pytest.mark.parametrize(
    "build",
    [hostile.external_link, hostile.external_storage, hostile.virtual_dataset],
    ids=lambda build: build.__name__,
)
def test_these_files_would_read_another_one(tmp_path: Path, build):
    """The attack works where nothing is checked: else the refusals above would prove
    nothing.
    """
    path = tmp_path / "log.hdf5"
    build(path)
    with h5py.File(path) as file:
        assert (file["rewards"][()] == hostile.SECRET).all()


def test_a_log_beyond_the_allowance_is_read_from_disk(tmp_path: Path, monkeypatch):
    values = np.random.default_rng(0).random((3000, 100))
    with koffline.ShardWriter(tmp_path / "log", 3000) as writer:
        writer.append(
            Transitions(
                values,
                np.arange(3000) % 2,
                np.ones(3000),
                values,
                np.ones(3000, bool),
                np.zeros(3000, bool),
                Discrete(2),
            )
        )
    path = tmp_path / "log" / "shard-00000.hdf5"
    needed = 2 * 3000 * 100 * 8 + 4 * 3000 * 8
    monkeypatch.setenv("KOFFLINE_MAX_BYTES", str(needed - 1))
    remedy = (
        f"set KOFFLINE_MAX_BYTES to {needed} or more .*`koffline data convert …"
        " --shard-rows N`"
    )
    with pytest.raises(
        DataError, match=rf"takes 4\.9 MB in memory, 4\.9 MB are allowed; {remedy}"
    ):
        open_transitions(path)
    lazy = open_transitions(tmp_path / "log", lazy=True)
    assert np.array_equal(
        np.concatenate([block.observations for block in lazy.blocks(500)]), values
    )
    monkeypatch.setenv("KOFFLINE_MAX_BYTES", "4000000")
    with pytest.raises(DataError, match=r"takes 4.* MB in memory"):
        lazy.load()
    monkeypatch.setenv("KOFFLINE_MAX_BYTES", str(needed))
    assert len(open_transitions(path)) == 3000


def test_the_allowance_is_a_quarter_of_the_memory(monkeypatch):
    monkeypatch.delenv("KOFFLINE_MAX_BYTES", raising=False)
    limited = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (4 * 10**9,) * 2)"
    )
    code = (
        f"{limited}; from koffline.untrusted.limits import memory_allowance as m;"
        " print(m())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == min(10**9, machine_memory() // 4)
