"""A flat HDF5 file as a shard of a log: its contents, and its rows by slices in the form of ``read_flat``."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from koffline.data import columns as checks
from koffline.data import remote
from koffline.data.hdf5 import open_sliced
from koffline.errors import DataError
from koffline.store.files import reading

# A block of this size is read at the speed of the disk and fits a processor's cache.
BLOCK_BYTES = 2**23
COUNTED = ("episode_ids", "steps")  # columns that are not read with the rows


@dataclass(frozen=True)
class Column:
    """An array of a file: its key, and the dtype and row shape in which it is returned."""

    key: str
    dtype: str
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if np.dtype(self.dtype).kind not in "biuf" or not all(size > 0 for size in self.shape):
            raise ValueError(f"column of dtype {self.dtype} and shape {self.shape}")

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in memory."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def block_rows(self) -> int:
        """Number of rows in a block."""
        return max(1, BLOCK_BYTES // self.row_bytes)


@dataclass(frozen=True)
class ShardInfo:
    """One flat file of a log.

    name: path or URL as given; rows and episodes (0 where there are none) in it; bytes and sha256 of the file
    where they are known; columns by the names of ``Transitions``. starts (E,): the first rows of its episodes
    where ``episode_ids`` do not count 0, 1, 2, … .
    """

    name: str
    rows: int
    episodes: int
    bytes: int | None = None
    sha256: str | None = None
    columns: Mapping[str, Column] = field(default_factory=dict, compare=False)
    starts: np.ndarray | None = field(default=None, compare=False)

    @contextlib.contextmanager
    def open(self) -> Iterator[OpenShard]:
        """Open the file for slices. Raises DataError naming it, also for errors inside the block."""
        with naming(self.name), remote.local_file(self.name) as path, open_sliced(path, self.name) as file:
            with reading(self.name, "HDF5"):
                arrays = file.slices([c.key for c in self.columns.values() if c.key in file])
            yield OpenShard(self, arrays)


class OpenShard:
    """An open shard. Raises DataError unless its arrays still have the shapes and kinds they had."""

    def __init__(self, shard: ShardInfo, arrays: Mapping[str, Any]) -> None:
        self._shard, self._arrays = shard, arrays
        for column in shard.columns.values():
            array, expected = arrays.get(column.key), (shard.rows, *column.shape)
            if array is None:
                raise DataError(f"{column.key} is missing; copy or write the file again")
            if (
                array.dtype.kind not in "biuf"
                or array.size != math.prod(expected)
                or len(array) != shard.rows
            ):
                raise DataError(
                    f"{column.key} has shape {array.shape} and dtype {array.dtype}, expected {expected} "
                    f"{column.dtype}; copy or write the file again"
                )

    def column(self, name: str, start: int, stop: int) -> np.ndarray:
        """(B, ...) values of a column, in its dtype and shape but otherwise unchecked."""
        column = self._shard.columns[name]
        with reading(self._shard.name, "data"):
            values = np.asarray(self._arrays[column.key][start:stop])
        if np.dtype(column.dtype).kind == "f":  # whole numbers and flags are checked before they are cast
            values = values.astype(column.dtype, copy=False)
        return values.reshape(len(values), *column.shape)

    def columns(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """All columns of some rows, by name."""
        return {name: self.column(name, start, stop) for name in self._shard.columns if name not in COUNTED}

    def places(self, start: int, stop: int) -> tuple[np.ndarray | None, np.ndarray]:
        """Steps within the episode (B,), None without episodes, and numbers of the units (B,)."""
        rows, starts = np.arange(start, stop), self._shard.starts
        if "steps" not in self._shard.columns:
            return None, rows
        units, steps = (checks.integer_column(n, self.column(n, start, stop), start) for n in COUNTED)
        return steps, units if starts is None else np.searchsorted(starts, rows, side="right") - 1


@contextlib.contextmanager
def naming(shard: str) -> Iterator[None]:
    """Put the shard's name before the message of a DataError."""
    try:
        yield
    except DataError as error:
        message = str(error)
        raise DataError(message if message.startswith(shard) else f"{shard}: {message}") from None


def check_alike(this: str, here: Mapping[str, Any], that: str, before: Mapping[str, Any]) -> None:
    """Raise DataError, naming the first difference, if two pieces are not parts of one log.

    here, before: descriptions of action space, episodes and columns of the two.
    """
    for name in (*here, *before):
        if here.get(name) != before.get(name):
            found = ["none" if said is None else str(said) for said in (here.get(name), before.get(name))]
            remedy = "declare one space" if name == "action space" else "give pieces of one log"
            raise DataError(f"{this} has {name} {found[0]}, {that} {found[1]}; {remedy}")
