"""Mini-batches by shuffled blocks: every row once in an epoch, well mixed, and resumable."""

import json

import numpy as np
import pytest

from koffline.data.disk.batches import BlockSampler
from koffline.data.units import Part
from koffline.errors import ConfigError
from tests.data.logs import in_shards, numbered_log

SIZES = {"pool_rows": 64, "block_rows": 8}


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return in_shards(numbered_log(), tmp_path_factory.mktemp("log") / "shards")


def drawn(sampler, count: int, batch: int = 16) -> np.ndarray:
    """Numbers of the rows of ``count`` rows drawn by batches."""
    found = [sampler.draw(min(batch, count - done))["rewards"] for done in range(0, count, batch)]
    return np.concatenate(found).astype(int)


class TestRows:
    @pytest.mark.parametrize(
        ("pool", "batch"), [(SIZES, 1), (SIZES, 100), ({"memory": 5000}, 16), ({"pool_rows": 10_000}, 100)]
    )
    def test_all_are_drawn_equally_often(self, shards, pool, batch):
        """A row waits in the pool, so that counts may differ by what two epochs overlap."""
        sampler, epochs = BlockSampler(shards, 3, **pool), 4
        counts = np.bincount(drawn(sampler, epochs * len(shards), batch), minlength=len(shards))
        assert len(counts) == len(shards)
        assert counts.min() >= epochs - 2
        assert counts.max() <= epochs + 2

    def test_a_part(self, shards):
        parts = [Part(0.4, 7, held_out) for held_out in (False, True)]
        seen = []
        for part in parts:
            sampler = BlockSampler(shards, 0, **SIZES, part=part)
            seen.append(set(drawn(sampler, 2 * len(shards)).tolist()))
        assert seen[0] | seen[1] == set(range(len(shards)))
        assert not seen[0] & seen[1]

        with pytest.raises(ConfigError, match="no row is left in that part"):
            BlockSampler(shards, 0, **SIZES, part=Part(0.0, 0, True)).draw(1)


class TestMixing:
    def test_batches_of_a_sorted_log_are_like_random_ones(self, tmp_path):
        """The variance of batch means is that of uniform draws, where rows are sorted by the very number."""
        length, batch = 100_000, 64
        one = numbered_log(20)
        rows = one.select(np.arange(length) % len(one)).replace(rewards=np.arange(length, dtype=np.float64))
        shards = in_shards(rows, tmp_path / "shards", length)
        sampler = BlockSampler(shards, 0, pool_rows=8192, block_rows=64)
        means = np.array([sampler.draw(batch)["rewards"].mean() for _ in range(4 * length // batch)])
        uniform = (length**2 / 12) / batch
        # half of the variance is of 49 pools' means, known to √(2 / 49) = 20 % of it: two deviations
        assert 0.8 < means.var() / uniform < 1.2


class TestResuming:
    @pytest.mark.parametrize("before", [0, 7, 600])
    def test_the_same_batches(self, shards, before):
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
