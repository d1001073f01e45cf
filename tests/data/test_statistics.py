"""Sums over blocks and shards against the whole log at once."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from koffline.data.statistics import SCALE_BITS, exact_sum
from koffline.data.summary import summarise
from koffline.jobs import PassSettings
from tests.data.logs import drawn_logs
from tests.data.shards_in_memory import MemoryShards, numbered_shards

NUMBERS = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e300, max_value=1e300)


class TestExactSums:
    @given(st.lists(NUMBERS, max_size=30), st.integers(0, 30))
    def test_they_are_rounded_once(self, numbers, cut):
        parts = exact_sum(np.array(numbers[:cut])) + exact_sum(np.array(numbers[cut:]))
        assert parts / 2**SCALE_BITS == math.fsum(numbers)


class TestLogs:
    @given(drawn_logs(), st.integers(1, 7))
    def test_sizes_of_blocks_do_not_matter(self, drawn, block_rows):
        log = drawn.log()

        class Cut(MemoryShards):
            def shard_blocks(self, shard, _=None):
                yield from super().shard_blocks(shard, block_rows)

        shards = Cut([log], metadata=log.metadata, sha256=log.sha256)
        assert summarise(shards) == summarise(log)

    def test_shards_are_one_log(self):
        shards = numbered_shards(discrete=False)
        whole = shards.load()
        shards.sha256 = whole.sha256
        found = summarise(shards)
        assert found == summarise(whole)
        assert (found.shards, found.left_out) == (3, ())
        assert summarise(shards, PassSettings(workers=2)) == found
