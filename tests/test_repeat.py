"""`koffline repeat`: the record of a run is enough to run it again, and the numbers are compared."""

import json
import subprocess
from pathlib import Path

import pytest

from koffline.cli import repeat as repeating
from koffline.data.sources import write_transitions
from koffline.store.run_record import digest_of
from tests.refusals import assert_refused, run_cli
from tests.train.small_runs import make_log

GIVEN = ("evaluate", "log.hdf5", "--policy", "epsilon:0.1:mine:act", "--gamma", "0.9", "--estimator", "is",
         "--config", "settings.yaml", "--truth", "truth.json", "--out", "a")  # fmt: skip


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """The environments of the commands that ran in this process, in a folder with results in ``a``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    write_transitions(make_log(), tmp_path / "log.hdf5")
    Path("settings.yaml").write_text("steps: 4\nresampled_replicas: 2\n")
    Path("truth.json").write_text('{"value": 1.0}')
    Path("mine.py").write_text("import numpy as np\n\ndef act(s):\n    return np.full((len(s), 2), 0.5)\n")
    assert run_cli(*GIVEN).exit_code == 0
    environments = []

    def run_here(words, env, **_):
        environments.append(env)
        return subprocess.CompletedProcess(words, run_cli(*words[3:]).exit_code)

    monkeypatch.setattr(repeating.subprocess, "run", run_here)
    return environments


def test_numbers_are_the_same_again(ran, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    done = run_cli("repeat", "a", "--yes")
    assert (done.exit_code, done.stdout) == (0, "the same: a and a.repeat\n")
    assert done.stderr.startswith("koffline evaluate log.hdf5 --policy epsilon:0.1:mine:act --gamma 0.9")
    assert ran[0]["OMP_NUM_THREADS"] == "3"


def test_what_differs_is_listed_and_the_exit_code_is_one(ran):
    path = Path("a/estimate.json")
    found = json.loads(path.read_text())
    path.write_text(json.dumps({**found, "value": 77.0, "mine": [1]}))
    Path("a/curve.csv").write_text("step,loss\n1,0.5\n")
    done = run_cli("repeat", "a", "--yes", "--out", "b")
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    assert f"estimate.json value: 77.0, now {found['value']}" in lines
    assert "estimate.json mine 0: 1, now nothing" in lines
    assert "curve.csv 1 1: 0.5, now nothing" in lines
    assert lines[-1] == "not the same: a and b"


def test_nothing_runs_unless_one_agrees(ran):
    assert run_cli("repeat", "a").exit_code != 0
    assert ran == []


def write_record(**changes):
    record = json.loads(Path("a/run.json").read_text())
    record["call"] |= changes
    Path("a/run.json").write_text(json.dumps(record))


REFUSED = {
    "another input": (lambda: Path("truth.json").write_text("{}"), "truth.json is not what the run read"),
    "no input": (lambda: Path("log.hdf5").unlink(), "log.hdf5 is not what the run read"),
    "no command": (lambda: write_record(arguments=[]), "holds no run.json that names its command line"),
    "no record": (lambda: Path("a/run.json").unlink(), "holds no run.json"),
    "results there": (lambda: Path("a.repeat").mkdir(), "a.repeat exists"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_repeated_is_one_line(ran, what):
    change, message = REFUSED[what]
    change()
    assert_refused(run_cli("repeat", "a", "--yes"), message)
    assert ran == []


def test_the_record_names_and_digests_every_input(ran, tmp_path):
    record = json.loads(Path("a/run.json").read_text())
    call = record["call"]
    assert {"log.hdf5", "mine:act", "settings.yaml", "truth.json"} == set(call["inputs"])
    assert call["inputs"]["mine:act"] == digest_of(Path("mine.py"))
    assert (call["directory"], record["kind"], record["seed"]) == (str(tmp_path), "evaluate", 0)
    assert record["settings"]["steps"] == 4
    assert record["seconds"] > 0
    assert {"python", "koffline", "torch", "numpy"} <= set(call["versions"])
