"""``koffline diagnose`` as a stranger uses it."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from koffline.cli import cli
from koffline.data.sources import write_transitions
from tests.ope.problems import discrete_log
from tests.refusals import assert_refused

MODEL = "print('hello')\ndef q(s, a):\n    return s[:, 0] + a\n\ndef v(s):\n    return s[:, 0]\n"
BASE = ("--policy", "uniform", "--model", "values_here:q", "--gamma", "0.9")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["diagnose", *arguments], prog_name="koffline")


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("values_here.py").write_text(MODEL)
    write_transitions(discrete_log(), "log.npz", None, False)
    return "log.npz"


def test_table_and_report(log) -> None:
    done = run(log, *BASE, "--out", "why")
    assert done.exit_code == 0, done.output
    for part in (
        "rejected", "power", "kernel loss", "coverage", "report: why/report.html", "not known which"
    ):  # fmt: skip
        assert part in done.output
    assert {path.name for path in Path("why").iterdir()} == {
        "plots", "diagnosis.json", "report.html", "run.json"
    }  # fmt: skip
    assert {path.stem for path in Path("why/plots").iterdir()} == {
        "map", "by_value", "by_step", "residuals", "coverage"
    }  # fmt: skip
    assert Path("why/report.html").read_text(encoding="utf-8").count("<svg") == 5
    assert_refused(run(log, *BASE, "--out", "why"), "--force")


def test_own_estimators_are_cross_fitted(log) -> None:
    quick = ("--set", "steps=40", "--set", "full_replicas=1", "--json", "--gamma", "0.9")
    done = run(log, "--policy", "uniform", "--model", "fqe", "--cross-fit", "3", *quick)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["model"] == "fqe (cross-fitted, 3 folds)"
    assert found["test"]["held_out"] is True
    assert found["shown"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--level", "0.95"), "chance of a false alarm"),
        (("--set", "steps=5"), "--set is for the models kloss and fqe"),
        (("--model", "values_here:nothing"), "has no 'nothing'"),
        (("--model", "kloss", "--set", "stepps=5"), "unknown option 'stepps'"),
        (("--model", "kloss", "--cross-fit", "50"), "folds is 50 for a log"),
        (("--trained-on", "log.npz"), "was fitted to 100% of these rows"),
    ],
)
def test_bad_input_is_one_line(log, arguments, message) -> None:
    assert_refused(run(log, *BASE, *arguments), message)
