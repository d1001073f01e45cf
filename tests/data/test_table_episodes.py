"""Which rows form an episode, in tables without ids: what flags and next observations
show.
"""

from typing import ClassVar

import numpy as np
import polars as pl
import pytest

from koffline.data.sources import open_transitions
from koffline.data.table.reading import TableStream
from koffline.errors import DataError
from tests.data.logs import d4rl_arrays, roll_out
from tests.data.table_rows import (
    assert_same,
    assert_same_in_pieces,
    read,
    refusal,
    walk,
)
from tests.refusals import one_line

ROLES = {
    "observations": "observations",
    "next_observations": "next_observations",
    "action": "actions",
    "reward": "rewards",
    "terminal": "terminals",
}


def recorded(**changes):
    """Five episodes, three of them cut, without marks of the cuts, as columns of
    numbers.
    """
    arrays = d4rl_arrays(roll_out(), timeouts=None, **changes)
    for name in ("observations", "next_observations"):
        arrays[name] = arrays[name].reshape(15, -1)
    return arrays


def shuffled_rows():
    order = np.random.default_rng(0).permutation(100)
    arrays = d4rl_arrays(roll_out(("terminated",) * 20, (5,) * 20), timeouts=None)
    return {key: array[order] for key, array in arrays.items()}


@pytest.mark.parametrize(
    ("arrays", "note"),
    [
        (
            recorded(),
            (
                "2 rows were marked as truncated: no timeouts are given, and the row"
                " below begins"
            ),
        ),
        (
            recorded() | {"timeouts": np.arange(15) == 6},
            "have a next observation other than the observation",
        ),
        (recorded() | {"timeouts": np.zeros(15)}, "2 rows were marked as truncated"),
        (
            shuffled_rows(),
            (
                "rows stand alone: next observations are not the observations of the"
                " rows below"
            ),
        ),
    ],
)
def test_next_observations_show_the_episodes_that_the_flat_reader_finds(
    tmp_path, arrays, note
):
    """The same arrays, by their keys and as a table; in memory, in pieces, in lists and
    in columns.
    """
    np.savez(tmp_path / "log.npz", **arrays)
    flat = open_transitions(tmp_path / "log.npz")
    roles = ROLES | ({"truncated": "timeouts"} if "timeouts" in arrays else {})
    pl.DataFrame(arrays).write_parquet(tmp_path / "lists.parquet")
    columns = {name: array for name, array in arrays.items() if array.ndim == 1}
    for name in ("observations", "next_observations"):
        columns |= {f"{name}_{i}": column for i, column in enumerate(arrays[name].T)}
    pl.DataFrame(columns).write_parquet(tmp_path / "columns.parquet")
    wide = {
        "observations": "observations_*",
        "next_observations": "next_observations_*",
    }
    for name, mapping in (
        ("log.npz", roles),
        ("lists.parquet", roles),
        ("columns.parquet", roles | wide),
    ):
        log = open_transitions(tmp_path / name, mapping=mapping)
        for key in ("observations", "next_observations", "rewards", "terminated"):
            np.testing.assert_array_equal(getattr(log, key), getattr(flat, key))
        assert any(note in sentence for sentence in log.metadata.notes)
        assert any(note in sentence for sentence in flat.metadata.notes)
        assert log.has_episodes == flat.has_episodes
        if flat.has_episodes:
            np.testing.assert_array_equal(log.episode_ids, flat.episode_ids)
            # in a table the last row of all is known to be cut, too
            np.testing.assert_array_equal(log.truncated[:-1], flat.truncated[:-1])
        if len(log) == 15:
            assert_same_in_pieces(tmp_path / name, mapping, log)


def test_a_cut_row_without_its_next_observation_is_left_out_and_a_time_orders_rows(
    tmp_path,
):
    arrays = recorded()
    following = [
        [None] * len(row) if i in (6, 11) else list(row)
        for i, row in enumerate(arrays["next_observations"])
    ]
    columns = {name: array for name, array in arrays.items() if array.ndim == 1}
    columns |= {f"s_{i}": column for i, column in enumerate(arrays["observations"].T)}
    columns |= {
        f"n_{i}": list(column) for i, column in enumerate(zip(*following, strict=True))
    }
    mapping = ROLES | {"observations": "s_*", "next_observations": "n_*"}
    pl.DataFrame(columns).write_parquet(tmp_path / "log.parquet")
    log = open_transitions(tmp_path / "log.parquet", mapping=mapping)
    np.testing.assert_array_equal(log.rewards, np.delete(arrays["rewards"], [6, 11]))
    np.testing.assert_array_equal(np.unique(log.episode_ids), range(5))
    order = np.random.default_rng(1).permutation(15)
    timed = pl.DataFrame(columns | {"when": np.arange(15)})
    timed[order.tolist()].write_parquet(tmp_path / "mixed.parquet")
    assert_same(
        open_transitions(
            tmp_path / "mixed.parquet", mapping=mapping | {"time": "when"}
        ),
        log,
    )


def test_linked_rows_without_any_flag_are_one_episode(tmp_path):
    states = np.arange(40.0)
    frame = pl.DataFrame(
        {"s": states, "n": states + 1, "a": np.arange(40) % 2, "r": states}
    )
    frame.write_parquet(tmp_path / "log.parquet")
    mapping = {
        "observations": "s",
        "next_observations": "n",
        "action": "a",
        "reward": "r",
    }
    log = open_transitions(tmp_path / "log.parquet", mapping=mapping)
    assert (log.n_episodes, int(log.truncated.sum())) == (1, 1)
    with one_line(DataError, match="no column says which rows belong together"):
        open_transitions(
            tmp_path / "log.parquet", mapping={**mapping, "next_observations": None}
        )


def marked(seed=0, n=30, **columns):
    """Rows of episodes of several lengths, in order, with a flag in the first row of
    each.
    """
    lengths = np.random.default_rng(seed).integers(1, 6, n)
    first = np.zeros(lengths.sum(), dtype=int)
    first[np.cumsum(lengths)[:-1]] = 1
    first[0] = 1
    return lengths, {
        **walk(lengths, [True] * n, id=None, t=None, done=None, first=first.tolist()),
        **columns,
    }


class TestStarts:
    """A flag in the first row of every episode tells episodes apart."""

    MAPPING: ClassVar = {
        "episode": None,
        "time": None,
        "terminal": None,
        "starts": "first",
    }

    @pytest.mark.parametrize("name", ["log.parquet", "log.csv"])
    @pytest.mark.parametrize("last_row", ["terminal", "cut"])
    def test_the_rows_are_those_of_ids(self, tmp_path, name, last_row):
        lengths, table = marked()
        log = read(table, tmp_path, name, **self.MAPPING, last_row=last_row)
        ids = np.repeat(np.arange(len(lengths)), lengths).tolist()
        changes = {"time": None, "terminal": None, "last_row": last_row}
        assert_same(log, read(table | {"id": ids}, tmp_path, name, **changes))
        kept = lengths if last_row == "terminal" else lengths[lengths > 1] - 1
        np.testing.assert_array_equal(log.episode_lengths, kept)

    def test_ends_and_a_formula(self, tmp_path):
        lengths, table = marked()
        done = np.zeros(lengths.sum(), dtype=bool)
        done[np.cumsum(lengths)[::2] - 1] = True
        table |= {"done": done.tolist(), "first": [2 * flag for flag in table["first"]]}
        mapping = self.MAPPING | {"starts": "first == 2", "terminal": "done"}
        log = read(table, tmp_path, **mapping)
        assert log.terminated.sum() == np.ceil(len(lengths) / 2)
        np.testing.assert_array_equal(
            log.observations[log.terminated, 0], 0.5 * np.flatnonzero(done)
        )

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            (
                {"episode": "id"},
                "names starts and episode, which both tell episodes apart",
            ),
            ({"time": "t"}, "so it cannot have a time column; leave time out"),
            ({"one_step": True}, "beside starts"),
            ({"starts": "a"}, "neither yes nor no"),
            ({"last_row": None}, "nothing says how episodes end"),
        ],
    )
    def test_refusals(self, tmp_path, changes, words):
        _, table = marked()
        n = len(table["r"])
        table |= {"id": list(range(n)), "t": list(range(n))}
        assert words in refusal(
            table, tmp_path, **{**self.MAPPING, "last_row": "cut", **changes}
        )


class TestIdsInSeveralFiles:
    @staticmethod
    def files(folder, ids, per_file, **columns):
        """Rows with these ids in files of so many rows each."""
        frame = pl.DataFrame(
            {
                "id": ids,
                "x": np.arange(len(ids)) / 7,
                "a": np.arange(len(ids)) % 2,
                **columns,
            }
        )
        frame = frame.with_columns(r=pl.col("x"))
        folder.mkdir()
        for i, begin in enumerate(range(0, len(ids), per_file)):
            frame[begin : begin + per_file].write_parquet(folder / f"part-{i}.parquet")
        return folder

    MAPPING: ClassVar = {
        "observations": "x",
        "action": "a",
        "reward": "r",
        "episode": "id",
        "last_row": "terminal",
    }

    @pytest.mark.parametrize(
        "flag", [{}, {"done": [row % 5 == 4 for row in range(60)]}]
    )
    def test_ids_that_begin_anew_are_refused(self, tmp_path, flag):
        folder = self.files(
            tmp_path / "log", np.tile(np.repeat([0, 1, 2, 3], 5), 3), 20, **flag
        )
        mapping = self.MAPPING | (
            {"terminal": "done", "last_row": None} if flag else {}
        )
        message = (
            r"4 episodes \(id 0, for example\) have rows in several files, with other"
            r" episodes between them; "
        )
        for read_it in (
            open_transitions,
            lambda *args, **kwargs: TableStream(*args, **kwargs),
        ):
            with one_line(
                DataError,
                match=message
                + "where ids begin anew in every file, make them different",
            ):
                read_it(folder, mapping=mapping)

    @pytest.mark.parametrize(
        ("ids", "columns", "time"),
        [
            # an episode goes on where the next file begins
            (
                np.repeat(range(12), 5),
                {},
                None,
            ),
            # four at once: the note on order says it
            (
                np.tile(range(4), 15),
                {},
                None,
            ),
            # times say how parts follow
            (
                np.tile(np.repeat([0, 1, 2], 5), 4),
                {"t": range(60)},
                "t",
            ),
        ],
    )
    def test_other_parts_are_read(self, tmp_path, ids, columns, time):
        folder = self.files(tmp_path / "log", ids, 13, **columns)
        log = open_transitions(folder, mapping=self.MAPPING | {"time": time})
        assert (len(log), log.n_episodes) == (60, len(set(ids)))

    def test_the_remedy(self, tmp_path):
        """Ids made different by the number of the file."""
        ids = np.tile(np.repeat([0, 1, 2, 3], 5), 3) + 4 * np.repeat([0, 1, 2], 20)
        folder = self.files(tmp_path / "log", ids, 20)
        assert open_transitions(folder, mapping=self.MAPPING).n_episodes == 12
