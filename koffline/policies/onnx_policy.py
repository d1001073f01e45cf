"""Policies in ONNX files, run by onnxruntime (extra `onnx`); the file can run no Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from koffline.errors import PolicyError
from koffline.policies.outputs import one_line
from koffline.untrusted.limits import Refused
from koffline.untrusted.models import check_onnx

_DTYPES = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(uint8)": np.uint8}


def load_onnx(path: Path, observation_shape: Sequence[int]) -> Callable[[np.ndarray], np.ndarray]:
    """A function from observations to the model's only output.

    A model exported with a batch of exactly one row (as d3rlpy does) is called row by row. Raises
    PolicyError for a missing onnxruntime, a corrupt file, several inputs or outputs, and observations that
    do not fit.
    """
    content, session = _session(path)
    inputs, outputs = session.get_inputs(), session.get_outputs()
    if len(inputs) != 1 or len(outputs) != 1:
        names = f"inputs {[item.name for item in inputs]}, outputs {[item.name for item in outputs]}"
        raise PolicyError(
            f"{path}: the model has {names}; export it with the observations as its only input and "
            "probabilities or actions as its only output"
        )
    dtype = _DTYPES.get(inputs[0].type)
    if dtype is None:
        raise PolicyError(f"{path}: the input has type {inputs[0].type}; export it with a float32 input")
    batch = _check_input(path, inputs[0].shape, observation_shape)
    return _OnnxFunction(content, inputs[0].name, dtype, batch is not None, session)


class _OnnxFunction:
    """Calls a session; it travels to other processes as the content of its file."""

    def __init__(
        self, content: bytes, input_name: str, dtype: Any, row_by_row: bool, session: Any = None
    ) -> None:
        self._made_of = content, input_name, dtype, row_by_row
        self._session = _start_session(content) if session is None else session

    def __call__(self, observations: np.ndarray) -> np.ndarray:
        _, input_name, dtype, row_by_row = self._made_of
        run = self._session.run
        values = np.ascontiguousarray(observations, dtype=dtype)
        if not row_by_row:
            return np.asarray(run(None, {input_name: values})[0])
        rows = [run(None, {input_name: values[i : i + 1]})[0] for i in range(len(values))]
        return np.concatenate([np.reshape(row, (1, -1)) for row in rows])

    def __reduce__(self) -> tuple[Any, ...]:
        return _OnnxFunction, self._made_of


def _session(path: Path) -> tuple[bytes, Any]:
    """The content of a file, checked, and a session that runs it. Raises PolicyError."""
    try:
        import onnxruntime  # noqa: F401 - so that its absence is said as such
    except ImportError as error:
        raise PolicyError(
            f"{path}: reading ONNX needs onnxruntime ({one_line(error)}); pip install 'koffline[onnx]'"
        ) from error
    try:
        content = path.read_bytes()
        check_onnx(content)
        return content, _start_session(content)
    except Refused as error:
        raise PolicyError(f"{path}: it is not read: {error}") from None
    except Exception as error:
        raise PolicyError(
            f"{path}: the ONNX file cannot be read ({one_line(error)}); export it again"
        ) from error


def _start_session(content: bytes) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def _check_input(path: Path, shape: Sequence[Any], observation_shape: Sequence[int]) -> int | None:
    """The fixed batch size, 1, or None when it is free."""
    expected = tuple(observation_shape)
    own = tuple(shape[1:])
    free = [not isinstance(side, int) for side in own]
    if len(own) != len(expected) or any(
        not is_free and side != wanted for is_free, side, wanted in zip(free, own, expected, strict=True)
    ):
        raise PolicyError(
            f"{path}: the model takes observations of shape {own}, the log has {expected}; "
            "give a policy trained for this log"
        )
    batch = shape[0] if isinstance(shape[0], int) else None
    if batch not in (None, 1):
        raise PolicyError(
            f"{path}: the model takes exactly {batch} rows at a time; export it with a free batch size"
        )
    return batch
