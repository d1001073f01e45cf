"""Rows flagged both terminal and truncated: read row by row where it is clear, else
said, with a remedy that mends them.
"""

import numpy as np
import polars as pl
import pytest

from koffline.data.sources import open_transitions
from koffline.data.structure import symptoms_of
from tests.data.logs import write_arrays

TEST = "both end flags"
MAPPING = {
    "observations": "observations",
    "next_observations": "next_observations",
    "action": "actions",
    "reward": "rewards",
    "terminal": "terminals",
    "truncated": "timeouts",
}


def logged(ends, is_terminal, is_timeout):
    """A log of unrelated rows whose episodes have these last rows (E,), flagged so."""
    rows = np.arange(ends[-1] + 1)
    states = np.random.default_rng(1).normal(size=len(rows) + 1)
    return {
        "observations": states[:-1],
        "next_observations": states[1:],
        "actions": rows % 2,
        "rewards": np.cos(rows),
        "terminals": np.isin(rows, ends[is_terminal]).astype(float),
        "timeouts": np.isin(rows, ends[is_timeout]).astype(float),
    }


def recorded(n_ended, n_limits, n_kept, length=20):
    """Episodes that end by themselves or at a limit, which the recorder flags terminal,
    too, but for ``n_kept``; and the rows that really ended.
    """
    n_episodes = n_ended + n_limits
    ends = length * np.arange(1, n_episodes + 1) - 1
    kinds = np.random.default_rng(0).permutation(n_episodes)
    is_ended = kinds < n_ended
    arrays = logged(
        ends=ends,
        is_terminal=kinds < n_episodes - n_kept,
        is_timeout=~is_ended,
    )
    return arrays, ends[is_ended]


def read(arrays, tmp_path, kind, **mapping):
    """The log, read from a file of a kind."""
    if kind == "parquet":
        path = tmp_path / "log.parquet"
        pl.DataFrame(arrays).write_parquet(path)
        return open_transitions(path, mapping={**MAPPING, **mapping})
    if kind == "npz":
        path = tmp_path / "log.npz"
        np.savez(path, **arrays)
        return open_transitions(path)
    return open_transitions(write_arrays(tmp_path / "log.hdf5", arrays))


def seen_in(log):
    return {symptom.test: symptom for symptom in symptoms_of(log)}


@pytest.mark.parametrize("kind", ["npz", "hdf5", "parquet"])
@pytest.mark.parametrize(
    ("n_ended", "n_limits", "n_kept"), [(103, 74, 1), (103, 74, 0), (40, 30, 3)]
)
def test_limits_that_are_nearly_all_flagged_terminal_are_cuts(
    tmp_path, kind, n_ended, n_limits, n_kept
):
    arrays, ended = recorded(n_ended, n_limits, n_kept)
    log = read(arrays, tmp_path, kind)
    np.testing.assert_array_equal(np.flatnonzero(log.terminated), ended)
    rows = f"{n_limits - n_kept} of {n_limits} rows"
    if not n_kept:
        rows = f"all {n_limits} rows"
    notes = " ".join(log.metadata.notes)
    assert f"{rows} flagged timeouts are flagged terminals too" in notes
    assert TEST not in seen_in(log)


@pytest.mark.parametrize("kind", ["npz", "hdf5", "parquet"])
@pytest.mark.parametrize(
    ("n_ended", "n_limits", "n_kept"), [(103, 74, 14), (103, 74, 40), (0, 74, 1)]
)
def test_else_the_log_says_so_and_its_remedy_mends_it(
    tmp_path, kind, n_ended, n_limits, n_kept
):
    arrays, ended = recorded(n_ended, n_limits, n_kept)
    symptom = seen_in(read(arrays, tmp_path, kind))[TEST]
    rows = f"{n_limits - n_kept} of {n_limits} rows"
    assert symptom.statement.startswith(f"{rows} flagged truncated are flagged")
    formula = symptom.remedy.partition("--terminal '")[2].partition("'")[0]
    assert formula == "done > timeout"
    mended = read(arrays, tmp_path, "parquet", terminal="terminals > timeouts")
    np.testing.assert_array_equal(np.flatnonzero(mended.terminated), ended)
    assert TEST not in seen_in(mended)


@pytest.mark.parametrize("n_limits", [1, 5, 30])
def test_a_flag_of_all_ends_beside_the_terminal_one_is_no_contradiction(
    tmp_path, n_limits
):
    """``done`` is set at every end, ``terminal`` where the world ended."""
    arrays, ended = recorded(60, n_limits, n_kept=0)
    terminal = arrays["terminals"] - arrays["timeouts"]
    arrays = {**arrays, "terminal": terminal, "done": arrays["terminals"]}
    log = read(arrays, tmp_path, "parquet", terminal="terminal", truncated="done")
    np.testing.assert_array_equal(np.flatnonzero(log.terminated), ended)
    assert int(log.truncated.sum()) == n_limits
    assert TEST not in seen_in(log)


@pytest.mark.parametrize(("hazard", "limit"), [(0.02, 50), (0.1, 10), (0.3, 8)])
def test_worlds_that_end_where_recording_stops_by_chance_show_nothing(
    tmp_path, hazard, limit
):
    lengths = np.random.default_rng(2).geometric(hazard, size=2000)
    is_terminal = lengths <= limit
    lengths = np.minimum(lengths, limit)
    arrays = logged(
        ends=np.cumsum(lengths) - 1,
        is_terminal=is_terminal,
        is_timeout=lengths == limit,
    )
    log = read(arrays, tmp_path, "hdf5")
    assert (log.terminated & log.truncated).sum() >= 3
    assert TEST not in seen_in(log)
