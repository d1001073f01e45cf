"""``koffline select`` as a stranger uses it."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from koffline.cli import cli
from koffline.cli.select import read_truths
from koffline.errors import ConfigError
from koffline.report.selection_page import write_ranking
from koffline.report.selection_plots import short_name
from koffline.report.selection_table import print_ranking
from tests.ope.problems import discrete_log
from tests.ope.selection.rankings import ranking

QUICK = ["--set", "steps=40", "--set", "full_replicas=1", "--set", "resampled_replicas=2", "--gamma", "0.9"]
TWO = ["--policies", "uniform", "epsilon:0.5:uniform"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["select", *arguments], prog_name="koffline")


@pytest.fixture
def log(tmp_path: Path) -> str:
    rows = discrete_log()
    path = tmp_path / "log.npz"
    np.savez(
        path,
        observations=rows.observations,
        actions=rows.actions,
        rewards=rows.rewards,
        next_observations=rows.next_observations,
        terminals=rows.terminated,
        timeouts=rows.truncated,
    )
    return str(path)


def test_json_is_one_object_with_every_policy_and_pair(log):
    policies = ["--policies=uniform", "epsilon:0.5:uniform"]
    done = run(log, *policies, "--truths", "-1.5", "2", "--threshold", "0", "--json", *QUICK)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert {policy["name"] for policy in found["policies"]} == {"uniform", "epsilon:0.5:uniform"}
    assert {policy["truth"] for policy in found["policies"]} == {-1.5, 2.0}
    assert len(found["comparisons"]) == 1
    assert len(found["metrics"]["regret_at_k"]) == 2


def test_table_and_report(log, tmp_path):
    out = tmp_path / "choice"
    done = run(log, *TWO, "--out", str(out), *QUICK)
    assert done.exit_code == 0, done.output
    assert "May be the best" in done.output
    assert "Against the truth" not in done.output
    assert {path.name for path in out.iterdir()} == {"plots", "ranking.json", "report.html", "run.json"}
    again = run(log, *TWO, "--out", str(out), *QUICK)
    assert again.exit_code == 2
    assert "is not empty" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "uniform"], "--policies names 1 policy"),
        (["--policies", "uniform", "uniform"], "names 'uniform' twice"),
        ([*TWO, "--truths", "1"], "--truths gives 1 values for 2 policies"),
        ([*TWO, "--truths", "1", "x"], "no finite number"),
        ([*TWO, "--top-k", "0"], "--top-k is 0"),
        ([*TWO, "--set", "step=3"], "did you mean 'steps'"),
        (["--policies", "uniform", "nothing.d3"], "there is no such file"),
        ([], "Missing option '--policies'"),
        (["--policies", "--json"], "Missing option '--policies'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(log, arguments, message):
    done = run(log, "--gamma", "0.9", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_truths_from_files(tmp_path):
    names = ("a", "b")
    table, listed, one = tmp_path / "t.json", tmp_path / "l.json", tmp_path / "one.json"
    table.write_text(json.dumps({"b": 2.0, "a": {"value": 1.0}, "other": 3.0}))
    listed.write_text("[1, 2]")
    one.write_text(json.dumps({"value": 5.0, "standard_error": 0.1}))
    assert read_truths((str(table),), names) == {"a": 1.0, "b": 2.0}
    assert read_truths((str(listed),), names) == {"a": 1.0, "b": 2.0}
    assert read_truths((str(one), "7"), names) == {"a": 5.0, "b": 7.0}
    with pytest.raises(ConfigError, match="no value for 'c'"):
        read_truths((str(table),), ("a", "c"))
    listed.write_text("[1, ")
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_truths((str(listed),), names)


def test_the_page_says_everything_and_loads_nothing(tmp_path):
    page = write_ranking(ranking(), tmp_path / "out", "koffline select <x>").read_text()
    assert "runs/a/model.d3" in page
    assert "2 policies: runs/a/model.d3, runs/b/model.d3" in page
    assert "koffline select &lt;x&gt;" in page
    assert "Only &lt;few&gt; episodes." in page
    assert page.count("<svg") == 3
    assert "http" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    ).replace("https://matplotlib.org", "")
    plain = write_ranking(ranking(with_truths=False), tmp_path / "plain", "").read_text()
    assert "Against the truth" not in plain
    assert plain.count("<svg") == 2


def test_the_table_keeps_brackets_and_names(capsys):
    print_ranking(ranking())
    printed = capsys.readouterr().out
    assert "Compared on [the same] episodes." in printed
    assert "regret @1 0.6, @2 0, @3 0" in printed
    assert "false accepts 0, false rejects 0 at 2.5" in printed
    assert "2 of 3 pairs differ significantly" in printed


def test_a_ranking_without_intervals_is_shown_too(tmp_path, capsys):
    bare = [dataclasses.replace(policy, interval=None) for policy in ranking().policies]
    found = dataclasses.replace(ranking(), policies=tuple(bare), comparisons=())
    page = write_ranking(found, tmp_path / "out", "").read_text()
    print_ranking(found)
    said = "Which policies differ was not judged."
    assert said in page
    assert said in capsys.readouterr().out
    assert page.count("<svg") == 2


def test_names_are_shortened_where_they_do_not_differ():
    assert short_name("epsilon:0.1:some/folder/policy.npz") == "epsilon:0.1:policy.npz"
    assert short_name("package.module:name") == "package.module:name"
    assert len(short_name("x" * 80)) == 36
