"""Every bad source is one line with a remedy, in memory and lazily."""

import pickle

import numpy as np
import pytest

from koffline.data.sources import open_transitions, write_transitions
from koffline.data.transitions import Discrete
from koffline.errors import DataError
from tests.data.logs import d4rl_arrays, roll_out, write_arrays

LOG = roll_out().transitions()
REQUIRED = ("observations", "actions", "rewards", "terminals")


def content(written):
    return lambda path: path.write_bytes(written)


def arrays(**changes):
    return lambda path: write_arrays(path, d4rl_arrays(roll_out(), **changes))


def all_of(array):
    return lambda path: write_arrays(path, dict.fromkeys(REQUIRED, array))


def ours(format, cut=0):
    def write(path):
        write_transitions(LOG, path, format)
        if cut:
            path.write_bytes(path.read_bytes()[:-cut])

    return write


NOT_LAZY = "which alone are read from disk; make shards of it: koffline data convert"
DAMAGED = "truncated or corrupt HDF5 file .*; copy or export it again"
# what writes it: what the reader in memory says, and the lazy one where that is something else
BAD = {
    "missing": (lambda path: None, "does not exist; check the path", ""),
    "text": (content(b"episode,reward\n0,1.0\n"), "is a text file, whatever its name says; give a", NOT_LAZY),
    "cut HDF5": (ours("hdf5", 500), DAMAGED, ""),
    "cut NPZ": (ours("npz", 200), "truncated or corrupt NPZ", ""),
    "pickle": (content(pickle.dumps({"a": [1]})), "is a Python pickle, which koffline never", NOT_LAZY),
    "gzip": (content(b"\x1f\x8b" + bytes(50)), "is a gzip file", NOT_LAZY),
    "keys": (
        lambda path: write_arrays(path, {"obs": np.zeros(3)}),
        "lacks observations, .*: found keys obs; expected obs",
        NOT_LAZY,
    ),
    "folder": (lambda path: path.mkdir(), "holds no Minari dataset", NOT_LAZY),
    "words": (all_of(["a", "b"]), "holds values of type object; give numbers", NOT_LAZY),
    "no rows": (all_of(np.zeros(0)), "has no rows", NOT_LAZY),
    "one more": (arrays(next_observations=None, observations=np.zeros((16, 3))), "and a last one", NOT_LAZY),
    "interleaved": (arrays(episode_ids=np.arange(15) % 2), "its episode goes on", NOT_LAZY),
    "not counted": (
        arrays(episode_ids=LOG.episode_ids, steps=LOG.steps + 1),
        "has step 1, expected 0",
        NOT_LAZY,
    ),
    "dump": (ours("d3rlpy"), "", NOT_LAZY),
    "minari": (ours("minari"), "", NOT_LAZY),
    "packed NPZ": (ours("npz"), "", NOT_LAZY),
    "derived": (arrays(next_observations=None), "", NOT_LAZY),
    "d3rlpy 1": (
        arrays(timeouts=None, episode_terminals=(LOG.terminated | LOG.truncated).astype(np.float32)),
        "",
        NOT_LAZY,
    ),
}


def read(path, lazy):
    log = open_transitions(path, Discrete(3), lazy=lazy)
    return log.load() if lazy else log


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("case", BAD)
def test_each_bad_source_is_one_line(tmp_path, case, lazy):
    path = tmp_path / "log.hdf5"
    spoil, in_memory, on_disk = BAD[case]
    spoil(path)
    if not in_memory and not lazy:
        assert len(read(path, lazy)) >= 12
        return
    with pytest.raises(DataError, match=on_disk if lazy and on_disk else in_memory) as error:
        read(path, lazy)
    assert "\n" not in str(error.value)


def test_bad_requests_are_one_line(tmp_path):
    write_transitions(LOG, tmp_path / "log.hdf5")
    lazy = open_transitions(tmp_path / "log.hdf5", lazy=True)
    with pytest.raises(DataError, match="block_rows is 0"):
        list(lazy.blocks(0))
    for source, words in [
        (LOG, "in memory already"),
        (tmp_path / "*.npz", "does not exist"),
        ([], "no files are given"),
    ]:
        with pytest.raises(DataError, match=words):
            open_transitions(source, lazy=True)
