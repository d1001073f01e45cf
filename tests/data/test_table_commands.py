"""What columns mean, and tables on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from koffline.data.table.mapping import TableMapping
from koffline.data.table.roles import resolved
from koffline.data.table.values import Problems
from koffline.errors import DataError
from tests.data.table_rows import shuffled, walk, write
from tests.refusals import assert_refused, run_cli

LEAST = {"observations": "x_*", "action": "a", "reward": "r"}
NAMES = ("x_10", "x_2", "r", "a", "x_1", "obs[0]", "obs[1]", "t", "next_x_1", "next_x_2", "next_x_10")


def roles(names=NAMES, **changes):
    problems = Problems("log.csv")
    found, _ = resolved(TableMapping(**{**LEAST, **changes}), names, problems)
    problems.refuse()
    return found


@pytest.mark.parametrize(
    ("names", "observations", "found"),
    [
        (NAMES, "x_*", ("x_1", "x_2", "x_10")),
        (NAMES, ["x_2", "x_*", "t"], ("x_2", "x_1", "x_10", "t")),
        (NAMES, "t, x_?", ("t", "x_1", "x_2")),
        (NAMES, "obs[*]", ("obs[0]", "obs[1]")),
        (("x*", "x1", "a", "r"), "x*", ("x*",)),
    ],
)
def test_patterns(names, observations, found):
    """In natural order, each column once; a name is a name first."""
    assert roles(names, observations=observations).observations == found


def test_a_pattern_takes_no_column_with_another_role():
    names = [name for name in NAMES if "obs" not in name]
    found = roles(names, observations="*", episode="t", next_observations="next_*", impute={"x_1": 1, "": 0})
    assert found.observations == ("x_1", "x_2", "x_10")
    assert found.next_observations == ("next_x_1", "next_x_2", "next_x_10")
    assert dict(found.impute)["x_1"] == 1
    assert dict(found.impute)["next_x_10"] == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"behavior_probability": "p", "behavior_log_probability": "q"}, "keep one"),
        ({"action_names": ["a", "a"]}, "each once"),
        ({"observations": "y_*"}, r"no column fits observations 'y_\*'"),
        ({"observations": "x_1", "next_observations": "next_*"}, "3 columns are next_observations, 1 obs"),
    ],
)
def test_mistakes(changes, words):
    with pytest.raises(DataError, match=words) as caught:
        roles(**changes)
    assert "\n" not in str(caught.value)


OPTIONS = ["--observations", "x_*", "--action", "a", "--reward", "r", "--episode", "id", "--time", "t"]
OPTIONS += ["--terminal", "done"]


@pytest.fixture
def table(tmp_path):
    return write(shuffled(walk()), tmp_path / "log.parquet")


class TestOptions:
    def test_what_was_done_and_what_is_refused(self, table):
        shown = run_cli("data", "validate", table, *OPTIONS).stdout
        assert "2 rows were left out" in shown
        assert "6 rows, no errors" in shown
        assert_refused(run_cli("data", "validate", table), "--observations 'x_*' --action a --reward r")
        assert_refused(run_cli("data", "validate", table, *OPTIONS, "--weight", "rr"), "did you mean 'r'?")

    def test_the_line_wins_over_the_file(self, table, tmp_path):
        path = tmp_path / "columns.yaml"
        path.write_text("{observations: [x_1], action: a, reward: none, episode: id, time: t}")
        words = ("--mapping", path, "--reward", "r", "--terminal", "done", "--action-names", "right,left")
        shown = json.loads(run_cli("data", "info", table, *words, "--json").stdout)
        assert (shown["rows"], shown["observation_shape"]) == (6, [1])
        assert shown["extra"]["action_names"] == ["right", "left"]

    @pytest.mark.parametrize(("said", "names"), [("20,10", [20, 10]), ("true,false", [True, False])])
    def test_names_of_numbers_and_of_yes_and_no(self, tmp_path, said, names):
        path = write(walk(a=names * 4), tmp_path / "log.parquet")
        shown = run_cli("data", "info", path, *OPTIONS, "--action-names", said, "--json").stdout
        assert json.loads(shown)["extra"]["action_names"] == names


def test_a_policy_is_evaluated_on_the_bundled_table():
    datasets = Path(__file__).parents[2] / "datasets"
    truth = json.loads((datasets / "cartpole_truth.json").read_text())["value"]
    result = run_cli(
        *("evaluate", datasets / "tables" / "cartpole.parquet", "--policy", datasets / "cartpole_policy.npz"),
        *("--mapping", datasets / "tables" / "cartpole.yaml"),
        *("--estimator", "lstdq", "--set", "steps=1000", "--json"),
    )
    found = json.loads(result.stdout)
    # the truth is that of another log's start states: a difference far below the interval's width
    assert found["interval"]["low"] < truth < found["interval"]["high"]
    assert found["interval"]["high"] - found["interval"]["low"] < 0.2 * truth
    assert (found["gamma"], found["n_transitions"]) == (0.98, 4349)
