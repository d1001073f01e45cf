"""What is wrong with a log on disk: the sentences are those of the whole log at once."""

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from koffline.data.disk.writer import ShardWriter
from koffline.data.findings import inspect_log
from koffline.data.raw import RawLog
from koffline.data.sources import open_transitions
from koffline.data.statistics import blocks_of
from koffline.data.units import RepeatedRows
from tests.data.logs import drawn_logs
from tests.data.shards_in_memory import MemoryShards, columns_of, numbered_shards


class Cut(MemoryShards):
    """Blocks of five rows."""

    def shard_blocks(self, shard, block_rows=None):
        yield from super().shard_blocks(shard, 5)


def messages(findings) -> list[str]:
    return [finding.message for finding in findings]


def of_whole(log) -> list[str]:
    columns = columns_of(log)
    if log.has_episodes:
        columns["steps"] = log.steps
    return messages(inspect_log(RawLog(columns, log.action_space, log.metadata)))


@pytest.fixture
def folder(tmp_path):
    """A shard folder of the numbered log."""
    with ShardWriter(tmp_path / "log", shard_rows=150) as writer:
        writer.append(numbered_shards().load())
    return tmp_path / "log"


class TestWarnings:
    @settings(max_examples=25, deadline=None)
    @given(drawn_logs(), st.integers(0, 2))
    def test_blocks_do_not_matter(self, drawn, copies):
        shards = Cut([drawn.log().with_metadata(drawn.log().metadata)] * (copies + 1))
        assert messages(inspect_log(shards)) == of_whole(shards.load())

    def test_one_stream_cut_into_shards(self):
        """The next observation of a shard's last row is the first observation of the next shard."""
        whole = numbered_shards().load()
        shifted = whole.replace(
            next_observations=np.roll(whole.observations, -1, axis=0), terminated=np.zeros(len(whole), bool)
        )
        rows = np.split(np.arange(len(whole)), whole.episode_starts[[20, 40]])
        shards = Cut([shifted.select(part) for part in rows])
        found = messages(inspect_log(shards))
        assert found == of_whole(shards.load())
        assert any("71 rows" in message for message in found)


class TestErrors:
    def test_all_shards_at_once(self, folder):
        files = sorted(folder.glob("*.hdf5"))
        assert len(files) >= 3
        with h5py.File(files[0], "a") as file:
            file["rewards"][7:9] = np.nan
            file["actions"][3] = 9
        with h5py.File(files[2], "a") as file:
            file["observations"][11, 1] = np.inf
        found = inspect_log(open_transitions(folder, lazy=True))
        assert {finding.severity for finding in found} == {"error"}
        assert messages(found) == [
            f"{files[0]}: rewards: NaN or infinite in 2 rows (first: row 7); drop or mend them",
            f"{files[0]}: actions: outside Discrete(3) in row 3; declare the space anew or mend them",
            f"{files[2]}: observations: NaN or infinite in row 11; drop or mend them",
        ]

    def test_a_damaged_shard_is_named(self, folder):
        first, *_ = files = sorted(folder.glob("*.hdf5"))
        log = open_transitions(folder, lazy=True)
        first.write_bytes(first.read_bytes()[:3000])
        with h5py.File(files[-1], "a") as file:
            file["rewards"][0] = np.nan
        found = messages(inspect_log(log))
        assert len(found) == 2
        assert str(first) in found[0]
        assert found[1].startswith(f"{files[-1]}: rewards: NaN")


class TestRepeatedRows:
    @pytest.mark.parametrize("parts", [1, 4])
    def test_many_are_estimated_and_memory_is_bounded(self, parts):
        generator = np.random.default_rng(0)
        log = numbered_shards().logs[0]
        rows = log.select(np.zeros(40_000, dtype=int)).replace(rewards=np.arange(40_000.0))
        twice = rows.select(np.append(np.arange(40_000), generator.permutation(40_000)[:20_000]))
        total = RepeatedRows(limit=2000)
        for part in np.array_split(np.arange(60_000), parts):
            one = RepeatedRows(limit=2000)
            for block in blocks_of(twice.select(part)):
                one.add(block)
            total.merge(one)
        assert total.level == 5  # 40,000 / 2^5 = 1250 hashes are kept
        assert len(total._hashes) <= 2000
        # a binomial number of 20,000 repeated rows with probability 2^−5: 5 standard errors are 20 %
        assert total.count() == pytest.approx(20_000, rel=0.2)
