"""Between the online replay and logs: what was played as Transitions, and a log as the replay's beginning."""

from __future__ import annotations

import logging

import numpy as np

from koffline.data.paths import PathReplay, Paths
from koffline.data.transitions import ActionSpace, Continuous, Discrete, Metadata, Transitions, order_rows
from koffline.errors import DataError

_LOG = logging.getLogger(__name__)
LOGGED = -1  # the environment of paths that came from a log


def replay_transitions(
    replay: PathReplay, run: int, action_space: ActionSpace, gamma: float | None = None
) -> Transitions:
    """One run's replay, its sub-episodes put together to episodes in the order in which these began.

    Continuous actions are those that the environment got: cut to the box. The last row of an episode that
    still runs is truncated; episodes whose first steps were overwritten are left out, which a note says.
    Raises DataError where no episode is held from its beginning.
    """
    paths = replay.held(run)
    keys = np.stack((paths.environments, paths.episodes), axis=1)
    _, first, label = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    episode = np.argsort(np.argsort(first))[label.reshape(-1)]  # 0, 1, … in the order first seen
    begins = np.bincount(episode, weights=paths.first_steps == 0) > 0
    if not begins.any():
        raise DataError(
            f"the replay of run {run} holds no episode from its beginning ({len(paths.lengths)} paths); "
            "play longer, or give the replay a larger capacity"
        )
    step = np.arange(paths.rewards.shape[1])
    inside = (step < paths.lengths[:, None]) & begins[episode][:, None]
    ids = np.broadcast_to(episode[:, None], inside.shape)[inside]
    steps = (paths.first_steps[:, None] + step)[inside]
    order = order_rows(ids, steps)
    changes = ids[order][1:] != ids[order][:-1]
    terminated = (paths.terminated[:, None] & (step == paths.lengths[:, None] - 1))[inside][order]
    actions = paths.actions[inside][order]
    if isinstance(action_space, Continuous):
        actions = np.clip(actions, action_space.low, action_space.high)
    dropped = int((~begins).sum())
    notes = (f"{dropped} episodes whose beginning was overwritten were left out",) if dropped else ()
    return Transitions(
        observations=paths.observations[:, :-1][inside][order],
        actions=actions,
        rewards=paths.rewards[inside][order],
        next_observations=paths.observations[:, 1:][inside][order],
        terminated=terminated,
        truncated=np.append(changes, True) & ~terminated,
        episode_ids=np.cumsum(np.append(False, changes)),
        steps=steps[order],
        action_space=action_space,
        metadata=Metadata(notes=notes, gamma=gamma),
    )


def fill_from_log(replay: PathReplay, log: Transitions, action_space: ActionSpace) -> int:
    """Put a log into every run's replay before its first step; how many paths a run was given.

    Episodes are cut into paths, the newest of which stay where the capacity is smaller; rows without
    episodes are paths of one step. Raises DataError for a log of other observations or actions.
    """
    width, wanted = int(np.prod(log.observation_shape)), replay.held(0).observations.shape[-1]
    if width != wanted:
        raise DataError(
            f"the log's observations have {width} numbers, the environment's {wanted}; give a log of the "
            "same environment"
        )
    if _kind(log.action_space) != _kind(action_space):
        raise DataError(
            f"the log's actions are {log.action_space}, the environment's {action_space}; give a log of the "
            "same environment"
        )
    paths = _paths_of(log, replay.path_length)
    n = len(paths.lengths)
    if replay.capacity is not None and n > replay.capacity:
        _LOG.warning("the log gives %d paths, the replay holds the last %d", n, replay.capacity)
        paths = paths.flat_rows(np.arange(n - replay.capacity, n), leading=1)
        n = replay.capacity
    for run in range(replay.runs):
        replay.append(np.full(n, run), paths)
    return n


def _kind(space: ActionSpace) -> tuple[type, int]:
    return type(space), space.n if isinstance(space, Discrete) else space.k


def _paths_of(log: Transitions, length: int) -> Paths:
    """The log cut into paths of at most ``length`` steps, none across the end of an episode."""
    n = len(log)
    steps, episode = np.zeros(n, dtype=np.int64), np.arange(n)
    if log.steps is not None:
        steps, episode = log.steps, np.cumsum(log.steps == 0) - 1
    starts = np.flatnonzero(steps % length == 0)
    lengths = np.diff(np.append(starts, n))
    last = starts + lengths - 1
    rows = starts[:, None] + np.minimum(np.arange(length), lengths[:, None] - 1)  # filler repeats the last
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
