"""Opening a log lazily: a shard folder, one flat file, or several of one kind, at paths or URLs."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from pathlib import Path

from koffline.data import remote
from koffline.data.disk.flat_files import EpisodeRule, FlatShard
from koffline.data.disk.log import LazyTransitions, naming
from koffline.data.disk.shards import (
    MANIFEST,
    SHARD_NAME,
    Manifest,
    ShardInfo,
    is_shard_folder,
    read_manifest,
)
from koffline.data.disk.sliced_files import LAZY_REMEDY
from koffline.data.flat_description import DescribedFile, describe_flat
from koffline.data.spaces import Bounds, Continuous, SpaceRequest
from koffline.errors import DataError

_SUFFIXES = (".hdf5", ".h5", ".npz")
LazySource = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def open_lazy(source: LazySource, action_space: SpaceRequest | None = None) -> LazyTransitions:
    """A log that stays on disk. Raises DataError where it cannot be read by slices."""
    if not isinstance(source, (str, os.PathLike)):
        return _open_files([os.fspath(name) for name in source], str(source), action_space)
    name = os.fspath(source)
    if remote.exists(name):
        if not remote.is_folder(name):
            return _open_files([name], name, action_space)
        if is_shard_folder(name):
            return lazy_of_manifest(read_manifest(name), action_space)
        return _open_files(_files_in(name), name, action_space)
    if "*" in name and (found := remote.listed(name)):
        return _open_files(found, name, action_space)
    raise DataError(f"{name} does not exist; check the path")


def _files_in(folder: str) -> list[str]:
    found = [name for name in remote.listed(remote.joined(folder, "*")) if name.lower().endswith(_SUFFIXES)]
    if any(SHARD_NAME.fullmatch(re.split(r"[\\/]", name)[-1]) for name in found):
        raise DataError(
            f"{folder} holds shards but no {MANIFEST} that can be read; copy it again, or open the files "
            f"by a pattern: {remote.joined(folder, '*.hdf5')}"
        )
    if not found:
        raise DataError(f"{folder} holds no .hdf5, .h5 or .npz files; {LAZY_REMEDY}")
    return found


def lazy_of_manifest(manifest: Manifest, asked: SpaceRequest | None = None) -> LazyTransitions:
    """The log that a manifest describes, its action space overridden by what is asked for."""
    rule: EpisodeRule = "numbered" if manifest.has_episodes else "none"
    files = tuple(FlatShard(shard.rows, manifest.columns, rule) for shard in manifest.shards)
    log = LazyTransitions(
        manifest.shards, manifest.action_space, manifest.has_episodes, manifest.metadata, files
    )
    return declared_anew(log, asked)


def declared_anew(log: LazyTransitions, asked: SpaceRequest | None) -> LazyTransitions:
    """The same log with the action space asked for, which its rows are checked against when they are read."""
    if isinstance(asked, Bounds):
        shape = log.columns["actions"].shape
        asked = Continuous(shape[0] if shape else 1, asked.low, asked.high)
    if asked is None or asked == log.action_space:
        return log
    note = f"action space {asked} as asked, the log declares {log.action_space}"
    return dataclasses.replace(log, action_space=asked, metadata=log.metadata.with_notes(note))


def _open_files(names: Sequence[str], source: str, asked: SpaceRequest | None) -> LazyTransitions:
    if not names:
        raise DataError("no files are given; name at least one")
    described = [_described(name, asked) for name in names]
    first = described[0]
    for name, other in zip(names, described, strict=True):
        _check_same_kind(names[0], first, name, other)
    shards = tuple(_info(name, file.shard) for name, file in zip(names, described, strict=True))
    metadata = dataclasses.replace(first.metadata, source=source)
    if len(names) > 1:
        notes = {note: None for file in described for note in file.metadata.notes}
        metadata = dataclasses.replace(metadata, notes=tuple(notes), sha256=None)
    has_episodes = first.shard.rule != "none"
    files = tuple(file.shard for file in described)
    return LazyTransitions(shards, first.action_space, has_episodes, metadata, files)


def _described(name: str, asked: SpaceRequest | None) -> DescribedFile:
    with naming(name), remote.local_file(name) as path:
        return describe_flat(Path(path), name, asked)


def _info(name: str, shard: FlatShard) -> ShardInfo:
    episodes = shard.marks.episodes if shard.marks else 0
    return ShardInfo(name, shard.rows, episodes, remote.size(name))


def _check_same_kind(first_name: str, first: DescribedFile, name: str, other: DescribedFile) -> None:
    """Raise DataError, naming the file that differs, unless all are parts of one log."""
    if other.action_space != first.action_space:
        raise DataError(
            f"{name} has actions {other.action_space}, {first_name} {first.action_space}; declare one space "
            "for all (--discrete N or --continuous LOW HIGH)"
        )
    if (other.shard.rule == "none") != (first.shard.rule == "none"):
        raise DataError(
            f"{name} and {first_name}: one has episodes, the other has none; give files of one log"
        )
    names = {*first.shard.columns, *other.shard.columns} - {"steps", "episode_ids", "truncated"}
    for column in sorted(names):
        here, there = other.shard.columns.get(column), first.shard.columns.get(column)
        if here is None or there is None or (here.dtype, here.shape) != (there.dtype, there.shape):
            found = ["none" if c is None else f"{c.dtype} {c.shape}" for c in (here, there)]
            raise DataError(f"{name} has {column} {found[0]}, {first_name} {found[1]}; give files of one log")
