"""Writer of a folder of shards, whole or not at all; memory is bounded by the rows of one `append`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np

from koffline.data.disk.log import Column, LazyTransitions, ShardInfo
from koffline.data.disk.opening import MOST_SHARDS, is_shard_folder, write_manifest
from koffline.data.flat import DESCRIPTION, KEYS
from koffline.data.hdf5 import disk_faults, new_hdf5
from koffline.data.raw import describe_columns
from koffline.data.spaces import ActionSpace
from koffline.data.transitions import Metadata, Transitions
from koffline.errors import DataError
from koffline.store.files import atomic_folder
from koffline.store.run_record import digest_of
from koffline.untrusted.hdf5 import write_text

# Bytes of a chunk of the widest column: large enough for the disk, small enough for shuffled blocks of rows.
_CHUNK_BYTES = 2**18


class ShardWriter:
    """Append logs of whole episodes; they are cut into shards of at most ``shard_rows`` rows.

    An episode longer than that has a shard of its own. Use it as a context manager: the folder takes its name
    when the block ends well; otherwise nothing stays. ``metadata`` may be set until then; without it, that of
    the first log appended is kept. Where the shards are cut depends on the episodes alone, not on how they
    come in. Raises DataError.
    """

    def __init__(self, target: str | os.PathLike[str], shard_rows: int, force: bool = False) -> None:
        if shard_rows < 1:
            raise DataError(f"shard_rows is {shard_rows}; give at least one row per shard")
        self.target, self.shard_rows = os.fspath(target), shard_rows
        if "://" in self.target:
            raise DataError(f"{target} is no folder of this machine; write one here and copy it there")
        self.metadata: Metadata | None = None
        self._force = force
        self._folders, self._files = contextlib.ExitStack(), contextlib.ExitStack()
        self._space: ActionSpace | None = None
        self._columns: dict[str, Column] = {}
        self._shards: list[ShardInfo] = []
        self._rows = self._episodes = 0  # rows and episodes of the open shard
        self._arrays: dict[str, Any] = {}

    def __enter__(self) -> ShardWriter:
        folder = atomic_folder(Path(self.target), self._force, lambda path: is_shard_folder(str(path)))
        self._folder = self._folders.enter_context(folder)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        # The folder's context must also see a failure of the last steps, so that no folder appears.
        with self._folders, self._files:
            if error is not None:
                raise error
            self._finish()

    @property
    def rows(self) -> int:
        """Rows written so far."""
        return sum(shard.rows for shard in self._shards) + self._rows

    def append(self, log: Transitions) -> None:
        """Append a log of whole episodes. Raises DataError if it differs in space or columns."""
        columns = log.columns
        kinds = {
            name: Column(KEYS[name][0], held.dtype.name, held.shape[1:]) for name, held in columns.items()
        }
        if self._space is None:
            self._space, self._columns = log.action_space, kinds
            self.metadata = log.metadata if self.metadata is None else self.metadata
        here = {"action space": log.action_space, **kinds}
        before = {"action space": self._space, **self._columns}
        for name in (*here, *before):
            if here.get(name) != before.get(name):
                said = (
                    f"the log that is appended has {name} {here.get(name)}, the first one {before.get(name)}"
                )
                raise DataError(f"{self.target}: {said}; give pieces of one log")
        ends = np.append(log.episode_starts[1:], len(log)) if log.has_episodes else np.arange(1, len(log) + 1)
        done = row = 0
        while row < len(log):
            fitting = int(np.searchsorted(ends, row + self.shard_rows - self._rows, side="right"))
            if fitting <= done and self._rows:
                self._close_shard()
                continue
            fitting = max(fitting, done + 1)  # an episode may be longer than a shard
            stop = int(ends[fitting - 1])
            self._write({name: array[row:stop] for name, array in columns.items()})
            done, row = fitting, stop

    def _write(self, columns: dict[str, np.ndarray]) -> None:
        """Write rows of whole episodes to the open shard and number the episodes within it."""
        start, stop = self._rows, self._rows + len(columns["rewards"])
        with disk_faults():
            if not start:
                self._open_shard()
            if "steps" in columns:
                columns["episode_ids"] = self._episodes - 1 + np.cumsum(columns["steps"] == 0)
                self._episodes = int(columns["episode_ids"][-1]) + 1
            for name, array in self._arrays.items():
                array.resize(stop, axis=0)
                array[start:stop] = columns[name]
        self._rows = stop

    def _open_shard(self) -> None:
        if len(self._shards) == MOST_SHARDS:
            said = f"{self.target} would have more than {MOST_SHARDS} shards"
            raise DataError(f"{said}; put more rows into each")
        self._path = self._folder / f"shard-{len(self._shards):05d}.hdf5"
        file = self._files.enter_context(new_hdf5(self._path))
        # chunks of all columns hold the same rows, so that reading a block reads the same share of each
        widest = max(column.row_bytes for column in self._columns.values())
        chunk = max(1, min(self.shard_rows, _CHUNK_BYTES // widest))
        options: dict[str, Any] = {"fletcher32": True, "track_times": False}
        for name, column in self._columns.items():
            options |= {"maxshape": (None, *column.shape), "chunks": (chunk, *column.shape)}
            empty = (0, *column.shape)
            self._arrays[name] = file.create_dataset(column.key, empty, column.dtype, **options)

    def _close_shard(self) -> None:
        assert self._space is not None
        assert self.metadata is not None
        # the digest in the metadata is that of the whole folder
        metadata = dataclasses.replace(self.metadata, sha256=None)
        with disk_faults():
            said = describe_columns(self._space, "steps" in self._columns, metadata)
            write_text(self._arrays["rewards"].file, DESCRIPTION, said)
            self._files.close()
        name, size, digest = str(self._path), self._path.stat().st_size, digest_of(self._path)
        self._shards.append(ShardInfo(name, self._rows, self._episodes, size, digest))
        self._rows = self._episodes = 0

    def _finish(self) -> None:
        if self._space is None or self.metadata is None:
            raise DataError(f"{self.target}: no rows were given; append at least one")
        if self._rows:
            self._close_shard()
        log = LazyTransitions(tuple(self._shards), self._space, self._columns, self.metadata)
        metadata = dataclasses.replace(self.metadata, sha256=log.compute_sha256())
        write_manifest(self._folder, dataclasses.replace(log, metadata=metadata))
