"""The record that every part of koffline works on: logged transitions as columns,
validated once.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from koffline.data import columns
from koffline.data.columns import order_rows
from koffline.data.spaces import ActionSpace, Continuous, Discrete, Features
from koffline.errors import DataError, counted

__all__ = [
    "ActionSpace",
    "Continuous",
    "Discrete",
    "Metadata",
    "Transitions",
    "order_rows",
]


@dataclass(frozen=True)
class Metadata:
    """Source of a log and notes on it; they do not change the meaning of the rows.

    ``sha256``: digest of the rows as they were read. ``gamma``: a hint in (0, 1).
    ``extra``: other entries of the file. ``notes``: what the reader assumed, derived or
    left out. ``lost_last_rows``: whether the reader left out last rows of episodes that
    did not terminate, so that terminations are too frequent.
    """

    source: str | None = None
    sha256: str | None = None
    gamma: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    lost_last_rows: bool = False

    def __post_init__(self) -> None:
        if self.gamma is not None and not 0.0 < self.gamma < 1.0:
            raise DataError(
                f"metadata: gamma is {self.gamma!r}; give a discount inside (0, 1), or"
                " None"
            )

    @property
    def features(self) -> Features | None:
        """Names of an observation's numbers, and its categories, if the log comes from
        a table.
        """
        return Features.from_extra(self.extra)

    def with_notes(self, *notes: str) -> Metadata:
        """Copy of the metadata with notes added."""
        return dataclasses.replace(self, notes=(*self.notes, *notes))


if TYPE_CHECKING:
    _Array: TypeAlias = np.ndarray
    _Space: TypeAlias = ActionSpace
else:  # any array-like; the constructor checks it
    _Array = _Space = Any
REQUIRED_COLUMNS = (
    "observations",
    "actions",
    "rewards",
    "next_observations",
    "terminated",
    "truncated",
)
COLUMNS = (
    *REQUIRED_COLUMNS,
    "episode_ids",
    "steps",
    "behavior_log_probabilities",
    "weights",
    "clusters",
    "action_mask",
    "next_action_mask",
)


@dataclass(frozen=True, eq=False, repr=False)
class Transitions:
    """N logged transitions (s, a, r, s') as read-only columns.

    Arrays of a suitable dtype are used without a copy: do not write into them
    afterwards. Other array-likes are cast exactly. A row may be ``terminated`` (the
    world ended: no future value), ``truncated`` (recording
    stopped: the future goes on, ``next_observations`` holds the state reached), both
    (terminated wins), or neither. With ``episode_ids`` the rows of an episode are
    contiguous and in time order, ``steps`` count them 0, 1, 2, … and only the last row
    may be terminated or truncated. Without ids every row stands alone; with ``steps``
    only, an episode begins wherever they are 0. ``clusters``: numbers that link
    dependent episodes (or rows), such as those of one user; intervals resample a
    cluster as a whole. ``action_mask``: which of n discrete actions were available in
    the state of each row; ``next_action_mask``: in its next state. Inside episodes the
    latter is the mask of the row below, which is used if only the former is given; after
    a termination it has no influence.

    Shapes: observations and next_observations (N, ...) float32, float64 or uint8;
    actions (N,) int64 or (N, k) float; masks (N, n) bool; all else (N,). Raises
    DataError naming the column, the row and the remedy.
    """

    observations: _Array
    actions: _Array
    rewards: _Array
    next_observations: _Array
    terminated: _Array
    truncated: _Array
    action_space: _Space
    episode_ids: _Array | None = None
    steps: _Array | None = None
    behavior_log_probabilities: _Array | None = None
    weights: _Array | None = None
    clusters: _Array | None = None
    metadata: Metadata = field(default_factory=Metadata)
    action_mask: _Array | None = None
    next_action_mask: _Array | None = None

    def __post_init__(self) -> None:
        kept = [
            name
            for name in COLUMNS
            if name in REQUIRED_COLUMNS or getattr(self, name) is not None
        ]
        self._set(
            columns.log_columns(
                {name: getattr(self, name) for name in kept}, self.action_space
            )
        )

    def __len__(self) -> int:
        return len(self.rewards)

    def __repr__(self) -> str:
        if self.has_episodes:
            episodes = counted(self.n_episodes, "episode")
        else:
            episodes = "no episodes"
        shape = (
            f"observations {self.observation_shape}"
            f" {self.columns['observations'].dtype}"
        )
        if type(self) is not Transitions:
            where = f" in {counted(len(self.shard_names), 'shard')}"
        else:
            where = ""
        rows = f"{type(self).__name__}({counted(len(self), 'row')}{where}"
        return f"{rows}, {episodes}, {shape}, {self.action_space})"

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """The columns this log has, by name."""
        return {
            name: getattr(self, name)
            for name in COLUMNS
            if getattr(self, name) is not None
        }

    @cached_property
    def units(self) -> np.ndarray:
        """Number (N,) of each row's independent unit: its episode, or the row itself
        without episodes.
        """
        if self.steps is None:
            return np.arange(len(self))
        return np.cumsum(self.steps == 0) - 1

    @property
    def unit_starts(self) -> np.ndarray:
        """First row (U,) of each unit: of each episode, or every row without
        episodes.
        """
        if self.has_episodes:
            return self.episode_starts
        return np.arange(len(self))

    @property
    def row_weights(self) -> np.ndarray:
        """The ``weights`` (N,) in float64; ones if there are none."""
        if self.weights is None:
            return np.ones(len(self))
        return np.asarray(self.weights, dtype=np.float64)

    @property
    def observation_shape(self) -> tuple[int, ...]:
        """Shape of one observation."""
        return tuple(self.observations.shape[1:])

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of an observation's numbers; empty unless the log comes from a
        table.
        """
        features = self.metadata.features
        if features:
            return features.names
        return ()

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in memory."""
        return sum(column.nbytes for column in self.columns.values()) // len(self)

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
        """Row (E,) of the first step of each episode; empty without episodes."""
        if self.steps is None:
            return np.zeros(0, dtype=np.int64)
        return columns.read_only(np.flatnonzero(self.steps == 0))

    @cached_property
    def episode_lengths(self) -> np.ndarray:
        """Number of rows (E,) of each episode; empty without episodes."""
        return columns.read_only(np.diff(np.append(self.episode_starts, len(self))))

    @property
    def episode_ends(self) -> np.ndarray:
        """Row (E,) of the last step of each episode."""
        return self.episode_starts + self.episode_lengths - 1

    def initial_observations(self) -> np.ndarray:
        """Observations (E, ...) of the first step of each episode; without episodes all
        observations.
        """
        if self.has_episodes:
            return self.observations[self.episode_starts]
        return self.observations

    def initial_action_mask(self) -> np.ndarray | None:
        """Available actions (E, n) in the states of `initial_observations`; None if the
        log has no masks.
        """
        if self.action_mask is not None and self.has_episodes:
            return self.action_mask[self.episode_starts]
        return self.action_mask

    def returns(self, gamma: float = 1.0) -> np.ndarray:
        """Return (E,) of each episode as logged, Σ γ^t r_t.

        Raises DataError without episodes.
        """
        return self.returns_to_go(gamma)[self.episode_starts]

    def returns_to_go(self, gamma: float = 1.0) -> np.ndarray:
        """Return to go (N,) of each row i: Σ γ^(t−i) r_t over t ≥ i in its episode;
        float64.

        Computed by doubling: after j rounds each row holds the discounted sum over its
        next 2^j rows. Raises DataError without episodes, or for γ outside [0, 1].
        """
        if self.steps is None:
            raise DataError(
                "returns need episodes, this log has none; add episode_ids or steps"
            )
        if not 0.0 <= gamma <= 1.0:
            raise DataError(f"gamma is {gamma!r}; give a discount in [0, 1]")
        lengths = np.asarray(self.episode_lengths)
        rows_left = np.repeat(lengths, lengths) - np.asarray(self.steps)
        total = np.asarray(self.rewards, dtype=np.float64).copy()
        reach = 1
        longest = int(lengths.max())
        while reach < longest:
            inside = rows_left[:-reach] > reach
            total[:-reach] += np.where(inside, gamma**reach * total[reach:], 0.0)
            reach *= 2
        return total

    def select(self, rows: Any) -> Transitions:
        """The given rows (indices or a mask), in the given order.

        Episodes are kept if each selected one begins with its first step and has no
        gap; otherwise all selected rows stand alone. Raises DataError for no rows or
        rows out of range.
        """
        chosen = columns.row_indices(rows, len(self))
        picked = {name: array[chosen] for name, array in self.columns.items()}
        if self.has_episodes:
            try:
                columns.episode_columns(picked["episode_ids"], picked["steps"])
            except DataError:
                picked = {
                    name: array
                    for name, array in picked.items()
                    if name not in columns.COUNTED
                }
        return self.of_whole_units(picked, self.action_space, self.metadata)

    def select_episodes(self, episodes: Any) -> Transitions:
        """Whole episodes by position 0 … E − 1 (or a mask), repeats allowed; new ids
        count from 0.

        Raises DataError for a log without episodes, or positions that it has not.
        """
        if not self.has_episodes:
            raise DataError(
                "episodes cannot be selected, this log has none; use select(rows)"
            )
        chosen = columns.row_indices(episodes, self.n_episodes)
        lengths = self.episode_lengths[chosen]
        starts = self.episode_starts[chosen]
        steps = np.arange(lengths.sum()) - np.repeat(
            np.cumsum(lengths) - lengths, lengths
        )
        rows = np.repeat(starts, lengths) + steps
        picked = {name: array[rows] for name, array in self.columns.items()}
        picked["episode_ids"] = np.repeat(np.arange(len(chosen)), lengths)
        return self.of_whole_units(picked, self.action_space, self.metadata)

    def replace(self, **changes: Any) -> Transitions:
        """A copy with the given fields changed, validated anew."""
        return dataclasses.replace(self, **changes)

    def with_clusters(self, clusters: np.ndarray) -> Transitions:
        """Log of the same rows with other clusters (N,), under the digest of the rows
        as they were read.
        """
        changed = self.replace(clusters=clusters).with_metadata(self.metadata)
        vars(changed)["sha256"] = self.sha256
        return changed

    def with_metadata(self, metadata: Metadata) -> Transitions:
        """Log of the same rows with other metadata; nothing is copied or checked
        again.
        """
        changed = copy.copy(self)
        vars(changed)["metadata"] = metadata
        return changed

    @cached_property
    def sha256(self) -> str:
        """Hex digest of the rows: the same data has the same digest, whatever the file
        format.

        Covers values (as float64, except uint8), shapes, flags and where episodes
        begin; not the names of episodes, the declared action space or the metadata.
        """
        return columns.digest_columns(
            columns.DigestedColumn(
                name=name,
                shape=array.shape,
                dtype=array.dtype,
                parts=(array[block] for block in columns.blocks(len(array))),
            )
            for name, array in sorted(self.columns.items())
            if name != "episode_ids"
        )

    @classmethod
    def of_checked(
        cls,
        checked: Mapping[str, Any],
        space: Any,
        units: Any = None,
        metadata: Metadata | None = None,
    ) -> Transitions:
        """Make a record from ``checked`` columns (N, ...) by name, which are believed.

        space: the action space. units (N,): numbers of the episodes if there are no
        ids. Without them the rows are whole episodes, or stand alone. With them they
        may be a part of a log that begins and ends inside episodes: ``units`` and
        ``steps`` then continue from part to part. metadata: empty by default.
        """
        log = object.__new__(cls)
        vars(log).update(action_space=space, metadata=metadata or Metadata())
        if units is not None:
            vars(log)["units"] = units
        log._set(checked)
        if log.steps is not None and log.episode_ids is None:
            vars(log)["episode_ids"] = columns.read_only(log.units)
        return log

    @classmethod
    def of_whole_units(
        cls, checked: Mapping[str, Any], space: Any, metadata: Metadata
    ) -> Transitions:
        """Whole episodes, or rows that stand alone, from ``checked`` columns (N, ...)
        by name; some weight must be positive, else DataError.

        space: the action space. metadata: of the log.
        """
        log = cls.of_checked(checked, space, metadata=metadata)
        if log.weights is not None:
            columns.check_some_weight(log.weights)
        return log

    shard_names = ("the log",)  # in messages: a log in memory is one shard

    def shard_blocks(self, shard: int = 0) -> Iterator[Transitions]:
        """The rows in order, in blocks without copies; a log in memory is one shard."""
        return (self.part(rows) for rows in columns.blocks(len(self)))

    def part(self, rows: slice | np.ndarray) -> Transitions:
        """Some rows, which may begin inside an episode: a slice gives views, a mask
        copies.
        """
        picked = {name: column[rows] for name, column in self.columns.items()}
        return self.of_checked(
            picked,
            self.action_space,
            units=self.units[rows],
            metadata=self.metadata,
        )

    def _set(self, checked: Mapping[str, np.ndarray]) -> None:
        held = {name: columns.read_only(column) for name, column in checked.items()}
        vars(self).update({**dict.fromkeys(COLUMNS), **held})


def check_in_memory(log: Any) -> None:
    """Raise DataError if ``log`` is on disk or no log."""
    if not isinstance(log, Transitions):
        raise no_log(log)


def check_without_masks(log: Any, subject: str) -> None:
    """Raise DataError for a log, also on disk, with masks of available actions.

    subject: what does not know them, in the plural, for the message.
    """
    if "action_mask" in log.columns:
        raise DataError(
            f"the log has an action_mask, which {subject} do not know: they would value"
            " and take actions that are not available; leave it out"
            " (log.replace(action_mask=None, next_action_mask=None), or in the mapping)"
            " to go on as if all always were"
        )


def no_log(log: object) -> DataError:
    """Error that says which function makes a log in memory of something else."""
    return DataError(
        f"the log is a {type(log).__name__}; give a path, a pandas, polars or Arrow"
        " frame, a dict of arrays, a d3rlpy ReplayBuffer, a Minari dataset or a list of"
        " episodes to koffline.open_transitions(…, lazy=False), or make a"
        " koffline.Transitions(…)"
    )
