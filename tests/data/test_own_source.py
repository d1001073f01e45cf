"""A conversion never replaces what it reads, and never gives a folder the name of a file."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from koffline.cli import cli
from koffline.data.sources import write_transitions
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


def test_other_files_are_replaced(place):
    convert("log.hdf5", "log.parquet", "--force")
    convert("log.parquet", "shards", "--shard-rows", "30", "--force")
    convert("shards", "new.hdf5")


def test_urls_that_are_equal_are_the_same():
    with pytest.raises(ConfigError, match="would replace memory"):
        check_apart(["memory://a/log.parquet"], "memory://a/log.parquet")
    check_apart(["memory://a/log.parquet"], "memory://b/log.parquet")


@pytest.mark.parametrize("name", ["out.hdf5", "out.PARQUET"])
def test_a_folder_of_shards_is_not_named_like_a_file(place, name):
    done = convert("log.hdf5", name, "--shard-rows", "10", code=2)
    assert f"{name} ends in .{name[4:]} like a file, and --shard-rows writes a folder" in done.stderr
    assert not Path(name).exists()


def test_results_do_not_replace_the_log_in_their_folder(place):
    """An earlier answer and the log in one folder: --force would take both."""
    Path("a").mkdir()
    Path("a/estimate.json").write_text("{}")
    Path("log.hdf5").rename("a/log.hdf5")
    Path("soft.hdf5").symlink_to("a/log.hdf5")
    arguments = ["evaluate", "soft.hdf5", "--policy", "uniform", "--gamma", "0.9"]
    arguments += ["--estimator", "is", "--out", "a", "--force"]
    done = CliRunner().invoke(cli, arguments, prog_name="koffline")
    assert done.exit_code == 2
    assert "hdf5 or a part of it, which this command reads, also with --force" in done.stderr
    assert Path("a/log.hdf5").exists()
