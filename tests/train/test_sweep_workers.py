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
from tests.train.sweep_helpers import GRID, run_folders, same_runs, write_config

LONG = {"n_steps": 300, "n_steps_per_epoch": 20}


def arguments(config, out, seeds, *options):
    grid = ["--grid", GRID, "--seeds", str(seeds), "--metric", "td_error"]
    return ["sweep", config, *grid, "--out", str(out), *options]


def in_this_process(*options):
    done = CliRunner().invoke(cli, arguments(*options))
    assert done.exit_code == 0, done.stderr


@pytest.mark.slow  # a killed run is proved in test_resume, what is left of a sweep in test_sweep
@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_a_killed_sweep_goes_on_and_is_the_same_to_the_bit(tmp_path: Path) -> None:
    config = write_config(tmp_path, **LONG)
    out, whole = tmp_path / "killed", tmp_path / "whole"
    command = [sys.executable, "-m", "koffline", *arguments(config, out, 2, "--workers", "2")]
    driver = subprocess.Popen(command, cwd=Path(__file__).parents[2], stderr=subprocess.PIPE)
    try:
        wait_for(lambda: finished(out) and len(checkpoints(out)) > len(finished(out)))
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.communicate()
    wait_for(lambda: not any(locked(folder / ".run.json.lock") for folder in run_folders(out)))
    before = finished(out)
    assert 0 < len(before) < 4
    in_this_process(config, out, 2)
    assert before.items() <= finished(out).items()
    in_this_process(config, whole, 2)
    assert same_runs(out, whole)
    assert settings_of(out) == settings_of(whole)


@pytest.mark.slow  # unpacking and sources are proved below, Ray itself in tests/jobs
def test_on_ray_the_runs_come_back_whole(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    config = write_config(tmp_path)
    in_this_process(config, tmp_path / "ray", 1, "--ray", "local", "--workers", "2")
    in_this_process(config, tmp_path / "one", 1)
    assert same_runs(tmp_path / "ray", tmp_path / "one")
    for ours, theirs in zip(run_folders(tmp_path / "one"), run_folders(tmp_path / "ray"), strict=True):
        assert (ours / "config.yaml").read_text() == (theirs / "config.yaml").read_text()
        source = json.loads((theirs / "run.json").read_text())["data"]["source"]
        assert source == yaml.safe_load((ours / "config.yaml").read_text())["data"]["source"]
    # What came back is a sweep like any other.
    in_this_process(config, tmp_path / "ray", 2)
    assert len(run_folders(tmp_path / "ray")) == 4


def settings_of(out: Path) -> object:
    return json.loads((out / "summary.json").read_text())["settings"]


def checkpoints(out: Path) -> list[Path]:
    return list((out / "runs").glob("*/checkpoint.pt"))


def finished(out: Path) -> dict[Path, int]:
    """Records of the runs that have ended, and when."""
    found = {}
    for path in (out / "runs").glob("*/run.json"):
        if json.loads(path.read_text())["finished"]:
            found[path] = path.stat().st_mtime_ns
    return found


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
