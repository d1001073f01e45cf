"""Readers of a table's files: CSV, Parquet, Arrow, HDF5 and NPZ as frames; their
errors.

Parquet and Arrow are read by pyarrow. polars would abort the process on a damaged page
or message (it allocates the length declared there), decodes a whole row group at a
time, and does not tell sizes before it reads.
"""

from __future__ import annotations

import contextlib
import csv
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import polars as pl
import pyarrow as pa

from koffline.data import remote
from koffline.data.array_layouts import (
    ENVIRONMENTS,
    GROUPS,
    RING,
    below_each_other,
    environments_of,
    episode_groups,
    has_ring,
    joined_groups,
    unrolled_ring,
)
from koffline.data.buffers import filled_rows
from koffline.data.kinds import (
    CSV,
    HDF5,
    HELD,
    JSON,
    NO_TABLE,
    NPZ,
    PARQUET,
    STREAM,
)
from koffline.data.table.arrow_frames import frame_of_batch, polars_type
from koffline.data.table.column_types import ColumnType, Types
from koffline.data.table.csv_texts import list_columns, read_preamble, with_lists
from koffline.data.table.held import HeldTable, TableSource
from koffline.data.table.json_records import BYTES_PER_BYTE, columns_of
from koffline.errors import DataError, listed
from koffline.store.files import reading
from koffline.untrusted.arrays import ArrayHeader, OpenArrays, open_npz
from koffline.untrusted.hdf5 import open_hdf5
from koffline.untrusted.limits import Refused, check_memory

if TYPE_CHECKING:
    import pyarrow.parquet


Columns = Types  # names and types


@runtime_checkable
class BytesFile(Protocol):
    """An open file of bytes, of this machine or of a storage elsewhere."""

    def read(self, size: int = -1, /) -> bytes:
        """The next bytes, all that are left by default."""

    def seek(self, offset: int, /) -> int:
        """Go on reading at a byte."""

    def tell(self) -> int:
        """The byte at which reading goes on."""


_Frames = Iterator[pl.DataFrame]


def _no_sizes(columns: Columns, itemsize: int) -> tuple[int, int]:
    """What a format declares of columns if it does not tell sizes."""
    return 0, 0


@dataclass(frozen=True)
class Reader:
    """An open file of a table: names and types of its columns, and its metadata
    (``described``).

    layout: the tool's, where the file itself tells it: a name of `tools.TOOLS`.
    frames: yields columns, if possible with the requested types, in frames of at most N
    rows. declared: bytes of columns in memory, for numbers of at least ``itemsize``,
    and bytes that are decoded at once; 0 if the format does not tell sizes. notes: on
    rows of the file that are no rows of the table.
    """

    fields: list[tuple[str, ColumnType]]
    frames: Callable[[Columns, int], _Frames]
    described: Mapping[bytes, bytes] = field(default_factory=dict)
    declared: Callable[[Columns, int], tuple[int, int]] = _no_sizes
    layout: str = ""
    notes: tuple[str, ...] = ()


@contextlib.contextmanager
def table_reader(
    source: TableSource, kind: str, as_texts: bool = False
) -> Iterator[Reader]:
    """Open a file of a table, or a table in memory. Raises DataError, also if its
    arrays are no columns.

    as_texts: numbers in CSV stay texts, whatever type is requested.
    """
    name = str(source)
    with faults(name, kind), contextlib.ExitStack() as stack:
        if isinstance(source, HeldTable):
            yield _held_reader(source)
        elif kind == CSV:
            yield _csv_reader(name, as_texts)
        elif kind == JSON:
            yield _json_reader(name)
        elif kind == NPZ:
            path = stack.enter_context(remote.local_file(name))
            archive = stack.enter_context(open_npz(path))
            headers: dict[str, ArrayHeader] = {}
            for key in filter(archive.__contains__, archive.datasets):
                with contextlib.suppress(Refused):  # it cannot be read
                    headers[key] = archive.dataset(key)
            yield _checked_arrays_reader(archive, headers, name)
        elif kind == HDF5:
            path = stack.enter_context(remote.local_file(name))
            file = stack.enter_context(open_hdf5(path))
            datasets = {key: file.raw[key] for key in file.datasets}
            if has_ring(datasets):
                yield _arrays_reader(unrolled_ring(file, name), layout=RING)
            else:
                yield _checked_arrays_reader(file, datasets, name)
        else:
            opened = stack.enter_context(open_bytes(name))
            if kind == PARQUET:
                yield _parquet_reader(name, opened)
            else:
                yield _arrow_reader(name, opened)


@contextlib.contextmanager
def faults(name: str, kind: str) -> Iterator[None]:
    """Turn errors of polars, pyarrow and the storage into one DataError; our own errors
    pass unchanged.
    """
    with remote.storage_faults(name) if remote.is_url(name) else reading(name, kind):
        try:
            yield
        except Refused:
            raise  # our own error, not a library's ValueError
        except (
            pl.exceptions.PanicException,
            pl.exceptions.PolarsError,
            ValueError,
        ) as error:
            # polars' advice on its own options helps nobody here
            reason = " ".join(str(error).partition("You might want")[0].split())[:300]
            if "utf" in reason.lower():
                raise DataError(
                    f"{name} is no table, or not UTF-8 text; save it as UTF-8 (or as"
                    " Parquet)"
                ) from None
            if kind == HELD:
                raise DataError(
                    f"{name} cannot be read as a table ({reason}); mend that column, or"
                    " leave it out"
                ) from None
            raise DataError(
                f"{name} is a truncated or corrupt {kind} file ({reason}); copy or"
                " export it again"
            ) from None


def open_bytes(name: str) -> AbstractContextManager[BytesFile]:
    """A file for use with ``with``; local files are opened by Arrow itself.

    Then Arrow's threads hold no Python object when the process ends, which would abort
    it.
    """
    if remote.is_url(name):
        import fsspec

        return fsspec.open(name, "rb")

    return pa.OSFile(name)


def width_of(kind: ColumnType) -> int:
    """Bytes of a value of fixed size (of a list: of one number), or of the reference to
    any other value.
    """
    kind = getattr(kind, "inner", kind)
    if kind == pl.Boolean:
        return 1
    if kind.is_numeric() and not kind.is_decimal():
        bits = re.search(r"\d+", str(kind))
        if bits is not None:
            return int(bits.group()) // 8
    return 8


_IN_PARQUET = "; write it as Parquet, which is read in pieces"
_DELIMITERS = ",;\t|"
_MOST_HEADER = 2**22
_CODECS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}


def _csv_reader(name: str, as_texts: bool) -> Reader:
    """A CSV file as described by its first line; names are stripped of blanks.

    as_texts: numbers stay texts, whatever type is requested. Raises DataError.
    """
    with open_bytes(name) as file:
        codec = _codec_of(file)
        stream = file
        if codec is not None:
            stream = pa.CompressedInputStream(file, codec)
        head = stream.read(_MOST_HEADER)
    if not head.strip():
        raise DataError(f"{name} is empty; copy or export it again")
    preamble = read_preamble(head, name)
    line = preamble.header
    if len(line) == _MOST_HEADER:
        raise DataError(
            f"{name} has no line ends in its first {_MOST_HEADER} bytes; check that it"
            " is CSV"
        )
    text = line.decode("utf-8-sig")
    if text.count('"') % 2:
        raise DataError(
            f"{name} has a line break or a single quote mark in a column name;"
            " rename it"
        )
    delimiter = preamble.delimiter or max(_DELIMITERS, key=text.count)
    end = preamble.end
    header = next(csv.reader([text], delimiter=delimiter, skipinitialspace=True), [])
    names = [cell.strip() for cell in header]
    options = {
        "separator": delimiter,
        "eol_char": end,
        "with_column_names": lambda _: names,
        "skip_rows": preamble.skipped,
        "comment_prefix": preamble.comment,
    }
    fields: list[tuple[str, ColumnType]] = [(column, pl.String()) for column in names]
    rows = csv.reader(preamble.rows, delimiter=delimiter, skipinitialspace=True)
    for place in list_columns(rows, len(names)):
        fields[place] = (names[place], pl.List(pl.Float64))
    frames = partial(_csv_frames, name, names, options, as_texts)
    return Reader(fields, frames)


def _json_reader(name: str) -> Reader:
    """A JSON file, read as a whole. Raises DataError, Refused if it is too large."""
    check_memory(unpacked_bytes(name) * BYTES_PER_BYTE, _IN_PARQUET)
    with open_bytes(name) as file:
        codec = _codec_of(file)
        stream = file
        if codec is not None:
            stream = pa.CompressedInputStream(file, codec)
        text = stream.read().decode("utf-8")
    columns, layout = columns_of(text, name)

    def frames(wanted: Columns, rows: int) -> _Frames:
        yield from pl.DataFrame([columns[key] for key in wanted]).iter_slices(rows)

    fields = [(key, column.dtype) for key, column in columns.items()]
    return Reader(fields, frames, layout=layout)


def _codec_of(file: BytesFile) -> str | None:
    """The compression of an open file by its first bytes; the file is then at its
    beginning.
    """
    mark = file.read(4)
    file.seek(0)
    for start, codec in _CODECS.items():
        if mark.startswith(start):
            return codec
    return None


def _csv_frames(
    name: str,
    names: list[str],
    options: Mapping[str, Any],
    as_texts: bool,
    columns: Columns,
    rows: int,
) -> _Frames:
    """Frames of at most ``rows`` rows with the requested types; if some numbers cannot
    be parsed, the rest is read as texts.

    name: of the file. names: all its columns. options: how polars reads it. as_texts:
    numbers stay texts. columns: the requested ones, with types.

    Only an empty field is missing here; whether a word such as NA is depends on what
    the column is.

    With numbers, all columns are read, so that rows with more fields than the header
    are found. Raises DataError for such rows, and for quote marks that are not closed.
    """
    done = 0
    attempts: list[Columns] = [{}]
    lists = [key for key, kind in columns.items() if kind == pl.List(pl.Float64)]
    if not as_texts:
        plain = {key: kind for key, kind in columns.items() if key not in lists}
        attempts.insert(0, plain)
    with remote.local_file(name) as path:
        for types in attempts:
            scan = pl.scan_csv(
                path,
                glob=False,
                infer_schema=False,
                schema_overrides=types,
                raise_if_empty=False,
                **options,
            )
            texts = pl.col(pl.String).str.strip_chars()
            scan = scan.with_columns(pl.when(texts != "").then(texts))
            if pl.Float64 not in columns.values():
                scan = scan.select(list(columns))
            batches = scan.slice(done).collect_batches(
                chunk_size=rows, engine="streaming"
            )
            try:
                for frame in batches:
                    done += frame.height
                    # polars takes empty lines for rows
                    if frame.to_series(0).null_count():
                        frame = frame.filter(~pl.all_horizontal(pl.all().is_null()))
                    frame = frame.select(list(columns))
                    for key in lists:
                        frame = with_lists(frame, key, name, done - frame.height)
                    yield from frame.iter_slices(rows)
                return
            except pl.exceptions.ComputeError as error:
                if "more fields" in str(error):
                    raise DataError(
                        f"{name} has a row of more fields than the first line, its"
                        f" header ({listed(names, 8)}); check its separators and quotes"
                    ) from None
                if "could not parse" not in str(error):
                    raise
                if not types:  # as text, only this can fail
                    raise DataError(
                        f"{name} has a quote mark that is not closed, or a blank before"
                        " one; mend that row"
                    ) from None


def unpacked_bytes(name: str) -> int:
    """Bytes of a file after decompression, for .gz and .zst about, as its beginning
    suggests.

    That is about what its columns take in memory, for formats that do not tell: CSV and
    Arrow.
    """
    size = remote.size(name)
    with open_bytes(name) as file:
        codec = _codec_of(file)
        if codec is None:
            return size
        # it closes the file when it is no longer used
        stream = pa.CompressedInputStream(file, codec)
        unpacked = len(stream.read(_MOST_HEADER))
        if unpacked < _MOST_HEADER:
            packed = size
        else:
            packed = max(1, file.tell())
    return unpacked * size // packed


def _parquet_reader(name: str, source: BytesFile) -> Reader:
    """A Parquet file, open as ``source``; its texts are read as dictionaries."""
    import pyarrow.parquet

    metadata = pyarrow.parquet.read_metadata(source)
    schema = metadata.schema.to_arrow_schema()
    fields = [(field.name, polars_type(field.type)) for field in schema]
    # texts as dictionaries: what repeats in the file does not multiply before it is
    # looked at
    texts = [name for name, kind in fields if kind in (pl.String, pl.Binary)]
    source.seek(0)
    opened = pyarrow.parquet.ParquetFile(
        source, metadata=metadata, read_dictionary=texts, pre_buffer=False
    )

    def frames(columns: Columns, rows: int) -> _Frames:
        for batch in opened.iter_batches(
            rows, columns=list(columns), use_threads=False
        ):
            yield frame_of_batch(batch, name)

    return Reader(
        fields,
        frames,
        schema.metadata or {},
        partial(_parquet_sizes, opened, dict(fields)),
    )


def _parquet_sizes(
    opened: pyarrow.parquet.ParquetFile, types: Columns, columns: Columns, itemsize: int
) -> tuple[int, int]:
    """Bytes of the columns in memory, and of the largest lists that a row group may
    hold in one row.

    types: of all columns of the file, ``opened`` by pyarrow. itemsize: bytes that a
    number takes at least. Raises Refused for row groups whose columns differ in length.
    """
    metadata = opened.metadata
    kinds = {name: types[name] for name in columns}
    names_of_leaves: dict[int, str] = {}
    for i in range(metadata.num_columns):
        path = metadata.schema.column(i).path
        # the numbers of a list lie one or two levels below it
        for name in (path, path.rsplit(".", 1)[0], path.rsplit(".", 2)[0]):
            if name in kinds:
                names_of_leaves[i] = name
    total = 0
    at_once = 0
    for number in range(metadata.num_row_groups):
        # Arrow ends the process where `group.column` meets damaged statistics, and
        # raises here.
        next(opened.iter_batches(1, [number], list(kinds), use_threads=False), None)
        group = metadata.row_group(number)
        nested = 0
        for i, name in names_of_leaves.items():
            chunk = group.column(i)
            kind = kinds[name]
            size = chunk.num_values * max(itemsize, width_of(kind))
            if kind.is_nested():
                nested += size
            elif chunk.num_values != group.num_rows:
                raise Refused(
                    f"column {name} has {chunk.num_values} values in {group.num_rows}"
                    " rows; it is damaged: export it again"
                )
            if kind in (pl.String, pl.Binary):
                size = max(size, chunk.total_uncompressed_size)
            total += size
        at_once = max(at_once, nested)
    return total, at_once


def _arrow_reader(name: str, source: BytesFile) -> Reader:
    """An Arrow stream or file; neither declares the sizes of its columns."""
    if source.read(4) == STREAM:
        opening = pa.ipc.open_stream
    else:
        opening = pa.ipc.open_file
    source.seek(0)
    with opening(source) as opened:
        schema = opened.schema

    def frames(columns: Columns, rows: int) -> _Frames:
        source.seek(0)
        indices = sorted(schema.get_field_index(name) for name in columns)
        options = pa.ipc.IpcReadOptions(included_fields=indices, use_threads=False)
        with opening(source, options=options) as opened:
            batches = opened
            # A file has its batches by number, a stream is read to its end.
            if hasattr(opened, "num_record_batches"):
                batches = map(opened.get_batch, range(opened.num_record_batches))
            for batch in batches:
                for start in range(0, batch.num_rows, rows):
                    piece = batch.select(list(columns)).slice(start, rows)
                    yield frame_of_batch(piece, name)

    return Reader(
        [(field.name, polars_type(field.type)) for field in schema],
        frames,
        schema.metadata or {},
    )


def _held_reader(source: HeldTable) -> Reader:
    """A table in memory; its texts are dictionaries or not, as it holds them."""
    table = source.table

    def frames(columns: Columns, rows: int) -> _Frames:
        for batch in table.select(list(columns)).to_batches(max_chunksize=rows):
            yield frame_of_batch(batch, source.name)

    def declared(columns: Columns, itemsize: int) -> tuple[int, int]:
        total = 0
        for name, kind in columns.items():
            numbers = table.num_rows * max(itemsize, width_of(kind))
            total += max(numbers, table.column(name).nbytes)
        return total, 0

    return Reader(
        [(field.name, polars_type(field.type)) for field in table.schema],
        frames,
        table.schema.metadata or {},
        declared,
    )


def _arrays_reader(arrays: Mapping[str, Any], layout: str = "") -> Reader:
    """Arrays with one number, text or list of numbers per row, in memory or read by
    slices. layout: of the tool that wrote them, if it is known.
    """

    def series(name: str, rows: slice) -> pl.Series:
        array = arrays[name][rows]
        if array.shape[1:] == (1,):
            array = array.reshape(-1)
        return pl.Series(name, array)

    def frames(columns: Columns, rows: int) -> _Frames:
        for start in range(0, len(arrays[next(iter(columns))]), rows):
            yield pl.DataFrame(
                [series(name, slice(start, start + rows)) for name in columns]
            )

    def declared(columns: Columns, itemsize: int) -> tuple[int, int]:
        total = 0
        for name in columns:
            total += arrays[name].size * max(itemsize, arrays[name].dtype.itemsize)
        return total, 0

    return Reader(
        [(name, series(name, slice(0)).dtype) for name in arrays],
        frames,
        declared=declared,
        layout=layout,
    )


def _checked_arrays_reader(
    file: OpenArrays, headers: Mapping[str, ArrayHeader], name: str
) -> Reader:
    """The arrays of a file with one row per transition.

    file: as opened by `open_npz` or `open_hdf5`. headers: shapes and types of its
    arrays. name: of the file. Raises DataError if its arrays are no columns.
    """
    groups = episode_groups(headers)
    if groups:
        joined = joined_groups(file, headers, groups, name)
        return _arrays_reader(joined, layout=GROUPS)
    of_steps = _of_steps(headers, most_sides=3)
    shapes = {key: tuple(headers[key].shape) for key in of_steps}
    environments = environments_of(shapes)
    if environments is not None:
        held = file.arrays(of_steps, twice=of_steps)
        filled = filled_rows(file, held)
        kept = {key: filled.of(array) for key, array in held.items()}
        arrays = below_each_other(kept, environments)
        return replace(_arrays_reader(arrays, layout=ENVIRONMENTS), notes=filled.notes)
    columns = _of_steps(headers, most_sides=2)
    # Minari's, d3rlpy's
    is_other = any(key.startswith(("episode_0/", "num_episodes")) for key in headers)
    if len(columns) < _FEWEST_COLUMNS or is_other:
        raise DataError(f"{name} {NO_TABLE}")
    rows: Mapping[str, Any]
    if hasattr(file, "slices"):
        rows = file.slices(columns)
    else:
        rows = file.arrays(columns)
    filled = filled_rows(file, rows)
    if filled.first and hasattr(file, "slices"):
        rows = file.arrays(columns, twice=columns)
    filled_columns = {key: filled.of(array) for key, array in rows.items()}
    return replace(_arrays_reader(filled_columns), notes=filled.notes)


_FEWEST_COLUMNS = 3


def _of_steps(headers: Mapping[str, ArrayHeader], most_sides: int) -> list[str]:
    """The keys of arrays with one row per transition: those with the most frequent
    number of rows. headers: shapes and types by key.
    """
    n_rows = {
        key: header.shape[0]
        for key, header in headers.items()
        if _may_be_column(header, most_sides)
    }
    if not n_rows:
        return []
    rows, _ = Counter(n_rows.values()).most_common(1)[0]
    return [key for key, number in n_rows.items() if number == rows]


def _may_be_column(array: ArrayHeader, most_sides: int) -> bool:
    """Whether an array holds one number, one text or one list of numbers in each row,
    in arrays of at most so many sides.
    """
    sides = len(array.shape or ())
    if not 1 <= sides <= most_sides or 0 in array.shape:
        return False
    is_text = array.dtype.kind == "U" and sides == 1
    return array.dtype.kind in "biuf" or is_text
