"""Opening a log lazily: a folder of shards, one flat HDF5 file, or several of one kind, at paths or URLs.

A folder of shards: ``manifest.json`` says what the log is, each shard is a flat koffline HDF5 file. Episodes
never cross shards; within a shard ``episode_ids`` count its episodes 0, 1, 2, … .

A flat file that we wrote is looked into without reading its rows; any other is first made into shards.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError

from koffline.data import columns as checks
from koffline.data import remote
from koffline.data.disk.files import Column, OpenShard, ShardInfo, check_alike, naming
from koffline.data.disk.log import LazyTransitions
from koffline.data.flat import DESCRIPTION, KNOWN_KEYS, check_layout, used_keys
from koffline.data.hdf5 import not_lazy, open_sliced
from koffline.data.raw import METADATA, metadata_to_json, read_description, space_from_json, space_to_json
from koffline.data.spaces import SpaceRequest
from koffline.data.transitions import REQUIRED_COLUMNS
from koffline.errors import DataError
from koffline.store.files import reading
from koffline.untrusted.limits import TEXT_BYTES, shown_bytes

_SUFFIXES = (".hdf5", ".h5")
MANIFEST = "manifest.json"
FORMAT = "koffline-shards"
# Limit of the number of shards: at about 190 bytes each, the longest manifest that is read.
MOST_SHARDS = 80_000
_SAID = ("rows", "episodes", "bytes", "sha256")  # fields of a shard beside its name
_SHARD_NAME = re.compile(r"shard-\d{5,}\.hdf5")


def open_lazy(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    action_space: SpaceRequest | None = None,
) -> LazyTransitions:
    """Open a log that stays on disk. Raises DataError if it cannot be read by slices."""
    if not isinstance(source, (str, os.PathLike)):
        return _open_files([os.fspath(name) for name in source], str(source), action_space)
    name = os.fspath(source)
    if not remote.exists(name):
        if "*" in name and (found := remote.listed(name)):
            return _open_files(found, name, action_space)
        raise DataError(f"{name} does not exist; check the path")
    if not remote.is_folder(name):
        return _open_files([name], name, action_space)
    if is_shard_folder(name):
        return _read_manifest(name).declared_anew(action_space)
    found = [file for file in remote.listed(remote.joined(name, "*")) if file.lower().endswith(_SUFFIXES)]
    if any(_SHARD_NAME.fullmatch(re.split(r"[\\/]", file)[-1]) for file in found):
        raise DataError(
            f"{name} holds shards but no {MANIFEST} that can be read; copy it again, or open the files "
            f"by a pattern: {remote.joined(name, '*.hdf5')}"
        )
    if not found:
        raise not_lazy(name)
    return _open_files(found, name, action_space)


def _open_files(names: Sequence[str], source: str, asked: SpaceRequest | None) -> LazyTransitions:
    if not names:
        raise DataError("no files are given; name at least one")
    logs = [_open_file(name, asked) for name in names]
    for log in logs[1:]:
        check_alike(log.shards[0].name, _kind(log), names[0], _kind(logs[0]))
    metadata = dataclasses.replace(logs[0].metadata, source=source)
    if len(names) > 1:
        notes = dict.fromkeys(note for log in logs for note in log.metadata.notes)
        metadata = dataclasses.replace(metadata, notes=tuple(notes), sha256=None)
    shards = tuple(log.shards[0] for log in logs)
    return dataclasses.replace(logs[0], shards=shards, metadata=metadata)


def _kind(log: LazyTransitions) -> dict[str, Any]:
    """Properties that all files of one log share; the keys of the columns may differ."""
    apart = ("steps", "episode_ids", "truncated")
    held = {name: str(column) for name, column in log.columns.items() if name not in apart}
    return {"action space": log.action_space, "episodes": "some" if log.has_episodes else None, **held}


def _open_file(name: str, asked: SpaceRequest | None) -> LazyTransitions:
    """Open a flat file written by koffline; errors call it ``name``. Raises DataError."""
    with (
        naming(name),
        remote.local_file(name) as path,
        open_sliced(path, name) as file,
        reading(name, "HDF5"),
    ):
        described = read_description(file.text(DESCRIPTION))
        if described is None or described.action_space is None or "rewards" not in file:
            raise not_lazy(name)
        arrays = file.slices([key for key in KNOWN_KEYS if key in file])
        check_layout(file.datasets, arrays, name)
        kinds = {key: Column(key, array.dtype.name, array.shape[1:]) for key, array in arrays.items()}
        columns = {column: kinds[key] for column, key in used_keys(arrays).items()}
        if lacking := _needed(described.episodes) - columns.keys():
            raise DataError(f"{name} lacks {', '.join(sorted(lacking))}; write it again")
        shard = ShardInfo(name, len(arrays["rewards"]), 0, bytes=path.stat().st_size, columns=columns)
        if described.episodes:
            steps = OpenShard(shard, arrays).column
            begins = [steps("steps", rows.start, rows.stop) == 0 for rows in checks.blocks(shard.rows)]
            starts = np.flatnonzero(np.concatenate(begins))
            shard = dataclasses.replace(shard, episodes=len(starts), starts=starts)
        log = LazyTransitions((shard,), described.action_space, described.episodes, described.metadata)
        return log.declared_anew(asked)


def _needed(episodes: bool) -> set[str]:
    return {*REQUIRED_COLUMNS, "truncated", *(("steps", "episode_ids") if episodes else ())}


class _Shard(BaseModel):
    """Entry of one shard file in the manifest; the file lies in the folder itself."""

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
        "columns": {name: dataclasses.asdict(column) for name, column in log.columns.items()},
        "episodes": log.has_episodes,
        **metadata_to_json(log.metadata),
        "shards": [
            {"file": Path(shard.name).name, **{name: getattr(shard, name) for name in _SAID}}
            for shard in log.shards
        ],
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
    text = remote.read_bytes(name, TEXT_BYTES)
    try:
        found = _Manifest.model_validate_json(text)
        metadata = dataclasses.replace(METADATA.validate_python(found.model_extra or {}), source=folder)
    except (ValueError, TypeError, AttributeError) as error:
        said = str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            said = " ".join([*map(str, first["loc"]), first["msg"][:1].lower() + first["msg"][1:]])
        reason = " ".join(said.split())[:200]
        raise DataError(f"{name} is damaged or newer than this koffline ({reason}); write it again") from None
    files, rows = {shard.file for shard in found.shards}, sum(shard.rows for shard in found.shards)
    if _needed(found.episodes) - found.columns.keys() or len(files) < len(found.shards) or rows != found.rows:
        said = f"{name} lacks columns, lists a shard twice, or promises {found.rows} rows and has {rows}"
        raise DataError(f"{said}; write the folder again")
    shards = []
    for shard in found.shards:
        path = remote.joined(folder, shard.file)
        _refuse_link(path)
        info = ShardInfo(path, shard.rows, shard.episodes, shard.bytes, shard.sha256, found.columns)
        shards.append(info)
    return LazyTransitions(tuple(shards), space_from_json(found.action_space), found.episodes, metadata)


def _refuse_link(name: str) -> None:
    """Raise DataError for a symbolic link: one within the folder would count a shard twice."""
    path = remote.local_path(name)
    if path is not None and path.is_symlink():
        raise DataError(f"{name} is a link, which is not followed; copy the folder with the files themselves")
