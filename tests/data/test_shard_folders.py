"""Folders of shards: what is written is what is read, however it is cut; damage is named."""

import json
import os
import pickle
import tracemalloc
from itertools import pairwise

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from koffline.data.disk import writer as shard_writer
from koffline.data.disk.log import LazyTransitions
from koffline.data.disk.shards import MOST_SHARDS
from koffline.data.disk.writer import ShardWriter
from koffline.data.row_block import in_whole_units
from koffline.data.sources import convert_to_shards, open_raw, open_transitions, write_transitions
from koffline.data.spaces import Bounds
from koffline.data.transitions import Continuous, Discrete, Metadata
from koffline.errors import DataError
from koffline.untrusted.limits import TEXT_BYTES
from tests.data.logs import assert_same_rows, drawn_logs, roll_out


@pytest.fixture
def log():
    metadata = Metadata(gamma=0.9, extra={"task": "walk"}, notes=("made up",))
    return roll_out(ends=["truncated", "terminated"] * 10, lengths=[4, 3] * 10).transitions(metadata=metadata)


@pytest.fixture
def folder(tmp_path, log):
    return write_shards(tmp_path / "shards", log)


def write_shards(target, log, shard_rows=15):
    with ShardWriter(target, shard_rows) as writer:
        writer.append(log)
    return target


def cut(log, generator):
    """The log in pieces of whole episodes."""
    units = log.n_episodes if log.has_episodes else len(log)
    borders = np.unique(np.append(generator.integers(0, units + 1, 3), [0, units]))
    for start, stop in pairwise(borders):
        yield (log.select_episodes if log.has_episodes else log.select)(np.arange(start, stop))


@settings(max_examples=8, deadline=None)
@given(drawn_logs(), st.integers(3, 12), st.integers(0, 99), st.integers(1, 9))
def test_any_log_comes_back_however_it_is_cut(tmp_path_factory, drawn, shard_rows, seed, block_rows):
    log, folder = drawn.log(), tmp_path_factory.mktemp("shards") / "log"
    with ShardWriter(folder, shard_rows) as writer:
        for piece in cut(log, np.random.default_rng(seed)):
            writer.append(piece)
    lazy = open_transitions(folder, lazy=True)
    assert_same_rows(lazy.load(), log)
    assert lazy.sha256 == lazy.compute_sha256() == log.sha256
    assert (len(lazy), lazy.n_episodes) == (len(log), log.n_episodes)
    assert all(shard.rows <= max(shard_rows, max(drawn.lengths)) for shard in lazy.shards)
    once = write_shards(folder.with_name("once"), log, shard_rows)
    assert [s.rows for s in open_transitions(once, lazy=True).shards] == [s.rows for s in lazy.shards]
    blocks = list(lazy.blocks(block_rows))
    np.testing.assert_array_equal(np.concatenate([b.observations for b in blocks]), log.observations)
    assert max(len(block) for block in blocks) <= block_rows


def test_a_shard_is_a_log_by_itself(folder, log):
    lazy = open_transitions(folder, lazy=True)
    row = 0
    for info in lazy.shards:
        alone = open_transitions(info.name)
        assert_same_rows(alone, log.select(np.arange(row, row + info.rows)))
        assert alone.action_space == log.action_space
        assert alone.metadata.gamma == 0.9
        row += info.rows
    assert row == len(log)


def test_without_lazy_the_folder_is_read_into_memory(folder, log):
    found = open_transitions(folder)
    assert_same_rows(found, log)
    assert found.metadata.extra == log.metadata.extra
    assert found.metadata.notes == log.metadata.notes
    assert found.metadata.sha256 == log.sha256
    assert found.metadata.source == str(folder)
    assert len(open_raw(folder).columns["rewards"]) == len(log)


def test_what_a_lazy_log_says_of_itself(folder, log):
    lazy = open_transitions(folder, lazy=True)
    assert isinstance(lazy, LazyTransitions)
    assert repr(lazy) == (
        "LazyTransitions(70 rows in 5 shards, 20 episodes, observations (3,) float32, Discrete(3))"
    )
    assert lazy.metadata.gamma == 0.9
    assert (lazy.observation_shape, lazy.observation_dtype) == ((3,), np.float32)
    assert not lazy.has_weights
    assert not lazy.has_log_probabilities
    block = lazy.read_rows(1, 2, 7)
    held = sum(array.nbytes for array in block.arrays().values())
    assert lazy.row_bytes == held / len(block)
    assert lazy.block_rows_for(10 * lazy.row_bytes) == 10
    assert lazy.block_rows_for(0) == 1


def test_it_is_small_and_goes_to_other_processes(folder, log):
    sent = pickle.dumps(open_transitions(folder, lazy=True))
    assert len(sent) < 5000
    assert_same_rows(pickle.loads(sent).load(), log)


def test_what_is_sent_is_found_from_any_folder(folder, log, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lazy = open_transitions("shards", lazy=True)
    assert lazy.shards[0].name == os.path.join("shards", "shard-00000.hdf5")
    sent = pickle.dumps(lazy)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert_same_rows(pickle.loads(sent).load(), log)


@pytest.mark.parametrize("block_rows", [1, 2, 5, 13, None])
def test_steps_and_units_do_not_depend_on_blocks(folder, block_rows):
    lazy = open_transitions(folder, lazy=True)
    for shard, info in enumerate(lazy.shards):
        whole = lazy.read_rows(shard, 0, info.rows)
        np.testing.assert_array_equal(whole.units, np.cumsum(whole.steps == 0) - 1)
        blocks = list(lazy.shard_blocks(shard, block_rows))
        assert [block.start for block in blocks] == np.cumsum([0, *map(len, blocks)])[:-1].tolist()
        for name in whole.arrays():
            found = np.concatenate([getattr(block, name) for block in blocks])
            np.testing.assert_array_equal(found, getattr(whole, name))


def test_whole_episodes_are_pieces_between_episodes(folder, log):
    lazy = open_transitions(folder, lazy=True)
    for block_rows in (1, 3, 8, 100):
        blocks = (lazy.shard_blocks(shard, block_rows) for shard in range(len(lazy.shards)))
        pieces = [piece for of_shard in blocks for piece in in_whole_units(of_shard)]
        assert all(piece.steps[0] == 0 for piece in pieces)
        found = np.concatenate([piece.rewards for piece in pieces])
        np.testing.assert_array_equal(found, log.rewards)
        assert max(len(piece) for piece in pieces) <= block_rows + 2 * 4


def test_rows_without_episodes_are_units(tmp_path, log):
    lone = log.replace(episode_ids=None, steps=None)
    lazy = open_transitions(write_shards(tmp_path / "lone", lone), lazy=True)
    assert [shard.rows for shard in lazy.shards] == [15, 15, 15, 15, 10]
    block = lazy.read_rows(2, 4, 9)
    assert block.steps is None
    np.testing.assert_array_equal(block.units, np.arange(4, 9))


def test_actions_can_be_declared_anew(tmp_path, folder):
    lazy = open_transitions(folder, Discrete(5), lazy=True)
    assert lazy.action_space == Discrete(5)
    assert lazy.metadata.notes[-1] == "action space Discrete(5) as asked, the log declares Discrete(3)"
    box = write_shards(tmp_path / "box", roll_out(discrete=False).transitions())
    assert open_transitions(box, Bounds(-2, 2), lazy=True).action_space == Continuous(2, -2, 2)
    narrow = open_transitions(box, Bounds(-0.1, 0.1), lazy=True)
    with pytest.raises(DataError, match=r"shard-00000.hdf5: action .* in row \d+, dimension \d, is outside"):
        narrow.load()


def spoil(name, row, value):
    def change(path):
        with h5py.File(path, "r+") as file:
            file[name][row] = value

    return change


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def flip(path):
    """One bit in the middle of the rewards."""
    with h5py.File(path) as file:
        place = file["rewards"].id.get_chunk_info(0).byte_offset
    content = bytearray(path.read_bytes())
    content[place + 4] ^= 1
    path.write_bytes(content)


def drop_column(path):
    with h5py.File(path, "r+") as file:
        del file["rewards"]


def longer(path):
    with h5py.File(path, "r+") as file:
        for name in ("rewards", "actions", "observations"):
            file[name].resize(len(file[name]) + 1, axis=0)


def link_away(path):
    with h5py.File(path, "r+") as file:
        del file["rewards"]
        file["rewards"] = h5py.ExternalLink("/etc/passwd", "rewards")


DAMAGES = {
    "NaN": (spoil("rewards", 9, np.nan), "rewards holds nan in row 9; drop or mend that row"),
    "infinity": (spoil("observations", (8, 1), np.inf), r"observations holds inf in row 8 at \[1\]"),
    "action": (spoil("actions", 10, 7), r"action 7 in row 10 is outside 0 … 2"),
    "flag inside": (spoil("terminals", 8, True), "row 8 is terminated but its episode goes on in row 9"),
    "flag at a border": (spoil("timeouts", 1, True), "row 1 is truncated but its episode goes on in row 2"),
    "step": (spoil("steps", 9, 7), "row 9 has step 7 after step 1"),
    "step at a border": (spoil("steps", 2, 0), "row 2 has step 0 after step 1|row 3 has step 3 after step 0"),
    "episode": (spoil("episode_ids", slice(7, None), 9), "row 7 has step 0 after step 2"),
    "first row": (spoil("steps", 0, 1), "row 0 is no first step|row 1 has step"),
    "truncated": (truncate, "truncated or corrupt"),
    "flipped": (flip, "truncated or corrupt data file"),
    "no column": (drop_column, "rewards is missing; copy or write the file again"),
    "longer": (longer, "expected"),
    "elsewhere": (link_away, "link to another file"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("block_rows", [2, None])
def test_a_damaged_shard_is_named(folder, damage, block_rows):
    change, message = DAMAGES[damage]
    change(folder / "shard-00002.hdf5")
    lazy = open_transitions(folder, lazy=True)
    for shard in (0, 1, 3, 4):
        assert list(lazy.shard_blocks(shard, block_rows))
    with pytest.raises(DataError, match=message) as caught:
        list(lazy.blocks(block_rows))
    assert str(caught.value).startswith(f"{folder / 'shard-00002.hdf5'}")
    assert "\n" not in str(caught.value)


def test_a_missing_shard_is_named(folder):
    (folder / "shard-00001.hdf5").unlink()
    with pytest.raises(DataError, match=r"shard-00001.hdf5"):
        open_transitions(folder, lazy=True).load()


def test_episodes_that_were_promised_are_counted(folder):
    change_manifest(folder, lambda m: m["shards"][1].update(episodes=2))
    with pytest.raises(DataError, match=r"shard-00001.hdf5: there are 4 episodes, 2 were promised"):
        open_transitions(folder, lazy=True).load()


def change_manifest(folder, change):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


LIES = {
    "above": (lambda m: m["shards"][0].update(file="../shard.hdf5"), "is no file of its folder"),
    "absolute": (lambda m: m["shards"][0].update(file="/etc/passwd"), "is no file of its folder"),
    "hidden": (lambda m: m["shards"][0].update(file=".."), "is no file of its folder"),
    "newer": (lambda m: m.update(version=2), "has version 2, known is 1; update koffline"),
    "no shards": (lambda m: m.update(shards=[]), "lists no shards"),
    "shards": (lambda m: m.update(shards=3), "is damaged"),
    "rows": (lambda m: m["shards"][0].update(rows=-1), "is damaged"),
    "huge": (
        lambda m: (m["shards"][0].update(rows=2**60), m.update(rows=2**60 + 56)),
        "takes more than 1000 PB",
    ),
    "other rows": (
        lambda m: m.update(rows=71),
        "json promises 71 rows, its shards have 70; write the folder",
    ),
    "no rows": (lambda m: m.pop("rows"), "is damaged"),
    "twice": (
        lambda m: (m["shards"].append(m["shards"][0]), m.update(rows=84)),
        r"json lists \S+shard-00000.hdf5 more than once",
    ),
    "much": (
        lambda m: m.update(extra={"x": "x" * 2**24}),
        r"json is larger than 16\.8 MB, the most that a manifest",
    ),
    "wide": (
        lambda m: m["columns"]["observations"].update(shape=[2**40, 2**40]),
        "more than 1000 PB|expected",
    ),
    "space": (lambda m: m.update(action_space={"type": "box"}), "action space"),
    "column": (lambda m: m["columns"].pop("rewards"), "lacks columns rewards"),
    "dtype": (lambda m: m["columns"]["rewards"].update(dtype="object"), "is damaged"),
    "shape": (lambda m: m["columns"]["observations"].update(shape=[4]), "expected"),
    "gamma": (lambda m: m.update(gamma="x"), "is damaged"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies_is_refused(folder, lie):
    change, message = LIES[lie]
    change_manifest(folder, change)
    with pytest.raises(DataError, match=message) as caught:
        open_transitions(folder, lazy=True).load()
    assert "\n" not in str(caught.value)


DEEP = '{"format": "koffline-shards", "shards": ' + "[" * 100_000


@pytest.mark.parametrize(
    "text", ["", "[1]", '{"format": "koffline-shards"', '{"format": "koffline-shards"}', DEEP]
)
def test_a_broken_manifest_is_one_line(folder, text):
    (folder / "manifest.json").write_text(text)
    with pytest.raises(DataError) as caught:
        open_transitions(folder, lazy=True)
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["", "file://"])
@pytest.mark.parametrize("place", ["../secret.hdf5", "shard-00001.hdf5", "/dev/zero"])
def test_a_shard_that_is_a_link_is_not_followed(folder, tmp_path, log, place, scheme):
    write_transitions(log, tmp_path / "secret.hdf5")
    shard = folder / "shard-00000.hdf5"
    shard.unlink()
    shard.symlink_to(place)
    with pytest.raises(DataError, match=r"'shard-00000.hdf5', which is no file of its folder"):
        open_transitions(f"{scheme}{folder}", lazy=True)


@pytest.mark.parametrize("lazy", [False, True])
def test_a_manifest_that_is_a_link_is_not_followed(folder, tmp_path, lazy):
    (folder / "manifest.json").rename(tmp_path / "manifest.json")
    (folder / "manifest.json").symlink_to("../manifest.json")
    with pytest.raises(DataError, match=r"manifest.json is a link, which is not followed; copy the folder"):
        open_transitions(folder, lazy=lazy)


def test_a_folder_has_no_more_shards_than_its_manifest_can_list(tmp_path, log, monkeypatch):
    monkeypatch.setattr(shard_writer, "MOST_SHARDS", 4)
    with pytest.raises(DataError, match="s would have more than 4 shards; put more rows into each"):
        write_shards(tmp_path / "s", log)
    assert list(tmp_path.iterdir()) == []
    entry = json.dumps([{"file": "shard-00000.hdf5", "rows": 10**9, "episodes": 10**9, "bytes": 10**12,
                         "sha256": "0" * 64}], indent=1)  # fmt: skip
    assert MOST_SHARDS * (len(entry) + 10) < TEXT_BYTES


def write_and_fail(writer, *logs):
    with writer:
        for log in logs:
            writer.append(log)
        raise RuntimeError("elsewhere")


class TestWriting:
    def test_nothing_stays_where_the_block_fails(self, tmp_path, log):
        with pytest.raises(RuntimeError, match="elsewhere"):
            write_and_fail(ShardWriter(tmp_path / "s", 10), log)
        assert list(tmp_path.iterdir()) == []

    def test_a_full_disk_is_one_line_and_leaves_nothing(self, tmp_path, log, monkeypatch):
        written = []

        def fill_up(self, columns):
            written.append(len(columns["rewards"]))
            if len(written) == 3:
                raise RuntimeError("Can't write data (no space left on device)")
            append(self, columns)

        append = shard_writer._OpenFile.append
        monkeypatch.setattr(shard_writer._OpenFile, "append", fill_up)
        with pytest.raises(DataError, match=r"s cannot be written \(HDF5: .*no space left"):
            write_shards(tmp_path / "s", log)
        assert list(tmp_path.iterdir()) == []

    def test_an_older_folder_stays_until_the_new_one_is_whole(self, folder, log, tmp_path):
        with pytest.raises(DataError, match="exists already"):
            write_shards(folder, log)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(RuntimeError, match="elsewhere"):
            write_and_fail(ShardWriter(folder, 7, force=True), log)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        with ShardWriter(folder, 70, force=True) as writer:
            writer.append(log)
        assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "shard-00000.hdf5"]
        assert list(tmp_path.iterdir()) == [folder]

    def test_only_shards_are_replaced(self, tmp_path, log):
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "thesis.tex").write_text("x")
        with pytest.raises(DataError, match="holds something else"), ShardWriter(tmp_path / "mine", 9, True):
            pass
        assert (tmp_path / "mine" / "thesis.tex").exists()

    def test_the_same_rows_are_the_same_bytes(self, tmp_path, log):
        first, second = write_shards(tmp_path / "a", log), write_shards(tmp_path / "b", log)
        for path in first.iterdir():
            assert path.read_bytes() == (second / path.name).read_bytes()

    def test_rows_of_another_kind_are_refused(self, tmp_path, log):
        others = {
            r"action space Discrete\(4\), the first one Discrete\(3\)": log.replace(action_space=Discrete(4)),
            r"observations float64 \(3,\), the first one float32": log.replace(
                observations=log.observations.astype(float),
                next_observations=log.next_observations.astype(float),
            ),
            "weights float64 .*, the first one none": log.replace(weights=np.ones(len(log))),
            "episode_ids none": log.replace(episode_ids=None, steps=None),
        }
        for message, other in others.items():
            with pytest.raises(DataError, match=message):
                write_and_fail(ShardWriter(tmp_path / "s", 10), log, other)
        assert list(tmp_path.iterdir()) == []

    def test_bad_requests_are_one_line(self, tmp_path):
        with pytest.raises(DataError, match="shard_rows is 0"):
            ShardWriter(tmp_path / "s", 0)
        with pytest.raises(DataError, match="no rows were given"), ShardWriter(tmp_path / "s", 5):
            pass
        with pytest.raises(DataError, match="does not exist; create it"), ShardWriter(tmp_path / "a/b", 5):
            pass
        assert list(tmp_path.iterdir()) == []

    def test_metadata_may_be_set_late(self, tmp_path, log):
        with ShardWriter(tmp_path / "s", 20) as writer:
            writer.append(log)
            assert writer.rows == len(log)
            writer.metadata = Metadata(gamma=0.5)
        assert open_transitions(tmp_path / "s", lazy=True).metadata.gamma == 0.5


class TestConverting:
    def test_from_shards_to_shards_and_files(self, folder, tmp_path, log):
        lazy = convert_to_shards(folder, tmp_path / "finer", 8)
        assert_same_rows(lazy.load(), log)
        assert len(lazy.shards) == 10
        assert lazy.metadata.extra == {"task": "walk"}
        write_transitions(open_transitions(folder), tmp_path / "one.npz")
        assert_same_rows(open_transitions(tmp_path / "one.npz"), log)

    @pytest.mark.parametrize("format_", ["hdf5", "npz", "d3rlpy", "minari"])
    def test_from_any_file(self, tmp_path, log, format_):
        write_transitions(log, tmp_path / "log", format_)
        lazy = convert_to_shards(tmp_path / "log", tmp_path / "shards", 30)
        assert_same_rows(lazy.load(), open_transitions(tmp_path / "log"))

    def test_rows_without_any_weight_in_a_block(self, tmp_path, log):
        weights = np.where(np.arange(len(log)) < 50, 0.0, 1.0)
        write_transitions(log.replace(weights=weights), tmp_path / "log.hdf5")
        lazy = convert_to_shards(tmp_path / "log.hdf5", tmp_path / "shards", 40)
        np.testing.assert_array_equal(lazy.load().weights, weights)
        np.testing.assert_array_equal(lazy.read_rows(0, 0, 5).weights, 0.0)

    def test_bad_sources_keep_their_own_words(self, tmp_path):
        with pytest.raises(DataError, match="does not exist"):
            convert_to_shards(tmp_path / "none.hdf5", tmp_path / "s", 5)
        assert list(tmp_path.iterdir()) == []

    def test_memory_is_that_of_a_block(self, tmp_path, monkeypatch):
        log = roll_out(["truncated"] * 20, [20] * 20, shape=(2000,)).transitions()
        write_transitions(log, tmp_path / "log.hdf5")
        size = sum(array.nbytes for array in (log.observations, log.next_observations))
        del log
        monkeypatch.setattr("koffline.data.disk.files.BLOCK_BYTES", size // 20)
        monkeypatch.setattr("koffline.data.disk.log.BLOCK_BYTES", size // 20)
        convert_to_shards(tmp_path / "log.hdf5", tmp_path / "first", 200)  # imports are not counted
        tracemalloc.start()
        convert_to_shards(tmp_path / "log.hdf5", tmp_path / "shards", 200)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        # A block, the same joined with what was kept of the one before, and a few temporaries of its checks.
        assert peak < size / 2
