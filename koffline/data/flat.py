"""Flat logs in HDF5 and NPZ, one array per key: our own, D4RL's, and plain arrays with
the same names.

Our layout is D4RL's keys plus our description, so that D4RL's readers can read it.
D4RL's convention: the last row of an episode is marked in ``terminals`` (the world
ended) or ``timeouts`` (recording stopped). If ``next_observations`` is missing, the
next observation is the observation of the next row of the episode. The last row of an
episode that did not terminate then has no next observation and is left out; the row
before it becomes the last one. After a termination the next observation has no
influence, and the row's own observation is used. In files of others, rows flagged both
``terminals`` and ``timeouts`` follow the rule of tables (`koffline.data.ends`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from koffline.data import columns as checks
from koffline.data.ends import (
    LinkCounts,
    both_flags_note,
    rows_are_linked,
    terminal_marks_every_end,
)
from koffline.data.raw import (
    FileDescription,
    RawLog,
    describe_log,
    follow,
    raw_log,
    read_description,
)
from koffline.data.spaces import SpaceRequest
from koffline.data.transitions import Transitions
from koffline.errors import DataError, counted, listed
from koffline.store.files import atomic_file, reading
from koffline.untrusted.arrays import open_npz
from koffline.untrusted.hdf5 import new_hdf5, open_hdf5, write_text

# Column of Transitions -> keys it may have in a file; we write the first (D4RL's, where
# it has one).
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
    "behavior_log_probabilities": (
        "behavior_log_probabilities",
        D4RL_LOG_PROBABILITIES,
    ),
    "weights": ("weights",),
    "clusters": ("clusters",),
}

ONE_STEP_NOTE = "every row was taken as an episode of one step that ends"
REQUIRED = ("observations", "actions", "rewards", "terminated")
_MASKS = "masks"
# Name of the HDF5 attribute or archive member that holds the text of `describe_log`.
DESCRIPTION = "koffline"
_CHUNK_BYTES = 2**18  # bytes of a chunk, which holds whole rows


def read_flat(
    path: Path,
    kind: str,
    action_space: SpaceRequest | None = None,
    one_step: bool = False,
) -> RawLog:
    """Read a flat file: ours, D4RL's, or any with the same keys; nothing is unpickled.

    one_step: make every row an episode that ends, whatever the file says about
    episodes. Raises DataError.
    """
    opening: Any = open_hdf5 if kind == "HDF5" else open_npz
    with reading(path, kind), opening(path) as file:
        keys = [key for known in KEYS.values() for key in known if key in file]
        _check_layout(
            file, {key: file.dataset(key) for key in keys}, str(path), one_step
        )
        # next observations are derived from observations in memory
        found = file.arrays(
            keys, () if "next_observations" in keys else ("observations",)
        )
        if (
            "episode_terminals" in file
            and "terminals" in found
            and "timeouts" not in found
        ):
            # d3rlpy 1 marks the last row of every episode; unless terminal, it was
            # truncated
            ends = file.arrays(["episode_terminals"])["episode_terminals"] == 1
            found["timeouts"] = ends & (found["terminals"] != 1)
        described = read_description(file.text(DESCRIPTION))
        if described is None and not one_step:
            notes = _apply_masks(file, found)
        else:
            notes = []
        return _aligned(found, described, str(path), action_space, one_step, notes)


def _apply_masks(file: Any, found: dict[str, Any]) -> list[str]:
    """Take ends where JaxRL's ``masks`` say that the world went on for cuts, in place;
    return notes.
    """
    keys = used_keys(found)
    if "terminated" not in keys:
        return []
    done: np.ndarray = np.asarray(found[keys["terminated"]]).reshape(-1) == 1
    if _MASKS not in file or file.dataset(_MASKS).shape[:1] != done.shape:
        return []
    masks = np.asarray(file.arrays([_MASKS])[_MASKS])
    is_flag = masks.size == done.size and bool(np.isin(masks, (0, 1)).all())
    ended: np.ndarray = masks.reshape(-1) == 0 if is_flag else done
    cut = done & ~ended
    if not cut.any() or (ended & ~done).any():
        return []
    truncated = keys.get("truncated", "timeouts")
    found[keys["terminated"]] = ended
    if truncated in found:
        found[truncated] = cut | (np.asarray(found[truncated]).reshape(-1) == 1)
    else:
        found[truncated] = cut
    said = (
        f"{counted(int(cut.sum()), 'row')} flagged {keys['terminated']} have {_MASKS} 1"
    )
    return [f"{said}: they were taken to be cut, not to have ended by themselves"]


def write_hdf5(log: Transitions, path: Path, force: bool = False) -> None:
    """Write the flat layout atomically, with a checksum for every block.

    Raises DataError.
    """
    filters = {
        "compression": "gzip",
        "compression_opts": 4,
        "shuffle": True,
        "fletcher32": True,
    }
    with atomic_file(path, force) as temporary, new_hdf5(temporary) as file:
        for key, array in flat_arrays(log).items():
            rows = max(1, _CHUNK_BYTES // max(1, array[:1].nbytes))
            chunks = (min(len(array), rows), *array.shape[1:])
            file.create_dataset(key, data=array, chunks=chunks, **filters)
        write_text(file, DESCRIPTION, describe_log(log))


def write_npz(log: Transitions, path: Path, force: bool = False) -> None:
    """Write a compressed archive atomically. Raises DataError."""
    members: dict[str, Any] = {
        **flat_arrays(log),
        DESCRIPTION: np.array(describe_log(log)),
    }
    with atomic_file(path, force) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **members)


def flat_arrays(log: Transitions) -> dict[str, np.ndarray]:
    """The columns of a log by the keys that we write."""
    return {KEYS[name][0]: column for name, column in log.columns.items()}


def _check_layout(
    file: Any, found: Mapping[str, Any], source: str, one_step: bool
) -> None:
    """Raise DataError if a required key is missing, there are no rows, or columns
    differ in length.

    found: the arrays with known keys. This is checked before any column is read,
    because a hostile column may be of any size.
    """
    keys = used_keys(found)
    # one-step episodes need no terminal flag
    needed = REQUIRED[:-1] if one_step else REQUIRED
    missing = [KEYS[name] for name in needed if name not in keys]
    if missing:
        for key in (
            key
            for others in missing
            for key in others
            if key in getattr(file, "raw", ())
        ):
            file.dataset(key)  # raises for a group
        expected = (
            "expected observations, actions, rewards, terminals, and others optionally"
        )
        remedy = (
            f"rename them, or say which is which: koffline data inspect {source} --out"
            " mapping.yaml"
        )
        there = listed(sorted(file.datasets), 12) or "none"
        lacks = (
            f"{source} lacks {', '.join(key for key, *_ in missing)}: found keys"
            f" {there}"
        )
        raise DataError(f"{lacks}; {expected}; {remedy}")
    sizes = {key: (*found[key].shape, 0)[0] for key in keys.values()}
    rows = sizes.pop("observations")
    hint = " (one per step and a last one: store next_observations instead)"
    for key, size in sizes.items():
        if size != rows:
            said = f"{source}: {key} has {size} rows, observations {rows}"
            said += hint if set(sizes.values()) == {rows - 1} else ""
            raise DataError(f"{said}; re-export the log with equal lengths")
    if rows == 0:
        raise DataError(
            f"{source} has no rows; give a log with at least one transition"
        )


def used_keys(found: Iterable[str]) -> dict[str, str]:
    """The file's key for each column, by column name."""
    found = set(found)
    return {
        name: next(filter(found.__contains__, keys))
        for name, keys in KEYS.items()
        if found & set(keys)
    }


def _aligned(  # noqa: C901
    found: Mapping[str, np.ndarray],
    described: FileDescription | None,
    source: str,
    action_space: SpaceRequest | None,
    one_step: bool,
    notes: list[str],
) -> RawLog:
    """Aligned columns from the arrays of a flat file; ``described`` is given for files
    that we wrote.

    notes: what was done to the arrays before. Raises DataError if no action space can
    be found or no row has a next observation.
    """
    keys = used_keys(found)
    notes = list(notes)
    log = {name: checks.as_array(key, found[key]) for name, key in keys.items()}
    for name, column in log.items():
        if name in ("observations", "next_observations"):
            if column.ndim == 1:
                log[name] = column.reshape(-1, 1)
            else:
                log[name] = column
        elif name != "actions" and column.shape[1:] == (1,):
            log[name] = column.reshape(-1)
    if keys.get("behavior_log_probabilities") == D4RL_LOG_PROBABILITIES:
        extra = log["behavior_log_probabilities"]
        if extra.ndim == 1 and np.isfinite(extra).all():
            notes.append(
                f"behaviour log-probabilities were taken from {D4RL_LOG_PROBABILITIES}"
            )
        else:
            del log["behavior_log_probabilities"]
            notes.append(
                f"{D4RL_LOG_PROBABILITIES} was left out: it is not one finite number"
                " per row"
            )
    if one_step:
        rows = len(log["rewards"])
        log |= {
            "next_observations": log["observations"],
            "episode_ids": np.arange(rows),
        }
        log |= {
            "terminated": np.ones(rows, np.bool_),
            "truncated": np.zeros(rows, np.bool_),
        }
        log.pop("steps", None)
        notes.append(ONE_STEP_NOTE)
        if described is not None:  # the stored digest belongs to other rows
            described = replace(
                described, metadata=replace(described.metadata, sha256=None)
            )
    log.setdefault("truncated", np.zeros(len(log["rewards"]), dtype=np.bool_))
    for name in ("terminated", "truncated"):
        if log[name].dtype != np.bool_ and np.isin(log[name], (0, 1)).all():
            log[name] = log[name].astype(np.bool_)
    if described is None and not one_step:
        notes += _settle_both_flags(log, keys)
    raw = raw_log(log, described or FileDescription(), action_space, source)
    if "episode_ids" in log:
        notes += _gather_episodes(log)
    elif described is None and "steps" not in log:
        notes += _mark_episodes(log, has_timeouts="truncated" in keys)
    metadata = raw.metadata.with_notes(*notes)
    if "next_observations" not in log:
        said, lost = follow(log, source)
        metadata = metadata.with_notes(
            "next observations were derived from the rows below", *said
        )
        metadata = replace(metadata, lost_last_rows=lost or metadata.lost_last_rows)
    return RawLog(log, raw.action_space, metadata)


def _gather_episodes(log: dict[str, np.ndarray]) -> list[str]:
    """Put interleaved episodes in order, in place; return notes."""
    ids = checks.integer_column("episode_ids", log["episode_ids"])
    if len(np.unique(ids)) == 1 + np.count_nonzero(np.diff(ids)):
        return []
    order = checks.order_rows(ids, log.get("steps"))
    log.update({name: column[order] for name, column in log.items()})
    return ["the rows of interleaved episodes were put in order"]


def _mark_episodes(log: dict[str, np.ndarray], has_timeouts: bool) -> tuple[str, ...]:
    """Add episode ids from the flags, checked against next observations if there are
    any; return notes.
    """
    truncated = log["truncated"] == 1
    ends = truncated | (log["terminated"] == 1)
    links = LinkCounts()
    has_next = "next_observations" in log
    if has_next:
        linked = rows_are_linked(log["observations"], log["next_observations"])
        links.add(ends, truncated, linked)
        if links.stand_alone:
            return links.notes
        if links.show_cuts:
            cut = np.append(~ends[:-1] & ~linked, False)
            log["truncated"] = cut
            ends = ends | cut
    log["episode_ids"] = np.cumsum(np.append(False, ends[:-1]))
    if has_next or has_timeouts:
        return links.notes
    return (
        (
            "neither timeouts nor next_observations are given: episodes were taken to"
            " end at terminals only; where a time limit cut them, one transition per"
            " cut is wrong"
        ),
    )


def _settle_both_flags(
    log: dict[str, np.ndarray], keys: Mapping[str, str]
) -> list[str]:
    """Take rows with both flags for cut where ``terminal`` marks every end, in place;
    return notes.

    keys: the file's key of each column.
    """
    truncated = log["truncated"] == 1
    both = truncated & (log["terminated"] == 1)
    if not terminal_marks_every_end(int(truncated.sum()), int(both.sum())):
        return []
    log["terminated"] = (log["terminated"] == 1) & ~truncated
    return [both_flags_note(int(both.sum()), keys["truncated"], keys["terminated"])]
