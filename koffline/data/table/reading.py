"""Tables as logs: all at once, or piece by piece in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from koffline.data import remote
from koffline.data.raw import RawLog
from koffline.data.spaces import ActionSpace, SpaceRequest
from koffline.data.table.assembly import assemble
from koffline.data.table.counts import TableCounts
from koffline.data.table.faults import table_faults
from koffline.data.table.mapping import MappingRequest
from koffline.data.table.pieces import contiguous_pieces, partitioned_pieces
from koffline.data.table.prepared import prepare_table
from koffline.data.table.recognition import holds_tables, looks_like_table
from koffline.data.transitions import Metadata, Transitions
from koffline.errors import DataError

_NO_ROWS = "{}: no row has a next observation; name --next-observations or --terminal"


def is_table_source(name: str) -> bool:
    """Whether a path, URL or pattern is a table: told by content for Parquet and Arrow, by name for CSV.

    A folder is one where it holds such files and is neither a folder of shards nor a Minari dataset.
    """
    from koffline.data.disk.shards import is_shard_folder
    from koffline.data.minari import data_folder
    from koffline.store.files import MINARI

    if name.startswith(MINARI):
        return False
    if not remote.exists(name):
        return any(mark in name for mark in "*?") and any(map(looks_like_table, remote.listed(name)[:1]))
    if not remote.is_folder(name):
        return looks_like_table(name)
    if is_shard_folder(name) or (not remote.is_url(name) and data_folder(Path(name)) is not None):
        return False
    return holds_tables(name)


def read_table(
    source: str | os.PathLike[str],
    mapping: MappingRequest | None = None,
    action_space: SpaceRequest | None = None,
) -> RawLog:
    """A whole table (a file, folder, pattern or URL) as aligned columns. Raises DataError in one line.

    Episodes are in order of first appearance and rows in time order, whatever the order of the table.
    ``metadata.notes`` say what was derived, left out or replaced; ``metadata.extra["action_names"]`` are the
    values of a categorical action in the order of their numbers.
    """
    prepared = prepare_table(source, mapping, action_space, in_memory=True)
    counts = TableCounts()
    with table_faults(prepared.source, prepared.rows.files.kind):
        found = assemble(prepared.rows.table(list(prepared.rows.batches())), prepared, counts)
    if found is None:
        raise DataError(_NO_ROWS.format(prepared.source))
    return replace(found, metadata=found.metadata.with_notes(*counts.sentences()))


class TableStream:
    """A table of any length as pieces of whole episodes, the same rows in the same order as ``read_table``.

    Two passes: one that counts (missing values, actions, episodes), one that gives the rows. Episodes whose
    rows lie together need memory for ``piece_rows`` (by default 65,536, or 64 MB of wide rows) and the
    longest episode; where rows of several episodes are mixed they are first sorted into temporary files of
    about ``piece_rows`` each (in ``scratch``, by default the system's folder for such files).
    ``metadata.notes`` are complete after the last piece.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        mapping: MappingRequest | None = None,
        action_space: SpaceRequest | None = None,
        *,
        piece_rows: int | None = None,
        scratch: str | Path | None = None,
    ) -> None:
        if piece_rows is not None and piece_rows < 1:
            raise DataError(f"pieces of {piece_rows} rows were asked for; give at least 1")
        self._prepared = prepare_table(source, mapping, action_space, in_memory=False)
        self._piece_rows, self._scratch = piece_rows or self._prepared.rows.batch_rows, scratch
        self._counts = TableCounts()

    def __len__(self) -> int:
        """Rows of the table; the last rows of open episodes among them give no transition."""
        return self._prepared.survey.rows

    @property
    def action_space(self) -> ActionSpace:
        """Asked for, declared, or found in the first pass."""
        return self._prepared.action_space

    @property
    def contiguous(self) -> bool:
        """Whether the rows of every episode lie together."""
        census = self._prepared.survey.episodes
        return census is None or census.contiguous

    @property
    def metadata(self) -> Metadata:
        """As ``read_table``'s, with what has been counted until now."""
        return self._prepared.metadata.with_notes(*self._counts.sentences())

    def __iter__(self) -> Iterator[Transitions]:
        """Pieces in order. Raises DataError."""
        prepared, self._counts = self._prepared, TableCounts()
        if self.contiguous:
            tables = contiguous_pieces(prepared, self._piece_rows)
        else:
            tables = partitioned_pieces(prepared, self._piece_rows, self._scratch)
            self._counts.reordered = True
        any_row = False
        with table_faults(prepared.source, prepared.rows.files.kind):
            for table in tables:
                found = assemble(table, prepared, self._counts)
                if found is not None:
                    any_row = True
                    yield found.transitions()
        if not any_row:
            raise DataError(_NO_ROWS.format(prepared.source))


def iterate_table(
    source: str | os.PathLike[str],
    mapping: MappingRequest | None = None,
    batch_rows: int | None = None,
    action_space: SpaceRequest | None = None,
) -> Iterator[Transitions]:
    """The pieces of a ``TableStream``, each with the notes that hold until then."""
    stream = TableStream(source, mapping, action_space, piece_rows=batch_rows)
    for piece in stream:
        yield piece.with_metadata(stream.metadata)
