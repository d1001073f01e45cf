"""Flat logs, one array per key: our own, D4RL's, and plain arrays with the same names.

D4RL's convention: the last row of an episode is marked in ``terminals`` (the world ended) or ``timeouts``
(recording stopped). Where ``next_observations`` is missing it is the observation of the row below, inside an
episode. The last row of an episode that did not terminate then has no next observation and is left out; the
row above it becomes the last one. After a termination the next observation has no influence: the row's own
observation stands in for it.
"""

from __future__ import annotations

import dataclasses
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from koffline.data import columns as checks
from koffline.data.columns import counted
from koffline.data.episodes import last_rows, leave_out_unfollowed, order_rows
from koffline.data.raw import FileDescription, RawLog, settle_actions
from koffline.data.spaces import SpaceRequest
from koffline.data.transitions import Metadata, Transitions
from koffline.errors import DataError
from koffline.store.files import reading
from koffline.untrusted.limits import check_regular

# How a file tells where episodes begin: our shards number them; others have ids, steps or flags.
EpisodeRule = Literal["numbered", "ids", "steps", "flags", "links", "none"]
# Column of Transitions -> keys it may have in a file; we write the first (D4RL's, where it has one).
D4RL_LOG_PROBABILITIES = "infos/action_log_probs"
KEYS = {
    "observations": ("observations",),
    "actions": ("actions",),
    "rewards": ("rewards",),
    "next_observations": ("next_observations",),
    "terminated": ("terminals", "terminated", "terminations"),
    "truncated": ("timeouts", "truncated", "truncations"),
    "episode_ids": ("episode_ids",),
    "steps": ("steps",),
    "behavior_log_probabilities": ("behavior_log_probabilities", D4RL_LOG_PROBABILITIES),
    "weights": ("weights",),
}
_REQUIRED = ("observations", "actions", "rewards", "terminated")
_VECTORS = tuple(name for name in KEYS if name not in ("observations", "next_observations", "actions"))


LAZY_REMEDY = "write shards with `koffline data convert SOURCE FOLDER --shard-rows N` and open those"


@dataclass(frozen=True, eq=False)
class SlicedFile:
    """What an open file offers: arrays by key (each with shape, dtype and slices), and its description.

    ``name`` is what errors call the file.
    """

    name: str
    arrays: Mapping[str, Any]
    description: FileDescription | None
    marks_episode_ends: bool = False  # has d3rlpy 1's episode_terminals


def file_kind(path: Path, name: str) -> Literal["HDF5", "NPZ"] | None:
    """What a file is by its content; None for anything else. Raises DataError for an empty or damaged one."""
    import h5py

    with reading(name, "data"):
        check_regular(path)
        with path.open("rb") as file:
            head = file.read(8)
    if not head:
        raise DataError(f"{name} is empty (0 bytes); copy or export it again")
    if h5py.is_hdf5(path):
        return "HDF5"
    if head.startswith(b"\x89HDF"):
        raise DataError(f"{name} is a truncated or corrupt HDF5 file (damaged header); copy it again")
    if not head.startswith(b"PK"):
        return None
    if not zipfile.is_zipfile(path):
        raise DataError(f"{name} is a truncated or corrupt NPZ file (no table of contents); copy it again")
    return "NPZ"


def known_keys() -> list[str]:
    """Every key that a flat file may use."""
    return [key for keys in KEYS.values() for key in keys]


def flat_arrays(log: Transitions) -> dict[str, np.ndarray]:
    """The columns of a log by the keys we write."""
    present = {name: getattr(log, name) for name in KEYS}
    return {KEYS[name][0]: array for name, array in present.items() if array is not None}


def check_required(found: Iterable[str], source: str) -> None:
    """Raise DataError, listing what was found and expected, where a required key is missing."""
    found = sorted(found)
    missing = [KEYS[name][0] for name in _REQUIRED if not set(KEYS[name]) & set(found)]
    if missing:
        listed = ", ".join(found[:12]) + (", …" if len(found) > 12 else "") if found else "none"
        expected = ", ".join(KEYS[name][0] for name in _REQUIRED)
        raise DataError(
            f"{source} lacks {', '.join(missing)}: found keys {listed}; expected {expected}, and optionally "
            "next_observations, timeouts, episode_ids, steps; rename the arrays"
        )


def equal_rows(found: Mapping[str, Any], source: str) -> int:
    """How many rows the columns have, told by their shapes. Raises DataError where they differ.

    To be asked before any column is read: a hostile one may be as long as it likes.
    """
    sizes = {key: found[key].shape[0] if found[key].shape else 0 for key in _used_keys(found).values()}
    rows = sizes["observations"]
    others = {size for key, size in sizes.items() if key != "observations"}
    hint = " (one per step and a last one: store next_observations instead)" if others == {rows - 1} else ""
    for key, size in sizes.items():
        if size != rows:
            raise DataError(
                f"{source}: {key} has {size} rows, observations {rows}{hint}; "
                "re-export the log with equal lengths"
            )
    if rows == 0:
        raise DataError(f"{source} has no rows; give a log with at least one transition")
    return rows


def counted_twice(found: Iterable[str]) -> tuple[str, ...]:
    """Columns of which others are made in memory."""
    return () if "next_observations" in found else ("observations",)


def _used_keys(found: Iterable[str]) -> dict[str, str]:
    """Which key of a file each column is taken from."""
    found = set(found)
    used = {name: next((key for key in keys if key in found), None) for name, keys in KEYS.items()}
    return {name: key for name, key in used.items() if key is not None}


def read_flat(
    found: Mapping[str, np.ndarray],
    described: FileDescription | None,
    source: str,
    action_space: SpaceRequest | None,
) -> RawLog:
    """Aligned columns from the arrays of a flat file; ``described`` is given for files that we wrote.

    Raises DataError where the actions are of no space or no row has a next observation.
    """
    log = _take_columns(found)
    declared = described.action_space if described else None
    settled = settle_actions(log["actions"], action_space, declared, source)
    log["actions"] = settled.actions
    notes = list(settled.notes)
    log.setdefault("truncated", np.zeros(len(log["rewards"]), dtype=np.bool_))
    notes += _settle_flags_and_extras(log, found)
    if "episode_ids" in log:
        notes += _gather_episodes(log)
    elif described is None and "steps" not in log:
        notes += _find_episodes(log, has_timeouts="timeouts" in found or "truncated" in found)
    if "next_observations" not in log:
        notes += _derive_next_observations(log, source)
    metadata = described.metadata if described else Metadata()
    metadata = dataclasses.replace(metadata, source=source, notes=(*metadata.notes, *notes))
    return RawLog(log, settled.space, metadata)


def _take_columns(found: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    log = {name: checks.as_array(key, found[key]) for name, key in _used_keys(found).items()}
    for name in _VECTORS:
        if name in log and log[name].ndim == 2 and log[name].shape[1] == 1:
            log[name] = log[name].reshape(-1)
    for name in ("observations", "next_observations"):
        if name in log and log[name].ndim == 1:
            log[name] = log[name].reshape(-1, 1)
    return log


def _settle_flags_and_extras(log: dict[str, np.ndarray], found: Iterable[str]) -> list[str]:
    """Flags as bool where they can be; D4RL's extra column only where it is usable."""
    for name in ("terminated", "truncated"):
        if log[name].dtype != np.bool_ and np.isin(log[name], (0, 1)).all():
            log[name] = log[name].astype(np.bool_)
    extra = log.get("behavior_log_probabilities")
    if extra is None or "behavior_log_probabilities" in found:
        return []
    is_usable = extra.ndim == 1 and bool(np.isfinite(extra).all())
    if not is_usable:
        del log["behavior_log_probabilities"]
    return [note_on_extra(is_usable)]


def note_on_extra(is_usable: bool) -> str:
    """Say what became of D4RL's extra column."""
    if is_usable:
        return f"behaviour log-probabilities were taken from {D4RL_LOG_PROBABILITIES}"
    return f"{D4RL_LOG_PROBABILITIES} was left out: it is not one finite number per row"


def _gather_episodes(log: dict[str, np.ndarray]) -> list[str]:
    """Interleaved episodes are put in order."""
    ids = checks.integer_column("episode_ids", log["episode_ids"])
    starts = np.flatnonzero(np.append(True, ids[1:] != ids[:-1]))
    if len(np.unique(ids)) == len(starts):
        return []
    order = order_rows(ids, log.get("steps"))
    for name in log:
        log[name] = log[name][order]
    return ["the rows of interleaved episodes were put in order"]


def _find_episodes(log: dict[str, np.ndarray], has_timeouts: bool) -> list[str]:
    """Episode ids from the flags, checked against next_observations where the flags may be incomplete."""
    truncated = log["truncated"] == 1
    ends = truncated | (log["terminated"] == 1)
    notes: tuple[str, ...] = ()
    if "next_observations" in log:
        inside = ~ends[:-1]
        broken = inside & ~rows_are_linked(log["observations"], log["next_observations"])
        rule, notes = rule_of_flags(int(truncated.sum()), int(inside.sum()), int(broken.sum()))
        if rule == "none":
            return list(notes)
        if rule == "links":
            truncated[:-1] |= broken
            ends[:-1] |= broken
            log["truncated"] = truncated
    elif not has_timeouts:
        notes = (
            "neither timeouts nor next_observations are given: episodes were taken to end at terminals only; "
            "where a time limit cut them, one transition per cut is wrong",
        )
    log["episode_ids"] = np.concatenate([[0], np.cumsum(ends)[:-1]])
    return list(notes)


def rule_of_flags(truncated: int, inside: int, broken: int) -> tuple[EpisodeRule, tuple[str, ...]]:
    """How episodes are told where only flags may tell, and notes.

    truncated: rows with that flag. inside: rows that end no episode by their flags. broken: those of them
    whose next observation is not the observation of the row below.
    """
    if truncated and broken:
        return "flags", (
            f"{broken} of {inside} rows inside episodes have a next observation other than the observation "
            "of the row below; the flags were trusted",
        )
    if truncated or not broken:
        return "flags", ()
    if 2 * broken > inside:
        return "none", (
            "rows stand alone: next observations are not the observations of the rows below, so terminals "
            "alone do not mark episodes",
        )
    return "links", (
        f"{counted(broken, 'row', 'was', 'were')} marked as truncated: no timeouts are given, and the "
        "row below begins elsewhere than the next observation",
    )


def rows_are_linked(observations: np.ndarray, following: np.ndarray) -> np.ndarray:
    """(N − 1,) whether a row's next observation is, up to rounding, the observation of the row below."""
    if following.shape != observations.shape:
        return np.ones(len(observations) - 1, dtype=np.bool_)  # the record will refuse the shapes
    linked = np.empty(len(observations) - 1, dtype=np.bool_)
    for block in checks.blocks(len(linked)):
        below = observations[block.start + 1 : block.stop + 1]
        close = np.isclose(following[block], below, rtol=1e-4, atol=1e-6, equal_nan=True)
        linked[block] = close.reshape(len(below), -1).all(axis=1)
    return linked


def _derive_next_observations(log: dict[str, np.ndarray], source: str) -> list[str]:
    """Next observations from the rows below; rows that have none are left out."""
    observations, terminated = log["observations"], log["terminated"] == 1
    is_last = last_rows(log)
    following = np.empty_like(observations)
    following[:-1] = observations[1:]
    following[is_last] = observations[is_last]
    log["next_observations"] = following
    notes = ["next observations were derived from the rows below"]
    if (is_last & terminated).any():
        notes.append("terminal rows hold their own observation as next observation (it has no influence)")
    return notes + leave_out_unfollowed(log, is_last & ~terminated, source)
