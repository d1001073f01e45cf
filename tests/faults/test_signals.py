"""Terminations are heard, and clean up."""

import signal
import subprocess
import sys

import pytest

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


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_transitions(make_log(), tmp_path / "log.hdf5")
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
