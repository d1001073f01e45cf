"""A ranking from the command line, with its page."""

import json

import pytest
from click.testing import CliRunner, Result

from koffline.cli import cli
from koffline.data.sources import write_transitions
from tests.ope.problems import discrete_log
from tests.refusals import assert_refused

QUICK = ["--set", "steps=40", "--set", "full_replicas=1", "--set", "resampled_replicas=2", "--gamma", "0.9"]
TWO = ["--policies", "uniform", "epsilon:0.5:uniform"]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("log") / "log.npz")
    write_transitions(discrete_log(), path, None, False)
    return path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["select", *arguments], prog_name="koffline")


def test_json_is_one_object_with_every_policy_and_pair(log) -> None:
    done = run(log, *TWO, "--truths", "-1.5", "2", "--json", *QUICK)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert {policy["name"] for policy in found["policies"]} == {"uniform", "epsilon:0.5:uniform"}
    assert {policy["truth"] for policy in found["policies"]} == {-1.5, 2.0}
    assert len(found["comparisons"]) == 1
    assert len(found["metrics"]["regret_at_k"]) == 2


def test_table_and_report(log, tmp_path) -> None:
    out = tmp_path / "choice"
    done = run(log, *TWO, "--out", str(out), *QUICK)
    assert done.exit_code == 0, done.output
    assert "May be the best" in done.output
    assert "Against the truth" not in done.output
    assert {path.name for path in out.iterdir()} == {"plots", "ranking.json", "report.html", "run.json"}
    assert_refused(run(log, *TWO, "--out", str(out), *QUICK), "is not empty")
    page = (out / "report.html").read_text(encoding="utf-8")
    known = ("www.w3.org", "purl.org", "creativecommons.org", "matplotlib.org")  # it loads nothing
    assert all(any(name in word for name in known) for word in page.split() if "http" in word)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "uniform"], "--policies names uniform; give two or more"),
        (["--policies", "uniform", "uniform"], "each once"),
        ([*TWO, "--truths", "1", "x"], "'x' is not a valid float"),
        ([*TWO, "--set", "step=3"], "did you mean 'steps'"),
        (["--policies", "--json"], "Missing option '--policies'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(log, arguments, message) -> None:
    assert_refused(run(log, "--gamma", "0.9", *arguments), message)
