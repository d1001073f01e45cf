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
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import polars as pl
import pyarrow as pa

from koffline.data import remote
from koffline.data.columns import natural_key
from koffline.data.kinds import CSV, HDF5, NO_TABLE, NPZ, PARQUET, STREAM
from koffline.data.table.arrow_frames import frame_of_batch, polars_type
from koffline.errors import DataError, listed
from koffline.store.files import reading
from koffline.untrusted.arrays import open_npz
from koffline.untrusted.hdf5 import open_hdf5
from koffline.untrusted.limits import Refused

Columns = Mapping[str, Any]  # names and types
_Frames = Iterator[pl.DataFrame]


@dataclass(frozen=True)
class Reader:
    """An open file of a table: names and types of its columns, and its metadata
    (``described``).

    frames: yields columns, if possible with the requested types, in frames of at most N
    rows. declared: bytes of columns in memory, for numbers of at least ``itemsize``,
    and bytes that are decoded at once; 0 if the format does not tell sizes.
    """

    fields: list[tuple[str, Any]]
    frames: Callable[[Columns, int], _Frames]
    described: Mapping[bytes, bytes] = field(default_factory=dict)
    declared: Callable[[Columns, int], tuple[int, int]] = lambda columns, itemsize: (
        0,
        0,
    )


@contextlib.contextmanager
def table_reader(name: str, kind: str, as_texts: bool = False) -> Iterator[Reader]:
    """Open a file of a table. Raises DataError, also if its arrays are no columns.

    as_texts: numbers in CSV stay texts, whatever type is requested.
    """
    with faults(name, kind), contextlib.ExitStack() as stack:
        if kind == CSV:
            yield _csv_reader(name, as_texts)
        elif kind == NPZ:
            archive = stack.enter_context(
                open_npz(stack.enter_context(remote.local_file(name)))
            )
            headers: dict[str, Any] = {}
            for each in filter(archive.__contains__, archive.datasets):
                with contextlib.suppress(Refused):  # it cannot be read
                    headers[each] = archive.dataset(each)
            yield _arrays_reader(archive.arrays(_columns(headers, name)))
        elif kind == HDF5:
            file = stack.enter_context(
                open_hdf5(stack.enter_context(remote.local_file(name)))
            )
            datasets = {each: file.raw[each] for each in file.datasets}
            yield _arrays_reader(file.slices(_columns(datasets, name)))
        else:
            source = stack.enter_context(open_bytes(name))
            yield (
                _parquet_reader(name, source)
                if kind == PARQUET
                else _arrow_reader(name, source)
            )


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
            reason = " ".join(str(error).partition("You might want")[0].split())[:300]
            if "utf" in reason.lower():
                raise DataError(
                    f"{name} is not UTF-8 text; save it as UTF-8 (or as Parquet)"
                ) from None
            reason = (
                f"{name} is a truncated or corrupt {kind} file ({reason}); copy or"
                " export it again"
            )
            raise DataError(reason) from None


def open_bytes(name: str) -> Any:
    """A file for use with ``with``; local files are opened by Arrow itself.

    Then Arrow's threads hold no Python object when the process ends, which would abort
    it.
    """
    if remote.is_url(name):
        import fsspec

        return fsspec.open(name, "rb")

    return pa.OSFile(name)


def width_of(kind: Any) -> int:
    """Bytes of a value of fixed size (of a list: of one number), or of the reference to
    any other value.
    """
    kind = getattr(kind, "inner", kind)
    if kind.is_numeric():
        found = re.search(r"\d+", str(kind))
    else:
        found = None
    if found and not kind.is_decimal():
        return int(found.group()) // 8
    if kind == pl.Boolean:
        return 1
    return 8


_DELIMITERS = ",;\t|"
_MOST_HEADER = 2**22
_CODECS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}


def _csv_reader(name: str, as_texts: bool) -> Reader:
    """A CSV file as described by its first line; names are stripped of blanks.

    Raises DataError.
    """
    with open_bytes(name) as file:
        mark = file.read(4)
        file.seek(0)
        codec = next(
            (codec for start, codec in _CODECS.items() if mark.startswith(start)), None
        )
        head = (pa.CompressedInputStream(file, codec) if codec else file).read(
            _MOST_HEADER
        )
    line = head.partition(b"\n")[0].partition(b"\r")[0]
    if not head.strip():
        raise DataError(f"{name} is empty; copy or export it again")
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
    delimiter = max(_DELIMITERS, key=text.count)
    if b"\r" in head and b"\n" not in head:
        end = "\r"
    else:
        end = "\n"
    header = next(csv.reader([text], delimiter=delimiter, skipinitialspace=True), [])
    names = [each.strip() for each in header]
    options = {
        "separator": delimiter,
        "eol_char": end,
        "with_column_names": lambda _: names,
    }
    frames = partial(_csv_frames, name, names, options, as_texts)
    return Reader([(each, pl.String()) for each in names], frames)


def _csv_frames(
    name: str,
    names: list[str],
    options: Mapping[str, Any],
    as_texts: bool,
    columns: Columns,
    rows: int,
) -> _Frames:
    """Frames with the requested types; if some numbers cannot be parsed, the rest is
    read as texts.

    Only an empty field is missing here; whether a word such as NA is depends on what
    the column is.

    With numbers, all columns are read, so that rows with more fields than the header
    are found.
    """
    done = 0
    with remote.local_file(name) as path:
        for types in ({},) if as_texts else (columns, {}):
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
            try:
                for whole in scan.slice(done).collect_batches(
                    chunk_size=rows, engine="streaming"
                ):
                    done += whole.height
                    if whole.to_series(
                        0
                    ).null_count():  # polars takes empty lines for rows
                        whole = whole.filter(~pl.all_horizontal(pl.all().is_null()))
                    yield from whole.select(list(columns)).iter_slices(rows)
                return
            except pl.exceptions.ComputeError as error:
                if "more fields" in str(error):
                    found = (
                        "has a row of more fields than the first line, its header"
                        f" ({listed(names, 8)})"
                    )
                    raise DataError(
                        f"{name} {found}; check its separators and quotes"
                    ) from None
                if "could not parse" not in str(error):
                    raise
                if not types:  # as text, only this can fail
                    found = "has a quote mark that is not closed, or a blank before one"
                    raise DataError(f"{name} {found}; mend that row") from None


def unpacked_bytes(name: str) -> int:
    """Bytes of a file after decompression, for .gz and .zst about, as its beginning
    suggests.

    That is about what its columns take in memory, for formats that do not tell: CSV and
    Arrow.
    """
    size = remote.size(name)
    with open_bytes(name) as file:
        mark = file.read(4)
        codec = next(
            (codec for start, codec in _CODECS.items() if mark.startswith(start)), None
        )
        if codec is None:
            return size
        file.seek(0)
        # it closes the file when it is no longer used
        stream = pa.CompressedInputStream(file, codec)
        unpacked = len(stream.read(_MOST_HEADER))
        if unpacked < _MOST_HEADER:
            packed = size
        else:
            packed = max(1, file.tell())
    return unpacked * size // packed


def _parquet_reader(name: str, source: Any) -> Reader:
    import pyarrow.parquet

    metadata = pyarrow.parquet.read_metadata(source)
    schema = metadata.schema.to_arrow_schema()
    fields = [(each.name, polars_type(each.type)) for each in schema]
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
    opened: Any, found: Columns, columns: Columns, itemsize: int
) -> tuple[int, int]:
    """Bytes of the columns in memory, and of the largest lists that a row group may
    hold in one row.
    """
    metadata = opened.metadata
    kinds = {name: found[name] for name in columns}
    paths = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    # the numbers of a list lie one or two levels below it
    tops = ((path, path.rsplit(".", 1)[0], path.rsplit(".", 2)[0]) for path in paths)
    leaves = {
        i: name for i, names in enumerate(tops) for name in names if name in kinds
    }
    total = at_once = 0
    for number in range(metadata.num_row_groups):
        # Arrow ends the process where `group.column` meets damaged statistics, and
        # raises here.
        next(opened.iter_batches(1, [number], list(kinds), use_threads=False), None)
        group = metadata.row_group(number)
        nested = 0
        for i, name in leaves.items():
            chunk = group.column(i)
            kind = kinds[name]
            size = chunk.num_values * max(itemsize, width_of(kind))
            if kind.is_nested():
                nested += size
            elif chunk.num_values != group.num_rows:
                said = (
                    f"column {name} has {chunk.num_values} values in {group.num_rows}"
                    " rows"
                )
                raise Refused(f"{said}; it is damaged: export it again")
            total += max(
                size,
                chunk.total_uncompressed_size if kind in (pl.String, pl.Binary) else 0,
            )
        at_once = max(at_once, nested)
    return total, at_once


def _arrow_reader(name: str, source: Any) -> Reader:
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
            count = getattr(opened, "num_record_batches", None)
            for whole in (
                opened if count is None else map(opened.get_batch, range(count))
            ):
                for start in range(0, whole.num_rows, rows):
                    yield frame_of_batch(
                        whole.select(list(columns)).slice(start, rows), name
                    )

    return Reader(
        [(each.name, polars_type(each.type)) for each in schema],
        frames,
        schema.metadata or {},
    )


def _arrays_reader(arrays: Mapping[str, Any]) -> Reader:
    """Arrays with one number, text or list of numbers per row, in memory or read by
    slices.
    """

    def series(name: str, rows: slice) -> pl.Series:
        array = arrays[name][rows]
        return pl.Series(name, array.reshape(-1) if array.shape[1:] == (1,) else array)

    def frames(columns: Columns, rows: int) -> _Frames:
        for start in range(0, len(arrays[next(iter(columns))]), rows):
            yield pl.DataFrame(
                [series(name, slice(start, start + rows)) for name in columns]
            )

    def declared(columns: Columns, itemsize: int) -> tuple[int, int]:
        chosen = [arrays[name] for name in columns]
        return (
            sum(array.size * max(itemsize, array.dtype.itemsize) for array in chosen),
            0,
        )

    return Reader(
        [(name, series(name, slice(0)).dtype) for name in arrays],
        frames,
        declared=declared,
    )


# robomimic's data/demo_0/obs, and the like
_EPISODE_GROUP = re.compile(
    r"^((?:[^/]+/)*(?:demo|episode|ep|traj|trajectory|rollout)[_-]?\d+)/", re.I
)


def _columns(found: Mapping[str, Any], name: str) -> list[str]:
    """Arrays with one row per transition: those with the most frequent number of rows.

    Raises DataError if there are none, or if episodes are groups of their own.
    """
    groups = sorted(
        {match.group(1) for each in found if (match := _EPISODE_GROUP.match(each))},
        key=natural_key,
    )
    if len(groups) > 1:
        said = (
            f"{name} holds one group of arrays per episode ({listed(groups, 3)}), which"
            " is not read"
        )
        remedy = (
            "join the arrays of all groups into one per key, with the group's number as"
            " episode_ids"
        )
        raise DataError(f"{said}; {remedy}")
    # Minari's, d3rlpy's
    is_other = any(each.startswith(("episode_0/", "num_episodes")) for each in found)
    kept = {
        each: array.shape[0]
        for each, array in found.items()
        if len(array.shape or ()) in (1, 2) and 0 not in array.shape
        if array.dtype.kind in "biuf"
        or (array.dtype.kind == "U" and len(array.shape) == 1)
    }
    rows, count = Counter(kept.values()).most_common(1)[0] if kept else (0, 0)
    if count < 3 or is_other:
        raise DataError(f"{name} {NO_TABLE}")
    return [each for each, its_rows in kept.items() if its_rows == rows]
