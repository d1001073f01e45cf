"""Cutting a long table into tables of whole episodes: in place, or through temporary files."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from koffline.data.table import values
from koffline.data.table.prepared import PreparedTable
from koffline.data.table.room import Room
from koffline.errors import DataError

# Files that are open at once; a table of more parts has larger ones.
_MOST_PARTS = 256
_SPLIT = "give its longest episodes several ids"


def contiguous_pieces(prepared: PreparedTable, piece_rows: int) -> Iterator[Any]:
    """Consecutive rows, at least ``piece_rows`` where there are as many, cut where an episode begins."""
    waiting: list[Any] = []
    rows = cut = 0
    room = Room(prepared.rows.itemsize, _SPLIT)
    before: Any = None
    for batch in prepared.rows.batches():
        _check_sorted(before, batch, prepared)
        start = _last_start(before, batch, prepared)
        cut = cut if start is None else rows + start
        room.take(batch)
        waiting.append(batch)
        rows += batch.num_rows
        before = batch
        if rows >= piece_rows and cut:
            table = prepared.rows.table(waiting)
            yield table.slice(0, cut)
            waiting = table.slice(cut).to_batches()
            rows, cut = rows - cut, 0
            room = Room(prepared.rows.itemsize, _SPLIT)
            for batch in waiting:
                room.take(batch)
    if rows:
        yield prepared.rows.table(waiting)


def partitioned_pieces(prepared: PreparedTable, piece_rows: int, scratch: str | Path | None) -> Iterator[Any]:
    """Rows gathered by episode, in order of first appearance, through files that are removed afterwards.

    A part holds as many whole episodes as fit into ``piece_rows`` (at least one). Raises DataError where the
    scratch folder cannot be written.
    """
    census = prepared.survey.episodes
    assert census is not None, "called after a census"
    assert prepared.roles.episode is not None, "without an episode column rows are not gathered"
    part_of = _parts(census.rows_in_order(), piece_rows)
    try:
        with tempfile.TemporaryDirectory(prefix="koffline-", dir=scratch) as folder:
            paths = [Path(folder) / f"{part}.arrows" for part in range(int(part_of[-1]) + 1)]
            _distribute(prepared, part_of, paths)
            for path in paths:
                yield _read_part(path, Room(prepared.rows.itemsize, _SPLIT))
                path.unlink()
    except OSError as error:
        raise DataError(
            f"{prepared.source} cannot be sorted into temporary files ({error.strerror or error}); check the "
            "disk, or set TMPDIR to a folder with room"
        ) from None


def _last_start(before: Any, batch: Any, prepared: PreparedTable) -> int | None:
    """The last row of a batch at which an episode begins, if any does; ``before`` is the batch above."""
    roles = prepared.roles
    if roles.stands_alone:
        return int(batch.num_rows)
    if roles.episode is not None:
        column = values.plain(batch.column(roles.episode))
        codes, _ = values.first_seen_codes(column)
        begins = np.append(False, codes[1:] != codes[:-1])
        if before is not None:
            above = values.plain(before.column(roles.episode))
            begins[0] = above[len(above) - 1].as_py() != column[0].as_py()
    else:
        ends = _ends(batch, prepared)
        above_ends = before is not None and bool(_ends(before.slice(before.num_rows - 1), prepared)[0])
        begins = np.append(above_ends, ends)  # the row after an end, which may be the next batch's first
    found = np.flatnonzero(begins)
    return int(found[-1]) if len(found) else None


def _ends(batch: Any, prepared: PreparedTable) -> np.ndarray:
    """(N,) whether a flag ends the record here."""
    named = [name for name in (prepared.roles.terminal, prepared.roles.truncated) if name is not None]
    ends = np.zeros(batch.num_rows, dtype=np.bool_)
    for name in named:
        ends |= values.flags(batch.column(name), name, prepared.source)
    return ends


def _check_sorted(before: Any, batch: Any, prepared: PreparedTable) -> None:
    """Without an episode column nothing tells which rows belong together but their order in time."""
    import pyarrow as pa

    roles = prepared.roles
    if roles.time is None or roles.episode is not None:
        return
    column = batch.column(roles.time)
    if before is not None:
        column = pa.concat_arrays([before.column(roles.time).slice(before.num_rows - 1), column])
    times = values.sortable(column)
    if not (times[1:] > times[:-1]).all():
        raise DataError(
            f"{prepared.source}: times do not rise from row to row and no episode column is named; name it "
            "(--episode), or sort the table"
        )


def _parts(rows: np.ndarray, piece_rows: int) -> np.ndarray:
    """(E,) the part of each episode: filled in order, at most ``_MOST_PARTS``."""
    fair = -(-int(rows.sum()) // _MOST_PARTS)
    limit = max(piece_rows, fair)
    # the part in which the episode's last row falls: parts of at most `limit` rows, except for long episodes
    placed = (np.cumsum(rows) - 1) // limit
    return np.unique(placed, return_inverse=True)[1].reshape(-1)


def _distribute(prepared: PreparedTable, part_of: np.ndarray, paths: list[Path]) -> None:
    """Append each row to its part's file; rows keep their order within a part."""
    import pyarrow as pa

    census = prepared.survey.episodes
    assert census is not None, "called after a census"
    schema = prepared.rows.table([]).schema
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(pa.ipc.new_stream(str(path), schema)) for path in paths]
        for batch in prepared.rows.batches():
            parts = part_of[census.places(batch.column(prepared.roles.episode))]
            order = np.argsort(parts, kind="stable")
            gathered = batch.take(pa.array(order))
            found, starts = np.unique(parts[order], return_index=True)
            for part, start, stop in zip(found, starts, np.append(starts[1:], len(parts)), strict=True):
                writers[part].write_batch(gathered.slice(int(start), int(stop - start)))


def _read_part(path: Path, room: Room) -> Any:
    import pyarrow as pa

    batches = []
    with pa.ipc.open_stream(str(path)) as opened:
        for batch in opened:
            room.take(batch)
            batches.append(batch)
        return pa.Table.from_batches(batches, opened.schema)
