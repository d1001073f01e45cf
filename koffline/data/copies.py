"""Copies of a log's units (episodes, or rows without episodes): they add weight but no
evidence.

Equal units are copies, unless states recur all over the log, as in a small grid: there
units can be equal by chance.
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
    episodes can occur by chance; then every unit is kept. ``row_of (N,)``: of every row
    of the original log the one that stands for it: the row itself, or of copies the
    same row of the first one.
    """

    transitions: Transitions
    units: int
    kept: Int[np.ndarray, " unit"]
    row_of: Int[np.ndarray, " row"]

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
    contents = hash_units(log)
    if log.clusters is not None:
        contents = contents ^ unit_hash(0, 5, log.clusters[starts])
    _, firsts, kinds = np.unique(contents, return_index=True, return_inverse=True)
    rows = np.flatnonzero(np.isin(log.units, firsts))
    no_copies = len(firsts) == len(starts)
    if no_copies or (len(firsts) > 1 and _recurrence(log, rows) > _BY_CHANCE):
        return DistinctLog(
            log, len(starts), np.arange(len(starts)), np.arange(len(log))
        )
    original = starts[firsts[kinds.reshape(-1)]]  # first row of each unit's first copy
    row_of = np.arange(len(log)) + (original - starts)[log.units]
    total = np.bincount(row_of, weights=log.row_weights, minlength=len(log))
    return DistinctLog(
        transitions=log.select(rows).replace(weights=total[rows]),
        units=len(starts),
        kept=np.sort(firsts),
        row_of=row_of,
    )


def hash_units(log: Transitions) -> UInt64[np.ndarray, " unit"]:
    """Hash of each unit from its ordered rows, flags, log-probabilities and masks; not
    from its weight or its cluster.
    """
    starts = log.unit_starts
    terminated = np.asarray(log.terminated, dtype=np.uint64)
    flags = terminated * np.uint64(2) + np.asarray(log.truncated)
    hashes = hash_rows(log) ^ unit_hash(0, 2, flags)
    if log.behavior_log_probabilities is not None:
        numbers = np.asarray(log.behavior_log_probabilities, dtype=np.float64)
        bits = (numbers + 0.0).view(np.uint64)  # 0.0 and −0.0 are equal
        hashes ^= unit_hash(0, 3, bits)
    if log.action_mask is not None:
        hashes ^= hash_rows(log, MASKS)
    # Odd factors are invertible, so that the order of the rows matters.
    steps = np.arange(len(log)) - starts[log.units]
    odd = 2 * steps.astype(np.uint64) + np.uint64(1)
    lengths = np.bincount(log.units)
    return np.add.reduceat(hashes * odd, starts) ^ unit_hash(0, 4, lengths)


def _recurrence(log: Transitions, rows: Int[np.ndarray, " row"]) -> float:
    """Share of the rows whose observation also occurs in another unit."""
    count = RecurrenceCount(share=1.0)
    seen = hash_rows(log, ("observations",))[rows]
    count.add(seen, log.units[rows].astype(np.uint64))
    return count.recurring


class RecurrenceCount:
    """Counts, block by block, the rows whose observation also occurs in another unit,
    among a ``share`` of the values of observations.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._values = np.zeros(0, dtype=np.uint64)
        self._rows = np.zeros(0, dtype=np.int64)
        # the smallest and the largest unit of each value: equal if there is one
        self._smallest = np.zeros(0, dtype=np.uint64)
        self._largest = np.zeros(0, dtype=np.uint64)

    @property
    def recurring(self) -> float:
        """Share of the counted rows whose observation also occurs in another unit."""
        total = int(self._rows.sum())
        if not total:
            return 0.0
        is_shared = self._smallest != self._largest
        return float(self._rows[is_shared].sum()) / total

    @property
    def allows_chance(self) -> bool:
        """Whether units may be equal by chance."""
        return self.recurring > _BY_CHANCE

    def add(
        self, values: UInt64[np.ndarray, " row"], units: UInt64[np.ndarray, " row"]
    ) -> None:
        """Count rows with hashes of their observations; units: numbers or contents."""
        if self._share < 1.0:
            # a hash of the hash, because rounded sums of small numbers are not uniform
            is_counted = unit_hash(0, 6, values) * 2.0**-64 < self._share
            values = values[is_counted]
            units = units[is_counted]
        all_values = np.concatenate([self._values, values])
        rows = np.concatenate([self._rows, np.ones(len(values), dtype=np.int64)])
        smallest = np.concatenate([self._smallest, units])
        largest = np.concatenate([self._largest, units])
        if not len(all_values):
            return
        order = np.argsort(all_values, kind="stable")
        ordered = all_values[order]
        firsts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
        self._values = ordered[firsts]
        self._rows = np.add.reduceat(rows[order], firsts)
        self._smallest = np.minimum.reduceat(smallest[order], firsts)
        self._largest = np.maximum.reduceat(largest[order], firsts)


def join_clusters(
    clusters: Int[np.ndarray, " unit"], contents: UInt64[np.ndarray, " unit"]
) -> Int[np.ndarray, " unit"]:
    """Numbers (U,) of the units' clusters, in which clusters that hold equal units are
    one: it has the smallest of their numbers.

    Two clusters with the same episode are not independent: one was written twice.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    names, cluster_of = np.unique(clusters, return_inverse=True)
    kinds, kind_of = np.unique(contents, return_inverse=True)
    if len(kinds) == len(contents):
        return clusters
    # a graph of clusters and of kinds of units, with an edge for every unit
    size = len(names) + len(kinds)
    ends = (cluster_of.reshape(-1), len(names) + kind_of.reshape(-1))
    edges = coo_array((np.ones(len(contents)), ends), shape=(size, size))
    _, component_of = connected_components(edges, directed=False)
    smallest = np.full(int(component_of.max()) + 1, len(names))
    np.minimum.at(smallest, component_of[: len(names)], np.arange(len(names)))
    return names[smallest[component_of[: len(names)]]][cluster_of.reshape(-1)]


def with_joined_clusters(log: Transitions) -> Transitions:
    """The log with clusters that hold equal units as one (`join_clusters`); without
    clusters, without equal units, or where these may be chance, the log itself.
    """
    if log.clusters is None:
        return log
    contents = hash_units(log)
    _, firsts = np.unique(contents, return_index=True)
    if len(firsts) == len(contents):
        return log
    rows = np.flatnonzero(np.isin(log.units, firsts))
    if len(firsts) > 1 and _recurrence(log, rows) > _BY_CHANCE:
        return log
    before = log.clusters[log.unit_starts]
    joined = join_clusters(before, contents)
    if np.array_equal(joined, before):
        return log
    return log.with_clusters(joined[log.units])
