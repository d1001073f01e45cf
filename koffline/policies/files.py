"""Policy files told apart by content, and those of other tools: TorchScript and ONNX.

torch.jit.load runs no Python from a file (d3rlpy's save_policy("policy.pt") writes such files). The file is
still a program in torch's own instruction set, which can for instance write files: load only files you
trust. An ONNX file, run by onnxruntime (extra `onnx`), is data.
"""

from __future__ import annotations

import copyreg
import io
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from koffline.errors import PolicyError
from koffline.policies.base import one_line
from koffline.policies.python_policy import say_it_runs_code
from koffline.untrusted.limits import Refused, check_regular
from koffline.untrusted.models import check_onnx

ACCEPTED = (
    "a d3rlpy .d3, a TorchScript, ONNX or koffline .npz file, 'package.module:name', 'uniform', "
    "or 'epsilon:0.1:<policy>'"
)
_ZIP, _HDF5 = b"PK\x03\x04", b"\x89HDF\r\n\x1a\n"
_ONNX = b"\x08"  # the version of the format, its first field
_DTYPES = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(uint8)": np.uint8}


def detect(path: Path) -> str:
    """One of "d3", "torchscript", "npz", "onnx"; the name plays no part. Raises PolicyError for others."""
    try:
        check_regular(path)
        with path.open("rb") as file:
            head = file.read(8)
    except Refused as error:
        raise PolicyError(f"{path}: {error}") from None
    except OSError as error:
        raise PolicyError(
            f"{path}: cannot be read ({one_line(error)}); check the path and its permissions"
        ) from error
    if head.startswith(_ZIP):
        return _kind_of_zip(path)
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "d3"
    if head.startswith(_ONNX):
        return "onnx"
    if path.suffix == ".py" and head:
        raise PolicyError(f"{path}: Python code is given as '{path.stem}:name', the name of a function in it")
    found = "the file is empty" if not head else f"the content is not a policy (it begins with {head!r})"
    if head == _HDF5:
        found = "this is an HDF5 file, a log and not a policy"
    raise PolicyError(f"{path}: {found}; a policy is {ACCEPTED}")


def _kind_of_zip(path: Path) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except Exception as error:  # a damaged table of contents fails in any way
        raise PolicyError(
            f"{path}: the archive is truncated or corrupt ({one_line(error)}); copy it again"
        ) from error
    if any(name.endswith("/constants.pkl") for name in names):
        return "torchscript"
    if any(name.endswith("/data.pkl") for name in names):
        raise PolicyError(
            f"{path}: this is a torch.save checkpoint, weights without the network or a pickle "
            "that could run code; for d3rlpy use algo.save(path), else torch.jit.script(module).save(path)"
        )
    if names and all(name.endswith(".npy") for name in names):
        return "npz"
    raise PolicyError(
        f"{path}: the archive is not a policy (it holds {', '.join(names[:3])}); a policy is {ACCEPTED}"
    )


def read_torchscript(path: Path) -> Any:
    """The module of a TorchScript file, on the CPU. Raises PolicyError for a corrupt file."""
    say_it_runs_code(str(path), "is a TorchScript program, which can read and write files")
    try:
        return _unpack(path.read_bytes())
    except Exception as error:
        raise PolicyError(
            f"{path}: the TorchScript file cannot be read ({one_line(error)}); export it again"
        ) from error


def _unpack(content: bytes) -> Any:
    import torch

    copyreg.pickle(torch.jit.RecursiveScriptModule, _pack)
    with _no_deprecation():
        return torch.jit.load(io.BytesIO(content), map_location="cpu")


def _pack(module: Any) -> tuple[Callable[..., Any], tuple[bytes]]:
    """How a loaded module travels to other processes: as the content of a file."""
    import torch

    file = io.BytesIO()
    with _no_deprecation():
        torch.jit.save(module, file)
    return _unpack, (file.getvalue(),)


@contextmanager
def _no_deprecation() -> Iterator[None]:
    """Deprecated in favour of torch.export, but the files are there and d3rlpy writes no other."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.*", category=DeprecationWarning)
        yield


class OnnxFunction:
    """Observations to the only output of a model; it travels to other processes as the file's content.

    A model exported with a batch of exactly one row (as d3rlpy does) is called row by row.
    """

    def __init__(self, content: bytes) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._content = content
        self.session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])

    def __call__(self, observations: np.ndarray) -> np.ndarray:
        """The output for rows (N, …)."""
        (given,), run = self.session.get_inputs(), self.session.run
        values = np.ascontiguousarray(observations, dtype=_DTYPES[given.type])
        if not isinstance(given.shape[0], int):
            return np.asarray(run(None, {given.name: values})[0])
        rows = [run(None, {given.name: values[i : i + 1]})[0] for i in range(len(values))]
        return np.concatenate([np.reshape(row, (1, -1)) for row in rows])

    def __reduce__(self) -> tuple[Any, ...]:
        return OnnxFunction, (self._content,)


def load_onnx(path: Path, observation_shape: Sequence[int]) -> OnnxFunction:
    """The function in a file.

    Raises PolicyError for a missing onnxruntime, a corrupt file, several inputs or outputs, and observations
    that do not fit.
    """
    try:
        content = path.read_bytes()
        check_onnx(content)
        function = OnnxFunction(content)
    except ImportError as error:
        raise PolicyError(
            f"{path}: reading ONNX needs onnxruntime ({one_line(error)}); pip install 'koffline[onnx]'"
        ) from error
    except Refused as error:
        raise PolicyError(f"{path}: it is not read: {error}") from None
    except Exception as error:
        raise PolicyError(
            f"{path}: the ONNX file cannot be read ({one_line(error)}); export it again"
        ) from error
    inputs, outputs = function.session.get_inputs(), function.session.get_outputs()
    if len(inputs) != 1 or len(outputs) != 1:
        names = f"inputs {[item.name for item in inputs]}, outputs {[item.name for item in outputs]}"
        raise PolicyError(
            f"{path}: the model has {names}; export it with the observations as its only input and "
            "probabilities or actions as its only output"
        )
    batch, *own = inputs[0].shape
    expected = tuple(observation_shape)
    free = tuple(side if isinstance(side, int) else there for side, there in zip(own, expected, strict=False))
    wrong = {
        f"an input of type {inputs[0].type}; export it with a float32 input": inputs[0].type not in _DTYPES,
        f"observations of shape {tuple(own)}, the log has {expected}; give a policy trained for this log": (
            len(own) != len(expected) or free != expected
        ),
        f"exactly {batch} rows at a time; export it with a free batch size": (
            isinstance(batch, int) and batch != 1
        ),
    }
    for reason, is_wrong in wrong.items():
        if is_wrong:
            raise PolicyError(f"{path}: the model takes {reason}")
    return function
