"""Read tables as logs, at once or piece by piece in bounded memory; write logs as
tables.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from koffline.data import remote
from koffline.data.flat import flat_arrays
from koffline.data.late_ends import without_late_ends
from koffline.data.raw import RawLog, describe_log
from koffline.data.spaces import SpaceRequest
from koffline.data.table.assembly import assemble, begins_episode
from koffline.data.table.counts import TableCounts
from koffline.data.table.held import HeldTable
from koffline.data.table.mapping import MappingRequest
from koffline.data.table.numbers import hashed_ids
from koffline.data.table.readers import faults
from koffline.data.table.rewards import LostRewards, UnearnedRewards
from koffline.data.table.survey import SHAPE_KEY, SurveyedTable, prepare_table
from koffline.data.table.table_rows import check_room, frame_bytes
from koffline.data.transitions import Metadata, Transitions
from koffline.errors import DataError
from koffline.store.files import Location, atomic_file

# Limit of open files; a table of more parts gets larger parts.
_MOST_PARTS = 256
_PART = "number of koffline's temporary file"  # a name that no column has
_SPLIT = "give its longest episodes several ids"


def read_table(
    source: Location | HeldTable,
    mapping: MappingRequest | None = None,
    action_space: SpaceRequest | None = None,
) -> RawLog:
    """A whole table (a file, folder, pattern or URL, or one in memory) as aligned
    columns. Raises DataError in one line.

    Episodes are ordered by their first dates or, if times are no dates, by the places
    of their first steps in the table; rows are in time order, whatever the order of the
    table. ``metadata.notes`` say what was derived, left out or replaced;
    ``metadata.extra["action_names"]`` are the values of a categorical action in the
    order of their numbers.
    """
    if not isinstance(source, HeldTable):
        source = os.fspath(source)
    table = prepare_table(source, mapping, action_space, in_memory=True)
    assert table.rows.held is not None, "asked for"
    with faults(table.source, table.rows.kind):
        (raw_log,) = _assembled(table, [table.rows.held])
    return replace(raw_log, metadata=table.noted)


def _assembled(
    table: SurveyedTable, frames: Iterable[pl.DataFrame]
) -> Iterator[RawLog]:
    """Columns of all pieces in which rows are left.

    Raises DataError if there are none, or if rewards were lost that the mapping does
    not say what to do with.
    """
    any_row = False
    table.lost_rewards = LostRewards()
    table.unearned = UnearnedRewards()
    for frame in frames:
        piece = assemble(frame, table)
        if piece is not None:
            any_row = True
            yield piece
    if not any_row:
        raise DataError(
            f"{table.source}: no row has a next state; name --next-observations or"
            " --terminal"
        )
    if table.reward_question:
        raise DataError(f"{table.source}: {table.reward_question}")


class TableStream:
    """A table of any length as pieces of whole episodes, with the same rows and order
    as ``read_table``.

    Two passes: one counts (missing values, actions, episodes), one yields the rows. If
    the rows of each episode are contiguous, memory holds ``piece_rows`` (by default
    65,536, or 64 MB of wide rows) and the longest episode. If rows of several episodes
    are mixed, they are first sorted into temporary files of about ``piece_rows`` each.
    ``metadata.notes`` are complete after the last piece.
    """

    def __init__(
        self,
        source: Location,
        mapping: MappingRequest | None = None,
        action_space: SpaceRequest | None = None,
        *,
        piece_rows: int | None = None,
    ) -> None:
        self._table = prepare_table(
            os.fspath(source), mapping, action_space, in_memory=False
        )
        self._table.problems.refuse()
        self._piece_rows = piece_rows or self._table.rows.batch_rows

    @property
    def contiguous(self) -> bool:
        """Whether every episode's rows are contiguous and dated episodes are in
        order.
        """
        runs = self._table.runs
        if runs is None:
            return True
        is_sorted = not self._table.is_dated or runs["start"].is_sorted()
        return is_sorted and runs["id"].n_unique() == int(runs["id"].rle_id()[-1]) + 1

    @property
    def metadata(self) -> Metadata:
        """Metadata as from ``read_table``, with the counts so far."""
        return self._table.noted

    def __iter__(self) -> Iterator[Transitions]:
        """Yield the pieces in order. Raises DataError."""
        table = self._table
        table.counts = TableCounts(reordered=not self.contiguous)
        if self.contiguous:
            pieces = _contiguous_pieces
        else:
            pieces = _gathered_pieces
        with faults(table.source, table.rows.kind):
            for piece in _assembled(table, pieces(table, self._piece_rows)):
                yield piece.transitions()


def _contiguous_pieces(table: SurveyedTable, piece_rows: int) -> Iterator[pl.DataFrame]:
    """Pieces of consecutive rows, at least ``piece_rows`` if possible, cut where an
    episode begins.
    """
    waiting = pl.DataFrame(schema=table.rows.schema)
    cut = 0  # the last place in `waiting` at which an episode may begin
    n_bytes = 0
    for frame in table.rows.frames(again=True):
        # The last waiting row shows whether its episode goes on in the new rows.
        last = max(waiting.height - 1, 0)
        n_bytes += frame_bytes(frame, table.rows.itemsize)
        check_room(n_bytes, _SPLIT)
        waiting = waiting.vstack(frame)
        places = _places_to_cut(waiting[last:], table)
        if len(places):
            cut = last + int(places[-1])
        if waiting.height >= piece_rows and cut:
            yield waiting[:cut]
            waiting = waiting[cut:]
            cut = 0
            n_bytes = frame_bytes(waiting, table.rows.itemsize)
    if waiting.height:
        yield waiting


def _places_to_cut(frame: pl.DataFrame, table: SurveyedTable) -> np.ndarray:
    """Numbers of the rows, in rising order, above which rows (N,) may be cut because an
    episode begins there; never 0, for what is above the first row is not known.

    Where every row stands alone, only N, below the last row. Without an episode column,
    raises DataError if rows are not in time order, because then nothing tells which
    rows belong together.
    """
    roles = table.roles
    if table.stands_alone:
        return np.asarray([frame.height])
    if roles.episode is not None:
        ids = frame[roles.episode]
        is_new = (ids != ids.shift()).fill_null(False)
        return np.flatnonzero(is_new.to_numpy())
    if roles.time is not None:
        times = frame[roles.time]
        if (times <= times.shift()).any():
            raise DataError(
                f"{table.source}: times do not rise from row to row and no episode"
                " column is named; name it (--episode), or sort the table"
            )
    return np.flatnonzero(begins_episode(frame, table))


def _gathered_pieces(table: SurveyedTable, piece_rows: int) -> Iterator[pl.DataFrame]:
    """Rows gathered by episode, in the order of `assemble`, through temporary files.

    A part holds as many whole episodes as fit into ``piece_rows`` (at least one).
    Raises DataError if files cannot be written.
    """
    parts = _parts_of_episodes(table, piece_rows)
    try:
        with remote.temporary_folder() as folder:
            paths = [folder / f"{i}.arrows" for i in range(int(parts["part"][-1]) + 1)]
            _distribute(table, parts, paths)
            for path in paths:
                check_room(path.stat().st_size, _SPLIT)
                with pa.ipc.open_stream(str(path)) as opened:
                    rows = pl.DataFrame(opened.read_all())
                    yield rows.cast(pl.Schema(table.rows.schema))
                path.unlink()
    except OSError as error:
        raise DataError(
            f"{table.source} cannot be sorted into temporary files"
            f" ({error.strerror or error}); check the disk, or set TMPDIR to a folder"
            " with room"
        ) from None


def _parts_of_episodes(table: SurveyedTable, piece_rows: int) -> pl.DataFrame:
    """The number of the temporary file (``part``) of each episode (``id``, hashed), in
    the order of the episodes.
    """
    assert table.runs is not None, "called after a census"
    limit = max(piece_rows, -(-table.n_rows // _MOST_PARTS))
    n_rows = pl.col("rows").cast(pl.Int64).sum()
    runs = table.runs.with_row_index().sort("start", maintain_order=True)
    episodes = runs.group_by("id", maintain_order=True).agg(
        n_rows, pl.first("start", "index")
    )
    if not table.is_dated:
        episodes = episodes.sort("index")
    # the part that holds the episode's last row; parts have at most `limit` rows,
    # except for long episodes
    part = ((pl.col("rows").cum_sum() - 1) // limit).rle_id()
    return episodes.select("id", part=part)


def _distribute(table: SurveyedTable, parts: pl.DataFrame, paths: list[Path]) -> None:
    """Append each row to its part's file; rows keep their order within a part.

    parts: as from `_parts_of_episodes`.
    """

    def to_arrow(frame: pl.DataFrame) -> Any:
        return frame.to_arrow(compat_level=pl.CompatLevel.oldest())

    schema = to_arrow(pl.DataFrame(schema=table.rows.schema)).schema
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(pa.ipc.new_stream(str(path), schema)) for path in paths
        ]
        for frame in table.rows.frames(again=True):
            ids = pl.DataFrame([hashed_ids(frame[table.roles.episode or ""])])
            numbered = ids.join(parts, on="id", how="left", maintain_order="left")
            by_part = frame.with_columns(numbered["part"].alias(_PART)).partition_by(
                _PART, include_key=False, as_dict=True
            )
            for (number,), rows in by_part.items():
                writers[number].write_table(to_arrow(rows))


# Longer vectors and images are stored as lists instead of one column per number.
_MOST_COLUMNS = 1000
_GROUP_ROWS = 65_536


def write_table(log: Transitions, path: Path, format: str, force: bool = False) -> None:
    """Write ``parquet``, ``arrow`` or ``csv`` atomically. Raises DataError.

    Columns are observations_0 …, actions (or actions_0 …), rewards, next_observations_0
    …, terminals, timeouts, episode_ids, steps and the log's optional columns. CSV
    stores rows only: numbers are written so that they read back exactly, but action
    space and metadata are lost; therefore late ends are removed first.
    """
    import pyarrow.csv
    import pyarrow.parquet

    if format == "csv":
        log = without_late_ends(log)
    shape = log.observation_shape
    columns = {}
    metadata = {"koffline": describe_log(log)}
    as_lists = len(shape) != 1 or shape[0] > _MOST_COLUMNS
    if as_lists:
        metadata[SHAPE_KEY] = ",".join(map(str, shape))
        if format == "csv":
            raise DataError(
                f"observations of shape {shape} do not fit into CSV; write parquet"
                " instead"
            )
    for key, array in flat_arrays(log).items():
        if format == "csv" and array.dtype.kind == "f":
            # a float32 is written to CSV as the shortest text of its own, which is
            # another number as float64
            array = array.astype(np.float64)
        if array.ndim == 1:
            columns[key] = array
        elif as_lists and key != "actions":
            columns[key] = array.reshape(len(array), -1)
        else:
            columns.update({f"{key}_{i}": column for i, column in enumerate(array.T)})
    table = pl.DataFrame(columns).to_arrow().replace_schema_metadata(metadata)
    with atomic_file(path, force) as temporary:
        if format == "parquet":
            pyarrow.parquet.write_table(
                table, temporary, row_group_size=_GROUP_ROWS, compression="zstd"
            )
        elif format == "arrow":
            with pa.ipc.new_file(str(temporary), table.schema) as file:
                file.write_table(table, max_chunksize=_GROUP_ROWS)
        else:
            pyarrow.csv.write_csv(table, temporary)
