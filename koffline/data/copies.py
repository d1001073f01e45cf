"""Rows that equal an earlier one, and copies of episodes: they add weight to a log, and no evidence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, UInt64

from koffline.data.columns import counted
from koffline.data.row_block import RowBlock
from koffline.data.transitions import Transitions
from koffline.data.unit_hash import unit_hash

_MERGED_AT_ONCE = 2**20
ROW_NUMBERS = ("observations", "actions", "rewards", "next_observations")


class RepeatedRows:
    """Rows that equal an earlier one in state, action, reward and next state.

    Rows are compared by 64-bit hashes of two random sums of their numbers: equal rows agree, and others
    almost never. At most ``limit`` different hashes are kept (None: all of them). Where there are more, only
    rows whose hash begins with ``level`` zero bits count, for themselves and for all others: equal rows are
    kept or left out together.
    """

    def __init__(self, limit: int | None = 2**20) -> None:
        self._limit = limit
        self.level = 0
        self._hashes = np.zeros(0, dtype=np.uint64)  # different ones, in order
        self._counts = np.zeros(0, dtype=np.int64)
        self._waiting: list[np.ndarray] = []

    def add(self, block: RowBlock) -> None:
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
            hashes, counts = np.unique(np.concatenate(self._waiting), return_counts=True)
            self._waiting = []
            self._join(hashes, counts)

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


def hash_rows(block: RowBlock | Transitions, names: tuple[str, ...] = ROW_NUMBERS) -> np.ndarray:
    """(B,) uint64 of each row's numbers in the named columns."""
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


_FEW_ALIKE = 0.2  # share of episodes with the actions and rewards of another
_FEWEST_REWARDS = 5  # different ones in an episode: fewer agree by chance
_BY_CHANCE = 0.05  # share of rows whose state recurs, from which equal episodes may be chance


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
        if self.merged:
            return [
                f"The log has {counted(self.units, kind)}, only {self.distinct} of them different: copies "
                "count as weight and not as evidence."
            ]
        alike = _alike(self.transitions)
        if alike < _FEW_ALIKE:
            return []
        return [
            f"{alike:.0%} of the episodes have the actions and rewards of another one, step by step, but not "
            "its observations: if they are copies with noise, all intervals are too narrow."
        ]


def without_copies(log: Transitions) -> DistinctLog:
    """Merge equal episodes (rows, where there are none) into one that has the weight of all."""
    starts = log.episode_starts if log.has_episodes else np.arange(len(log))
    _, firsts, kinds = np.unique(_hash_units(log, starts), return_index=True, return_inverse=True)
    if len(firsts) == len(starts):
        return DistinctLog(log, len(starts), len(starts), merged=False)
    lengths = np.diff(np.append(starts, len(log)))
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
    log: Transitions, starts: Int[np.ndarray, " unit"], names: tuple[str, ...] = ROW_NUMBERS
) -> UInt64[np.ndarray, " unit"]:
    """One number per episode, from the named columns of its rows in their order, and its flags."""
    flags = np.asarray(log.terminated, dtype=np.uint64) * np.uint64(2) + np.asarray(log.truncated)
    hashes = hash_rows(log, names) ^ unit_hash(0, 2, flags)
    if log.behavior_log_probabilities is not None:
        bits = (np.asarray(log.behavior_log_probabilities, dtype=np.float64) + 0.0).view(np.uint64)
        hashes ^= unit_hash(0, 3, bits)
    lengths = np.diff(np.append(starts, len(log)))
    steps = np.arange(len(log)) - np.repeat(starts, lengths)
    odd = 2 * steps.astype(np.uint64) + np.uint64(1)
    return np.add.reduceat(hashes * odd, starts) ^ unit_hash(0, 4, lengths)


def _alike(log: Transitions) -> float:
    """Share of the episodes with the actions and rewards of another one, where rewards vary."""
    if not log.has_episodes or log.n_episodes < 2:
        return 0.0
    hashes = _hash_units(log, log.episode_starts, ("actions", "rewards"))
    _, firsts, counts = np.unique(hashes, return_index=True, return_counts=True)
    ends = np.append(log.episode_starts, len(log))
    some = firsts[counts > 1]
    varied = [len(np.unique(log.rewards[ends[e] : ends[e + 1]])) >= _FEWEST_REWARDS for e in some]
    return float(counts[counts > 1][np.asarray(varied, dtype=bool)].sum() / log.n_episodes)


def _recurrence(log: Transitions, rows: Int[np.ndarray, " row"], units: Int[np.ndarray, " row"]) -> float:
    """Share of these rows whose observation a row of another unit holds too."""
    seen = hash_rows(log, ("observations",))[rows]
    pairs = np.unique(np.stack([seen, units.astype(np.uint64)]), axis=1)
    values, holders = np.unique(pairs[0], return_counts=True)
    return float(np.isin(seen, values[holders > 1]).mean())
