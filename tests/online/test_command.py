"""``koffline online`` as it is typed: a table at the end, one line for what is wrong, exit code 2."""

import pytest
import yaml
from click.testing import CliRunner

from koffline.cli import cli
from tests.online.small_online import small


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(small(steps=200)))
    return str(path)


def call(*arguments):
    return CliRunner().invoke(cli, ["online", *map(str, arguments)])


def test_out_has_a_default_and_resume_needs_no_config(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = call(config, "--seed-count", 2)
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    for words in ("CartPole-v1, kloss: 200 steps per seed", "IQM", "95% interval", "best 1 of 2"):
        assert words in done.stdout
    again = call(config, "--seed-count", 2)
    assert again.exit_code == 2
    assert "go on with it by --resume runs/CartPole-v1-kloss" in again.stderr
    resumed = call("--resume", "runs/CartPole-v1-kloss")
    assert resumed.exit_code == 0
    assert "IQM" in resumed.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "environment=CartPoll-v1"], "there is no environment 'CartPoll-v1'"),
        (["--seed-count", "0"], "--seed-count is 0; give a whole number of at least 1"),
        (["--resume", "nowhere"], "--resume nowhere: there is no such folder"),
    ],
)
def test_what_is_wrong_is_one_line(arguments, message, config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = call(config, *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()
