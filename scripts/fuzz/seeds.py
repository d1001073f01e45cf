"""Well-formed files to start from, built here and small: a fuzzer bends what is nearly
right.
"""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from koffline.data.transitions import Continuous, Discrete, Transitions


def log(continuous: bool = False) -> Transitions:
    """Two episodes of three rows."""
    if continuous:
        actions = np.linspace(-1, 1, 6).reshape(6, 1)
    else:
        actions = np.array([0, 1, 1, 0, 1, 0])
    path = np.arange(14.0, dtype=np.float32).reshape(7, 2)
    return Transitions(
        path[:-1],
        actions,
        np.arange(6.0),
        path[1:],
        np.array([0, 0, 1, 0, 0, 0], dtype=bool),
        np.array([0, 0, 0, 0, 0, 1], dtype=bool),
        Continuous(1, -1, 1) if continuous else Discrete(2),
        episode_ids=np.array([0, 0, 0, 1, 1, 1]),
    )


def _written(write: Callable[[Path], object], name: str = "seed") -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        write(path)
        return path.read_bytes()


def hdf5_seeds() -> list[bytes]:
    """Ours (compressed and not), D4RL's keys, and one of h5py's oldest layout."""
    import h5py

    from koffline.data.flat import write_hdf5

    def plain(path: Path) -> None:
        with h5py.File(path, "w") as file:
            file["observations"] = np.zeros((4, 2), "f4")
            file["actions"] = np.zeros((4, 1), "f4")
            file["rewards"] = np.zeros(4)
            file["terminals"] = np.zeros(4, bool)
            file["infos/action_log_probs"] = np.zeros(4)

    return [_written(lambda path: write_hdf5(log(), path)), _written(plain)]


def dump_seeds() -> list[bytes]:
    """d3rlpy's ReplayBuffer.dump."""
    from koffline.data.d3rlpy_dump import write_d3rlpy_dump

    return [_written(lambda path: write_d3rlpy_dump(log(), path))]


def npz_seeds() -> list[bytes]:
    """Our archive, and a stored one."""
    from koffline.data.flat import flat_arrays, write_npz

    def stored(path: Path) -> None:
        arrays: dict[str, Any] = flat_arrays(log())
        with path.open("wb") as file:
            np.savez(file, **arrays)

    return [_written(lambda path: write_npz(log(), path)), _written(stored)]


def npy_seeds() -> list[bytes]:
    """Start states."""
    written = io.BytesIO()
    np.save(written, np.zeros((3, 2)))
    return [written.getvalue()]


def table_seeds(suffix: str) -> list[bytes]:
    """A table as people keep it, and one with nested columns."""
    import pyarrow as pa
    from pyarrow import csv, feather, parquet

    rows = pa.table(
        {
            "x_0": [0.0, 1.0, 2.0, 3.0],
            "x_1": [1.0, 2.0, 3.0, 4.0],
            "a": ["left", "right", "left", "left"],
            "r": [0.0, 1.0, 0.0, 1.0],
            "id": ["e", "e", "f", "f"],
            "t": [0, 1, 0, 1],
            "done": [False, True] * 2,
        }
    )
    if suffix == "csv":
        return [_written(lambda path: csv.write_csv(rows, path))]
    nested = rows.append_column("x_2", pa.array([[1.0], [2.0, 3.0], None, []]))
    nested = nested.append_column("s", pa.array([{"p": 1}] * 4))
    if suffix == "parquet":
        write = parquet.write_table
    else:
        write = feather.write_feather
    return [_written(partial(write, table)) for table in (rows, nested)]


def minari_metadata_seeds() -> list[bytes]:
    """The metadata.json of a dataset that we wrote."""
    with tempfile.TemporaryDirectory() as folder:
        minari_folder(Path(folder) / "seed-v0")
        return [(Path(folder) / "seed-v0/data/metadata.json").read_bytes()]


def minari_data_seeds() -> list[bytes]:
    """Its main_data.hdf5."""
    with tempfile.TemporaryDirectory() as folder:
        minari_folder(Path(folder) / "seed-v0")
        return [(Path(folder) / "seed-v0/data/main_data.hdf5").read_bytes()]


def minari_folder(target: Path) -> None:
    """Write a dataset."""
    from koffline.data.minari import write_minari

    write_minari(log(), target, "seed-v0")


def d3_seeds() -> list[bytes]:
    """A d3rlpy model, small."""
    from koffline.data import import_d3rlpy

    d3rlpy = import_d3rlpy()
    encoder = d3rlpy.models.VectorEncoderFactory(hidden_units=[4])
    algo = d3rlpy.algos.DQNConfig(encoder_factory=encoder).create()
    algo.create_impl((2,), 2)
    return [_written(lambda path: algo.save(str(path)), "seed.d3")]


def checkpoint_seeds() -> list[bytes]:
    """Tensors and plain values, as torch writes them."""
    import torch

    from koffline.checkpoints import write_checkpoint

    state = {
        "fingerprint": "f",
        "step": 3,
        "tensors": [torch.arange(4.0), torch.ones(2, 2)],
        "none": None,
    }
    return [_written(lambda path: write_checkpoint(path, state))]


def policy_seeds() -> list[bytes]:
    """Both kinds of our own policy files."""
    from koffline.policies import GridPolicy, save_grid_policy, save_mlp_policy

    grid = GridPolicy((0.0, 0.0), (1.0, 1.0), np.zeros((2, 2, 2)))
    return [
        _written(
            lambda path: save_mlp_policy(
                path, [(np.ones((2, 2)), np.zeros(2))], "softmax"
            )
        ),
        _written(lambda path: save_grid_policy(path, grid)),
    ]


def onnx_seeds() -> list[bytes]:
    """One layer, its weights inside."""
    from onnx import TensorProto, helper, numpy_helper

    weights = numpy_helper.from_array(np.ones((2, 2), np.float32), "w")
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["y"]),
            helper.make_node("Softmax", ["y"], ["p"]),
        ],
        "policy",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])],
        [helper.make_tensor_value_info("p", TensorProto.FLOAT, ["n", 2])],
        [weights],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9
    )
    return [model.SerializeToString()]


def yaml_seeds() -> list[bytes]:
    """Settings with what YAML can do."""
    return [
        b"gamma: 0.9\nsteps: 100\nhidden_units: [8, 8]\n",
        b"a: &a [1, 2]\nb: {c: *a, <<: {d: 1e3}}\ne: !!float 1\nf: 2001-01-01\n",
        (
            b"data: {source: log.hdf5, discrete: 2}\nalgo: {name: kloss_dqn}\ntrain:"
            b" {steps: 10, seed: 1}\n"
        ),
        (
            b"environment: {id: CartPole-v1}\ntrust_pcl: {gamma: 0.9}\nsteps:"
            b" 10\nseeds: [1]\n"
        ),
        b"observations: ['x_*']\naction: a\nreward: r\nepisode: id\ntime: t\n",
    ]


def json_seeds() -> list[bytes]:
    """The description that our files carry."""
    from koffline.data.raw import describe_log

    return [
        describe_log(log()).encode(),
        json.dumps({"format": 1, "low": [None, 1e400]}).encode(),
    ]


def manifest_seeds() -> list[bytes]:
    """The manifest of a folder of shards."""
    with tempfile.TemporaryDirectory() as folder:
        shard_folder(Path(folder) / "shards")
        return [(Path(folder) / "shards/manifest.json").read_bytes()]


def shard_seeds() -> list[bytes]:
    """The first shard of a folder."""
    with tempfile.TemporaryDirectory() as folder:
        shard_folder(Path(folder) / "shards")
        return [(Path(folder) / "shards/shard-00000.hdf5").read_bytes()]


def shard_folder(target: Path) -> None:
    """Write a folder of two shards."""
    from koffline.data.disk.writer import ShardWriter

    with ShardWriter(target, 3, False) as writer:
        writer.append(log())
