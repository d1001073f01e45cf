"""Consecutive rows of one shard of a log, checked like the rows of ``Transitions``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from koffline.data import columns as checks
from koffline.data.spaces import ActionSpace
from koffline.data.transitions import ROW_COLUMNS
from koffline.errors import DataError

__all__ = ["ROW_COLUMNS", "RowBlock"]


@dataclass(frozen=True, eq=False)
class RowBlock:
    """B consecutive rows of one shard.

    shard: index into ``LazyTransitions.shards``; start: number of the first row within the shard.
    observations, next_observations (B, ...) float32, float64 or uint8; actions (B,) int64 or (B, k) float;
    rewards (B,) float; terminated, truncated (B,) bool; steps (B,) int64, 0 at the first step of an episode,
    None for a log without episodes; units (B,) int64, the number within the shard of the row's independent
    unit: its episode, or the row itself where there are no episodes. Log-probabilities and weights (B,) where
    the log has them.
    """

    shard: int
    start: int
    observations: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    next_observations: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    steps: np.ndarray | None
    units: np.ndarray
    behavior_log_probabilities: np.ndarray | None = None
    weights: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.rewards)

    def part(self, rows: slice | np.ndarray) -> RowBlock:
        """Some rows of this block: a slice gives views, a mask copies."""
        first = (rows.start or 0) if isinstance(rows, slice) else 0
        arrays: dict[str, Any] = {name: array[rows] for name, array in self.arrays().items()}
        return dataclasses.replace(self, start=self.start + first, **arrays)

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays that this block has, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}


def join_blocks(blocks: Sequence[RowBlock]) -> RowBlock:
    """Consecutive blocks of one shard as one."""
    if len(blocks) == 1:
        return blocks[0]
    parts = [block.arrays() for block in blocks]
    joined: dict[str, Any] = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return dataclasses.replace(blocks[0], **joined)


def in_whole_units(blocks: Iterable[RowBlock]) -> Iterator[RowBlock]:
    """The rows of successive blocks of one shard, cut where units begin: no episode lies in two blocks."""
    waiting: list[RowBlock] = []
    for block in blocks:
        if block.steps is None:
            yield block
            continue
        starts = np.flatnonzero(block.steps == 0)
        if not len(starts):  # rows of one long episode
            waiting.append(block)
            continue
        cut = int(starts[-1])
        before = [*waiting, block.part(slice(cut))] if cut else waiting
        if before:
            yield join_blocks(before)
        waiting = [block.part(slice(cut, None))]
    if waiting:
        yield join_blocks(waiting)


def checked_block(
    raw: Mapping[str, np.ndarray],
    steps: np.ndarray | None,
    units: np.ndarray,
    space: ActionSpace,
    shard: int,
    start: int,
) -> RowBlock:
    """A block from columns as they were read. Raises DataError naming the row within the shard."""
    block = RowBlock(shard, start, steps=steps, units=units, **checks.row_columns(raw, space, start))
    _check_episodes(block)
    return block


def _check_episodes(block: RowBlock) -> None:
    """Steps count 0, 1, 2, …, units count episodes, and only an episode's last row ends it."""
    steps = block.steps
    if steps is None:
        return
    begins = steps[1:] == 0
    wrong = (np.where(begins, 0, steps[:-1] + 1) != steps[1:]) | (np.diff(block.units) != begins)
    if wrong.any():
        row = int(np.argmax(wrong)) + 1
        raise DataError(
            f"row {block.start + row} has step {steps[row]} after step {steps[row - 1]}; count the rows of "
            "an episode 0, 1, 2, … and write the shard again"
        )
    for name in ("terminated", "truncated"):
        inside = getattr(block, name)[:-1] & ~begins
        if inside.any():
            row = block.start + int(np.argmax(inside))
            raise DataError(
                f"row {row} is {name} but its episode goes on in row {row + 1}; write the shard again with "
                "episodes that end there"
            )


def check_joined(last: RowBlock, block: RowBlock) -> None:
    """Raise DataError where an episode is broken between two consecutive blocks of a shard."""
    _check_episodes(join_blocks([last.part(slice(len(last) - 1, None)), block.part(slice(1))]))
