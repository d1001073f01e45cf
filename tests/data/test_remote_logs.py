"""Logs at URLs: the rows of the local files, and no copies left behind."""

import os
import tempfile

import fsspec
import pytest

from koffline.data import remote
from koffline.data.sources import convert_to_shards, open_transitions, write_transitions
from koffline.errors import DataError
from tests.data.logs import assert_same_rows, in_shards, roll_out
from tests.interrupts import ended_process
from tests.refusals import one_line


@pytest.fixture(scope="module")
def log():
    return roll_out().transitions()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, log):
    place = tmp_path_factory.mktemp("logs")
    in_shards(log, place / "shards", 6)
    write_transitions(log, place / "log.hdf5")
    return place


@pytest.fixture
def bucket(folder):
    """The same files in a storage that is no disk."""
    storage = fsspec.filesystem("memory")
    storage.put(str(folder), "/bucket", recursive=True)
    yield "memory://bucket"
    storage.rm("/bucket", recursive=True)


@pytest.fixture
def copies(tmp_path, monkeypatch):
    """Where temporary copies go."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def test_shards_in_a_storage(bucket, copies, log):
    lazy = open_transitions(f"{bucket}/shards", lazy=True)
    assert lazy.shards[0].name == "memory://bucket/shards/shard-00000.hdf5"
    blocks = lazy.shard_blocks(0)
    next(blocks)
    assert len(list(copies.rglob("*.hdf5"))) == 1
    blocks.close()
    assert list(copies.iterdir()) == []
    assert_same_rows(lazy.load(), log)
    assert_same_rows(open_transitions(f"{bucket}/shards"), log)
    assert list(copies.iterdir()) == []


def test_copies_of_killed_processes_go(bucket, copies, log):
    with remote.temporary_folder() as mine:
        left = mine.with_name(
            mine.name.replace(f"-{os.getpid()}-", f"-{ended_process()}-")
        )
        left.mkdir()
        (left / "shard-00000.hdf5").touch()
        list(open_transitions(f"{bucket}/shards", lazy=True).blocks())
        assert list(copies.iterdir()) == [mine]


def test_single_files(bucket, copies, log):
    from_bucket = open_transitions(f"{bucket}/log.hdf5")
    assert_same_rows(from_bucket, log)
    assert from_bucket.metadata.source == f"{bucket}/log.hdf5"
    assert list(copies.iterdir()) == []


def test_a_damaged_shard_is_named_by_its_address(bucket, copies):
    storage = fsspec.filesystem("memory")
    storage.pipe("/bucket/shards/shard-00001.hdf5", b"\x89HDF\r\n\x1a\n" + bytes(100))
    with pytest.raises(
        DataError, match=r"^memory://bucket/shards/shard-00001.hdf5: a truncated"
    ):
        open_transitions(f"{bucket}/shards", lazy=True).load()
    storage.pipe("/bucket/log.hdf5", b"")
    with pytest.raises(DataError, match=r"^memory://bucket/log.hdf5 is empty"):
        open_transitions(f"{bucket}/log.hdf5")
    assert list(copies.iterdir()) == []


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("memory://nowhere/log.hdf5", "does not exist"),
        ("nothing://bucket/log.hdf5", "Protocol not known: nothing"),
    ],
)
@pytest.mark.parametrize("lazy", [False, True])
def test_bad_addresses_are_one_line(address, message, lazy):
    with one_line(DataError, match=f"^{address}.*{message}"):
        open_transitions(address, lazy=lazy)


def test_shards_are_written_here_alone(bucket):
    with pytest.raises(
        DataError,
        match="is no folder of this machine; write one here and copy it there",
    ):
        convert_to_shards(f"{bucket}/log.hdf5", f"{bucket}/new", 5)
