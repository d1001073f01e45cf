"""Writing a folder of shards row by row: the memory of what is appended, the folder whole or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from koffline.data.disk.flat_files import Column
from koffline.data.disk.shards import (
    MANIFEST,
    MOST_SHARDS,
    Manifest,
    ShardInfo,
    unfinished_shards,
    write_manifest,
)
from koffline.data.flat import KEYS
from koffline.data.hdf5 import DESCRIPTION, KeptErrors, disk_faults
from koffline.data.raw import describe_columns
from koffline.data.row_block import RowBlock
from koffline.data.spaces import ActionSpace
from koffline.data.transitions import Metadata, Transitions
from koffline.errors import DataError
from koffline.store.run_record import digest_of
from koffline.untrusted.hdf5 import write_text

# Bytes of a chunk of the widest column: large enough for the disk, small enough for shuffled blocks of rows.
_CHUNK_BYTES = 2**18


class ShardWriter:
    """Append logs of whole episodes; they are cut into shards of at most ``shard_rows`` rows.

    An episode longer than that has a shard of its own. Use it as a context manager: the folder takes its name
    when the block ends well; otherwise nothing stays. ``metadata`` may be set until then; without it, that of
    the first log appended is kept. Where the shards are cut depends on the episodes alone, not on how they
    come in. The target may be a URL: shards go there one by one, the manifest last. Raises DataError.
    """

    def __init__(self, target: str | os.PathLike[str], shard_rows: int, force: bool = False) -> None:
        if shard_rows < 1:
            raise DataError(f"shard_rows is {shard_rows}; give at least one row per shard")
        self.target, self.shard_rows = os.fspath(target), shard_rows
        self.metadata: Metadata | None = None
        self._force = force
        self._stack = contextlib.ExitStack()
        self._kind: _Kind | None = None
        self._open: _OpenFile | None = None
        self._shards: list[ShardInfo] = []

    def __enter__(self) -> ShardWriter:
        self._target = self._stack.enter_context(unfinished_shards(self.target, self._force))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The folder's context must see a failure of the last steps too: then nothing takes the final name.
        with self._stack:
            try:
                if error is None:
                    self._finish()
                else:
                    raise error
            finally:
                if self._open is not None:
                    self._open.close()

    @property
    def rows(self) -> int:
        """Rows written so far."""
        return sum(shard.rows for shard in self._shards) + (self._open.rows if self._open else 0)

    def append(self, log: Transitions) -> None:
        """Write rows; their episodes are whole. Raises DataError where the log is of another kind."""
        columns = {name: getattr(log, name) for name in KEYS}
        present = {name: array for name, array in columns.items() if array is not None}
        self._append(present, log.action_space, log.metadata)

    def append_block(self, block: RowBlock, action_space: ActionSpace) -> None:
        """The same of rows that were read from shards."""
        columns = block.arrays()
        units = columns.pop("units")
        if block.steps is not None:
            columns["episode_ids"] = units
        self._append(columns, action_space, Metadata())

    def _append(self, columns: Mapping[str, np.ndarray], space: ActionSpace, metadata: Metadata) -> None:
        if self._kind is None:
            self._kind = _Kind(space, _columns_of(columns))
            self.metadata = metadata if self.metadata is None else self.metadata
        self._kind.check(_Kind(space, _columns_of(columns)), self.target)
        rows = len(columns["rewards"])
        if "steps" in columns:
            ends = np.append(np.flatnonzero(columns["steps"][1:] == 0) + 1, rows)
        else:
            ends = np.arange(1, rows + 1)
        done = row = 0
        while row < rows:
            room = self.shard_rows - (self._open.rows if self._open else 0)
            fitting = int(np.searchsorted(ends, row + room, side="right"))
            if fitting <= done and self._open is not None:
                self._close_shard()
                continue
            fitting = max(fitting, done + 1)  # an episode may be longer than a shard
            stop = int(ends[fitting - 1])
            self._write({name: array[row:stop] for name, array in columns.items()}, fitting - done)
            done, row = fitting, stop

    def _write(self, columns: dict[str, np.ndarray], units: int) -> None:
        assert self._kind is not None
        with disk_faults():
            if self._open is None:
                if len(self._shards) == MOST_SHARDS:
                    raise DataError(
                        f"{self.target} would have more than {MOST_SHARDS} shards; put more rows into each"
                    )
                name = f"shard-{len(self._shards):05d}.hdf5"
                self._open = _OpenFile(self._target.folder / name, self._kind.columns, self.shard_rows)
            if "steps" in columns:
                columns["episode_ids"] = self._open.episodes + np.cumsum(columns["steps"] == 0) - 1
            self._open.append(columns, units if "steps" in columns else 0)

    def _close_shard(self) -> None:
        assert self._open is not None
        with disk_faults():
            file, self._open = self._open, None
            self._shards.append(file.finish(describe_columns(*self._described())))
        self._target.done(self._shards[-1].name)

    def _described(self) -> tuple[ActionSpace, bool, Metadata]:
        """What each shard says: its own digest is not known before it is read, the folder's is another."""
        assert self._kind is not None
        assert self.metadata is not None
        said = dataclasses.replace(self.metadata, sha256=None)
        return self._kind.space, self._kind.has_episodes, said

    def _finish(self) -> None:
        if self._open is not None:
            self._close_shard()
        if self._kind is None:
            raise DataError(f"{self.target}: no rows were given; append at least one")
        space, has_episodes, metadata = self._described()
        manifest = Manifest(space, self._kind.columns, has_episodes, metadata, tuple(self._shards))
        if self._target.storage is None:  # of a storage it would be read back once for every column
            digest = _digest(self._target.folder, manifest)
            manifest = dataclasses.replace(manifest, metadata=dataclasses.replace(metadata, sha256=digest))
        write_manifest(self._target.folder, manifest)
        self._target.done(MANIFEST)


@dataclass(frozen=True)
class _Kind:
    """What all rows of a folder have in common."""

    space: ActionSpace
    columns: Mapping[str, Column]

    @property
    def has_episodes(self) -> bool:
        return "steps" in self.columns

    def check(self, other: _Kind, target: str) -> None:
        """Raise DataError, naming the column, unless rows of another kind are of this one."""
        if other.space != self.space:
            raise DataError(
                f"{target}: rows with actions {other.space} after rows with {self.space}; declare one space"
            )
        for name in sorted({*other.columns, *self.columns}):
            here, before = other.columns.get(name), self.columns.get(name)
            if here != before:
                found = ["none" if c is None else f"{c.dtype} {c.shape}" for c in (here, before)]
                raise DataError(
                    f"{target}: rows with {name} {found[0]} after rows with {found[1]}; give them alike"
                )


class _OpenFile:
    """A shard being written. Everything here raises OSError where the disk does not take it."""

    def __init__(self, path: Path, columns: Mapping[str, Column], most_rows: int) -> None:
        import h5py

        self.path, self.rows, self.episodes = path, 0, 0
        self._output = KeptErrors(path)
        self._file = h5py.File(self._output, "w", libver="v108")
        self._arrays: dict[str, Any] = {}
        # the same rows for all columns: a block at random reads no more of one than of another
        widest = max(column.row_bytes for column in columns.values())
        chunk = max(1, min(most_rows, _CHUNK_BYTES // widest))
        for name, column in columns.items():
            self._arrays[name] = self._file.create_dataset(
                column.key,
                shape=(0, *column.shape),
                maxshape=(None, *column.shape),
                chunks=(chunk, *column.shape),
                dtype=column.dtype,
                fletcher32=True,
                track_times=False,
            )

    def append(self, columns: dict[str, np.ndarray], episodes: int) -> None:
        """More rows."""
        stop = self.rows + len(columns["rewards"])
        for name, array in self._arrays.items():
            array.resize(stop, axis=0)
            array[self.rows : stop] = columns[name]
            self._output.check()
        self.rows, self.episodes = stop, self.episodes + episodes

    def finish(self, description: str) -> ShardInfo:
        """Close the file; what a manifest says of it."""
        write_text(self._file, DESCRIPTION, description)
        self.close()
        self._output.check()
        size = self.path.stat().st_size
        return ShardInfo(self.path.name, self.rows, self.episodes, size, digest_of(self.path))

    def close(self) -> None:
        """Close the file, whatever became of it."""
        self._file.close()
        self._output.close()


def _columns_of(columns: Mapping[str, np.ndarray]) -> dict[str, Column]:
    return {
        name: Column(KEYS[name][0], array.dtype.name, tuple(array.shape[1:]))
        for name, array in columns.items()
    }


def _digest(folder: Path, manifest: Manifest) -> str:
    """The digest of all rows, from the finished shards."""
    from koffline.data.disk.opening import lazy_of_manifest

    shards = tuple(dataclasses.replace(s, name=str(folder / s.name)) for s in manifest.shards)
    return lazy_of_manifest(dataclasses.replace(manifest, shards=shards)).compute_sha256()
