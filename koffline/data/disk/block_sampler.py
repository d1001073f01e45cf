"""Mini-batches from a log on disk: a pool of random blocks is read into memory, used
up, and replaced.

Reading a random row from a file takes milliseconds, a row of a block microseconds.
Blocks are visited in random order, each row once per epoch. A batch takes its rows from
different blocks in turn, so that rows that are neighbours in the log are rarely in the
same batch.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from koffline.data.columns import last_rows
from koffline.data.units import Part
from koffline.errors import ConfigError
from koffline.json_types import JsonObject

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
        wanted = block_rows or _usual_block_rows(pool_rows)
        size = min(wanted, max(sizes), pool_rows)
        self._blocks = [
            (shard, start, min(start + size, count))
            for shard, count in enumerate(sizes)
            for start in range(0, count, size)
        ]
        self._blocks_of_pool = min(max(1, pool_rows // size), len(self._blocks))
        self.block_rows = size
        self.pool_rows = self._blocks_of_pool * size
        part_text = None if part is None else repr(part)
        # what a state must agree with to be restored
        self._identity = [len(log), size, self._blocks_of_pool, seed, part_text]
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
        # A batch of several pieces begins in one pool and ends in another.
        pieces: list[dict[str, np.ndarray]] = []
        n_missing = count
        while n_missing:
            # a pool may have no row of the part; the log has at least one
            while self._drawn == len(self._order):
                self._pool += 1
                self._fill()
            rows = self._order[self._drawn : self._drawn + n_missing]
            piece = {
                name: column.take(rows, axis=0)
                for name, column in self._columns.items()
            }
            pieces.append(piece)
            self._drawn += len(rows)
            n_missing -= len(rows)
        if len(pieces) == 1:
            return pieces[0]
        return {
            name: np.concatenate([piece[name] for piece in pieces])
            for name in pieces[0]
        }

    def state_dict(self) -> JsonObject:
        """State as plain values; after ``load_state_dict`` the batches continue
        identically.
        """
        return {"of": self._identity, "pool": self._pool, "drawn": self._drawn}

    def load_state_dict(self, state: JsonObject) -> None:
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
        n_blocks = self._blocks_of_pool
        epoch, first = divmod(self._pool * n_blocks, len(self._blocks))
        # a pool may begin in one epoch and end in the next
        order = np.concatenate([self._order_in(epoch), self._order_in(epoch + 1)])
        # in the order of the shards, so that each file is opened once
        numbers = np.sort(order[first : first + n_blocks])
        generator = np.random.default_rng((self._seed, _ROWS, self._pool))
        turns = []
        n_rows = 0
        blocks = (self._blocks[number] for number in numbers)
        for shard, ranges in itertools.groupby(blocks, lambda block: block[0]):
            with self._log.open_shard(shard) as opened:
                for _, start, stop in ranges:
                    columns = self._read_block(opened, shard, start, stop)
                    self._put(columns, n_rows)
                    size = len(columns["rewards"])
                    n_rows += size
                    # A row's turn in (0, 1): every stretch of the pool has about one
                    # row of each block, in random order.
                    places = generator.permutation(size) + generator.random(size)
                    turns.append(places / max(size, 1))
        self._order = np.argsort(np.concatenate(turns))
        self._drawn = 0

    def _put(self, columns: dict[str, np.ndarray], place: int) -> None:
        """Copy a block's columns into the pool from row ``place`` on."""
        for name, values in columns.items():
            if name not in self._columns:
                shape = (self.pool_rows, *values.shape[1:])
                self._columns[name] = np.empty(shape, values.dtype)
            self._columns[name][place : place + len(values)] = values

    def _order_in(self, epoch: int) -> np.ndarray:
        """Numbers of all blocks in the random order of an epoch."""
        generator = np.random.default_rng((self._seed, _ORDER, epoch))
        return generator.permutation(len(self._blocks))

    def _read_block(
        self, opened: OpenShard, shard: int, start: int, stop: int
    ) -> dict[str, np.ndarray]:
        """Columns, `DRAWN` and ``next_actions``, of those rows of a block that belong
        to the part.

        The block is the rows from start to stop of the shard with this number.
        """
        n_rows = stop - start
        # With the row below, for the next action of the last row.
        last = min(stop + 1, self._log.shards[shard].rows)
        rows_read = opened.block(start, last)
        rows = np.arange(n_rows)
        if self._part is not None:
            rows = np.flatnonzero(self._part.holds(shard, rows_read.units[:n_rows]))
        columns = {name: getattr(rows_read, name).take(rows, axis=0) for name in DRAWN}
        # the next row in the same episode, else the row itself
        goes_on = ~last_rows(rows_read.columns)
        next_rows = rows + goes_on[rows]
        columns["next_actions"] = rows_read.actions.take(next_rows, axis=0)
        return columns


def _usual_block_rows(pool_rows: int) -> int:
    """Rows of a block by default, a compromise: many blocks per pool mix well, large
    blocks are read fast.
    """
    wanted = pool_rows // _WANTED_BLOCKS
    wanted = min(_MOST_BLOCK_ROWS, max(_LEAST_BLOCK_ROWS, wanted))
    return max(1, min(wanted, pool_rows // _LEAST_BLOCKS))
