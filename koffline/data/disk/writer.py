"""A folder of shards, at a path or a URL, and its ``manifest.json``, which describes
the log.

Each shard is a flat koffline HDF5 file. A folder is written atomically, with memory
bounded by the rows of one `append`, and is opened from its manifest alone. Other kinds
of logs are first converted into such a folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from koffline.data import remote
from koffline.data.columns import COUNTED
from koffline.data.disk.log import Column, LazyTransitions, ShardInfo
from koffline.data.flat import DESCRIPTION, KEYS
from koffline.data.kinds import MANIFEST, OWN_FILES, SHARDS, is_shard_folder
from koffline.data.raw import (
    METADATA,
    describe_columns,
    metadata_to_json,
    space_from_json,
    space_to_json,
)
from koffline.data.spaces import ActionSpace, SpaceRequest
from koffline.data.transitions import REQUIRED_COLUMNS, Metadata, Transitions
from koffline.errors import DataError
from koffline.json_types import JsonObject
from koffline.store.files import Location, atomic_folder, digest_of
from koffline.untrusted.hdf5 import new_hdf5, write_text
from koffline.untrusted.limits import (
    TEXT_BYTES,
    one_line_errors,
    parse_json,
    shown_bytes,
)

if TYPE_CHECKING:
    import h5py

# Limit of the number of shards: at about 190 bytes each, the longest manifest that is
# read.
MOST_SHARDS = 80_000
# What is wrong with a manifest that cannot be read, and what to do.
_UNREADABLE = "damaged, or newer than this koffline"
_WRITE_AGAIN = "write the folder again"
# Bytes of a chunk of the widest column: large enough for the disk, small enough for
# shuffled blocks of rows.
_CHUNK_BYTES = 2**18


def open_lazy(
    source: Location, action_space: SpaceRequest | None = None
) -> LazyTransitions:
    """Open a folder of shards from its manifest alone.

    Raises DataError for anything else.
    """
    name = os.fspath(source)
    if is_shard_folder(name):
        return _read_manifest(name).declared_anew(action_space)
    if not remote.exists(name):
        raise DataError(f"{name} does not exist; check the path")
    raise DataError(
        f"{name} is no folder of shards (with {MANIFEST}), which alone is read from"
        f" disk; make one of it: koffline data convert {name} shards --shard-rows"
        " 100000"
    )


class _Manifest(BaseModel):
    """The content of ``manifest.json``; further keys are the fields of the metadata."""

    model_config = ConfigDict(extra="allow")

    format: Literal["koffline-shards"]
    version: Literal[1]
    rows: PositiveInt
    action_space: JsonObject
    columns: dict[str, Column]
    episodes: bool
    shards: Annotated[list[ShardInfo], Field(min_length=1)]


def write_manifest(folder: Path, log: LazyTransitions) -> None:
    """Write ``manifest.json`` into a folder that is not in use yet; shards are given by
    their paths.
    """
    shards = [dataclasses.asdict(shard) for shard in log.shards]
    described = {
        "format": SHARDS,
        "version": 1,
        "rows": len(log),
        "action_space": space_to_json(log.action_space),
        "columns": {
            name: dataclasses.asdict(column) for name, column in log.columns.items()
        },
        "episodes": log.has_episodes,
        **metadata_to_json(log.metadata),
        "shards": [{"file": Path(shard.pop("name")).name, **shard} for shard in shards],
    }
    (folder / MANIFEST).write_text(
        json.dumps(described, indent=1, default=str) + "\n", encoding="utf-8"
    )


def _read_manifest(folder: str) -> LazyTransitions:
    """Open the log of a folder from its manifest alone. Raises DataError."""
    name = remote.joined(folder, MANIFEST)
    _refuse_link(name)
    if remote.size(name) > TEXT_BYTES:
        raise DataError(
            f"{name} is larger than {shown_bytes(TEXT_BYTES)}, the most that a manifest"
            " may have; write fewer and larger shards"
        )
    with one_line_errors(name, _UNREADABLE, _WRITE_AGAIN):
        manifest, metadata = _parsed_manifest(remote.read_bytes(name, TEXT_BYTES))
        space = space_from_json(manifest.action_space)
        problem = _problem_of_manifest(manifest)
        if problem:
            raise DataError(f"{problem}; {_WRITE_AGAIN}")
    shards = []
    for shard in manifest.shards:
        path = remote.joined(folder, shard.name)
        _refuse_link(path)
        shards.append(dataclasses.replace(shard, name=path))
    metadata = dataclasses.replace(metadata, source=folder)
    return LazyTransitions(tuple(shards), space, manifest.columns, metadata)


def _parsed_manifest(content: bytes) -> tuple[_Manifest, Metadata]:
    """A manifest and the metadata in it. Raises DataError for a missing or a wrong
    value, other errors for what is no JSON.
    """
    try:
        manifest = _Manifest.model_validate(parse_json(content))
        return manifest, METADATA.validate_python(manifest.model_extra)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            problem = f"{place} is missing"
        else:
            problem = f"{place} is {first['input']!r:.60}"
        raise DataError(f"{_UNREADABLE} ({problem}); {_WRITE_AGAIN}") from None


def _problem_of_manifest(manifest: _Manifest) -> str:
    """What contradicts itself in a manifest; empty if nothing does."""
    needed = list(REQUIRED_COLUMNS)
    if manifest.episodes:
        needed += COUNTED
    for column in needed:
        if column not in manifest.columns:
            return f"columns.{column} is missing"
    if len({shard.name for shard in manifest.shards}) < len(manifest.shards):
        return "it lists a shard twice"
    rows = sum(shard.rows for shard in manifest.shards)
    if rows != manifest.rows:
        return f"it promises {manifest.rows} rows and has {rows}"
    return ""


def _refuse_link(name: str) -> None:
    """Raise DataError for a symbolic link, since a link within the folder could count a
    shard twice.
    """
    path = remote.local_path(name)
    if path is not None and path.is_symlink():
        raise DataError(
            f"{name} is a link, which is not followed; copy the folder with the files"
            " themselves"
        )


class ShardWriter:
    """Append logs of whole episodes to ``target``, a new folder of shards with at most
    ``shard_rows`` rows each.

    A longer episode gets a shard of its own. Use it as a context manager: the folder
    appears when the block ends without an error; otherwise nothing is left behind.
    ``metadata`` may be set until then; default: that of the first appended log. Where
    shards are cut depends on the episodes only, not on how they are appended. force:
    replace a folder of shards with that name. Raises DataError.
    """

    def __init__(self, target: Location, shard_rows: int, force: bool = False) -> None:
        if shard_rows < 1:
            raise DataError(
                f"shard_rows is {shard_rows}; give at least one row per shard"
            )
        self.target = os.fspath(target)
        self.shard_rows = shard_rows
        if "://" in self.target:
            raise DataError(
                f"{target} is no folder of this machine; write one here and copy it"
                " there"
            )
        self.metadata: Metadata | None = None
        self._force = force
        self._folders = contextlib.ExitStack()
        self._files = contextlib.ExitStack()
        self._space: ActionSpace | None = None
        self._columns: dict[str, Column] = {}
        self._shards: list[ShardInfo] = []
        self._rows = 0  # of the open shard
        self._episodes = 0
        self._arrays: dict[str, h5py.Dataset] = {}

    def __enter__(self) -> ShardWriter:
        folder = atomic_folder(Path(self.target), self._force, OWN_FILES["shards"])
        self._folder = self._folders.enter_context(folder)
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        # The folder's context must also see a failure of the last steps, so that no
        # folder appears.
        with self._folders, self._files:
            if error is not None:
                raise error
            self._finish()

    @property
    def rows(self) -> int:
        """Rows written so far."""
        return sum(shard.rows for shard in self._shards) + self._rows

    def append(self, log: Transitions) -> None:
        """Append a log of whole episodes.

        Raises DataError if it differs in space or columns.
        """
        self._check_kinds(log)
        if log.has_episodes:
            ends = np.append(log.episode_starts[1:], len(log))
        else:
            ends = np.arange(1, len(log) + 1)
        done = 0  # units
        row = 0
        while row < len(log):
            last_row = row + self.shard_rows - self._rows
            fitting = int(np.searchsorted(ends, last_row, side="right"))
            if fitting <= done and self._rows:
                self._close_shard()
                continue
            fitting = max(fitting, done + 1)  # an episode may be longer than a shard
            stop = int(ends[fitting - 1])
            self._write({name: array[row:stop] for name, array in log.columns.items()})
            done = fitting
            row = stop

    def _check_kinds(self, log: Transitions) -> None:
        """Take space and columns from the first log; raise DataError if those of a
        later one differ.
        """
        kinds = {
            name: Column(KEYS[name][0], array.dtype.name, array.shape[1:])
            for name, array in log.columns.items()
        }
        if self._space is None:
            self._space = log.action_space
            self._columns = kinds
            if self.metadata is None:
                self.metadata = log.metadata
        here = {"action space": log.action_space, **kinds}
        before = {"action space": self._space, **self._columns}
        for name in (*here, *before):
            if here.get(name) != before.get(name):
                raise DataError(
                    f"{self.target}: the appended log has {name} {here.get(name)}, the"
                    f" first one {before.get(name)}; give pieces of one log"
                )

    def _write(self, columns: dict[str, np.ndarray]) -> None:
        """Write rows of whole episodes to the open shard, and number the episodes
        within the shard.
        """
        start = self._rows
        stop = self._rows + len(columns["rewards"])
        if not start:
            self._open_shard()
        if "steps" in columns:
            columns["episode_ids"] = (
                self._episodes - 1 + np.cumsum(columns["steps"] == 0)
            )
            self._episodes = int(columns["episode_ids"][-1]) + 1
        for name, array in self._arrays.items():
            array.resize(stop, axis=0)
            array[start:stop] = columns[name]
        self._rows = stop

    def _open_shard(self) -> None:
        """Begin a shard with empty columns. Raises DataError for too many shards."""
        if len(self._shards) == MOST_SHARDS:
            raise DataError(
                f"{self.target} would have more than {MOST_SHARDS} shards; put more"
                " rows into each"
            )
        self._path = self._folder / f"shard-{len(self._shards):05d}.hdf5"
        file = self._files.enter_context(new_hdf5(self._path))
        # chunks of all columns hold the same rows, so that reading a block reads the
        # same share of each
        widest = max(column.row_bytes for column in self._columns.values())
        chunk = max(1, min(self.shard_rows, _CHUNK_BYTES // widest))
        for name, column in self._columns.items():
            self._arrays[name] = file.create_dataset(
                column.key,
                (0, *column.shape),
                column.dtype,
                maxshape=(None, *column.shape),
                chunks=(chunk, *column.shape),
                fletcher32=True,
                track_times=False,
            )

    def _close_shard(self) -> None:
        """Finish the open shard: its description and its digest."""
        assert self._space is not None
        assert self.metadata is not None
        # the digest in the metadata is that of the whole folder
        metadata = dataclasses.replace(self.metadata, sha256=None)
        text = describe_columns(self._space, "steps" in self._columns, metadata)
        write_text(self._arrays["rewards"].file, DESCRIPTION, text)
        self._files.close()
        self._shards.append(
            ShardInfo(
                name=str(self._path),
                rows=self._rows,
                episodes=self._episodes,
                sha256=digest_of(self._path),
            )
        )
        self._rows = 0
        self._episodes = 0

    def _finish(self) -> None:
        """Close the last shard and write the manifest. Raises DataError without
        rows."""
        if self._space is None or self.metadata is None:
            raise DataError(f"{self.target}: no rows were given; append at least one")
        if self._rows:
            self._close_shard()
        # Another digest is of the rows as they were read, perhaps from another log.
        metadata = dataclasses.replace(self.metadata, sha256=None)
        log = LazyTransitions(tuple(self._shards), self._space, self._columns, metadata)
        metadata = dataclasses.replace(metadata, sha256=log.sha256)
        write_manifest(self._folder, dataclasses.replace(log, metadata=metadata))
