"""``koffline diagnose`` as a stranger uses it."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from koffline.cli import cli
from koffline.data.sources import write_transitions
from koffline.ope.diagnose import diagnosing
from koffline.ope.diagnose.findings import describe_action, describe_place
from tests.ope.problems import discrete_log

MODEL = (
    "def q(states, actions):\n    return states[:, 0] + actions\n\ndef v(states):\n    return states[:, 0]\n"
)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["diagnose", *arguments], prog_name="koffline")


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("values_here.py").write_text(MODEL)
    write_transitions(discrete_log(), "log.npz", None, False)
    return "log.npz"


BASE = ("--policy", "uniform", "--model", "values_here:q", "--gamma", "0.9")


def test_table_and_report(log) -> None:
    done = run(log, *BASE, "--out", "why")
    assert done.exit_code == 0, done.output
    for part in (
        "rejected",
        "power",
        "kernel loss",
        "coverage",
        "report: why/report.html",
        "not known which",
    ):
        assert part in done.output
    assert {path.name for path in Path("why").iterdir()} == {
        "plots",
        "diagnosis.json",
        "report.html",
        "run.json",
    }
    assert {path.name for path in Path("why/plots").iterdir()} == {
        f"{name}.png" for name in ("map", "regions", "by_value", "by_step", "residuals", "coverage")
    }
    page = Path("why/report.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 6
    assert "http://" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )
    again = run(log, *BASE, "--out", "why")
    assert again.exit_code == 2
    assert "--force" in again.output


def test_a_report_that_fails_leaves_nothing(log, monkeypatch) -> None:
    from koffline.report import diagnosis_page

    def broken(*arguments: object, **named: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(diagnosis_page, "render", broken)
    done = run(log, *BASE, "--out", "why")
    assert done.exit_code == 2
    assert not Path("why").exists()
    assert not list(Path().glob(".why*"))


def test_json_is_one_object_and_repeats(log) -> None:
    first, second = (run(log, *BASE, "--json", "--seed", "3") for _ in range(2))
    assert first.exit_code == 0, first.output
    found, again = json.loads(first.stdout), json.loads(second.stdout)
    for result in (found, again):
        del result["seconds"], result["test"]["seconds"]
    assert found == again
    assert found["model"] == "values_here:q"
    assert len(found["regions"]) <= 5


def test_own_estimators_are_cross_fitted(log) -> None:
    quick = ("--set", "steps=40", "--set", "full_replicas=1", "--json", "--gamma", "0.9")
    done = run(log, "--policy", "uniform", "--model", "fqe", "--cross-fit", "3", *quick)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["model"] == "fqe (cross-fitted, 3 folds)"
    assert found["test"]["held_out"] is True
    assert found["shown"]


def test_state_functions_need_to_know_who_acted(log) -> None:
    arguments = (log, "--policy", "uniform", "--model", "values_here:v", "--gamma", "0.9")
    refused = run(*arguments)
    assert refused.exit_code == 2
    assert "--on-policy" in refused.output
    assert run(*arguments, "--on-policy", "--method", "gamma", "--window", "2").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--level", "0.95"), "chance of a false alarm"),
        (("--gamma", "1.5"), "between 0 and 1"),
        (("--regions", "0"), "--regions is 0"),
        (("--cross-fit", "2"), "--cross-fit is for the models kloss and fqe"),
        (("--set", "steps=5"), "--set is for the models kloss and fqe"),
        (("--model", "values_here:nothing"), "has no 'nothing'"),
        (("--model", "missing.d3"), "no such file"),
        (("--model", "kloss", "--set", "stepps=5"), "unknown option 'stepps'"),
        (("--model", "kloss", "--cross-fit", "50"), "fewer than 50 folds"),
        (("--trained-on", "log.npz"), "was fitted to 100% of these rows"),
        (("--method", "magic"), "magic"),
        (("--seed", "-1"), "--seed is -1"),
        (("--window", "0"), "window is 0"),
    ],
)
def test_bad_input_is_one_line(log, arguments, message) -> None:
    done = run(log, *BASE, *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.output


def test_training_rows_can_be_allowed(log) -> None:
    done = run(log, *BASE, "--trained-on", log, "--allow-training-rows", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["test"]["held_out"] is False


def test_what_a_model_prints_stays_out_of_the_result(log) -> None:
    Path("loud_values.py").write_text("print('hello')\n" + MODEL)
    done = run(log, "--policy", "uniform", "--model", "loud_values:q", "--gamma", "0.9", "--json")
    assert json.loads(done.stdout)["model"] == "loud_values:q"


def test_help_shows_examples() -> None:
    done = run("--help")
    assert done.exit_code == 0
    assert "koffline diagnose fresh.hdf5" in done.output
    assert diagnosing.__doc__


def test_places_in_few_characters() -> None:
    assert describe_place(np.array([1.23456, -0.5])) == "(1.23, -0.5)"
    assert describe_place(np.arange(8.0)) == "(0, 1, 2, 3, 4, 5, …)"
    assert describe_action(None) == ""
    assert describe_action(2) == "action 2"
    assert describe_action(np.array([0.5])) == "action (0.5)"
