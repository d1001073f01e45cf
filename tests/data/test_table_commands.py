"""Tables on the command line, and the bundled one from its file to a value."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import koffline
from koffline.cli import cli
from koffline.cli.options import requested_mapping
from tests.data.table_rows import shuffled, walk, write
from tests.refusals import assert_refused

DATASETS = Path(__file__).resolve().parents[2] / "datasets"
TABLE, MAPPING = DATASETS / "tables" / "cartpole.parquet", DATASETS / "tables" / "cartpole.yaml"
OPTIONS = ["--observations", "x_*", "--action", "a", "--reward", "r", "--episode", "id", "--time", "t"]
OPTIONS += ["--terminal", "done"]


def run(*words):
    return CliRunner().invoke(
        cli, [str(word) for word in words], prog_name="koffline", catch_exceptions=False
    )


@pytest.fixture
def table(tmp_path):
    return write(shuffled(walk()), tmp_path / "log.parquet")


class TestCommands:
    def test_info_shows_names_of_actions_and_what_was_done(self, table):
        shown = json.loads(run("data", "info", table, *OPTIONS, "--json").stdout)
        assert shown["rows"] == 6
        assert shown["extra"]["action_names"] == ["left", "right"]
        assert any("2 rows were left out" in note for note in shown["notes"])

    def test_validate(self, table):
        result = run("data", "validate", table, *OPTIONS)
        assert result.exit_code == 0
        assert "6 rows, no errors" in result.stdout
        assert_refused(run("data", "validate", table), "--observations 'x_*' --action a --reward r")
        assert_refused(run("data", "validate", table, *OPTIONS, "--weight", "rr"), "did you mean 'r'?")

    def test_names_of_actions_survive_conversion(self, table, tmp_path, monkeypatch):
        monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
        whole = koffline.open_transitions(table, mapping=requested_mapping(dict(_given())))
        names = [tmp_path / name for name in ("log.hdf5", "log.npz", "out.parquet")]
        for target in (*names, "minari:table/walk-v0"):
            assert run("data", "convert", table, target, *OPTIONS).exit_code == 0
            found = koffline.open_transitions(target)
            assert found.metadata.extra["action_names"] == ["left", "right"]
            np.testing.assert_array_equal(found.observations, whole.observations)
            np.testing.assert_array_equal(found.actions, whole.actions)

    def test_shards_of_any_table(self, table, tmp_path):
        result = run("data", "convert", table, tmp_path / "shards", "--shard-rows", 4, *OPTIONS)
        assert result.exit_code == 0
        assert "put together and in time order" in result.stdout
        whole = koffline.open_transitions(table, mapping=requested_mapping(dict(_given())))
        shards = koffline.open_transitions(tmp_path / "shards", lazy=True)
        assert len(shards.shards) == 2
        assert shards.metadata.extra["action_names"] == ["left", "right"]
        assert koffline.open_transitions(tmp_path / "shards").sha256 == whole.sha256


def _given():
    yield from zip(["table_" + word[2:] for word in OPTIONS[::2]], OPTIONS[1::2], strict=True)


class TestOptions:
    def test_the_line_wins_over_the_file(self, tmp_path):
        path = tmp_path / "columns.yaml"
        path.write_text("observations: [x]\naction: a\nreward: r\nbehavior_probability: p\n")
        found = requested_mapping(
            {
                "table_mapping": str(path),
                "table_reward": "q",
                "table_behavior_log_probability": "lp",
                "table_impute": ("mean", "x=zero", "q=0.5"),
                "table_action_names": "left, right",
                "table_observations": (),
                "table_time": None,
            }
        )
        assert (found.observations, found.reward, found.behavior_probability) == (("x",), "q", None)
        assert dict(found.impute) == {"": "mean", "x": "zero", "q": 0.5}
        assert found.action_names == ("left", "right")

    def test_names_of_numbers_and_of_yes_and_no(self, tmp_path):
        doses = write(walk(a=[10, 20] * 4), tmp_path / "doses.parquet")
        shown = run("data", "info", doses, *OPTIONS, "--action-names", "20,10", "--json").stdout
        assert json.loads(shown)["extra"]["action_names"] == [20, 10]
        flags = write(walk(a=[True, False] * 4), tmp_path / "flags.parquet")
        shown = run("data", "info", flags, *OPTIONS, "--action-names", "true,false", "--json").stdout
        assert json.loads(shown)["extra"]["action_names"] == [True, False]


class TestBundled:
    def test_a_policy_is_evaluated_on_it(self, tmp_path):
        truth = json.loads((DATASETS / "cartpole_truth.json").read_text())["value"]
        result = run(
            *("evaluate", TABLE, "--mapping", MAPPING, "--policy", DATASETS / "cartpole_policy.npz"),
            *("--estimator", "lstdq", "--set", "feature_source=random", "--json"),
        )
        found = json.loads(result.stdout)
        # the truth is that of another log's start states: a difference far below the interval's width
        assert found["interval"]["low"] < truth < found["interval"]["high"]
        assert found["interval"]["high"] - found["interval"]["low"] < 0.2 * truth
        assert found["gamma"] == 0.98
        assert found["n_transitions"] == 4349
        again = run("diagnose", TABLE, "--mapping", MAPPING, "--policy", "uniform", "--model", "nothing.pt")
        assert_refused(again, "nothing.pt")
