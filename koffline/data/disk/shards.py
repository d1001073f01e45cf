"""A folder of shards: ``manifest.json`` says what the log is, each shard is a flat koffline HDF5 file.

An episode never crosses shards. Within a shard ``episode_ids`` count its episodes 0, 1, 2, … .
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from koffline.data import remote
from koffline.data.disk.files import Column, ShardInfo
from koffline.data.disk.log import LazyTransitions
from koffline.data.raw import metadata_from_json, metadata_to_json, space_from_json, space_to_json
from koffline.data.transitions import REQUIRED_COLUMNS
from koffline.errors import DataError
from koffline.untrusted.limits import TEXT_BYTES, shown_bytes

MANIFEST = "manifest.json"
FORMAT, VERSION = "koffline-shards", 1
# So many shards, at about 190 bytes each, make the longest manifest that is read.
MOST_SHARDS = 80_000
_SAID = ("rows", "episodes", "bytes", "sha256")  # of a shard, beside its name
SHARD_NAME = re.compile(r"shard-\d{5,}\.hdf5")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


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
        "version": VERSION,
        "rows": len(log),
        "action_space": space_to_json(log.action_space),
        "columns": {name: asdict(column) for name, column in log.columns.items()},
        "episodes": log.has_episodes,
        **metadata_to_json(log.metadata),
        "shards": [
            {"file": Path(shard.name).name, **{name: getattr(shard, name) for name in _SAID}}
            for shard in log.shards
        ],
    }
    text = json.dumps(described, indent=1, default=str) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def read_manifest(folder: str) -> LazyTransitions:
    """The log in a folder, told by its manifest alone. Raises DataError."""
    name = remote.joined(folder, MANIFEST)
    if _is_link(name):
        raise DataError(f"{name} is a link, which is not followed; copy the folder with the files themselves")
    if remote.size(name) > TEXT_BYTES:
        raise DataError(
            f"{name} is larger than {shown_bytes(TEXT_BYTES)}, the most that a manifest may have; write "
            "fewer and larger shards"
        )
    text = remote.read_bytes(name, TEXT_BYTES)
    try:
        described = json.loads(text)
        if described["format"] != FORMAT:
            raise DataError(
                f"{name} is no manifest of shards (format {described['format']!r}); check the path"
            )
        if described["version"] != VERSION:
            raise DataError(
                f"{name} has version {described['version']!r}, known is {VERSION}; update koffline"
            )
        promised, log = described["rows"], _log(described, folder)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise DataError(f"{name} is damaged ({reason}); copy or write it again") from None
    if not log.shards:
        raise DataError(f"{name} lists no shards; write the folder again")
    files = sorted(shard.name for shard in log.shards)
    if twice := [file for file, following in itertools.pairwise(files) if file == following]:
        raise DataError(f"{name} lists {twice[0]} more than once; write the folder again")
    if len(log) != promised:
        raise DataError(
            f"{name} promises {str(promised)[:40]} rows, its shards have {len(log)}; write the folder again"
        )
    return log


def _log(described: Mapping[str, Any], folder: str) -> LazyTransitions:
    columns = {str(name): _column(entry) for name, entry in described["columns"].items()}
    has_episodes = bool(described["episodes"])
    required = {*REQUIRED_COLUMNS, *(("steps", "episode_ids") if has_episodes else ())}
    if missing := required - columns.keys():
        raise DataError(f"{folder}: the manifest lacks columns {', '.join(sorted(missing))}; write it again")
    shards = tuple(_shard(entry, folder, columns) for entry in described["shards"])
    metadata = replace(metadata_from_json(described), source=folder)
    return LazyTransitions(shards, space_from_json(described["action_space"]), has_episodes, metadata)


def _column(entry: Mapping[str, Any]) -> Column:
    shape = tuple(int(size) for size in entry["shape"])
    dtype = np.dtype(str(entry["dtype"]))
    if dtype.kind not in "biuf" or not all(size > 0 for size in shape):
        raise ValueError(f"column of dtype {dtype} and shape {shape}")
    return Column(str(entry["key"]), dtype.name, shape)


def _shard(entry: Mapping[str, Any], folder: str, columns: Mapping[str, Column]) -> ShardInfo:
    """A shard lies in the folder itself. Raises DataError for a name that leads elsewhere."""
    file = str(entry["file"])
    name = remote.joined(folder, file)
    if not _FILE_NAME.fullmatch(file) or _is_link(name):
        raise DataError(
            f"{folder}: the manifest names {file!r}, which is no file of its folder; write it again, or copy "
            "it with the files themselves in the place of links"
        )
    rows, episodes = int(entry["rows"]), int(entry["episodes"])
    if rows < 1 or not 0 <= episodes <= rows:
        raise ValueError(f"{file} has {rows} rows and {episodes} episodes")
    size = entry.get("bytes")
    return ShardInfo(name, rows, episodes, None if size is None else int(size), entry.get("sha256"), columns)


def _is_link(name: str) -> bool:
    """Links are refused wherever they lead: one within the folder would be a shard that counts twice."""
    path = remote.local_path(name)
    return path is not None and path.is_symlink()
