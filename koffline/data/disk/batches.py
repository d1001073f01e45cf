"""Mini-batches from a log on disk: a pool of random blocks in memory, which are replaced one by one.

A row at random from a file costs milliseconds, a row of a block microseconds. Blocks are visited in random
order, every row once in an epoch; each block waits in a slot of the pool, its rows shuffled, until all of
them have been drawn. A batch takes its rows from different slots in turn, so that rows that lie side by side
in the log hardly ever meet in a batch.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from koffline.data.disk.files import OpenShard, naming
from koffline.data.disk.samples import Part
from koffline.data.transitions import ROW_COLUMNS, Transitions
from koffline.errors import ConfigError

if TYPE_CHECKING:
    from koffline.data.disk.log import LazyTransitions

# Smaller blocks mix better, larger ones are read faster.
_MOST_BLOCK_ROWS, _LEAST_BLOCK_ROWS = 4096, 1024
_WANTED_SLOTS, _LEAST_SLOTS = 256, 64
_DEFAULT_POOL = 2**29
_MOST_OPEN = 32  # shards
_AHEAD = 2  # blocks that are read ahead of the draws
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
            blocks = np.append(blocks, blocks[: self.slots - 1])
            bounds = np.append(bounds, np.stack([cuts, np.ones_like(cuts)], axis=1), axis=0)
            later = self.slots + generator.permutation(len(blocks) - self.slots)
            blocks[self.slots :], bounds[self.slots :] = blocks[later], bounds[later]
        return blocks, bounds


class BlockSampler:
    """Draws mini-batches; every row comes once in an epoch, and the pool always has rows of many blocks.

    memory: bytes of the pool, or pool_rows: its rows; block_rows: rows read at once. part: draws from that
    side of a split by units alone. The same seed on the same shards gives the same batches. Raises
    DataError for a shard that cannot be read.
    """

    def __init__(
        self,
        log: LazyTransitions,
        seed: int,
        *,
        memory: int | None = None,
        pool_rows: int | None = None,
        block_rows: int | None = None,
        part: Part | None = None,
        next_actions: bool = False,
    ) -> None:
        self._log, self._part, self._next_actions = log, part, next_actions
        rows = pool_rows or log.block_rows_for(memory or _DEFAULT_POOL)
        sizes = [shard.rows for shard in log.shards]
        # a size that gives a pool enough blocks to mix, and blocks enough rows to be read fast
        wanted = min(_MOST_BLOCK_ROWS, max(_LEAST_BLOCK_ROWS, rows // _WANTED_SLOTS))
        block = min(block_rows or max(1, min(wanted, rows // _LEAST_SLOTS)), max(sizes), rows)
        self._order = BlockOrder(sizes, block, max(1, rows // block), seed)
        self.block_rows, self._slots = block, self._order.slots
        self.pool_rows = self._slots * block
        self._generator = np.random.default_rng((seed, 0))
        self._identity = [len(log), block, self._slots, seed, None if part is None else repr(part)]
        self._columns: dict[str, np.ndarray] = {}
        self._held = np.zeros((self._slots, 2), dtype=np.int64)  # epoch and position of what a slot holds
        self._lengths = np.zeros(self._slots, dtype=np.int64)
        self._cursors = np.zeros(self._slots, dtype=np.int64)
        self._turns, self._turn = self._generator.permutation(self._slots), 0
        self._ahead: deque[tuple[int, int, Future[dict[str, np.ndarray]]]] = deque()
        self._reader = _ShardReader(log)  # for the one thread below alone
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="blocks")
        self._next = (0, 0)  # what is read next: epoch and position
        self._filled = False

    def draw(self, count: int) -> dict[str, np.ndarray]:
        """``count`` rows: their columns by name. Raises DataError where a shard cannot be read.

        ``shards`` and ``rows`` (B,) say where they are from; ``next_actions`` (B, ...), where asked for, are
        those of the row below in the same episode, else the row's own.
        """
        self._fill()
        pieces: list[dict[str, np.ndarray]] = []
        waiting: list[np.ndarray] = []
        while count:
            slots = self._turns[self._turn : self._turn + count]
            waiting.append(slots * self.block_rows + self._cursors[slots])
            self._cursors[slots] += 1
            count -= len(slots)
            self._turn += len(slots)
            if self._turn == self._slots:
                self._turns, self._turn = self._generator.permutation(self._slots), 0
            empty = slots[self._cursors[slots] == self._lengths[slots]]
            if empty.size or not count:
                rows, waiting = np.concatenate(waiting), []  # before what they point at is replaced
                pieces.append({name: column.take(rows, axis=0) for name, column in self._columns.items()})
            for slot in empty:
                self._refill(int(slot))
        if len(pieces) == 1:
            return pieces[0]
        return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers from which ``load_state_dict`` goes on with the very same batches."""
        self._fill()
        upcoming = self._ahead[0][:2] if self._ahead else self._next
        return {
            "of": self._identity,
            "next": list(upcoming),
            "held": self._held.tolist(),
            "cursors": self._cursors.tolist(),
            "turns": self._turns.tolist(),
            "turn": self._turn,
            "generator": self._generator.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put the pool back to how it was. Raises ConfigError for the state of another sampler."""
        if state.get("of") != self._identity:
            raise ConfigError("the batches were drawn from another log or pool; start again with this one")
        self._drop_ahead()
        self._next = (int(state["next"][0]), int(state["next"][1]))
        for slot, (epoch, position) in enumerate(state["held"]):
            fragment = self._order.fragment(epoch, position)
            self._put(slot, epoch, position, self._thread.submit(self._read, fragment).result())
        self._cursors[:] = state["cursors"]
        self._turns, self._turn = np.asarray(state["turns"], dtype=np.int64), int(state["turn"])
        self._generator.bit_generator.state = state["generator"]
        self._filled = True

    def close(self) -> None:
        """Stop reading ahead and close the files."""
        self._drop_ahead()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._reader.close()

    def _fill(self) -> None:
        for slot in range(self._slots if not self._filled else 0):
            self._refill(slot)
        self._filled = True

    def _refill(self, slot: int) -> None:
        """Put the next block that has rows into a slot; reading goes on behind it."""
        # an epoch's worth of blocks without a row is a part without rows
        for _ in range(2 * self._order.length(0) + 1):
            self._read_ahead()
            epoch, position, coming = self._ahead.popleft()
            columns = coming.result()
            self._read_ahead()
            if len(columns["rows"]):
                self._put(slot, epoch, position, columns)
                return
        raise ConfigError("no row is left in that part of the log; hold out another share of it")

    def _read_ahead(self) -> None:
        while len(self._ahead) < _AHEAD:
            epoch, position = self._next
            fragment = self._order.fragment(epoch, position)
            self._ahead.append((epoch, position, self._thread.submit(self._read, fragment)))
            last = position + 1 == self._order.length(epoch)
            self._next = (epoch + 1, 0) if last else (epoch, position + 1)

    def _drop_ahead(self) -> None:
        while self._ahead:
            *_, coming = self._ahead.popleft()
            if not coming.cancel():
                coming.exception()

    def _read(self, fragment: Fragment) -> dict[str, np.ndarray]:
        """Shuffled columns of a fragment; runs in the reading thread."""
        count = fragment.stop - fragment.start
        below = int(self._next_actions and fragment.stop < self._log.shards[fragment.shard].rows)
        block = self._reader.read_rows(fragment.shard, fragment.start, fragment.stop + below)
        mask = None if self._part is None else self._part.holds(fragment.shard, block.units[:count])
        rows, held = fragment.rows(mask), block.columns
        columns = {name: held[name].take(rows, axis=0) for name in ROW_COLUMNS if name in held}
        if self._next_actions:
            goes_on = np.zeros(len(block), dtype=np.bool_)  # whether the row below is the next step
            if block.steps is not None:
                goes_on[:-1] = block.steps[1:] > 0
            columns["next_actions"] = block.actions.take(rows + goes_on[rows], axis=0)
        columns["shards"] = np.full(len(rows), fragment.shard)
        columns["rows"] = rows + fragment.start
        return columns

    def _put(self, slot: int, epoch: int, position: int, columns: Mapping[str, np.ndarray]) -> None:
        start, count = slot * self.block_rows, len(columns["rows"])
        for name, values in columns.items():
            if name not in self._columns:
                self._columns[name] = np.empty((self.pool_rows, *values.shape[1:]), dtype=values.dtype)
            self._columns[name][start : start + count] = values
        self._held[slot], self._lengths[slot], self._cursors[slot] = (epoch, position), count, 0


class _ShardReader:
    """Rows of a log, from files of which the last ones stay open; for one thread at a time."""

    def __init__(self, log: LazyTransitions) -> None:
        self._log = log
        self._open: OrderedDict[int, tuple[OpenShard, contextlib.ExitStack]] = OrderedDict()

    def read_rows(self, shard: int, start: int, stop: int) -> Transitions:
        """Rows start … stop − 1 of one shard. Raises DataError naming the shard."""
        if shard not in self._open:
            self.close(keep=_MOST_OPEN - 1)
            stack = contextlib.ExitStack()
            self._open[shard] = stack.enter_context(self._log.open_shard(shard)), stack
        self._open.move_to_end(shard)
        with naming(self._log.shards[shard].name):
            return self._log.block_of(self._open[shard][0], shard, start, stop)

    def close(self, keep: int = 0) -> None:
        """Close files, but for the last ``keep``."""
        while len(self._open) > keep:
            _, (_, stack) = self._open.popitem(last=False)
            stack.close()
