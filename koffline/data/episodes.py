"""Episodes among the rows of a log: checks of their boundaries, ordering, joining and cutting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


def leave_out_unfollowed(log: dict[str, np.ndarray], unfollowed: np.ndarray, source: str) -> list[str]:
    """Treat the ``unfollowed`` rows (N,), last rows without a next observation, in place; return notes.

    A terminal one keeps its own observation. Any other is dropped; where it was truncated, the row above it
    becomes the truncated one.
    """
    ended = log["terminated"] == 1
    lost, notes = unfollowed & ~ended, []
    if lost.all():
        raise DataError(f"{source}: no row has a next observation; export the log with next_observations")
    if lost.any():
        moved = np.zeros(len(lost), dtype=np.bool_)
        moved[:-1] = lost[1:] & (log["truncated"][1:] == 1) & ~last_rows(log)[:-1]
        log["truncated"] = moved | (log["truncated"] == 1)
        log.update({name: column[~lost] for name, column in log.items()})
        notes.append(
            f"{columns.counted(int(lost.sum()), 'row', 'was', 'were')} left out: {UNFOLLOWED} in this file"
        )
    if (unfollowed & ended).any():
        notes.append("terminal rows hold their own observation as next observation (it has no influence)")
    return notes


_PER_STEP = ("actions", "rewards", "terminated", "truncated")


@dataclass(frozen=True, eq=False)
class EpisodeArrays:
    """One episode of T steps; ``observations`` has T + 1 rows, or T where the last one was not recorded.

    actions (T, ...), rewards (T,), terminated and truncated (T,), and optional columns (T,).
    """

    observations: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    extras: dict[str, np.ndarray]


def join_episodes(episodes: Sequence[EpisodeArrays], source: str) -> tuple[dict[str, np.ndarray], list[str]]:
    """Join episodes into columns named as in ``Transitions``; return them with notes.

    Where an episode lacks its last observation, a terminal step gets its own (it has no influence) and any
    other last step is left out. Raises DataError for episodes that do not fit together.
    """
    episodes = [episode for episode in episodes if len(episode.rewards)]
    if not episodes:
        raise DataError(f"{source} has no steps; give a log with at least one transition")
    for i, episode in enumerate(episodes):
        _check_episode(f"{source}: episode {i}", episode, episodes[0])
    lengths = np.array([len(episode.rewards) for episode in episodes])
    parts = [
        {
            **{name: getattr(episode, name) for name in _PER_STEP},
            "observations": episode.observations[:steps],
            "next_observations": np.append(episode.observations[1:], episode.observations[-1:], 0)[:steps],
            **episode.extras,
        }
        for episode, steps in zip(episodes, lengths, strict=True)
    ]
    log = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    log["episode_ids"] = np.repeat(np.arange(len(episodes)), lengths)
    unfollowed = np.zeros(len(log["rewards"]), dtype=np.bool_)
    unfollowed[np.cumsum(lengths) - 1] = [len(e.observations) == len(e.rewards) for e in episodes]
    return log, leave_out_unfollowed(log, unfollowed, source)


def _check_episode(name: str, episode: EpisodeArrays, first: EpisodeArrays) -> None:
    """Raise DataError if the episode's columns do not fit each other or the first episode's."""
    steps, seen = len(episode.rewards), len(episode.observations)
    if seen not in (steps, steps + 1) or any(len(getattr(episode, column)) != steps for column in _PER_STEP):
        raise DataError(f"{name} has {seen} observations of {steps} rewards, or odd flags; record it again")
    for column in ("observations", "actions"):
        shape, expected = getattr(episode, column).shape[1:], getattr(first, column).shape[1:]
        if shape != expected:
            raise DataError(f"{name}: {column} have shape {shape}, before {expected}; keep one shape per log")
