"""The order in which blocks of a log on disk are visited: every row once in an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

_ORDER, _ROWS = 1, 2  # streams of random numbers of one seed


@dataclass(frozen=True)
class Fragment:
    """A block of a shard, rows ``start`` … ``stop`` − 1; of its rows in random order those in a range.

    The range is from the fraction ``lower`` of their number to ``upper``. seeds: of the random order.
    """

    shard: int
    start: int
    stop: int
    lower: float
    upper: float
    seeds: tuple[int, ...]

    def rows(self, mask: np.ndarray | None = None) -> np.ndarray:
        """Places within the block in random order, of those that the mask (B,) keeps."""
        count = self.stop - self.start
        order = np.random.default_rng(self.seeds).permutation(count)
        if mask is not None:
            order = order[mask[order]]
        return order[int(self.lower * len(order)) : int(self.upper * len(order))]


class BlockOrder:
    """Fragments by epoch and position, a function of the seed and of how the log is cut into shards.

    Each epoch visits all blocks in an order of its own. In the first one the ``slots`` blocks that come first
    are cut in two, at equal steps between nothing and all, and the second parts come later: slots that are
    filled with the first parts run empty one after the other and not all at once.
    """

    def __init__(self, shard_rows: Sequence[int], block_rows: int, slots: int, seed: int) -> None:
        self._rows = np.asarray(shard_rows, dtype=np.int64)
        self._block_rows, self._seed = block_rows, seed
        self._first = np.concatenate([[0], np.cumsum(-(-self._rows // block_rows))])
        self.blocks = int(self._first[-1])
        self.slots = min(slots, self.blocks)
        self._epoch = lru_cache(maxsize=3)(self._make_epoch)

    def length(self, epoch: int) -> int:
        """Number of fragments."""
        return self.blocks + (self.slots - 1 if epoch == 0 else 0)

    def fragment(self, epoch: int, position: int) -> Fragment:
        """The fragment at a place of an epoch."""
        blocks, bounds = self._epoch(epoch)
        block = int(blocks[position])
        shard = int(np.searchsorted(self._first, block, side="right")) - 1
        start = (block - int(self._first[shard])) * self._block_rows
        stop = min(start + self._block_rows, int(self._rows[shard]))
        lower, upper = (float(bound) for bound in bounds[position])
        return Fragment(shard, start, stop, lower, upper, (self._seed, _ROWS, epoch, block))

    def _make_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(L,) blocks and (L, 2) bounds of the ranges of their rows."""
        generator = np.random.default_rng((self._seed, _ORDER, epoch))
        blocks = generator.permutation(self.blocks)
        bounds = np.tile([0.0, 1.0], (len(blocks), 1))
        if epoch == 0:
            cuts = np.arange(1, self.slots) / self.slots
            bounds[: self.slots - 1, 1] = cuts
            rest = np.concatenate([blocks[self.slots :], blocks[: self.slots - 1]])
            rest_bounds = np.concatenate([bounds[self.slots :], np.stack([cuts, np.ones_like(cuts)], axis=1)])
            later = generator.permutation(len(rest))
            blocks = np.concatenate([blocks[: self.slots], rest[later]])
            bounds = np.concatenate([bounds[: self.slots], rest_bounds[later]])
        return blocks, bounds
