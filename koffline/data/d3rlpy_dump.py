"""d3rlpy's ReplayBuffer dumps (version 2.1), read and written without d3rlpy.

Layout: ``columns`` (names), ``num_episodes``, ``version``, and per episode i
``observations_i (T, ...)``, ``actions_i (T, k)``, ``rewards_i (T, 1)``,
``terminated_i``. d3rlpy takes the observation of step t + 1 as the next observation of
step t, so an episode that did not terminate has one transition less than steps. To keep
every transition, we add one step there, with the last next observation and reward 0. A
dump has no place for probabilities, weights, next observations of terminal rows, and
the difference between a cut episode and one without flags. It also stores our
description, which d3rlpy ignores.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from koffline.data.flat import DESCRIPTION
from koffline.data.raw import (
    RawLog,
    cut_episodes,
    describe_columns,
    episodic_log,
    read_description,
)
from koffline.data.spaces import SpaceRequest
from koffline.data.transitions import Transitions
from koffline.errors import DataError
from koffline.store.files import atomic_file, reading
from koffline.untrusted.hdf5 import CheckedFile, new_hdf5, open_hdf5, write_text

_COLUMNS = ("observations", "actions", "rewards", "terminated")
_LOST = (
    "behavior_log_probabilities",
    "weights",
    "clusters",
    "action_mask",
    "next_action_mask",
)


def read_d3rlpy_dump(path: Path, action_space: SpaceRequest | None = None) -> RawLog:
    """Read a dump by d3rlpy 2 or by us. Raises DataError."""
    with reading(path, "d3rlpy dump"), open_hdf5(path) as file:
        described = read_description(file.text(DESCRIPTION))
        return episodic_log(_episodes(file, path), described, action_space, str(path))


def write_d3rlpy_dump(log: Transitions, path: Path, force: bool = False) -> None:
    """Write atomically a dump that ``ReplayBuffer.load`` can read. Raises DataError."""
    with atomic_file(path, force) as temporary, new_hdf5(temporary) as file:
        file["columns"] = list(_COLUMNS)
        file["num_episodes"] = log.n_episodes or len(log)
        file["version"] = "2.1"
        for i, steps in enumerate(d3rlpy_steps(log)):
            for name in _COLUMNS:
                file[f"{name}_{i}"] = steps[name]
        metadata = dataclasses.replace(log.metadata, sha256=None)
        lost = " and ".join(name for name in _LOST if name in log.columns)
        if lost:
            note = f"{lost} were left out: a d3rlpy dump has no place for them"
            logging.getLogger(__name__).warning("%s: %s", path, note)
            metadata = metadata.with_notes(note)
        write_text(
            file,
            DESCRIPTION,
            describe_columns(log.action_space, log.has_episodes, metadata),
        )


def d3rlpy_steps(log: Transitions) -> Iterator[dict[str, np.ndarray | bool]]:
    """Episodes as d3rlpy stores them, with one added step for each episode that did not
    terminate.

    observations (T, ...), actions (T, k), rewards (T, 1), terminated: one flag.
    """
    for rows in cut_episodes(log, "a d3rlpy dump"):
        yield steps_of(log, rows)


def steps_of(log: Transitions, rows: slice) -> dict[str, np.ndarray | bool]:
    """The arrays of one d3rlpy Episode."""
    terminated = bool(log.terminated[rows.stop - 1])
    if terminated:
        last = slice(rows.stop, rows.stop)
    else:
        last = slice(rows.stop - 1, rows.stop)
    # discrete actions have a feature axis too
    actions = log.actions.reshape(len(log), -1)
    rewards = log.rewards.reshape(-1, 1)
    return {
        "observations": np.concatenate(
            [log.observations[rows], log.next_observations[last]]
        ),
        "actions": np.concatenate([actions[rows], actions[last]]),
        "rewards": np.concatenate([rewards[rows], np.zeros_like(rewards[last])]),
        "terminated": terminated,
    }


def _episodes(file: CheckedFile, path: Path) -> Iterator[dict[str, np.ndarray]]:
    episodes = file.episodes(int(file.arrays(["num_episodes"])["num_episodes"]))
    if any(
        f"observations_{i}" not in file and f"observations_{i}_0" in file
        for i in episodes
    ):
        raise DataError(
            f"{path} holds tuple observations; flatten them into one array before"
            " dumping"
        )
    names = [f"{name}_{i}" for i in episodes for name in _COLUMNS]
    read = file.arrays(names, twice=frozenset(f"observations_{i}" for i in episodes))
    for i in episodes:
        observations, actions, rewards, ends = (
            read[f"{name}_{i}"] for name in _COLUMNS
        )
        if rewards.size != len(rewards):
            per_step = rewards.size // len(rewards)
            raise DataError(
                f"{path}: rewards of episode {i} have {per_step} numbers per step;"
                " give one"
            )
        if observations.ndim == 1:
            observations = observations.reshape(-1, 1)
        yield episode_rows(observations, actions, rewards, bool(np.ravel(ends)[-1]))


def episode_rows(
    observations: np.ndarray, actions: np.ndarray, rewards: np.ndarray, terminated: bool
) -> dict[str, np.ndarray]:
    """Columns (T, ...) of an episode from d3rlpy's arrays and its flag: terminated,
    else truncated.
    """
    ends = np.arange(len(rewards)) == len(rewards) - 1
    flags = {"terminated": ends & terminated, "truncated": ends & (not terminated)}
    return {
        "observations": observations,
        "actions": actions,
        "rewards": rewards.reshape(-1),
        **flags,
    }
