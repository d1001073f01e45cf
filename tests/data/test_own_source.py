"""A conversion never replaces what it reads."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from koffline.cli import cli
from koffline.data.sources import write_transitions
from koffline.errors import ConfigError
from koffline.store import check_apart
from koffline.store.run_record import digest_of
from tests.train.small_runs import make_log


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    write_transitions(make_log(), "log.parquet")
    write_transitions(make_log(), "log.hdf5")
    write_transitions(make_log(), "minari:chain/small-v0")
    convert("log.hdf5", "shards", "--shard-rows", "20")
    os.link("log.parquet", "hard.parquet")
    Path("soft.parquet").symlink_to("log.parquet")
    Path("linked").symlink_to("shards")
    Path("tables").mkdir()
    Path("tables/part.parquet").write_bytes(Path("log.parquet").read_bytes())
    return tmp_path


def convert(*words, code=0):
    done = CliRunner().invoke(cli, ["data", "convert", *words], prog_name="koffline")
    assert done.exit_code == code, done.output
    return done


@pytest.mark.parametrize(
    ("source", "target", "more"),
    [
        ("log.parquet", "log.parquet", ()),
        ("log.parquet", "hard.parquet", ()),
        ("file://{place}/log.parquet", "log.parquet", ()),
        ("tables", "tables/part.parquet", ()),
        ("shards", "shards", ("--shard-rows", "10")),
        ("shards", "linked", ("--shard-rows", "10")),
        ("shards/shard-00000.hdf5", "shards", ("--shard-rows", "10")),
        ("minari:chain/small-v0", "minari:chain/small-v0", ()),
    ],
)
def test_the_source_is_never_replaced(place, source, target, more):
    before = digest_of(place)
    done = convert(source.format(place=place), target, *more, "--force", code=2)
    assert done.stderr.count("\n") == 1
    assert ", which this command reads, also with --force" in done.stderr
    assert digest_of(place) == before


def test_urls_that_are_equal_are_the_same():
    with pytest.raises(ConfigError, match="would replace memory"):
        check_apart(["memory://a/log.parquet"], "memory://a/log.parquet")
    check_apart(["memory://a/log.parquet"], "memory://b/log.parquet")
