"""NumPy files made to do harm."""

import io
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from koffline.data.sources import open_transitions, read_initial_states
from koffline.data.transitions import Discrete
from koffline.errors import DataError, PolicyError
from koffline.policy_specs import load_policy
from tests.fuzz.hostile import archive, flat_members, npy
from tests.refusals import one_line

FLOATS = "{'descr': '<f8', 'fortran_order': False, 'shape': (%s)}"
LIES = {
    "a size that no memory has": npy(FLOATS % "10000000000000,", bytes(32)),
    "a size with too many digits": npy(FLOATS % ("9" * 400 + ","), bytes(32)),
    "sizes that cancel": npy(
        "{'descr': '<f8', 'fortran_order': False, 'shape': (-2, -2)}", bytes(32)
    ),
    "less than it holds": npy(
        "{'descr': '<f8', 'fortran_order': False, 'shape': (4,)}", bytes(80)
    ),
    "a call": npy("__import__('os').system('true')", bytes(32)),
    "nesting without end": npy("(" * 9000, bytes(32)),
    "no header": b"\x93NUMPY\x01\x00\xff\xff",
    "a header of 4 GB": b"\x93NUMPY\x02\x00\xff\xff\xff\xff",
    "elements of no bytes": npy(
        "{'descr': '|V0', 'fortran_order': False, 'shape': (4,)}"
    ),
    "objects": npy(
        "{'descr': '|O', 'fortran_order': False, 'shape': (4,)}", pickle.dumps([1] * 4)
    ),
    "arrays in elements": npy(
        "{'descr': ('<f8', (2,)), 'fortran_order': False, 'shape': (2,)}", bytes(32)
    ),
    "nothing": b"",
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_header_is_one_line_everywhere(tmp_path: Path, lie):
    log = tmp_path / "log.npz"
    log.write_bytes(archive(flat_members(rewards=LIES[lie])))
    with one_line(DataError, match=r"log\.npz.*rewards"):
        open_transitions(log)
    policy = tmp_path / "policy.npz"
    policy.write_bytes(archive({"format.npy": LIES[lie]}))
    with pytest.raises(PolicyError, match=r"(cannot be|is not) read"):
        load_policy(policy, Discrete(2), (2,))
    starts = tmp_path / "starts.npy"
    starts.write_bytes(LIES[lie] or b"\x93NUMPY")
    with pytest.raises(DataError, match="initial states"):
        read_initial_states(str(starts))


def test_the_columns_of_an_archive_count_together(tmp_path: Path, monkeypatch):
    path = tmp_path / "log.npz"
    wide = np.zeros((1000, 100))
    np.savez(
        path,
        observations=wide,
        next_observations=wide,
        actions=wide,
        rewards=np.zeros(1000),
        terminals=np.zeros(1000, bool),
    )
    monkeypatch.setenv("KOFFLINE_MAX_BYTES", "2400000")
    with pytest.raises(
        DataError, match=r"takes 2\.42 MB in memory, 2\.4 MB are allowed"
    ):
        open_transitions(path)
    monkeypatch.setenv("KOFFLINE_MAX_BYTES", "2416000")
    assert len(open_transitions(path)) == 1000


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_strange_archives_are_one_line(tmp_path: Path):
    path = tmp_path / "log.npz"
    doubled = io.BytesIO(archive(flat_members()))
    with zipfile.ZipFile(doubled, "a") as target:
        target.writestr("rewards.npy", b"")
    for content, words in (
        (
            archive(flat_members(), zipfile.ZIP_LZMA),
            "compressed in a way NumPy never uses",
        ),
        (doubled.getvalue(), "two of its arrays have the same name"),
        # commands to the terminal
        (
            archive({"\x1b]0;owned\x07\nrewards.npy": b""}),
            "lacks observations",
        ),
    ):
        path.write_bytes(content)
        with one_line(DataError, match=words):
            open_transitions(path)


def test_paths_in_an_archive_name_no_files(tmp_path: Path):
    path = tmp_path / "log.npz"
    path.write_bytes(
        archive(flat_members() | {"../outside.npy": b"", "/etc/outside.npy": b""})
    )
    assert len(open_transitions(path, Discrete(2))) == 4
    assert sorted(tmp_path.iterdir()) == [path]
    assert not (tmp_path.parent / "outside.npy").exists()
