"""Hashes of a log's units (episodes; rows, where there are none), and copies among them.

Random numbers belong to a unit and not to the order in which rows are read. Copies of units add weight to a
log, and no evidence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int, UInt64

from koffline.data.columns import counted
from koffline.data.transitions import Transitions

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1
_MERGED_AT_ONCE = 2**20
_BY_CHANCE = 0.05  # share of rows whose state recurs, from which equal episodes may be chance
ROW_NUMBERS = ("observations", "actions", "rewards", "next_observations")


def unit_hash(seed: int, shard: int, units: Any) -> np.ndarray:
    """(B,) uint64, uniform and independent between units: a function of seed, shard and unit alone.

    units: (B,) ordinals within the shard (``units`` of a block). The same numbers come out whatever the size
    of blocks, their order or the machine. Divide by 2**64 for uniform numbers in [0, 1), take ``% n`` for
    one of n groups. (Steele, Lea and Flood 2014, SplitMix64: its output function, applied three times)
    """
    with np.errstate(over="ignore"):  # words of 64 bits wrap around
        key = _mix(_mix(np.uint64(seed & _MASK) + _GAMMA) ^ np.uint64(shard & _MASK))
        counted = np.asarray(units).astype(np.uint64) * _GAMMA
        return _mix(_mix(counted + key) ^ key)


def _mix(state: Any) -> Any:
    """SplitMix64's output function: a bijection of 64-bit words."""
    with np.errstate(over="ignore"):
        state = (state ^ (state >> np.uint64(30))) * _FIRST
        state = (state ^ (state >> np.uint64(27))) * _SECOND
        return state ^ (state >> np.uint64(31))


def hash_rows(block: Transitions, names: tuple[str, ...] = ROW_NUMBERS) -> np.ndarray:
    """(B,) uint64 of each row's numbers in the named columns: of two random sums of them.

    Equal rows agree, and others almost never.
    """
    generator = np.random.default_rng(0)
    sums = np.zeros((len(block), 2))
    for name in names:
        column = getattr(block, name)
        weights = generator.standard_normal((max(1, int(np.prod(column.shape[1:]))), 2))
        part = np.asarray(column, dtype=np.float64)
        # einsum, whose sums do not depend on the number of rows at hand as those of a matrix product do
        sums += np.einsum("nd,dk->nk", part.reshape(len(part), -1), weights)
    bits = (sums + 0.0).view(np.uint64)  # 0.0 and −0.0 are equal
    return np.asarray(unit_hash(0, 0, bits[:, 0]) ^ unit_hash(0, 1, bits[:, 1]))


class RepeatedRows:
    """Rows that equal an earlier one in state, action, reward and next state, told by their hashes.

    At most ``limit`` different hashes are kept (None: all). Where there are more, only rows whose hash
    begins with ``level`` zero bits count, for themselves and for all others.
    """

    def __init__(self, limit: int | None = 2**20) -> None:
        self._limit = limit
        self.level = 0
        self._hashes = np.zeros(0, dtype=np.uint64)  # different ones, in order
        self._counts = np.zeros(0, dtype=np.int64)
        self._waiting: list[np.ndarray] = []

    def add(self, block: Transitions) -> None:
        """More rows."""
        self._waiting.append(hash_rows(block))
        if sum(map(len, self._waiting)) > max(_MERGED_AT_ONCE, len(self._hashes)):
            self.settle()

    def merge(self, other: RepeatedRows) -> None:
        """Add the rows of another part of the log."""
        other.settle()
        self.settle()
        self.level = max(self.level, other.level)
        self._join(other._hashes, other._counts)

    def settle(self) -> None:
        """Count what waits; afterwards the record is small enough to be sent elsewhere."""
        if self._waiting:
            waiting, self._waiting = np.concatenate(self._waiting), []
            self._join(waiting, np.ones(len(waiting), dtype=np.int64))

    def count(self) -> int:
        """Rows that equal an earlier one; an estimate where ``level`` is above 0."""
        self.settle()
        return int(self._counts.sum() - len(self._counts)) << self.level

    def _join(self, hashes: np.ndarray, counts: np.ndarray) -> None:
        self._hashes, places = np.unique(np.concatenate([self._hashes, hashes]), return_inverse=True)
        weights = np.concatenate([self._counts, counts])
        self._counts = np.bincount(places.reshape(-1), weights=weights, minlength=0).astype(np.int64)
        while True:
            kept = self._hashes <= np.uint64(2**64 - 1 >> self.level)
            self._hashes, self._counts = self._hashes[kept], self._counts[kept]
            if self._limit is None or len(self._hashes) <= self._limit:
                return
            self.level += 1


@dataclass(frozen=True, eq=False)
class DistinctLog:
    """A log without copies: one episode (row, where there are none) of each kind, with the weight of all.

    ``units``: episodes or rows of the log as it was. ``distinct``: different ones among them. ``merged``:
    whether ``transitions`` holds these alone. It does not where states recur all over the log, as in a small
    grid: there equal episodes happen by chance, and each counts.
    """

    transitions: Transitions
    units: int
    distinct: int
    merged: bool

    @property
    def notes(self) -> list[str]:
        """What a person should know; nothing where there is nothing odd."""
        kind = "episode" if self.transitions.has_episodes else "row"
        said = f"The log has {counted(self.units, kind)}, only {self.distinct} of them different: copies "
        return [f"{said}count as weight and not as evidence."] if self.merged else []


def without_copies(log: Transitions) -> DistinctLog:
    """Merge equal episodes (rows, where there are none) into one that has the weight of all."""
    starts = log.episode_starts if log.has_episodes else np.arange(len(log))
    lengths = np.diff(np.append(starts, len(log)))
    _, firsts, kinds = np.unique(_hash_units(log, starts, lengths), return_index=True, return_inverse=True)
    if len(firsts) == len(starts):
        return DistinctLog(log, len(starts), len(starts), merged=False)
    unit_of_row = np.repeat(np.arange(len(starts)), lengths)
    rows = np.flatnonzero(np.isin(unit_of_row, firsts))
    if len(firsts) > 1 and _recurrence(log, rows, unit_of_row[rows]) > _BY_CHANCE:
        return DistinctLog(log, len(starts), len(firsts), merged=False)
    weights = np.ones(len(log)) if log.weights is None else np.asarray(log.weights, dtype=np.float64)
    original = starts[firsts[kinds.reshape(-1)]]  # of each unit: where its first copy begins
    same_row = np.arange(len(log)) + (original - starts)[unit_of_row]
    total = np.bincount(same_row, weights=weights, minlength=len(log))
    return DistinctLog(log.select(rows).replace(weights=total[rows]), len(starts), len(firsts), merged=True)


def _hash_units(
    log: Transitions, starts: Int[np.ndarray, " unit"], lengths: Int[np.ndarray, " unit"]
) -> UInt64[np.ndarray, " unit"]:
    """One number per episode, from its rows in their order, flags and log-probabilities."""
    flags = np.asarray(log.terminated, dtype=np.uint64) * np.uint64(2) + np.asarray(log.truncated)
    hashes = hash_rows(log) ^ unit_hash(0, 2, flags)
    if log.behavior_log_probabilities is not None:
        bits = (np.asarray(log.behavior_log_probabilities, dtype=np.float64) + 0.0).view(np.uint64)
        hashes ^= unit_hash(0, 3, bits)
    steps = np.arange(len(log)) - np.repeat(starts, lengths)
    odd = 2 * steps.astype(np.uint64) + np.uint64(1)
    return np.add.reduceat(hashes * odd, starts) ^ unit_hash(0, 4, lengths)


def _recurrence(log: Transitions, rows: Int[np.ndarray, " row"], units: Int[np.ndarray, " row"]) -> float:
    """Share of these rows whose observation a row of another unit holds too."""
    seen = hash_rows(log, ("observations",))[rows]
    pairs = np.unique(np.stack([seen, units.astype(np.uint64)]), axis=1)
    values, holders = np.unique(pairs[0], return_counts=True)
    return float(np.isin(seen, values[holders > 1]).mean())
