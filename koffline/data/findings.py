"""Everything that is wrong with a log, not only the first thing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from koffline.data import columns as checks
from koffline.data.flat import rows_are_linked
from koffline.data.raw import RawLog
from koffline.data.spaces import Discrete
from koffline.data.transitions import Transitions
from koffline.errors import DataError

_FEW_EPISODES = 10


@dataclass(frozen=True)
class Finding:
    """An error (koffline refuses the log) or a warning (it does not, but look)."""

    severity: Literal["error", "warning"]
    message: str


def inspect_log(raw: RawLog) -> list[Finding]:
    """Errors first, each with the number of rows and the first of them; warnings only on sound logs."""
    found = [Finding("error", message) for message in _errors(raw)]
    if found:
        return found
    try:
        log = raw.transitions()
    except DataError as error:
        return [Finding("error", str(error))]
    return [Finding("warning", message) for message in _warnings(log)]


def _errors(raw: RawLog) -> Iterator[str]:
    for name, column in raw.columns.items():
        if column.dtype.kind == "f":
            bad = _rows_where(column, lambda part: ~np.isfinite(part))
            if bad.size:
                yield f"{name}: NaN or infinite in {_rows(bad)}; drop or mend them"
    yield from _bad_actions(raw)
    for name in ("terminated", "truncated"):
        bad = np.flatnonzero((raw.columns[name] != 0) & (raw.columns[name] != 1))
        if bad.size:
            yield f"{name}: neither true nor false in {_rows(bad)}; give 0 or 1"
    if "weights" in raw.columns:
        bad = np.flatnonzero(raw.columns["weights"] < 0)
        if bad.size:
            yield f"weights: negative in {_rows(bad)}; give weights of at least 0"


def _bad_actions(raw: RawLog) -> Iterator[str]:
    actions, space = raw.columns["actions"], raw.action_space
    if isinstance(space, Discrete):
        if actions.ndim != 1:
            return  # the record says what is wrong with the shape
        finite = np.isfinite(actions)
        fractions = np.flatnonzero(finite & (np.trunc(np.where(finite, actions, 0)) != actions))
        if fractions.size:
            yield f"actions: not whole numbers in {_rows(fractions)}; count actions from 0"
        outside = np.flatnonzero(finite & ((actions < 0) | (actions >= space.n)))
    elif actions.shape[1:] == (space.k,):
        low, high = checks.tolerant_bounds(space)
        outside = _rows_where(actions, lambda part: (part < low) | (part > high))
    else:
        return
    if outside.size:
        yield f"actions: outside {space} in {_rows(outside)}; declare the space anew or mend them"


def _warnings(log: Transitions) -> Iterator[str]:
    if log.metadata.sha256 not in (None, log.sha256):
        yield "the rows are not those the file was written with: it was edited"
    yield from _episode_warnings(log)
    repeated = _repeated_rows(log)
    if repeated:
        yield f"{repeated} of {len(log)} rows repeat an earlier row exactly; were episodes written twice?"
    for name in ("observations", "actions", "rewards"):
        yield from _constant_columns(name, getattr(log, name))
    space = log.action_space
    if isinstance(space, Discrete):
        missing = [a for a in range(space.n) if not (log.actions == a).any()]
        if missing:
            yield f"actions {', '.join(map(str, missing))} never appear: nothing can be learnt of them"
    elif not np.isfinite([*space.low, *space.high]).all():
        yield "action bounds are infinite; declare them (--continuous LOW HIGH) for uniform policies"


def _episode_warnings(log: Transitions) -> Iterator[str]:
    if not log.has_episodes:
        yield "no episodes: every row counts as an initial state, and intervals resample single rows"
        return
    if log.n_episodes < _FEW_EPISODES:
        yield f"only {log.n_episodes} episodes: an interval from so few is rough"
    ends = log.episode_ends
    unfinished = ends[~(log.terminated | log.truncated)[ends]]
    if unfinished.size:
        yield f"{unfinished.size} episodes end without a flag, the first in row {unfinished[0]}; taken as cut"
    both = np.flatnonzero(log.terminated & log.truncated)
    if both.size:
        yield f"{_rows(both)} are terminated and truncated; taken as terminated"
    if len(log) == 1:
        return
    linked = rows_are_linked(log.observations, log.next_observations)
    is_last = np.zeros(len(log), dtype=np.bool_)
    is_last[ends] = True
    broken = np.flatnonzero(~linked & ~is_last[:-1])
    if broken.size:
        yield f"next observation is not the observation of the row below in {_rows(broken)} inside episodes"
    shifted = np.flatnonzero(linked & is_last[:-1] & ~log.terminated[:-1])
    if shifted.size:
        yield (
            f"the next observation is the first one of the following episode in {_rows(shifted)}; "
            "is it one stream cut into pieces, or was it exported by shifting the observations by one?"
        )


def _constant_columns(name: str, column: np.ndarray) -> Iterator[str]:
    flat = column.reshape(len(column), -1)
    constant = np.flatnonzero(flat.min(axis=0) == flat.max(axis=0))
    if len(column) == 1 or not constant.size:
        return
    if flat.shape[1] == 1:
        yield f"{name} are all {flat[0, 0]:g}"
    else:
        listed = ", ".join(str(i) for i in constant[:8]) + (", …" if constant.size > 8 else "")
        yield f"{name}: {constant.size} of {flat.shape[1]} columns are constant ({listed})"


def _repeated_rows(log: Transitions) -> int:
    """How many rows equal an earlier one in state, action, reward and next state.

    Rows are compared by two random sums of their numbers: equal rows agree in both, and others almost never.
    """
    generator = np.random.default_rng(0)
    keys = np.zeros((len(log), 2))
    for column in (log.observations, log.actions, log.rewards, log.next_observations):
        weights = generator.standard_normal((max(1, int(np.prod(column.shape[1:]))), 2))
        for block in checks.blocks(len(log)):
            part = np.asarray(column[block], dtype=np.float64)
            # einsum, whose sums do not depend on the number of rows at hand as those of a matrix product do
            keys[block] += np.einsum("nd,dk->nk", part.reshape(len(part), -1), weights)
    return len(log) - len(np.unique(keys, axis=0))


def _rows_where(column: np.ndarray, test: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Rows in which any number passes the test."""
    rows = []
    for block in checks.blocks(len(column)):
        part = column[block]
        hit = np.asarray(test(part)).reshape(len(part), -1).any(axis=1)
        rows.append(np.flatnonzero(hit) + block.start)
    return np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)


def _rows(rows: np.ndarray) -> str:
    return f"row {rows[0]}" if rows.size == 1 else f"{rows.size} rows (first: row {rows[0]})"
