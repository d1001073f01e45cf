"""Which episodes a long table holds, in eight bytes each, without holding its rows."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from koffline.data.table.values import first_seen_codes


@dataclass(frozen=True)
class EpisodeCensus:
    """Distinct episodes by a hash of their id: ``hashes`` sorted, with first appearance ``order`` and rows.

    ``contiguous`` says that no episode goes on after another one began. Two ids with one hash (never seen
    among fewer than a thousand million) only share a place.
    """

    hashes: np.ndarray  # (E,) uint64, ascending
    order: np.ndarray  # (E,) place in order of first appearance
    rows: np.ndarray  # (E,) rows of each
    contiguous: bool

    def places(self, array: Any) -> np.ndarray:
        """(N,) place of each row's episode in order of first appearance."""
        codes, found = first_seen_codes(array)
        return self.order[np.searchsorted(self.hashes, _hashes(found))][codes]

    def rows_in_order(self) -> np.ndarray:
        """(E,) rows of the episodes in order of first appearance."""
        counted = np.empty(len(self.rows), dtype=np.int64)
        counted[self.order] = self.rows
        return counted


class CensusTaker:
    """Collects runs of equal ids from batches in order."""

    def __init__(self) -> None:
        self._hashes: list[np.ndarray] = []
        self._rows: list[np.ndarray] = []
        self._last: np.uint64 | None = None

    def append(self, array: Any) -> None:
        """Count the next batch of the episode column."""
        codes, found = first_seen_codes(array)
        if not len(codes):
            return
        starts = np.flatnonzero(np.append(True, codes[1:] != codes[:-1]))
        hashes = _hashes(found)[codes[starts]]
        rows = np.diff(np.append(starts, len(codes)))
        if self._last is not None and hashes[0] == self._last:
            self._rows[-1][-1] += rows[0]
            hashes, rows = hashes[1:], rows[1:]
        if len(hashes):
            self._last = hashes[-1]
            self._hashes.append(hashes)
            self._rows.append(rows)

    def finish(self) -> EpisodeCensus:
        """The census of all batches."""
        runs = np.concatenate([np.zeros(0, np.uint64), *self._hashes])
        rows = np.concatenate([np.zeros(0, np.int64), *self._rows])
        hashes, first, label = np.unique(runs, return_index=True, return_inverse=True)
        order = np.empty(len(hashes), dtype=np.int64)
        order[np.argsort(first)] = np.arange(len(hashes))
        total = np.zeros(len(hashes), dtype=np.int64)
        np.add.at(total, label.reshape(-1), rows)
        return EpisodeCensus(hashes, order, total, len(hashes) == len(runs))


def _hashes(found: Any) -> np.ndarray:
    """(V,) uint64 of the ids, the same in every process."""
    digests = [hashlib.blake2b(repr(value).encode(), digest_size=8).digest() for value in found.to_pylist()]
    return np.frombuffer(b"".join(digests), dtype=np.uint64)
