"""Whole or not at all: nothing ever stands under the final name but a finished file."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from koffline.data.sources import open_transitions, write_transitions
from koffline.errors import DataError
from koffline.store import files
from koffline.store.files import atomic_file, atomic_folder
from tests.data.logs import roll_out


def test_a_kill_in_the_middle_leaves_what_was_there(tmp_path):
    """The process dies after the second array: no clean-up runs."""
    target = tmp_path / "log.hdf5"
    first = roll_out(seed=1).transitions()
    write_transitions(first, target)
    root = Path(__file__).parents[2]
    program = f"""
import os, signal, h5py
from koffline.data.sources import write_transitions
from tests.data.logs import roll_out
create, count = h5py.Group.create_dataset, []
def dying(self, *args, **kwargs):
    count.append(1)
    if len(count) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return create(self, *args, **kwargs)
h5py.Group.create_dataset = dying
write_transitions(roll_out(seed=2).transitions(), {str(target)!r}, force=True)
"""
    for _ in range(2):  # litter does not add up, and goes with the next writing
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, cwd=root)
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()
        assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["log.hdf5"]
        assert open_transitions(target).sha256 == first.sha256
        assert len(list(tmp_path.iterdir())) == 2
    write_transitions(first, target, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["log.hdf5"]


@pytest.mark.parametrize("links", [True, False])
def test_a_name_taken_meanwhile_is_not_replaced(tmp_path, monkeypatch, links):
    def no_links(*args):
        raise OSError(errno.EPERM, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", no_links)
    with atomic_file(tmp_path / "free", force=False) as temporary:
        temporary.write_text("mine")
    assert (tmp_path / "free").read_text() == "mine"
    target = tmp_path / "taken"

    def lose_the_race():
        with atomic_file(target, force=False) as temporary:
            temporary.write_text("mine")
            target.write_text("theirs")

    with pytest.raises(DataError, match="exists already"):
        lose_the_race()
    assert target.read_text() == "theirs"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["free", "taken"]


def test_the_old_folder_returns_if_the_new_one_cannot_take_its_place(tmp_path, monkeypatch):
    """Where the system cannot swap two names in one step."""
    monkeypatch.setattr(files, "_exchange", lambda first, second: False)
    target = tmp_path / "set"
    target.mkdir()
    (target / "old").touch()
    rename, calls = os.rename, []

    def second_fails(source, destination):
        calls.append(source)
        if len(calls) == 2:
            raise OSError(errno.EIO, "Input/output error")
        rename(source, destination)

    monkeypatch.setattr(os, "rename", second_fails)
    with (
        pytest.raises(DataError, match="Input/output error"),
        atomic_folder(target, force=True, replaceable=lambda path: True) as temporary,
    ):
        (temporary / "new").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
    assert (target / "old").exists()
