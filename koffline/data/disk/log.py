"""A log on disk: file names, kinds of columns and metadata; rows are read by blocks and
checked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt

from koffline.data import columns as checks
from koffline.data import remote
from koffline.data.columns import COUNTED
from koffline.data.raw import bounded
from koffline.data.spaces import ActionSpace, SpaceRequest
from koffline.data.transitions import Metadata, Transitions
from koffline.errors import DataError
from koffline.store.files import reading
from koffline.untrusted.hdf5 import open_hdf5
from koffline.untrusted.limits import COPIES, announce_large, check_memory

if TYPE_CHECKING:
    import h5py

# A block of this size is read at the speed of the disk and fits a processor's cache.
BLOCK_BYTES = 2**23


@dataclass(frozen=True)
class Column:
    """An array of a shard: its key, and the dtype and row shape in which it is
    returned.
    """

    key: str
    dtype: Annotated[str, Field(pattern=r"^(bool|u?int(8|16|32|64)|float(16|32|64))$")]
    shape: tuple[PositiveInt, ...] = ()

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in memory."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class ShardInfo:
    """One file of a log: its path or URL, and its numbers of rows and episodes (0
    without episodes).

    ``sha256``: digest of the file as written. In a manifest, the name is relative to
    the folder.
    """

    name: Annotated[str, Field(alias="file", pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]
    rows: PositiveInt
    episodes: NonNegativeInt
    sha256: str | None = None


@dataclass(frozen=True, eq=False)
class RenumberedClusters:
    """Numbers (C,) of a log's clusters in order, ``before``, and those ``after`` that
    stand in their place: the same number for clusters that are one.
    """

    before: np.ndarray
    after: np.ndarray

    def of(self, clusters: np.ndarray) -> np.ndarray:
        """The numbers in place of those of some rows."""
        return self.after[np.searchsorted(self.before, clusters)]


@dataclass(frozen=True, eq=False, repr=False)
class LazyTransitions:
    """A log that stays on disk: N rows in shards, which are checked like
    ``Transitions`` when they are read.

    Returned by ``open_transitions(…, lazy=True)``. The object is small and can be
    pickled and sent to processes and machines that see the same files. ``columns``:
    dtype and row shape of each column of the log. Every episode lies within one shard;
    in each shard, ``episode_ids`` count 0, 1, 2, … . ``renumbered_clusters``: what is
    read in place of the stored clusters.
    """

    shards: tuple[ShardInfo, ...]
    action_space: ActionSpace
    columns: Mapping[str, Column]
    metadata: Metadata
    renumbered_clusters: RenumberedClusters | None = None

    def __len__(self) -> int:
        return sum(shard.rows for shard in self.shards)

    def __getstate__(self) -> dict[str, Any]:
        """Make paths absolute: the receiver of a pickle may run in another folder."""
        shards = []
        for shard in self.shards:
            if not remote.is_url(shard.name):
                name = str(Path(shard.name).absolute())
                shard = dataclasses.replace(shard, name=name)
            shards.append(shard)
        return {**vars(self), "shards": tuple(shards)}

    @property
    def has_episodes(self) -> bool:
        """Whether rows belong to episodes; otherwise each stands alone."""
        return "steps" in self.columns

    @property
    def observation_shape(self) -> tuple[int, ...]:
        """Shape of one observation."""
        return self.columns["observations"].shape

    __repr__ = Transitions.__repr__
    feature_names = Transitions.feature_names

    @property
    def n_episodes(self) -> int:
        """Number of episodes; 0 when there are none."""
        if self.has_episodes:
            return sum(shard.episodes for shard in self.shards)
        return 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in memory, including its step and unit."""
        total = 8  # of the unit
        if self.has_episodes:
            total += 8
        for name, column in self.columns.items():
            if name not in COUNTED:
                total += column.row_bytes
        return total

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Names of the shards for messages."""
        return tuple(shard.name for shard in self.shards)

    def block_rows_for(self, memory_bytes: int) -> int:
        """Number of rows that fit into ``memory_bytes``, at least one."""
        return max(1, int(memory_bytes) // self.row_bytes)

    def blocks(self, block_rows: int | None = None) -> Iterator[Transitions]:
        """All rows in order, in blocks; a block lies in one shard but may begin inside
        an episode.
        """
        for shard in range(len(self.shards)):
            yield from self.shard_blocks(shard, block_rows)

    def shard_blocks(
        self, shard: int, block_rows: int | None = None
    ) -> Iterator[Transitions]:
        """The rows of one shard in order.

        Raises DataError that names the shard and the wrong row.
        """
        if block_rows is None:
            block_rows = self.block_rows_for(BLOCK_BYTES)
        if block_rows < 1:
            raise DataError(f"block_rows is {block_rows}; give at least one row")
        rows = self.shards[shard].rows
        last = None
        with self.open_shard(shard) as opened:
            for start in range(0, rows, block_rows):
                block = opened.block(start, min(start + block_rows, rows))
                if last is not None:
                    _check_episodes(joined([last, block.part(slice(1))]), start - 1)
                yield block
                last = block.part(slice(len(block) - 1, None))

    @contextlib.contextmanager
    def open_shard(self, shard: int) -> Iterator[OpenShard]:
        """Open a shard for several reads.

        DataErrors, also those raised in the context, name the shard.
        """
        name = self.shards[shard].name
        keys = [column.key for column in self.columns.values()]
        with (
            reading(name, "HDF5"),
            remote.local_file(name) as path,
            open_hdf5(path) as file,
        ):
            yield OpenShard(
                self, shard, file.slices([key for key in keys if key in file])
            )

    def load(self) -> Transitions:
        """The whole log in memory; episodes are numbered 0, 1, 2, … .

        Raises DataError, also if it does not fit.
        """
        kept = {
            name: column
            for name, column in self.columns.items()
            if name != "episode_ids"
        }
        name = self.metadata.source or self.shards[0].name
        with reading(name, "data"):
            row_bytes = sum(column.row_bytes for column in kept.values()) + 16
            needed = len(self) * row_bytes
            check_memory(needed)
            announce_large(name, None, needed, COPIES)
        arrays = {
            name: np.empty((len(self), *column.shape), column.dtype)
            for name, column in kept.items()
        }
        row = 0
        for block in self.blocks():
            for name, array in arrays.items():
                array[row : row + len(block)] = getattr(block, name)
            row += len(block)
        return Transitions(
            **arrays, action_space=self.action_space, metadata=self.metadata
        )

    @cached_property
    def sha256(self) -> str:
        """Digest of the rows; equals ``Transitions.sha256`` of the loaded log, whatever
        the shards.

        It is taken from the manifest, else computed in one pass, column by column.
        """
        return self.metadata.sha256 or checks.digest_columns(
            checks.DigestedColumn(
                name=name,
                shape=(len(self), *column.shape),
                dtype=np.dtype(column.dtype),
                parts=self._parts(name, column),
            )
            for name, column in sorted(self.columns.items())
            if name != "episode_ids"
        )

    def declared_anew(self, requested: SpaceRequest | None) -> LazyTransitions:
        """Copy of the log with the requested action space, against which rows are
        checked when read.
        """
        space = bounded(requested, self.columns["actions"].shape)
        if space is None or space == self.action_space:
            return self
        note = f"action space {space} as asked, the log declares {self.action_space}"
        return dataclasses.replace(
            self, action_space=space, metadata=self.metadata.with_notes(note)
        )

    def _parts(self, name: str, column: Column) -> Iterator[np.ndarray]:
        """The values of a column in order, in parts of about `BLOCK_BYTES`."""
        size = max(1, BLOCK_BYTES // column.row_bytes)
        for shard, info in enumerate(self.shards):
            with self.open_shard(shard) as opened:
                for start in range(0, info.rows, size):
                    yield opened.column(name, start, min(start + size, info.rows))


class OpenShard:
    """An open shard.

    Raises DataError if shapes or kinds of its arrays differ from the log's columns.
    """

    def __init__(
        self, log: LazyTransitions, shard: int, arrays: Mapping[str, h5py.Dataset]
    ) -> None:
        self._log = log
        self._info = log.shards[shard]
        self._arrays = arrays
        for column in log.columns.values():
            array = arrays.get(column.key)
            expected = (self._info.rows, *column.shape)
            if array is None:
                raise DataError(
                    f"{column.key} is missing; copy or write the file again"
                )
            if array.shape != expected or array.dtype.kind not in "biuf":
                raise DataError(
                    f"{column.key} has shape {array.shape} and dtype {array.dtype},"
                    f" expected {expected} {column.dtype}; copy or write the file again"
                )

    def column(self, name: str, start: int, stop: int) -> np.ndarray:
        """Values (B, ...) of a column, in its dtype but otherwise unchecked."""
        column = self._log.columns[name]
        values = np.asarray(self._arrays[column.key][start:stop])
        # whole numbers and flags are checked before they are cast
        if np.dtype(column.dtype).kind == "f":
            return values.astype(column.dtype, copy=False)
        return values

    def columns(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """All columns of some rows by name, unchecked, without episode ids and
        steps.
        """
        columns = {
            name: self.column(name, start, stop)
            for name in self._log.columns
            if name not in COUNTED
        }
        if self._log.renumbered_clusters is not None:
            renumbered = self._log.renumbered_clusters
            columns["clusters"] = renumbered.of(columns["clusters"])
        return columns

    def block(self, start: int, stop: int) -> Transitions:
        """Checked rows start … stop − 1, with units counted within the shard.

        Raises DataError.
        """
        space = self._log.action_space
        info = self._info
        checked = checks.row_columns(self.columns(start, stop), space, start)
        if not self._log.has_episodes:
            return Transitions.of_checked(checked, space, np.arange(start, stop))
        units, steps = (
            checks.integer_column(name, self.column(name, start, stop), start)
            for name in COUNTED
        )
        block = Transitions.of_checked({**checked, "steps": steps}, space, units)
        _check_episodes(block, start)
        if start == 0 and (steps[0] != 0 or units[0] != 0):
            raise DataError(
                "row 0 is no first step of an episode; write the shard again"
            )
        if stop == info.rows and units[-1] != info.episodes - 1:
            raise DataError(
                f"there are {units[-1] + 1} episodes, {info.episodes} were promised;"
                " write the shard again"
            )
        return block


AnyLog = Transitions | LazyTransitions


def in_whole_units(blocks: Iterable[Transitions]) -> Iterator[Transitions]:
    """Yield the rows of one shard in blocks of whole units, so that no episode is split
    between blocks.
    """
    waiting: list[Transitions] = []
    for block in blocks:
        if block.steps is None:
            yield block
            continue
        starts = block.episode_starts
        if not len(starts):  # parts of one long episode
            waiting.append(block)
            continue
        cut = int(starts[-1])
        if cut:
            waiting.append(block.part(slice(cut)))
        if waiting:
            yield joined(waiting)
        waiting = [block.part(slice(cut, None))]
    if waiting:
        yield joined(waiting)


def joined(parts: Sequence[Transitions]) -> Transitions:
    """Concatenate consecutive parts of a log."""
    if len(parts) == 1:
        return parts[0]
    columns = {
        name: np.concatenate([part.columns[name] for part in parts])
        for name in parts[0].columns
    }
    units = np.concatenate([part.units for part in parts])
    return Transitions.of_checked(columns, parts[0].action_space, units)


def _check_episodes(block: Transitions, start: int) -> None:
    """Raise DataError unless steps count 0, 1, 2, … in each unit and only last rows are
    flagged. start: the number of the block's first row, for messages.
    """
    if block.steps is not None:
        # 1 where an episode begins, 0 inside, others wrong
        begun = np.diff(block.units)
        # where units are wrong, a negative number, which no step equals
        expected = np.where(begun == 0, block.steps[:-1] + 1, -np.abs(begun - 1))
        checks.check_steps(block.steps[1:], expected, start + 1)
        checks.check_flags_end_episodes(block.columns, start)
