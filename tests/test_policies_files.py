"""Policy files: koffline's own .npz of networks and grids, TorchScript and ONNX, and
telling them apart.
"""

import pickle
import warnings
from itertools import pairwise
from pathlib import Path

import cloudpickle
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from scipy.special import softmax

from koffline.data.transitions import Continuous, Discrete
from koffline.errors import PolicyError
from koffline.policies import GridPolicy, save_grid_policy, save_mlp_policy
from koffline.policy_specs import load_policy
from tests.refusals import one_line, refused

SHAPE = (4,)
BOX = Continuous(2, low=(-2.0, 0.0), high=(3.0, 1.0))


def observations(n: int = 9) -> np.ndarray:
    return np.random.default_rng(0).normal(3.0, 2.0, size=(n, 4))


def scripted(module: torch.nn.Module, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(module).save(str(path))
    return path


def test_torchscript_probabilities_and_actions(tmp_path):
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Linear(4, 3), torch.nn.Dropout(0.5), torch.nn.Softmax(dim=1)
    )
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


def onnx_file(
    path: Path, last: str, batch: object = "batch", element: int = TensorProto.FLOAT
) -> np.ndarray:
    """Write observations -> Linear(4, 3) -> last; return the weights."""
    kind = helper.tensor_dtype_to_np_dtype(element)
    weight = np.random.default_rng(1).normal(size=(4, 3)).astype(kind)
    attributes = {"ArgMax": {"axis": 1, "keepdims": 0}, "Softmax": {"axis": 1}}.get(
        last, {}
    )
    output = (TensorProto.INT64, [batch]) if last == "ArgMax" else (element, [batch, 3])
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "W"], ["h"]),
            helper.make_node(last, ["h"], ["y"], **attributes),
        ],
        "policy",
        [helper.make_tensor_value_info("x", element, [batch, 4])],
        [helper.make_tensor_value_info("y", *output)],
        [numpy_helper.from_array(weight, "W")],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    onnx.save(model, str(path))
    return weight


def test_onnx_probabilities(tmp_path):
    weight = onnx_file(tmp_path / "p", "Softmax", element=TensorProto.DOUBLE)
    result = load_policy(tmp_path / "p", Discrete(3), SHAPE).probabilities(
        observations()
    )
    expected = torch.softmax(torch.tensor(observations() @ weight), dim=1).numpy()
    np.testing.assert_allclose(result, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("space", "shape", "batch", "words"),
    [
        (Discrete(2), (4,), None, ["shape (2, 3)", "2 actions"]),
        (Continuous(2), (4,), None, ["shape (2, 3)", "2 action dimensions"]),
        (Discrete(3), (5,), None, ["observations of shape (2, 5)", "failed"]),
        (
            Discrete(3),
            (5,),
            "batch",
            ["observations of shape (2, 5)", "Got: 5 Expected: 4"],
        ),
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
    with one_line(PolicyError, *words):
        act(np.zeros((2, *shape)))


@pytest.fixture(scope="module")
def all_kinds(tmp_path_factory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("kinds")
    scripted(torch.nn.Linear(4, 3), folder / "torchscript")
    onnx_file(folder / "onnx", "ArgMax")
    two = onnx.load(str(folder / "onnx"))
    two.graph.output.append(
        helper.make_tensor_value_info("h", TensorProto.FLOAT, ["batch", 3])
    )
    onnx.save(two, str(folder / "two"))
    save_mlp_policy(folder / "npz", [(np.ones((4, 3)), np.zeros(3))], "softmax")
    torch.save(torch.nn.Linear(4, 3).state_dict(), folder / "torch.save")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("kind", ["torchscript", "onnx", "npz", "torch.save"])
@pytest.mark.parametrize("fraction", [0.3, 0.99])
def test_truncated_files_are_refused(all_kinds, tmp_path, kind, fraction):
    content = all_kinds[kind]
    path = tmp_path / "policy"
    path.write_bytes(content[: int(fraction * len(content))])
    with one_line(PolicyError, match=f"{path}.*(truncated|cannot be read)"):
        load_policy(path, Discrete(3), SHAPE)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["empty"]),
        (b"\x89HDF\r\n\x1a\n" + bytes(100), ["HDF5", "a log and not a policy"]),
        (b"\x08\x08\x12\x03abc", ["the ONNX file cannot be read"]),
        (
            "two",
            [
                "takes x tensor(float) and returns y tensor(int64), h tensor(float)",
                "one output",
            ],
        ),
        ("torch.save", ["torch.save checkpoint", "algo.save", "torch.jit.script"]),
    ],
)
def test_other_files_are_refused_by_content(all_kinds, tmp_path, content, words):
    path = tmp_path / "policy.d3"
    path.write_bytes(all_kinds.get(content, content))
    with one_line(PolicyError, str(path), *words):
        load_policy(path, Discrete(3), SHAPE)


@pytest.mark.parametrize("kind", ["script", "onnx"])
def test_policies_of_files_travel_to_other_processes(kind, tmp_path):
    if kind == "onnx":
        onnx_file(tmp_path / "p", "Softmax")
    else:
        scripted(
            torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Softmax(dim=1)),
            tmp_path / "p",
        )
    policy = load_policy(tmp_path / "p", Discrete(3), SHAPE)
    content = cloudpickle.dumps(policy)
    (tmp_path / "p").unlink()
    arrived = pickle.loads(content)
    np.testing.assert_array_equal(
        arrived.probabilities(observations()), policy.probabilities(observations())
    )


def layers(*widths: int, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    draws = np.random.default_rng(seed)
    return [
        (draws.normal(size=(i, o)) / np.sqrt(i), draws.normal(size=o))
        for i, o in pairwise(widths)
    ]


@pytest.mark.parametrize(
    ("output", "settings", "expected"),
    [
        (
            "softmax",
            {"temperature": 0.7},
            lambda last: torch.softmax(last / 0.7, dim=1),
        ),
        (
            "argmax",
            {"activation": "tanh"},
            lambda last: torch.eye(2, dtype=last.dtype)[last.argmax(dim=1)],
        ),
        ("identity", {}, lambda last: last),
        ("tanh", {}, torch.tanh),
        (
            "tanh",
            {"action_low": BOX.low, "action_high": BOX.high},
            lambda last: (
                torch.tensor(BOX.low) + (last.tanh() + 1) / 2 * torch.tensor([5.0, 1.0])
            ),
        ),
    ],
)
def test_networks_against_torch(tmp_path, output, settings, expected):
    net = layers(4, 8, 5, 2)
    mean = np.arange(4.0)
    std = np.array([1.0, 2, 3, 4])
    save_mlp_policy(
        tmp_path / "p",
        net,
        output,
        observation_mean=mean,
        observation_std=std,
        **settings,
    )
    x = torch.tensor((observations() - mean) / std)
    for index, (weight, bias) in enumerate(net):
        if index:
            x = torch.tanh(x) if settings.get("activation") == "tanh" else torch.relu(x)
        x = torch.nn.functional.linear(x, torch.tensor(weight).T, torch.tensor(bias))
    is_discrete = output in ("softmax", "argmax")
    policy = load_policy(
        str(tmp_path / "p"), Discrete(2) if is_discrete else BOX, SHAPE
    )
    actual = (
        policy.probabilities(observations())
        if is_discrete
        else policy.mean(observations())
    )
    np.testing.assert_allclose(actual, expected(x).numpy(), atol=1e-12)
    assert is_discrete or policy.deterministic


def test_large_logits_do_not_overflow(tmp_path):
    save_mlp_policy(
        tmp_path / "p",
        [(1e6 * np.ones((1, 1)) @ [[1.0, -1.0]], np.zeros(2))],
        "softmax",
    )
    result = load_policy(tmp_path / "p", Discrete(2), (1,)).probabilities(
        np.array([[1.0], [-1.0]])
    )
    np.testing.assert_array_equal(result, [[1, 0], [0, 1]])


@pytest.mark.parametrize(
    ("net", "output", "settings", "words"),
    [
        (layers(4, 3), "logits", {}, ["output is 'logits'", "softmax"]),
        (
            layers(4, 3),
            "softmax",
            {"temprature": 2.0},
            ["temprature", "did you mean 'temperature'?"],
        ),
        (
            layers(4, 3),
            "softmax",
            {"temperature": 0.0},
            ["temperature is 0", "positive"],
        ),
        (layers(4, 3), "softmax", {"std": 1.0}, ["std", "only there"]),
        (layers(4, 3), "gaussian", {"std": 1.0, "log_std": 0.0}, ["std and log_std"]),
        (
            layers(4, 3),
            "tanh",
            {"action_low": 1.0, "action_high": 0.0},
            ["lower bounds below"],
        ),
        (
            layers(4, 3),
            "softmax",
            {"observation_std": np.zeros(4)},
            ["observation_std", "positive"],
        ),
        (layers(4, 5) + layers(6, 3), "softmax", {}, ["layer 1", "(6, 3)"]),
        (
            [(np.full((4, 3), np.nan), np.zeros(3))],
            "softmax",
            {},
            ["layer 0", "finite"],
        ),
    ],
)
def test_a_policy_that_makes_no_sense_is_not_written(
    tmp_path, net, output, settings, words
):
    with one_line(PolicyError, *words):
        save_mlp_policy(tmp_path / "p", net, output, **settings)
    assert list(tmp_path.iterdir()) == []


GRID = GridPolicy((0.0, -1.0), (2.0, 1.0), np.arange(12.0).reshape(2, 2, 3) ** 1.5, 2.0)


def test_probabilities_at_centres_between_them_and_beyond():
    q = GRID.action_values
    points = np.array([[0.5, -0.5], [1.5, 0.5], [1.0, 0.0], [0.75, -0.5], [-9.0, 9.0]])
    expected = [
        q[0, 0],
        q[1, 1],
        q.mean(axis=(0, 1)),
        0.75 * q[0, 0] + 0.25 * q[1, 0],
        q[0, 1],
    ]
    np.testing.assert_allclose(GRID(points), softmax(np.array(expected) / 2.0, axis=1))


def test_a_file_gives_the_policy_back_and_the_same_bytes(tmp_path):
    first = tmp_path / "a.npz"
    second = tmp_path / "b.npz"
    save_grid_policy(first, GRID)
    save_grid_policy(second, GRID)
    assert first.read_bytes() == second.read_bytes()
    loaded = load_policy(first, Discrete(3), (2,))
    points = np.random.default_rng(0).uniform(-1, 2, size=(50, 2)).astype(np.float32)
    np.testing.assert_allclose(loaded.probabilities(points), GRID(points), rtol=1e-12)


@pytest.mark.parametrize(
    ("space", "shape"),
    [(Discrete(4), (2,)), (Continuous(1), (2,)), (Discrete(3), (5,))],
)
def test_a_log_that_does_not_fit_is_named(tmp_path, space, shape):
    save_grid_policy(tmp_path / "a.npz", GRID)
    with pytest.raises(
        PolicyError, match=r"a\.npz.*give a policy trained for this log"
    ):
        load_policy(tmp_path / "a.npz", space, shape)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"W0": np.array([{"a": 1}], dtype=object)},
            "is not read: W0 has dtype object",
        ),
        (
            {"format": np.array("other")},
            r"not a koffline policy \(arrays: action_values, high, low, temp",
        ),
        ({"version": np.array(9)}, "version 9; this koffline reads version 1"),
        *(
            (change, "")
            for change in (
                {"low": np.zeros(3)},
                {"low": np.array([5.0, 5.0])},
                {"action_values": np.zeros(3)},
                {"action_values": np.full((2, 2, 3), np.nan)},
                {"temperature": 0.0},
                {"temperature": "warm"},
                {"more": 1.0},
            )
        ),
    ],
)
def test_files_that_are_wrong_are_refused_with_their_name(tmp_path, change, words):
    arrays = {
        "low": GRID.low,
        "high": GRID.high,
        "action_values": GRID.action_values,
        "temperature": 2.0,
    }
    described = {"format": "koffline-grid-policy", "version": 1, **arrays}
    np.savez(tmp_path / "bad.npz", **{**described, **change})
    with refused(PolicyError, rf"bad\.npz.*{words}"):
        load_policy(tmp_path / "bad.npz", Discrete(3), (2,))
