"""Policies, models and checkpoints made to do harm."""

import io
import logging
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from koffline.checkpoints import read_checkpoint
from koffline.data.transitions import Discrete
from koffline.errors import ConfigError, PolicyError
from koffline.policies.files import say_it_runs_code
from koffline.policy_specs import load_policy
from tests.fuzz.hostile import archive
from tests.refusals import one_line
from tests.test_policies_files import scripted

BOMBS = {
    "bytes that are not there": (
        b"\x80\x04\x8e" + b"\xff" * 7 + b"\x3fx.",
        "truncated or corrupt",
    ),
    "a loop": (
        b"\x80\x04]\x94h\x00a.",
        "does not hold a d3rlpy model (torch, config, version) but a list",
    ),
    "an old import": (b"\x80\x02(ios\nsystem\n.", "asks to import os.system"),
    "a number of any length": (
        b"\x80\x02L" + b"9" * 10_000 + b"L\n.",
        "truncated or corrupt",
    ),
    "too little on the stack": (b"\x80\x04s.", "truncated or corrupt"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_pickles_build_numbers_texts_and_containers_alone(tmp_path: Path, bomb):
    content, words = BOMBS[bomb]
    (tmp_path / "model.d3").write_bytes(content)
    with one_line(PolicyError, words):
        load_policy(tmp_path / "model.d3", Discrete(2), (2,))


def test_tensors_cannot_reach_beyond_their_bytes(tmp_path: Path):
    """One claims more numbers than its record holds."""
    buffer = io.BytesIO()
    torch.save({"fingerprint": "f", "a": torch.arange(4.0)}, buffer)
    with zipfile.ZipFile(buffer) as source:
        members = {name: source.read(name) for name in source.namelist()}
    name = next(name for name in members if name.endswith("data.pkl"))
    claims = (
        members[name]
        .replace(b"K\x04tq", b"M\x00\x40tq")
        .replace(b"K\x04\x85", b"M\x00\x40\x85")
    )
    assert claims != members[name]
    (tmp_path / "c.pt").write_bytes(archive({**members, name: claims}))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_checkpoint(tmp_path / "c.pt", "f")


def external_onnx(path: Path, nested: bool) -> None:
    """A model whose weights lie in a file beside it, at the top or inside a branch."""
    from onnx import TensorProto, helper

    path.with_name("private.bin").write_bytes(np.full(4, 777.0, np.float32).tobytes())
    weights = helper.make_tensor(
        "w", TensorProto.FLOAT, [2, 2], np.ones(4, np.float32).tobytes(), raw=True
    )
    weights.ClearField("raw_data")
    weights.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "private.bin"), ("offset", "0"), ("length", "16")):
        weights.external_data.add(key=key, value=value)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])
    p = helper.make_tensor_value_info("p", TensorProto.FLOAT, ["n", 2])
    if nested:
        branch = helper.make_graph(
            [helper.make_node("Constant", [], ["c"], value=weights)], "b", [], []
        )
        node = helper.make_node(
            "If", ["x"], ["p"], then_branch=branch, else_branch=branch
        )
        graph = helper.make_graph([node], "policy", [x], [p])
    else:
        graph = helper.make_graph(
            [helper.make_node("MatMul", ["x", "w"], ["p"])], "p", [x], [p], [weights]
        )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9
    )
    path.write_bytes(model.SerializeToString())


@pytest.mark.parametrize("nested", [False, True])
def test_onnx_models_cannot_name_other_files(tmp_path: Path, nested):
    pytest.importorskip("onnxruntime")
    path = tmp_path / "policy.onnx"
    external_onnx(path, nested)
    if not nested:
        import onnxruntime

        session = onnxruntime.InferenceSession(
            str(path), providers=["CPUExecutionProvider"]
        )
        read = session.run(None, {"x": np.ones((1, 2), np.float32)})[0]
        assert read.max() == 2 * 777.0, (
            "the file beside it must be readable, else nothing is proven"
        )
    with pytest.raises(PolicyError, match="keeps numbers in another file"):
        load_policy(path, Discrete(2), (2,))


def test_what_runs_code_says_so_once(tmp_path: Path, caplog, monkeypatch):
    say_it_runs_code.cache_clear()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_policy_that_runs.py").write_text(
        "def act(x):\n    return x[:, 0] * 0\n"
    )
    scripted(torch.nn.Linear(2, 2), tmp_path / "policy.pt")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            load_policy("my_policy_that_runs:act", Discrete(2), (2,))
            with pytest.raises(PolicyError):  # its numbers are no probabilities
                load_policy(tmp_path / "policy.pt", Discrete(2), (2,)).probabilities(
                    np.ones((1, 2))
                )
    messages = [record.getMessage() for record in caplog.records]
    assert [
        text
        for text in messages
        if "runs the Python module my_policy_that_runs" in text
    ] == messages[:1]
    assert [
        text for text in messages if "is a TorchScript program" in text
    ] == messages[1:]
