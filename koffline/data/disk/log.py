"""A log on disk: file names, metadata and episode starts; rows are read by blocks and checked."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from koffline.data import columns as checks
from koffline.data import remote
from koffline.data.disk.files import BLOCK_BYTES, COUNTED, Column, OpenShard, ShardInfo
from koffline.data.episodes import check_flags_end_episodes, check_steps
from koffline.data.raw import bounded
from koffline.data.spaces import ActionSpace, SpaceRequest
from koffline.data.transitions import Metadata, Transitions
from koffline.errors import DataError
from koffline.store.files import reading
from koffline.untrusted.limits import check_memory


@dataclass(frozen=True, eq=False, repr=False)
class LazyTransitions:
    """A log that stays on disk: N rows in shards, each checked like ``Transitions`` when it is read.

    ``open_transitions(…, lazy=True)`` gives it. It is small, can be pickled and sent to other processes and
    machines that see the same files. An episode never crosses shards.
    """

    shards: tuple[ShardInfo, ...]
    action_space: ActionSpace
    has_episodes: bool
    metadata: Metadata

    def __len__(self) -> int:
        return sum(shard.rows for shard in self.shards)

    def __getstate__(self) -> dict[str, Any]:
        """Make paths absolute: the receiver of a pickle may run in another folder."""
        names = [s.name if remote.is_url(s.name) else str(Path(s.name).absolute()) for s in self.shards]
        named = zip(self.shards, names, strict=True)
        return {**vars(self), "shards": tuple(dataclasses.replace(s, name=name) for s, name in named)}

    def __repr__(self) -> str:
        episodes = f"{self.n_episodes} episodes" if self.has_episodes else "no episodes"
        return (
            f"LazyTransitions({len(self)} rows in {checks.counted(len(self.shards), 'shard')}, {episodes}, "
            f"observations {self.observation_shape} {self.columns['observations'].dtype}, "
            f"{self.action_space})"
        )

    @property
    def columns(self) -> Mapping[str, Column]:
        """Dtype and row shape of each column that the log has."""
        return self.shards[0].columns

    @property
    def observation_shape(self) -> tuple[int, ...]:
        """Shape of one observation."""
        return self.columns["observations"].shape

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the numbers of an observation; none unless the log comes from a table."""
        return features.names if (features := self.metadata.features) else ()

    @property
    def n_episodes(self) -> int:
        """Number of episodes; 0 when there are none."""
        return sum(shard.episodes for shard in self.shards) if self.has_episodes else 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in memory, its step and unit included."""
        kept = sum(column.row_bytes for name, column in self.columns.items() if name not in COUNTED)
        return kept + (8 if self.has_episodes else 0) + 8

    def block_rows_for(self, memory_bytes: int) -> int:
        """Number of rows that fit into ``memory_bytes``, at least one."""
        return max(1, int(memory_bytes) // self.row_bytes)

    def blocks(self, block_rows: int | None = None) -> Iterator[Transitions]:
        """All rows in order, by blocks that do not cross shards but may begin inside an episode."""
        for shard in range(len(self.shards)):
            yield from self.shard_blocks(shard, block_rows)

    def shard_blocks(self, shard: int, block_rows: int | None = None) -> Iterator[Transitions]:
        """The rows of one shard in order. Raises DataError naming the shard and the row that is wrong."""
        size = self.block_rows_for(BLOCK_BYTES) if block_rows is None else block_rows
        if size < 1:
            raise DataError(f"block_rows is {block_rows}; give at least one row")
        rows, last = self.shards[shard].rows, None
        with self.open_shard(shard) as opened:
            for start in range(0, rows, size):
                block = self.block_of(opened, shard, start, min(start + size, rows))
                if last is not None:
                    _check_episodes(_joined([last, block.part(slice(1))]), start - 1)
                yield block
                last = block.part(slice(len(block) - 1, None))

    def open_shard(self, shard: int) -> contextlib.AbstractContextManager[OpenShard]:
        """Open one shard for several reads. DataErrors, also those inside the block, name the shard."""
        return self.shards[shard].open()

    def block_of(self, opened: OpenShard, shard: int, start: int, stop: int) -> Transitions:
        """Checked rows start … stop − 1 of an open shard; ``units`` count within it. Raises DataError."""
        steps, units = opened.places(start, stop)
        checked = checks.row_columns(opened.columns(start, stop), self.action_space, start)
        block = Transitions.of_checked({**checked, "steps": steps}, self.action_space, units)
        if steps is None:
            return block
        _check_episodes(block, start)
        if start == 0 and (steps[0] != 0 or units[0] != 0):
            raise DataError("row 0 is no first step of an episode; write the shard again")
        promised = self.shards[shard].episodes
        if stop == self.shards[shard].rows and units[-1] != promised - 1:
            said = f"there are {units[-1] + 1} episodes, {promised} were promised"
            raise DataError(f"{said}; write the shard again")
        return block

    def load(self) -> Transitions:
        """The whole log in memory; episodes are numbered 0, 1, 2, … . Raises DataError."""
        kept = {name: column for name, column in self.columns.items() if name != "episode_ids"}
        with reading(self.metadata.source or self.shards[0].name, "data"):
            check_memory(len(self) * (sum(column.row_bytes for column in kept.values()) + 16))
        held = {name: np.empty((len(self), *column.shape), column.dtype) for name, column in kept.items()}
        row = 0
        for block in self.blocks():
            for name, column in held.items():
                column[row : row + len(block)] = getattr(block, name)
            row += len(block)
        return Transitions(**held, action_space=self.action_space, metadata=self.metadata)

    @cached_property
    def sha256(self) -> str:
        """Digest of the rows, the same as ``Transitions.sha256`` of the loaded log, however it is cut.

        Recorded in the manifest of a shard folder; else computed in one pass, column by column.
        """
        return self.metadata.sha256 or self.compute_sha256()

    def compute_sha256(self) -> str:
        """Compute the digest from the rows, without the manifest."""
        return checks.digest_columns(
            (name, (len(self), *column.shape), np.dtype(column.dtype), self._parts(name, column))
            for name, column in sorted(self.columns.items())
            if name != "episode_ids"
        )

    def declared_anew(self, asked: SpaceRequest | None) -> LazyTransitions:
        """Copy of the log with the requested action space, against which rows are checked when read."""
        space = bounded(asked, self.columns["actions"].shape)
        if space is None or space == self.action_space:
            return self
        note = f"action space {space} as asked, the log declares {self.action_space}"
        return dataclasses.replace(self, action_space=space, metadata=self.metadata.with_notes(note))

    def _parts(self, name: str, column: Column) -> Iterator[np.ndarray]:
        for shard, info in enumerate(self.shards):
            with self.open_shard(shard) as opened:
                for start in range(0, info.rows, column.block_rows):
                    stop = min(start + column.block_rows, info.rows)
                    yield opened.column(name, start, stop)


def in_whole_units(blocks: Iterable[Transitions]) -> Iterator[Transitions]:
    """Yield the rows of one shard in blocks of whole units: no episode lies in two blocks."""
    waiting: list[Transitions] = []
    for block in blocks:
        if block.steps is None:
            yield block
            continue
        starts = block.episode_starts
        if not len(starts):  # parts of one long episode
            waiting.append(block)
            continue
        cut = int(starts[-1])
        before = [*waiting, block.part(slice(cut))] if cut else waiting
        if before:
            yield _joined(before)
        waiting = [block.part(slice(cut, None))]
    if waiting:
        yield _joined(waiting)


def _joined(parts: Sequence[Transitions]) -> Transitions:
    """Join consecutive parts of one shard."""
    if len(parts) == 1:
        return parts[0]
    columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns}
    units = np.concatenate([part.units for part in parts])
    return Transitions.of_checked(columns, parts[0].action_space, units)


def _check_episodes(block: Transitions, start: int) -> None:
    """Raise DataError unless steps count 0, 1, 2, … in each unit and flags stand at last rows only."""
    if block.steps is not None:
        begun = np.diff(block.units)  # 1 where an episode begins, 0 inside, others wrong
        counted = np.where(begun == 0, block.steps[:-1] + 1, -np.abs(begun - 1))
        check_steps(block.steps[1:], counted, start + 1)
        flags = {"steps": block.steps, "terminated": block.terminated, "truncated": block.truncated}
        check_flags_end_episodes(flags, start)
