"""Sweeps in several processes and on Ray: the same numbers, also after kill -9."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from koffline.cli import cli
from koffline.train.sweep_plan import make_plan
from koffline.train.sweep_run import files_of, is_archive, train_packed, unpack_runs
from tests.train.small_runs import metric_files
from tests.train.sweep_helpers import GRID, run_folders, same_runs, write_config

LONG = {"n_steps": 600, "n_steps_per_epoch": 20}


def arguments(config, out, seeds, *options):
    grid = ["--grid", GRID, "--seeds", str(seeds), "--metric", "td_error"]
    return ["sweep", config, *grid, "--out", str(out), *options]


def in_this_process(*options):
    done = CliRunner().invoke(cli, arguments(*options))
    assert done.exit_code == 0, done.stderr


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_a_killed_sweep_goes_on_and_is_the_same_to_the_bit(tmp_path: Path) -> None:
    config = write_config(tmp_path, **LONG)
    out, whole = tmp_path / "killed", tmp_path / "whole"
    command = [sys.executable, "-m", "koffline", *arguments(config, out, 2, "--workers", "2")]
    driver = subprocess.Popen(command, cwd=Path(__file__).parents[2], stderr=subprocess.PIPE)
    try:
        wait_for(lambda: any((out / "runs").glob("*/checkpoint.pt")))
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.communicate()
    results = sorted((out / "runs").glob("*.json"))
    begun = [folder for folder in run_folders(out) if (folder / "checkpoint.pt").exists()]
    assert begun
    assert len(results) < 4
    wait_for(lambda: not any(locked(folder / ".run.json.lock") for folder in run_folders(out)))
    before = {path: path.stat().st_mtime_ns for path in results}
    in_this_process(config, out, 2)
    assert {path: path.stat().st_mtime_ns for path in results} == before
    in_this_process(config, whole, 2)
    assert same_runs(out, whole)
    assert summary_of(out) == summary_of(whole)


def test_workers_and_one_process_give_the_same(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    in_this_process(config, tmp_path / "two", 1, "--workers", "2")
    in_this_process(config, tmp_path / "one", 1)
    assert same_runs(tmp_path / "one", tmp_path / "two")


def test_on_ray_the_runs_come_back_whole(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    config = write_config(tmp_path)
    in_this_process(config, tmp_path / "ray", 1, "--ray", "local", "--workers", "2")
    in_this_process(config, tmp_path / "one", 1)
    assert same_runs(tmp_path / "ray", tmp_path / "one")
    assert not (tmp_path / "ray" / "packed").exists()
    for ours, theirs in zip(run_folders(tmp_path / "one"), run_folders(tmp_path / "ray"), strict=True):
        assert (ours / "config.yaml").read_text() == (theirs / "config.yaml").read_text()
        source = json.loads((theirs / "run.json").read_text())["data"]["source"]
        assert source == yaml.safe_load((ours / "config.yaml").read_text())["data"]["source"]
    # What came back is a sweep like any other.
    in_this_process(config, tmp_path / "ray", 2)
    assert len(run_folders(tmp_path / "ray")) == 4


def test_archives_that_were_not_unpacked_are_found(tmp_path: Path) -> None:
    """As they lie when the driver is killed between a result's arrival and its unpacking."""
    plan = make_plan(write_config(tmp_path), seeds=2)
    packed, runs = tmp_path / "packed", tmp_path / "runs"
    packed.mkdir()
    first, second = plan.runs
    files = files_of(first.config)
    originals = tuple(str(file.path) for file in files)
    train_packed(packed / f"{first.name}.zip", first.name, first.config, "cpu", originals, *files)
    assert is_archive(packed / f"{first.name}.zip")
    (packed / f"{second.name}.zip").write_bytes(b"half a file")
    (runs / first.name).mkdir(parents=True)
    (runs / first.name / "old.csv").write_text("of a run that did not end")
    unpack_runs(packed, runs)
    assert list(packed.iterdir()) == []
    assert sorted(path.name for path in runs.iterdir()) == [first.name, f"{first.name}.json"]
    assert not (runs / first.name / "old.csv").exists()
    assert len(metric_files(runs / first.name)) > 1


def summary_of(out: Path) -> object:
    """Without the clock."""
    content = json.loads((out / "summary.json").read_text())
    return [{k: v for k, v in part.items() if k != "seconds"} for part in content["settings"]]


def locked(path: Path) -> bool:
    """Whether a worker of the killed driver still trains there."""
    import fcntl

    with contextlib.suppress(FileNotFoundError), path.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def wait_for(look, seconds: float = 120.0):
    end = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)
