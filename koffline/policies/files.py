"""Policy files, recognised by content; readers for d3rlpy's .d3, TorchScript and ONNX.

A .d3 file is a pickle of {torch: bytes, config: str, version: str}. Our unpickler
refuses every global, so that a pickle can only build numbers, text and containers. The
weights inside are read by torch.load(weights_only=True), and only from its zip layout,
because the older layout was once exploitable. `koffline.algos.policies` rebuilds the
network, the only part that needs d3rlpy.

torch.jit.load runs no Python from a file (d3rlpy's save_policy("policy.pt") writes such
files). Yet the file is a program in torch's own instruction set, which can write files,
for instance: load only files you trust. An ONNX file, run by onnxruntime (extra
`onnx`), is data.
"""

from __future__ import annotations

import copyreg
import functools
import io
import logging
import multiprocessing
import warnings
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from koffline.errors import PolicyError, install_command
from koffline.policies.base import reading
from koffline.untrusted.arrays import PlainUnpickler, check_onnx, load_tensors
from koffline.untrusted.limits import check_memory, check_regular, parse_json

if TYPE_CHECKING:
    import torch

ACCEPTED = (
    "a d3rlpy .d3, a TorchScript, ONNX or koffline .npz file, 'package.module:name',"
    " 'uniform', or 'epsilon:0.1:<policy>'"
)
_ZIP = b"PK\x03\x04"
_HDF5 = b"\x89HDF\r\n\x1a\n"
_ONNX = b"\x08"  # the version of the format, its first field
_DTYPES = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(uint8)": np.uint8,
}
_ONE_OUTPUT = (
    "export one input of floats and one output, e.g. probabilities (scikit-learn:"
    " zipmap=False)"
)
_SAVE_AGAIN = "save the model again with d3rlpy's algo.save(path)"
_PARTS = {"torch": bytes, "config": str, "version": str}
_LOG = logging.getLogger(__name__)


def detect(path: Path) -> str:
    """One of "d3", "torchscript", "npz", "onnx", from the content alone.

    Raises PolicyError for others.
    """
    with reading(path, "cannot be read", "check the path and its permissions"):
        check_regular(path)
        with path.open("rb") as file:
            head = file.read(8)
    if head.startswith(_ZIP):
        return _kind_of_zip(path)
    # a pickle of protocol 2 to 5
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "d3"
    if head.startswith(_ONNX):
        return "onnx"
    if head == _HDF5:
        fault = "this is an HDF5 file, a log and not a policy"
    elif head:
        fault = f"the content is not a policy (it begins with {head!r})"
    else:
        fault = "the file is empty"
    raise PolicyError(f"{path}: {fault}; a policy is {ACCEPTED}")


def _kind_of_zip(path: Path) -> str:
    with (
        reading(path, "the archive is truncated or corrupt", "copy it again"),
        zipfile.ZipFile(path) as archive,
    ):
        names = archive.namelist()
    if any(name.endswith("/constants.pkl") for name in names):
        return "torchscript"
    if any(name.endswith("/data.pkl") for name in names):
        raise PolicyError(
            f"{path}: this is a torch.save checkpoint, weights without the network; for"
            " d3rlpy use algo.save(path), else torch.jit.script(module).save(path)"
        )
    if names and all(name.endswith(".npy") for name in names):
        return "npz"
    raise PolicyError(
        f"{path}: the archive is not a policy (it holds {', '.join(names[:3])}); a"
        f" policy is {ACCEPTED}"
    )


@dataclass(frozen=True)
class D3File:
    """Content of a .d3 file.

    ``states``: weights, and the optimisers' states, by name.
    """

    name: str
    algorithm: str
    config: str = field(repr=False)
    version: str
    states: dict[str, Any] = field(repr=False)


def read_d3(path: Path) -> D3File:
    """Read a .d3 file of any model as data: algorithms, evaluators, sequence models.

    Raises PolicyError if the file is corrupt or contains code.
    """
    name = str(path)
    with reading(name, "its pickle is truncated or corrupt", _SAVE_AGAIN):
        check_regular(path)
        check_memory(path.stat().st_size)
        content = PlainUnpickler(io.BytesIO(path.read_bytes())).load()
    if not (
        isinstance(content, dict)
        and all(isinstance(content.get(k), t) for k, t in _PARTS.items())
    ):
        raise PolicyError(
            f"{name}: the pickle does not hold a d3rlpy model ({', '.join(_PARTS)}) but"
            f" a {type(content).__name__}; {_SAVE_AGAIN}"
        )
    with reading(path, "the configuration makes no sense", _SAVE_AGAIN):
        algorithm = str(parse_json(content["config"])["config"]["type"])
    if not content["torch"].startswith(_ZIP):
        raise PolicyError(
            f"{name}: the weights are not in torch's zip layout; {_SAVE_AGAIN}"
        )
    with reading(
        name, "the archive of its weights is truncated or corrupt", _SAVE_AGAIN
    ):
        states = load_tensors(content["torch"])
    if not (isinstance(states, dict) and all(isinstance(key, str) for key in states)):
        raise PolicyError(f"{name}: the weights are not named modules; {_SAVE_AGAIN}")
    return D3File(
        name=name,
        algorithm=algorithm,
        config=content["config"],
        version=content["version"],
        states=states,
    )


@functools.cache
def say_it_runs_code(name: str, how: str) -> None:
    """Log a warning that loading the file runs code, once per name and process.

    Worker processes do not warn, because their parent has.
    """
    if multiprocessing.parent_process() is None:
        _LOG.warning("%s %s; load it only if you trust its author", name, how)


def read_torchscript(path: Path) -> torch.jit.RecursiveScriptModule:
    """The module of a TorchScript file, on the CPU.

    Raises PolicyError for a corrupt file.
    """
    say_it_runs_code(
        str(path), "is a TorchScript program, which can read and write files"
    )
    with reading(path, "the TorchScript file cannot be read", "export it again"):
        check_regular(path)
        return _unpack(path.read_bytes())


def _unpack(content: bytes) -> torch.jit.RecursiveScriptModule:
    import torch

    # Loaded modules travel to other processes as the content of a file.
    copyreg.pickle(
        torch.jit.RecursiveScriptModule,
        lambda module: (_unpack, (module.save_to_buffer(),)),
    )
    with warnings.catch_warnings():  # the only format that d3rlpy writes is deprecated
        warnings.filterwarnings(
            "ignore", message=".*torch.jit.*", category=DeprecationWarning
        )
        return torch.jit.load(io.BytesIO(content), map_location="cpu")


class OnnxFunction:
    """Function from observations to a model's only output; it is pickled as the content
    of the file.
    """

    is_network = True

    def __init__(self, content: bytes) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._content = content
        self._session = onnxruntime.InferenceSession(
            content, options, providers=["CPUExecutionProvider"]
        )
        inputs = self._session.get_inputs()
        outputs = self._session.get_outputs()
        takes_floats = len(inputs) == 1 and inputs[0].type in _DTYPES
        if not takes_floats or len(outputs) != 1:
            raise PolicyError(
                f"the model takes {_described(inputs) or 'nothing'} and returns"
                f" {_described(outputs)}; {_ONE_OUTPUT}"
            )

    def __call__(self, observations: np.ndarray) -> np.ndarray:
        """The output for rows (N, …); onnxruntime refuses inputs that do not fit the
        model.
        """
        (model_input,) = self._session.get_inputs()
        values = np.ascontiguousarray(observations, dtype=_DTYPES[model_input.type])
        (output,) = self._session.run(None, {model_input.name: values})
        return np.asarray(output)

    def __reduce__(self) -> tuple[type[OnnxFunction], tuple[bytes]]:
        return OnnxFunction, (self._content,)


def _described(sides: Iterable[Any]) -> str:
    """Names and types of a model's inputs or outputs."""
    return ", ".join(f"{side.name} {side.type}" for side in sides)


def load_onnx(path: Path) -> OnnxFunction:
    """The function of an ONNX file.

    Raises PolicyError if onnxruntime is missing or the file is corrupt.
    """
    with reading(
        path, "reading ONNX needs the package onnxruntime", install_command("onnx")
    ):
        import onnxruntime  # noqa: F401  (its extra may be missing)
    with reading(path, "the ONNX file cannot be read", "export it again"):
        check_regular(path)
        content = path.read_bytes()
        check_onnx(content)
        return OnnxFunction(content)
