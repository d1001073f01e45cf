"""A folder of shards: ``manifest.json`` says what the log is, each shard is a flat koffline HDF5 file.

An episode never crosses shards. Within a shard ``episode_ids`` count its episodes 0, 1, 2, … .
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from koffline.data import remote
from koffline.data.disk.files import Column, ShardInfo
from koffline.data.disk.log import LazyTransitions
from koffline.data.raw import metadata_from_json, metadata_to_json, space_from_json, space_to_json
from koffline.data.transitions import REQUIRED_COLUMNS
from koffline.errors import DataError
from koffline.untrusted.limits import TEXT_BYTES, shown_bytes

MANIFEST = "manifest.json"
FORMAT = "koffline-shards"
# So many shards, at about 190 bytes each, make the longest manifest that is read.
MOST_SHARDS = 80_000
SHARD_NAME = re.compile(r"shard-\d{5,}\.hdf5")


class _Shard(BaseModel):
    """One file, which lies in the folder itself."""

    file: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]
    rows: PositiveInt
    episodes: NonNegativeInt
    bytes: NonNegativeInt | None = None
    sha256: str | None = None


class _Manifest(BaseModel):
    """The content of ``manifest.json``, and the metadata by the names of its fields."""

    model_config = ConfigDict(extra="allow")

    format: Literal["koffline-shards"]
    version: Literal[1]
    rows: PositiveInt
    action_space: dict[str, Any]
    columns: dict[str, Column]
    episodes: bool
    shards: Annotated[list[_Shard], Field(min_length=1)]


def is_shard_folder(folder: str) -> bool:
    """Whether a folder, or the folder at a URL, holds a manifest of ours."""
    try:
        head = remote.read_bytes(remote.joined(folder, MANIFEST), 4096)
    except DataError:
        return False
    return FORMAT.encode() in head


def write_manifest(folder: Path, log: LazyTransitions) -> None:
    """Write ``manifest.json`` into a folder that nobody reads yet; its shards are named by their paths."""
    described = {
        "format": FORMAT,
        "version": 1,
        "rows": len(log),
        "action_space": space_to_json(log.action_space),
        "columns": {name: asdict(column) for name, column in log.columns.items()},
        "episodes": log.has_episodes,
        **metadata_to_json(log.metadata),
        "shards": [
            {
                "file": Path(s.name).name,
                "rows": s.rows,
                "episodes": s.episodes,
                "bytes": s.bytes,
                "sha256": s.sha256,
            }
            for s in log.shards
        ],
    }
    text = json.dumps(described, indent=1, default=str) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def read_manifest(folder: str) -> LazyTransitions:
    """The log in a folder, told by its manifest alone. Raises DataError."""
    name = remote.joined(folder, MANIFEST)
    _refuse_link(name)
    if remote.size(name) > TEXT_BYTES:
        most = f"{shown_bytes(TEXT_BYTES)}, the most that a manifest may have"
        raise DataError(f"{name} is larger than {most}; write fewer and larger shards")
    text = remote.read_bytes(name, TEXT_BYTES)
    try:
        found = _Manifest.model_validate_json(text)
        metadata = replace(metadata_from_json(found.model_extra or {}), source=folder)
    except (ValueError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"{name} is damaged, or newer than this koffline ({reason}); write it again"
        ) from None
    required = {*REQUIRED_COLUMNS, *(("steps", "episode_ids") if found.episodes else ())}
    files, rows = {shard.file for shard in found.shards}, sum(shard.rows for shard in found.shards)
    if required - found.columns.keys() or len(files) < len(found.shards) or rows != found.rows:
        said = f"{name} lacks columns, lists a shard twice or promises {found.rows} rows where shards have {rows}"
        raise DataError(f"{said}; write the folder again")
    shards = []
    for shard in found.shards:
        path = remote.joined(folder, shard.file)
        _refuse_link(path)
        info = ShardInfo(path, shard.rows, shard.episodes, shard.bytes, shard.sha256, found.columns)
        shards.append(info)
    return LazyTransitions(tuple(shards), space_from_json(found.action_space), found.episodes, metadata)


def _refuse_link(name: str) -> None:
    """Wherever it leads: one within the folder would be a shard that counts twice."""
    path = remote.local_path(name)
    if path is not None and path.is_symlink():
        raise DataError(f"{name} is a link, which is not followed; copy the folder with the files themselves")
