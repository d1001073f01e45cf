"""Mini-batches by shuffled blocks: every row once in an epoch, well mixed, and resumable."""

import json

import numpy as np
import pytest

from koffline.data.disk.batches import BlockOrder, BlockSampler, ShardReader
from koffline.data.disk.samples import Part
from koffline.errors import ConfigError, DataError
from tests.data.shards_in_memory import MemoryShards, numbered_shards

SIZES = {"pool_rows": 64, "block_rows": 8}


@pytest.fixture(scope="module")
def shards():
    return numbered_shards()


@pytest.fixture
def sampler(shards):
    made = BlockSampler(shards, 0, **SIZES, next_actions=True)
    yield made
    made.close()


def drawn(sampler, count: int, batch: int = 16) -> np.ndarray:
    """Numbers of the rows of ``count`` rows drawn by batches."""
    found = [sampler.draw(min(batch, count - done))["rewards"] for done in range(0, count, batch)]
    return np.concatenate(found).astype(int)


class TestOrder:
    def test_an_epoch_visits_every_row_once(self):
        order = BlockOrder([50, 7, 33], block_rows=8, slots=4, seed=1)
        for epoch in range(3):
            seen = []
            for position in range(order.length(epoch)):
                fragment = order.fragment(epoch, position)
                seen += [(fragment.shard, fragment.start + row) for row in fragment.rows()]
            assert sorted(seen) == [(s, r) for s, size in enumerate([50, 7, 33]) for r in range(size)]

    def test_first_parts_have_all_sizes(self):
        order = BlockOrder([8000], block_rows=100, slots=5, seed=1)
        sizes = [len(order.fragment(0, i).rows()) for i in range(order.length(0))]
        assert sizes[:5] == [20, 40, 60, 80, 100]
        assert sum(sizes) == 8000
        assert [len(order.fragment(1, i).rows()) for i in range(80)] == [100] * 80

    def test_epochs_differ_and_seeds_decide(self):
        def blocks(seed, epoch):
            order = BlockOrder([800], 10, 1, seed)
            return [order.fragment(epoch, i).start for i in range(order.length(epoch))]

        assert blocks(0, 1) == blocks(0, 1)
        assert blocks(0, 1) != blocks(0, 2)
        assert blocks(0, 1) != blocks(1, 1)


class TestRows:
    def test_they_are_those_of_the_log(self, sampler, shards):
        whole = shards.load()
        first = np.cumsum([0, *(shard.rows for shard in shards.shards)])
        for _ in range(20):
            batch = sampler.draw(32)
            rows = batch["rewards"].astype(int)
            for name in ("observations", "actions", "next_observations", "terminated", "truncated"):
                np.testing.assert_array_equal(batch[name], getattr(whole, name)[rows])
            np.testing.assert_array_equal(first[batch["shards"]] + batch["rows"], rows)

    def test_next_actions_are_those_of_the_next_step(self, sampler, shards):
        whole = shards.load()
        last = np.append(whole.steps[1:] == 0, True)
        for _ in range(30):
            batch = sampler.draw(32)
            rows = batch["rewards"].astype(int)
            expected = whole.actions[np.where(last[rows], rows, rows + 1)]
            np.testing.assert_array_equal(batch["next_actions"], expected)

    def test_optional_columns(self):
        shards = numbered_shards(weights=lambda r: r + 1.0, behavior_log_probabilities=lambda r: -r)
        batch = BlockSampler(shards, 0, **SIZES).draw(10)
        np.testing.assert_array_equal(batch["weights"], batch["rewards"] + 1.0)
        np.testing.assert_array_equal(batch["behavior_log_probabilities"], -batch["rewards"])
        assert "next_actions" not in batch

    @pytest.mark.parametrize("pool", [SIZES, {"pool_rows": 10}, {"memory": 5000}, {"pool_rows": 10_000}])
    @pytest.mark.parametrize("batch", [1, 16, 100])
    def test_all_are_drawn_equally_often(self, shards, pool, batch):
        """A row waits in the pool, so that counts may differ by what two epochs overlap."""
        sampler = BlockSampler(shards, 3, **pool)
        epochs = 6
        counts = np.bincount(drawn(sampler, epochs * len(shards), batch), minlength=len(shards))
        assert len(counts) == len(shards)
        assert counts.min() >= epochs - 2
        assert counts.max() <= epochs + 2
        sampler.close()

    def test_nothing_is_repeated_before_the_first_epoch_was_read(self, shards):
        sampler = BlockSampler(shards, 3, **SIZES)
        rows = drawn(sampler, len(shards) - sampler.pool_rows)
        assert len(set(rows.tolist())) == len(rows)

    def test_a_part(self, shards):
        parts = [Part(0.4, 7, held_out) for held_out in (False, True)]
        seen = []
        for part in parts:
            sampler = BlockSampler(shards, 0, **SIZES, part=part)
            seen.append(set(drawn(sampler, 2 * len(shards)).tolist()))
        assert seen[0] | seen[1] == set(range(len(shards)))
        assert not seen[0] & seen[1]

    def test_a_part_without_rows(self, shards):
        with pytest.raises(ConfigError, match="no row is left in that part"):
            BlockSampler(shards, 0, **SIZES, part=Part(0.0, 0, True)).draw(1)


class TestMixing:
    def test_batches_of_a_sorted_log_are_like_random_ones(self):
        """The variance of batch means is that of uniform draws, where rows are sorted by the very number."""
        length, batch = 100_000, 64
        one = numbered_shards((20,), 12).logs[0]
        rows = one.select(np.arange(length) % len(one)).replace(rewards=np.arange(length, dtype=np.float64))
        sampler = BlockSampler(MemoryShards([rows]), 0, pool_rows=8192, block_rows=64)
        means = np.array([sampler.draw(batch)["rewards"].mean() for _ in range(800)])
        uniform = (length**2 / 12) / batch
        # the variance of 800 means is known to 2·√(2 / 800) = 10 %; drawing without replacement may lower it
        assert 0.8 < means.var() / uniform < 1.1

    def test_blocks_run_empty_one_by_one(self, shards):
        """No draw waits for many blocks: with slots in step, all of them would end in the same draw."""
        one = numbered_shards((200,), 12).logs[0]
        log = MemoryShards([one.select(np.arange(20_000) % len(one))])
        sampler = BlockSampler(log, 0, pool_rows=2048, block_rows=64)
        sampler.draw(1)
        reads = []
        for _ in range(400):
            before = log.rows_read
            sampler.draw(32)
            reads.append((log.rows_read - before) / 64)
        assert np.mean(reads) == pytest.approx(0.5, rel=0.1)
        assert max(reads) <= 4


class TestResuming:
    @pytest.mark.parametrize("before", [0, 7, 600])
    def test_the_same_batches(self, shards, before):
        first = BlockSampler(shards, 4, **SIZES)
        drawn(first, before) if before else None
        state = json.loads(json.dumps(first.state_dict()))
        expected = drawn(first, 500)
        second = BlockSampler(shards, 4, **SIZES)
        second.draw(5)
        second.load_state_dict(state)
        np.testing.assert_array_equal(drawn(second, 500), expected)

    def test_the_same_seed(self, shards):
        same = [drawn(BlockSampler(shards, seed, **SIZES), 300) for seed in (1, 1, 2)]
        np.testing.assert_array_equal(same[0], same[1])
        assert (same[0] != same[2]).any()

    def test_a_state_of_something_else(self, shards):
        state = BlockSampler(shards, 0, **SIZES).state_dict()
        with pytest.raises(ConfigError, match="another log or pool"):
            BlockSampler(shards, 1, **SIZES).load_state_dict(state)


class TestReading:
    def test_files_stay_open(self, shards):
        log = MemoryShards(shards.logs)
        reader = ShardReader(log, most_open=2)
        for shard in (0, 1, 0, 1, 0, 2, 0):
            reader.read_rows(shard, 1, 3)
        assert log.opened == 3
        reader.read_rows(1, 1, 3)
        assert log.opened == 4
        reader.close()

    def test_a_damaged_shard_is_named(self, shards):
        class Damaged(MemoryShards):
            def block_of(self, opened, shard, start, stop):
                if shard == 1:
                    raise DataError("row 3 is damaged; copy it again")
                return super().block_of(opened, shard, start, stop)

        with pytest.raises(DataError, match="shard-00001: row 3 is damaged"):
            BlockSampler(Damaged(shards.logs), 0, **SIZES).draw(500)

    def test_sizes_are_checked(self, shards):
        for pool in ({"pool_rows": 0}, {"pool_rows": 8, "block_rows": 0}):
            with pytest.raises(ConfigError, match="give positive numbers"):
                BlockSampler(shards, 0, **pool)

    def test_memory_bounds_the_pool(self, shards):
        sampler = BlockSampler(shards, 0, memory=100 * shards.row_bytes)
        assert sampler.pool_rows <= 100
