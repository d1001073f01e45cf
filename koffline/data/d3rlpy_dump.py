"""d3rlpy's ReplayBuffer dumps (version 2.1), read and written without d3rlpy.

Layout: ``columns`` (names), ``num_episodes``, ``version``, and per episode i ``observations_i (T, ...)``,
``actions_i (T, k)``, ``rewards_i (T, 1)``, ``terminated_i``. d3rlpy takes the observation of step t + 1 as
the next one of step t; an episode that did not terminate therefore has one transition less than steps. We
write one step more there, whose observation is the last next observation and whose reward is 0, so that every
transition is kept, for d3rlpy and for ourselves. What else a log holds goes into a group of its own, which
d3rlpy does not look at.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from koffline.data.columns import as_array
from koffline.data.episodes import EpisodeArrays, join_episodes
from koffline.data.hdf5 import DESCRIPTION, new_hdf5
from koffline.data.raw import (
    FileDescription,
    RawLog,
    cut_episodes,
    describe_log,
    read_description,
    settle_actions,
)
from koffline.data.spaces import SpaceRequest
from koffline.data.transitions import Metadata, Transitions
from koffline.errors import DataError
from koffline.store.files import atomic_file, reading
from koffline.untrusted.hdf5 import CheckedFile, open_hdf5, write_text

_VERSION = "2.1"
_COLUMNS = ("observations", "actions", "rewards", "terminated")
# Group with what a dump has no place for: one array per name, over all rows (or over the terminal ones).
_BESIDE = "koffline_columns"
_BESIDE_COLUMNS = ("truncated", "behavior_log_probabilities", "weights")
_BESIDE_TERMINAL = "terminal_next_observations"


def read_d3rlpy_dump(path: Path, action_space: SpaceRequest | None = None) -> RawLog:
    """Read a dump by d3rlpy 2 or by us. Raises DataError."""
    with reading(path, "d3rlpy dump"), open_hdf5(path) as file:
        _check_layout(file, path)
        episodes = _episodes(file, path)
        described = read_description(file.text(DESCRIPTION))
        kept = [name for name in (*_BESIDE_COLUMNS, _BESIDE_TERMINAL) if f"{_BESIDE}/{name}" in file]
        found = file.arrays([f"{_BESIDE}/{name}" for name in kept])
        beside = {name: found[f"{_BESIDE}/{name}"] for name in kept}
        return _log(episodes, described, beside, path, action_space)


def _log(
    episodes: Sequence[EpisodeArrays],
    described: FileDescription | None,
    beside: Mapping[str, np.ndarray],
    path: Path,
    action_space: SpaceRequest | None,
) -> RawLog:
    columns, notes = join_episodes(episodes, str(path))
    if described is not None:
        _put_back(columns, beside, path)
        notes = []
        if not described.episodes:
            del columns["episode_ids"]
    declared = described.action_space if described else None
    settled = settle_actions(columns["actions"], action_space, declared, str(path))
    columns["actions"] = settled.actions
    metadata = described.metadata if described else Metadata()
    notes = [*metadata.notes, *notes, *settled.notes]
    return RawLog(columns, settled.space, dataclasses.replace(metadata, source=str(path), notes=tuple(notes)))


def write_d3rlpy_dump(log: Transitions, path: Path, force: bool = False) -> None:
    """Write a dump that ``ReplayBuffer.load`` reads, whole or not at all. Raises DataError."""
    with atomic_file(path, force) as temporary, new_hdf5(temporary) as file:
        file["columns"] = list(_COLUMNS)
        count = 0
        for i, steps in enumerate(d3rlpy_steps(log)):
            for name in _COLUMNS:
                file[f"{name}_{i}"] = getattr(steps, name)
            count = i + 1
        file["num_episodes"] = count
        file["version"] = _VERSION
        for name in _BESIDE_COLUMNS:
            if getattr(log, name) is not None:
                file[f"{_BESIDE}/{name}"] = getattr(log, name)
        file[f"{_BESIDE}/{_BESIDE_TERMINAL}"] = log.next_observations[log.terminated]
        write_text(file, DESCRIPTION, describe_log(log))


@dataclasses.dataclass(frozen=True, eq=False)
class D3rlpySteps:
    """The arrays of one d3rlpy Episode: observations (T, ...), actions (T, k), rewards (T, 1), one flag."""

    observations: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    terminated: bool


def d3rlpy_steps(log: Transitions) -> Iterator[D3rlpySteps]:
    """Episodes as d3rlpy keeps them, one added step where an episode did not terminate."""
    actions = log.actions.reshape(-1, 1) if log.actions.ndim == 1 else log.actions
    rewards = log.rewards.reshape(-1, 1)
    for rows in cut_episodes(log, "a d3rlpy dump"):
        last = slice(rows.stop - 1, rows.stop)
        if log.terminated[rows.stop - 1]:
            yield D3rlpySteps(log.observations[rows], actions[rows], rewards[rows], True)
        else:
            yield D3rlpySteps(
                np.concatenate([log.observations[rows], log.next_observations[last]]),
                np.concatenate([actions[rows], actions[last]]),
                np.concatenate([rewards[rows], np.zeros_like(rewards[last])]),
                False,
            )


def _put_back(columns: dict[str, np.ndarray], beside: Mapping[str, np.ndarray], path: Path) -> None:
    """Restore what we kept beside the dump. Raises DataError where it does not fit the episodes."""
    rows, terminal = len(columns["rewards"]), columns["terminated"]
    fits = all(len(beside[name]) == rows for name in _BESIDE_COLUMNS if name in beside)
    if not fits or len(beside.get(_BESIDE_TERMINAL, ())) != int(terminal.sum()):
        raise DataError(f"{path}: {_BESIDE} does not fit the episodes; convert the log again")
    columns.update({name: beside[name] for name in _BESIDE_COLUMNS if name in beside})
    columns["next_observations"][terminal] = beside[_BESIDE_TERMINAL]


def _check_layout(file: CheckedFile, path: Path) -> None:
    version = " ".join(file.strings("version")) if "version" in file else ""
    if version != _VERSION:
        raise DataError(
            f"{path} is a d3rlpy dump of version {version or 'unknown'}, known is {_VERSION}; "
            "dump the buffer again with d3rlpy 2"
        )
    names = file.strings("columns")
    missing = [name for name in _COLUMNS if name not in names]
    if missing:
        raise DataError(f"{path} lacks {', '.join(missing)}: found columns {', '.join(names)}; dump it again")


def _episodes(file: CheckedFile, path: Path) -> list[EpisodeArrays]:
    count = int(file.arrays(["num_episodes"])["num_episodes"])
    if not 0 <= count <= len(file.datasets):
        raise DataError(f"{path} promises {count} episodes, which it does not hold; dump the buffer again")
    names = {i: [f"{name}_{i}" for name in _COLUMNS] for i in range(count)}
    if any(of[0] not in file and f"{of[0]}_0" in file for of in names.values()):
        raise DataError(f"{path} holds tuple observations; flatten them into one array before dumping")
    read = file.arrays(
        [name for of in names.values() for name in of], twice=frozenset(of[0] for of in names.values())
    )
    return [_episode(read, i, path) for i in range(count)]


def _episode(read: Mapping[str, np.ndarray], i: int, path: Path) -> EpisodeArrays:
    arrays = {name: as_array(f"{name}_{i}", read[f"{name}_{i}"]) for name in _COLUMNS[:3]}
    rewards = arrays["rewards"].reshape(len(arrays["rewards"]), -1)
    if rewards.shape[1] != 1:
        raise DataError(f"{path}: rewards of episode {i} have {rewards.shape[1]} numbers per step; give one")
    ends = np.zeros(len(rewards), dtype=np.bool_)
    ends[-1:] = True
    terminated = bool(read[f"terminated_{i}"])
    observations = arrays["observations"]
    return EpisodeArrays(
        observations.reshape(-1, 1) if observations.ndim == 1 else observations,
        arrays["actions"],
        rewards.reshape(-1),
        ends & terminated,
        ends & (not terminated),
        {},
    )
