"""Episodes among the rows of a log: checks of their boundaries, ordering, joining and cutting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from koffline.data import columns
from koffline.errors import DataError


def order_rows(episode_ids: Any, steps: Any = None) -> np.ndarray:
    """Row order (N,) that gathers interleaved episodes, in order of first appearance, each in time order.

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
    _, first = np.unique(ids[starts], return_index=True)
    if len(first) != len(starts):
        again = int(np.setdiff1d(starts, starts[first])[0])
        said = f"row {again} returns to episode {ids[again]} after another episode"
        raise DataError(f"{said}; gather its rows with koffline.data.transitions.order_rows")
    counted = np.arange(len(ids)) - np.repeat(starts, np.diff(np.append(starts, len(ids))))
    if steps is not None:
        check_steps(steps, counted)
    return {"episode_ids": ids, "steps": counted if steps is None else steps}


def check_steps(steps: np.ndarray, counted: np.ndarray, first_row: int = 0) -> None:
    """Raise DataError unless steps equal ``counted``; ``first_row``: number of the first row in messages."""
    if not np.array_equal(steps, counted):
        row = int(np.argmax(steps != counted))
        said = f"row {first_row + row} has step {steps[row]}, expected {counted[row]}"
        raise DataError(f"{said}; count the rows of an episode 0, 1, 2, … in time order")


def check_flags_end_episodes(columns_of: Mapping[str, np.ndarray], first_row: int = 0) -> None:
    """Raise DataError where a row inside an episode is terminated or truncated."""
    goes_on = columns_of["steps"][1:] > 0
    for name in ("terminated", "truncated"):
        inside = columns_of[name][:-1] & goes_on
        if inside.any():
            row = first_row + int(np.argmax(inside))
            said = f"row {row} is {name} but its episode goes on in row {row + 1}"
            raise DataError(f"{said}; give the rows after it another episode id")


def keeps_episodes(ids: np.ndarray, steps: np.ndarray) -> bool:
    """Whether selected rows still are episodes that begin with their first step and have no gap."""
    try:
        episode_columns(ids, steps)
    except DataError:
        return False
    return True


def last_rows(log: Mapping[str, np.ndarray]) -> np.ndarray:
    """Mask (N,) of the last rows of episodes; without episodes all rows."""
    if "episode_ids" in log:
        ids = log["episode_ids"]
        return np.append(ids[1:] != ids[:-1], True)
    if "steps" in log:
        return np.append(log["steps"][1:] == 0, True)
    return np.ones(len(log["rewards"]), dtype=np.bool_)


# Words of the note of a reader that left such rows out.
UNFOLLOWED = "the last step of an episode that did not terminate has no next observation"


def follow(log: dict[str, np.ndarray], source: str) -> list[str]:
    """Add next observations, those of the rows below inside episodes, in place; return notes.

    The last row of an episode has none. A terminal one keeps its own observation; any other is left out, and
    where it was truncated, the row above it becomes the truncated one. Raises DataError if no row is left.
    """
    observations, last, ended = log["observations"], last_rows(log), log["terminated"] == 1
    log["next_observations"] = np.append(observations[1:], observations[-1:], axis=0)
    log["next_observations"][last] = observations[last]
    lost, notes = last & ~ended, []
    if lost.all():
        raise DataError(f"{source}: no row has a next observation; export the log with next_observations")
    if lost.any():
        moved = np.zeros(len(lost), dtype=np.bool_)
        moved[:-1] = lost[1:] & (log["truncated"][1:] == 1) & ~last[:-1]
        log["truncated"] = moved | (log["truncated"] == 1)
        log.update({name: column[~lost] for name, column in log.items()})
        said = columns.counted(int(lost.sum()), "row", "was", "were")
        notes.append(f"{said} left out: {UNFOLLOWED} in this file")
    if (last & ended).any():
        notes.append("terminal rows hold their own observation as next observation (it has no influence)")
    return notes


def join_episodes(episodes: Iterable[Mapping[str, np.ndarray]], source: str) -> dict[str, np.ndarray]:
    """Rows of all episodes that have any, and their ``episode_ids``; each is given as columns (T, ...).

    Raises DataError where no episode has rows, or the columns of one differ in length.
    """
    kept = []
    for i, episode in enumerate(episodes):
        steps = len(episode["rewards"])
        for name, column in episode.items():
            if len(column) != steps:
                said = f"{source}: episode {i} has {name} for {len(column)} of {steps} rewards"
                raise DataError(f"{said}; record it again")
        kept += [episode] if steps else []
    if not kept:
        raise DataError(f"{source} has no steps; give a log with at least one transition")
    joined = {name: np.concatenate([episode[name] for episode in kept]) for name in kept[0]}
    lengths = [len(episode["rewards"]) for episode in kept]
    return {**joined, "episode_ids": np.repeat(np.arange(len(kept)), lengths)}
