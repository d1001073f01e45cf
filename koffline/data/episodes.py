"""Where episodes begin and end among the rows of a log, and putting interleaved ones in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from koffline.data import columns
from koffline.errors import DataError


def order_rows(episode_ids: Any, steps: Any = None) -> np.ndarray:
    """(N,) row order that gathers interleaved episodes, in order of first appearance, each in time order.

    Without ``steps`` the rows of an episode keep their order. Apply it to every column.
    """
    ids = columns.integer_column("episode_ids", episode_ids)
    _, first, label = np.unique(ids, return_index=True, return_inverse=True)
    times = np.arange(len(ids)) if steps is None else columns.integer_column("steps", steps)
    return np.lexsort((times, first[label.reshape(-1)]))


def episode_columns(ids_given: Any, steps_given: Any) -> dict[str, np.ndarray]:
    """Checked ``episode_ids`` and ``steps`` (N,); either is derived where only the other is given."""
    steps = None if steps_given is None else columns.integer_column("steps", steps_given)
    if ids_given is not None:
        ids = columns.integer_column("episode_ids", ids_given)
    else:
        assert steps is not None, "called with ids or steps"
        ids = np.cumsum(steps == 0) - 1
    starts = np.flatnonzero(np.append(True, ids[1:] != ids[:-1]))
    _check_one_run_each(ids, starts)
    counted = np.arange(len(ids)) - np.repeat(starts, np.diff(np.append(starts, len(ids))))
    if steps is not None and not np.array_equal(steps, counted):
        row = int(np.argmax(steps != counted))
        raise DataError(
            f"row {row} of episode {ids[row]} has step {steps[row]}, expected {counted[row]}; count the rows "
            "of an episode 0, 1, 2, … in time order (koffline.data.transitions.order_rows)"
        )
    return {"episode_ids": ids, "steps": counted if steps is None else steps}


def check_flags_end_episodes(checked: Mapping[str, np.ndarray]) -> None:
    """Raise DataError where a row inside an episode is terminated or truncated."""
    goes_on = checked["steps"][1:] > 0
    for name in ("terminated", "truncated"):
        inside = checked[name][:-1] & goes_on
        if inside.any():
            row = int(np.argmax(inside))
            raise DataError(
                f"row {row} is {name} but its episode {checked['episode_ids'][row]} goes on in row "
                f"{row + 1}; give the rows after it another episode id"
            )


def keeps_episodes(ids: np.ndarray, steps: np.ndarray) -> bool:
    """Whether selected rows still are episodes that begin with their first step and have no gap."""
    try:
        episode_columns(ids, steps)
    except DataError:
        return False
    return True


def _check_one_run_each(ids: np.ndarray, starts: np.ndarray) -> None:
    _, first = np.unique(ids[starts], return_index=True)
    if len(first) != len(starts):
        again = int(np.setdiff1d(starts, starts[first])[0])
        raise DataError(
            f"row {again} returns to episode {ids[again]} after another episode; gather its rows with "
            "koffline.data.transitions.order_rows, or give each episode its own id"
        )
