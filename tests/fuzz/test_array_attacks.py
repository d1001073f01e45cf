"""NumPy files made to do harm."""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest

from koffline.data.sources import open_transitions
from koffline.data.transitions import Discrete
from koffline.errors import DataError, PolicyError
from koffline.ope.problem import read_initial_states
from koffline.policy_specs import load_policy
from tests.fuzz.hostile import archive, bomb, flat_members, npy

FLOATS = "{'descr': '<f8', 'fortran_order': False, 'shape': (%s)}"
LIES = {
    "a size that no memory has": npy(FLOATS % "10000000000000,", bytes(32)),
    "a size with too many digits": npy(FLOATS % ("9" * 400 + ","), bytes(32)),
    "sizes that cancel": npy("{'descr': '<f8', 'fortran_order': False, 'shape': (-2, -2)}", bytes(32)),
    "less than it holds": npy("{'descr': '<f8', 'fortran_order': False, 'shape': (4,)}", bytes(80)),
    "a call": npy("__import__('os').system('true')", bytes(32)),
    "nesting without end": npy("(" * 9000, bytes(32)),
    "no header": b"\x93NUMPY\x01\x00\xff\xff",
    "a header of 4 GB": b"\x93NUMPY\x02\x00\xff\xff\xff\xff",
    "elements of no bytes": npy("{'descr': '|V0', 'fortran_order': False, 'shape': (4,)}"),
    "objects": npy("{'descr': '|O', 'fortran_order': False, 'shape': (4,)}", pickle.dumps([1] * 4)),
    "arrays in elements": npy("{'descr': ('<f8', (2,)), 'fortran_order': False, 'shape': (2,)}", bytes(32)),
    "nothing": b"",
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_header_is_one_line_everywhere(tmp_path: Path, lie):
    log = tmp_path / "log.npz"
    log.write_bytes(archive(flat_members(rewards=LIES[lie])))
    with pytest.raises(DataError, match=r"log\.npz.*rewards") as error:
        open_transitions(log)
    assert str(error.value).isprintable()
    policy = tmp_path / "policy.npz"
    policy.write_bytes(archive({"format.npy": LIES[lie]}))
    with pytest.raises(PolicyError, match=r"cannot be read"):
        load_policy(policy, Discrete(2), (2,))
    starts = tmp_path / "starts.npy"
    starts.write_bytes(LIES[lie] or b"\x93NUMPY")
    with pytest.raises(DataError, match="initial states"):
        read_initial_states(str(starts))


def test_arrays_beyond_the_memory_are_refused_before_they_are_unpacked(tmp_path: Path, monkeypatch):
    path = tmp_path / "log.npz"
    path.write_bytes(bomb(2**22))
    monkeypatch.setenv("KOFFLINE_MAX_BYTES", "9000000")
    with pytest.raises(DataError) as error:
        open_transitions(path)
    # four rows of a million bytes, which become floats, and as much again for the next observations
    assert str(error.value) == (
        f"{path} is not read: it takes 33.6 MB in memory, 9 MB are allowed; read a log from disk (--lazy) "
        "or make shards of it (`koffline data convert … --shard-rows N`), or set KOFFLINE_MAX_BYTES to more "
        "bytes"
    )
    starts = tmp_path / "starts.npz"
    starts.write_bytes(archive({"observations.npy": npy(FLOATS % "2000000,", bytes(16_000_000))}))
    with pytest.raises(DataError, match=r"starts\.npz is not read: it takes 16 MB in memory, 9 MB are"):
        read_initial_states(str(starts))


def test_the_columns_of_an_archive_count_together(tmp_path: Path, monkeypatch):
    path = tmp_path / "log.npz"
    wide = np.zeros((1000, 100))
    np.savez(path, observations=wide, next_observations=wide, actions=wide, rewards=np.zeros(1000),
             terminals=np.zeros(1000, bool))  # fmt: skip
    monkeypatch.setenv("KOFFLINE_MAX_BYTES", "2400000")
    with pytest.raises(DataError, match=r"takes 2\.42 MB in memory, 2\.4 MB are allowed"):
        open_transitions(path)
    assert len(open_transitions(path, lazy=True).read_rows(0, 0, 1000)) == 1000
    monkeypatch.setenv("KOFFLINE_MAX_BYTES", "2416000")
    assert len(open_transitions(path)) == 1000


def test_lengths_are_compared_before_a_column_is_read(tmp_path: Path, monkeypatch):
    path = tmp_path / "log.npz"
    path.write_bytes(archive(flat_members(rewards=npy(FLOATS % "2000000,", bytes(16_000_000)))))
    monkeypatch.setattr("koffline.untrusted.arrays._read", lambda *_: pytest.fail("a column was read"))
    with pytest.raises(DataError, match="rewards has 2000000 rows, observations 4; re-export"):
        open_transitions(path)


def encrypted() -> bytes:
    content = bytearray(archive(flat_members()))
    for signature, place in ((b"PK\x01\x02", 8), (b"PK\x03\x04", 6)):
        for found in re.finditer(re.escape(signature), bytes(content)):
            content[found.start() + place] |= 1
    return bytes(content)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_strange_archives_are_one_line(tmp_path: Path):
    path, doubled = tmp_path / "log.npz", io.BytesIO(archive(flat_members()))
    with zipfile.ZipFile(doubled, "a") as target:
        target.writestr("rewards.npy", b"")
    for content, words in (
        (archive(flat_members(), zipfile.ZIP_LZMA), "compressed in a way NumPy never uses"),
        (encrypted(), "is encrypted"),
        (doubled.getvalue(), "two of its arrays have the same name"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=words):
            open_transitions(path)


def test_paths_in_an_archive_name_no_files(tmp_path: Path):
    path = tmp_path / "log.npz"
    path.write_bytes(archive(flat_members() | {"../outside.npy": b"", "/etc/outside.npy": b""}))
    assert len(open_transitions(path, Discrete(2))) == 4
    assert sorted(tmp_path.iterdir()) == [path]
    assert not (tmp_path.parent / "outside.npy").exists()


def test_names_cannot_command_the_terminal(tmp_path: Path):
    path = tmp_path / "log.npz"
    path.write_bytes(archive({"\x1b]0;owned\x07\nrewards.npy": b""}))
    with pytest.raises(DataError) as error:
        open_transitions(path)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("dtype", [">f8", "<f4", "|b1", "<u2"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_honest_arrays_are_what_numpy_reads(tmp_path: Path, dtype, order):
    from koffline.untrusted.arrays import read_arrays

    values = np.arange(24).reshape(2, 3, 4).astype(dtype, order=order)
    np.savez(tmp_path / "a.npz", values=values, empty=np.zeros((0, 3)), text=np.array("word"))
    read = read_arrays(tmp_path / "a.npz")
    np.testing.assert_array_equal(read["values"], values)
    assert read["values"].dtype == values.dtype
    assert read["empty"].shape == (0, 3)
    assert str(read["text"]) == "word"
