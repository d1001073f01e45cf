"""One flat file as a shard: what it holds, and its rows by slices, as ``read_flat`` would give them.

Arrays that can be sliced are HDF5 datasets and stored members of NPZ archives. A file that marks episodes
only by flags or ids is looked through once, when the log is opened: what stays in memory is the first row of
each episode.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from koffline.data import remote
from koffline.data.columns import integer_column
from koffline.data.flat import LAZY_REMEDY, SlicedFile, file_kind, sliced_npz
from koffline.data.hdf5 import sliced_hdf5
from koffline.errors import DataError
from koffline.store.files import reading
from koffline.untrusted.hdf5 import open_hdf5

# A block of this size is read at the speed of the disk and fits a processor's cache.
BLOCK_BYTES = 2**23


@dataclass(frozen=True)
class Column:
    """An array of a file: its key, and the dtype and row shape in which it is handed out."""

    key: str
    dtype: str
    shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in memory."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def block_rows(self) -> int:
        """How many rows make a block."""
        return max(1, BLOCK_BYTES // self.row_bytes)


@dataclass(frozen=True)
class ShardInfo:
    """One flat file of a log.

    name: path or URL as given; rows and episodes (0 where there are none) in it; bytes and sha256 of the file
    where they are known; columns by the names of ``Transitions``. starts (E,): the first rows of its episodes
    where no columns number them. cut_unflagged: whether episodes that end without a flag were truncated.
    """

    name: str
    rows: int
    episodes: int
    bytes: int | None = None
    sha256: str | None = None
    columns: Mapping[str, Column] = field(default_factory=dict, compare=False)
    starts: np.ndarray | None = field(default=None, compare=False)
    cut_unflagged: bool = False

    @contextlib.contextmanager
    def open(self) -> Iterator[OpenShard]:
        """Open the file for slices. Raises DataError naming it, also for errors inside the block."""
        with naming(self.name), remote.local_file(self.name) as path, open_sliced(path, self.name) as file:
            for column in self.columns.values():
                _check_column(file.arrays.get(column.key), column, self.rows)
            yield OpenShard(self, file)


class OpenShard:
    """An open flat file."""

    def __init__(self, shard: ShardInfo, file: SlicedFile) -> None:
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
        names = [name for name in self._shard.columns if name not in ("episode_ids", "steps", "truncated")]
        found = {name: self.column(name, start, stop) for name in names}
        return found | {"truncated": self.truncated(start, stop)}

    def truncated(self, start: int, stop: int) -> np.ndarray:
        """(B,) whether recording stopped, also where only the rows themselves tell."""
        flags = self.column("truncated", start, stop)
        if not self._shard.cut_unflagged:
            return flags
        assert self._shard.starts is not None
        first, last = np.searchsorted(self._shard.starts, [start, stop], side="right")
        cut = np.zeros(stop - start, dtype=np.bool_)
        cut[self._shard.starts[first:last] - 1 - start] = True
        return (flags == 1) | cut & (self.column("terminated", start, stop) != 1)

    def places(self, start: int, stop: int) -> tuple[np.ndarray | None, np.ndarray]:
        """(B,) steps within the episode, None where there are no episodes, and (B,) numbers of units."""
        rows, starts = np.arange(start, stop), self._shard.starts
        if starts is not None:
            units = np.searchsorted(starts, rows, side="right") - 1
            return rows - starts[units], units
        if "steps" not in self._shard.columns:
            return None, rows
        return self._whole("steps", start, stop), self._whole("episode_ids", start, stop)

    def _whole(self, name: str, start: int, stop: int) -> np.ndarray:
        return integer_column(name, self.column(name, start, stop), start)


def _check_column(array: Any, column: Column, rows: int) -> None:
    """Raise DataError unless the array still has the shape and kind it had."""
    if array is None:
        raise DataError(f"{column.key} is missing; copy or write the file again")
    expected = (rows, *column.shape)
    if array.dtype.kind not in "biuf" or array.size != math.prod(expected) or len(array) != rows:
        raise DataError(
            f"{column.key} has shape {array.shape} and dtype {array.dtype}, expected {expected} "
            f"{column.dtype}; copy or write the file again"
        )


@contextlib.contextmanager
def open_sliced(path: Path, name: str) -> Iterator[SlicedFile]:
    """Open a flat file without reading its rows; ``name`` is what errors call it. Raises DataError."""
    kind = file_kind(path, name)
    if kind is None:
        raise DataError(f"{name} is no HDF5 file and no NPZ archive, which lazy reading needs; {LAZY_REMEDY}")
    with contextlib.ExitStack() as opened:
        with reading(name, kind):
            if kind == "HDF5":
                found = sliced_hdf5(opened.enter_context(open_hdf5(path)), name)
            else:
                found = sliced_npz(path, name)
        yield found


@contextlib.contextmanager
def naming(shard: str) -> Iterator[None]:
    """Put the shard's name before what is wrong with it."""
    try:
        yield
    except DataError as error:
        message = str(error)
        raise DataError(message if message.startswith(shard) else f"{shard}: {message}") from None


def check_alike(this: str, here: Mapping[str, Any], that: str, before: Mapping[str, Any]) -> None:
    """Raise DataError, naming the first difference, unless two pieces are of one log.

    here, before: what each says of its action space, episodes and columns.
    """
    for name in (*here, *before):
        if here.get(name) != before.get(name):
            found = ["none" if said is None else str(said) for said in (here.get(name), before.get(name))]
            remedy = "declare one space" if name == "action space" else "give pieces of one log"
            raise DataError(f"{this} has {name} {found[0]}, {that} {found[1]}; {remedy}")
