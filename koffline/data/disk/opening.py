"""A folder of shards, at a path or a URL, and its ``manifest.json``, which says what the log is.

Each shard is a flat koffline HDF5 file. Any other log is first made into such a folder.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from koffline.data import remote
from koffline.data.columns import COUNTED
from koffline.data.disk.log import Column, LazyTransitions, ShardInfo
from koffline.data.raw import METADATA, metadata_to_json, space_from_json, space_to_json
from koffline.data.spaces import SpaceRequest
from koffline.data.transitions import REQUIRED_COLUMNS
from koffline.errors import DataError
from koffline.untrusted.limits import TEXT_BYTES, shown_bytes

MANIFEST = "manifest.json"
FORMAT = "koffline-shards"
# Limit of the number of shards: at about 190 bytes each, the longest manifest that is read.
MOST_SHARDS = 80_000


def open_lazy(source: str | os.PathLike[str], action_space: SpaceRequest | None = None) -> LazyTransitions:
    """Open a folder of shards from its manifest alone. Raises DataError for anything else."""
    name = os.fspath(source)
    if is_shard_folder(name):
        return _read_manifest(name).declared_anew(action_space)
    if not remote.exists(name):
        raise DataError(f"{name} does not exist; check the path")
    raise DataError(
        f"{name} is no folder of shards (with {MANIFEST}), which alone is read from disk; make one of it: "
        f"koffline data convert {name} shards --shard-rows 100000"
    )


def is_shard_folder(folder: str) -> bool:
    """Whether a folder, or the folder at a URL, holds a manifest of ours."""
    try:
        head = remote.read_bytes(remote.joined(folder, MANIFEST), 4096)
    except DataError:
        return False
    return FORMAT.encode() in head


class _Manifest(BaseModel):
    """The content of ``manifest.json``, and the metadata by the names of its fields."""

    model_config = ConfigDict(extra="allow")

    format: Literal["koffline-shards"]
    version: Literal[1]
    rows: PositiveInt
    action_space: dict[str, Any]
    columns: dict[str, Column]
    episodes: bool
    shards: Annotated[list[ShardInfo], Field(min_length=1)]


def write_manifest(folder: Path, log: LazyTransitions) -> None:
    """Write ``manifest.json`` into a folder that nobody reads yet; its shards are named by their paths."""
    shards = [dataclasses.asdict(shard) for shard in log.shards]
    described = {
        "format": FORMAT,
        "version": 1,
        "rows": len(log),
        "action_space": space_to_json(log.action_space),
        "columns": {name: dataclasses.asdict(column) for name, column in log.columns.items()},
        "episodes": log.has_episodes,
        **metadata_to_json(log.metadata),
        "shards": [{"file": Path(shard.pop("name")).name, **shard} for shard in shards],
    }
    text = json.dumps(described, indent=1, default=str) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def _read_manifest(folder: str) -> LazyTransitions:
    """Open the log of a folder from its manifest alone. Raises DataError."""
    name = remote.joined(folder, MANIFEST)
    _refuse_link(name)
    if remote.size(name) > TEXT_BYTES:
        most = f"{shown_bytes(TEXT_BYTES)}, the most that a manifest may have"
        raise DataError(f"{name} is larger than {most}; write fewer and larger shards")
    try:
        found = _Manifest.model_validate_json(remote.read_bytes(name, TEXT_BYTES))
        metadata = dataclasses.replace(METADATA.validate_python(found.model_extra or {}), source=folder)
    except (ValueError, TypeError, AttributeError) as error:
        said = str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            said = " ".join([*map(str, first["loc"]), first["msg"][:1].lower() + first["msg"][1:]])
        reason = " ".join(said.split())[:200]
        raise DataError(f"{name} is damaged or newer than this koffline ({reason}); write it again") from None
    needed = {*REQUIRED_COLUMNS, *(COUNTED if found.episodes else ())}
    files, rows = {shard.name for shard in found.shards}, sum(shard.rows for shard in found.shards)
    if needed - found.columns.keys() or len(files) < len(found.shards) or rows != found.rows:
        said = f"{name} lacks columns, lists a shard twice, or promises {found.rows} rows and has {rows}"
        raise DataError(f"{said}; write the folder again")
    shards = [dataclasses.replace(s, name=remote.joined(folder, s.name)) for s in found.shards]
    for shard in shards:
        _refuse_link(shard.name)
    return LazyTransitions(tuple(shards), space_from_json(found.action_space), found.columns, metadata)


def _refuse_link(name: str) -> None:
    """Raise DataError for a symbolic link: one within the folder would count a shard twice."""
    path = remote.local_path(name)
    if path is not None and path.is_symlink():
        raise DataError(f"{name} is a link, which is not followed; copy the folder with the files themselves")
