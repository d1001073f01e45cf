"""Policy files of other tools, TorchScript and ONNX, and telling files apart."""

import pickle
import warnings
from pathlib import Path

import cloudpickle
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from koffline.data.transitions import Continuous, Discrete
from koffline.errors import PolicyError
from koffline.policies import save_mlp_policy
from koffline.policy_specs import load_policy

SHAPE = (4,)
BOX = Continuous(2, low=(-2.0, 0.0), high=(3.0, 1.0))


def observations(n: int = 9) -> np.ndarray:
    return np.random.default_rng(0).normal(3.0, 2.0, size=(n, 4))


# TorchScript


def scripted(module: torch.nn.Module, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(module).save(str(path))
    return path


def test_torchscript_probabilities_and_actions(tmp_path):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.5), torch.nn.Softmax(dim=1))
    policy = load_policy(scripted(module, tmp_path / "p.anything"), Discrete(3), SHAPE)
    x = observations()
    with torch.no_grad():
        expected = module.eval()(torch.tensor(x, dtype=torch.float32)).numpy()
    np.testing.assert_allclose(policy.probabilities(x), expected, atol=1e-6)
    actor = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Tanh())
    continuous = load_policy(scripted(actor, tmp_path / "q"), BOX, SHAPE)
    with torch.no_grad():
        expected = actor(torch.tensor(x, dtype=torch.float32)).numpy()
    np.testing.assert_allclose(continuous.mean(x), expected, atol=1e-6)


# ONNX


def onnx_file(path: Path, last: str, batch: object = "batch", element: int = TensorProto.FLOAT) -> np.ndarray:
    """Write observations -> Linear(4, 3) -> last; return the weights."""
    kind = helper.tensor_dtype_to_np_dtype(element)
    weight = np.random.default_rng(1).normal(size=(4, 3)).astype(kind)
    attributes = {"ArgMax": {"axis": 1, "keepdims": 0}, "Softmax": {"axis": 1}}.get(last, {})
    output = (TensorProto.INT64, [batch]) if last == "ArgMax" else (element, [batch, 3])
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "W"], ["h"]), helper.make_node(last, ["h"], ["y"], **attributes)],
        "policy",
        [helper.make_tensor_value_info("x", element, [batch, 4])],
        [helper.make_tensor_value_info("y", *output)],
        [numpy_helper.from_array(weight, "W")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, str(path))
    return weight


def test_onnx_probabilities(tmp_path):
    weight = onnx_file(tmp_path / "p", "Softmax", element=TensorProto.DOUBLE)
    result = load_policy(tmp_path / "p", Discrete(3), SHAPE).probabilities(observations())
    expected = torch.softmax(torch.tensor(observations() @ weight), dim=1).numpy()
    np.testing.assert_allclose(result, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("space", "shape", "batch", "words"),
    [
        (Discrete(2), (4,), None, ["shape (2, 3)", "2 actions"]),
        (Continuous(2), (4,), None, ["shape (2, 3)", "2 action dimensions"]),
        (Discrete(3), (5,), None, ["observations of shape (2, 5)", "failed"]),
        (Discrete(3), (5,), "batch", ["observations of shape (2, 5)", "Got: 5 Expected: 4"]),
        (Discrete(2), (4,), "batch", ["shape (2, 3)", "2 actions"]),
        (Discrete(3), (4,), 1, ["observations of shape (2, 4)", "Got: 2 Expected: 1"]),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path, space, shape, batch, words):
    if batch is None:
        scripted(torch.nn.Linear(4, 3), tmp_path / "p")
    else:
        onnx_file(tmp_path / "p", "Softmax", batch)
    policy = load_policy(tmp_path / "p", space, shape)
    act = policy.probabilities if isinstance(space, Discrete) else policy.mean
    with pytest.raises(PolicyError) as caught:
        act(np.zeros((2, *shape)))
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), str(caught.value)


# Telling files apart


@pytest.fixture(scope="module")
def all_kinds(tmp_path_factory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("kinds")
    scripted(torch.nn.Linear(4, 3), folder / "torchscript")
    onnx_file(folder / "onnx", "ArgMax")
    save_mlp_policy(folder / "npz", [(np.ones((4, 3)), np.zeros(3))], "softmax")
    torch.save(torch.nn.Linear(4, 3).state_dict(), folder / "torch.save")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("kind", ["torchscript", "onnx", "npz", "torch.save"])
@pytest.mark.parametrize("fraction", [0.3, 0.99])
def test_truncated_files_are_refused(all_kinds, tmp_path, kind, fraction):
    content = all_kinds[kind]
    path = tmp_path / "policy"
    path.write_bytes(content[: int(fraction * len(content))])
    with pytest.raises(PolicyError, match=f"{path}: .*(truncated|cannot be read)") as caught:
        load_policy(path, Discrete(3), SHAPE)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["empty"]),
        (b"\x89HDF\r\n\x1a\n" + bytes(100), ["HDF5", "a log and not a policy"]),
        (b"\x08\x08\x12\x03abc", ["the ONNX file cannot be read"]),
        ("torch.save", ["torch.save checkpoint", "algo.save", "torch.jit.script"]),
    ],
)
def test_other_files_are_refused_by_content(all_kinds, tmp_path, content, words):
    path = tmp_path / "policy.d3"
    path.write_bytes(all_kinds.get(content, content))
    with pytest.raises(PolicyError) as caught:
        load_policy(path, Discrete(3), SHAPE)
    assert all(word in str(caught.value) for word in [str(path), *words]), str(caught.value)


# Passes over a log on many machines send the policy along.


@pytest.mark.parametrize("kind", ["script", "onnx"])
def test_policies_of_files_travel_to_other_processes(kind, tmp_path):
    if kind == "onnx":
        onnx_file(tmp_path / "p", "Softmax")
    else:
        scripted(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Softmax(dim=1)), tmp_path / "p")
    policy = load_policy(tmp_path / "p", Discrete(3), SHAPE)
    content = cloudpickle.dumps(policy)
    (tmp_path / "p").unlink()
    arrived = pickle.loads(content)
    np.testing.assert_array_equal(arrived.probabilities(observations()), policy.probabilities(observations()))
