"""Terminations are heard, and no result depends on what the clock says."""

import itertools
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner

from koffline.cli import cli
from koffline.cli.repeat import compare_folders, results_of
from koffline.data.sources import write_transitions
from tests.faults.places import content
from tests.train.small_runs import make_log

SIGNALLED = """
import os, signal, sys
import koffline.store.files as files
from koffline.cli import main

number, ears = int(sys.argv.pop()), sys.argv.pop()
signal.signal(signal.SIGINT, signal.SIG_IGN if ears == "deaf" else signal.default_int_handler)
files.flush_to_disk = lambda path: os.kill(os.getpid(), number)  # when the file is written
main()
"""
CONFIG = """
data: {source: log.hdf5}
algo: {type: kloss_dqn, params: {batch_size: 8}}
train: {n_steps: 4, n_steps_per_epoch: 2}
"""


def koffline(*words):
    done = CliRunner().invoke(cli, list(words), prog_name="koffline")
    assert done.exit_code == 0, done.output


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_transitions(make_log(), tmp_path / "log.hdf5")
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


@pytest.mark.parametrize(
    ("number", "ears"),
    [(signal.SIGTERM, "open"), (signal.SIGTERM, "deaf"), (signal.SIGINT, "open")],
    ids=["SIGTERM", "SIGTERM in the background", "SIGINT"],
)
def test_a_termination_cleans_up(place, number, ears):
    (place / "new.npz").write_text("what was there")
    before = content(place)
    words = ["data", "convert", "log.hdf5", "new.npz", "--force", ears, str(int(number))]
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED, *words], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.lstrip()) == (130, "interrupted; nothing was written\n")
    assert content(place) == before


@pytest.fixture
def wild_clock(monkeypatch):
    """Every look at the calendar is hours before or after the last one."""
    jumps = itertools.cycle([0.0, -86_400.0 * 400, 7200.0, -3600.0, 86_400.0 * 4000])
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))


def test_jumps_of_the_clock_change_nothing(place, request):
    words = ("--estimator", "is", "--policy", "uniform", "--gamma", "0.9")
    koffline("evaluate", "log.hdf5", *words, "--out", "evaluated")
    koffline("train", "config.yaml", "--out", "trained")
    koffline("data", "convert", "log.hdf5", "log.npz")
    request.getfixturevalue("wild_clock")
    koffline("evaluate", "log.hdf5", *words, "--out", "again/evaluated")
    koffline("train", "config.yaml", "--out", "again/trained")
    koffline("data", "convert", "log.hdf5", "again/log.npz")
    for name in ("evaluated", "trained"):
        assert results_of(place / name)
        assert compare_folders(place / name, place / "again" / name) == []
    assert (place / "log.npz").read_bytes() == (place / "again" / "log.npz").read_bytes()
