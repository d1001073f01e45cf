"""Every bad source is one line with a remedy; a conversion never replaces its source."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from koffline.data.sources import convert_to_shards, open_transitions, write_transitions
from koffline.data.transitions import Discrete
from koffline.errors import ConfigError, DataError
from koffline.store import check_apart
from koffline.store.run_record import digest_of
from tests.data.logs import d4rl_arrays, in_shards, roll_out, write_arrays
from tests.refusals import assert_refused, run_cli

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


NO_FILE = "is no data file that koffline knows, whatever its name says; give a"
BAD = {
    "missing": (lambda path: None, "does not exist; check the path"),
    "text": (content(b"episode,reward\n0,1.0\n"), NO_FILE),
    "pickle": (content(pickle.dumps({"a": [1]})), NO_FILE),
    "empty": (content(b""), r"is empty \(0 bytes\); copy or export it again"),
    "cut HDF5": (ours("hdf5", 500), "truncated or corrupt HDF5 file .*; copy or export it again"),
    "cut NPZ": (ours("npz", 200), "truncated or corrupt NPZ"),
    "keys": (
        lambda path: write_arrays(path, {"obs": np.zeros(3)}),
        "lacks observations, .*: found keys obs; expected obs",
    ),
    "folder": (lambda path: path.mkdir(), "holds no Minari dataset"),
    "words": (all_of(["a", "b"]), "holds values of type object; give numbers"),
    "no rows": (all_of(np.zeros(0)), "has no rows"),
    "one more": (arrays(next_observations=None, observations=np.zeros((16, 3))), "and a last one"),
    "interleaved": (arrays(episode_ids=np.arange(15) % 2), "its episode goes on"),
    "not counted": (arrays(episode_ids=LOG.episode_ids, steps=LOG.steps + 1), "has step 1, expected 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_each_bad_source_is_one_line(tmp_path, case):
    spoil, words = BAD[case]
    spoil(tmp_path / "log.hdf5")
    for lazy in (False, True):
        with pytest.raises(DataError, match="no folder of shards|not exist" if lazy else words) as error:
            open_transitions(tmp_path / "log.hdf5", Discrete(3), lazy=lazy)
        assert "\n" not in str(error.value)


def test_bad_requests_are_one_line(tmp_path):
    lazy = in_shards(LOG, tmp_path / "shards")
    with pytest.raises(DataError, match="block_rows is 0"):
        list(lazy.blocks(0))
    with pytest.raises(DataError, match="in memory already"):
        open_transitions(LOG, lazy=True)
    assert open_transitions(lazy, Discrete(9), lazy=True).action_space == Discrete(9)
    assert open_transitions(lazy).sha256 == LOG.sha256


@pytest.fixture
def sources(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    write_transitions(LOG, "log.parquet")
    write_transitions(LOG, "log.hdf5")
    write_transitions(LOG, "minari:chain/small-v0")
    convert_to_shards("log.hdf5", "shards", 20)
    os.link("log.parquet", "hard.parquet")
    Path("soft.parquet").symlink_to("log.parquet")
    Path("linked").symlink_to("shards")
    Path("tables").mkdir()
    Path("tables/part.parquet").write_bytes(Path("log.parquet").read_bytes())
    return tmp_path


@pytest.mark.parametrize(
    ("source", "target", "more"),
    [
        ("log.parquet", "log.parquet", ()),
        ("log.parquet", "hard.parquet", ()),
        ("file://{place}/log.parquet", "log.parquet", ()),
        ("tables", "tables/part.parquet", ()),
        ("shards", "shards", ("--shard-rows", "10")),
        ("shards", "linked", ("--shard-rows", "10")),
        ("shards/shard-00000.hdf5", "shards", ("--shard-rows", "10")),
        ("minari:chain/small-v0", "minari:chain/small-v0", ()),
    ],
)
def test_the_source_is_never_replaced(sources, source, target, more):
    before = digest_of(sources)
    done = run_cli("data", "convert", source.format(place=sources), target, *more, "--force")
    assert_refused(done, ", which this command reads, also with --force")
    assert digest_of(sources) == before


def test_urls_that_are_equal_are_the_same():
    with pytest.raises(ConfigError, match="would replace memory"):
        check_apart(["memory://a/log.parquet"], "memory://a/log.parquet")
    check_apart(["memory://a/log.parquet"], "memory://b/log.parquet")
