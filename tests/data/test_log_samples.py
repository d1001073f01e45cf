"""Units drawn from a log, and mini-batches by shuffled blocks: well mixed, and
resumable.
"""

import json

import numpy as np
import pytest
from scipy import stats

from koffline.data.disk.block_sampler import BlockSampler
from koffline.data.splitting import split_log, split_shards
from koffline.data.units import sample_units
from koffline.errors import ConfigError
from tests.data.logs import in_shards, numbered_log

SIZES = {"pool_rows": 64, "block_rows": 8}


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return in_shards(numbered_log(), tmp_path_factory.mktemp("log") / "shards")


def drawn(sampler, count: int, batch: int = 16) -> np.ndarray:
    """Numbers of the rows of ``count`` rows drawn by batches."""
    drawn_units = [
        sampler.draw(min(batch, count - done))["rewards"]
        for done in range(0, count, batch)
    ]
    return np.concatenate(drawn_units).astype(int)


class TestRows:
    @pytest.mark.parametrize(
        ("pool", "batch"),
        [
            (SIZES, 1),
            (SIZES, 100),
            ({"pool_rows": 100}, 16),
            ({"pool_rows": 10_000}, 100),
        ],
    )
    def test_all_are_drawn_equally_often(self, shards, pool, batch):
        """A row waits in the pool, so that counts may differ by what two epochs
        overlap.
        """
        sampler = BlockSampler(shards, 3, **pool)
        epochs = 4
        counts = np.bincount(
            drawn(sampler, epochs * len(shards), batch), minlength=len(shards)
        )
        assert len(counts) == len(shards)
        assert counts.min() >= epochs - 2
        assert counts.max() <= epochs + 2

    def test_a_part(self, shards):
        seen = []
        for part in split_shards(shards, 0.4, 7):
            sampler = BlockSampler(shards, 0, **SIZES, part=part)
            seen.append(set(drawn(sampler, 2 * len(shards)).tolist()))
        assert seen[0] | seen[1] == set(range(len(shards)))
        assert not seen[0] & seen[1]


def test_batches_of_a_sorted_log_are_like_random_ones(tmp_path):
    """The variance of batch means is that of uniform draws, where rows are sorted by
    the very number.
    """
    length = 100_000
    batch = 64
    log = numbered_log(20)
    rows = log.select(np.arange(length) % len(log)).replace(
        rewards=np.arange(length, dtype=np.float64)
    )
    shards = in_shards(rows, tmp_path / "shards", length)
    sampler = BlockSampler(shards, 0, pool_rows=8192, block_rows=64)
    means = np.array(
        [sampler.draw(batch)["rewards"].mean() for _ in range(4 * length // batch)]
    )
    uniform = (length**2 / 12) / batch
    # half of the variance is of 49 pools' means, known to √(2 / 49) = 20 % of it: two
    # deviations
    assert 0.8 < means.var() / uniform < 1.2


@pytest.mark.parametrize("before", [0, 7, 600])
def test_batches_go_on_the_same(shards, before):
    first, second, other = (BlockSampler(shards, seed, **SIZES) for seed in (4, 4, 5))
    if before:
        assert not np.array_equal(drawn(first, before), drawn(other, before))
    state = json.loads(json.dumps(first.state_dict()))
    expected = drawn(first, 500)
    second.draw(5)
    second.load_state_dict(state)
    np.testing.assert_array_equal(drawn(second, 500), expected)
    with pytest.raises(ConfigError, match="another log or pool"):
        other.load_state_dict(state)


ALONE = {"episode_ids": None, "steps": None}


def numbers(sample) -> list[int]:
    return sample.transitions.rewards.astype(int).tolist()


@pytest.mark.parametrize("changes", [{}, ALONE], ids=["episodes", "rows"])
def test_storage_does_not_decide(tmp_path, monkeypatch, changes):
    """One log in memory, in a few shards, in many, read in small blocks: the same
    units.
    """
    whole = numbered_log(**changes)
    expected = sample_units(whole, 100, 3)
    rows = numbers(expected)
    assert rows == sorted(rows)
    if whole.has_episodes:
        np.testing.assert_array_equal(
            np.unique(whole.episode_ids[rows]), expected.units
        )
        assert len(rows) == sum(whole.episode_lengths[expected.units])
    assert 0 < len(expected.units) < (whole.n_episodes or len(whole))
    for shard_rows, block_bytes in ((150, 2**20), (60, 2**20), (150, 400)):
        monkeypatch.setattr("koffline.data.disk.log.BLOCK_BYTES", block_bytes)
        shards = in_shards(whole, tmp_path / f"{shard_rows}-{block_bytes}", shard_rows)
        sample = sample_units(shards, 100, 3)
        np.testing.assert_array_equal(sample.units, expected.units)
        assert sample.transitions.sha256 == expected.transitions.sha256


def test_every_row_is_as_likely_and_pairs_are_too():
    whole = numbered_log(**ALONE)
    draws = 600
    count = len(whole) // 4
    taken = np.zeros((draws, len(whole)))
    for seed in range(draws):
        taken[seed, sample_units(whole, count, seed).units] = 1.0
    share = count / len(whole)
    z = (taken.mean(axis=0) - share) / np.sqrt(share * (1 - share) / draws)
    # without replacement: the counts' statistic is χ² with N − 1 degrees, up to its
    # factor (N − 1) / N
    statistic = np.sum(z**2) * (len(whole) - 1) / len(whole)
    assert stats.chi2.sf(statistic, len(whole) - 1) > 1e-3
    neighbours = np.mean(taken[:, 1:] * taken[:, :-1])
    expected = share * (count - 1) / (len(whole) - 1)
    # 5 standard errors of 600 × 445 pairs
    assert neighbours == pytest.approx(expected, rel=0.02)


def test_parts_divide_the_log(tmp_path):
    whole = numbered_log()
    shards = in_shards(whole, tmp_path / "log")
    for share in (0.3, 1e-9, 1.0 - 1e-9):
        parts = [
            sample_units(shards, 10**6, 0, part).transitions
            for part in split_shards(shards, share, 5)
        ]
        for from_disk, other in zip(parts, split_log(whole, share, 5), strict=True):
            # the same episodes as in memory
            np.testing.assert_array_equal(from_disk.rewards, other.rewards)
    with pytest.raises(ConfigError, match="the log has one episode"):
        split_shards(in_shards(whole.select_episodes([0]), tmp_path / "one"), 0.5, 0)
