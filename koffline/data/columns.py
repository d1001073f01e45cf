"""Checks and lossless casts of single columns; each failure is one sentence with the row and the remedy."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from koffline.data.spaces import ActionSpace, Continuous, Discrete
from koffline.errors import DataError

# Rows looked at in one go: a check of a large log needs no second copy of it.
BLOCK_ROWS = 65_536
# Bounded actions may exceed their bounds by this much of the range: float32 rounding of squashed actions.
_BOUND_TOLERANCE = 1e-5
# Whole numbers up to this size are exact in float32.
_EXACT_IN_FLOAT32 = 2**24


def blocks(n_rows: int) -> Iterator[slice]:
    """Slices that cover ``n_rows`` rows in order."""
    for start in range(0, n_rows, BLOCK_ROWS):
        yield slice(start, min(start + BLOCK_ROWS, n_rows))


def extremes(array: Any) -> np.ndarray:
    """Smallest and largest number (2,) of an array that is in memory or read by slices."""
    pieces = (np.asarray(array[block]) for block in blocks(len(array)))
    found = np.array([(piece.min(), piece.max()) for piece in pieces])
    return np.array([found[:, 0].min(), found[:, 1].max()])


def as_array(name: str, values: Any) -> np.ndarray:
    """``values`` as an array in the machine's byte order, without a copy where it is one already."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{name} is no rectangular array ({error}); give one row per transition") from None
    if array.dtype.kind not in "biuf":
        raise DataError(f"{name} has dtype {array.dtype}; give numbers, one row per transition")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def read_only(array: np.ndarray) -> np.ndarray:
    """A view that cannot be written through; the caller's own array stays as it was."""
    view = array.view()
    view.flags.writeable = False
    return view


def as_float(array: np.ndarray) -> np.ndarray:
    """Cast to float: float32 and float64 stay, float16 and small integers become float32, others float64."""
    if array.dtype in (np.float32, np.float64):
        return array
    is_small = array.dtype in (np.float16, np.bool_) or array.dtype.itemsize <= 2
    if not is_small and array.dtype.kind in "iu" and array.size:
        is_small = int(array.max()) <= _EXACT_IN_FLOAT32 and int(array.min()) >= -_EXACT_IN_FLOAT32
    return array.astype(np.float32 if is_small else np.float64)


def _vector(name: str, values: Any) -> np.ndarray:
    array = as_array(name, values)
    if array.ndim != 1:
        raise DataError(f"{name} has shape {array.shape}, expected (N,); give one number per row")
    return array


def _check_finite(name: str, array: np.ndarray, first_row: int) -> np.ndarray:
    """Return the array, or raise DataError. ``first_row``: the number of the first row in error messages."""
    for block in blocks(len(array)) if array.dtype.kind == "f" else ():
        good = np.isfinite(array[block])
        if not good.all():
            place = np.argwhere(~good)[0]
            value, row = array[block][tuple(place)], first_row + block.start + place[0]
            where = f" at {place[1:].tolist()}" if array.ndim > 1 else ""
            raise DataError(f"{name} holds {value} in row {row}{where}; drop or mend that row")
    return array


def _refuse(name: str, array: np.ndarray, bad: np.ndarray, first_row: int, remedy: str) -> None:
    """Raise DataError for the first row marked in ``bad``, if there is one."""
    if bad.any():
        row = int(np.argmax(bad))
        raise DataError(f"{name} holds {array[row]:g} in row {first_row + row}{remedy}")


def integer_column(name: str, values: Any, first_row: int = 0) -> np.ndarray:
    """Cast a column to int64 (N,); floats must be whole numbers."""
    array = _check_finite(name, _vector(name, values), first_row)
    if array.dtype.kind == "f":
        _refuse(name, array, np.trunc(array) != array, first_row, "; give whole numbers")
    return array.astype(np.int64, copy=False)


def _observations(name: str, values: Any, first_row: int) -> np.ndarray:
    """Check observations (N, ...): float32, float64 or uint8 stay, other types are cast exactly."""
    array = as_array(name, values)
    if array.ndim < 2 or (len(array) and not array.size):
        remedy = f"use {name}.reshape(-1, 1)" if array.size else "give at least one number per row"
        raise DataError(f"{name} has shape {array.shape}, expected (N, …); {remedy}")
    return _check_finite(name, as_float(array) if array.dtype != np.uint8 else array, first_row)


def _actions(values: Any, space: ActionSpace, first_row: int) -> np.ndarray:
    """Check actions: int64 (N,) within 0 … n − 1, or float (N, k) within the bounds."""
    if isinstance(space, Discrete):
        actions = integer_column("actions", values, first_row)
        if actions.size and (actions.min() < 0 or actions.max() >= space.n):
            row = int(np.argmax((actions < 0) | (actions >= space.n)))
            needed = f"Discrete({int(actions.max()) + 1})" if actions.min() >= 0 else "actions counted from 0"
            said = f"action {actions[row]} in row {first_row + row} is outside 0 … {space.n - 1}"
            raise DataError(f"{said}; declare {needed} or mend the row")
        return actions
    actions = as_array("actions", values)
    if actions.shape != (len(actions), space.k):
        said = f"actions has shape {actions.shape}, expected (N, {space.k}) for {space}"
        raise DataError(f"{said}; declare Continuous(k, low, high), or use actions.reshape(-1, {space.k})")
    actions = _check_finite("actions", as_float(actions), first_row)
    low, high = tolerant_bounds(space)
    for block in blocks(len(actions)):
        outside = (actions[block] < low) | (actions[block] > high)
        if outside.any():
            row, i = np.argwhere(outside)[0]
            said = f"action {actions[block][row, i]:g} in row {first_row + block.start + row}, dimension {i}"
            bounds = f"{space.low[i]:g} … {space.high[i]:g}"
            raise DataError(f"{said}, is outside {bounds}; declare wider bounds or clip the actions")
    return actions


def tolerant_bounds(space: Continuous) -> tuple[np.ndarray, np.ndarray]:
    """Bounds (k,), widened to allow for float32 rounding."""
    bounds = np.asarray([space.low, space.high])
    slack = _BOUND_TOLERANCE * np.maximum(1.0, np.where(np.isfinite(bounds), np.abs(bounds), 1.0))
    return bounds[0] - slack[0], bounds[1] + slack[1]


def check_some_weight(weights: np.ndarray) -> None:
    """Raise DataError if all weights of a log are zero."""
    if not (weights > 0).any():
        raise DataError("weights are all 0; give at least one row a positive weight")


def row_columns(given: Mapping[str, Any], space: ActionSpace, first_row: int = 0) -> dict[str, np.ndarray]:
    """Checked columns of some rows by the names of ``Transitions``, all but ``episode_ids`` and ``steps``.

    Flags may come as 0 and 1. Densities of continuous actions may exceed 1; weights of some rows of a log may
    all be 0.
    """
    checked = {"actions": _actions(given["actions"], space, first_row)}
    for name in ("observations", "next_observations"):
        checked[name] = _observations(name, given[name], first_row)
    for name in ("rewards", "behavior_log_probabilities", "weights"):
        if name in given:
            checked[name] = _check_finite(name, as_float(_vector(name, given[name])), first_row)
    for name in ("terminated", "truncated"):
        array = _vector(name, given[name])
        if array.dtype != np.bool_:
            _refuse(name, array, (array != 0) & (array != 1), first_row, "; give True or False")
        checked[name] = array.astype(np.bool_, copy=False)
    if isinstance(space, Discrete) and (found := checked.get("behavior_log_probabilities")) is not None:
        remedy = ", a probability above 1; give natural logarithms of probabilities"
        _refuse("behavior_log_probabilities", found, found > 1e-4, first_row, remedy)
    if (weights := checked.get("weights")) is not None:
        _refuse("weights", weights, weights < 0, first_row, "; give weights of at least 0")
    return checked


def digest_columns(hashed: Iterable[tuple[str, tuple[int, ...], Any, Iterable[np.ndarray]]]) -> str:
    """Hex digest of columns in the order given: name, shape and dtype of each, and its rows in parts."""
    digest = hashlib.sha256()
    for name, shape, dtype, parts in hashed:
        kept = np.dtype("<f8") if dtype.kind == "f" else dtype.newbyteorder("<")
        digest.update(f"{name}{shape}{dtype.kind};".encode())
        for part in parts:
            digest.update(np.ascontiguousarray(part, dtype=kept).data)
    return digest.hexdigest()


def row_indices(rows: Any, size: int) -> np.ndarray:
    """Indices within 0 … size − 1 from indices or a mask. Raises DataError where nothing is chosen."""
    chosen = np.asarray(rows)
    if chosen.dtype == np.bool_ and chosen.shape == (size,):
        chosen = np.flatnonzero(chosen)
    is_index = chosen.ndim == 1 and chosen.size and chosen.dtype.kind in "iu"
    if not is_index or chosen.min() < 0 or chosen.max() >= size:
        said = f"a selection of shape {chosen.shape} and dtype {chosen.dtype}"
        raise DataError(f"{said}; give indices within 0 … {size - 1}, at least one")
    return chosen


def counted(count: int, noun: str, one: str = "", more: str = "") -> str:
    """``1 row``, ``3 rows``; with a verb ``1 row was``, ``3 rows were``."""
    verb = one if count == 1 else more
    return f"{count} {noun}{'' if count == 1 else 's'}{f' {verb}' if verb else ''}"
