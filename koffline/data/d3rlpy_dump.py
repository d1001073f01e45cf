"""d3rlpy's ReplayBuffer dumps (version 2.1), read and written without d3rlpy.

Layout: ``columns`` (names), ``num_episodes``, ``version``, and per episode i ``observations_i (T, ...)``,
``actions_i (T, k)``, ``rewards_i (T, 1)``, ``terminated_i``. d3rlpy takes the observation of step t + 1 as
the next one of step t; an episode that did not terminate therefore has one transition less than steps. We
write one step more there, whose observation is the last next observation and whose reward is 0, so that every
transition is kept, for d3rlpy and for ourselves. What else a log holds goes into a group of its own, which
d3rlpy does not look at.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from koffline.data import raw
from koffline.data.columns import as_array
from koffline.data.flat import DESCRIPTION
from koffline.data.spaces import SpaceRequest
from koffline.data.transitions import Transitions
from koffline.errors import DataError
from koffline.store.files import atomic_file, reading
from koffline.untrusted.hdf5 import CheckedFile, new_hdf5, open_hdf5, write_text

_VERSION = "2.1"
_COLUMNS = ("observations", "actions", "rewards", "terminated")
# Group of columns that a dump cannot hold: one array per name, over all rows (or the terminal ones).
_BESIDE = "koffline_columns"
_BESIDE_COLUMNS = ("truncated", "behavior_log_probabilities", "weights")
_BESIDE_TERMINAL = "terminal_next_observations"


def read_d3rlpy_dump(path: Path, action_space: SpaceRequest | None = None) -> raw.RawLog:
    """Read a dump by d3rlpy 2 or by us. Raises DataError."""
    with reading(path, "d3rlpy dump"), open_hdf5(path) as file:
        version = " ".join(file.strings("version")) if "version" in file else ""
        if version != _VERSION:
            raise DataError(
                f"{path} is a d3rlpy dump of version {version or 'unknown'}, known is {_VERSION}; "
                "dump the buffer again with d3rlpy 2"
            )
        names = file.strings("columns")
        if missing := [name for name in _COLUMNS if name not in names]:
            raise DataError(
                f"{path} lacks {', '.join(missing)}: found columns {', '.join(names)}; dump it again"
            )
        columns = raw.join_episodes(_episodes(file, path), str(path))
        notes = raw.follow(columns, str(path))
        described = raw.read_description(file.text(DESCRIPTION))
        if described is not None:
            _put_back(columns, file, path)
            notes = []
            if not described.episodes:
                del columns["episode_ids"]
        return raw.raw_log(columns, described or raw.FileDescription(), action_space, str(path), notes)


def write_d3rlpy_dump(log: Transitions, path: Path, force: bool = False) -> None:
    """Write a dump that ``ReplayBuffer.load`` reads, whole or not at all. Raises DataError."""
    with atomic_file(path, force) as temporary, new_hdf5(temporary) as file:
        file["columns"] = list(_COLUMNS)
        count = 0
        for i, steps in enumerate(d3rlpy_steps(log)):
            for name in _COLUMNS:
                file[f"{name}_{i}"] = steps[name]
            count = i + 1
        file["num_episodes"] = count
        file["version"] = _VERSION
        for name in _BESIDE_COLUMNS:
            if getattr(log, name) is not None:
                file[f"{_BESIDE}/{name}"] = getattr(log, name)
        file[f"{_BESIDE}/{_BESIDE_TERMINAL}"] = log.next_observations[log.terminated]
        write_text(file, DESCRIPTION, raw.describe_log(log))


def d3rlpy_steps(log: Transitions) -> Iterator[dict[str, Any]]:
    """Episodes as d3rlpy keeps them, one added step where an episode did not terminate.

    observations (T, ...), actions (T, k), rewards (T, 1), terminated: one flag.
    """
    for rows in raw.cut_episodes(log, "a d3rlpy dump"):
        yield steps_of(log, rows)


def steps_of(log: Transitions, rows: slice) -> dict[str, Any]:
    """The arrays of one d3rlpy Episode."""
    terminated = bool(log.terminated[rows.stop - 1])
    last = slice(rows.stop, rows.stop) if terminated else slice(rows.stop - 1, rows.stop)
    actions, rewards = action_matrix(log), log.rewards.reshape(-1, 1)
    return {
        "observations": np.concatenate([log.observations[rows], log.next_observations[last]]),
        "actions": np.concatenate([actions[rows], actions[last]]),
        "rewards": np.concatenate([rewards[rows], np.zeros_like(rewards[last])]),
        "terminated": terminated,
    }


def action_matrix(log: Transitions) -> np.ndarray:
    """(N, 1) indices or (N, k) vectors: d3rlpy keeps a feature axis for discrete actions too."""
    return log.actions.reshape(len(log), -1)


def _put_back(columns: dict[str, np.ndarray], file: CheckedFile, path: Path) -> None:
    """Restore the columns of our own group. Raises DataError if they do not fit the episodes."""
    names = [name for name in (*_BESIDE_COLUMNS, _BESIDE_TERMINAL) if f"{_BESIDE}/{name}" in file]
    found = file.arrays([f"{_BESIDE}/{name}" for name in names])
    beside = {name: found[f"{_BESIDE}/{name}"] for name in names}
    terminal_next, terminal = beside.pop(_BESIDE_TERMINAL, np.zeros(0)), columns["terminated"]
    if {len(column) for column in beside.values()} - {len(terminal)} or len(terminal_next) != terminal.sum():
        raise DataError(f"{path}: {_BESIDE} does not fit the episodes; convert the log again")
    columns.update(beside)
    columns["next_observations"][terminal] = terminal_next


def _episodes(file: CheckedFile, path: Path) -> Iterator[dict[str, np.ndarray]]:
    episodes = file.episodes(int(file.arrays(["num_episodes"])["num_episodes"]))
    if any(f"observations_{i}" not in file and f"observations_{i}_0" in file for i in episodes):
        raise DataError(f"{path} holds tuple observations; flatten them into one array before dumping")
    names = [f"{name}_{i}" for i in episodes for name in _COLUMNS]
    read = file.arrays(names, twice=frozenset(f"observations_{i}" for i in episodes))
    for i in episodes:
        observations, actions, rewards = (
            as_array(f"{name}_{i}", read[f"{name}_{i}"]) for name in _COLUMNS[:3]
        )
        if rewards.size != len(rewards):
            per_step = rewards.size // len(rewards)
            raise DataError(f"{path}: rewards of episode {i} have {per_step} numbers per step; give one")
        observations = observations.reshape(-1, 1) if observations.ndim == 1 else observations
        yield episode_rows(observations, actions, rewards, bool(read[f"terminated_{i}"]))


def episode_rows(
    observations: np.ndarray, actions: np.ndarray, rewards: np.ndarray, terminated: bool
) -> dict[str, np.ndarray]:
    """Columns (T, ...) of an episode from d3rlpy's arrays and its one flag: terminated, else truncated."""
    ends = np.arange(len(rewards)) == len(rewards) - 1
    flags = {"terminated": ends & terminated, "truncated": ends & (not terminated)}
    return {"observations": observations, "actions": actions, "rewards": rewards.reshape(-1), **flags}
