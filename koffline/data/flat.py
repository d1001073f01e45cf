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
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from koffline.data import columns as checks
from koffline.data.buffers import filled_rows
from koffline.data.ends import (
    EndFlags,
    LinkCounts,
    rows_are_linked,
)
from koffline.data.raw import (
    STARTS,
    FileDescription,
    RawLog,
    describe_log,
    follow,
    lacks_next_masks,
    leave_out_unmasked,
    notes_on_unmasked,
    raw_log,
    read_description,
)
from koffline.data.spaces import Discrete, SpaceRequest
from koffline.data.transitions import Transitions
from koffline.errors import DataError, counted, listed
from koffline.store.files import atomic_file, reading
from koffline.untrusted.arrays import ArrayHeader, OpenArrays, open_npz
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
    "action_mask": ("action_mask", "action_masks", "available_actions"),
    "next_action_mask": (
        "next_action_mask",
        "next_action_masks",
        "next_available_actions",
    ),
}

ONE_STEP_NOTE = "every row was taken as an episode of one step that ends"
REQUIRED = ("observations", "actions", "rewards", "terminated")
_MASKS = "masks"
_IS_LAST = "is_last"
_BESIDE_IS_LAST = ("is_first", "is_terminal")
_BESIDE = (_MASKS, _IS_LAST, *_BESIDE_IS_LAST)  # read where the columns are settled
_FEWEST_ENDS = 10  # of each kind: fewer do not show that the recording went on
_MOST_STEPS = 0.95  # share of steps that are shorter than a jump
_FEWEST_REWARDS = 5  # other than 0: fewer do not show that final states lack them
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
    with reading(path, kind), _opened(path, kind) as file:
        return _read_file(file, str(path), action_space, one_step)


def _opened(path: Path, kind: str) -> AbstractContextManager[OpenArrays]:
    if kind == "HDF5":
        return open_hdf5(path)
    return open_npz(path)


def read_arrays(
    arrays: Mapping[object, object],
    source: str,
    action_space: SpaceRequest | None = None,
    one_step: bool = False,
) -> RawLog:
    """The log in a dict of arrays with the keys of a flat file; as `read_flat`.

    source: what the dict is, for messages. Raises DataError.
    """
    return _read_file(_HeldFile(arrays), source, action_space, one_step)


class _HeldFile:
    """A dict of arrays, read like an open file; no array is copied."""

    def __init__(self, arrays: Mapping[object, object]) -> None:
        self._held = {str(key): values for key, values in arrays.items()}
        self.datasets = list(self._held)

    def __contains__(self, key: str) -> bool:
        return key in self._held

    def dataset(self, key: str) -> np.ndarray:
        """An array, which has a shape. Raises DataError."""
        return checks.as_array(key, self._held[key])

    def arrays(
        self, keys: Iterable[str], twice: Iterable[str] = ()
    ) -> dict[str, np.ndarray]:
        """Arrays by key."""
        return {key: self.dataset(key) for key in keys}

    def text(self, key: str) -> str | None:
        """A text, which an archive holds as an array; None if it is not there."""
        if key not in self._held:
            return None
        return str(self._held[key])


def _read_file(
    file: OpenArrays, source: str, action_space: SpaceRequest | None, one_step: bool
) -> RawLog:
    """The log in an open flat file, or in a dict of arrays. Arguments and errors as of
    `read_flat`.
    """
    keys = [key for known in KEYS.values() for key in known if key in file]
    datasets = {key: file.dataset(key) for key in keys}
    _check_layout(file, datasets, source, one_step)
    # next observations are derived from observations in memory
    twice: tuple[str, ...] = ()
    if "next_observations" not in keys:
        twice = ("observations",)
    arrays = file.arrays(keys, twice)
    lacks_timeouts = "terminals" in arrays and "timeouts" not in arrays
    if lacks_timeouts and "episode_terminals" in file:
        # d3rlpy 1 marks the last row of every episode; unless terminal, it was
        # truncated
        ends = file.arrays(["episode_terminals"])["episode_terminals"] == 1
        arrays["timeouts"] = ends & (arrays["terminals"] != 1)
    description = read_description(file.text(DESCRIPTION))
    notes: list[str] = []
    if description is None:
        filled = filled_rows(file, arrays)
        if not filled.is_all:
            beside = [key for key in _BESIDE if key in file]
            held = {**file.arrays(beside), **arrays}
            arrays = {key: filled.of(held[key]) for key in arrays}
            file = _HeldFile({key: filled.of(array) for key, array in held.items()})
        notes += filled.notes
    if description is None and not one_step:
        notes += [
            *_apply_masks(file, arrays),
            *_apply_final_states(file, arrays),
        ]
    return _aligned(arrays, description, source, action_space, one_step, notes)


def log_of_arrays(
    arrays: Mapping[str, np.ndarray],
    source: str,
    action_space: SpaceRequest | None = None,
) -> RawLog:
    """A log of arrays in memory, by the keys of a flat file. Raises DataError if a
    required key is missing.
    """
    keys = used_keys(arrays)
    missing = [KEYS[name][0] for name in REQUIRED if name not in keys]
    if missing:
        raise DataError(
            f"{source} holds a group of arrays for each episode, without"
            f" {', '.join(missing)}: found keys {listed(sorted(arrays), 12)}; say which"
            f" is which: koffline data inspect {source} --out mapping.yaml"
        )
    return _aligned(arrays, None, source, action_space, one_step=False, notes=[])


def _apply_masks(file: OpenArrays, arrays: dict[str, np.ndarray]) -> list[str]:
    """Take ends where JaxRL's ``masks`` say that the world went on for cuts, in place;
    return notes. arrays: of the file, by key.
    """
    keys = used_keys(arrays)
    if "terminated" not in keys:
        return []
    done: np.ndarray = np.asarray(arrays[keys["terminated"]]).reshape(-1) == 1
    if _MASKS not in file or file.dataset(_MASKS).shape[:1] != done.shape:
        return []
    masks = np.asarray(file.arrays([_MASKS])[_MASKS])
    if masks.size != done.size or not np.isin(masks, (0, 1)).all():
        return []
    ended: np.ndarray = masks.reshape(-1) == 0
    cut = done & ~ended
    if not cut.any() or (ended & ~done).any():
        return []
    truncated = keys.get("truncated", "timeouts")
    arrays[keys["terminated"]] = ended
    if truncated in arrays:
        arrays[truncated] = cut | (np.asarray(arrays[truncated]).reshape(-1) == 1)
    else:
        arrays[truncated] = cut
    rows = counted(int(cut.sum()), "row")
    return [
        f"{rows} flagged {keys['terminated']} have {_MASKS} 1: they were taken to be"
        " cut, not to have ended by themselves"
    ]


def _apply_final_states(file: OpenArrays, arrays: dict[str, np.ndarray]) -> list[str]:
    """Take the rows that RLDS marks as last for final states, whose observation is the
    next one of the row above, in place; return notes. arrays: of the file, by key.

    Where such rows have rewards, they are steps.
    """
    keys = used_keys(arrays)
    has_flags = _IS_LAST in file and any(key in file for key in _BESIDE_IS_LAST)
    if "next_observations" in keys or "terminated" not in keys or not has_flags:
        return []
    rewards = np.asarray(arrays[keys["rewards"]]).reshape(-1)
    if file.dataset(_IS_LAST).shape[:1] != rewards.shape:
        return []
    is_last: np.ndarray = np.asarray(file.arrays([_IS_LAST])[_IS_LAST]) == 1
    if is_last.shape != rewards.shape or not is_last[-1]:
        return []
    is_paid = rewards != 0.0
    if (is_paid & is_last).any() or is_paid.sum() < _FEWEST_REWARDS:
        return []
    kept = np.flatnonzero(~is_last)
    terminated = np.asarray(arrays[keys["terminated"]]).reshape(-1) == 1
    is_end = is_last[kept + 1]
    ended = is_end & (terminated[kept] | terminated[kept + 1])
    arrays["next_observations"] = np.asarray(arrays[keys["observations"]])[kept + 1]
    mask = keys.get("action_mask")
    if mask is not None and "next_action_mask" not in keys:
        arrays["next_action_mask"] = np.asarray(arrays[mask])[kept + 1]
    for key in keys.values():
        arrays[key] = np.asarray(arrays[key])[kept]
    arrays[keys["terminated"]] = ended
    arrays[keys.get("truncated", "timeouts")] = is_end & ~ended
    rows = counted(int(is_last.sum()), "row")
    return [
        f"{rows} marked {_IS_LAST} hold the final state alone, as in RLDS: it is the next"
        " observation of the row above"
    ]


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
    file: OpenArrays,
    datasets: Mapping[str, ArrayHeader],
    source: str,
    one_step: bool,
) -> None:
    """Raise DataError if a required key is missing, there are no rows, or columns
    differ in length.

    datasets: the arrays with known keys. This is checked before any column is read,
    because a hostile column may be of any size.
    """
    keys = used_keys(datasets)
    # one-step episodes need no terminal flag
    needed = REQUIRED[:-1] if one_step else REQUIRED
    missing = [KEYS[name] for name in needed if name not in keys]
    if missing:
        _refuse_missing_keys(file, missing, source)
    # the number of rows; 0 of a single number, which has no shape
    sizes = {key: (*datasets[key].shape, 0)[0] for key in keys.values()}
    rows = sizes.pop("observations")
    for key, size in sizes.items():
        if size != rows:
            hint = ""
            if set(sizes.values()) == {rows - 1}:
                hint = " (one per step and a last one: store next_observations instead)"
            raise DataError(
                f"{source}: {key} has {size} rows, observations {rows}{hint}; re-export"
                " the log with equal lengths"
            )
    if rows == 0:
        raise DataError(
            f"{source} has no rows; give a log with at least one transition"
        )


def _refuse_missing_keys(
    file: OpenArrays, missing: list[tuple[str, ...]], source: str
) -> None:
    """Raise DataError for columns that a file lacks. missing: the keys that each of
    them may have.
    """
    for keys in missing:
        for key in keys:
            if key in getattr(file, "raw", ()):
                file.dataset(key)  # raises for a group
    lacking = ", ".join(key for key, *_ in missing)
    present = listed(sorted(file.datasets), 12) or "none"
    raise DataError(
        f"{source} lacks {lacking}: found keys {present}; expected observations,"
        " actions, rewards, terminals, and others optionally; rename them, or say which"
        f" is which: koffline data inspect {source} --out mapping.yaml"
    )


def used_keys(present: Iterable[str]) -> dict[str, str]:
    """The file's key for each column, by column name. present: the file's keys."""
    present = set(present)
    used = {}
    for name, keys in KEYS.items():
        for key in keys:
            if key in present:
                used[name] = key
                break
    return used


def _aligned(
    arrays: Mapping[str, np.ndarray],
    description: FileDescription | None,
    source: str,
    action_space: SpaceRequest | None,
    one_step: bool,
    notes: list[str],
) -> RawLog:
    """Aligned columns from the arrays of a flat file.

    arrays: by the file's keys. description: of files that we wrote. one_step: make
    every row an episode that ends. notes: what was done to the arrays before. Raises
    DataError if no action space can be found or no row has a next observation.
    """
    keys = used_keys(arrays)
    notes = list(notes)
    is_ours = description is not None
    columns = _columns_of(arrays, keys)
    if keys.get("behavior_log_probabilities") == D4RL_LOG_PROBABILITIES:
        notes.append(_settle_log_probabilities(columns))
    if not is_ours:
        notes += _settle_masks(columns, keys, action_space)
    if one_step:
        _make_one_step(columns)
        notes.append(ONE_STEP_NOTE)
        if description is not None:  # the stored digest belongs to other rows
            metadata = replace(description.metadata, sha256=None)
            description = replace(description, metadata=metadata)
    columns.setdefault("truncated", np.zeros(len(columns["rewards"]), dtype=np.bool_))
    for name in ("terminated", "truncated"):
        flags = columns[name]
        if flags.dtype != np.bool_ and np.isin(flags, (0, 1)).all():
            columns[name] = flags.astype(np.bool_)
    if not is_ours and not one_step:
        notes += _settle_both_flags(columns, keys)
    raw = raw_log(columns, description or FileDescription(), action_space, source)
    if "episode_ids" in columns:
        notes += _gather_episodes(columns)
    elif not is_ours and "steps" not in columns:
        notes += _mark_episodes(columns, has_timeouts="truncated" in keys)
    has_lost = raw.metadata.lost_last_rows
    if "next_observations" not in columns:
        notes_on_rows, has_left_out = follow(columns, source)
        notes += ["next observations were derived from the rows below", *notes_on_rows]
        has_lost = has_lost or has_left_out
    elif lacks_next_masks(columns):
        n_left_out = leave_out_unmasked(columns)
        has_lost = has_lost or n_left_out > 0
        notes += notes_on_unmasked(n_left_out)
    noted = (*raw.metadata.notes, *notes)
    metadata = replace(raw.metadata, notes=noted, lost_last_rows=has_lost)
    return RawLog(columns, raw.action_space, metadata)


def _columns_of(
    arrays: Mapping[str, np.ndarray], keys: Mapping[str, str]
) -> dict[str, np.ndarray]:
    """The arrays of a file by the names of their columns, with the shapes of columns:
    (N, 1) observations for (N,), and (N,) for other columns of shape (N, 1).

    keys: the file's key of each column.
    """
    columns = {}
    for name, key in keys.items():
        column = checks.as_array(key, arrays[key])
        if name in ("observations", "next_observations"):
            if column.ndim == 1:
                column = column.reshape(-1, 1)
        elif name not in ("actions", *checks.MASKS) and column.shape[1:] == (1,):
            column = column.reshape(-1)
        columns[name] = column
    return columns


def _settle_masks(
    columns: dict[str, np.ndarray], keys: Mapping[str, str], requested: Any
) -> list[str]:
    """Leave masks out that are no numbers (N, n) of n discrete actions, in place; return
    notes.

    keys: the file's key of each column. requested: the action space that was asked for,
    if any.
    """
    notes = []
    actions = columns["actions"]
    is_discrete = isinstance(requested, Discrete) or (
        requested is None
        and actions.dtype.kind in "iu"
        and actions.size == len(actions)
    )
    for name in checks.MASKS:
        if name not in columns:
            continue
        is_alone = name == "next_action_mask" and "action_mask" not in columns
        if is_discrete and columns[name].ndim == 2 and not is_alone:
            continue
        del columns[name]
        notes.append(
            f"{keys[name]} was left out: it is no table of the discrete actions that"
            " were available in each row"
        )
    return notes


def _settle_log_probabilities(columns: dict[str, np.ndarray]) -> str:
    """Keep D4RL's log-probabilities if they are one finite number per row, else leave
    them out, in place; a note on that.
    """
    column = columns["behavior_log_probabilities"]
    if column.ndim == 1 and np.isfinite(column).all():
        return f"behaviour log-probabilities were taken from {D4RL_LOG_PROBABILITIES}"
    del columns["behavior_log_probabilities"]
    return f"{D4RL_LOG_PROBABILITIES} was left out: it is not one finite number per row"


def _make_one_step(columns: dict[str, np.ndarray]) -> None:
    """Make every row an episode of one step that ends, in place."""
    rows = len(columns["rewards"])
    columns["next_observations"] = columns["observations"]
    columns["episode_ids"] = np.arange(rows)
    columns["terminated"] = np.ones(rows, np.bool_)
    columns["truncated"] = np.zeros(rows, np.bool_)
    columns.pop("steps", None)
    columns.pop("next_action_mask", None)


def _gather_episodes(columns: dict[str, np.ndarray]) -> list[str]:
    """Put interleaved episodes in order, in place; return notes."""
    ids = checks.integer_column("episode_ids", columns["episode_ids"])
    n_runs = 1 + np.count_nonzero(np.diff(ids))
    if len(np.unique(ids)) == n_runs:
        return []
    order = checks.order_rows(ids, columns.get("steps"))
    for name, column in columns.items():
        columns[name] = column[order]
    return ["the rows of interleaved episodes were put in order"]


def _mark_episodes(
    columns: dict[str, np.ndarray], has_timeouts: bool
) -> tuple[str, ...]:
    """Add episode ids from the flags, checked against next observations if there are
    any, in place; return notes.
    """
    truncated = columns["truncated"] == 1
    ends = truncated | (columns["terminated"] == 1)
    links = LinkCounts()
    has_next = "next_observations" in columns
    if has_next:
        linked = rows_are_linked(columns["observations"], columns["next_observations"])
        links.add(ends, truncated, linked)
        if links.stand_alone:
            return links.notes
        if links.show_cuts:
            cut = np.append(~ends[:-1] & ~linked, False)
            columns["truncated"] = cut
            ends = ends | cut
    columns["episode_ids"] = np.cumsum(np.append(False, ends[:-1]))
    if has_timeouts and not has_next:
        n_going_on = _count_ends_that_go_on(columns)
        if n_going_on:
            rows = counted(n_going_on, "row")
            return (
                f"{STARTS}after {rows} flagged terminals the recording goes on from the"
                " same place, as after the goal in D4RL's antmaze: the rows below count"
                " as episodes of their own, which begin where others ended; give the"
                " states that the value is of (--initial-states)",
            )
    if has_next or has_timeouts:
        return links.notes
    return (
        "neither timeouts nor next_observations are given: episodes were taken to end"
        " at terminals only; where a time limit cut them, one transition per cut is"
        " wrong",
    )


def _count_ends_that_go_on(columns: Mapping[str, np.ndarray]) -> int:
    """Number of terminated rows, 0 if there are few, or if the rows below them lie as far
    away as those below cuts: where the world is set back, it jumps.

    columns: observations (N, …), flags (N,).
    """
    terminated = columns["terminated"][:-1] == 1
    truncated = (columns["truncated"][:-1] == 1) & ~terminated
    if min(terminated.sum(), truncated.sum()) < _FEWEST_ENDS:
        return 0
    rows = columns["observations"].reshape(len(columns["rewards"]), -1)
    lengths = np.linalg.norm(np.diff(rows.astype(np.float64), axis=0), axis=1)
    usual = np.quantile(lengths[~terminated & ~truncated], _MOST_STEPS)
    goes_on = np.median(lengths[terminated]) <= usual
    jumps = np.median(lengths[truncated]) > usual
    if not goes_on or not jumps:
        return 0
    return int(terminated.sum())


def _settle_both_flags(
    columns: dict[str, np.ndarray], keys: Mapping[str, str]
) -> list[str]:
    """Take rows with both flags for cut where ``terminal`` marks every end, in place;
    return notes.

    keys: the file's key of each column.
    """
    truncated = columns["truncated"] == 1
    terminated = columns["terminated"] == 1
    flags = EndFlags()
    flags.add(terminal=terminated, truncated=truncated)
    if not flags.terminal_marks_every_end:
        return []
    columns["terminated"] = terminated & ~truncated
    return [flags.note(truncated=keys["truncated"], terminal=keys["terminated"])]
