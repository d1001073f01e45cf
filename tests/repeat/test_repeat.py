"""`koffline repeat`: the record of a run is enough to run it again, and the bytes are compared."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from koffline.cli import cli
from koffline.cli import repeat as repeating
from koffline.cli.repeat import results_of
from koffline.data.sources import write_transitions
from koffline.store.run_record import (
    command_line,
    digest_of,
    start_run,
)
from tests.refusals import assert_refused
from tests.train.small_runs import make_log

QUICK = ("--gamma", "0.9", *(w for s in ("steps=4", "resampled_replicas=2") for w in ("--set", s)))


def koffline(*words):
    return CliRunner().invoke(cli, list(words), prog_name="koffline")


def run(*words):
    done = koffline(*words)
    assert done.exit_code == 0, done.output
    return done


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_transitions(make_log(), tmp_path / "log.hdf5")
    return tmp_path


@pytest.fixture
def here(monkeypatch):
    """The command runs in this process, which has imported everything; what it was given."""
    given = []

    def run_here(words, cwd, env, **_):
        given.append((list(words), cwd, dict(env)))
        before = Path.cwd()
        os.chdir(cwd)
        try:
            done = koffline(*words)
        finally:
            os.chdir(before)
        return subprocess.CompletedProcess(words, done.exit_code, stderr=done.stderr)

    monkeypatch.setattr(repeating, "_python", lambda *_: [])
    monkeypatch.setattr(repeating.subprocess, "run", run_here)
    return given


COMMANDS = {
    "evaluate": ("evaluate", "log.hdf5", "--policy", "uniform", *QUICK, "--out", "runs/a", "--json"),
    "all": ("evaluate", "log.hdf5", "--policy", "uniform", *QUICK, "--estimator", "is,wis", "--out=runs/a"),
    "select": ("select", "log.hdf5", "--policies", "uniform", "epsilon:0.2:uniform", *QUICK, "--out=runs/a"),
    "diagnose": ("diagnose", "log.hdf5", "--policy", "uniform", "--model", "fqe", *QUICK, "--out", "runs/a"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "all" else pytest.mark.slow) for name in COMMANDS]
)
def test_an_answer_is_the_same_again(place, here, name):
    run(*COMMANDS[name])
    assert run("repeat", "runs/a").stdout.startswith("the same: ")
    ((words, directory, _),) = here
    assert directory == place
    assert words[-2:] == ["--out", str(place / "runs" / "a.repeat")]
    pages = [(place / "runs" / folder / "report.html").read_text() for folder in ("a", "a.repeat")]
    assert pages[0] == pages[1]
    assert "runs/a" not in pages[0]


@pytest.fixture
def fake(place, monkeypatch):
    """A folder with the record of an evaluation, and an evaluation that takes no time; what it was given."""
    given = []

    def answer(words, cwd=None, env=None, **_):
        given.append((list(words), cwd, dict(env or {})))
        out = Path(words[-1])
        (out / "plots").mkdir(parents=True)
        (out / "estimate.json").write_text('{"value": 1.0}')
        (out / "plots" / "coverage.png").write_text("a picture")
        write_record(out, tuple(words))
        return subprocess.CompletedProcess(words, 0, stderr="")

    monkeypatch.setattr(repeating, "_python", lambda *_: [])
    monkeypatch.setattr(repeating.subprocess, "run", answer)
    answer(["evaluate", "--out", "runs/a"])
    given.clear()
    write_record()
    return given


def write_record(out="runs/a", words=COMMANDS["evaluate"]):
    with command_line(words):
        record = start_run("evaluate").finish(seed=0, settings={"steps": 4})
        (Path(out) / "run.json").write_text(json.dumps(record))


def change_record(change):
    path = Path("runs/a/run.json")
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def train_config(place, **changes):
    content = {
        "data": {"source": "log.hdf5"},
        "algo": {"type": "kloss_dqn", "params": {"batch_size": 8}},
        "train": {"n_steps": 4, "n_steps_per_epoch": 2},
        **changes,
    }
    (place / "sub").mkdir(exist_ok=True)
    (place / "log.hdf5").rename(place / "sub" / "log.hdf5")
    (place / "sub" / "config.yaml").write_text(yaml.safe_dump(content))


def test_a_training_run(place, here):
    train_config(place)
    run("train", "--device", "cpu", "sub/config.yaml", "--set", "train.seed=3", "--out", "a")
    assert run("repeat", "a").stdout.startswith("the same: ")
    found = results_of(place / "a")
    assert {"config.yaml", "params.json", "model_4.d3", "critic_loss.csv"} <= set(found)
    assert not any(name.startswith("time_") or "checkpoint" in name for name in found)


def test_a_dataset_by_its_manifest(place, here):
    """The manifest is portable: it names its own folder's way to where the command was given."""
    (place / "logs").mkdir()
    run("build", "uniform", "--env", "chain", "--n", "50", "--out", "logs/chain.hdf5")
    entry = json.loads((place / "logs" / "manifest.json").read_text())["chain.hdf5"]
    assert entry["call"]["directory"] == ".."
    assert str(place) not in json.dumps(entry)
    assert run("repeat", "logs/chain.hdf5", "--out", "again").stdout.startswith("the same: ")
    assert (place / "again" / "chain.hdf5").exists()


def test_the_command_line_is_shown_before_it_runs(place, fake):
    change_record(lambda record: record["call"]["arguments"].append("--truth=\x1b[2J"))
    shown = koffline("repeat", "runs/a").stderr.splitlines()[0]
    assert shown.startswith(f"running in {place}: koffline evaluate log.hdf5 --policy uniform --gamma 0.9")
    assert "\x1b" not in shown


def test_what_differs_is_listed_and_the_exit_code_is_one(place, fake):
    (place / "runs" / "a" / "estimate.json").write_text("{}")
    (place / "runs" / "a" / "plots" / "coverage.png").unlink()
    (place / "runs" / "a" / "mine.txt").write_text("")
    done = koffline("repeat", "runs/a")
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    assert lines[:3] == ["differs: estimate.json", "missing: mine.txt", "new: plots/coverage.png"]
    assert lines[3].startswith("not the same: ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda: write_transitions(make_log(seed=1), "log.hdf5", force=True),
            "log.hdf5 is not what the run read",
        ),
        (lambda: Path("log.hdf5").unlink(), "log.hdf5 is gone"),
        (
            lambda: change_record(lambda record: record["call"].update(arguments=["record", "x"])),
            "does not say by which command line",
        ),
        (lambda: Path("runs/a.repeat").mkdir() or Path("runs/a.repeat/x").touch(), "exists already"),
    ],
)
def test_what_cannot_be_repeated_is_one_line(place, fake, change, message):
    change()
    assert_refused(koffline("repeat", "runs/a"), message)
    assert fake == []


@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="of Linux")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: os.mkfifo("0"), "0 is gone from"),
        (lambda: Path("0").symlink_to("/proc/self/pagemap"), "0 is not what the run read"),  # it has no end
    ],
)
def test_what_never_ends_is_not_read(place, fake, make, words):
    """Words of a record may name anything in its directory, as the 0 of --seed 0 in /proc/self/fd."""
    make()
    change_record(lambda record: record["call"]["arguments"].extend(["--seed", "0"]))
    change_record(lambda record: record["call"]["inputs"].update({"0": "1234"}))
    assert_refused(koffline("repeat", "runs/a"), words)
    assert fake == []


def test_numbers_of_threads_are_those_of_the_run(place, fake, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    write_record()
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    run("repeat", "runs/a")
    assert fake[0][2]["OMP_NUM_THREADS"] == "3"


def test_the_record_names_and_digests_every_input(place, monkeypatch):
    monkeypatch.syspath_prepend(place)
    (place / "settings.yaml").write_text("steps: 4\nresampled_replicas: 2\n")
    (place / "mine.py").write_text(
        "import numpy as np\n\ndef act(s):\n    return np.full((len(s), 2), 0.5)\n"
    )
    (place / "truth.json").write_text('{"value": 1.0}')
    run(
        "evaluate", "log.hdf5", "--policy", "epsilon:0.1:mine:act", "--gamma", "0.9",
        "--config", "settings.yaml", "--truth", "truth.json", "--estimator", "is",
        "--out", "a",
    )  # fmt: skip
    record = json.loads((place / "a" / "run.json").read_text())
    call = record["call"]
    assert {"log.hdf5", "mine:act", "settings.yaml", "truth.json"} == set(call["inputs"])
    assert call["inputs"]["mine:act"] == digest_of(place / "mine.py")
    assert (call["directory"], record["kind"], record["seed"]) == (str(place), "evaluate", 0)
    assert record["settings"]["steps"] == 4
    assert record["seconds"] > 0
    assert {"python", "koffline", "torch", "numpy"} <= set(call["versions"])


def test_an_experiment_is_not_compared_with_its_own_repetition(tmp_path):
    call = {"arguments": ["reproduce", "toy"], "directory": str(tmp_path), "inputs": {}}
    (tmp_path / "toy.run.json").write_text(json.dumps({"call": call}))
    (tmp_path / "toy.json.repeat").mkdir()
    for name in ("toy.json", "toy.png", "other.json", "toy.json.repeat/toy.json"):
        (tmp_path / name).write_text("{}")
    made = repeating._read(tmp_path / "toy.json")
    assert results_of(tmp_path, made.names) == ["toy.json", "toy.png"]
