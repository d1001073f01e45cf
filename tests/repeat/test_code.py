"""A record from someone else runs no code that it names, unless that is asked for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from koffline.builders.make_env import make_env
from koffline.errors import ConfigError
from koffline.jobs.ray_tasks import connect
from koffline.policies.python_policy import import_object
from koffline.repeat import repeating
from koffline.repeat.code import code_in
from koffline.repeat.recorded import RecordedRun, read_run
from koffline.run_record import command_line, digests_of, path_of, start_run
from koffline.untrusted.code import WITHOUT_CODE
from tests.repeat.test_repeat import koffline, place, run  # noqa: F401 (place is a fixture)

EVIL = "from pathlib import Path\nPath({target!r}).touch()\ndef act(s):\n    return s[:, :2] * 0 + 0.5\n"
GAMMA = ("--gamma", "0.9", "--estimator", "is")


@pytest.fixture
def strange(place):  # noqa: F811
    """A folder with a log and a module that leaves a trace where it runs."""
    (place / "evil").mkdir()
    trace = str(place / "ran")
    for name in ("evil/__init__.py", "evil/policy.py", "lone.py"):
        (place / name).write_text(EVIL.format(target=trace))
    return place


def record(words, inputs=None, config=None, out="a"):
    """The record of a run that was never made."""
    with command_line(words):
        content = start_run(words[0]).finish(seed=0, settings={})
    content["call"]["inputs"] = inputs if inputs is not None else content["call"]["inputs"]
    if config is not None:
        content["config"] = config
    Path(out).mkdir()
    (Path(out) / "run.json").write_text(json.dumps(content))
    return content


def script(path):
    class Act(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, :2]

    with pytest.warns(DeprecationWarning, match=r"torch\.jit"):
        torch.jit.script(Act()).save(str(path))


def config_of(**changes):
    return {"data": {"source": "log.hdf5"}, "algo": {"type": "dqn"}, "train": {"n_steps": 2}, **changes}


ENVIRONMENT = {"evaluators": {"e": {"type": "environment", "env": "evil.worlds:Cave-v0"}}}


@pytest.mark.parametrize(
    ("words", "config", "named"),
    [
        (("evaluate", "log.hdf5", "--policy", "evil.policy:act"), None, "evil.policy:act"),
        (("evaluate", "log.hdf5", "--policy=epsilon:0.1:lone:act"), None, "lone:act"),
        (("diagnose", "log.hdf5", "--policy", "uniform", "--model", "lone:value"), None, "lone:value"),
        (("select", "log.hdf5", "--policies", "uniform", "os:getcwd"), None, "os:getcwd"),
        (("evaluate", "log.hdf5", "--policy", "program.bin"), None, "program.bin (a TorchScript program)"),
        (("build", "rollouts", "--env", "lone:3D-v0", "--policy", "uniform"), None, "lone:3D-v0"),
        (("build", "rollouts", "--env", "Noisy-v0", "--env-option", "of=lone:Cave-v0"), None, "lone:Cave-v0"),
        (("sweep", "settings.yaml", "--seeds", "1"), None, "evil.worlds:Cave-v0"),
        (("sweep", "c.yaml", "--set", 'e={env: "evil\\x3aCave-v0"}'), None, "evil:Cave-v0"),
        (("train", "c.yaml"), config_of(**ENVIRONMENT), "evil.worlds:Cave-v0"),
        (("train", "c.yaml"), config_of(algo={"type": "fqe", "policy": "program.bin"}), "program.bin"),
        (("train", "c.yaml", "--set", "algo.policy=lone:act"), config_of(), "lone:act"),
        (("online", "c.yaml"), {"environment": "lone:Cave-v0"}, "lone:Cave-v0"),
        (("evaluate", "shards", "--ray", "203.0.113.9:6379"), None, "the Ray cluster at 203.0.113.9:6379"),
    ],
)  # fmt: skip
def test_code_that_a_record_names_is_refused_and_named(strange, words, config, named):
    script(strange / "program.bin")
    (strange / "settings.yaml").write_text(yaml.safe_dump(config_of(**ENVIRONMENT)))
    record(words, config=config)
    done = koffline("repeat", "a")
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "would run code that its record names: " in done.stderr
    assert named in done.stderr
    assert "--allow-code" in done.stderr
    assert not (strange / "ran").exists()


@pytest.mark.parametrize("words", [("evaluate", "log.hdf5", "--policy", "uniform")])
def test_inputs_of_a_record_are_not_imported(strange, words):
    """The package of evil.policy would run while its source is looked for."""
    record(words, inputs={"evil.policy:act": "0"})
    assert "evil.policy:act" in koffline("repeat", "a").stderr
    assert not (strange / "ran").exists()


def test_the_source_of_a_module_is_found_without_running_its_package(strange, monkeypatch):
    monkeypatch.syspath_prepend(strange)
    assert path_of("evil.policy:act") == strange / "evil" / "policy.py"
    assert digests_of(["lone:act", "evil.absent:act", "absent.policy:act"]).keys() == {"lone:act"}
    assert not (strange / "ran").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("evaluate", "runs/2024-01-01T10:30/log.hdf5", "--policy", "epsilon:0.1:uniform", "--ray", "local"),
        ("evaluate", "minari:cartpole/mixed-v0", "--policy", "policy.d3", "--set", "steps=4"),
        ("evaluate", "s3://bucket/log.parquet", "--mapping", "columns.yaml", "--observations", "x_*"),
    ],
)
def test_ordinary_words_are_no_code(strange, words):
    (strange / "columns.yaml").write_text("observations: [x_0, x_1]\ntime: '10:30'\n")
    call = {"arguments": list(words), "inputs": {}, "directory": str(strange)}
    assert code_in(RecordedRun(words[0], strange, call)) == []


def test_what_is_refused_is_refused_by_the_loaders_too(strange, monkeypatch):
    """Where the search overlooks something, in the process that runs the command and in its workers."""
    monkeypatch.setenv(WITHOUT_CODE, "1")
    monkeypatch.syspath_prepend(strange)
    script(strange / "program.pt")
    with pytest.raises(ConfigError, match="lone:act runs the Python module lone, which a repetition"):
        import_object("lone:act")
    for name, options in (("lone:Cave-v0", {}), ("CartPole-v1", {"environment": "lone:Cave-v0"})):
        with pytest.raises(ConfigError, match="lone:Cave-v0 imports the Python module lone"):
            make_env(name, **options)
    with pytest.raises(ConfigError, match=r"Ray cluster at 127\.0\.0\.1:1 .* --allow-code"):
        connect("127.0.0.1:1", 1)
    done = koffline("evaluate", "log.hdf5", "--policy", "program.pt", *GAMMA)
    assert "program.pt is a TorchScript program" in done.stderr
    assert done.exit_code == 2
    assert not (strange / "ran").exists()


def test_modules_in_the_recorded_directory_are_not_imported(strange, monkeypatch):
    """Not even under the names of what koffline itself imports, and not by processes of its own."""
    monkeypatch.syspath_prepend(strange)
    for name in ("lone", "numpy", "multiprocessing", "json"):
        (strange / f"{name}.py").write_text(EVIL.format(target=str(strange / "ran")))
    environment = {**os.environ, WITHOUT_CODE: "1"}
    looked = (
        "import importlib.util, sys, json, multiprocessing, numpy; print(importlib.util.find_spec('lone'))"
    )
    words = repeating._python(strange, allow_code=False)
    start = words[-1].replace("from koffline.cli import cli; cli(prog_name='koffline')", looked)
    assert start != words[-1]
    done = subprocess.run(
        [*words[:-1], start], cwd=strange, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "None\n"
    assert not (strange / "ran").exists()
    assert repeating._python(strange, allow_code=True) == [sys.executable, "-m", "koffline"]


def test_code_runs_when_it_is_asked_for(strange, monkeypatch):
    monkeypatch.syspath_prepend(strange)
    run("evaluate", "log.hdf5", "--policy", "lone:act", *GAMMA, "--out", "a")
    given = []

    def run_here(words, directory, environment):
        given.append(environment)
        done = koffline(*words)
        return done.exit_code, done.stderr

    monkeypatch.setattr(repeating, "_run", run_here)
    assert koffline("repeat", "a").exit_code == 2
    assert given == []
    assert run("repeat", "a", "--allow-code").stdout.startswith("the same: ")
    assert WITHOUT_CODE not in given[0]


@pytest.mark.slow
def test_the_ordinary_case_is_one_command_in_a_process_of_its_own(strange):
    """Here the directory has modules that would break everything, if they were imported."""
    run("evaluate", "log.hdf5", "--policy", "uniform", *GAMMA, "--out", "a")
    (strange / "torch.py").write_text(EVIL.format(target=str(strange / "ran")))
    done = run("repeat", "a")
    assert done.stdout.startswith("the same: ")
    assert not (strange / "ran").exists()
    assert read_run(strange / "a.repeat").arguments[0] == "evaluate"
