"""Mini-batches from a log on disk: a pool of random blocks is read into memory, used
up, and replaced.

Reading a random row from a file takes milliseconds, a row of a block microseconds.
Blocks are visited in random order, each row once per epoch. A batch takes its rows from
different blocks in turn, so that rows that are neighbours in the log are rarely in the
same batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from koffline.data.columns import last_rows
from koffline.data.units import Part
from koffline.errors import ConfigError

if TYPE_CHECKING:
    from koffline.data.disk.log import LazyTransitions, OpenShard

# Smaller blocks mix better, larger ones are read faster.
_MOST_BLOCK_ROWS = 4096
_LEAST_BLOCK_ROWS = 1024
# blocks per pool
_WANTED_BLOCKS = 256
_LEAST_BLOCKS = 64
# columns of mini-batches
DRAWN = (
    "observations",
    "actions",
    "rewards",
    "next_observations",
    "terminated",
)
# independent random streams of one seed
_ORDER = 1
_ROWS = 2


class BlockSampler:
    """Draws mini-batches from a log on disk: each row once per epoch, each batch from
    many blocks.

    pool_rows: rows of the pool; block_rows: rows read at once. part: draw only from
    that side of a split by units. A pool depends on the seed, its number and the
    shards: the same seed on the same shards gives the same batches. Raises DataError
    for a shard that cannot be read.
    """

    def __init__(
        self,
        log: LazyTransitions,
        seed: int,
        *,
        pool_rows: int,
        block_rows: int | None = None,
        part: Part | None = None,
    ) -> None:
        self._log = log
        self._seed = seed
        self._part = part
        sizes = [shard.rows for shard in log.shards]
        # compromise: many blocks per pool mix well, large blocks are read fast
        wanted = min(
            _MOST_BLOCK_ROWS, max(_LEAST_BLOCK_ROWS, pool_rows // _WANTED_BLOCKS)
        )
        size = min(
            block_rows or max(1, min(wanted, pool_rows // _LEAST_BLOCKS)),
            max(sizes),
            pool_rows,
        )
        self._blocks = [
            (shard, start, min(start + size, count))
            for shard, count in enumerate(sizes)
            for start in range(0, count, size)
        ]
        self._in_pool = min(max(1, pool_rows // size), len(self._blocks))
        self.block_rows = size
        self.pool_rows = self._in_pool * size
        self._identity = [
            len(log),
            size,
            self._in_pool,
            seed,
            None if part is None else repr(part),
        ]
        self._columns: dict[str, np.ndarray] = {}
        # number of the pool, and of its rows drawn so far
        self._pool = -1
        self._drawn = 0
        self._order = np.zeros(0, dtype=np.int64)  # of the rows in the pool

    def draw(self, count: int) -> dict[str, np.ndarray]:
        """Draw ``count`` rows, as columns of d3rlpy's mini-batches. Raises DataError
        for an unreadable shard.

        ``next_actions`` (B, ...): actions of the next row in the same episode, else the
        row's own.
        """
        pieces: list[dict[str, np.ndarray]] = []
        while count:
            # a pool may have no row of the part; the log has some
            while self._drawn == len(self._order):
                self._pool += 1
                self._fill()
            rows = self._order[self._drawn : self._drawn + count]
            pieces.append(
                {
                    name: column.take(rows, axis=0)
                    for name, column in self._columns.items()
                }
            )
            self._drawn += len(rows)
            count -= len(rows)
        if len(pieces) == 1:
            return pieces[0]
        return {
            name: np.concatenate([piece[name] for piece in pieces])
            for name in pieces[0]
        }

    def state_dict(self) -> dict[str, Any]:
        """State as plain values; after ``load_state_dict`` the batches continue
        identically.
        """
        return {"of": self._identity, "pool": self._pool, "drawn": self._drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the pool and position.

        Raises ConfigError for the state of another sampler.
        """
        if state.get("of") != self._identity or "drawn" not in state:
            raise ConfigError(
                "the batches were drawn from another log or pool; start again with"
                " this one"
            )
        self._pool = int(state["pool"])
        self._order = self._order[:0]
        if self._pool >= 0:
            self._fill()
        self._drawn = int(state["drawn"])

    def _fill(self) -> None:
        """Read the blocks of the pool and shuffle its rows."""
        epoch, first = divmod(self._pool * self._in_pool, len(self._blocks))
        # a pool may begin in one epoch and end in the next
        order = np.concatenate([self._order_in(epoch), self._order_in(epoch + 1)])
        # each file is opened once
        chosen = np.sort(order[first : first + self._in_pool])
        generator = np.random.default_rng((self._seed, _ROWS, self._pool))
        turns = []
        count = 0
        blocks = (self._blocks[block] for block in chosen)
        for shard, ranges in itertools.groupby(blocks, lambda block: block[0]):
            with self._log.open_shard(shard) as opened:
                for _, start, stop in ranges:
                    columns = self._read(opened, shard, start, stop)
                    size = len(columns["rewards"])
                    for name, values in columns.items():
                        if name not in self._columns:
                            self._columns[name] = np.empty(
                                (self.pool_rows, *values.shape[1:]), values.dtype
                            )
                        self._columns[name][count : count + size] = values
                    # every stretch of the pool has about one row of each block, in
                    # random order
                    places = generator.permutation(size) + generator.random(size)
                    turns.append(places / max(size, 1))
                    count += size
        self._order = np.argsort(np.concatenate(turns))
        self._drawn = 0

    def _order_in(self, epoch: int) -> np.ndarray:
        """Numbers of all blocks in the random order of an epoch."""
        generator = np.random.default_rng((self._seed, _ORDER, epoch))
        return generator.permutation(len(self._blocks))

    def _read(
        self, opened: OpenShard, shard: int, start: int, stop: int
    ) -> dict[str, np.ndarray]:
        """Columns of those rows of a block that belong to the part."""
        count = stop - start
        below = int(stop < self._log.shards[shard].rows)
        block = opened.block(start, stop + below)
        rows = np.arange(count)
        if self._part is not None:
            rows = np.flatnonzero(self._part.holds(shard, block.units[:count]))
        columns = {name: getattr(block, name).take(rows, axis=0) for name in DRAWN}
        goes_on = ~last_rows(block.columns)
        return {
            **columns,
            "next_actions": block.actions.take(rows + goes_on[rows], axis=0),
        }
