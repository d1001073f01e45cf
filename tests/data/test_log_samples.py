"""Random units of a log, in memory and on disk."""

import numpy as np
import pytest
from scipy import stats

from koffline.data.disk.samples import Part, sample_units
from koffline.errors import DataError
from koffline.jobs import PassSettings
from tests.data.shards_in_memory import MemoryShards, columns_of, numbered_shards

ALONE = {"episode_ids": None, "steps": None}


def numbers(sample) -> list[int]:
    return sample.transitions.rewards.astype(int).tolist()


@pytest.fixture(scope="module")
def shards():
    return numbered_shards()


@pytest.fixture(scope="module")
def whole(shards):
    return shards.load()


def test_episodes_are_whole_and_in_order(shards, whole):
    sample = sample_units(shards, 120, seed=1)
    rows = numbers(sample)
    assert sample.transitions.has_episodes
    assert 60 < len(rows) < 240
    assert rows == sorted(rows)
    np.testing.assert_array_equal(np.unique(whole.episode_ids[rows]), sample.units)
    assert len(rows) == sum(whole.episode_lengths[sample.units])
    for name, column in columns_of(sample.transitions).items():
        np.testing.assert_array_equal(column, getattr(whole, name)[rows])


@pytest.mark.parametrize("changes", [{}, ALONE], ids=["episodes", "rows"])
def test_storage_does_not_decide(changes):
    """One log in memory, in three shards, in five, read in small blocks: the same units."""

    class SmallBlocks(MemoryShards):
        def shard_blocks(self, shard, block_rows=None):
            yield from super().shard_blocks(shard, 5)

    shards = numbered_shards(**changes)
    whole = shards.load()
    split = shards.logs[2]
    half = (split.n_episodes if split.has_episodes else len(split)) // 2
    take = split.select_episodes if split.has_episodes else split.select
    count = split.n_episodes if split.has_episodes else len(split)
    finer = MemoryShards([*shards.logs[:2], take(np.arange(half)), take(np.arange(half, count))])
    expected = sample_units(whole, 100, 3)
    assert 0 < len(expected.units) < (whole.n_episodes or len(whole))
    for log in (shards, finer, SmallBlocks(shards.logs)):
        found = sample_units(log, 100, 3)
        np.testing.assert_array_equal(found.units, expected.units)
        assert found.transitions.sha256 == expected.transitions.sha256


def test_every_row_is_as_likely_and_pairs_are_too():
    whole = numbered_shards(**ALONE).load()
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


def test_parts_divide_the_log(shards, whole):
    parts = [Part(0.3, 5, held_out) for held_out in (False, True)]
    kept, out = (sample_units(shards, 10**6, 0, part) for part in parts)
    assert sorted(numbers(kept) + numbers(out)) == whole.rewards.astype(int).tolist()
    assert 0.1 < len(out.units) / whole.n_episodes < 0.5
    with pytest.raises(DataError, match="hold out another share"):
        sample_units(shards, 10, 0, Part(0.0, 0, True))


def test_units_of_shards_that_cannot_be_read_are_missing_on_request(shards):
    class Damaged(MemoryShards):
        def shard_blocks(self, shard, block_rows=None):
            if shard == 1:
                raise DataError("shard-00001 is damaged; copy it again")
            yield from super().shard_blocks(shard, block_rows)

    damaged = Damaged(shards.logs)
    with pytest.raises(DataError, match="shard-00001"):
        sample_units(damaged, 10**6, 3)
    found = sample_units(damaged, 10**6, 3, settings=PassSettings(skip_bad_shards=True))
    assert found.skipped == ("shard-00001 is damaged; copy it again",)
    first = shards.logs[0].n_episodes
    lost = np.arange(first, first + shards.logs[1].n_episodes)
    np.testing.assert_array_equal(found.units, np.setdiff1d(np.arange(shards.n_episodes), lost))
