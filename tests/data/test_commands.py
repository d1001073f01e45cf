"""`koffline data …` as a user meets it: stdout, stderr, exit codes."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from koffline.cli import cli
from koffline.data.sources import open_transitions, write_transitions
from koffline.data.transitions import Continuous, Discrete, Metadata
from tests.data.logs import roll_out
from tests.refusals import assert_refused

ENDS = ("truncated", "terminated") * 6
LENGTHS = (5, 3) * 6


@pytest.fixture
def folder(tmp_path, monkeypatch):
    log = roll_out(ENDS, LENGTHS).transitions(metadata=Metadata(gamma=0.9, notes=("made for a test",)))
    write_transitions(log, tmp_path / "log.hdf5")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments):
    result = CliRunner().invoke(cli, ["data", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


class TestInfo:
    def test_a_table_for_people(self, folder):
        result = run("info", "log.hdf5")
        assert result.exit_code == 0
        assert result.stderr == ""
        for text in ("48", "12", "Discrete(3)", "5 steps", "action 2", "made for a test", "0.9"):
            assert text in result.stdout

    def test_json_and_nothing_else(self, folder):
        result = run("info", "log.hdf5", "--json")
        values = json.loads(result.stdout)
        assert values["rows"] == 48
        assert values["time_limit"] == 5
        assert values["sha256"] == open_transitions("log.hdf5").sha256
        assert values["source"] == "log.hdf5"
        assert result.stdout.count("\n") == 1

    def test_declared_spaces(self, folder):
        assert (
            json.loads(run("info", "log.hdf5", "--json", "--discrete", "5").stdout)["action_space"]["n"] == 5
        )
        log = roll_out(ENDS, LENGTHS, discrete=False).transitions(action_space=Continuous(2))
        write_transitions(log, "vectors.npz")
        values = json.loads(run("info", "vectors.npz", "--json", "--continuous", "-1", "1").stdout)
        assert values["action_space"] == {"type": "continuous", "k": 2, "low": [-1, -1], "high": [1, 1]}
        assert "action[1]" in run("info", "vectors.npz").stdout
        assert_refused(run("info", "log.hdf5", "--discrete", "2", "--continuous", "0", "1"), "choose one")
        assert_refused(run("info", "log.hdf5", "--discrete", "0"), "at least 1")

    def test_what_a_reader_left_out_is_said(self, folder):
        log = open_transitions("log.hdf5")
        np.savez(
            "cut.npz",
            observations=log.observations,
            actions=log.actions,
            rewards=log.rewards,
            terminals=log.terminated,
            timeouts=log.truncated,
        )
        notes = " ".join(json.loads(run("info", "cut.npz", "--json").stdout)["notes"])
        assert "6 rows were left out" in notes
        assert "assumed Discrete(3)" in notes

    def test_bad_sources_are_one_line(self, folder):
        (folder / "text.hdf5").write_text("hello")
        assert_refused(run("info", "absent.hdf5"), "absent.hdf5 does not exist")
        assert_refused(run("info", "text.hdf5"), "is a text file")
        assert_refused(run("info", str(folder)), "no Minari dataset")

    def test_help_shows_examples(self):
        for command in ("info", "validate", "convert"):
            result = run(command, "--help")
            assert result.exit_code == 0
            assert f"koffline data {command}" in result.stdout


class TestValidate:
    def test_sound(self, folder):
        result = run("validate", "log.hdf5")
        assert result.exit_code == 0
        assert result.stdout == "note: made for a test\nlog.hdf5: 48 rows, no errors, no warnings\n"

    def test_warnings_do_not_fail(self, folder):
        result = run("validate", "log.hdf5", "--discrete", "4")
        assert result.exit_code == 0
        assert "warning: actions 3 never appear" in result.stdout
        assert "1 warning\n" in result.stdout

    def test_errors_do_and_all_are_listed(self, folder):
        log = open_transitions("log.hdf5")
        np.savez(
            "bad.npz",
            observations=log.observations,
            next_observations=log.next_observations,
            actions=log.actions,
            rewards=np.where(np.arange(48) < 3, np.nan, log.rewards),
            terminals=log.terminated,
            timeouts=log.truncated,
        )
        result = run("validate", "bad.npz", "--discrete", "2")
        assert result.exit_code == 2
        assert "error: rewards: NaN or infinite in 3 rows (first: row 0)" in result.stderr
        assert "error: actions: outside Discrete(2)" in result.stderr

    def test_what_cannot_be_opened(self, folder):
        assert_refused(run("validate", "absent"), "does not exist")


class TestConvert:
    @pytest.mark.parametrize(
        ("target", "options"),
        [("out.npz", ()), ("out.h5", ("--format", "d3rlpy")), ("out-v0", ("--format", "minari"))],
    )
    def test_formats(self, folder, target, options):
        result = run("convert", "log.hdf5", target, *options)
        assert result.exit_code == 0
        assert "Transitions(48 rows, 12 episodes" in result.stdout
        assert open_transitions(target).sha256 == open_transitions("log.hdf5").sha256

    def test_the_declared_space_is_written(self, folder):
        run("convert", "log.hdf5", "out.npz", "--discrete", "7")
        assert open_transitions("out.npz").action_space == Discrete(7)

    def test_nothing_is_overwritten_by_chance(self, folder):
        (folder / "out.npz").write_text("precious")
        assert_refused(run("convert", "log.hdf5", "out.npz"), "exists already", "--force")
        assert (folder / "out.npz").read_text() == "precious"
        assert run("convert", "log.hdf5", "out.npz", "--force").exit_code == 0
        assert len(open_transitions("out.npz")) == 48

    def test_a_file_is_not_converted_in_place(self, folder):
        before = open_transitions("log.hdf5").sha256
        in_place = run("convert", "log.hdf5", "log.hdf5", "--format", "npz", "--force")
        assert_refused(in_place, "would replace log.hdf5")
        assert open_transitions("log.hdf5").sha256 == before

    def test_refusals_leave_nothing(self, folder):
        before = sorted(folder.iterdir())
        assert_refused(run("convert", "log.hdf5", "out.xls"), "--format")
        assert_refused(run("convert", "absent", "out.npz"), "does not exist")
        assert_refused(run("convert", "log.hdf5", "absent/out.npz"), "does not exist; create it")
        assert_refused(run("convert", "log.hdf5", "out.npz", "--discrete", "1"), "outside 0 … 0")
        assert sorted(folder.iterdir()) == before

    def test_an_unknown_format(self, folder):
        result = run("convert", "log.hdf5", "out", "--format", "xls")
        assert result.exit_code == 2
        assert "xls" in result.stderr


class TestShards:
    def test_a_log_becomes_a_folder_of_shards_and_a_file_again(self, folder):
        result = run("convert", "log.hdf5", "shards", "--shard-rows", "20")
        assert result.exit_code == 0
        assert result.stdout.splitlines() == [
            "note: made for a test",
            "shards (shards): LazyTransitions(48 rows in 3 shards, 12 episodes, observations (3,) float32, "
            "Discrete(3))",
        ]
        assert run("convert", "shards", "again.npz").exit_code == 0
        assert open_transitions("again.npz").sha256 == open_transitions("log.hdf5").sha256
        assert json.loads(run("info", "shards", "--json").stdout)["rows"] == 48

    def test_refusals_leave_nothing(self, folder):
        (folder / "precious").mkdir()
        (folder / "precious" / "x").touch()
        before = sorted(folder.iterdir())
        shards = ("convert", "log.hdf5", "shards", "--shard-rows")
        assert_refused(run(*shards, "0"), "shard_rows is 0")
        assert_refused(run(*shards, "9", "--format", "npz"), "--format npz and --shard-rows", "choose one")
        assert_refused(run("convert", "absent", "shards", "--shard-rows", "9"), "does not exist")
        assert_refused(run("convert", "log.hdf5", "log.hdf5", "--shard-rows", "9"), "would replace log.hdf5")
        assert_refused(
            run("convert", "log.hdf5", "precious", "--shard-rows", "9", "--force"), "holds something else"
        )
        assert sorted(folder.iterdir()) == before

    def test_the_shard_that_is_damaged_is_named(self, folder):
        run("convert", "log.hdf5", "shards", "--shard-rows", "20")
        (folder / "shards" / "shard-00001.hdf5").write_bytes(b"")
        assert_refused(run("convert", "shards", "out.npz"), "shard-00001.hdf5 is empty")
        assert_refused(run("convert", "shards", "finer", "--shard-rows", "5"), "shard-00001.hdf5 is empty")
