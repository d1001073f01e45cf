"""Sums over blocks and shards against the whole log at once."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from koffline.data.statistics import SCALE_BITS, exact_sum
from koffline.data.summary import summarise
from koffline.jobs.mapping import PassSettings
from tests.data.logs import drawn_logs
from tests.data.shards_in_memory import MemoryShards, numbered_shards

NUMBERS = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e300, max_value=1e300)


class TestExactSums:
    @given(st.lists(NUMBERS, max_size=30), st.integers(0, 30))
    def test_they_are_rounded_once(self, numbers, cut):
        parts = exact_sum(np.array(numbers[:cut])) + exact_sum(np.array(numbers[cut:]))
        assert parts / 2**SCALE_BITS == math.fsum(numbers)

    @pytest.mark.parametrize(
        "numbers",
        [[5e-324] * 3, [1e308, -1e308, 1e-300], [0.1] * 10, [-0.0, 0.0], np.float32([0.1, 0.2]), [3]],
    )
    def test_ends_of_the_range_and_other_dtypes(self, numbers):
        assert exact_sum(np.array(numbers)) / 2**SCALE_BITS == math.fsum(map(float, numbers))


class TestLogs:
    @given(drawn_logs(), st.integers(1, 7))
    def test_sizes_of_blocks_do_not_matter(self, drawn, block_rows):
        log = drawn.log()

        class Cut(MemoryShards):
            def shard_blocks(self, shard, _=None):
                yield from super().shard_blocks(shard, block_rows)

        shards = Cut([log], metadata=log.metadata, sha256=log.sha256)
        assert summarise(shards) == summarise(log)

    @pytest.mark.parametrize("changes", [{}, {"discrete": False}, {"episode_ids": None, "steps": None}])
    def test_shards_are_one_log(self, changes):
        shards = numbered_shards(**changes)
        whole = shards.load()
        shards.sha256 = whole.sha256
        found = summarise(shards)
        assert found == summarise(whole)
        assert (found.shards, found.left_out) == (3, ())
        assert summarise(shards, PassSettings(workers=2)) == found
