"""How many rows of a log equal an earlier one, in bounded memory."""

from __future__ import annotations

import numpy as np

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
        self._waiting_rows = 0

    def add(self, block: RowBlock) -> None:
        """More rows."""
        self._wait_for(hash_rows(block))

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
            self._waiting, self._waiting_rows = [], 0
            self._join(hashes, counts)

    def count(self) -> int:
        """Rows that equal an earlier one; an estimate where ``level`` is above 0."""
        self.settle()
        return int(self._counts.sum() - len(self._counts)) << self.level

    def _wait_for(self, hashes: np.ndarray) -> None:
        self._waiting.append(hashes[_kept(hashes, self.level)])
        self._waiting_rows += len(self._waiting[-1])
        if self._waiting_rows > max(_MERGED_AT_ONCE, len(self._hashes)):
            self.settle()

    def _join(self, hashes: np.ndarray, counts: np.ndarray) -> None:
        both = np.concatenate([self._hashes, hashes])
        self._hashes, places = np.unique(both, return_inverse=True)
        weights = np.concatenate([self._counts, counts])
        self._counts = np.bincount(places.reshape(-1), weights=weights, minlength=0).astype(np.int64)
        self._keep(_kept(self._hashes, self.level))
        while self._limit is not None and len(self._hashes) > self._limit:
            self.level += 1
            self._keep(_kept(self._hashes, self.level))

    def _keep(self, kept: np.ndarray) -> None:
        self._hashes, self._counts = self._hashes[kept], self._counts[kept]


def _kept(hashes: np.ndarray, level: int) -> np.ndarray:
    return hashes <= np.uint64(2**64 - 1 >> level)


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
