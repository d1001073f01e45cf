"""Checks and lossless casts of columns, and of episodes; every error is one
sentence.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from koffline.data.spaces import ActionSpace, Continuous, Discrete
from koffline.errors import DataError

# Columns that say where a row lies in its episode.
COUNTED = ("episode_ids", "steps")
# Rows looked at in one go: a check of a large log needs no second copy of it.
BLOCK_ROWS = 65_536
# Bounded actions may exceed their bounds by this much of the range: float32 rounding of
# squashed actions.
_BOUND_TOLERANCE = 1e-5
_LONGEST_NUMBER = 100  # digits of a number inside a name
# Whole numbers up to this size are exact in float32.
_EXACT_IN_FLOAT32 = 2**24


def blocks(n_rows: int, size: int = BLOCK_ROWS) -> Iterator[slice]:
    """Slices that cover ``n_rows`` rows in order, ``size`` rows each."""
    for start in range(0, n_rows, size):
        yield slice(start, min(start + size, n_rows))


def as_array(name: str, values: Any) -> np.ndarray:
    """``values`` as an array in the machine's byte order, without a copy if possible.

    Raises DataError.
    """
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{name} is no rectangular array ({error}); give one row per transition"
        ) from None
    if array.dtype.kind not in "biuf":
        raise DataError(
            f"{name} has dtype {array.dtype}; give numbers, one row per transition"
        )
    if array.dtype.isnative:
        return array
    return array.astype(array.dtype.newbyteorder("="))


def read_only(array: np.ndarray) -> np.ndarray:
    """A read-only view; the caller's own array stays writable."""
    view = array.view()
    view.flags.writeable = False
    return view


def as_float(array: np.ndarray) -> np.ndarray:
    """Cast to float: float32 and float64 stay, float16 and small integers become
    float32, else float64.
    """
    if array.dtype in (np.float32, np.float64):
        return array
    is_small = array.dtype.itemsize <= 2
    if not is_small and array.dtype.kind in "iu" and array.size:
        is_small = (
            int(array.max()) <= _EXACT_IN_FLOAT32
            and int(array.min()) >= -_EXACT_IN_FLOAT32
        )
    return array.astype(np.float32 if is_small else np.float64)


def _vector(name: str, values: Any) -> np.ndarray:
    array = as_array(name, values)
    if array.ndim != 1:
        raise DataError(
            f"{name} has shape {array.shape}, expected (N,); give one number per row"
        )
    return array


def _refuse(
    name: str,
    array: np.ndarray,
    what: str,
    remedy: str,
    bad: np.ndarray,
    first_row: int,
) -> None:
    """Raise DataError for the first number marked in ``bad``, if there is one."""
    if bad.any():
        row, *within = np.argwhere(bad)[0].tolist()
        where = f"row {first_row + row}{f' at {within}' if within else ''}"
        raise DataError(
            f"{name} holds {array[(row, *within)]:g} in {where}, {what}; {remedy}"
        )


def integer_column(name: str, values: Any, first_row: int = 0) -> np.ndarray:
    """Cast a column to int64 (N,); floats must be whole numbers.

    ``first_row``: row number for messages.
    """
    array = _vector(name, values)
    if array.dtype.kind == "f":
        wide = array.astype(np.float64)  # 16 bits do not hold the bound
        bad = ~(np.abs(wide) < 2.0**63) | (np.trunc(wide) != wide)
        _refuse(
            name,
            array,
            "no whole number of 64 bits",
            "give whole numbers",
            bad,
            first_row,
        )
    return array.astype(np.int64, copy=False)


def value_faults(
    columns: Mapping[str, np.ndarray], space: ActionSpace
) -> Iterator[tuple[str, str, str, np.ndarray]]:
    """Yield possible errors in columns: column name, what is wrong, remedy, and a mask
    of the bad numbers.

    The mask has the shape of the column. Flags may be 0 and 1; densities of continuous
    actions may exceed 1.
    """
    for name, column in columns.items():
        if column.dtype.kind == "f":
            yield (
                name,
                "no finite number",
                "drop or mend such rows",
                ~np.isfinite(column),
            )
    actions = columns["actions"]
    outside = None
    if isinstance(space, Discrete) and actions.ndim == 1:
        if actions.dtype.kind == "f":
            fractions = np.isfinite(actions) & (np.trunc(actions) != actions)
            yield "actions", "no whole number", "count actions from 0", fractions
        outside = (actions < 0) | (actions >= space.n)
    elif isinstance(space, Continuous) and actions.shape[1:] == (space.k,):
        bounds = np.asarray([space.low, space.high])
        slack = _BOUND_TOLERANCE * np.maximum(
            1.0, np.where(np.isfinite(bounds), np.abs(bounds), 1.0)
        )
        outside = (actions < bounds[0] - slack[0]) | (actions > bounds[1] + slack[1])
    if outside is not None:
        yield (
            "actions",
            f"outside {space}",
            "declare the space anew or mend such rows",
            outside,
        )
    for name in ("terminated", "truncated"):
        flags = columns[name]
        if flags.dtype != np.bool_:
            yield (
                name,
                "neither true nor false",
                "give 0 or 1",
                (flags != 0) & (flags != 1),
            )
    weights = columns.get("weights")
    if weights is not None:
        yield "weights", "negative", "give weights of at least 0", weights < 0
    if (
        isinstance(space, Discrete)
        and (found := columns.get("behavior_log_probabilities")) is not None
    ):
        remedy = "give natural logarithms of probabilities"
        yield (
            "behavior_log_probabilities",
            "a probability above 1",
            remedy,
            found > 1e-4,
        )


def check_some_weight(weights: np.ndarray) -> None:
    """Raise DataError if all weights of a log are zero."""
    if not (weights > 0).any():
        raise DataError("weights are all 0; give at least one row a positive weight")


def row_columns(  # noqa: C901
    given: Mapping[str, Any], space: ActionSpace, first_row: int = 0
) -> dict[str, np.ndarray]:
    """Checked columns of some rows, named as in ``Transitions``, without
    ``episode_ids`` and ``steps``.

    Observations of float32, float64 or uint8 keep their type, others are cast exactly.
    All weights may be 0, because the rows may be a part of a log. ``first_row``: number
    of the first row, for messages.
    """
    held = {
        name: as_array(name, values)
        for name, values in given.items()
        if name not in COUNTED
    }
    for name, array in held.items():
        if name in ("observations", "next_observations"):
            if array.ndim < 2 or (len(array) and not array.size):
                if array.size:
                    remedy = f"use {name}.reshape(-1, 1)"
                else:
                    remedy = "give at least one number per row"
                raise DataError(
                    f"{name} has shape {array.shape}, expected (N, …); {remedy}"
                )
        elif name != "actions" or isinstance(space, Discrete):
            _vector(name, array)
        elif array.shape != (len(array), space.k):
            said = (
                f"actions has shape {array.shape}, expected (N, {space.k}) for {space}"
            )
            raise DataError(
                f"{said}; declare Continuous(k, low, high) or use actions.reshape(-1,"
                f" {space.k})"
            )
    for rows in blocks(len(held["rewards"])):
        block = {name: array[rows] for name, array in held.items()}
        for name, what, remedy, bad in value_faults(block, space):
            _refuse(name, block[name], what, remedy, bad, first_row + rows.start)
    for name, array in held.items():
        if name in ("terminated", "truncated"):
            held[name] = array.astype(np.bool_, copy=False)
        elif name == "actions" and isinstance(space, Discrete):
            held[name] = array.astype(np.int64, copy=False)
        elif name == "clusters":
            held[name] = integer_column(name, array, first_row)
        elif array.dtype != np.uint8 or "observations" not in name:
            held[name] = as_float(array)
    return held


def log_columns(given: Mapping[str, Any], space: Any) -> dict[str, np.ndarray]:
    """Checked columns of a whole log, which fit together. Raises DataError."""
    if not isinstance(space, (Discrete, Continuous)):
        remedy = "declare koffline.Discrete(n) or koffline.Continuous(k, low, high)"
        raise DataError(f"action_space is {space!r}; {remedy}")
    held = {name: as_array(name, values) for name, values in given.items()}
    shape = held["observations"].shape
    for name, array in held.items():
        if array.shape[:1] != shape[:1] or not array.ndim:
            said = (
                f"{name} has {array.shape[0] if array.ndim else 'no'} rows,"
                f" observations {(*shape, 0)[0]}"
            )
            raise DataError(f"{said}; re-export the log with equal lengths")
    if not shape[0]:
        raise DataError("the log has no rows; give at least one transition")
    checked = row_columns(held, space)
    following = held["next_observations"].shape
    if following != shape:
        said = f"next_observations has shape {following}, observations {shape}"
        raise DataError(f"{said}; re-export the log with equal shapes")
    if "weights" in checked:
        check_some_weight(checked["weights"])
    if "episode_ids" in held or "steps" in held:
        checked |= episode_columns(held.get("episode_ids"), held.get("steps"))
        check_flags_end_episodes(checked)
        if "clusters" in checked:
            changed = (np.diff(checked["clusters"]) != 0) & (checked["steps"][1:] > 0)
            if changed.any():
                said = (
                    "clusters change inside an episode (row"
                    f" {int(changed.argmax()) + 1})"
                )
                raise DataError(f"{said}; all rows of an episode belong to one")
    return checked


def order_rows(episode_ids: Any, steps: Any = None) -> np.ndarray:
    """Row order (N,) that makes episodes contiguous, in order of first appearance, each
    in time order.

    Without ``steps`` the rows of an episode keep their order. Apply it to every column.
    """
    ids = integer_column("episode_ids", episode_ids)
    _, first, label = np.unique(ids, return_index=True, return_inverse=True)
    if steps is None:
        times = np.arange(len(ids))
    else:
        times = integer_column("steps", steps)
    return np.lexsort((times, first[label.reshape(-1)]))


def episode_columns(ids_given: Any, steps_given: Any) -> dict[str, np.ndarray]:
    """Checked ``episode_ids`` and ``steps`` (N,); if only one is given, the other is
    derived from it.
    """
    if steps_given is None:
        steps = None
    else:
        steps = integer_column("steps", steps_given)
    if ids_given is not None:
        ids = integer_column("episode_ids", ids_given)
    else:
        assert steps is not None, "called with ids or steps"
        ids = np.cumsum(steps == 0) - 1
    starts = np.flatnonzero(np.append(True, ids[1:] != ids[:-1]))
    _, first = np.unique(ids[starts], return_index=True)
    if len(first) != len(starts):
        again = int(np.setdiff1d(starts, starts[first])[0])
        said = f"row {again} returns to episode {ids[again]} after another episode"
        raise DataError(
            f"{said}; gather its rows with koffline.data.transitions.order_rows"
        )
    expected = np.arange(len(ids)) - np.repeat(
        starts, np.diff(np.append(starts, len(ids)))
    )
    if steps is not None:
        check_steps(steps, expected)
    return {"episode_ids": ids, "steps": expected}


def check_steps(steps: np.ndarray, expected: np.ndarray, first_row: int = 0) -> None:
    """Raise DataError unless steps are as ``expected``; ``first_row``: row number for
    messages.
    """
    if not np.array_equal(steps, expected):
        row = int(np.argmax(steps != expected))
        said = f"row {first_row + row} has step {steps[row]}, expected {expected[row]}"
        raise DataError(
            f"{said}; count the rows of an episode 0, 1, 2, … in time order"
        )


def check_flags_end_episodes(
    columns_of: Mapping[str, np.ndarray], first_row: int = 0
) -> None:
    """Raise DataError if a row inside an episode is terminated or truncated."""
    goes_on = columns_of["steps"][1:] > 0
    for name in ("terminated", "truncated"):
        inside = columns_of[name][:-1] & goes_on
        if inside.any():
            row = first_row + int(np.argmax(inside))
            said = f"row {row} is {name} but its episode goes on in row {row + 1}"
            raise DataError(f"{said}; give the rows after it another episode id")


def last_rows(log: Mapping[str, np.ndarray]) -> np.ndarray:
    """Mask (N,) of the last rows of episodes; all rows if there are no episodes."""
    if "episode_ids" in log:
        ids = log["episode_ids"]
        return np.append(ids[1:] != ids[:-1], True)
    if "steps" in log:
        return np.append(log["steps"][1:] == 0, True)
    return np.ones(len(log["rewards"]), dtype=np.bool_)


def digest_columns(
    hashed: Iterable[tuple[str, tuple[int, ...], Any, Iterable[np.ndarray]]],
) -> str:
    """Hex digest of columns in the given order, from each one's name, shape, dtype and
    rows (in parts).
    """
    digest = hashlib.sha256()
    for name, shape, dtype, parts in hashed:
        if dtype.kind == "f":
            kept = np.dtype("<f8")
        else:
            kept = dtype.newbyteorder("<")
        digest.update(f"{name}{shape}{dtype.kind};".encode())
        for part in parts:
            digest.update(np.ascontiguousarray(part, dtype=kept).data)
    return digest.hexdigest()


def row_indices(rows: Any, size: int) -> np.ndarray:
    """Indices within 0 … size − 1 from indices or a mask.

    Raises DataError if nothing is selected.
    """
    chosen = np.asarray(rows)
    if chosen.dtype == np.bool_ and chosen.shape == (size,):
        chosen = np.flatnonzero(chosen)
    is_index = chosen.ndim == 1 and chosen.size and chosen.dtype.kind in "iu"
    if not is_index or chosen.min() < 0 or chosen.max() >= size:
        said = f"a selection of shape {chosen.shape} and dtype {chosen.dtype}"
        raise DataError(f"{said}; give indices within 0 … {size - 1}, at least one")
    return chosen


def natural_key(name: str) -> list[Any]:
    """Sort key of natural order: x_2 before x_10.

    Different names have different keys: a01 and a1 too.
    """
    parts: list[Any] = [
        (0, int(p), "") if p.isdecimal() and len(p) < _LONGEST_NUMBER else (1, 0, p)
        for p in re.split(r"(\d+)", name)
    ]
    return [*parts, (-1, 0, name)]


def in_natural_order(names: Iterable[str]) -> list[str]:
    """Names of categories by their numbers if every name is a finite number, else by
    `natural_key`.
    """
    known = list(names)
    try:
        numbers = {name: float(name) for name in known}
    except ValueError:
        return sorted(known, key=natural_key)
    if not all(map(math.isfinite, numbers.values())):
        return sorted(known, key=natural_key)
    return sorted(known, key=lambda name: (numbers[name], natural_key(name)))
