"""HDF5 on a disk that takes only so much: one line, nothing under the final name, the process goes on.

The limit is that of a file's size, which the system lets anybody set; writing beyond it fails as on a full
disk, and only then. Closing a file that HDF5 could not write used to end the process.
"""

import subprocess
import sys

import numpy as np
import pytest

from koffline.data.hdf5 import KeptErrors, new_hdf5
from koffline.data.sources import convert_to_shards, open_transitions, write_transitions
from tests.data.logs import assert_same_rows, roll_out

SCRIPT = """
import resource, signal, sys
from koffline.data.sources import convert_to_shards
from koffline.data.sources import open_transitions, write_transitions
from koffline.errors import DataError

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
log = open_transitions("log.npz")
for limit in map(int, sys.argv[1:]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    for write in (
        lambda: convert_to_shards("log.npz", "target", 10_000),
        lambda: write_transitions(log, "target", "hdf5"),
        lambda: write_transitions(log, "target", "d3rlpy"),
    ):
        try:
            write()
            print("written")
        except DataError as error:
            print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no limits on the size of files")
def test_whatever_fits_the_process_goes_on(tmp_path):
    log = roll_out(["truncated"] * 20, [40] * 20, shape=(20,), seed=3).transitions()
    write_transitions(log, tmp_path / "log.npz")
    limits = ["100", "5000", "30000", "60000", "90000"]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *limits], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    expected = "target cannot be written (File too large); check the folder and the disk"
    assert done.stdout.splitlines() == [expected] * (3 * len(limits))
    assert list(tmp_path.iterdir()) == [tmp_path / "log.npz"]


def test_the_same_file_where_there_is_room(tmp_path):
    log = roll_out().transitions()
    write_transitions(log, tmp_path / "log.npz")
    assert_same_rows(convert_to_shards(tmp_path / "log.npz", tmp_path / "shards", 9).load(), log)
    for name, format_ in (("a", "hdf5"), ("b", "d3rlpy")):
        for copy in ("1", "2"):
            write_transitions(log, tmp_path / (name + copy), format_)
        assert (tmp_path / f"{name}1").read_bytes() == (tmp_path / f"{name}2").read_bytes()
        assert open_transitions(tmp_path / f"{name}1").sha256 == log.sha256


class Failing:
    """A file that takes so many bytes and no more."""

    def __init__(self, file, room):
        self._file, self._room = file, room

    def __getattr__(self, name):
        return getattr(self._file, name)

    def write(self, content):
        if not self._room:
            raise OSError(28, "No space left on device")
        taken = content[: self._room]
        self._room -= len(taken)
        return self._file.write(taken)


def test_the_first_error_is_kept(tmp_path):
    output = KeptErrors(tmp_path / "file")
    output._file = Failing(output._file, 10)
    assert output.write(b"12345678") == 8
    output.check()
    assert output.write(b"9abcd") == 5
    with pytest.raises(OSError, match="No space left"):
        output.check()
    assert output.write(b"more") == 4
    output.seek(6)
    held = bytearray(8)
    assert output.readinto(held) == 8
    assert held == b"789a" + bytes(4)
    output.close()
    with pytest.raises(OSError, match="No space left"):
        output.check()


@pytest.mark.parametrize("room", range(0, 6000, 500))
def test_a_file_is_whole_or_an_error(tmp_path, monkeypatch, room):
    start = KeptErrors.__init__

    def limited(self, path):
        start(self, path)
        self._file = Failing(self._file, room)

    monkeypatch.setattr(KeptErrors, "__init__", limited)

    def write():
        with new_hdf5(tmp_path / "file") as file:
            for name in "abc":
                file.create_dataset(name, data=np.arange(1000.0), chunks=(100,), fletcher32=True)

    with pytest.raises(OSError, match="No space left"):
        write()
