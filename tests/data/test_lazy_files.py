"""Lazy reading of flat files: the same log as in memory, whatever the file leaves to its reader."""

import h5py
import numpy as np
import pytest

from koffline.data.disk.files import OpenShard
from koffline.data.sources import open_transitions, write_transitions
from koffline.data.spaces import Bounds
from koffline.data.transitions import Continuous, Discrete
from koffline.errors import DataError
from tests.data.logs import assert_same_rows, d4rl_arrays, roll_out, write_arrays


def d4rl(**changes):
    """Arrays of a D4RL file, some changed; None takes one out."""
    arrays = d4rl_arrays(roll_out()) | changes
    return {key: array for key, array in arrays.items() if array is not None}


def many_ends(**more):
    rollout = roll_out(["terminated", "truncated", "truncated"] * 7, [3, 1, 4] * 7)
    return d4rl_arrays(rollout, **more)


def by_ids(steps=False):
    log = roll_out().transitions()
    kept = {"episode_ids": log.episode_ids + 7} | ({"steps": log.steps} if steps else {})
    return d4rl(timeouts=log.truncated) | kept


ROWS = 15
VARIANTS = {
    "flags": lambda: d4rl(),
    "no timeouts": lambda: d4rl_arrays(roll_out(), timeouts=False),
    "no timeouts, many": lambda: many_ends(timeouts=False),
    "flags, many": many_ends,
    "flags of another name": lambda: {
        {"terminals": "terminated", "timeouts": "truncations"}.get(key, key): array
        for key, array in d4rl().items()
    },
    "independent rows": lambda: d4rl(
        timeouts=None, next_observations=np.random.default_rng(0).standard_normal((ROWS, 3))
    ),
    "broken links": lambda: d4rl(next_observations=d4rl()["next_observations"] + 1),
    "all terminal": lambda: d4rl(terminals=np.ones(ROWS, dtype=bool), timeouts=None),
    "ids": by_ids,
    "ids and steps": lambda: by_ids(steps=True),
    "steps": lambda: d4rl(steps=roll_out().transitions().steps),
    "float flags": lambda: d4rl(terminals=d4rl()["terminals"].astype(np.float32)),
    "columns of vectors": lambda: d4rl(rewards=d4rl()["rewards"].reshape(-1, 1)),
    "actions of one number": lambda: d4rl(actions=d4rl()["actions"].reshape(-1, 1)),
    "small whole numbers": lambda: d4rl(
        observations=np.arange(3 * ROWS).reshape(ROWS, 3),
        next_observations=np.arange(3 * ROWS).reshape(ROWS, 3) + 3,
    ),
    "large whole numbers": lambda: d4rl(rewards=np.arange(ROWS) + 2**40),
    "half precision": lambda: d4rl(rewards=d4rl()["rewards"].astype(np.float16)),
    "big endian": lambda: d4rl(rewards=d4rl()["rewards"].astype(">f8")),
    "flat observations": lambda: d4rl(observations=np.arange(15.0), next_observations=np.arange(1.0, 16.0)),
    "extra log-probabilities": lambda: d4rl(**{"infos/action_log_probs": -np.ones(ROWS)}),
    "unusable log-probabilities": lambda: d4rl(**{"infos/action_log_probs": np.full(ROWS, np.nan)}),
    "own log-probabilities": lambda: d4rl(behavior_log_probabilities=-np.ones(ROWS)),
    "weights": lambda: d4rl(weights=np.arange(ROWS)),
    "continuous": lambda: d4rl_arrays(roll_out(discrete=False)),
    "pictures": lambda: d4rl_arrays(roll_out(shape=(2, 2), dtype=np.uint8)),
}


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_flat_file_is_the_same_log(tmp_path, variant, chunked):
    path = tmp_path / "log.hdf5"
    if chunked:
        with h5py.File(path, "w") as file:
            for key, array in VARIANTS[variant]().items():
                file.create_dataset(key, data=array, chunks=(4, *array.shape[1:]), compression="gzip")
    else:
        write_arrays(path, VARIANTS[variant]())
    expected, lazy = open_transitions(path), open_transitions(path, lazy=True)
    assert_same_log(lazy, expected)
    assert lazy.metadata.notes == expected.metadata.notes


def assert_same_log(lazy, expected):
    loaded = lazy.load()
    assert_same_rows(loaded, expected)
    for name in ("observations", "actions", "rewards", "next_observations"):
        assert getattr(loaded, name).dtype == getattr(expected, name).dtype
    assert lazy.action_space == expected.action_space
    assert lazy.sha256 == expected.sha256
    assert lazy.n_episodes == expected.n_episodes
    for block_rows in (1, 4):
        blocks = list(lazy.blocks(block_rows))
        np.testing.assert_array_equal(np.concatenate([b.truncated for b in blocks]), expected.truncated)
        if lazy.has_episodes:
            np.testing.assert_array_equal(np.concatenate([b.steps for b in blocks]), expected.steps)
    for start, stop in [(0, 1), (3, 6), (len(expected) - 1, len(expected))]:
        block = lazy.read_rows(0, start, stop)
        np.testing.assert_array_equal(block.rewards, expected.rewards[start:stop])
        if lazy.has_episodes:
            np.testing.assert_array_equal(block.steps, expected.steps[start:stop])
            np.testing.assert_array_equal(
                block.units, np.searchsorted(expected.episode_starts, np.arange(start, stop), "right") - 1
            )


@pytest.mark.parametrize("timeouts", [False, True])
def test_episodes_are_counted_from_any_row(tmp_path, monkeypatch, timeouts):
    monkeypatch.setattr("koffline.data.disk.files.BLOCK_BYTES", 40)
    path = write_arrays(tmp_path / "log.hdf5", many_ends(timeouts=timeouts))
    expected, lazy = open_transitions(path), open_transitions(path, lazy=True)
    assert lazy.n_episodes == expected.n_episodes == 21
    for start in range(len(expected)):
        block = lazy.read_rows(0, start, min(start + 3, len(expected)))
        np.testing.assert_array_equal(block.steps, expected.steps[start : start + 3])
        np.testing.assert_array_equal(block.truncated, expected.truncated[start : start + 3])


@pytest.mark.parametrize("ends", ["terminated", "truncated"])
@pytest.mark.parametrize("suffix", ["hdf5", "npz"])
def test_own_files_keep_what_they_say(tmp_path, ends, suffix):
    log = roll_out([ends, "neither"], [3, 4]).transitions()
    if suffix == "npz":
        write_transitions(log, tmp_path / "packed.npz")
        with np.load(tmp_path / "packed.npz") as archive:
            np.savez(tmp_path / "log.npz", **archive)
    else:
        write_transitions(log, tmp_path / "log.hdf5")
    lazy = open_transitions(tmp_path / f"log.{suffix}", lazy=True)
    assert_same_log(lazy, log)
    assert lazy.metadata.notes == ()
    assert lazy.shards[0].bytes == (tmp_path / f"log.{suffix}").stat().st_size


def test_rows_of_an_npz_stay_on_disk(tmp_path, monkeypatch):
    np.savez(tmp_path / "log.npz", **d4rl())
    lazy = open_transitions(tmp_path / "log.npz", lazy=True)
    opened = []
    column = OpenShard.column
    monkeypatch.setattr(
        OpenShard, "column", lambda self, *given: opened.append(self._file.arrays) or column(self, *given)
    )
    lazy.read_rows(0, 2, 4)
    assert all(isinstance(array, np.memmap) for array in opened[0].values())


class TestManyFiles:
    @pytest.fixture
    def files(self, tmp_path):
        for i, lengths in enumerate([(2, 3), (4, 1), (5, 2)]):
            log = roll_out(["terminated", "truncated"], lengths, seed=i).transitions()
            write_transitions(log, tmp_path / f"part{i}.hdf5")
        return tmp_path

    def test_a_folder_a_pattern_and_a_list_are_one_log(self, files):
        for source in (files, files / "part*.hdf5", [files / f"part{i}.hdf5" for i in range(3)]):
            lazy = open_transitions(source, lazy=True)
            assert [shard.rows for shard in lazy.shards] == [5, 5, 7]
            assert [shard.episodes for shard in lazy.shards] == [2, 2, 2]
            loaded = lazy.load()
            row = 0
            for i in range(3):
                part = open_transitions(files / f"part{i}.hdf5")
                assert_same_rows(loaded.select(np.arange(row, row + len(part))), part)
                row += len(part)
            assert lazy.metadata.sha256 is None
            assert lazy.sha256 == loaded.sha256
        assert_same_rows(open_transitions([files / "part0.hdf5"]), open_transitions(files / "part0.hdf5"))
        assert_same_rows(open_transitions(lazy), loaded)
        assert open_transitions(lazy, Discrete(9), lazy=True).action_space == Discrete(9)

    @pytest.mark.parametrize(
        ("other", "message"),
        [
            (
                roll_out(discrete=False).transitions(),
                r"b.hdf5 has action space Continuous.* declare one space",
            ),
            (roll_out(shape=(4,)).transitions(), r"b.hdf5 has observations float32 \(4,\), .*\(3,\)"),
            (roll_out(dtype=np.float64).transitions(), r"b.hdf5 has observations float64"),
            (roll_out().transitions(weights=np.ones(15)), r"b.hdf5 has weights float64 \(\), .*a.hdf5 none"),
            (roll_out().transitions(episode_ids=None, steps=None), "has episodes none, .* some"),
        ],
    )
    def test_the_file_that_differs_is_named(self, tmp_path, other, message):
        write_transitions(roll_out().transitions(), tmp_path / "a.hdf5")
        write_transitions(other, tmp_path / "b.hdf5")
        with pytest.raises(DataError, match=message):
            open_transitions(tmp_path, lazy=True)

    def test_a_declared_space_is_that_of_all(self, tmp_path):
        for name, top in (("a", 2), ("b", 4)):
            actions = np.arange(ROWS) % (top + 1)
            write_arrays(tmp_path / f"{name}.hdf5", d4rl(actions=actions))
        with pytest.raises(DataError, match=r"b.hdf5 has action space Discrete\(5\)"):
            open_transitions(tmp_path, lazy=True)
        assert open_transitions(tmp_path, Discrete(6), lazy=True).action_space == Discrete(6)

    def test_nothing_there_is_one_line(self, tmp_path):
        (tmp_path / "readme.txt").write_text("x")
        for source, message in [
            (tmp_path, r"holds no .hdf5, .h5 or .npz files"),
            (tmp_path / "none.hdf5", "does not exist"),
            (tmp_path / "*.npz", "does not exist"),
            ([], "no files are given"),
        ]:
            with pytest.raises(DataError, match=message):
                open_transitions(source, lazy=True)


def interleaved(path, log):
    write_arrays(path, d4rl(episode_ids=np.arange(ROWS) % 2))


def not_counted(path, log):
    write_arrays(path, d4rl(episode_ids=log.episode_ids, steps=log.steps + 1))


def text(path, log):
    path.write_text("episode,reward\n0,1.0\n")


def empty(path, log):
    path.touch()


def cut_short(path, log):
    write_arrays(path, d4rl())
    path.write_bytes(path.read_bytes()[:-300])


def header(path, log):
    path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))


def words(path, log):
    with h5py.File(path, "w") as file:
        for key, array in d4rl().items():
            file[key] = array if key != "rewards" else np.array([b"x"] * ROWS)


def huge(path, log):
    with h5py.File(path, "w") as file:
        for key, array in d4rl().items():
            shape = (2**50, *array.shape[1:])
            file.create_dataset(key, shape, array.dtype, chunks=(4, *array.shape[1:]))


REFUSED = {
    "d3rlpy dump": (lambda p, log: write_transitions(log, p, "d3rlpy"), "episode by episode.*--shard-rows N"),
    "minari": (lambda p, log: write_transitions(log, p, "minari"), "holds no .hdf5"),
    "packed NPZ": (
        lambda p, log: write_transitions(log, p, "npz"),
        "is compressed and can only be read whole",
    ),
    "no next": (
        lambda p, log: write_arrays(p, d4rl(next_observations=None)),
        "no next_observations.*--shard",
    ),
    "interleaved": (interleaved, "interleaved; write shards with"),
    "not counted": (not_counted, "row 0 has step 1, expected 0"),
    "missing": (lambda p, log: write_arrays(p, d4rl(rewards=None)), "lacks rewards: found keys"),
    "uneven": (
        lambda p, log: write_arrays(p, d4rl(rewards=np.ones(3))),
        "rewards has 3 rows, observations 15",
    ),
    "no rows": (lambda p, log: write_arrays(p, {k: a[:0] for k, a in d4rl().items()}), "has no rows"),
    "shape": (lambda p, log: write_arrays(p, d4rl(rewards=np.ones((15, 2)))), r"rewards has shape \(15, 2\)"),
    "words": (words, "rewards holds texts"),
    "text": (text, "is no HDF5 file and no NPZ archive"),
    "empty": (empty, r"is empty \(0 bytes\)"),
    "cut": (cut_short, "truncated or corrupt HDF5"),
    "header": (header, "truncated or corrupt HDF5"),
    "huge": (huge, "declares"),
    "bounds": (lambda p, log: write_arrays(p, d4rl(actions=np.ones((15, 2)) - 3)), None),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_by_slices_is_one_line(tmp_path, case):
    path = tmp_path / "log"
    make, message = REFUSED[case]
    make(path, roll_out().transitions())
    if message is None:  # fine without bounds, found out by the first block
        assert len(open_transitions(path, lazy=True)) == ROWS
        lazy = open_transitions(path, Bounds(-1, 1), lazy=True)
        assert lazy.action_space == Continuous(2, -1, 1)
        with pytest.raises(DataError, match="log: action -2 in row 0, dimension 0, is outside -1 … 1"):
            lazy.load()
        return
    with pytest.raises(DataError, match=message) as caught:
        open_transitions(path, lazy=True)
    assert "\n" not in str(caught.value)


def test_bad_requests_are_one_line(tmp_path):
    lazy = open_transitions(write_arrays(tmp_path / "log.hdf5", d4rl()), lazy=True)
    with pytest.raises(DataError, match="block_rows is 0"):
        list(lazy.blocks(0))
    for start, stop in [(3, 3), (-1, 2), (0, 16)]:
        with pytest.raises(DataError, match=r"which has 15"):
            lazy.read_rows(0, start, stop)
    with pytest.raises(DataError, match="in memory already"):
        open_transitions(roll_out().transitions(), lazy=True)
