"""Rows of one Parquet or Arrow file as frames, and what the file says of its columns before they are read.

pyarrow reads them: polars ends the process on a damaged page or message (it allocates the length that is
declared there), decodes a row group at a time, and tells no sizes before it reads.
"""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import polars as pl

from koffline.data.table.files import PARQUET, STREAM, TableFile, faults, open_bytes
from koffline.untrusted.limits import Refused

_MAGIC_BYTES = 8  # before the stream in an Arrow file
# Places of fields in the tables of Arrow's Message.fbs.
_HEADER, _DICTIONARY, _BUFFERS, _COMPRESSION = 2, 1, 2, 3


@contextlib.contextmanager
def arrow_reader(file: TableFile) -> Iterator[_ParquetReader | _ArrowReader]:
    """The schema and rows of a Parquet file, Arrow file or Arrow stream."""
    import pyarrow as pa
    import pyarrow.parquet

    with faults(file.name, file.kind), open_bytes(file.name) as source:
        if file.kind == PARQUET:
            # Texts as dictionaries: what repeats in the file does not multiply before it is looked at.
            with pyarrow.parquet.ParquetFile(source, pre_buffer=False) as opened:
                schema, metadata = opened.schema_arrow, opened.metadata  # made anew whenever asked for
                texts = [each.name for each in schema if polars_type(each.type) in (pl.String, pl.Binary)]
                if not texts:
                    yield _ParquetReader(opened, schema, schema)
                    return
            source.seek(0)
            options = {"metadata": metadata, "pre_buffer": False, "read_dictionary": texts}
            with pyarrow.parquet.ParquetFile(source, **options) as opened:
                yield _ParquetReader(opened, opened.schema_arrow, schema)
            return
        head = source.read(4)
        source.seek(0)
        if head == STREAM:
            with pa.ipc.open_stream(source) as opened:
                yield _ArrowReader(source, 0, opened.schema, None)
            return
        with pa.ipc.open_file(source) as opened:
            yield _ArrowReader(source, _MAGIC_BYTES, opened.schema, opened.num_record_batches)


@cache
def polars_type(kind: Any) -> Any:
    """The type that polars has for one of Arrow's, below dictionaries and extensions; Unknown for none."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        return polars_type(kind.storage_type)
    if pa.types.is_dictionary(kind):
        value = polars_type(kind.value_type)
        return pl.Unknown() if value.is_nested() else value  # one list in every row: a small file, long rows
    if pa.types.is_decimal(kind):
        return pl.Decimal(min(kind.precision, 38), kind.scale)
    try:
        return pl.DataFrame(pa.table({"": pa.nulls(0, kind)})).dtypes[0]
    except (ValueError, pl.exceptions.PolarsError, pl.exceptions.PanicException):
        return pl.Unknown()


def frame_of(batch: Any) -> pl.DataFrame:
    """A record batch with its dictionaries as what they hold. Raises ArrowInvalid for a damaged one."""
    import pyarrow as pa

    batch.validate(full=True)  # offsets of a stranger's file may point anywhere, texts may be none
    arrays = []
    for column in batch.columns:
        while isinstance(column, pa.ExtensionArray):
            column = column.storage
        wide = pa.types.is_decimal(column.type) and not pa.types.is_decimal128(column.type)
        arrays.append(column.cast(pa.decimal128(38, column.type.scale)) if wide else column)
    found = pl.DataFrame(pa.table(arrays, names=batch.schema.names))
    return found.with_columns(pl.col(pl.Categorical).cast(pl.String))


def width_of(kind: Any) -> int:
    """Bytes of a value of fixed size; of any other those of its reference."""
    found = re.search(r"\d+", str(kind)) if kind.is_numeric() else None
    return int(found.group()) // 8 if found and not kind.is_decimal() else 1 if kind == pl.Boolean else 8


@dataclass(frozen=True)
class _ParquetReader:
    """``schema`` has texts as dictionaries, ``stored`` as the file has them."""

    opened: Any
    schema: Any
    stored: Any

    def batches(self, columns: list[str], rows: int) -> Iterator[Any]:
        yield from self.opened.iter_batches(rows, columns=columns, use_threads=False)

    def declared(self, columns: Iterable[str], itemsize: int) -> tuple[int, int]:
        """Bytes of the columns in memory, and of the largest lists that a row group may have in one row."""
        metadata = self.opened.metadata
        kinds = {name: polars_type(self.schema.field(name).type) for name in columns}
        lists = {f"{name}.": name for name, kind in kinds.items() if kind.is_nested()}
        leaves = {}
        for i in range(metadata.num_columns):
            path = metadata.schema.column(i).path
            name = path if path in kinds else next((lists[n] for n in lists if path.startswith(n)), None)
            if name is not None:
                leaves[name] = i
        total = at_once = 0
        for number in range(metadata.num_row_groups):
            # Arrow ends the process where `group.column` meets damaged statistics, and raises here.
            next(self.opened.iter_batches(1, [number], list(leaves), use_threads=False), None)
            group, nested = metadata.row_group(number), 0
            for name, i in leaves.items():
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
class _ArrowReader:
    """``source`` has a stream from byte ``start`` on; a file's end says how many batches there are."""

    source: Any
    start: int
    schema: Any
    count: int | None

    @property
    def stored(self) -> Any:
        return self.schema

    def declared(self, columns: Iterable[str], itemsize: int) -> tuple[int, int]:
        self.source.seek(self.start)
        return 0, _bytes_at_once(self.source)

    def batches(self, columns: list[str], rows: int) -> Iterator[Any]:
        import pyarrow as pa

        self.source.seek(self.start)
        indices = sorted(self.schema.get_field_index(name) for name in columns)
        options = pa.ipc.IpcReadOptions(included_fields=indices, use_threads=False)
        found = 0
        with pa.ipc.open_stream(self.source, options=options) as opened:
            for whole in opened:
                found += 1
                for start in range(0, whole.num_rows, rows):
                    yield whole.select(columns).slice(start, rows)
        if self.count is not None and found != self.count:
            raise Refused(f"it has {found} of {self.count} parts that its end lists; copy or export it again")


def _bytes_at_once(source: Any) -> int:
    """Bytes of the largest record batch and all dictionaries of the stream that begins here.

    Arrow allocates what a compressed buffer declares in its first eight bytes, and offers no way to ask for
    it: the few fields of its messages (flatbuffers) that matter are looked up here. Raises Refused.
    """
    import pyarrow as pa

    dictionaries = largest = 0
    for message in pa.ipc.MessageReader.open_stream(source):
        if message.type == "schema":
            continue
        try:
            declared = _declared(message)
        except (struct.error, TypeError):
            raise Refused("a message of it is damaged; copy or export it again") from None
        if message.type == "dictionary":
            dictionaries += declared
        else:
            largest = max(largest, declared)
    return dictionaries + largest


def _declared(message: Any) -> int:
    content, body = memoryview(message.metadata), message.body
    batch = _follow(content, _field(content, _follow(content, 0), _HEADER))
    if message.type == "dictionary":
        batch = _follow(content, _field(content, batch, _DICTIONARY))
    if _field(content, batch, _COMPRESSION) is None:
        return len(body)
    buffers = _follow(content, _field(content, batch, _BUFFERS))
    total = 0
    for i in range(struct.unpack_from("<I", content, buffers)[0]):
        offset, length = struct.unpack_from("<qq", content, buffers + 4 + 16 * i)
        if length:
            # -1 says that this buffer is not compressed
            total += max(length, struct.unpack_from("<q", body, offset)[0])
    return total


def _follow(content: memoryview, place: Any) -> int:
    """Where an offset leads."""
    return int(place + struct.unpack_from("<I", content, place)[0])


def _field(content: memoryview, table: int, index: int) -> int | None:
    """Where a table has its field, if it has it."""
    described = table - struct.unpack_from("<i", content, table)[0]
    if 4 + 2 * index >= struct.unpack_from("<H", content, described)[0]:
        return None
    offset = struct.unpack_from("<H", content, described + 4 + 2 * index)[0]
    return table + offset if offset else None
