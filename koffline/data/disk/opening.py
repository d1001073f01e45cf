"""Opening a log lazily: a shard folder, one flat file, or several of one kind, at paths or URLs.

A flat file is looked into without reading its rows. The decisions on columns, action space and episodes are
those of ``koffline.data.flat``, taken on slices, so that a log is the same log whether it is opened lazily or
read into memory.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from koffline.data import columns as checks
from koffline.data import remote
from koffline.data.disk.files import Column, OpenShard, ShardInfo, check_alike, naming, open_sliced
from koffline.data.disk.log import LazyTransitions
from koffline.data.disk.shards import MANIFEST, SHARD_NAME, is_shard_folder, read_manifest
from koffline.data.flat import (
    D4RL_LOG_PROBABILITIES,
    KEYS,
    LAZY_REMEDY,
    SlicedFile,
    check_required,
    equal_rows,
    note_on_extra,
    rows_are_linked,
    rule_of_flags,
    used_keys,
)
from koffline.data.raw import FileDescription, SettledActions, merge_different, settle_actions
from koffline.data.spaces import ActionSpace, Continuous, SpaceRequest
from koffline.errors import DataError
from koffline.store.files import reading

_SUFFIXES = (".hdf5", ".h5", ".npz")


def open_lazy(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    action_space: SpaceRequest | None = None,
) -> LazyTransitions:
    """A log that stays on disk. Raises DataError where it cannot be read by slices."""
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
        return read_manifest(name).declared_anew(action_space)
    found = [file for file in remote.listed(remote.joined(name, "*")) if file.lower().endswith(_SUFFIXES)]
    if any(SHARD_NAME.fullmatch(re.split(r"[\\/]", file)[-1]) for file in found):
        raise DataError(
            f"{name} holds shards but no {MANIFEST} that can be read; copy it again, or open the files "
            f"by a pattern: {remote.joined(name, '*.hdf5')}"
        )
    if not found:
        raise DataError(f"{name} holds no .hdf5, .h5 or .npz files; {LAZY_REMEDY}")
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
    """What files of one log have in common; by which of their keys is their own affair."""
    held = {name: str(column) for name, column in log.columns.items()}
    for name in ("steps", "episode_ids", "truncated"):
        held.pop(name, None)
    episodes = "some" if log.has_episodes else None
    return {"action space": log.action_space, "episodes": episodes, **held}


def _open_file(name: str, asked: SpaceRequest | None) -> LazyTransitions:
    """Look into a file; ``name`` is what errors call it. Raises DataError."""
    with (
        naming(name),
        remote.local_file(name) as path,
        open_sliced(path, name) as file,
        reading(name, "data"),
    ):
        check_required(file.arrays, name)
        if "next_observations" not in file.arrays:
            raise DataError(f"{name} has no next_observations, which lazy reading needs; {LAZY_REMEDY}")
        if file.marks_episode_ends and not set(KEYS["truncated"]) & set(file.arrays):
            raise DataError(f"{name} marks episodes by episode_terminals; {LAZY_REMEDY}")
        rows = equal_rows(file.arrays, name)
        described = file.description or FileDescription()
        settled = _settled_space(file.arrays["actions"], asked, described.action_space, name)
        columns, extra = _columns(file.arrays, settled.space)
        shard = ShardInfo(name, rows, 0, columns=columns)
        found = _find_episodes(file, shard)
        shard = dataclasses.replace(
            shard,
            episodes=0 if found.starts is None else len(found.starts),
            bytes=path.stat().st_size,
            starts=found.starts,
            cut_unflagged=found.cut_unflagged,
        )
        metadata = described.metadata.with_notes(*settled.notes, *extra, *found.notes)
        return LazyTransitions((shard,), settled.space, found.starts is not None, metadata)


def _pieces(array: Any) -> Iterator[np.ndarray]:
    return (np.asarray(array[block]) for block in checks.blocks(len(array)))


def _settled_space(
    actions: Any, asked: SpaceRequest | None, declared: ActionSpace | None, name: str
) -> SettledActions:
    """The space that ``settle_actions`` gives for all rows, from the extremes of the column."""
    seen, different = np.asarray(actions[:1]), None
    if asked is None and declared is None and actions.dtype.kind in "iu":
        different = len(reduce(merge_different, _pieces(actions), np.zeros(0, actions.dtype)))
        seen = np.stack([np.full(seen.shape[1:], each) for each in _extremes(actions)]).astype(actions.dtype)
    return settle_actions(seen, asked, declared, name, different)


def _extremes(array: Any) -> np.ndarray:
    """(2,) the least and the greatest number."""
    found = np.array([(piece.min(), piece.max()) for piece in _pieces(array)])
    return np.array([found[:, 0].min(), found[:, 1].max()])


def _columns(arrays: Mapping[str, Any], space: ActionSpace) -> tuple[dict[str, Column], tuple[str, ...]]:
    columns: dict[str, Column] = {}
    notes: tuple[str, ...] = ()
    for name, key in used_keys(arrays).items():
        array = arrays[key]
        if array.dtype.kind not in "biuf":
            raise DataError(f"{key} has dtype {array.dtype}; give numbers, one row per transition")
        if key == D4RL_LOG_PROBABILITIES:
            usable = array.ndim == 1 and all(np.isfinite(piece).all() for piece in _pieces(array))
            notes = (note_on_extra(usable),)
            if not usable:
                continue
        columns[name] = Column(key, _dtype(name, array, space), _row_shape(name, array, space))
    return columns, notes


def _row_shape(name: str, array: Any, space: ActionSpace) -> tuple[int, ...]:
    """The shape of a row as ``Transitions`` has it. Raises DataError."""
    shape = tuple(array.shape[1:])
    if name in ("observations", "next_observations"):
        return shape or (1,)
    wanted = (space.k,) if name == "actions" and isinstance(space, Continuous) else ()
    if shape != wanted and {shape, wanted} != {(), (1,)}:
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
    wide = array.dtype.kind in "iu" and array.dtype.itemsize > 2
    return checks.as_float(_extremes(array) if wide else np.zeros(0, array.dtype)).dtype.name


@dataclass(frozen=True, eq=False)
class _Episodes:
    """starts (E,): first rows; None where rows stand alone."""

    starts: np.ndarray | None
    cut_unflagged: bool = False
    notes: tuple[str, ...] = ()


def _find_episodes(file: SlicedFile, shard: ShardInfo) -> _Episodes:
    """Where episodes begin, told as ``read_flat`` tells it. Raises DataError for rows out of order."""
    opened, key = OpenShard(shard, file), "episode_ids" if "episode_ids" in shard.columns else "steps"
    if key not in shard.columns:
        return _Episodes(None) if file.description is not None else _episodes_of_flags(opened, shard)
    starts, ids = [np.zeros(1, dtype=np.int64)], [opened.column(key, 0, 1)]
    for rows in checks.blocks(shard.rows):
        read = opened.column(key, max(rows.start - 1, 0), rows.stop)
        begins = np.diff(read) != 0 if key == "episode_ids" else read[1:] == 0
        starts.append(max(rows.start, 1) + np.flatnonzero(begins))
        ids.append(read[1:][begins])
    found = np.concatenate(starts)
    if key == "episode_ids" and len(np.unique(np.concatenate(ids))) != len(found):
        raise DataError(f"rows of several episodes are interleaved; {LAZY_REMEDY}")
    if "steps" in shard.columns:
        counting = OpenShard(dataclasses.replace(shard, starts=found), file)
        for rows in checks.blocks(shard.rows):
            _check_steps(opened.column("steps", rows.start, rows.stop), counting, rows)
    return _Episodes(found)


def _check_steps(given: np.ndarray, counting: OpenShard, rows: slice) -> None:
    counted = np.asarray(counting.places(rows.start, rows.stop)[0])
    if not np.array_equal(given, counted):
        row = int(np.argmax(given != counted))
        raise DataError(
            f"row {rows.start + row} has step {given[row]}, expected {counted[row]}; count the rows of an "
            "episode 0, 1, 2, … in time order"
        )


def _episodes_of_flags(opened: OpenShard, shard: ShardInfo) -> _Episodes:
    truncated, ended, broken = 0, [], []
    for start in range(0, shard.rows, size := shard.columns["observations"].block_rows):
        stop, below = min(start + size, shard.rows), min(start + size + 1, shard.rows)
        cut = opened.column("truncated", start, stop) == 1
        ends = cut | (opened.column("terminated", start, stop) == 1)
        shown = (opened.column(name, start, below) for name in ("observations", "next_observations"))
        linked = np.append(rows_are_linked(*shown), True)[: stop - start]  # below the last row there is none
        truncated += int(cut.sum())
        ended.append(start + np.flatnonzero(ends))
        broken.append(start + np.flatnonzero(~ends & ~linked))
    last, apart = np.concatenate(ended), np.concatenate(broken)
    inside = shard.rows - 1 - int(np.sum(last < shard.rows - 1))
    rule, notes = rule_of_flags(truncated, inside, len(apart))
    if rule == "none":
        return _Episodes(None, notes=notes)
    if rule == "links":
        last = np.union1d(last, apart)
    return _Episodes(np.append(0, last[last < shard.rows - 1] + 1), rule == "links", notes)
