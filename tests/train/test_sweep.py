"""``koffline sweep``: what it leaves, goes on with, refuses, and how it takes
failures.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import koffline.train.run
import koffline.train.sweep
from koffline.data.sources import write_transitions
from koffline.errors import DataError
from koffline.store import write_record
from tests.refusals import assert_refused, run_cli
from tests.train.small_runs import check_equal, make_config, make_log, write_log

RATE = "algo.params.learning_rate"
GRID = f"{RATE}=0.001,0.01"
GAMMA = ("--set", "algo.params.gamma=0.5")


def write_config(folder: Path, **train: Any) -> str:
    """A config file of a tiny algorithm over a log beside it."""
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(make_config(write_log(folder), **train)))
    return str(path)


def run_folders(out: Path) -> list[Path]:
    return sorted(path for path in (out / "runs").iterdir() if path.is_dir())


@pytest.fixture
def config(tmp_path):
    return write_config(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A sweep of real runs and what was said."""
    folder = tmp_path_factory.mktemp("whole")
    return folder / "sweep", sweep(write_config(folder), folder / "sweep")


@pytest.fixture
def trained(monkeypatch):
    """A trainer that only writes model and record; it notes whom it trained, fails
    where it is told to.
    """
    calls = []

    def train(config, out, *, device, resume):
        rate = config.algo.params["learning_rate"]
        seed = config.train.seed
        calls.append((rate, seed))
        error = train.errors.get((rate, seed))
        if error is not None:
            raise error
        metrics = {"td_error": rate + seed, "average_value": 1.0}
        out.mkdir(parents=True, exist_ok=True)
        (out / "model_9.d3").write_bytes(b"")
        ended = {
            "finished": "today",
            "model": "model_9.d3",
            "metrics": metrics,
            "seconds": 1.0,
        }
        write_record(out, {"kind": "train", "config": config.resolved(), **ended})

    train.calls = calls
    train.errors = {}
    monkeypatch.setattr(koffline.train.sweep, "train", train)
    return train


def sweep(config, out, *options, grid=GRID, seeds=2, metric="td_error"):
    return run_cli(
        "sweep",
        config,
        "--grid",
        grid,
        "--seeds",
        seeds,
        "--metric",
        metric,
        "--out",
        out,
        *options,
    )


def test_real_runs_leave_folders_and_a_summary(whole):
    out, done = whole
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    assert "td_error (less is better), 2 seeds" in done.stdout
    names = ["best.yaml", "run.json", "runs", "summary.json", "summary.md"]
    assert sorted(path.name for path in out.iterdir()) == names
    summary = json.loads((out / "summary.json").read_text())
    last = []
    for folder in run_folders(out):
        assert (folder / "model_25.d3").exists()
        seed = yaml.safe_load((folder / "config.yaml").read_text())["train"]["seed"]
        assert f"-seed{seed}-" in folder.name
        last.append(
            float((folder / "td_error.csv").read_text().splitlines()[-1].split(",")[2])
        )
    assert len(set(last)) == 4  # seeds and rates do matter
    scores = [score for setting in summary["settings"] for score in setting["scores"]]
    assert sorted(last) == pytest.approx(sorted(scores))
    best = yaml.safe_load((out / "best.yaml").read_text())
    assert best["algo"]["params"]["learning_rate"] == float(
        summary["settings"][0]["values"]["learning_rate"]
    )


def test_only_what_is_not_there_yet_is_trained(config, tmp_path, trained):
    """One folder serves any grid, spelling, settings and log; the summary is that of
    the last command.
    """
    out = tmp_path / "sweep"
    log = tmp_path / "log_discrete.hdf5"

    def newly_trained(*options, **changes):
        before = len(trained.calls)
        assert sweep(config, out, *options, **changes).exit_code == 0
        return trained.calls[before:]

    four = [(0.001, 0), (0.001, 1), (0.01, 0), (0.01, 1)]
    assert newly_trained() == four
    assert newly_trained() == []
    assert newly_trained(metric="average_value") == []
    assert "average_value (more is better)" in (out / "summary.md").read_text()
    assert newly_trained(grid=f"{RATE}=1e-2,0.1", seeds=3) == [
        (0.01, 2),
        (0.1, 0),
        (0.1, 1),
        (0.1, 2),
    ]
    assert len(json.loads((out / "summary.json").read_text())["settings"]) == 2
    assert newly_trained("--data", log.rename(tmp_path / "moved.hdf5")) == []
    assert newly_trained("--data", tmp_path / "moved.hdf5", *GAMMA) == four
    write_transitions(make_log(seed=5), Path(write_log(tmp_path)), force=True)
    assert newly_trained() == four
    assert len(run_folders(out)) == 16
    for folder in run_folders(out):
        (folder / "model_9.d3").unlink()
    assert newly_trained() == four


def test_one_broken_run_does_not_lose_the_others(config, tmp_path, trained):
    out = tmp_path / "sweep"
    trained.errors[0.001, 1] = DataError("the disk is full; make room")
    trained.errors[0.01, 0] = ZeroDivisionError("by zero")
    done = sweep(config, out, seeds=3)
    assert done.exit_code == 2
    assert len(trained.calls) == 6
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: 2 of 6 runs failed, learning_rate=0.001-seed1-")
    assert line.endswith(
        f"first: the disk is full; make room; see {out}/summary.json, the same command"
        " runs them again"
    )
    assert "2 of 3" in done.stdout
    first, second = json.loads((out / "summary.json").read_text())["failures"]
    assert (first["reason"], first["trace"]) == ("the disk is full; make room", "")
    assert re.fullmatch(
        r"ZeroDivisionError at test_sweep.py:\d+: by zero", second["reason"]
    )
    assert "in train" in second["trace"]
    trained.errors.clear()
    done = sweep(config, out, seeds=3)
    assert (done.exit_code, trained.calls[6:]) == (0, [(0.001, 1), (0.01, 0)])


def test_divergence_is_a_result(tmp_path):
    """Real: a learning rate of 1e30 leaves no finite weight, and `train` says so; it is
    not tried again.
    """
    out = tmp_path / "sweep"
    config = write_config(tmp_path)
    for _ in range(2):
        done = sweep(config, out, grid=f"{RATE}=1e30,0.001")
        assert done.exit_code == 0, done.stderr
        summary = json.loads((out / "summary.json").read_text())
        assert [part["diverged"] for part in summary["settings"]] == [0, 2]
        assert summary["failures"] == []
    assert json.loads((out / "run.json").read_text())["found"] == 4


def test_an_interrupted_sweep_goes_on_and_is_the_same_to_the_bit(
    config, tmp_path, whole, monkeypatch
):
    """In the middle of the second run, whose first epochs are not trained again."""
    out = tmp_path / "sweep"
    saved = []
    save = koffline.train.run.save_state

    def save_or_end(*arguments):
        save(*arguments)
        saved.append(arguments)
        if len(saved) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(koffline.train.run, "save_state", save_or_end)
    done = sweep(config, out)
    assert done.exit_code == 130
    assert (
        done.stderr
        == f"interrupted; what is trained is in {out}/runs: the same command goes on\n"
    )
    before = finished(out)
    assert len(before) == 1
    assert sweep(config, out).exit_code == 0
    assert len(saved) == 4 * 3
    assert before.items() <= finished(out).items()
    for resumed, other in zip(run_folders(out), run_folders(whole[0]), strict=True):
        assert resumed.name == other.name
        check_equal(other, resumed)
    settings = [
        json.loads((folder / "summary.json").read_text())["settings"]
        for folder in (out, whole[0])
    ]
    assert settings[0] == settings[1]


def finished(out: Path) -> dict[Path, int]:
    """Records of the runs that have ended, and when."""
    records = (out / "runs").glob("*/run.json")
    return {
        path: path.stat().st_mtime_ns
        for path in records
        if json.loads(path.read_text())["finished"]
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--grid", f"{RATE}=0.001,1e-3"],
            "the same run twice (learning_rate=0.001 and learning_rate=1e-3)",
        ),
        (["--ray", "127.0.0.1:1"], "no Ray cluster at"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    config, tmp_path, options, message
):
    out = tmp_path / "sweep"
    done = run_cli(
        "sweep", config, "--out", out, "--seeds", 1, "--metric", "td_error", *options
    )
    assert_refused(done, message)
    assert not out.exists()


def test_folders_of_others_are_left_alone(config, tmp_path, trained):
    out = tmp_path / "other"
    (out / "runs" / "precious").mkdir(parents=True)
    refusal = (
        f"error: {out} holds something that is not a sweep; choose another --out\n"
    )
    for record in ("{}", "half a fi"):
        assert sweep(config, out, "--force").stderr == refusal
        (out / "run.json").write_text(record)
        assert sweep(config, out, "--force").stderr == refusal
    assert sorted(path.name for path in out.rglob("*")) == [
        "precious",
        "run.json",
        "runs",
    ]
    assert trained.calls == []
