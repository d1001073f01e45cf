"""A log on disk: paths and metadata, read by blocks of rows. ``open_transitions(…, lazy=True)`` gives it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from koffline.data import remote
from koffline.data.disk.flat_files import BLOCK_BYTES, Column, FlatShard, OpenShard, block_rows
from koffline.data.disk.shards import ShardInfo
from koffline.data.row_block import RowBlock, check_joined, checked_block
from koffline.data.spaces import ActionSpace
from koffline.data.transitions import Metadata, Transitions
from koffline.data.unit_hash import unit_hash
from koffline.errors import DataError
from koffline.store.files import reading
from koffline.untrusted.limits import check_memory

__all__ = ["LazyTransitions", "RowBlock", "ShardInfo", "unit_hash"]


@dataclass(frozen=True, eq=False, repr=False)
class LazyTransitions:
    """A log that stays on disk: N rows in shards, each checked like ``Transitions`` when it is read.

    Holds names and metadata only, so it is small, can be pickled and sent to other processes and machines
    that see the same files. An episode never crosses shards.
    """

    shards: tuple[ShardInfo, ...]
    action_space: ActionSpace
    has_episodes: bool
    metadata: Metadata
    files: tuple[FlatShard, ...]

    def __len__(self) -> int:
        return sum(shard.rows for shard in self.shards)

    def __getstate__(self) -> dict[str, Any]:
        """Whoever receives it may work in another folder: paths are sent whole."""
        shards = tuple(dataclasses.replace(shard, name=remote.absolute(shard.name)) for shard in self.shards)
        return {**vars(self), "shards": shards}

    def __repr__(self) -> str:
        episodes = f"{self.n_episodes} episodes" if self.has_episodes else "no episodes"
        count = len(self.shards)
        return (
            f"LazyTransitions({len(self)} rows in {count} shard{'s' if count > 1 else ''}, {episodes}, "
            f"observations {self.observation_shape} {self.observation_dtype}, {self.action_space})"
        )

    @property
    def columns(self) -> Mapping[str, Column]:
        """Dtype and row shape of each column that the log has."""
        return self.files[0].columns

    @property
    def observation_shape(self) -> tuple[int, ...]:
        """Shape of one observation."""
        return self.columns["observations"].shape

    @property
    def observation_dtype(self) -> np.dtype:
        """Dtype of observations: float32, float64 or uint8."""
        return np.dtype(self.columns["observations"].dtype)

    @property
    def n_episodes(self) -> int:
        """Number of episodes; 0 when there are none."""
        return sum(shard.episodes for shard in self.shards) if self.has_episodes else 0

    @property
    def has_weights(self) -> bool:
        """Whether rows have weights."""
        return "weights" in self.columns

    @property
    def has_log_probabilities(self) -> bool:
        """Whether rows have the behaviour's log-probabilities."""
        return "behavior_log_probabilities" in self.columns

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in memory, its step and unit included."""
        derived = {"episode_ids", "steps"}
        kept = sum(column.row_bytes for name, column in self.columns.items() if name not in derived)
        return kept + (8 if self.has_episodes else 0) + 8

    def block_rows_for(self, memory_bytes: int) -> int:
        """How many rows fit so much memory, at least one."""
        return max(1, int(memory_bytes) // self.row_bytes)

    def blocks(self, block_rows: int | None = None) -> Iterator[RowBlock]:
        """All rows in order, by blocks that do not cross shards."""
        for shard in range(len(self.shards)):
            yield from self.shard_blocks(shard, block_rows)

    def shard_blocks(self, shard: int, block_rows: int | None = None) -> Iterator[RowBlock]:
        """The rows of one shard in order. Raises DataError naming the shard and the row that is wrong."""
        size = self.block_rows_for(BLOCK_BYTES) if block_rows is None else block_rows
        if size < 1:
            raise DataError(f"block_rows is {block_rows}; give at least one row")
        rows, last = self.shards[shard].rows, None
        with self.open_shard(shard) as opened:
            for start in range(0, rows, size):
                block = self.block_of(opened, shard, start, min(start + size, rows))
                if last is not None:
                    check_joined(last, block)
                yield block
                last = block

    def read_rows(self, shard: int, start: int, stop: int) -> RowBlock:
        """Rows start … stop − 1 of one shard. Raises DataError."""
        rows = self.shards[shard].rows
        if not 0 <= start < stop <= rows:
            raise DataError(f"rows {start} … {stop} of {self.shards[shard].name}, which has {rows}")
        with self.open_shard(shard) as opened:
            return self.block_of(opened, shard, start, stop)

    def load(self) -> Transitions:
        """The whole log in memory; episodes are numbered 0, 1, 2, … . Raises DataError."""
        kept = sum(column.row_bytes for column in self.columns.values()) + 16
        with reading(self.metadata.source or self.shards[0].name, "data"):
            check_memory(len(self) * kept)
        held = {
            name: np.empty((len(self), *column.shape), column.dtype) for name, column in self.columns.items()
        }
        held.setdefault("truncated", np.empty(len(self), dtype=np.bool_))
        if self.has_episodes:
            held["steps"] = np.empty(len(self), dtype=np.int64)
            held["episode_ids"] = np.empty(len(self), dtype=np.int64)
        row = episode = 0
        for shard, info in enumerate(self.shards):
            for block in self.shard_blocks(shard):
                rows = slice(row, row + len(block))
                for name in held:
                    held[name][rows] = (
                        block.units + episode if name == "episode_ids" else getattr(block, name)
                    )
                row += len(block)
            episode += info.episodes
        return Transitions(**held, action_space=self.action_space, metadata=self.metadata)

    @cached_property
    def sha256(self) -> str:
        """Digest of the rows, the same as ``Transitions.sha256`` of the loaded log, however it is cut.

        Recorded in the manifest of a shard folder; else computed in one pass, column by column.
        """
        return self.metadata.sha256 or self.compute_sha256()

    def compute_sha256(self) -> str:
        """The digest from the rows themselves, whatever the manifest says."""
        digest = hashlib.sha256()
        names = {*self.columns, "truncated"} - {"episode_ids", "steps"}
        for name in sorted(names | ({"steps"} if self.has_episodes else set())):
            column = self.columns.get(name, Column(name, "int64" if name == "steps" else "bool"))
            dtype = np.dtype("<f8") if np.dtype(column.dtype).kind == "f" else np.dtype(column.dtype)
            shape = (len(self), *column.shape)
            digest.update(f"{name}{shape}{dtype.kind};".encode())
            for part in self._column_parts(name):
                digest.update(np.ascontiguousarray(part, dtype=dtype.newbyteorder("<")).data)
        return digest.hexdigest()

    def _column_parts(self, name: str) -> Iterator[np.ndarray]:
        size = block_rows(self.columns.get(name, self.columns["rewards"]))
        for shard, info in enumerate(self.shards):
            with self.open_shard(shard) as opened:
                for start in range(0, info.rows, size):
                    stop = min(start + size, info.rows)
                    if name == "steps":
                        steps, _ = opened.places(start, stop)
                        assert steps is not None, "asked only of a log with episodes"
                        yield steps
                    elif name == "truncated":
                        yield opened.truncated(start, stop)
                    else:
                        yield opened.column(name, start, stop)

    @contextlib.contextmanager
    def open_shard(self, shard: int) -> Iterator[OpenShard]:
        """One shard open for several reads. Raises DataError naming it, also for errors inside the block."""
        name = self.shards[shard].name
        with naming(name), remote.local_file(name) as path, self.files[shard].open(path, name) as opened:
            yield opened

    def block_of(self, opened: OpenShard, shard: int, start: int, stop: int) -> RowBlock:
        """Checked rows start … stop − 1 of an open shard. Raises DataError."""
        steps, units = opened.places(start, stop)
        block = checked_block(opened.columns(start, stop), steps, units, self.action_space, shard, start)
        self._check_ends(block)
        return block

    def _check_ends(self, block: RowBlock) -> None:
        """A shard begins with the first step of its first episode and counts as many as were promised."""
        if block.steps is None:
            return
        info = self.shards[block.shard]
        if block.start == 0 and (block.steps[0] != 0 or block.units[0] != 0):
            raise DataError("row 0 is no first step of an episode; write the shard again")
        if block.start + len(block) == info.rows and block.units[-1] != info.episodes - 1:
            raise DataError(
                f"there are {block.units[-1] + 1} episodes, {info.episodes} were promised; "
                "write the shard again"
            )


@contextlib.contextmanager
def naming(shard: str) -> Iterator[None]:
    """Put the shard's name before what is wrong with it."""
    try:
        yield
    except DataError as error:
        message = str(error)
        raise DataError(message if message.startswith(shard) else f"{shard}: {message}") from None
