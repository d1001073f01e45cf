"""Copies of a log's units (episodes, or rows without episodes): they add weight but no
evidence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, UInt64

from koffline.data.columns import MASKS
from koffline.data.hashing import hash_rows, unit_hash
from koffline.data.transitions import Transitions
from koffline.errors import counted

_BY_CHANCE = 0.05  # share of recurring states above which equal episodes may be chance


@dataclass(frozen=True, eq=False)
class DistinctLog:
    """A log without copies: one unit (episode, or row without episodes) of each kind,
    with all its weight.

    ``units``: number of units in the original log. ``kept``: numbers of the units that
    ``transitions`` holds. If states recur all over the log, as in a small grid, equal
    episodes can occur by chance; then every unit is kept.
    """

    transitions: Transitions
    units: int
    kept: Int[np.ndarray, " unit"]

    @property
    def notes(self) -> list[str]:
        """Note for the user if copies were merged."""
        if len(self.kept) == self.units:
            return []
        kind = "episode" if self.transitions.has_episodes else "row"
        return [
            f"The log has {counted(self.units, kind)}, only {len(self.kept)} of them"
            " different: copies count as weight and not as evidence."
        ]


def without_copies(log: Transitions) -> DistinctLog:
    """Merge equal episodes (or rows, without episodes) into one with the weight of
    all.
    """
    starts = log.unit_starts
    _, firsts, kinds = np.unique(
        _hash_units(log, starts), return_index=True, return_inverse=True
    )
    rows = np.flatnonzero(np.isin(log.units, firsts))
    no_copies = len(firsts) == len(starts)
    if no_copies or (len(firsts) > 1 and _recurrence(log, rows) > _BY_CHANCE):
        return DistinctLog(log, len(starts), np.arange(len(starts)))
    original = starts[firsts[kinds.reshape(-1)]]  # first row of each unit's first copy
    same_row = np.arange(len(log)) + (original - starts)[log.units]
    total = np.bincount(same_row, weights=log.row_weights, minlength=len(log))
    return DistinctLog(
        log.select(rows).replace(weights=total[rows]), len(starts), np.sort(firsts)
    )


def _hash_units(
    log: Transitions, starts: Int[np.ndarray, " unit"]
) -> UInt64[np.ndarray, " unit"]:
    """Hash of each unit from its ordered rows, flags, log-probabilities, cluster
    and masks.

    starts: the first row of each unit.
    """
    terminated = np.asarray(log.terminated, dtype=np.uint64)
    flags = terminated * np.uint64(2) + np.asarray(log.truncated)
    hashes = hash_rows(log) ^ unit_hash(0, 2, flags)
    if log.behavior_log_probabilities is not None:
        numbers = np.asarray(log.behavior_log_probabilities, dtype=np.float64)
        bits = (numbers + 0.0).view(np.uint64)  # 0.0 and −0.0 are equal
        hashes ^= unit_hash(0, 3, bits)
    if log.clusters is not None:
        hashes ^= unit_hash(0, 5, log.clusters)
    if log.action_mask is not None:
        hashes ^= hash_rows(log, MASKS)
    # Odd factors are invertible, so that the order of the rows matters.
    steps = np.arange(len(log)) - starts[log.units]
    odd = 2 * steps.astype(np.uint64) + np.uint64(1)
    lengths = np.bincount(log.units)
    return np.add.reduceat(hashes * odd, starts) ^ unit_hash(0, 4, lengths)


def _recurrence(log: Transitions, rows: Int[np.ndarray, " row"]) -> float:
    """Share of the rows whose observation also occurs in another unit."""
    seen = hash_rows(log, ("observations",))[rows]
    pairs = np.unique(np.stack([seen, log.units[rows].astype(np.uint64)]), axis=1)
    values, holders = np.unique(pairs[0], return_counts=True)
    return float(np.isin(seen, values[holders > 1]).mean())
