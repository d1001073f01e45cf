"""Between the online replay and logs: what was played as Transitions, and a log as the replay's beginning."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np

from koffline.data.paths import PathReplay, Paths
from koffline.data.transitions import ActionSpace, Continuous, Discrete, Metadata, Transitions, order_rows
from koffline.errors import DataError

_LOG = logging.getLogger(__name__)
LOGGED = -1  # the environment of paths that came from a log


@dataclass(frozen=True, eq=False)
class ReplayLog:
    """A replay as a log. dropped: episodes left out because their first steps were overwritten."""

    transitions: Transitions
    dropped: int


def replay_transitions(replay: PathReplay, run: int, action_space: ActionSpace) -> ReplayLog:
    """One run's replay, its sub-episodes put together to episodes in the order in which these began.

    Continuous actions are those that the environment got: cut to the box. The last row of an episode that
    still runs is truncated. Raises DataError where no episode is held from its beginning.
    """
    paths = replay.held(run)
    episode = _episode_of(paths)
    begins = np.zeros(int(episode.max(initial=-1)) + 1, dtype=bool)
    begins[episode[paths.first_steps == 0]] = True
    dropped = int(len(begins) - begins.sum())
    if not begins.any():
        raise DataError(
            f"the replay of run {run} holds no episode from its beginning ({len(paths.lengths)} paths); "
            "play longer, or give the replay a larger capacity"
        )
    columns = _rows(paths, episode, begins[episode])
    if isinstance(action_space, Continuous):
        columns["actions"] = np.clip(columns["actions"], action_space.low, action_space.high)
    notes = (f"{dropped} episodes whose beginning was overwritten were left out",) if dropped else ()
    return ReplayLog(
        Transitions(**columns, action_space=action_space, metadata=Metadata(notes=notes)), dropped
    )


def fill_from_log(replay: PathReplay, log: Transitions, action_space: ActionSpace) -> int:
    """Put a log into every run's replay before its first step; how many paths a run was given.

    Episodes are cut into paths, the newest of which stay where the capacity is smaller; rows without
    episodes are paths of one step. Raises DataError for a log of other observations or actions.
    """
    _check_fits(replay, log, action_space)
    paths = _paths_of(log, replay.path_length)
    n = len(paths.lengths)
    if replay.capacity is not None and n > replay.capacity:
        _LOG.warning("the log gives %d paths, the replay holds the last %d", n, replay.capacity)
        paths = paths.flat_rows(np.arange(n - replay.capacity, n), leading=1)
        n = replay.capacity
    for run in range(replay.runs):
        replay.append(np.full(n, run), paths)
    return n


def _episode_of(paths: Paths) -> np.ndarray:
    """(path,) number of the episode, 0, 1, … in the order in which episodes were first seen."""
    keys = np.stack((paths.environments, paths.episodes), axis=1)
    _, first, label = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    return rank[label.reshape(-1)]


def _rows(paths: Paths, episode: np.ndarray, kept: np.ndarray) -> dict[str, Any]:
    """Columns of Transitions out of the kept paths."""
    length = paths.rewards.shape[1]
    inside = (np.arange(length) < paths.lengths[:, None]) & kept[:, None]
    steps = (paths.first_steps[:, None] + np.arange(length))[inside]
    ids = np.broadcast_to(episode[:, None], inside.shape)[inside]
    is_path_end = (np.arange(length) == paths.lengths[:, None] - 1)[inside]
    order = order_rows(ids, steps)
    ids = ids[order]
    is_last = np.append(ids[1:] != ids[:-1], True)
    terminated = np.broadcast_to(paths.terminated[:, None], inside.shape)[inside] & is_path_end
    return {
        "observations": paths.observations[:, :-1][inside][order],
        "actions": paths.actions[inside][order],
        "rewards": paths.rewards[inside][order],
        "next_observations": paths.observations[:, 1:][inside][order],
        "terminated": terminated[order],
        "truncated": is_last & ~terminated[order],
        "episode_ids": np.cumsum(np.append(False, ids[1:] != ids[:-1])),
        "steps": steps[order],
    }


def _check_fits(replay: PathReplay, log: Transitions, action_space: ActionSpace) -> None:
    held = replay.held(0)
    width, wanted = int(np.prod(log.observation_shape)), held.observations.shape[-1]
    if width != wanted:
        raise DataError(
            f"the log's observations have {width} numbers, the environment's {wanted}; give a log of the "
            "same environment"
        )
    mine, theirs = (
        (type(space), space.n if isinstance(space, Discrete) else space.k)
        for space in (action_space, log.action_space)
    )
    if mine != theirs:
        raise DataError(
            f"the log's actions are {log.action_space}, the environment's {action_space}; give a log of the "
            "same environment"
        )


def _paths_of(log: Transitions, length: int) -> Paths:
    """The log cut into paths of at most ``length`` steps, none across the end of an episode."""
    n = len(log)
    if log.steps is None:
        steps, episode = np.zeros(n, dtype=np.int64), np.arange(n)
    else:
        steps, episode = log.steps, np.cumsum(log.steps == 0) - 1
    starts = np.flatnonzero(steps % length == 0)
    lengths = np.diff(np.append(starts, n))
    last = starts + lengths - 1
    within = np.minimum(np.arange(length), lengths[:, None] - 1)  # filler repeats the last row
    rows = starts[:, None] + within
    flat = log.observations.reshape(n, -1)
    observations = np.concatenate((flat[rows], log.next_observations.reshape(n, -1)[last][:, None]), axis=1)
    observations[np.arange(len(starts)), lengths] = observations[:, -1]
    return Paths(
        observations=observations,
        actions=log.actions[rows],
        rewards=log.rewards[rows],
        lengths=lengths,
        terminated=log.terminated[last],
        truncated=log.truncated[last] & ~log.terminated[last],
        environments=np.full(len(starts), LOGGED),
        episodes=episode[starts],
        first_steps=steps[starts],
    )
