"""A record from someone else runs no code that it names, unless that is asked for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from koffline.cli import repeat as repeating
from koffline.envs.make import make_env
from koffline.errors import ConfigError
from koffline.jobs.workers import connect
from koffline.policy_specs import import_object
from koffline.store.run_record import command_line, start_run
from koffline.untrusted.limits import WITHOUT_CODE
from tests.repeat.test_repeat import koffline, place, run  # noqa: F401 (place is a fixture)
from tests.test_policies_files import scripted

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


def test_inputs_of_a_record_are_not_imported(strange):
    """The package of evil.policy would run while its source is looked for."""
    with command_line(("evaluate", "log.hdf5", "--policy", "uniform")):
        content = start_run("evaluate").finish(seed=0, settings={})
    content["call"]["inputs"] = {"evil.policy:act": "0"}
    Path("a").mkdir()
    Path("a/run.json").write_text(json.dumps(content))
    assert "evil.policy:act" in koffline("repeat", "a").stderr
    assert not (strange / "ran").exists()


def test_loaders_refuse_code(strange, monkeypatch):
    """In the process that runs the command and in its workers."""
    monkeypatch.setenv(WITHOUT_CODE, "1")
    monkeypatch.syspath_prepend(strange)
    scripted(torch.nn.Identity(), strange / "program.pt")
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


def test_code_runs_when_it_is_asked_for_and_only_then(strange, monkeypatch):
    monkeypatch.syspath_prepend(strange)
    run("evaluate", "log.hdf5", "--policy", "lone:act", *GAMMA, "--out", "a")
    (strange / "ran").unlink()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(strange), *filter(None, sys.path)]))
    refused = koffline("repeat", "a")
    assert refused.exit_code == 2
    assert "lone:act runs the Python module lone" in refused.stderr
    assert "add --allow-code" in refused.stderr
    assert not (strange / "ran").exists()
    assert run("repeat", "a", "--allow-code").stdout.startswith("the same: ")
    assert (strange / "ran").exists()
