"""``koffline sweep``: what it leaves, goes on with, refuses, and how it takes failures."""

import json
import logging
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

import koffline.train.sweep_run
from koffline.cli import cli
from koffline.data.sources import write_transitions
from koffline.errors import ConfigError, DataError
from koffline.train.run import TrainResult
from koffline.train.sweep import SweepSettings, run_sweep
from koffline.train.sweep_plan import make_plan
from koffline.train.sweep_summary import choose_metric
from tests.train.small_runs import make_log, write_log
from tests.train.sweep_helpers import GRID, RATE, run_folders, write_config


@pytest.fixture
def config(tmp_path):
    return write_config(tmp_path)


@pytest.fixture
def trained(monkeypatch):
    """A trainer that only writes its model; it notes whom it trained, and fails where it is told to."""
    calls = []

    def train(config, out, *, device, resume):
        rate, seed = config.algo.params["learning_rate"], config.train.seed
        calls.append((rate, seed))
        if (error := train.errors.get((rate, seed))) is not None:
            raise error
        out.mkdir(parents=True, exist_ok=True)
        (out / "model_9.d3").write_bytes(b"")
        return TrainResult(out, 9, {"td_error": rate + seed, "average_value": 1.0}, out / "model_9.d3", 1.0)

    train.calls, train.errors = calls, {}
    monkeypatch.setattr(koffline.train.sweep_run, "train", train)
    return train


def call(*arguments):
    return CliRunner().invoke(cli, ["sweep", *map(str, arguments)])


def sweep(config, out, *options, grid=(GRID,), seeds=2):
    grids = [part for axis in grid for part in ("--grid", axis)]
    return call(config, *grids, "--seeds", seeds, "--metric", "td_error", "--out", out, *options)


def lines_of(result):
    return [line for line in result.stderr.splitlines() if line]


def test_real_runs_leave_folders_and_a_summary(config, tmp_path):
    out = tmp_path / "sweep"
    done = sweep(config, out)
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    assert "td_error (less is better), 2 seeds" in done.stdout
    assert sorted(path.name for path in out.iterdir()) == [
        "best.yaml",
        "run.json",
        "runs",
        "summary.json",
        "summary.md",
        "summary.png",
        "sweep.json",
    ]
    folders = run_folders(out)
    assert len(folders) == 4
    summary = json.loads((out / "summary.json").read_text())
    scores = sorted(score for setting in summary["settings"] for score in setting["scores"])
    last = []
    for folder in folders:
        assert (folder / "model_25.d3").exists()
        seed = yaml.safe_load((folder / "config.yaml").read_text())["train"]["seed"]
        assert f"-seed{seed}-" in folder.name
        last.append(float((folder / "td_error.csv").read_text().splitlines()[-1].split(",")[2]))
    assert sorted(last) == pytest.approx(scores)
    assert len(set(last)) == 4  # seeds and rates do matter
    best = yaml.safe_load((out / "best.yaml").read_text())
    assert best["algo"]["params"]["learning_rate"] == float(summary["settings"][0]["values"]["learning_rate"])


def test_finished_runs_are_kept_and_the_grid_may_grow(config, tmp_path, trained):
    out = tmp_path / "sweep"
    assert sweep(config, out).exit_code == 0
    assert len(trained.calls) == 4
    assert sweep(config, out).exit_code == 0
    assert len(trained.calls) == 4
    assert (
        call(config, "--grid", GRID, "--seeds", 2, "--metric", "average_value", "--out", out).exit_code == 0
    )
    assert len(trained.calls) == 4
    assert "average_value (more is better)" in (out / "summary.md").read_text()
    grown = sweep(config, out, grid=[f"{RATE}=0.01,0.1"], seeds=3)
    assert grown.exit_code == 0
    assert trained.calls[4:] == [(0.01, 2), (0.1, 0), (0.1, 1), (0.1, 2)]
    assert len(json.loads((out / "summary.json").read_text())["settings"]) == 2
    assert len(run_folders(out)) == 8


def test_a_result_without_its_model_or_of_half_a_file_is_made_again(config, tmp_path, trained):
    out = tmp_path / "sweep"
    sweep(config, out)
    first, second = sorted((out / "runs").glob("*.json"))[:2]
    (first.with_name(first.stem) / "model_9.d3").unlink()
    second.write_text(second.read_text()[:30])
    assert sweep(config, out).exit_code == 0
    assert len(trained.calls) == 6


def test_force_begins_again(config, tmp_path, trained):
    out = tmp_path / "sweep"
    sweep(config, out)
    (out / "mine.txt").write_text("notes")
    other = ("--set", "algo.params.gamma=0.5")
    refused = sweep(config, out, *other)
    assert refused.exit_code == 2
    assert lines_of(refused) == [
        f"error: {out} is another sweep: algo.params.gamma is 0.99 there and 0.5 here; choose another --out "
        "or begin again with --force"
    ]
    assert len(trained.calls) == 4
    assert sweep(config, out, *other, "--force").exit_code == 0
    assert len(trained.calls) == 8
    assert len(run_folders(out)) == 4
    assert (out / "mine.txt").exists()


def test_another_log_is_another_sweep(config, tmp_path, trained):
    out = tmp_path / "sweep"
    sweep(config, out)
    write_transitions(make_log(seed=5), Path(write_log(tmp_path)), force=True)
    refused = sweep(config, out)
    assert refused.exit_code == 2
    assert "is another sweep: the digest of the log" in refused.stderr
    assert sweep(config, out, "--force").exit_code == 0


def test_one_broken_run_does_not_lose_the_others(config, tmp_path, trained):
    out = tmp_path / "sweep"
    trained.errors[0.001, 1] = DataError("the disk is full; make room")
    trained.errors[0.01, 0] = ZeroDivisionError("by zero")
    done = sweep(config, out, seeds=3)
    assert done.exit_code == 2
    assert len(trained.calls) == 6
    (line,) = lines_of(done)
    assert line.startswith("error: 2 of 6 runs failed, learning_rate=0.001-seed1-")
    assert "first: the disk is full; make room; see" in line
    assert "2 of 3" in done.stdout
    texts = [path.read_text() for path in sorted((out / "errors").iterdir())]
    assert "the disk is full" in texts[0]
    assert "in train" in texts[1]
    assert "ZeroDivisionError: by zero" in texts[1]
    trained.errors.clear()
    done = sweep(config, out, seeds=3)
    assert (done.exit_code, trained.calls[6:]) == (0, [(0.001, 1), (0.01, 0)])
    assert not (out / "errors").exists()


def test_where_every_run_fails_there_is_one_line_and_the_folder_stays_free(config, tmp_path, trained):
    out = tmp_path / "sweep"
    trained.errors.update(
        {(rate, seed): DataError("no such game") for rate in (0.001, 0.01) for seed in (0, 1)}
    )
    done = sweep(config, out)
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = lines_of(done)
    assert "every run failed, learning_rate=0.001-seed0-" in line
    assert line.endswith("first: no such game")
    assert [path.name for path in out.iterdir()] == ["errors"]
    trained.errors.clear()
    assert sweep(config, out, "--set", "algo.params.gamma=0.5").exit_code == 0


def test_divergence_is_a_result(tmp_path):
    """Real: a learning rate of 1e30 leaves no finite weight, and `train` says so."""
    out, config = tmp_path / "sweep", write_config(tmp_path)
    done = sweep(config, out, grid=[f"{RATE}=1e30,0.001"])
    assert done.exit_code == 0, done.stderr
    settings = json.loads((out / "summary.json").read_text())["settings"]
    assert [part["diverged"] for part in settings] == [0, 2]
    diverged = [json.loads(path.read_text()) for path in (out / "runs").glob("*1e+30*.json")]
    assert len(diverged) == 2
    assert json.loads((out / "summary.json").read_text())["failures"] == []
    before = {path: path.stat().st_mtime_ns for path in (out / "runs").glob("*.json")}
    assert sweep(config, out, grid=[f"{RATE}=1e30,0.001"]).exit_code == 0  # and is not tried again
    assert {path: path.stat().st_mtime_ns for path in (out / "runs").glob("*.json")} == before


def test_the_message_of_divergence_is_that_of_train():
    source = Path(koffline.train.run.__file__).read_text(encoding="utf-8")
    assert f'f"{koffline.train.sweep_run._DIVERGED} after step' in source


def test_an_interrupt_keeps_what_is_finished(config, tmp_path, trained):
    out = tmp_path / "sweep"
    trained.errors[0.01, 0] = KeyboardInterrupt()
    done = sweep(config, out)
    assert done.exit_code == 130
    assert lines_of(done) == [f"interrupted; what is trained is in {out}/runs: the same command goes on"]
    trained.errors.clear()
    assert sweep(config, out).exit_code == 0
    assert trained.calls == [(0.001, 0), (0.001, 1), (0.01, 0), (0.01, 0), (0.01, 1)]


def test_warnings_of_many_runs_are_said_once(config, tmp_path, monkeypatch, trained):
    def train(*args, **kwargs):
        logging.getLogger("koffline.train.run").warning("the clock is %s", "wrong")
        print("a careless library")
        return trained(*args, **kwargs)

    monkeypatch.setattr(koffline.train.sweep_run, "train", train)
    done = sweep(config, tmp_path / "sweep")
    assert done.stdout.count("the clock is wrong") == 1
    assert "careless" not in done.stdout
    assert done.stderr.count("a careless library") == 4
    assert logging.getLogger("koffline").propagate


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--grid", "algo.params.gama=1"], "did you mean 'gamma'"),
        (["--grid", "algo.type=dqnn"], "did you mean"),
        (["--seeds", "0"], "seeds is 0"),
        (["--workers", "0"], "workers is 0"),
        (["--data", "nowhere.hdf5"], "nowhere.hdf5"),
        (["--set", "algo.type=cql", "--set", "algo.params={}"], "cql is for continuous actions"),
        (["--metric", "td_eror"], "did you mean 'td_error'"),
        (["--ray", "127.0.0.1:1"], "no Ray cluster at"),
        (["--device", "tpu"], "tpu"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(config, tmp_path, options, message):
    out = tmp_path / "sweep"
    metric = [] if "--metric" in options else ["--metric", "td_error"]
    result = call(config, "--out", out, "--seeds", 1, *metric, *options)
    assert result.exit_code == 2
    (line,) = lines_of(result)
    assert message in line
    assert not out.exists()


def test_folders_of_others_are_left_alone(config, tmp_path, trained):
    out = tmp_path / "other"
    out.mkdir()
    (out / "thesis.tex").write_text("…")
    for option in ("--resume", "--force"):
        result = sweep(config, out, option)
        assert result.exit_code == 2
        assert "holds something that is not a sweep" in result.stderr
    assert [path.name for path in out.iterdir()] == ["thesis.tex"]
    (out / "sweep.json").write_text("{}")
    assert "damaged" in sweep(config, out, "--force").stderr
    assert "is a file" in sweep(config, out / "thesis.tex").stderr
    assert trained.calls == []


def test_from_python_without_a_command(config, tmp_path, trained):
    plan = make_plan(config, [GRID], seeds=2)
    heard = []
    settings = SweepSettings(tmp_path / "sweep", progress=heard.append)
    summary = run_sweep(plan, choose_metric(plan.base, "td_error"), settings)
    assert summary.best.setting.config.algo.params["learning_rate"] == 0.001
    assert summary.best.values == (0.001, 1.001)
    assert [status.done for status in heard] == [0, 1, 2, 3, 4]
    with pytest.raises(ConfigError, match="choose another --out or begin again"):
        run_sweep(
            make_plan(config, [], 1, ["train.n_steps=3"]), choose_metric(plan.base, "td_error"), settings
        )
