"""Writing a folder of shards row by row: the memory of what is appended, the folder whole or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import numpy as np

from koffline.data.disk.files import Column, ShardInfo, check_alike
from koffline.data.disk.log import LazyTransitions
from koffline.data.disk.shards import MANIFEST, MOST_SHARDS, unfinished_shards, write_manifest
from koffline.data.flat import DESCRIPTION, KEYS
from koffline.data.hdf5 import KeptErrors, disk_faults
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
        self._space: ActionSpace | None = None
        self._columns: dict[str, Column] = {}
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
                if error is not None:
                    raise error
                self._finish()
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
        kinds = {
            name: Column(KEYS[name][0], array.dtype.name, tuple(array.shape[1:]))
            for name, array in columns.items()
        }
        if self._space is None:
            self._space, self._columns = space, kinds
            self.metadata = metadata if self.metadata is None else self.metadata
        here, before = {"action space": space, **kinds}, {"action space": self._space, **self._columns}
        check_alike(f"{self.target}: the log that is appended", here, "the first one", before)
        rows = len(columns["rewards"])
        ends = np.arange(1, rows + 1)
        if "steps" in columns:
            ends = np.append(np.flatnonzero(columns["steps"][1:] == 0) + 1, rows)
        done = row = 0
        while row < rows:
            room = self.shard_rows - (self._open.rows if self._open else 0)
            fitting = int(np.searchsorted(ends, row + room, side="right"))
            if fitting <= done and self._open is not None:
                self._close_shard()
                continue
            fitting = max(fitting, done + 1)  # an episode may be longer than a shard
            stop = int(ends[fitting - 1])
            self._write({name: array[row:stop] for name, array in columns.items()})
            done, row = fitting, stop

    def _write(self, columns: dict[str, np.ndarray]) -> None:
        with disk_faults():
            if self._open is None:
                if len(self._shards) == MOST_SHARDS:
                    raise DataError(
                        f"{self.target} would have more than {MOST_SHARDS} shards; put more rows into each"
                    )
                path = self._target.folder / f"shard-{len(self._shards):05d}.hdf5"
                self._open = _OpenFile(path, self._columns, self.shard_rows)
            self._open.append(columns)

    def _close_shard(self) -> None:
        assert self._open is not None
        with disk_faults():
            file, self._open = self._open, None
            log = self._log()
            said = describe_columns(log.action_space, log.has_episodes, log.metadata)
            self._shards.append(file.finish(said))
        self._target.done(file.path.name)

    def _log(self) -> LazyTransitions:
        """What was written so far. Shards do not know their digest, and that of the folder is another."""
        assert self._space is not None
        assert self.metadata is not None
        said = dataclasses.replace(self.metadata, sha256=None)
        return LazyTransitions(tuple(self._shards), self._space, "steps" in self._columns, said)

    def _finish(self) -> None:
        if self._space is None:
            raise DataError(f"{self.target}: no rows were given; append at least one")
        if self._open is not None:
            self._close_shard()
        log = self._log()
        if self._target.storage is None:  # of a storage it would be read back once for every column
            metadata = dataclasses.replace(log.metadata, sha256=log.compute_sha256())
            log = dataclasses.replace(log, metadata=metadata)
        write_manifest(self._target.folder, log)
        self._target.done(MANIFEST)


class _OpenFile:
    """A shard being written. Everything here raises OSError where the disk does not take it."""

    def __init__(self, path: Path, columns: Mapping[str, Column], most_rows: int) -> None:
        import h5py

        self.path, self.rows, self._episodes, self._columns = path, 0, 0, columns
        self._output = KeptErrors(path)
        self._file = h5py.File(self._output, "w", libver="v108")
        # the same rows for all columns: a block at random reads no more of one than of another
        widest = max(column.row_bytes for column in columns.values())
        chunk = max(1, min(most_rows, _CHUNK_BYTES // widest))
        self._arrays = {
            name: self._file.create_dataset(
                column.key,
                shape=(0, *column.shape),
                maxshape=(None, *column.shape),
                chunks=(chunk, *column.shape),
                dtype=column.dtype,
                fletcher32=True,
                track_times=False,
            )
            for name, column in columns.items()
        }

    def append(self, columns: dict[str, np.ndarray]) -> None:
        """More rows, whole episodes, which are counted anew."""
        stop = self.rows + len(columns["rewards"])
        if "steps" in columns:
            columns["episode_ids"] = self._episodes - 1 + np.cumsum(columns["steps"] == 0)
            self._episodes = int(columns["episode_ids"][-1]) + 1
        for name, array in self._arrays.items():
            array.resize(stop, axis=0)
            array[self.rows : stop] = columns[name]
            self._output.check()
        self.rows = stop

    def finish(self, description: str) -> ShardInfo:
        """Close the file; what a manifest says of it."""
        write_text(self._file, DESCRIPTION, description)
        self.close()
        self._output.check()
        size, digest = self.path.stat().st_size, digest_of(self.path)
        return ShardInfo(str(self.path), self.rows, self._episodes, size, digest, self._columns)

    def close(self) -> None:
        """Close the file, whatever became of it."""
        self._file.close()
        self._output.close()
