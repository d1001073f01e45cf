"""Parquet, Arrow, HDF5 and NPZ files: rows as frames, what a file says of its columns; a log as a table.

pyarrow reads them: polars ends the process on a damaged page or message (it allocates the length that is
declared there), decodes a row group at a time, and tells no sizes before it reads.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from koffline.data import remote
from koffline.data.flat import flat_arrays
from koffline.data.raw import describe_log
from koffline.data.table.files import HDF5, NO_TABLE, NPZ, PARQUET, STREAM, faults, open_bytes, width_of
from koffline.data.table.problems import listed
from koffline.data.transitions import Transitions
from koffline.errors import DataError
from koffline.store.files import atomic_file
from koffline.untrusted.arrays import array_headers, array_names, read_arrays
from koffline.untrusted.hdf5 import open_hdf5
from koffline.untrusted.limits import Refused


@contextlib.contextmanager
def table_reader(name: str, kind: str) -> Iterator[ParquetReader | ArrowReader | ArraysReader]:
    """The schema and rows of a Parquet file, Arrow file or stream, or of arrays in HDF5 or NPZ."""
    import pyarrow as pa
    import pyarrow.parquet

    if kind in (HDF5, NPZ):
        with faults(name, kind), remote.local_file(name) as path:
            if kind == NPZ:
                reader = arrays_reader(_headers(Path(path)), name)
                yield replace(reader, arrays=read_arrays(Path(path), list(reader.arrays)))
                return
            with open_hdf5(Path(path)) as file:
                reader = arrays_reader({each: file.raw[each] for each in file.datasets}, name)
                file.slices(list(reader.arrays))
                yield reader
        return
    with faults(name, kind), open_bytes(name) as source:
        if kind == PARQUET:
            opened = pyarrow.parquet.ParquetFile(source, pre_buffer=False)
            schema = opened.schema_arrow  # not cached: made at every access
            texts = [each.name for each in schema if polars_type(each.type) in (pl.String, pl.Binary)]
            if texts:  # as dictionaries: what repeats in the file does not multiply before it is looked at
                options = {"metadata": opened.metadata, "pre_buffer": False, "read_dictionary": texts}
                source.seek(0)
                opened = pyarrow.parquet.ParquetFile(source, **options)
            yield ParquetReader(opened, schema)
            return
        start = source.read(4)
        source.seek(0)
        if start == STREAM:
            with pa.ipc.open_stream(source) as found:
                yield ArrowReader(source, True, found.schema)
        else:
            with pa.ipc.open_file(source) as found:
                yield ArrowReader(source, False, found.schema)


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


def frame_of(batch: Any) -> pl.DataFrame:
    """Convert a record batch, dictionaries decoded, to a frame. Raises ArrowInvalid if it is damaged."""
    import pyarrow as pa

    batch.validate(full=True)  # an untrusted file may hold wrong offsets or invalid texts
    return pl.DataFrame(pa.Table.from_batches([batch])).with_columns(pl.col(pl.Categorical).cast(pl.String))


@dataclass(frozen=True)
class ParquetReader:
    """An open Parquet file; ``schema`` is as the file has it."""

    opened: Any
    schema: Any

    def batches(self, columns: list[str], rows: int) -> Iterator[Any]:
        """The columns in record batches of at most ``rows`` rows."""
        yield from self.opened.iter_batches(rows, columns=columns, use_threads=False)

    def declared(self, columns: Iterable[str], itemsize: int) -> tuple[int, int]:
        """Bytes of the columns in memory, and of the largest lists that a row group may have in one row."""
        metadata = self.opened.metadata
        kinds = {name: polars_type(self.schema.field(name).type) for name in columns}
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
                    found = f"column {name} has {chunk.num_values} values in {group.num_rows} rows"
                    raise Refused(f"{found}; it is damaged: export it again")
                total += max(size, chunk.total_uncompressed_size if kind in (pl.String, pl.Binary) else 0)
            at_once = max(at_once, nested)
        return total, at_once


@dataclass(frozen=True)
class ArrowReader:
    """An open stream, or a file whose end says where its batches are."""

    source: Any
    is_stream: bool
    schema: Any

    def declared(self, columns: Iterable[str], itemsize: int) -> tuple[int, int]:
        """Zero: the format declares no sizes, so rows are counted when they are read."""
        return 0, 0

    def batches(self, columns: list[str], rows: int) -> Iterator[Any]:
        """The columns in record batches of at most ``rows`` rows."""
        import pyarrow as pa

        self.source.seek(0)
        indices = sorted(self.schema.get_field_index(name) for name in columns)
        options = pa.ipc.IpcReadOptions(included_fields=indices, use_threads=False)
        opening = pa.ipc.open_stream if self.is_stream else pa.ipc.open_file
        with opening(self.source, options=options) as opened:
            count = 0 if self.is_stream else opened.num_record_batches
            for whole in opened if self.is_stream else map(opened.get_batch, range(count)):
                for start in range(0, whole.num_rows, rows):
                    yield whole.select(columns).slice(start, rows)


@dataclass(frozen=True)
class ArraysReader:
    """Arrays as columns: of one number (or text) a row, or of a list of numbers."""

    arrays: dict[str, Any]
    schema: Any

    def declared(self, columns: Iterable[str], itemsize: int) -> tuple[int, int]:
        """Bytes of the columns in memory; they are read by slices."""
        arrays = [self.arrays[name] for name in columns]
        return sum(array.size * max(itemsize, array.dtype.itemsize) for array in arrays), 0

    def batches(self, columns: list[str], rows: int) -> Iterator[Any]:
        """The columns in record batches of at most ``rows`` rows."""
        import pyarrow as pa

        for start in range(0, len(self.arrays[columns[0]]), rows):
            found = []
            for name in columns:
                block = self.arrays[name][start : start + rows]
                flat = block.astype(block.dtype.newbyteorder("="), copy=False).reshape(-1)
                column = pa.array(flat.tolist() if flat.dtype.kind == "U" else flat)
                is_list = pa.types.is_fixed_size_list(self.schema.field(name).type)
                found.append(pa.FixedSizeListArray.from_arrays(column, block.shape[1]) if is_list else column)
            yield pa.record_batch(found, columns)


def _headers(path: Path) -> dict[str, Any]:
    """Shapes and dtypes of an archive's arrays; None for what is none that is read."""
    found: dict[str, Any] = {}
    for name in array_names(path):
        found[name] = None
        with contextlib.suppress(Refused):
            found |= array_headers(path, [name])
    return found


def arrays_reader(found: Mapping[str, Any], name: str) -> ArraysReader:
    """Reader of the arrays with one row per transition; that is the most frequent number of rows.

    Raises DataError where there are none, or episodes are groups of their own.
    """
    import pyarrow as pa

    is_other = any(each.startswith(("episode_0/", "num_episodes")) for each in found)  # Minari's, d3rlpy's
    kept = {
        each: array
        for each, array in found.items()
        if array is not None and len(array.shape) in (1, 2) and 0 not in array.shape
        if array.dtype.kind in "biuf" or (array.dtype.kind == "U" and len(array.shape) == 1)
    }
    rows, count = Counter(array.shape[0] for array in kept.values()).most_common(1)[0] if kept else (0, 0)
    if count < 3 or is_other:
        raise DataError(f"{name} {NO_TABLE}")
    kept = {each: array for each, array in kept.items() if array.shape[0] == rows}
    fields = {}
    for each, array in kept.items():
        is_text, width = array.dtype.kind == "U", math.prod(array.shape[1:])
        kind = pa.string() if is_text else pa.from_numpy_dtype(array.dtype.newbyteorder("="))
        fields[each] = kind if width == 1 else pa.list_(kind, width)
    out = [f"{each} ({_about(array)})" for each, array in found.items() if each not in kept]
    said = f"no number or list of numbers for each of {rows} rows: {listed(out)}" if out else ""
    return ArraysReader(kept, pa.schema(fields, {LEFT_OUT: said}))


def _about(array: Any) -> str:
    """Shape and dtype of an array that is no column."""
    if array is None:
        return "no plain array"
    text = "texts of any length" if array.dtype.kind == "O" else str(array.dtype)
    return f"{text}, shape {tuple(array.shape or ())}"


# Beside the schema of arrays: which of them are no columns, and why.
LEFT_OUT = "koffline left out"
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
        if array.ndim == 1:
            columns[key] = pa.array(array)
        elif key != "actions" and as_lists:
            flat = np.ascontiguousarray(array).reshape(-1)
            columns[key] = pa.FixedSizeListArray.from_arrays(pa.array(flat), array[0].size)
        else:
            columns.update({f"{key}_{i}": pa.array(array[:, i]) for i in range(array.shape[1])})
    table = pa.table(columns).replace_schema_metadata(metadata)
    with atomic_file(path, force) as temporary:
        if format == "parquet":
            pyarrow.parquet.write_table(table, temporary, row_group_size=_GROUP_ROWS, compression="zstd")
        elif format == "arrow":
            with pa.ipc.new_file(str(temporary), table.schema) as file:
                file.write_table(table, max_chunksize=_GROUP_ROWS)
        else:
            pyarrow.csv.write_csv(table, temporary)
