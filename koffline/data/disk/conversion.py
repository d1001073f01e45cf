"""Any log as a folder of shards, in the memory of one block where the source can be read by blocks."""

from __future__ import annotations

import os
from pathlib import Path

from koffline.data import remote
from koffline.data.disk.log import LazyTransitions
from koffline.data.disk.opening import open_lazy
from koffline.data.disk.writer import ShardWriter
from koffline.data.row_block import in_whole_units
from koffline.data.spaces import SpaceRequest
from koffline.data.table.files import is_table_source
from koffline.data.table.mapping import MappingRequest
from koffline.data.table.reading import TableStream
from koffline.errors import DataError
from koffline.store.files import check_target
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
    check_apart([os.fspath(source)], os.fspath(target))
    if not remote.is_url(os.fspath(target)):
        check_target(Path(target), force)
    with ShardWriter(target, shard_rows, force) as writer:
        if mapping is not None or is_table_source(os.fspath(source)):
            # piece by piece, whatever the order of the table; what was done to the rows is known at the end
            table = TableStream(source, mapping, action_space)
            for piece in table:
                writer.append(piece)
            writer.metadata = table.metadata
        else:
            _write(writer, source, action_space)
    return open_lazy(target)


def _write(writer: ShardWriter, source: str | os.PathLike[str], action_space: SpaceRequest | None) -> None:
    """Block by block where the source can be read so, else all at once."""
    from koffline.data.sources import open_transitions

    try:
        log = open_lazy(source, action_space)
    except DataError:  # the reader in memory says it again where it is no log at all
        writer.append(open_transitions(source, action_space))
        return
    writer.metadata = log.metadata
    for shard in range(len(log.shards)):
        for block in in_whole_units(log.shard_blocks(shard)):
            writer.append_block(block, log.action_space)
