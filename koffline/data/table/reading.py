"""Tables as logs: all at once, or piece by piece in bounded memory."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from koffline.data.raw import RawLog
from koffline.data.spaces import SpaceRequest
from koffline.data.table.computed import read_flags
from koffline.data.table.episodes import assemble
from koffline.data.table.files import Room, faults
from koffline.data.table.mapping import MappingRequest
from koffline.data.table.problems import TableCounts
from koffline.data.table.survey import Table, hashed, prepare_table
from koffline.data.transitions import Metadata, Transitions
from koffline.errors import DataError

_NO_ROWS = "{}: no row has a next observation; name --next-observations or --terminal"
# Limit of open files; a table of more parts gets larger parts.
_MOST_PARTS = 256
_PART = "number of koffline's temporary file"  # a name that no column has
_SPLIT = "give its longest episodes several ids"


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
    table = prepare_table(source, mapping, action_space, in_memory=True)
    assert table.rows.held is not None, "asked for"
    with faults(table.source, table.rows.kind):
        found = assemble(table.rows.held, table)
    if found is None:
        raise DataError(_NO_ROWS.format(table.source))
    return replace(found, metadata=found.metadata.with_notes(*table.counts.sentences()))


class TableStream:
    """A table of any length as pieces of whole episodes, the same rows in the same order as ``read_table``.

    Two passes: one that counts (missing values, actions, episodes), one that gives the rows. Episodes whose
    rows lie together need memory for ``piece_rows`` (by default 65,536, or 64 MB of wide rows) and the
    longest episode; where rows of several episodes are mixed they are first sorted into temporary files of
    about ``piece_rows`` each. ``metadata.notes`` are complete after the last piece.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        mapping: MappingRequest | None = None,
        action_space: SpaceRequest | None = None,
        *,
        piece_rows: int | None = None,
    ) -> None:
        if piece_rows is not None and piece_rows < 1:
            raise DataError(f"pieces of {piece_rows} rows were asked for; give at least 1")
        self._table = prepare_table(source, mapping, action_space, in_memory=False)
        self._table.problems.refuse()
        self._piece_rows = piece_rows or self._table.rows.batch_rows

    @property
    def contiguous(self) -> bool:
        """Whether the rows of every episode lie together."""
        runs = self._table.runs
        return runs is None or runs["id"].n_unique() == runs.height

    @property
    def metadata(self) -> Metadata:
        """Metadata as from ``read_table``, with the counts so far."""
        return self._table.metadata.with_notes(*self._table.counts.sentences())

    def __iter__(self) -> Iterator[Transitions]:
        """Pieces in order. Raises DataError."""
        table = self._table
        table.counts = TableCounts(reordered=not self.contiguous, is_timed=table.roles.time is not None)
        if self.contiguous:
            frames = _contiguous_pieces(table, self._piece_rows)
        else:
            frames = _gathered_pieces(table, self._piece_rows)
        any_row = False
        with faults(table.source, table.rows.kind):
            for frame in frames:
                found = assemble(frame, table)
                if found is not None:
                    any_row = True
                    yield found.transitions()
        if not any_row:
            raise DataError(_NO_ROWS.format(table.source))


def _contiguous_pieces(table: Table, piece_rows: int) -> Iterator[pl.DataFrame]:
    """Consecutive rows, at least ``piece_rows`` where there are as many, cut where an episode begins."""
    waiting = pl.DataFrame(schema=table.rows.schema)
    cut, room = 0, Room(table.rows.itemsize, _SPLIT)
    for frame in table.rows.frames(again=True):
        above = max(waiting.height - 1, 0)
        room.take(frame)
        waiting = waiting.vstack(frame)
        starts = _starts(waiting[above:], table)
        cut = above + int(starts[-1]) if len(starts) else cut
        if waiting.height >= piece_rows and cut:
            yield waiting[:cut]
            waiting, cut = waiting[cut:], 0
            room = Room(table.rows.itemsize, _SPLIT)
            room.take(waiting)
    if waiting.height:
        yield waiting


def _starts(frame: pl.DataFrame, table: Table) -> np.ndarray:
    """Rows, except the first, at which an episode begins.

    Raises DataError without an episode column where rows are not in order: nothing else tells which belong
    together.
    """
    roles = table.roles
    if roles.stands_alone:
        return np.asarray([frame.height])
    if roles.episode is not None:
        column = frame[roles.episode]
        return np.flatnonzero((column != column.shift()).fill_null(False).to_numpy())
    if roles.time is not None and (frame[roles.time] <= frame[roles.time].shift()).any():
        said = "times do not rise from row to row and no episode column is named"
        raise DataError(f"{table.source}: {said}; name it (--episode), or sort the table")
    ends = [read_flags(frame, name, table.source) for name in (roles.terminal, roles.truncated)]
    return np.flatnonzero((ends[0] | ends[1]).to_numpy()[:-1]) + 1


def _gathered_pieces(table: Table, piece_rows: int) -> Iterator[pl.DataFrame]:
    """Rows gathered by episode, in order of first appearance, through files that are removed afterwards.

    A part holds as many whole episodes as fit into ``piece_rows`` (at least one). Raises DataError where they
    cannot be written.
    """
    import pyarrow as pa

    assert table.runs is not None, "called after a census"
    limit = max(piece_rows, -(-table.n_rows // _MOST_PARTS))
    # the part that holds the episode's last row; parts have at most `limit` rows, except for long episodes
    part = ((pl.col("rows").cum_sum() - 1) // limit).rle_id()
    parts = table.runs.group_by("id", maintain_order=True).agg(pl.col("rows").sum()).select("id", part=part)
    try:
        with tempfile.TemporaryDirectory(prefix="koffline-") as folder:
            paths = [Path(folder) / f"{i}.arrows" for i in range(int(parts["part"][-1]) + 1)]
            _distribute(table, parts, paths)
            for path in paths:
                Room(table.rows.itemsize, _SPLIT).check(path.stat().st_size)
                with pa.ipc.open_stream(str(path)) as opened:
                    yield pl.DataFrame(opened.read_all()).cast(pl.Schema(table.rows.schema))
                path.unlink()
    except OSError as error:
        said = f"{table.source} cannot be sorted into temporary files ({error.strerror or error})"
        raise DataError(f"{said}; check the disk, or set TMPDIR to a folder with room") from None


def _distribute(table: Table, parts: pl.DataFrame, paths: list[Path]) -> None:
    """Append each row to its part's file; rows keep their order within a part."""
    import pyarrow as pa

    def to_arrow(frame: pl.DataFrame) -> Any:
        return frame.to_arrow(compat_level=pl.CompatLevel.oldest())

    schema = to_arrow(pl.DataFrame(schema=table.rows.schema)).schema
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(pa.ipc.new_stream(str(path), schema)) for path in paths]
        for frame in table.rows.frames(again=True):
            ids = pl.DataFrame([hashed(frame[table.roles.episode or ""])])
            part = ids.join(parts, on="id", how="left", maintain_order="left")["part"].alias(_PART)
            by_part = frame.with_columns(part).partition_by(_PART, include_key=False, as_dict=True)
            for (number,), rows in by_part.items():
                writers[number].write_table(to_arrow(rows))
