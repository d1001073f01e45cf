"""Parquet, Arrow, HDF5 and NPZ files: rows as frames, what a file says of its columns; a log as a table.

pyarrow reads them: polars ends the process on a damaged page or message (it allocates the length that is
declared there), decodes a row group at a time, and tells no sizes before it reads.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from koffline.data import remote
from koffline.data.flat import flat_arrays
from koffline.data.raw import describe_log
from koffline.data.table.files import (
    CSV,
    HDF5,
    NO_TABLE,
    NPZ,
    PARQUET,
    STREAM,
    Reader,
    csv_reader,
    faults,
    open_bytes,
    width_of,
)
from koffline.data.transitions import Transitions
from koffline.errors import DataError
from koffline.store.files import atomic_file
from koffline.untrusted.arrays import array_headers, array_names, read_arrays
from koffline.untrusted.hdf5 import open_hdf5
from koffline.untrusted.limits import Refused


@contextlib.contextmanager
def table_reader(name: str, kind: str) -> Iterator[Reader]:
    """Open a file of a table. Raises DataError, also for arrays that are no columns."""
    import pyarrow as pa
    import pyarrow.parquet

    with faults(name, kind), contextlib.ExitStack() as stack:
        if kind == CSV:
            yield csv_reader(name)
        elif kind == NPZ:
            path = stack.enter_context(remote.local_file(name))
            columns = _columns(_headers(path), name)
            yield _arrays_reader(read_arrays(path, list(columns)))
        elif kind == HDF5:
            file = stack.enter_context(open_hdf5(stack.enter_context(remote.local_file(name))))
            columns = _columns({each: file.raw[each] for each in file.datasets}, name)
            yield _arrays_reader(file.slices(list(columns)))
        elif kind == PARQUET:
            source = stack.enter_context(open_bytes(name))
            opened = pyarrow.parquet.ParquetFile(source, pre_buffer=False)
            schema = opened.schema_arrow  # not cached: made at every access
            texts = [each.name for each in schema if polars_type(each.type) in (pl.String, pl.Binary)]
            if texts:  # as dictionaries: what repeats in the file does not multiply before it is looked at
                options = {"metadata": opened.metadata, "pre_buffer": False, "read_dictionary": texts}
                source.seek(0)
                opened = pyarrow.parquet.ParquetFile(source, **options)
            yield ParquetReader(*_fields(schema), opened)
        else:
            source = stack.enter_context(open_bytes(name))
            opening = pa.ipc.open_stream if source.read(4) == STREAM else pa.ipc.open_file
            source.seek(0)
            schema = stack.enter_context(opening(source)).schema
            yield ArrowReader(*_fields(schema), source, opening, schema)


def _fields(schema: Any) -> tuple[list[tuple[str, Any]], dict[bytes, bytes]]:
    """The fields of a `Reader`, from Arrow's schema."""
    return [(each.name, polars_type(each.type)) for each in schema], schema.metadata or {}


@cache
def polars_type(kind: Any) -> Any:
    """The type that polars has for one of Arrow's, below dictionaries; Unknown for none."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        value = polars_type(kind.value_type)
        return pl.Unknown() if value.is_nested() else value  # one list in every row: a small file, long rows
    if pa.types.is_decimal256(kind):
        return pl.Unknown()
    try:
        return pl.DataFrame(pa.table({"": pa.nulls(0, kind)})).dtypes[0]
    except (ValueError, pl.exceptions.PolarsError, pl.exceptions.PanicException):
        return pl.Unknown()


def _frame(batch: Any) -> pl.DataFrame:
    """Convert a record batch, dictionaries decoded, to a frame. Raises ArrowInvalid if it is damaged."""
    import pyarrow as pa

    batch.validate(full=True)  # an untrusted file may hold wrong offsets or invalid texts
    return pl.DataFrame(pa.Table.from_batches([batch])).with_columns(pl.col(pl.Categorical).cast(pl.String))


@dataclass(frozen=True)
class ParquetReader(Reader):
    """An open Parquet file."""

    opened: Any

    def frames(self, columns: Mapping[str, Any], rows: int) -> Iterator[pl.DataFrame]:
        """The columns in frames of at most ``rows`` rows."""
        yield from map(_frame, self.opened.iter_batches(rows, columns=list(columns), use_threads=False))

    def declared(self, columns: Mapping[str, Any], itemsize: int) -> tuple[int, int]:
        """Bytes of the columns in memory, and of the largest lists that a row group may have in one row."""
        metadata, found = self.opened.metadata, dict(self.fields)
        kinds = {name: found[name] for name in columns}
        paths = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
        leaves = {i: path for i, path in enumerate(paths) if path in kinds}
        lists = {f"{name}.": name for name, kind in kinds.items() if kind.is_nested()}
        leaves |= {i: lists[top] for top in lists for i, path in enumerate(paths) if path.startswith(top)}
        total = at_once = 0
        for number in range(metadata.num_row_groups):
            # Arrow ends the process where `group.column` meets damaged statistics, and raises here.
            next(self.opened.iter_batches(1, [number], list(kinds), use_threads=False), None)
            group, nested = metadata.row_group(number), 0
            for i, name in leaves.items():
                chunk, kind = group.column(i), kinds[name]
                size = chunk.num_values * max(itemsize, width_of(getattr(kind, "inner", kind)))
                if kind.is_nested():
                    nested += size
                elif chunk.num_values != group.num_rows:
                    found_rows = f"column {name} has {chunk.num_values} values in {group.num_rows} rows"
                    raise Refused(f"{found_rows}; it is damaged: export it again")
                total += max(size, chunk.total_uncompressed_size if kind in (pl.String, pl.Binary) else 0)
            at_once = max(at_once, nested)
        return total, at_once


@dataclass(frozen=True)
class ArrowReader(Reader):
    """An open stream, or a file whose end says where its batches are; neither declares sizes."""

    source: Any
    opening: Callable[..., Any]
    schema: Any

    def frames(self, columns: Mapping[str, Any], rows: int) -> Iterator[pl.DataFrame]:
        """The columns in frames of at most ``rows`` rows."""
        import pyarrow as pa

        self.source.seek(0)
        indices = sorted(self.schema.get_field_index(name) for name in columns)
        options = pa.ipc.IpcReadOptions(included_fields=indices, use_threads=False)
        with self.opening(self.source, options=options) as opened:
            count = getattr(opened, "num_record_batches", None)
            for whole in opened if count is None else map(opened.get_batch, range(count)):
                for start in range(0, whole.num_rows, rows):
                    yield _frame(whole.select(list(columns)).slice(start, rows))


@dataclass(frozen=True)
class ArraysReader(Reader):
    """Arrays of one number (or text) a row, or of a list of numbers, in memory or read by slices."""

    arrays: Mapping[str, Any]

    def declared(self, columns: Mapping[str, Any], itemsize: int) -> tuple[int, int]:
        """Bytes of the columns in memory; they are read by slices."""
        arrays = [self.arrays[name] for name in columns]
        return sum(array.size * max(itemsize, array.dtype.itemsize) for array in arrays), 0

    def frames(self, columns: Mapping[str, Any], rows: int) -> Iterator[pl.DataFrame]:
        """The columns in frames of at most ``rows`` rows."""
        for start in range(0, len(self.arrays[next(iter(columns))]), rows):
            yield pl.DataFrame([_series(name, self.arrays[name][start : start + rows]) for name in columns])


def _series(name: str, array: np.ndarray) -> pl.Series:
    return pl.Series(name, array.reshape(-1) if array.shape[1:] == (1,) else array)


def _arrays_reader(arrays: Mapping[str, Any]) -> ArraysReader:
    kinds = [(name, _series(name, array[:0]).dtype) for name, array in arrays.items()]
    return ArraysReader(kinds, {}, arrays)


def _headers(path: Path) -> dict[str, Any]:
    """Shapes and dtypes of the arrays of an archive that can be read."""
    found: dict[str, Any] = {}
    for name in array_names(path):
        with contextlib.suppress(Refused):
            found |= array_headers(path, [name])
    return found


def _columns(found: Mapping[str, Any], name: str) -> list[str]:
    """Arrays with one row per transition; that is the most frequent number of rows.

    Raises DataError where there are none, or episodes are groups of their own.
    """
    is_other = any(each.startswith(("episode_0/", "num_episodes")) for each in found)  # Minari's, d3rlpy's
    kept = {
        each: array.shape[0]
        for each, array in found.items()
        if len(array.shape or ()) in (1, 2) and 0 not in array.shape
        if array.dtype.kind in "biuf" or (array.dtype.kind == "U" and len(array.shape) == 1)
    }
    rows, count = Counter(kept.values()).most_common(1)[0] if kept else (0, 0)
    if count < 3 or is_other:
        raise DataError(f"{name} {NO_TABLE}")
    return [each for each, its_rows in kept.items() if its_rows == rows]


# Beside the description of the log: the shape of an observation that is stored as one list of numbers.
SHAPE_KEY = "koffline_observation_shape"
# Longer vectors and images are stored as lists instead of one column per number.
_MOST_COLUMNS = 1000
_GROUP_ROWS = 65_536


def write_table(log: Transitions, path: Path, format: str, force: bool = False) -> None:
    """Write ``parquet``, ``arrow`` or ``csv``, whole or not at all. Raises DataError.

    Columns are observations_0 …, actions (or actions_0 …), rewards, next_observations_0 …, terminals,
    timeouts, episode_ids, steps and what else the log has. CSV holds the rows alone: numbers are written so
    that they read back exactly, but action space and metadata are lost.
    """
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    shape, columns, metadata = log.observation_shape, {}, {"koffline": describe_log(log)}
    as_lists = len(shape) != 1 or shape[0] > _MOST_COLUMNS
    if as_lists:
        metadata[SHAPE_KEY] = ",".join(map(str, shape))
        if format == "csv":
            raise DataError(f"observations of shape {shape} do not fit into CSV; write parquet instead")
    for key, array in flat_arrays(log).items():
        if format == "csv" and array.dtype.kind == "f":
            # a float32 is written to CSV as the shortest text of its own, which is another number as float64
            array = array.astype(np.float64)
        if array.ndim == 1 or (as_lists and key != "actions"):
            columns[key] = array if array.ndim == 1 else array.reshape(len(array), -1)
        else:
            columns.update({f"{key}_{i}": column for i, column in enumerate(array.T)})
    table = pl.DataFrame(columns).to_arrow().replace_schema_metadata(metadata)
    with atomic_file(path, force) as temporary:
        if format == "parquet":
            pyarrow.parquet.write_table(table, temporary, row_group_size=_GROUP_ROWS, compression="zstd")
        elif format == "arrow":
            with pa.ipc.new_file(str(temporary), table.schema) as file:
                file.write_table(table, max_chunksize=_GROUP_ROWS)
        else:
            pyarrow.csv.write_csv(table, temporary)
