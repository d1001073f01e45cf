"""Specs: `package.module:name`, missing files, folders."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from koffline.data.transitions import Discrete
from koffline.errors import PolicyError
from koffline.policy_specs import load_policy


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder that is the current directory and not on sys.path; its modules are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", "") and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def write(project: Path, text: str, name: str = "mine_for_test.py") -> None:
    (project / name).write_text(text)


def test_a_function_in_the_current_directory(project):
    write(project, "def act(observations):\n    return (observations[:, 0] > 0).astype(int)\n")
    path_before = list(sys.path)
    policy = load_policy("mine_for_test:act", Discrete(2), (1,))
    assert sys.path == path_before
    assert policy.name == "mine_for_test:act"
    np.testing.assert_array_equal(policy.probabilities(np.array([[1.0], [-1.0]])), [[0, 1], [1, 0]])


@pytest.mark.parametrize(
    ("text", "spec", "words"),
    [
        ("", "no_such_module_here:act", ["no_such_module_here", "install it or run from the folder"]),
        ("", "mine_for_test.py:act", ["named without .py"]),
        ("def act(x): pass", "mine_for_test:atc", ["has no 'atc'; did you mean 'act'?"]),
        ("class Act: pass", "mine_for_test:Act", ["this is a class", "give an instance"]),
        (
            "raise RuntimeError('two\\nlines')",
            "mine_for_test:act",
            ["RuntimeError: two lines", "importable"],
        ),
    ],
)
def test_a_module_that_cannot_give_a_policy(project, text, spec, words):
    write(project, text)
    path_before = list(sys.path)
    with pytest.raises(PolicyError) as caught:
        load_policy(spec, Discrete(2), (1,))
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in [spec, *words]), str(caught.value)
    assert sys.path == path_before


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("missing.d3", r"there is no such file; a policy is a d3rlpy \.d3.*uniform"),
        ("", "there is no such file"),
        (Path("uniform"), "no such file"),
        ("unifrom", "did you mean 'uniform'"),
        (Path(), "this is a folder"),
    ],
)
def test_what_is_no_spec_is_refused(spec, message, project):
    with pytest.raises(PolicyError, match=message):
        load_policy(spec, Discrete(2), (1,))


@pytest.mark.parametrize("layers", [4, 10_000])
def test_many_layers_of_epsilon_are_one_line(layers):
    words = f"names {layers} layers of epsilon; give at most 3, or one of the whole probability"
    with pytest.raises(PolicyError, match=words) as caught:
        load_policy("epsilon:0.1:" * layers + "uniform", Discrete(2), (4,))
    assert len(str(caught.value)) < 200
