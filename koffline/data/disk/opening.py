"""Opening a log lazily: a shard folder, one flat file, or several of one kind, at paths or URLs.

A flat file is looked into without reading its rows. The decisions on columns, action space and episodes are
those of ``koffline.data.flat``, taken on slices, so that a log is the same log whether it is opened lazily or
read into memory.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from koffline.data import columns as checks
from koffline.data import remote
from koffline.data.disk.flat_files import (
    Column,
    FlatShard,
    OpenShard,
    mark_episodes,
    open_sliced,
)
from koffline.data.disk.log import LazyTransitions, naming
from koffline.data.disk.shards import (
    MANIFEST,
    SHARD_NAME,
    Manifest,
    ShardInfo,
    is_shard_folder,
    read_manifest,
)
from koffline.data.flat import (
    D4RL_LOG_PROBABILITIES,
    KEYS,
    LAZY_REMEDY,
    EpisodeRule,
    SlicedFile,
    check_required,
    equal_rows,
    note_on_extra,
    rule_of_flags,
)
from koffline.data.raw import merge_different, settle_actions
from koffline.data.spaces import ActionSpace, Bounds, Continuous, SpaceRequest
from koffline.data.transitions import Metadata
from koffline.errors import DataError
from koffline.store.files import reading

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


@dataclass(frozen=True, eq=False)
class DescribedFile:
    """A flat file as one shard of a log, and what it says about the log."""

    shard: FlatShard
    action_space: ActionSpace
    metadata: Metadata


def describe_flat(path: Path, name: str, action_space: SpaceRequest | None) -> DescribedFile:
    """Look into a file; ``name`` is what errors call it. Raises DataError."""
    with open_sliced(path, name) as file, reading(name, "data"):
        check_required(file.arrays, name)
        if "next_observations" not in file.arrays:
            raise DataError(f"{name} has no next_observations, which lazy reading needs; {LAZY_REMEDY}")
        if file.marks_episode_ends and not set(KEYS["truncated"]) & set(file.arrays):
            raise DataError(f"{name} marks episodes by episode_terminals; {LAZY_REMEDY}")
        rows = equal_rows(file.arrays, name)
        space, notes = _settled_space(file, action_space, name)
        columns, more = _columns(file.arrays, space)
        rule, last = _episode_rule(file, columns, rows)
        shard = FlatShard(rows, columns, rule)
        if rule != "none":
            marks = mark_episodes(OpenShard(shard, file), rows, rule, "steps" in columns)
            shard = FlatShard(rows, columns, rule, marks)
        metadata = file.description.metadata if file.description else Metadata()
        return DescribedFile(shard, space, metadata.with_notes(*notes, *more, *last))


def _settled_space(
    file: SlicedFile, asked: SpaceRequest | None, name: str
) -> tuple[ActionSpace, tuple[str, ...]]:
    """The space that ``settle_actions`` gives for all rows, from the extremes of the column."""
    actions = file.arrays["actions"]
    seen, different = np.asarray(actions[:1]), None
    declared = file.description.action_space if file.description else None
    if asked is None and declared is None and actions.dtype.kind in "iu":
        low, high = _extremes(actions)
        different = _different(actions)
        seen = np.stack([np.full(seen.shape[1:], low), np.full(seen.shape[1:], high)]).astype(actions.dtype)
    settled = settle_actions(seen, asked, declared, name, different)
    return settled.space, settled.notes


def _extremes(array: Any) -> tuple[Any, Any]:
    low, high = None, None
    for block in checks.blocks(len(array)):
        part = np.asarray(array[block])
        low = part.min() if low is None else min(low, part.min())
        high = part.max() if high is None else max(high, part.max())
    return low, high


def _different(array: Any) -> int:
    """How many values differ, counted until there are enough to settle the action space."""
    found = None
    for block in checks.blocks(len(array)):
        found = merge_different(found, np.asarray(array[block]))
    return 0 if found is None else len(found)


def _columns(arrays: Mapping[str, Any], space: ActionSpace) -> tuple[dict[str, Column], tuple[str, ...]]:
    columns: dict[str, Column] = {}
    notes: tuple[str, ...] = ()
    for name, keys in KEYS.items():
        key = next((key for key in keys if key in arrays), None)
        if key is None:
            continue
        array = arrays[key]
        if array.dtype.kind not in "biuf":
            raise DataError(f"{key} has dtype {array.dtype}; give numbers, one row per transition")
        if key == D4RL_LOG_PROBABILITIES:
            usable = array.ndim == 1 and _all_finite(array)
            notes = (note_on_extra(usable),)
            if not usable:
                continue
        columns[name] = Column(key, _dtype(name, array, space), _row_shape(name, array, space))
    return columns, notes


def _all_finite(array: Any) -> bool:
    return all(np.isfinite(array[block]).all() for block in checks.blocks(len(array)))


def _row_shape(name: str, array: Any, space: ActionSpace) -> tuple[int, ...]:
    """The shape of a row as ``Transitions`` has it. Raises DataError."""
    shape = tuple(array.shape[1:])
    if name in ("observations", "next_observations"):
        return shape or (1,)
    wanted = (space.k,) if name == "actions" and isinstance(space, Continuous) else ()
    accepted = {wanted, (1,)} if wanted == () else {wanted, ()} if wanted == (1,) else {wanted}
    if shape not in accepted:
        raise DataError(f"{name} has shape {array.shape}, expected rows of shape {wanted}; export them again")
    return wanted


def _dtype(name: str, array: Any, space: ActionSpace) -> str:
    """The dtype in which ``Transitions`` would keep the whole column."""
    if name in ("terminated", "truncated"):
        return "bool"
    if name in ("episode_ids", "steps") or (name == "actions" and not isinstance(space, Continuous)):
        return "int64"
    if name in ("observations", "next_observations") and array.dtype == np.uint8:
        return "uint8"
    if array.dtype.kind in "iu" and array.dtype.itemsize > 2:
        return checks.as_float(np.array(_extremes(array))).dtype.name
    return checks.as_float(np.zeros(0, array.dtype)).dtype.name


def _episode_rule(
    file: SlicedFile, columns: Mapping[str, Column], rows: int
) -> tuple[EpisodeRule, tuple[str, ...]]:
    if "episode_ids" in columns:
        return "ids", ()
    if "steps" in columns:
        return "steps", ()
    if file.description is not None:
        return "none", ()
    return _rule_of_flags(file, columns, rows)


def _rule_of_flags(
    file: SlicedFile, columns: Mapping[str, Column], rows: int
) -> tuple[EpisodeRule, tuple[str, ...]]:
    opened = OpenShard(FlatShard(rows, columns, "links"), file)
    plain = OpenShard(FlatShard(rows, columns, "none"), file)
    truncated = inside = broken = 0
    for block in checks.blocks(rows):
        cut = plain.truncated(block.start, block.stop) == 1
        ended = plain.column("terminated", block.start, block.stop) == 1
        truncated += int(cut.sum())
        inside += int((~(cut | ended)).sum())
        broken += int((opened.truncated(block.start, block.stop) & ~cut).sum())
    inside -= not (cut[-1] or ended[-1])  # below the last row there is none
    return rule_of_flags(truncated, inside, broken)
