"""Looking into a flat file without reading its rows: columns, action space, episodes.

The decisions are those of ``koffline.data.flat``, taken on slices, so that a log is the same log whether it
is opened lazily or read into memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from koffline.data import columns as checks
from koffline.data.disk.flat_files import Column, EpisodeRule, FlatShard, OpenShard, mark_episodes
from koffline.data.disk.sliced_files import LAZY_REMEDY, SlicedFile, open_sliced
from koffline.data.flat import KEYS, check_required, equal_rows
from koffline.data.raw import merge_different, settle_actions
from koffline.data.spaces import ActionSpace, Continuous, SpaceRequest
from koffline.data.transitions import Metadata
from koffline.data.wording import counted
from koffline.errors import DataError
from koffline.store.files import reading

_D4RL_LOG_PROBABILITIES = KEYS["behavior_log_probabilities"][1]


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
        if key == _D4RL_LOG_PROBABILITIES:
            usable = array.ndim == 1 and _all_finite(array)
            said = "was left out: it is not one finite number per row"
            notes = (f"behaviour log-probabilities were taken from {key}" if usable else f"{key} {said}",)
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
    return _flags_decided(truncated, inside, broken)


def _flags_decided(truncated: int, inside: int, broken: int) -> tuple[EpisodeRule, tuple[str, ...]]:
    if truncated:
        trusted = (
            f"{broken} of {inside} rows inside episodes have a next observation other than the observation "
            "of the row below; the flags were trusted"
        )
        return "flags", (trusted,) if broken else ()
    if 2 * broken > inside:
        return "none", (
            "rows stand alone: next observations are not the observations of the rows below, so terminals "
            "alone do not mark episodes",
        )
    if not broken:
        return "flags", ()
    return "links", (
        f"{counted(broken, 'row', 'was', 'were')} marked as truncated: no timeouts are given, and the row "
        "below begins elsewhere "
        "than the next observation",
    )
