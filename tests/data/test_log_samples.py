"""Random units of a log, in memory and on disk."""

import numpy as np
import pytest
from scipy import stats

from koffline.data.units import Part, sample_units
from koffline.errors import DataError
from tests.data.logs import in_shards, numbered_log

ALONE = {"episode_ids": None, "steps": None}


def numbers(sample) -> list[int]:
    return sample.transitions.rewards.astype(int).tolist()


@pytest.mark.parametrize("changes", [{}, ALONE], ids=["episodes", "rows"])
def test_storage_does_not_decide(tmp_path, monkeypatch, changes):
    """One log in memory, in a few shards, in many, read in small blocks: the same units."""
    whole = numbered_log(**changes)
    expected = sample_units(whole, 100, 3)
    rows = numbers(expected)
    assert rows == sorted(rows)
    if whole.has_episodes:
        np.testing.assert_array_equal(np.unique(whole.episode_ids[rows]), expected.units)
        assert len(rows) == sum(whole.episode_lengths[expected.units])
    assert 0 < len(expected.units) < (whole.n_episodes or len(whole))
    for shard_rows, block_bytes in ((150, 2**20), (60, 2**20), (150, 400)):
        monkeypatch.setattr("koffline.data.disk.log.BLOCK_BYTES", block_bytes)
        shards = in_shards(whole, tmp_path / f"{shard_rows}-{block_bytes}", shard_rows)
        found = sample_units(shards, 100, 3)
        np.testing.assert_array_equal(found.units, expected.units)
        assert found.transitions.sha256 == expected.transitions.sha256


def test_every_row_is_as_likely_and_pairs_are_too():
    whole = numbered_log(**ALONE)
    draws, count = 600, len(whole) // 4
    taken = np.zeros((draws, len(whole)))
    for seed in range(draws):
        taken[seed, sample_units(whole, count, seed).units] = 1.0
    share = count / len(whole)
    z = (taken.mean(axis=0) - share) / np.sqrt(share * (1 - share) / draws)
    # without replacement: the counts' statistic is χ² with N − 1 degrees, up to its factor (N − 1) / N
    statistic = np.sum(z**2) * (len(whole) - 1) / len(whole)
    assert stats.chi2.sf(statistic, len(whole) - 1) > 1e-3
    neighbours = np.mean(taken[:, 1:] * taken[:, :-1])
    expected = share * (count - 1) / (len(whole) - 1)
    assert neighbours == pytest.approx(expected, rel=0.02)  # 5 standard errors of 600 × 445 pairs


def test_parts_divide_the_log(tmp_path):
    whole = numbered_log()
    shards = in_shards(whole, tmp_path / "log")
    kept, out = (sample_units(shards, 10**6, 0, Part(0.3, 5, held_out)) for held_out in (False, True))
    assert sorted(numbers(kept) + numbers(out)) == whole.rewards.astype(int).tolist()
    assert 0.1 < len(out.units) / whole.n_episodes < 0.5
    with pytest.raises(DataError, match="hold out another share"):
        sample_units(shards, 10, 0, Part(0.0, 0, True))


def test_a_shard_that_cannot_be_read_is_named(tmp_path):
    shards = in_shards(numbered_log(), tmp_path / "log")
    (tmp_path / "log" / "shard-00001.hdf5").write_bytes(b"")
    with pytest.raises(DataError, match="shard-00001"):
        sample_units(shards, 10**6, 3)
