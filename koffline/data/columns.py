"""Checks and lossless casts of columns, and of episodes; every error is one
sentence.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from koffline.data.spaces import ActionSpace, Continuous, Discrete
from koffline.errors import DataError, counted

# Columns that say where a row lies in its episode.
COUNTED = ("episode_ids", "steps")
# Columns (N, n) of the actions that were available.
MASKS = ("action_mask", "next_action_mask")
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


def as_array(name: str, values: object) -> np.ndarray:
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
    is_exact = array.dtype.itemsize <= 2
    if not is_exact and array.dtype.kind in "iu" and array.size:
        largest = max(int(array.max()), -int(array.min()))
        is_exact = largest <= _EXACT_IN_FLOAT32
    if is_exact:
        return array.astype(np.float32)
    return array.astype(np.float64)


def _vector(name: str, values: object) -> np.ndarray:
    """A column with one number per row, (N,). Raises DataError."""
    array = as_array(name, values)
    if array.ndim != 1:
        raise DataError(
            f"{name} has shape {array.shape}, expected (N,); give one number per row"
        )
    return array


@dataclass(frozen=True, eq=False)
class ValueFault:
    """A possible error in a column: what is wrong, a remedy, and a mask ``is_bad`` of
    the bad numbers, in the shape of the column, or (N,) of bad rows of a mask.
    """

    column: str
    problem: str
    remedy: str
    is_bad: np.ndarray


def _refuse(fault: ValueFault, array: np.ndarray, first_row: int) -> None:
    """Raise DataError for the first bad number of a column, or for its bad rows, if
    there are any.

    first_row: number of the array's first row, for the message.
    """
    if fault.is_bad.ndim < array.ndim and fault.is_bad.any():
        rows = counted(int(fault.is_bad.sum()), "row")
        raise DataError(
            f"{fault.column}: {fault.problem} in {rows} (first: row"
            f" {first_row + int(fault.is_bad.argmax())}); {fault.remedy}"
        )
    if fault.is_bad.any():
        place = tuple(np.argwhere(fault.is_bad)[0].tolist())
        row, *within = place
        where = f"row {first_row + row}"
        if within:
            where = f"{where} at {within}"
        raise DataError(
            f"{fault.column} holds {array[place]:g} in {where},"
            f" {fault.problem}; {fault.remedy}"
        )


def integer_column(name: str, values: object, first_row: int = 0) -> np.ndarray:
    """Cast a column to int64 (N,); floats must be whole numbers.

    ``first_row``: row number for messages. Raises DataError.
    """
    array = _vector(name, values)
    if array.dtype.kind == "f":
        wide = array.astype(np.float64)  # 16 bits do not hold the bound
        fault = ValueFault(
            column=name,
            problem="no whole number of 64 bits",
            remedy="give whole numbers",
            is_bad=~(np.abs(wide) < 2.0**63) | (np.trunc(wide) != wide),
        )
        _refuse(fault, array, first_row)
    return array.astype(np.int64, copy=False)


def value_faults(
    columns: Mapping[str, np.ndarray], space: ActionSpace
) -> Iterator[ValueFault]:
    """Yield possible errors in columns, one after the other; the mask of each tells
    whether it is there.

    columns: by name, with aligned rows. Flags may be 0 and 1; densities of continuous
    actions may exceed 1. Masks are of discrete actions.
    """
    for name, column in columns.items():
        if column.dtype.kind == "f":
            yield ValueFault(
                name, "no finite number", "drop or mend such rows", ~np.isfinite(column)
            )
    yield from _action_faults(columns["actions"], space)
    yield from _mask_faults(columns, space)
    for name in ("terminated", "truncated"):
        flags = columns[name]
        if flags.dtype != np.bool_:
            yield ValueFault(
                name,
                "neither true nor false",
                "give 0 or 1",
                (flags != 0) & (flags != 1),
            )
    weights = columns.get("weights")
    if weights is not None:
        yield ValueFault(
            "weights", "negative", "give weights of at least 0", weights < 0
        )
    log_probabilities = columns.get("behavior_log_probabilities")
    if isinstance(space, Discrete) and log_probabilities is not None:
        yield ValueFault(
            "behavior_log_probabilities",
            "a probability above 1",
            "give natural logarithms of probabilities",
            log_probabilities > 1e-4,
        )


def _mask_faults(
    columns: Mapping[str, np.ndarray], space: ActionSpace
) -> Iterator[ValueFault]:
    """Yield possible errors of masks (N, n): numbers other than 0 and 1 (N, n), and rows
    (N,) that no log can have.
    """
    for name in MASKS:
        mask = columns.get(name)
        if mask is None or not _is_mask(mask, space):
            continue
        if mask.dtype != np.bool_:
            no_flag = (mask != 0) & (mask != 1)
            yield ValueFault(name, "neither true nor false", "give 0 or 1", no_flag)
        has_none = ~(mask != 0).any(axis=1)
        where = "the state"
        if name == "next_action_mask":
            has_none = has_none & (columns["terminated"] != 1)
            where = "the next state, which does not end the episode,"
        yield ValueFault(
            name,
            f"no action is available in {where}",
            "mark the available actions with 1, or leave the masks out",
            has_none,
        )
    yield from _unavailable_actions(columns, space)


def _is_mask(array: np.ndarray, space: ActionSpace) -> bool:
    """Whether an array has the shape (N, n) of masks of a space's discrete actions."""
    return isinstance(space, Discrete) and array.shape[1:] == (space.n,)


def _unavailable_actions(
    columns: Mapping[str, np.ndarray], space: ActionSpace
) -> Iterator[ValueFault]:
    """Yield the rows (N,) whose action was not available by their mask."""
    mask = columns.get("action_mask")
    if mask is None or not isinstance(space, Discrete) or not _is_mask(mask, space):
        return
    actions = columns["actions"]
    is_inside = (actions >= 0) & (actions < space.n)
    # what lies outside of the space is a fault of its own
    places = np.where(is_inside, actions, 0).astype(np.int64)
    is_available = mask[np.arange(len(mask)), places] != 0
    yield ValueFault(
        "action_mask",
        "the logged action was not available",
        "mark it with 1; if the masks are of the next states, name them"
        " next_action_mask",
        is_inside & ~is_available,
    )


def _action_faults(actions: np.ndarray, space: ActionSpace) -> Iterator[ValueFault]:
    """Yield possible errors in actions (N,) or (N, k): fractions, and what lies outside
    of the space.
    """
    if isinstance(space, Discrete) and actions.ndim == 1:
        if actions.dtype.kind == "f":
            fractions = np.isfinite(actions) & (np.trunc(actions) != actions)
            yield ValueFault(
                "actions", "no whole number", "count actions from 0", fractions
            )
        is_outside = (actions < 0) | (actions >= space.n)
    elif isinstance(space, Continuous) and actions.shape[1:] == (space.k,):
        bounds = np.asarray([space.low, space.high])
        sizes = np.where(np.isfinite(bounds), np.abs(bounds), 1.0)
        slack = _BOUND_TOLERANCE * np.maximum(1.0, sizes)
        is_below = actions < bounds[0] - slack[0]
        is_outside = is_below | (actions > bounds[1] + slack[1])
    else:
        return
    yield ValueFault(
        "actions",
        f"outside {space}",
        "declare the space anew or mend such rows",
        is_outside,
    )


def check_some_weight(weights: np.ndarray) -> None:
    """Raise DataError if all weights of a log are zero."""
    if not (weights > 0).any():
        raise DataError("weights are all 0; give at least one row a positive weight")


def row_columns(
    columns: Mapping[str, object], space: ActionSpace, first_row: int = 0
) -> dict[str, np.ndarray]:
    """Checked columns of some rows, named as in ``Transitions``, without
    ``episode_ids`` and ``steps``.

    Observations of float32, float64 or uint8 keep their type, others are cast exactly.
    All weights may be 0, because the rows may be a part of a log. ``first_row``: number
    of the first row, for messages. Raises DataError.
    """
    arrays = {
        name: as_array(name, values)
        for name, values in columns.items()
        if name not in COUNTED
    }
    for name, array in arrays.items():
        _check_shape(name, array, space)
    for fault in _mask_faults(arrays, space):  # of all rows, to count them
        _refuse(fault, arrays[fault.column], first_row)
    for rows in blocks(len(arrays["rewards"])):
        block = {name: array[rows] for name, array in arrays.items()}
        for fault in value_faults(block, space):
            _refuse(fault, block[fault.column], first_row + rows.start)
    for name, array in arrays.items():
        if name in ("terminated", "truncated"):
            arrays[name] = array.astype(np.bool_, copy=False)
        elif name == "actions" and isinstance(space, Discrete):
            arrays[name] = array.astype(np.int64, copy=False)
        elif name in MASKS:
            arrays[name] = array.astype(np.bool_, copy=False)
        elif name == "clusters":
            arrays[name] = integer_column(name, array, first_row)
        elif array.dtype != np.uint8 or "observations" not in name:
            arrays[name] = as_float(array)
    if "next_action_mask" in arrays:
        mask = arrays["next_action_mask"]
        # after a termination it has no influence: every action is available
        arrays["next_action_mask"] = mask | arrays["terminated"][:, None]
    return arrays


def _check_shape(name: str, array: np.ndarray, space: ActionSpace) -> None:
    """Raise DataError unless a column has the shape of its kind: (N, …) observations,
    (N, k) continuous actions, (N, n) masks of discrete actions, else (N,).
    """
    if name in MASKS:
        if not isinstance(space, Discrete):
            raise DataError(
                f"{name} is for discrete actions, and the log has {space}; leave it out,"
                " or declare koffline.Discrete(n)"
            )
        if not _is_mask(array, space):
            raise DataError(
                f"{name} has shape {array.shape}, expected (N, {space.n}) for {space};"
                " give a column for each action, or declare koffline.Discrete(n)"
            )
        return
    if name in ("observations", "next_observations"):
        has_numbers = bool(array.size) or not len(array)
        if array.ndim >= 2 and has_numbers:
            return
        if array.size:
            remedy = f"use {name}.reshape(-1, 1)"
        else:
            remedy = "give at least one number per row"
        raise DataError(f"{name} has shape {array.shape}, expected (N, …); {remedy}")
    if name != "actions" or isinstance(space, Discrete):
        _vector(name, array)
    elif array.shape != (len(array), space.k):
        raise DataError(
            f"actions has shape {array.shape}, expected (N, {space.k}) for {space};"
            f" declare Continuous(k, low, high) or use actions.reshape(-1, {space.k})"
        )


def log_columns(columns: Mapping[str, object], space: object) -> dict[str, np.ndarray]:
    """Checked columns of a whole log, which fit together. Raises DataError."""
    if not isinstance(space, (Discrete, Continuous)):
        raise DataError(
            f"action_space is {space!r}; declare koffline.Discrete(n) or"
            " koffline.Continuous(k, low, high)"
        )
    arrays = {name: as_array(name, values) for name, values in columns.items()}
    shape = arrays["observations"].shape
    rows = next(iter(shape), 0)
    for name, array in arrays.items():
        if array.shape[:1] != shape[:1] or not array.ndim:
            count = next(iter(array.shape), "no")
            raise DataError(
                f"{name} has {count} rows, observations {rows}; re-export the log with"
                " equal lengths"
            )
    if not rows:
        raise DataError("the log has no rows; give at least one transition")
    checked = row_columns(arrays, space)
    following = arrays["next_observations"].shape
    if following != shape:
        raise DataError(
            f"next_observations has shape {following}, observations {shape};"
            " re-export the log with equal shapes"
        )
    if "weights" in checked:
        check_some_weight(checked["weights"])
    if "episode_ids" in arrays or "steps" in arrays:
        checked |= episode_columns(arrays.get("episode_ids"), arrays.get("steps"))
        check_flags_end_episodes(checked)
        if "clusters" in checked:
            _check_clusters(checked["clusters"], checked["steps"])
    _add_next_masks(checked)
    return checked


def _add_next_masks(columns: dict[str, np.ndarray]) -> None:
    """Add the masks (N, n) of next states where only those of states are given, in
    place: each is the mask of the row below.

    Raises DataError where there is no row below and the episode did not terminate, and
    for masks of next states alone.
    """
    if "next_action_mask" in columns and "action_mask" not in columns:
        raise DataError(
            "next_action_mask is given without action_mask; give both, or neither"
        )
    if "action_mask" not in columns or "next_action_mask" in columns:
        return
    is_unknown = last_rows(columns) & ~columns["terminated"]
    if is_unknown.any():
        rows = counted(int(is_unknown.sum()), "row")
        raise DataError(
            f"next_action_mask is missing, and no row follows {rows} that did not"
            f" terminate (first: row {int(is_unknown.argmax())}), whose next actions"
            " are unknown; give next_action_mask, or leave these rows out"
        )
    columns["next_action_mask"] = following_masks(columns)


def following_masks(columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """Masks (N, n) of next states, those of the rows below; all true in the last rows
    of episodes.
    """
    mask = columns["action_mask"]
    below = np.concatenate([mask[1:], np.ones_like(mask[:1])])
    return np.where(last_rows(columns)[:, None], np.ones_like(mask), below)


def _check_clusters(clusters: np.ndarray, steps: np.ndarray) -> None:
    """Raise DataError if an episode has several clusters. Both (N,)."""
    changes = (np.diff(clusters) != 0) & (steps[1:] > 0)
    if changes.any():
        row = int(changes.argmax()) + 1
        raise DataError(
            f"clusters change inside an episode (row {row}); all rows of an episode"
            " belong to one"
        )


def order_rows(episode_ids: object, steps: object = None) -> np.ndarray:
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


def episode_columns(episode_ids: object, steps: object) -> dict[str, np.ndarray]:
    """Checked ``episode_ids`` and ``steps`` (N,); if one of them is None, it is derived
    from the other.

    Raises DataError if episodes are mixed, or steps do not count their rows.
    """
    if steps is not None:
        steps = integer_column("steps", steps)
    if episode_ids is not None:
        ids = integer_column("episode_ids", episode_ids)
    else:
        assert steps is not None, "called with ids or steps"
        ids = np.cumsum(steps == 0) - 1
    starts = np.flatnonzero(np.append(True, ids[1:] != ids[:-1]))
    _, first = np.unique(ids[starts], return_index=True)
    if len(first) != len(starts):
        row = int(np.setdiff1d(starts, starts[first])[0])
        raise DataError(
            f"row {row} returns to episode {ids[row]} after another episode; gather its"
            " rows with koffline.data.transitions.order_rows"
        )
    lengths = np.diff(np.append(starts, len(ids)))
    expected = np.arange(len(ids)) - np.repeat(starts, lengths)
    if steps is not None:
        check_steps(steps, expected)
    return {"episode_ids": ids, "steps": expected}


def check_steps(steps: np.ndarray, expected: np.ndarray, first_row: int = 0) -> None:
    """Raise DataError unless steps (N,) are as ``expected``; ``first_row``: row number
    for messages.
    """
    if not np.array_equal(steps, expected):
        row = int(np.argmax(steps != expected))
        raise DataError(
            f"row {first_row + row} has step {steps[row]}, expected {expected[row]};"
            " count the rows of an episode 0, 1, 2, … in time order"
        )


def check_flags_end_episodes(
    columns: Mapping[str, np.ndarray], first_row: int = 0
) -> None:
    """Raise DataError if a row inside an episode is terminated or truncated.

    ``first_row``: row number for messages.
    """
    goes_on = columns["steps"][1:] > 0
    for name in ("terminated", "truncated"):
        inside = columns[name][:-1] & goes_on
        if inside.any():
            row = first_row + int(np.argmax(inside))
            raise DataError(
                f"row {row} is {name} but its episode goes on in row {row + 1}; give the"
                " rows after it another episode id"
            )


def last_rows(columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """Mask (N,) of the last rows of episodes; all rows if there are no episodes."""
    if "episode_ids" in columns:
        ids = columns["episode_ids"]
        return np.append(ids[1:] != ids[:-1], True)
    if "steps" in columns:
        return np.append(columns["steps"][1:] == 0, True)
    return np.ones(len(columns["rewards"]), dtype=np.bool_)


@dataclass(frozen=True, eq=False)
class DigestedColumn:
    """A column of which a digest is taken, with its rows in parts; shape: of the whole
    column.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    parts: Iterable[np.ndarray]


def digest_columns(columns: Iterable[DigestedColumn]) -> str:
    """Hex digest of columns in the given order, from the name, shape, kind of numbers
    and rows of each: floats count as float64, whatever the machine's byte order.
    """
    digest = hashlib.sha256()
    for column in columns:
        if column.dtype.kind == "f":
            kept = np.dtype("<f8")
        else:
            kept = column.dtype.newbyteorder("<")
        digest.update(f"{column.name}{column.shape}{column.dtype.kind};".encode())
        for part in column.parts:
            digest.update(np.ascontiguousarray(part, dtype=kept).data)
    return digest.hexdigest()


def row_indices(rows: object, size: int) -> np.ndarray:
    """Indices within 0 … size − 1 from indices or a mask.

    Raises DataError if nothing is selected.
    """
    chosen = np.asarray(rows)
    if chosen.dtype == np.bool_ and chosen.shape == (size,):
        chosen = np.flatnonzero(chosen)
    is_index = chosen.ndim == 1 and chosen.size and chosen.dtype.kind in "iu"
    if not is_index or chosen.min() < 0 or chosen.max() >= size:
        raise DataError(
            f"a selection of shape {chosen.shape} and dtype {chosen.dtype}; give indices"
            f" within 0 … {size - 1}, at least one"
        )
    return chosen


def rows_if_given(
    column: np.ndarray | None, rows: slice | np.ndarray
) -> np.ndarray | None:
    """The given rows of a column; None if the log has no such column."""
    if column is None:
        return None
    return np.asarray(column[rows])


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sort key of natural order: x_2 before x_10.

    Different names have different keys: a01 and a1 too.
    """
    key: list[tuple[int, int, str]] = []
    for part in re.split(r"(\d+)", name):
        if part.isdecimal() and len(part) < _LONGEST_NUMBER:
            key.append((0, int(part), ""))
        else:
            key.append((1, 0, part))
    key.append((-1, 0, name))
    return key


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
