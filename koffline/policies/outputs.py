"""What a policy's function may return, turned into checked arrays; every failure is one line with its remedy.

Discrete functions return probabilities (N, n) or greedy action indices (N,) or (N, 1); continuous ones return
actions (N, k), or (N,) when k = 1. NumPy arrays, torch tensors and nested lists are accepted.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from jaxtyping import Float

from koffline.errors import PolicyError

SUM_TOLERANCE = 1e-4
# A probability computed as 1 - sum of the others in float32 may come out this far below zero.
NEGATIVE_TOLERANCE = 1e-6

_TORCHSCRIPT = "Traceback of TorchScript"


def one_line(error: BaseException) -> str:
    """Type and first part of an exception's message without line breaks, for a one-line error."""
    message = last_line(error)
    kind = RuntimeError if _TORCHSCRIPT in str(error) else type(error)  # torch has one of its own, and none
    return f"{kind.__name__}: {message[:240]}" if message else kind.__name__


def last_line(error: BaseException) -> str:
    """An exception's message in one line; of one inside a TorchScript program the cause, not its text."""
    text = str(error).strip()
    if _TORCHSCRIPT in text:
        text = text.splitlines()[-1].removeprefix("builtins.").removeprefix("RuntimeError: ")
    return " ".join(text.split())


def as_array(raw: Any, name: str) -> np.ndarray:
    """The output as a numeric NumPy array; a torch tensor is detached and moved to the CPU."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(raw, torch.Tensor):
        raw = raw.detach().cpu().numpy()
    try:
        array = np.asarray(raw)
    except ValueError as error:
        raise PolicyError(f"{name}: the output is ragged ({one_line(error)}); return one array") from error
    if array.dtype.kind not in "biuf":
        raise PolicyError(
            f"{name}: the output has dtype {array.dtype}, from {type(raw).__name__}; "
            "return one array of numbers, a row per observation"
        )
    return array


def discrete_output(raw: Any, rows: int, n: int, name: str) -> np.ndarray:
    """The output as probabilities (N, n) or indices (N,), values unchecked. Raises PolicyError on shape."""
    array = as_array(raw, name)
    if array.shape == (rows, n) and (array.dtype.kind == "f" or n > 1):
        return array
    if array.shape in ((rows,), (rows, 1)):
        return array.reshape(rows)
    raise PolicyError(
        f"{name}: the output has shape {array.shape} for {rows} observations and {n} actions; "
        f"return probabilities of shape ({rows}, {n}) or action indices of shape ({rows},)"
    )


def continuous_output(raw: Any, rows: int, k: int, name: str) -> np.ndarray:
    """The output as actions (N, k), values unchecked. Raises PolicyError on shape."""
    array = as_array(raw, name)
    if k == 1 and array.shape == (rows,):
        return array.reshape(rows, 1)
    if array.shape != (rows, k):
        raise PolicyError(
            f"{name}: the output has shape {array.shape} for {rows} observations and {k} action dimensions; "
            f"return actions of shape ({rows}, {k})"
        )
    return array


def discrete_probabilities(raw: Any, rows: int, n: int, name: str) -> Float[np.ndarray, "row action"]:
    """Action probabilities (N, n), float64, each row renormalised to sum to one.

    Raises PolicyError for another shape, values that are not finite, indices outside 0..n-1, negative
    probabilities and rows that do not sum to 1 within 1e-4 (logits and action values among them).
    """
    array = discrete_output(raw, rows, n, name)
    if array.ndim == 2:
        return _renormalised(array.astype(np.float64), name)
    return _one_hot(array, n, name)


def continuous_actions(raw: Any, rows: int, k: int, name: str) -> Float[np.ndarray, "row action"]:
    """Actions (N, k), float64. Raises PolicyError for another shape or values that are not finite."""
    array = continuous_output(raw, rows, k, name)
    _require_finite(array, "actions", name)
    return array.astype(np.float64)


def log_densities(raw: Any, rows: int, name: str) -> Float[np.ndarray, " row"]:
    """Log densities (N,), float64, −inf allowed. Raises PolicyError for another shape, NaN and +inf."""
    array = as_array(raw, name)
    if array.shape not in ((rows,), (rows, 1)):
        raise PolicyError(
            f"{name}: the log density has shape {array.shape} for {rows} rows; return one number per row, "
            "summed over action dimensions"
        )
    array = array.reshape(rows).astype(np.float64)
    bad = np.flatnonzero(np.isnan(array) | (array == np.inf))
    if bad.size:
        raise PolicyError(
            f"{name}: row {int(bad[0])} of the log density is {array[bad[0]]}; return finite numbers, "
            "-inf for impossible actions"
        )
    return array


def _renormalised(array: np.ndarray, name: str) -> np.ndarray:
    _require_finite(array, "probabilities", name)
    sums = array.sum(axis=1)
    off = np.abs(sums - 1.0) > SUM_TOLERANCE
    negative = (array < -NEGATIVE_TOLERANCE).any(axis=1)
    bad = np.flatnonzero(off | negative)
    if bad.size:
        row = int(bad[0])
        what = f"sums to {sums[row]:.6g}" if off[row] else f"contains {array[row].min():.6g}"
        raise PolicyError(
            f"{name}: row {row} of the probabilities {what}; each row must be >= 0 and sum to 1: "
            "for logits return softmax(logits), for action values return their argmax"
        )
    array = np.clip(array, 0.0, None)
    return array / array.sum(axis=1, keepdims=True)


def _one_hot(indices: np.ndarray, n: int, name: str) -> np.ndarray:
    _require_finite(indices, "action indices", name)
    whole = indices.astype(np.int64)
    bad = np.flatnonzero((whole != indices) | (whole < 0) | (whole >= n))
    if bad.size:
        row = int(bad[0])
        raise PolicyError(
            f"{name}: row {row} of the output is {indices[row]}, not an action index in 0..{n - 1}; "
            f"return whole numbers in that range or probabilities of shape ({indices.size}, {n})"
        )
    probabilities = np.zeros((indices.size, n))
    probabilities[np.arange(indices.size), whole] = 1.0
    return probabilities


def _require_finite(array: np.ndarray, what: str, name: str) -> None:
    finite = np.isfinite(array.reshape(len(array), -1)).all(axis=1) if array.size else np.ones(0, bool)
    if not finite.all():
        row = int(np.flatnonzero(~finite)[0])
        raise PolicyError(
            f"{name}: row {row} of the {what} is not finite ({array[row]}); "
            "check the policy's weights and the range of the observations"
        )
