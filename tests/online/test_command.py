"""``koffline online`` as it is typed: a table at the end, one line for what is wrong, exit code 2."""

import re
import sys
import types

import pytest
import yaml
from click.testing import CliRunner

from koffline.cli import cli
from tests.online.small_online import rows, small


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(small(steps=200)))
    return str(path)


def call(*arguments):
    return CliRunner().invoke(cli, ["online", *map(str, arguments)])


def test_a_run(config, tmp_path):
    done = call(config, "--out", tmp_path / "run", "--seed-count", 2, "--set", "critic=td0")
    assert done.exit_code == 0, done.output
    assert "CartPole-v1, td0: 200 steps per seed" in done.stdout
    for name in ("IQM", "95% interval", "best 1 of 2", "sampled return"):
        assert name in done.stdout
    assert re.search(r"\d+ environment steps per second \(environment \d+%, acting \d+%", done.stdout)
    assert done.stdout.strip().endswith(f"run: {tmp_path / 'run'}")
    assert done.stderr == ""


def test_out_has_a_default_and_resume_needs_no_config(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call(config, "--seed-count", 1).exit_code == 0
    again = call(config, "--seed-count", 1)
    assert again.exit_code == 2
    assert "go on with it by --resume runs/CartPole-v1-kloss" in again.stderr
    resumed = call("--resume", "runs/CartPole-v1-kloss")
    assert resumed.exit_code == 0
    assert "IQM" in resumed.stdout
    other = call(config, "--resume", "runs/CartPole-v1-kloss", "--set", "gamma=0.5")
    assert other.exit_code == 2
    assert "gamma is 0.995 there and 0.5 here" in other.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "critc=rg"], "critc is unknown; did you mean 'critic'?"),
        (["--set", "environment=CartPoll-v1"], "there is no environment 'CartPoll-v1'"),
        (["--seed-count", "0"], "seed_count is 0; give a whole number of at least 1"),
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


class Board:
    """Stands for tensorboardX's writer."""

    def __init__(self, logdir, purge_step=None):
        self.logdir, self.purge_step, self.numbers, self.closed = logdir, purge_step, {}, False
        BOARDS.append(self)

    def add_scalar(self, name, value, step):
        self.numbers[name, step] = value

    def close(self):
        self.closed = True


BOARDS: list[Board] = []


def test_tensorboard(config, tmp_path, monkeypatch):
    BOARDS.clear()
    monkeypatch.setitem(sys.modules, "tensorboardX", types.SimpleNamespace(SummaryWriter=Board))
    monkeypatch.setattr("koffline.online.group.find_spec", lambda name: object())
    done = call(config, "--out", tmp_path / "run", "--seed-count", 2, "--tensorboard")
    assert done.exit_code == 0, done.output
    first = BOARDS[0]
    assert [board.logdir for board in BOARDS] == [
        str(tmp_path / "run" / "tensorboard" / f"seed_{seed}") for seed in (0, 1)
    ]
    last = rows(tmp_path / "run" / "seed_0" / "evaluation.csv")[-1]
    assert first.numbers["evaluation/return", 200] == float(last["return"])
    assert first.numbers["training/steps_per_second", 200] > 0
    assert ("training/kl_coef", 200) in first.numbers
    assert all(board.closed for board in BOARDS)


def test_videos(tmp_path):
    path = tmp_path / "world.yaml"
    world = small(environment="koffline/PuddleWorld-v0", steps=100, evaluation_interval=100)
    path.write_text(yaml.safe_dump(world))
    done = call(path, "--out", tmp_path / "run", "--seed-count", 1, "--videos")
    assert done.exit_code == 0, done.output
    (film,) = (tmp_path / "run" / "seed_0" / "videos").iterdir()
    assert film.stem == "step_000000100"
    assert film.stat().st_size > 1000
