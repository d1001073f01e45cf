"""Every bad source is one line with a remedy."""

import numpy as np
import pytest

from koffline.data.sources import open_transitions, write_transitions
from koffline.data.splitting import split_transitions
from koffline.data.transitions import Discrete
from koffline.errors import ConfigError, DataError
from tests.data.logs import d4rl_arrays, in_shards, roll_out, write_arrays
from tests.refusals import one_line, refused

LOG = roll_out().transitions()


def content(written):
    return lambda path: path.write_bytes(written)


def arrays(**changes):
    return lambda path: write_arrays(path, d4rl_arrays(roll_out(), **changes))


def keys(*names, array=(0.0, 0.0, 0.0)):
    return lambda path: write_arrays(path, dict.fromkeys(names, array))


def all_of(array):
    return keys("observations", "actions", "rewards", "terminals", array=array)


def ours(format, cut):
    def write(path):
        write_transitions(LOG, path, format)
        path.write_bytes(path.read_bytes()[:-cut])

    return write


NO_FILE = "is no data file that koffline knows, whatever its name says; give a"
BAD = {
    "missing": (lambda path: None, "does not exist; check the path"),
    "text": (content(b"episode,reward\n0,1.0\n"), NO_FILE),
    "empty": (content(b""), r"is empty \(0 bytes\); copy or export it again"),
    "cut HDF5": (
        ours("hdf5", 500),
        "truncated or corrupt HDF5 file .*; copy or export it again",
    ),
    "cut NPZ": (ours("npz", 200), "truncated or corrupt NPZ"),
    "keys": (keys("obs"), "lacks observations, .*: found keys obs; expected obs"),
    "group": (
        keys("observations", "rewards/a"),
        "rewards is a group, not an array; store its numbers in",
    ),
    "folder": (lambda path: path.mkdir(), "holds no Minari dataset"),
    "words": (all_of(["a", "b"]), "holds values of type object; give numbers"),
    "no rows": (all_of(np.zeros(0)), "has no rows"),
    "one more": (
        arrays(next_observations=None, observations=np.zeros((16, 3))),
        "and a last one",
    ),
    "interleaved": (arrays(episode_ids=np.arange(15) % 2), "its episode goes on"),
    "not counted": (
        arrays(episode_ids=LOG.episode_ids, steps=LOG.steps + 1),
        "has step 1, expected 0",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_each_bad_source_is_one_line(tmp_path, case):
    spoil, words = BAD[case]
    spoil(tmp_path / "log.hdf5")
    for lazy in (False, True):
        with one_line(
            DataError, match="no folder of shards|not exist" if lazy else words
        ):
            open_transitions(tmp_path / "log.hdf5", Discrete(3), lazy=lazy)


def test_bad_requests_are_one_line(tmp_path):
    lazy = in_shards(LOG, tmp_path / "shards")
    with pytest.raises(DataError, match="block_rows is 0"):
        list(lazy.blocks(0))
    with pytest.raises(DataError, match="in memory already"):
        open_transitions(LOG, lazy=True)
    for write in (open_transitions, lambda log: write_transitions(log, "log.npz")):
        with refused(DataError, "the log is a set; give a path, a pandas, polars"):
            write({0.0})
    with refused(ConfigError, "share of '0.3'"):
        split_transitions(LOG, "0.3")
    assert open_transitions(lazy, Discrete(9), lazy=True).action_space == Discrete(9)
    assert open_transitions(lazy).sha256 == LOG.sha256
