"""Folders of shards: what is written is what is read, however it is cut; damage is
named.
"""

import json
import os
import pickle
import shutil
import tracemalloc
from itertools import pairwise

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from koffline.data.disk import writer as shard_writer
from koffline.data.disk.writer import ShardWriter
from koffline.data.sources import convert_to_shards, open_transitions, write_transitions
from koffline.data.transitions import Discrete, Metadata
from koffline.errors import DataError
from tests.data.logs import assert_same_rows, drawn_logs, roll_out
from tests.refusals import one_line

METADATA = Metadata(gamma=0.9, extra={"task": "walk"}, notes=("made up",))
LOG = roll_out(["truncated", "terminated"] * 10, [4, 3] * 10).transitions(
    metadata=METADATA
)


def write_shards(target, *logs, shard_rows=15, force=False):
    with ShardWriter(target, shard_rows, force) as writer:
        for log in logs or (LOG,):
            writer.append(log)
    return target


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("written") / "shards")


@pytest.fixture
def folder(written, tmp_path):
    """One that may be spoiled."""
    return shutil.copytree(written, tmp_path / "shards")


@settings(max_examples=6, deadline=None)
@given(drawn_logs(), st.integers(3, 12), st.integers(0, 99), st.integers(1, 9))
def test_any_log_comes_back_however_it_is_cut(
    tmp_path_factory, drawn, shard_rows, seed, block_rows
):
    log = drawn.log()
    folder = tmp_path_factory.mktemp("shards") / "log"
    take = log.select_episodes if log.has_episodes else log.select
    units = log.n_episodes if log.has_episodes else len(log)
    borders = np.random.default_rng(seed).integers(0, units + 1, 3)
    with ShardWriter(folder, shard_rows) as writer:
        for start, stop in pairwise(np.unique([*borders, 0, units])):
            writer.append(take(np.arange(start, stop)))
        assert writer.rows == len(log)
    lazy = open_transitions(folder, lazy=True)
    assert_same_rows(lazy.load(), log)
    assert lazy.sha256 == log.sha256
    assert (len(lazy), lazy.n_episodes) == (len(log), log.n_episodes)
    assert all(
        shard.rows <= max(shard_rows, max(drawn.lengths)) for shard in lazy.shards
    )
    once = write_shards(folder.with_name("once"), log, shard_rows=shard_rows)
    for path in once.glob("*.hdf5"):  # the same rows are the same bytes
        assert path.read_bytes() == (folder / path.name).read_bytes()
    blocks = list(lazy.blocks(block_rows))
    np.testing.assert_array_equal(
        np.concatenate([b.observations for b in blocks]), log.observations
    )
    assert max(len(block) for block in blocks) <= block_rows
    with lazy.open_shard(
        0
    ) as opened:  # from any row of a shard, also inside an episode
        for start in range(lazy.shards[0].rows - 1):
            block = opened.block(start, start + 2)
            rows = slice(start, start + 2)
            np.testing.assert_array_equal(block.truncated, log.truncated[rows])
            np.testing.assert_array_equal(block.units, log.units[rows])
            if log.has_episodes:
                np.testing.assert_array_equal(block.steps, log.steps[rows])


def test_it_is_small_and_found_from_any_folder(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lazy = open_transitions("shards", lazy=True)
    assert lazy.shards[0].name == os.path.join("shards", "shard-00000.hdf5")
    sent = pickle.dumps(lazy)
    assert len(sent) < 5000
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert_same_rows(pickle.loads(sent).load(), LOG)


def spoil(name, row, value):
    def change(file):
        file[name][row] = value

    return change


def flip(path):
    """One bit in the middle of the rewards."""
    with h5py.File(path) as file:
        place = file["rewards"].id.get_chunk_info(0).byte_offset
    content = bytearray(path.read_bytes())
    content[place + 4] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "NaN": (
        spoil("rewards", 9, np.nan),
        "rewards holds nan in row 9, no finite number; drop or mend",
    ),
    "action": (spoil("actions", 10, 7), "actions holds 7 in row 10, outside Discrete"),
    "flag inside": (
        spoil("terminals", 8, True),
        "row 8 is terminated but its episode goes on in row 9",
    ),
    "step": (spoil("steps", 9, 7), "row 9 has step 7, expected 2"),
    "episode": (
        spoil("episode_ids", slice(7, None), 9),
        "row 7 has step 0, expected -",
    ),
    "no column": (
        lambda file: file.pop("rewards"),
        "rewards is missing; copy or write the file again",
    ),
    "missing": (os.unlink, "hdf5: No such file or directory; check the path"),
    "truncated": (
        lambda path: os.truncate(path, path.stat().st_size // 2),
        "truncated or corrupt",
    ),
    "flipped": (flip, "truncated or corrupt HDF5 file"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("block_rows", [2, None])
def test_a_damaged_shard_is_named(folder, damage, block_rows):
    change, message = DAMAGES[damage]
    path = folder / "shard-00002.hdf5"
    if damage in ("missing", "truncated", "flipped"):
        change(path)
    else:
        with h5py.File(path, "r+") as file:
            change(file)
    lazy = open_transitions(folder, lazy=True)
    for shard in (0, 1, 3, 4):
        assert list(lazy.shard_blocks(shard, block_rows))
    with one_line(DataError, f"{path}", match=message):
        list(lazy.blocks(block_rows))


def shard(**changes):
    return lambda manifest: manifest["shards"][0].update(changes)


OUTSIDE = [
    "../shard.hdf5",
    "/etc/passwd",
    "..",
    "file:///etc/passwd",
    "a/../../x.hdf5",
    "",
    "x\0y",
]
LIES = {
    **{name: (shard(file=name), r"damaged, or newer .*file is") for name in OUTSIDE},
    "newer": (
        lambda m: m.update(version=2),
        r"json: damaged, or newer than this koffline \(version is 2\)",
    ),
    "no shards": (
        lambda m: m.update(shards=[]),
        r"\(shards is \[\]\); write the folder again",
    ),
    "rows": (shard(rows=-1), r"\(shards.0.rows is -1\)"),
    "no dtype": (
        lambda m: m["columns"]["rewards"].pop("dtype"),
        r"\(columns.rewards.dtype is missing\)",
    ),
    "dtype": (
        lambda m: m["columns"]["rewards"].update(dtype="object"),
        r"\(columns.rewards.dtype is 'ob",
    ),
    "no rewards": (
        lambda m: m["columns"].pop("rewards"),
        "json: columns.rewards is missing; write the",
    ),
    "gamma": (
        lambda m: m.update(gamma="high"),
        r"manifest.json: .*\(gamma is 'high'\)",
    ),
    "space": (
        lambda m: m.update(action_space={}),
        r"manifest.json: the file's action space is \{\}, which",
    ),
    "episodes": (
        shard(episodes=2),
        "shard-00000.hdf5: there are 4 episodes, 2 were promised",
    ),
    "huge": (
        lambda m: (shard(rows=2**60)(m), m.update(rows=2**60 + 56)),
        "takes more than 1000 PB",
    ),
    "twice": (
        lambda m: (m["shards"].append(m["shards"][0]), m.update(rows=84)),
        "lists a shard twice",
    ),
    "much": (
        lambda m: m.update(extra={"x": "x" * 2**24}),
        r"json is larger than 16\.8 MB, the most that a",
    ),
}
DEEP = '{"format": "koffline-shards", "shards": ' + "[" * 100_000
BROKEN = [
    "",
    "[1]",
    '{"format": "koffline-shards"',
    '{"format": "koffline-shards"}',
    DEEP,
]


@pytest.mark.parametrize("lie", [*LIES, *range(len(BROKEN))])
def test_a_manifest_that_lies_is_refused(folder, lie):
    path = folder / "manifest.json"
    message = None
    if isinstance(lie, int):
        path.write_text(BROKEN[lie])
    else:
        change, message = LIES[lie]
        manifest = json.loads(path.read_text())
        change(manifest)
        path.write_text(json.dumps(manifest))
    with one_line(DataError, match=message) as caught:
        open_transitions(folder, lazy=True).load()
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("scheme", ["", "file://"])
@pytest.mark.parametrize("name", ["shard-00000.hdf5", "manifest.json"])
def test_links_are_not_followed(folder, name, scheme):
    (folder / name).rename(folder.with_name("secret"))
    (folder / name).symlink_to("../secret")
    with pytest.raises(DataError, match=f"{name} is a link, which is not"):
        open_transitions(f"{scheme}{folder}", lazy=True)


class TestWriting:
    def test_an_older_folder_stays_until_the_new_one_is_whole(self, folder, tmp_path):
        with pytest.raises(DataError, match="exists already"):
            write_shards(folder)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        for other, words in (
            (
                LOG.replace(action_space=Discrete(4)),
                r"action space Discrete\(4\), the first one",
            ),
            (LOG.replace(episode_ids=None, steps=None), "episode_ids None"),
        ):
            with pytest.raises(DataError, match=words):
                write_shards(folder, LOG, other, force=True)
            assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        with ShardWriter(folder, 70, force=True) as writer:
            writer.append(LOG)
            writer.metadata = Metadata(gamma=0.5)  # may be set late
        assert sorted(path.name for path in folder.iterdir()) == [
            "manifest.json",
            "shard-00000.hdf5",
        ]
        assert open_transitions(folder, lazy=True).metadata.gamma == 0.5
        assert list(tmp_path.iterdir()) == [folder]

    def test_too_many_shards_and_no_rows_are_refused(self, tmp_path, monkeypatch):
        with (
            pytest.raises(DataError, match="no rows were given"),
            ShardWriter(tmp_path / "s", 5),
        ):
            pass
        monkeypatch.setattr(shard_writer, "MOST_SHARDS", 4)
        with pytest.raises(
            DataError, match="s would have more than 4 shards; put more rows into each"
        ):
            write_shards(tmp_path / "s")
        assert list(tmp_path.iterdir()) == []


class TestConverting:
    @pytest.mark.parametrize("format_", ["hdf5", "npz", "minari"])
    def test_from_any_file_also_without_weight_in_a_block(self, tmp_path, format_):
        log = LOG.replace(weights=np.where(np.arange(70) < 50, 0.0, 1.0))
        write_transitions(log, tmp_path / "log", format_)
        lazy = convert_to_shards(tmp_path / "log", tmp_path / "shards", 30)
        assert_same_rows(lazy.load(), open_transitions(tmp_path / "log"))
        np.testing.assert_array_equal(lazy.load().weights, log.weights)
        np.testing.assert_array_equal(next(lazy.blocks(5)).weights, 0.0)

    def test_memory_is_that_of_a_block(self, tmp_path, monkeypatch):
        log = roll_out(["truncated"] * 20, [20] * 20, shape=(2000,)).transitions()
        write_shards(tmp_path / "log", log, shard_rows=400)
        size = sum(array.nbytes for array in (log.observations, log.next_observations))
        del log
        monkeypatch.setattr("koffline.data.disk.log.BLOCK_BYTES", size // 20)
        tracemalloc.start()
        convert_to_shards(tmp_path / "log", tmp_path / "shards", 200)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        # A block, the same joined with what was kept of the one before, and a few
        # temporaries of its checks.
        assert peak < size / 2
