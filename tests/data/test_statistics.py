"""Sums over blocks and shards against the whole log at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koffline.data.summary import summarise
from koffline.jobs.mapping import PassSettings
from tests.data.logs import drawn_logs
from tests.data.shards_in_memory import MemoryShards, leaves, numbered_shards


class TestLogs:
    @given(drawn_logs(), st.integers(1, 7))
    def test_sizes_of_blocks_do_not_matter(self, drawn, block_rows):
        log = drawn.log()

        class Cut(MemoryShards):
            def shard_blocks(self, shard, _=None):
                yield from super().shard_blocks(shard, block_rows)

        shards = Cut([log], metadata=log.metadata, sha256=log.sha256)
        assert leaves(summarise(shards).to_json()) == pytest.approx(leaves(summarise(log).to_json()))

    def test_shards_are_one_log(self):
        shards = numbered_shards(discrete=False)
        whole = shards.load()
        shards.sha256 = whole.sha256
        found = summarise(shards)
        assert leaves(found.to_json()) == pytest.approx(leaves(summarise(whole).to_json() | {"shards": 3}))
        assert (found.shards, found.left_out) == (3, ())
        assert summarise(shards, PassSettings(workers=2)) == found
