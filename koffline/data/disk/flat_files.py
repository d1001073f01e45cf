"""How the rows of one flat file are read by slices, as ``read_flat`` would give them.

Arrays that can be sliced are HDF5 datasets and stored members of NPZ archives. A file that marks episodes
only by flags or ids is looked through once, when the log is opened: what stays in memory is the count of
episodes and steps before every 16,384th row.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from koffline.data.columns import integer_column
from koffline.data.flat import LAZY_REMEDY, EpisodeRule, SlicedFile, file_kind, rows_are_linked
from koffline.data.hdf5 import sliced_hdf5
from koffline.data.npz import sliced_npz
from koffline.errors import DataError
from koffline.store.files import reading
from koffline.untrusted.hdf5 import open_hdf5
from koffline.untrusted.limits import check_memory

_EVERY = 16_384
# A block of this size is read at the speed of the disk and fits a processor's cache.
BLOCK_BYTES = 2**23


@dataclass(frozen=True)
class Column:
    """An array of a file: its key, and the dtype and row shape in which it is handed out."""

    key: str
    dtype: str
    shape: tuple[int, ...] = ()

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in memory."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, eq=False)
class EpisodeMarks:
    """The number of the episode and the step of the row above every 16,384th row."""

    units: np.ndarray
    steps: np.ndarray
    episodes: int


@dataclass(frozen=True, eq=False)
class FlatShard:
    """One flat file: rows, columns by the names of ``Transitions``, and how episodes are told."""

    rows: int
    columns: Mapping[str, Column]
    rule: EpisodeRule
    marks: EpisodeMarks | None = None

    @contextlib.contextmanager
    def open(self, path: Path, name: str) -> Iterator[OpenShard]:
        """Open the file for slices. Raises DataError where it is not what it was."""
        with open_sliced(path, name) as file:
            for column in self.columns.values():
                _check_column(file.arrays.get(column.key), column, self.rows)
            yield OpenShard(self, file)


class OpenShard:
    """An open flat file."""

    def __init__(self, shard: FlatShard, file: SlicedFile) -> None:
        self._shard, self._file = shard, file

    def column(self, name: str, start: int, stop: int) -> np.ndarray:
        """(B, ...) values of a column, in its dtype and shape but otherwise unchecked."""
        column = self._shard.columns.get(name)
        if column is None:
            assert name == "truncated", "only that column may be missing"
            return np.zeros(stop - start, dtype=np.bool_)
        with reading(self._file.name, "data"):
            values = np.asarray(self._file.arrays[column.key][start:stop])
        if np.dtype(column.dtype).kind == "f":  # whole numbers and flags are checked before they are cast
            values = values.astype(column.dtype, copy=False)
        return values.reshape(len(values), *column.shape)

    def columns(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """All columns of some rows, by name."""
        names = [name for name in self._shard.columns if name not in ("episode_ids", "steps")]
        found = {name: self.column(name, start, stop) for name in names}
        return found | {"truncated": self.truncated(start, stop)}

    def truncated(self, start: int, stop: int) -> np.ndarray:
        """(B,) whether recording stopped, also where only the rows themselves tell."""
        flags = self.column("truncated", start, stop)
        return (flags == 1) | self._broken(start, stop) if self._shard.rule == "links" else flags

    def places(self, start: int, stop: int) -> tuple[np.ndarray | None, np.ndarray]:
        """(B,) steps within the episode, None where there are no episodes, and (B,) numbers of units."""
        if self._shard.rule == "none":
            return None, np.arange(start, stop)
        if self._shard.rule == "numbered":
            return self._whole("steps", start, stop), self._whole("episode_ids", start, stop)
        assert self._shard.marks is not None
        mark = start // _EVERY
        begins = self.begins(mark * _EVERY, stop)
        units, steps = count_episodes(
            begins, int(self._shard.marks.units[mark]), int(self._shard.marks.steps[mark])
        )
        skipped = start - mark * _EVERY
        return steps[skipped:], units[skipped:]

    def begins(self, start: int, stop: int) -> np.ndarray:
        """(B,) whether a row is the first of its episode."""
        above = max(start - 1, 0)
        rule = self._shard.rule
        if rule == "steps":
            return self._whole("steps", start, stop) == 0
        if rule == "ids":
            ids = self._whole("episode_ids", above, stop)
            new = ids[1:] != ids[:-1]
        else:
            terminated, truncated = self.column("terminated", above, stop), self.truncated(above, stop)
            new = ((terminated == 1) | (truncated == 1))[:-1]
        return np.append(True, new) if start == 0 else new

    def _whole(self, name: str, start: int, stop: int) -> np.ndarray:
        return integer_column(name, self.column(name, start, stop), start)

    def _broken(self, start: int, stop: int) -> np.ndarray:
        """(B,) whether a row inside an episode is followed by another state than its own next one."""
        parts, rows = [], block_rows(self._shard.columns["observations"])
        for first in range(start, stop, rows):
            last = min(first + rows, stop)
            below = min(last + 1, self._shard.rows)
            following = self.column("next_observations", first, below)
            linked = rows_are_linked(self.column("observations", first, below), following)
            parts.append(np.append(linked, True)[: last - first])
        linked = np.concatenate(parts)
        ends = (self.column("terminated", start, stop) == 1) | (self.column("truncated", start, stop) == 1)
        return ~linked & ~ends


def block_rows(column: Column) -> int:
    """How many rows of a column make a block."""
    return max(1, BLOCK_BYTES // column.row_bytes)


def count_episodes(begins: np.ndarray, unit: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """(B,) numbers of episodes and (B,) steps, given those of the row above and where episodes begin."""
    rows = np.arange(len(begins))
    first = np.maximum.accumulate(np.where(begins, rows, -1 - step))
    return unit + np.cumsum(begins), rows - first


def mark_episodes(opened: OpenShard, rows: int, rule: EpisodeRule, has_steps: bool) -> EpisodeMarks:
    """Look through the episodes of a file. Raises DataError where they are not contiguous and in order."""
    units, steps, ids = [-1], [-1], []
    for start in range(0, rows, _EVERY):
        stop = min(start + _EVERY, rows)
        begins = opened.begins(start, stop)
        unit, step = count_episodes(begins, units[-1], steps[-1])
        if has_steps:
            _check_steps(opened.column("steps", start, stop), step, start)
        if rule == "ids":
            ids.append(opened.column("episode_ids", start, stop)[begins])
            check_memory(4 * 8 * (int(unit[-1]) + 1))  # they will be sorted
        units.append(int(unit[-1]))
        steps.append(int(step[-1]))
    if ids and len(np.unique(np.concatenate(ids))) != units[-1] + 1:
        raise DataError(f"rows of several episodes are interleaved; {LAZY_REMEDY}")
    return EpisodeMarks(np.array(units[:-1]), np.array(steps[:-1]), units[-1] + 1)


def _check_steps(given: np.ndarray, counted: np.ndarray, start: int) -> None:
    if not np.array_equal(given, counted):
        row = int(np.argmax(given != counted))
        raise DataError(
            f"row {start + row} has step {given[row]}, expected {counted[row]}; count the rows of an episode "
            "0, 1, 2, … in time order"
        )


def _check_column(array: Any, column: Column, rows: int) -> None:
    """Raise DataError unless the array still has the shape and kind it had."""
    if array is None:
        raise DataError(f"{column.key} is missing; copy or write the file again")
    expected = (rows, *column.shape)
    if array.dtype.kind not in "biuf" or array.size != math.prod(expected):
        raise DataError(
            f"{column.key} has shape {array.shape} and dtype {array.dtype}, expected {expected} "
            f"{column.dtype}; copy or write the file again"
        )
    if len(array) != rows:
        raise DataError(f"{column.key} has {len(array)} rows, expected {rows}; copy or write the file again")


@contextlib.contextmanager
def open_sliced(path: Path, name: str) -> Iterator[SlicedFile]:
    """Open a flat file without reading its rows; ``name`` is what errors call it. Raises DataError."""
    kind = file_kind(path, name)
    if kind == "HDF5":
        with contextlib.ExitStack() as opened:
            with reading(name, kind):
                found = sliced_hdf5(opened.enter_context(open_hdf5(path)), name)
            yield found
    elif kind == "NPZ":
        with reading(name, kind):
            found = sliced_npz(path, name)
        yield found
    else:
        raise DataError(f"{name} is no HDF5 file and no NPZ archive, which lazy reading needs; {LAZY_REMEDY}")
