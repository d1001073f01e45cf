"""Any log as a folder of shards, in the memory of one block where the source can be read by blocks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from koffline.data import remote
from koffline.data.disk.log import LazyTransitions
from koffline.data.disk.writer import ShardWriter
from koffline.data.row_block import RowBlock, join_blocks
from koffline.data.spaces import SpaceRequest
from koffline.data.table.files import is_table_source
from koffline.data.table.mapping import MappingRequest
from koffline.data.table.reading import TableStream
from koffline.errors import DataError
from koffline.store.targets import check_apart


def convert_to_shards(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    shard_rows: int,
    force: bool = False,
    action_space: SpaceRequest | None = None,
    mapping: MappingRequest | None = None,
) -> LazyTransitions:
    """Write ``source`` as a folder of shards and open it. Raises DataError, also where they are the same."""
    from koffline.data.disk.opening import open_lazy
    from koffline.store.files import check_target

    check_apart([os.fspath(source)], os.fspath(target))
    if not remote.is_url(os.fspath(target)):
        check_target(Path(target), force)
    with ShardWriter(target, shard_rows, force) as writer:
        if mapping is not None or is_table_source(os.fspath(source)):
            _write_table(writer, source, mapping, action_space)
        else:
            _write(writer, source, action_space)
    return open_lazy(target)


def _write_table(
    writer: ShardWriter,
    source: str | os.PathLike[str],
    mapping: MappingRequest | None,
    action_space: SpaceRequest | None,
) -> None:
    """Piece by piece, whatever the order of the table; what was done to the rows is known at the end."""
    stream = TableStream(source, mapping, action_space)
    for piece in stream:
        writer.append(piece)
    writer.metadata = stream.metadata


def _write(writer: ShardWriter, source: str | os.PathLike[str], action_space: SpaceRequest | None) -> None:
    """Block by block where the source can be read so, else all at once."""
    from koffline.data.disk.opening import open_lazy
    from koffline.data.sources import open_transitions

    try:
        log = open_lazy(source, action_space)
    except DataError:  # the reader in memory says it again where it is no log at all
        writer.append(open_transitions(source, action_space))
        return
    writer.metadata = log.metadata
    for block in whole_episodes(log):
        writer.append_block(block, log.action_space)


def whole_episodes(log: LazyTransitions, block_rows: int | None = None) -> Iterator[RowBlock]:
    """The rows of a log in order, cut between episodes: blocks of about ``block_rows``, or of one episode.

    Raises DataError naming the shard and the row that is wrong.
    """
    for shard in range(len(log.shards)):
        kept: list[RowBlock] = []
        for block in log.shard_blocks(shard, block_rows):
            if block.steps is None:
                yield block
                continue
            starts = np.flatnonzero(block.steps == 0)
            if not len(starts):
                kept.append(block)
                continue
            last = int(starts[-1])
            ended = [*kept, block.part(0, last)] if last else kept
            if ended:
                yield join_blocks(ended)
            kept = [block.part(last, len(block))]
        if kept:
            yield join_blocks(kept)
