"""Where episodes begin and end among the rows of a log: checked, put in order, joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


def last_rows(log: Mapping[str, np.ndarray]) -> np.ndarray:
    """(N,) whether a row is the last of its episode; without episodes all are."""
    if "episode_ids" in log:
        ids = log["episode_ids"]
        return np.append(ids[1:] != ids[:-1], True)
    if "steps" in log:
        return np.append(log["steps"][1:] == 0, True)
    return np.ones(len(log["rewards"]), dtype=np.bool_)


def leave_out_unfollowed(log: dict[str, np.ndarray], lost: np.ndarray, source: str) -> list[str]:
    """Drop the ``lost`` last rows; where one was truncated, the row above it becomes the truncated one."""
    count = int(lost.sum())
    if not count:
        return []
    if lost.all():
        raise DataError(f"{source}: no row has a next observation; export the log with next_observations")
    moved = np.zeros(len(lost), dtype=np.bool_)
    moved[:-1] = lost[1:] & (log["truncated"][1:] == 1) & ~last_rows(log)[:-1]
    log["truncated"] = np.where(moved, True, log["truncated"] == 1)
    for name in log:
        log[name] = log[name][~lost]
    return [
        f"{columns.counted(count, 'row', 'was', 'were')} left out: the last step of an episode that did not "
        "terminate has no next observation in this file"
    ]


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
    """Columns by the names of ``Transitions``, and notes.

    Where an episode lacks its last observation, a terminal step gets its own (it has no influence) and any
    other last step is left out. Raises DataError for episodes that do not fit together.
    """
    episodes = [episode for episode in episodes if len(episode.rewards)]
    if not episodes:
        raise DataError(f"{source} has no steps; give a log with at least one transition")
    _check_same_columns(episodes, source)
    lengths = np.array([len(episode.rewards) for episode in episodes])
    log = {
        name: np.concatenate([getattr(episode, name) for episode in episodes])
        for name in ("actions", "rewards", "terminated", "truncated")
    }
    log["observations"] = np.concatenate(
        [episode.observations[: len(episode.rewards)] for episode in episodes]
    )
    log["next_observations"] = np.concatenate([_following(episode) for episode in episodes])
    for name in episodes[0].extras:
        log[name] = np.concatenate([episode.extras[name] for episode in episodes])
    log["episode_ids"] = np.repeat(np.arange(len(episodes)), lengths)
    unrecorded = np.array([len(episode.observations) == len(episode.rewards) for episode in episodes])
    is_open = np.zeros(len(log["rewards"]), dtype=np.bool_)
    is_open[np.cumsum(lengths) - 1] = unrecorded
    ended = log["terminated"] == 1
    notes = leave_out_unfollowed(log, is_open & ~ended, source)
    if (is_open & ended).any():
        notes.append("terminal rows hold their own observation as next observation (it has no influence)")
    return log, notes


def _following(episode: EpisodeArrays) -> np.ndarray:
    steps = len(episode.rewards)
    if len(episode.observations) > steps:
        return episode.observations[1 : steps + 1]
    return np.concatenate([episode.observations[1:], episode.observations[-1:]])


def _check_same_columns(episodes: Sequence[EpisodeArrays], source: str) -> None:
    first = episodes[0]
    for i, episode in enumerate(episodes):
        steps = len(episode.rewards)
        for name in ("actions", "terminated", "truncated"):
            if len(getattr(episode, name)) != steps:
                raise DataError(
                    f"{source}: episode {i} has {len(getattr(episode, name))} rows of {name} and {steps} "
                    "rewards; record the episode again"
                )
        if len(episode.observations) not in (steps, steps + 1):
            raise DataError(
                f"{source}: episode {i} has {len(episode.observations)} observations for {steps} steps, "
                f"expected {steps + 1}; record the episode again"
            )
        for name in ("observations", "actions"):
            shape, expected = getattr(episode, name).shape[1:], getattr(first, name).shape[1:]
            if shape != expected:
                raise DataError(
                    f"{source}: {name} of episode {i} have shape {shape}, of episode 0 {expected}; "
                    "keep one shape per log"
                )
