"""Logs kept episode by episode (Minari, d3rlpy): joining them into columns, and cutting columns up again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from koffline.data import columns as checks
from koffline.data.flat import leave_out_unfollowed
from koffline.data.transitions import Transitions
from koffline.errors import DataError


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


def cut_episodes(log: Transitions, target: str) -> Iterator[slice]:
    """Row ranges of the episodes; each row by itself where there are none.

    Raises DataError where a next observation inside an episode is not the observation of the row below: an
    episodic file has no place for it.
    """
    if not log.has_episodes:
        yield from (slice(row, row + 1) for row in range(len(log)))
        return
    is_last = np.zeros(len(log), dtype=np.bool_)
    is_last[log.episode_ends] = True
    for block in checks.blocks(len(log) - 1):
        below = log.observations[block.start + 1 : block.stop + 1]
        differs = (log.next_observations[block] != below).reshape(len(below), -1).any(axis=1)
        broken = differs & ~is_last[block]
        if broken.any():
            row = block.start + int(np.argmax(broken))
            raise DataError(
                f"{target} keeps one observation per step, but the next observation of row {row} is not the "
                "observation of the row below; write hdf5 or npz"
            )
    for start, length in zip(log.episode_starts, log.episode_lengths, strict=True):
        yield slice(int(start), int(start + length))
