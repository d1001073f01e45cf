"""The record every part of koffline works on: logged transitions as columns, validated once."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from koffline.data import columns
from koffline.data.columns import counted
from koffline.data.episodes import check_flags_end_episodes, episode_columns, keeps_episodes, order_rows
from koffline.data.spaces import ActionSpace, Continuous, Discrete
from koffline.errors import DataError

__all__ = ["ActionSpace", "Continuous", "Discrete", "Metadata", "Transitions", "order_rows"]


@dataclass(frozen=True)
class Metadata:
    """Where a log comes from; none of it changes what the rows mean.

    ``sha256`` is the digest of the rows as they were read, ``gamma`` a hint in (0, 1), ``extra`` holds
    whatever else the file says, and ``notes`` what its reader assumed, derived or left out.
    """

    source: str | None = None
    sha256: str | None = None
    gamma: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.gamma is not None and not 0.0 < self.gamma < 1.0:
            raise DataError(f"metadata: gamma is {self.gamma!r}; give a discount between 0 and 1, or None")

    def with_notes(self, *notes: str) -> Metadata:
        """The same, with notes added."""
        return dataclasses.replace(self, notes=(*self.notes, *notes))


# Whatever a caller may hand over: an array or anything numpy makes one of; the constructor checks it.
ArrayLike = Any
REQUIRED_COLUMNS = ("observations", "actions", "rewards", "next_observations", "terminated", "truncated")
OPTIONAL_COLUMNS = ("episode_ids", "steps", "behavior_log_probabilities", "weights")
COLUMNS = REQUIRED_COLUMNS + OPTIONAL_COLUMNS


@dataclass(frozen=True, eq=False, repr=False, init=False)
class Transitions:
    """N logged transitions (s, a, r, s') as read-only columns.

    Arrays of a fitting dtype are adopted without a copy: do not write into them afterwards. A row may be
    ``terminated`` (the world ended: no future value), ``truncated`` (recording stopped: the future goes on,
    ``next_observations`` holds the state reached), both (terminated wins), or neither. With ``episode_ids``
    the rows of an episode are contiguous and in time order, ``steps`` count them 0, 1, 2, … and only its
    last row may be terminated or truncated; without ids every row stands alone. Given only ``steps``, an
    episode begins wherever they are 0.

    Shapes: observations and next_observations (N, ...) float32, float64 or uint8; actions (N,) int64 or
    (N, k) float; all else (N,). Raises DataError naming the column, the row and the remedy.
    """

    observations: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    next_observations: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    action_space: ActionSpace
    episode_ids: np.ndarray | None
    steps: np.ndarray | None
    behavior_log_probabilities: np.ndarray | None
    weights: np.ndarray | None
    metadata: Metadata

    def __init__(
        self,
        observations: ArrayLike,
        actions: ArrayLike,
        rewards: ArrayLike,
        next_observations: ArrayLike,
        terminated: ArrayLike,
        truncated: ArrayLike,
        action_space: Any,
        episode_ids: ArrayLike | None = None,
        steps: ArrayLike | None = None,
        behavior_log_probabilities: ArrayLike | None = None,
        weights: ArrayLike | None = None,
        metadata: Metadata | None = None,
    ) -> None:
        needed = (observations, actions, rewards, next_observations, terminated, truncated)
        optional = (episode_ids, steps, behavior_log_probabilities, weights)
        given = dict(zip(REQUIRED_COLUMNS, needed, strict=True))
        present = zip(OPTIONAL_COLUMNS, optional, strict=True)
        given |= {name: values for name, values in present if values is not None}
        checked = _checked_columns(given, action_space)
        for name in COLUMNS:
            object.__setattr__(self, name, columns.read_only(checked[name]) if name in checked else None)
        object.__setattr__(self, "action_space", action_space)
        object.__setattr__(self, "metadata", Metadata() if metadata is None else metadata)

    def __len__(self) -> int:
        return len(self.rewards)

    def __repr__(self) -> str:
        episodes = counted(self.n_episodes, "episode") if self.has_episodes else "no episodes"
        shape = f"observations {self.observation_shape} {self.observations.dtype}"
        return f"Transitions({counted(len(self), 'row')}, {episodes}, {shape}, {self.action_space})"

    @property
    def observation_shape(self) -> tuple[int, ...]:
        """Shape of one observation."""
        return tuple(self.observations.shape[1:])

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in memory."""
        return sum(column.nbytes for column in self._columns().values()) // len(self)

    @property
    def has_episodes(self) -> bool:
        """Whether rows belong to episodes; otherwise each stands alone."""
        return self.episode_ids is not None

    @property
    def n_episodes(self) -> int:
        """Number of episodes; 0 when there are none."""
        return len(self.episode_starts)

    @cached_property
    def episode_starts(self) -> np.ndarray:
        """(E,) row of the first step of each episode; empty when there are none."""
        if self.steps is None:
            return np.zeros(0, dtype=np.int64)
        return columns.read_only(np.flatnonzero(self.steps == 0))

    @cached_property
    def episode_lengths(self) -> np.ndarray:
        """(E,) number of rows of each episode."""
        if not self.has_episodes:
            return np.zeros(0, dtype=np.int64)
        return columns.read_only(np.diff(np.append(self.episode_starts, len(self))))

    @property
    def episode_ends(self) -> np.ndarray:
        """(E,) row of the last step of each episode."""
        return self.episode_starts + self.episode_lengths - 1

    def initial_observations(self) -> np.ndarray:
        """(E, ...) observation of the first step of each episode; without episodes all observations."""
        return self.observations[self.episode_starts] if self.has_episodes else self.observations

    def returns(self, gamma: float = 1.0) -> np.ndarray:
        """(E,) sum of γ^t r_t of each episode as logged. Raises DataError without episodes."""
        return self.returns_to_go(gamma)[self.episode_starts]

    def returns_to_go(self, gamma: float = 1.0) -> np.ndarray:
        """(N,) sum of γ^(t−i) r_t over the rows t ≥ i of the row's own episode; float64.

        Windows are doubled: after j rounds each row holds the discounted sum over its next 2^j rows. Raises
        DataError without episodes, or for γ outside [0, 1].
        """
        if self.steps is None:
            raise DataError("returns need episodes, this log has none; add episode_ids or steps")
        if not 0.0 <= gamma <= 1.0:
            raise DataError(f"gamma is {gamma!r}; give a discount between 0 and 1")
        lengths = np.asarray(self.episode_lengths)
        rows_left = np.repeat(lengths, lengths) - np.asarray(self.steps)
        total = np.asarray(self.rewards, dtype=np.float64).copy()
        reach, longest = 1, int(lengths.max())
        while reach < longest:
            inside = rows_left[:-reach] > reach
            total[:-reach] += np.where(inside, gamma**reach * total[reach:], 0.0)
            reach *= 2
        return total

    def select(self, rows: Any) -> Transitions:
        """The given rows (indices or a mask), in the order given.

        Episodes survive where the selected ones still begin with their first step and have no gap; otherwise
        the selected rows stand alone, without episodes. Raises DataError for no rows or rows out of range.
        """
        chosen = columns.row_indices(rows, len(self))
        picked = {name: array[chosen] for name, array in self._columns().items()}
        if self.episode_ids is not None and not keeps_episodes(picked["episode_ids"], picked["steps"]):
            picked["episode_ids"] = picked["steps"] = None
        return self._trusted(picked)

    def select_episodes(self, episodes: Any) -> Transitions:
        """Whole episodes by position 0 … E − 1 (or a mask), repeats allowed; ids are numbered anew from 0."""
        if not self.has_episodes:
            raise DataError("episodes cannot be selected, this log has none; use select(rows)")
        chosen = columns.row_indices(episodes, self.n_episodes)
        lengths, starts = self.episode_lengths[chosen], self.episode_starts[chosen]
        steps = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        rows = np.repeat(starts, lengths) + steps
        picked = {name: array[rows] for name, array in self._columns().items()}
        picked["episode_ids"] = np.repeat(np.arange(len(chosen)), lengths)
        return self._trusted(picked)

    def replace(self, **changes: Any) -> Transitions:
        """A copy with the given fields changed, validated anew."""
        return dataclasses.replace(self, **changes)

    def with_metadata(self, metadata: Metadata) -> Transitions:
        """The same rows with other metadata; nothing is copied or checked again."""
        changed = copy.copy(self)
        object.__setattr__(changed, "metadata", metadata)
        return changed

    @cached_property
    def sha256(self) -> str:
        """Hex digest of the rows: the same data has the same digest, whatever the file format.

        Covers values (as float64, except uint8), shapes, flags and where episodes begin; not the names of
        episodes, the declared action space or the metadata.
        """
        digest = hashlib.sha256()
        hashed = self._columns()
        hashed.pop("episode_ids", None)
        for name in sorted(hashed):
            array = hashed[name]
            digest.update(f"{name}{array.shape}{array.dtype.kind};".encode())
            for block in columns.blocks(len(array)):
                part = array[block]
                part = part.astype("<f8") if part.dtype.kind == "f" else part
                digest.update(np.ascontiguousarray(part, dtype=part.dtype.newbyteorder("<")).data)
        return digest.hexdigest()

    def _columns(self) -> dict[str, np.ndarray]:
        """The columns this log has, by name."""
        return {name: getattr(self, name) for name in COLUMNS if getattr(self, name) is not None}

    @classmethod
    def of_checked(cls, checked: Mapping[str, Any], space: ActionSpace) -> Transitions:
        """Whole episodes (or rows that stand alone) from columns that were checked when they were read."""
        steps = checked.get("steps")
        ids = None if steps is None else np.cumsum(steps == 0) - 1
        made = object.__new__(cls)
        object.__setattr__(made, "action_space", space)
        object.__setattr__(made, "metadata", Metadata())
        return made._trusted({**checked, "episode_ids": ids}, weighted=False)

    def _trusted(self, picked: Mapping[str, np.ndarray | None], weighted: bool = True) -> Transitions:
        """Rows of a valid log are valid: no second check."""
        selected = object.__new__(Transitions)
        for name in COLUMNS:
            column = picked.get(name)
            object.__setattr__(selected, name, None if column is None else columns.read_only(column))
        object.__setattr__(selected, "action_space", self.action_space)
        object.__setattr__(selected, "metadata", self.metadata)
        if weighted and selected.weights is not None:  # a selection may be left without any
            columns.check_some_weight(selected.weights)
        return selected


def _checked_columns(given: Mapping[str, Any], space: Any) -> dict[str, np.ndarray]:
    """The given columns, each in its dtype, fitting together. Raises DataError."""
    if not isinstance(space, (Discrete, Continuous)):
        raise DataError(
            f"action_space is {space!r}; declare koffline.Discrete(n) or koffline.Continuous(k, low, high)"
        )
    _check_lengths({name: columns.as_array(name, values) for name, values in given.items()})
    checked = columns.row_columns(given, space)
    _check_observation_shapes(checked["observations"], checked["next_observations"])
    if "weights" in checked:
        columns.check_some_weight(checked["weights"])
    if "episode_ids" in given or "steps" in given:
        checked.update(episode_columns(given.get("episode_ids"), given.get("steps")))
        check_flags_end_episodes(checked)
    return checked


def _check_lengths(given: Mapping[str, np.ndarray]) -> None:
    for name, array in given.items():
        if array.ndim == 0:
            raise DataError(f"{name} is a single value, {array}; give one row per transition")
    expected = len(given["observations"])
    for name, array in given.items():
        if len(array) != expected:
            raise DataError(
                f"{name} has {len(array)} rows, observations {expected}; re-export the log with equal lengths"
            )
    if expected == 0:
        raise DataError("the log has no rows; give at least one transition")


def _check_observation_shapes(observations: np.ndarray, next_observations: np.ndarray) -> None:
    if observations.shape != next_observations.shape:
        raise DataError(
            f"next_observations has shape {next_observations.shape}, observations {observations.shape}; "
            "re-export the log with equal shapes"
        )
