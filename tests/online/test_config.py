"""Online configs, and ``koffline online`` as it is typed: what is wrong is one line,
with exit code 2.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from koffline.errors import ConfigError
from koffline.online.config import load_config
from tests.online.small_online import small
from tests.refusals import assert_refused, one_line, run_cli, succeed

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "online").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_load(path):
    assert load_config(path).env.endswith(("-v5", "-v0"))


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (
            "max_divergance=1",
            "max_divergance is unknown; did you mean 'max_divergence'?",
        ),
        (
            "environment_options=1",
            "environment_options is unknown; did you mean 'env_options'",
        ),
        ("n_environments=1", "n_environments is unknown; did you mean 'num_envs'"),
        ("gamma=.nan", "gamma is nan: input should be a finite number"),
        ("gamma=yes", "gamma is true: a yes or no is no value here"),
        ("hidden=[1000000000]", "less than or equal to 65536"),
        ("capacity=3", "capacity is 3; give at least 64"),
        ("num_envs=3", "no multiple of num_envs 3"),
        ("batch_size=1", "the kernel loss compares pairs"),
        ("memory=1", "memory is 1: input should be less than 1"),
        (
            "streaming=true steps_per_iteration=1",
            "steps_per_iteration is 1; the kernel loss compares pairs",
        ),
        ("critic=memory standardise=false", "its kernel needs standardised inputs"),
    ],
)
def test_what_is_wrong_is_one_line(assignments, message):
    with one_line(ConfigError, message):
        load_config({"env": "CartPole-v1"}, assignments.split())


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(small(steps=200)))
    return str(path)


def test_out_has_a_default_and_resume_needs_no_config(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run_cli("online", config, "--seeds", 2, "--quiet")
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    for words in (
        "CartPole-v1, kloss: 200 steps per seed",
        "IQM",
        "95% interval",
        "best 1 of 2",
    ):
        assert words in done.stdout
    remedy = "go on with it by --resume runs/CartPole-v1-kloss"
    assert_refused(run_cli("online", config, "--seeds", 2), remedy)
    assert "IQM" in succeed("online", "--resume", "runs/CartPole-v1-kloss")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "env=CartPoll-v1"], "the environment 'CartPoll-v1': there is none"),
        (["--seeds", "0"], "'--seeds': 0 is not in the range x>=1"),
        (["--resume", "nowhere"], "--resume nowhere: there is no such folder"),
    ],
)
def test_what_is_refused_begins_nothing(
    arguments, message, config, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert_refused(run_cli("online", config, *arguments), message)
    assert not (tmp_path / "runs").exists()


def test_streaming_keeps_no_replay(config, tmp_path):
    succeed(
        "online",
        config,
        "--streaming",
        "--seeds",
        1,
        "--quiet",
        "--out",
        tmp_path / "run",
    )
    assert (
        yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["streaming"]
        is True
    )
    assert (tmp_path / "run" / "seed_0" / "model.d3").exists()
    assert not (tmp_path / "run" / "seed_0" / "replay.hdf5").exists()


def test_misspelt_settings_are_told_without_torch():
    """The config is read before anything heavy is imported; d3rlpy knows what
    algorithms take.
    """
    code = (
        "import sys; from koffline.cli import cli\ntry: cli()\nfinally: print('torch'"
        " in sys.modules)"
    )
    for words, message in (
        (
            "online --env CartPole-v1",
            "there is no option '--env'; it is a setting: --set env=VALUE",
        ),
        (
            "online configs/online/swimmer.yaml --set stepz=3",
            "stepz is unknown; did you mean 'steps'?",
        ),
        (
            "train configs/sac.yaml --set train.n_stepz=1",
            "n_stepz is unknown; did you mean 'n_steps'?",
        ),
        (
            "select README.md --policies uniform ./README.md --estimator klos",
            "did you mean 'kloss'?",
        ),
        ("select README.md --policies uniform a.d3", "'a.d3': there is no such file"),
        (
            "diagnose README.md --policy uniform --model klos",
            "there is no such file; did you mean 'kloss'?",
        ),
    ):
        command = [sys.executable, "-c", code, *words.split()]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=Path(__file__).parents[2]
        )
        assert message in done.stderr
        assert (done.returncode, done.stdout.strip()) == (2, "False")
