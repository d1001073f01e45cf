"""d3rlpy files that are refused: code in them cannot run, and what does not fit is named."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path

import pytest
import torch

import koffline
from koffline.data.transitions import Discrete
from koffline.errors import PolicyError
from koffline.policy_specs import load_policy
from tests.d3_models import SHAPE, build, rewritten, rewritten_config, saved


@pytest.fixture(scope="module")
def dqn_file(tmp_path_factory) -> Path:
    return Path(saved(build("DQN", 3), tmp_path_factory.mktemp("dqn")))


@pytest.fixture(params=["policy", "model"])
def load(request):
    """Both ways to what a .d3 file holds."""
    return koffline.load if request.param == "model" else lambda p: load_policy(p, Discrete(3), SHAPE)


class _Shell:
    """Pickles as a call of os.system."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def _ran(marker: Path, unpickle) -> bool:
    """Whether an ordinary pickle.load of this payload would have run it; removes the trace."""
    unpickle()
    ran = marker.exists()
    marker.unlink(missing_ok=True)
    return ran


@pytest.mark.parametrize(
    ("place", "protocol"), [("whole", 2), ("whole", 5), ("version", 4), ("extra", 3), ("extra", 4)]
)
def test_code_in_the_pickle_is_refused_and_does_not_run(load, dqn_file, tmp_path, protocol, place):
    marker = tmp_path / "ran"
    content = pickle.loads(dqn_file.read_bytes())
    payload = _Shell(marker) if place == "whole" else {**content, place: _Shell(marker)}
    path = tmp_path / "model.d3"
    path.write_bytes(pickle.dumps(payload, protocol))
    assert _ran(marker, lambda: pickle.loads(path.read_bytes())), "the payload must work to prove anything"
    with pytest.raises(PolicyError, match=r"asks to import \w+\.system.*nothing ran.*algo\.save") as caught:
        load(path)
    assert "\n" not in str(caught.value)
    assert not marker.exists()


def test_code_in_the_weights_is_refused_and_does_not_run(load, dqn_file, tmp_path):
    marker = tmp_path / "ran"
    buffer = io.BytesIO()
    torch.save({"q_funcs": _Shell(marker)}, buffer)
    assert _ran(marker, lambda: torch.load(io.BytesIO(buffer.getvalue()), weights_only=False))
    path = rewritten(dqn_file, tmp_path / "model.d3", torch=buffer.getvalue())
    with pytest.raises(PolicyError, match=r"weights asks to import \w+\.system.*nothing ran"):
        load(path)
    assert not marker.exists()


def test_weights_in_an_older_layout_are_refused_unread(load, dqn_file, tmp_path):
    marker = tmp_path / "ran"
    path = rewritten(dqn_file, tmp_path / "model.d3", torch=pickle.dumps(_Shell(marker), 2))
    with pytest.raises(PolicyError, match="not in torch's zip layout"):
        load(path)
    assert not marker.exists()


@pytest.mark.parametrize("keep", [0.001, 0.5, 0.99])
def test_a_truncated_model_is_refused(load, dqn_file, tmp_path, keep):
    content = dqn_file.read_bytes()
    path = tmp_path / "model.d3"
    path.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(PolicyError, match=r"truncated or corrupt.*save the model again"):
        load(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ["3 discrete actions", "the log 4 discrete actions"]),
        ({"type": "fqe"}, ["FQE evaluator", "save the algorithm it evaluates"]),
        ({"type": "decision_transformer"}, ["history and a target return", "function of the observation"]),
        ({"type": "my_algorithm"}, ["'my_algorithm' is unknown", "dqn", "import the package"]),
        ({"observation_shape": [[4], [3]]}, ["one observation array", "join the parts"]),
        ({"params": {"n_critics": 10**9}}, ["asks for networks of more than", "save it again"]),
    ],
)
def test_a_model_that_is_no_policy_of_this_log_is_refused(dqn_file, tmp_path, changes, words):
    path = rewritten_config(dqn_file, tmp_path / "model.d3", **changes)
    with pytest.raises(PolicyError) as caught:
        load_policy(path, Discrete(3 if changes else 4), SHAPE)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in [str(path), *words]), str(caught.value)
