"""Which rows form an episode, in tables without ids: what flags and next observations show."""

import numpy as np
import polars as pl
import pytest

from koffline.data.sources import open_transitions
from koffline.errors import DataError
from tests.data.logs import d4rl_arrays, roll_out
from tests.data.table_rows import assert_same, assert_same_in_pieces
from tests.refusals import one_line

ROLES = {
    "observations": "observations", "next_observations": "next_observations", "action": "actions",
    "reward": "rewards", "terminal": "terminals",
}  # fmt: skip


def recorded(**changes):
    """Five episodes, three of them cut, without marks of the cuts, as columns of numbers."""
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
        (recorded(), "2 rows were marked as truncated: no timeouts are given, and the row below begins"),
        (recorded() | {"timeouts": np.arange(15) == 6}, "have a next observation other than the observation"),
        (recorded() | {"timeouts": np.zeros(15)}, "2 rows were marked as truncated"),
        (shuffled_rows(), "rows stand alone: next observations are not the observations of the rows below"),
    ],
)
def test_next_observations_show_the_episodes_that_the_flat_reader_finds(tmp_path, arrays, note):
    """The same arrays, by their keys and as a table; in memory, in pieces, in lists and in columns."""
    np.savez(tmp_path / "log.npz", **arrays)
    flat = open_transitions(tmp_path / "log.npz")
    roles = ROLES | ({"truncated": "timeouts"} if "timeouts" in arrays else {})
    pl.DataFrame(arrays).write_parquet(tmp_path / "lists.parquet")
    columns = {name: array for name, array in arrays.items() if array.ndim == 1}
    for name in ("observations", "next_observations"):
        columns |= {f"{name}_{i}": column for i, column in enumerate(arrays[name].T)}
    pl.DataFrame(columns).write_parquet(tmp_path / "columns.parquet")
    wide = {"observations": "observations_*", "next_observations": "next_observations_*"}
    for name, mapping in (("log.npz", roles), ("lists.parquet", roles), ("columns.parquet", roles | wide)):
        log = open_transitions(tmp_path / name, mapping=mapping)
        for key in ("observations", "next_observations", "rewards", "terminated"):
            np.testing.assert_array_equal(getattr(log, key), getattr(flat, key))
        assert any(note in each for each in log.metadata.notes)
        assert any(note in each for each in flat.metadata.notes)
        assert log.has_episodes == flat.has_episodes
        if flat.has_episodes:
            np.testing.assert_array_equal(log.episode_ids, flat.episode_ids)
            # in a table the last row of all is known to be cut, too
            np.testing.assert_array_equal(log.truncated[:-1], flat.truncated[:-1])
        if len(log) == 15:
            assert_same_in_pieces(tmp_path / name, mapping, log)


def test_a_cut_row_without_its_next_observation_is_left_out_and_a_time_orders_rows(tmp_path):
    arrays = recorded()
    following = [
        [None] * len(row) if i in (6, 11) else list(row) for i, row in enumerate(arrays["next_observations"])
    ]
    columns = {name: array for name, array in arrays.items() if array.ndim == 1}
    columns |= {f"s_{i}": column for i, column in enumerate(arrays["observations"].T)}
    columns |= {f"n_{i}": list(column) for i, column in enumerate(zip(*following, strict=True))}
    mapping = ROLES | {"observations": "s_*", "next_observations": "n_*"}
    pl.DataFrame(columns).write_parquet(tmp_path / "log.parquet")
    log = open_transitions(tmp_path / "log.parquet", mapping=mapping)
    np.testing.assert_array_equal(log.rewards, np.delete(arrays["rewards"], [6, 11]))
    np.testing.assert_array_equal(np.unique(log.episode_ids), range(5))
    order = np.random.default_rng(1).permutation(15)
    timed = pl.DataFrame(columns | {"when": np.arange(15)})
    timed[order.tolist()].write_parquet(tmp_path / "mixed.parquet")
    assert_same(open_transitions(tmp_path / "mixed.parquet", mapping=mapping | {"time": "when"}), log)


def test_linked_rows_without_any_flag_are_one_episode(tmp_path):
    states = np.arange(40.0)
    frame = pl.DataFrame({"s": states, "n": states + 1, "a": np.arange(40) % 2, "r": states})
    frame.write_parquet(tmp_path / "log.parquet")
    mapping = {"observations": "s", "next_observations": "n", "action": "a", "reward": "r"}
    log = open_transitions(tmp_path / "log.parquet", mapping=mapping)
    assert (log.n_episodes, int(log.truncated.sum())) == (1, 1)
    with one_line(DataError, match="no column says which rows belong together"):
        open_transitions(tmp_path / "log.parquet", mapping={**mapping, "next_observations": None})
