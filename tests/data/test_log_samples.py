"""Random rows, starts and episodes of a log on disk."""

import numpy as np
import pytest
from scipy import stats

from koffline.data.disk.samples import Part, sample_episodes, sample_starts, sample_transitions
from koffline.errors import DataError
from koffline.jobs.mapping import PassSettings
from tests.data.shards_in_memory import MemoryShards, columns_of, numbered_shards

ALONE = {"episode_ids": None, "steps": None}


def numbers(log) -> list[int]:
    return log.rewards.astype(int).tolist()


@pytest.fixture(scope="module")
def shards():
    return numbered_shards()


@pytest.fixture(scope="module")
def whole(shards):
    return shards.load()


def test_rows_come_whole_and_once(shards, whole):
    sample = sample_transitions(shards, 100, seed=3)
    rows = numbers(sample)
    assert len(set(rows)) == len(sample) == 100
    assert not sample.has_episodes
    for name, column in columns_of(sample).items():
        np.testing.assert_array_equal(column, getattr(whole, name)[rows])


def test_weights_and_log_probabilities_come_along():
    shards = numbered_shards(weights=lambda r: r + 1.0, behavior_log_probabilities=lambda r: -r)
    sample = sample_transitions(shards, 50, seed=0)
    np.testing.assert_array_equal(sample.weights, sample.rewards + 1.0)
    np.testing.assert_array_equal(sample.behavior_log_probabilities, -sample.rewards)


def test_a_smaller_sample_begins_a_larger_one(shards):
    large, small = (sample_transitions(shards, count, seed=9) for count in (200, 40))
    assert numbers(small) == numbers(large)[:40]
    assert numbers(sample_transitions(shards, 40, seed=10)) != numbers(small)


def test_all_rows_where_there_are_no_more(shards, whole):
    sample = sample_transitions(shards, 10**6, seed=0)
    assert sorted(numbers(sample)) == numbers(whole)
    assert numbers(sample) != numbers(whole)
    np.testing.assert_array_equal(
        np.sort(sample_starts(shards, 10**6, seed=0), axis=0), np.sort(whole.initial_observations(), axis=0)
    )


def test_every_row_is_as_likely_and_pairs_are_too(shards, whole):
    draws, count = 600, len(whole) // 4
    taken = np.zeros((draws, len(whole)))
    for seed in range(draws):
        taken[seed, numbers(sample_transitions(shards, count, seed))] = 1.0
    share = count / len(whole)
    z = (taken.mean(axis=0) - share) / np.sqrt(share * (1 - share) / draws)
    # without replacement: the counts' statistic is χ² with N − 1 degrees, up to its factor (N − 1) / N
    statistic = np.sum(z**2) * (len(whole) - 1) / len(whole)
    assert stats.chi2.sf(statistic, len(whole) - 1) > 1e-3
    neighbours = np.mean(taken[:, 1:] * taken[:, :-1])
    expected = share * (count - 1) / (len(whole) - 1)
    assert neighbours == pytest.approx(expected, rel=0.02)  # 5 standard errors of 600 × 445 pairs


def test_starts_are_first_observations_of_episodes(shards, whole):
    starts = sample_starts(shards, 30, seed=4)
    known = {row.tobytes() for row in whole.initial_observations()}
    found = [row.tobytes() for row in starts]
    assert len(set(found)) == 30
    assert set(found) <= known
    np.testing.assert_array_equal(starts[:7], sample_starts(shards, 7, seed=4))


def test_starts_of_rows_that_stand_alone():
    shards = numbered_shards(**ALONE)
    starts = sample_starts(shards, 40, seed=4)
    known = {row.tobytes() for row in shards.load().observations}
    assert len(starts) == 40
    assert {row.tobytes() for row in starts} <= known


def test_the_order_of_shards_on_disk_decides_and_nothing_else(shards):
    class SmallBlocks(MemoryShards):
        def shard_blocks(self, shard, block_rows=None):
            yield from super().shard_blocks(shard, 5)

    small = SmallBlocks(shards.logs)
    assert numbers(sample_transitions(small, 100, 3)) == numbers(sample_transitions(shards, 100, 3))
    np.testing.assert_array_equal(sample_starts(small, 20, 3), sample_starts(shards, 20, 3))
    assert numbers(sample_episodes(small, 100, 3)) == numbers(sample_episodes(shards, 100, 3))


def test_a_few_rows_of_a_large_shard_are_read_in_parts():
    one = numbered_shards((40,), 12).logs[0]
    big = MemoryShards([one.select(np.arange(200_000) % len(one))])
    sample = sample_transitions(big, 8, seed=0)
    assert len(sample) == 8
    assert big.rows_read < 8 * 4097
    assert big.rows_read < 0.2 * len(big)


class TestEpisodes:
    def test_they_are_whole(self, shards, whole):
        sample = sample_episodes(shards, 120, seed=1)
        rows = numbers(sample)
        assert sample.has_episodes
        assert 60 < len(sample) < 240
        assert rows == sorted(rows)
        assert len(sample) == sum(whole.episode_lengths[np.unique(whole.episode_ids[rows])])
        np.testing.assert_array_equal(sample.steps, whole.steps[rows])

    def test_at_least_one(self, shards):
        assert sample_episodes(shards, 1, seed=1).n_episodes == 1

    def test_without_episodes_rows(self):
        shards = numbered_shards(**ALONE)
        assert len(sample_episodes(shards, 50, seed=0)) == 50

    def test_parts_divide_the_log(self, shards, whole):
        parts = [Part(0.3, 5, held_out) for held_out in (False, True)]
        kept, out = (sample_episodes(shards, 10**6, 0, part) for part in parts)
        assert sorted(numbers(kept) + numbers(out)) == numbers(whole)
        assert 0.1 < out.n_episodes / whole.n_episodes < 0.5

    def test_an_empty_part(self, shards):
        with pytest.raises(DataError, match="hold out another share"):
            sample_episodes(shards, 10, 0, Part(0.0, 0, True))


def test_counts_are_checked(shards):
    for call in (sample_transitions, sample_starts, sample_episodes):
        with pytest.raises(DataError, match="give a positive number"):
            call(shards, 0, seed=0)


def test_rows_of_shards_that_cannot_be_read_are_missing_on_request(shards):
    class Damaged(MemoryShards):
        def shard_blocks(self, shard, block_rows=None):
            if shard == 1:
                raise DataError("shard-00001 is damaged; copy it again")
            yield from super().shard_blocks(shard, block_rows)

    damaged = Damaged(shards.logs)
    with pytest.raises(DataError, match="shard-00001"):
        sample_transitions(damaged, 50, 3)
    sound = numbers(sample_transitions(shards, 50, 3))
    lost = set(shards.logs[1].rewards.astype(int).tolist())
    settings = PassSettings(skip_bad_shards=True)
    assert numbers(sample_transitions(damaged, 50, 3, settings=settings)) == [
        r for r in sound if r not in lost
    ]
    assert not lost & set(numbers(sample_episodes(damaged, 10**6, 3, settings=settings)))
