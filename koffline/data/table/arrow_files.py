"""Rows of one Parquet, Arrow or CSV file as batches, in the columns and types that the table has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from koffline.data.table import csv_files
from koffline.data.table.arrow_messages import MAGIC_BYTES, bytes_at_once
from koffline.data.table.faults import open_bytes, table_faults
from koffline.data.table.recognition import CSV, PARQUET, STREAM, TableFile
from koffline.data.table.room import Room
from koffline.data.table.values import is_list, is_naive, is_text, storage_type
from koffline.errors import DataError
from koffline.untrusted.limits import Refused


@contextlib.contextmanager
def arrow_reader(file: TableFile) -> Iterator[Any]:
    """The schema and rows of a Parquet file, Arrow file or Arrow stream."""
    import pyarrow as pa
    import pyarrow.parquet

    with table_faults(file.name, file.kind), open_bytes(file.name) as source:
        if file.kind == PARQUET:
            # Texts as dictionaries: what repeats in the file does not multiply before it is looked at.
            with pyarrow.parquet.ParquetFile(source, pre_buffer=False) as opened:
                schema, metadata = opened.schema_arrow, opened.metadata  # made anew whenever asked for
                texts = [field.name for field in schema if _is_bytes(field.type)]
                if not texts:
                    yield _ParquetReader(opened, schema)
                    return
            source.seek(0)
            options = {"metadata": metadata, "pre_buffer": False, "read_dictionary": texts}
            with pyarrow.parquet.ParquetFile(source, **options) as opened:
                yield _ParquetReader(opened, opened.schema_arrow)
            return
        head = source.read(4)
        source.seek(0)
        if head == STREAM:
            with pa.ipc.open_stream(source) as opened:
                yield _ArrowReader(source, 0, opened.schema, None)
            return
        with pa.ipc.open_file(source) as opened:
            yield _ArrowReader(source, MAGIC_BYTES, opened.schema, opened.num_record_batches)


def _is_bytes(kind: Any) -> bool:
    import pyarrow as pa

    t = pa.types
    return is_text(kind) or bool(t.is_binary(kind) or t.is_large_binary(kind) or t.is_binary_view(kind))


@dataclass(frozen=True)
class _ParquetReader:
    opened: Any
    schema: Any

    def batches(self, columns: Sequence[str], batch_rows: int, room: Room) -> Iterator[Any]:
        room.declare(*self._declared(columns, room.itemsize))
        yield from self.opened.iter_batches(batch_rows, columns=list(columns), use_threads=False)

    def _declared(self, columns: Sequence[str], itemsize: int) -> tuple[int, int]:
        """Bytes of the columns in memory, and of the largest lists that a row group may have in one row."""
        import pyarrow as pa

        metadata = self.opened.metadata
        kinds = {name: self.schema.field(name).type for name in columns}
        lists = {f"{name}.": name for name, kind in kinds.items() if is_list(storage_type(kind))}
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
                chunk, kind = group.column(i), storage_type(kinds[name])
                if is_list(kind):
                    size = chunk.num_values * max(itemsize, -(-storage_type(kind.value_type).bit_width // 8))
                    nested += size
                elif chunk.num_values != group.num_rows:
                    found = f"column {name} has {chunk.num_values} values in {group.num_rows} rows"
                    raise Refused(f"{found}; it is damaged: export it again")
                elif pa.types.is_dictionary(kinds[name]):
                    size = max(chunk.num_values * itemsize, chunk.total_uncompressed_size)
                else:
                    size = chunk.num_values * max(itemsize, -(-kind.bit_width // 8))
                total += size
            at_once = max(at_once, nested)
        return total, at_once


@dataclass(frozen=True)
class _ArrowReader:
    """``source`` has a stream from byte ``start`` on; a file's end says how many batches there are."""

    source: Any
    start: int
    schema: Any
    count: int | None

    def batches(self, columns: Sequence[str], batch_rows: int, room: Room) -> Iterator[Any]:
        import pyarrow as pa

        self.source.seek(self.start)
        room.declare(0, bytes_at_once(self.source))
        self.source.seek(self.start)
        indices = sorted(self.schema.get_field_index(name) for name in columns)
        options = pa.ipc.IpcReadOptions(included_fields=indices, use_threads=False)
        with pa.ipc.open_stream(self.source, options=options) as opened:
            found = 0
            for whole in opened:
                found += 1
                chosen = whole.select(list(columns))
                chosen.validate(full=True)  # offsets of a stranger's file may point anywhere
                for start in range(0, chosen.num_rows, batch_rows):
                    yield chosen.slice(start, batch_rows)
        if self.count is not None and found != self.count:
            raise Refused(f"it has {found} of {self.count} parts that its end lists; copy or export it again")


def file_batches(
    file: TableFile, columns: Sequence[str], types: Mapping[str, Any], rows: int, room: Room
) -> Iterator[Any]:
    """The columns in the given order and types, in batches of at most ``rows`` rows. Raises DataError."""
    wanted = {name: types[name] for name in columns}
    stored = [name for name in columns if name not in file.constants]
    if file.kind == CSV:
        yield from (_fitted(b, file, wanted) for b in csv_files.batches(file.name, stored, types, rows))
        return
    with arrow_reader(file) as opened:
        present = set(opened.schema.names)
        missing = [name for name in stored if name not in present]
        if missing:
            raise DataError(
                f"{file.name} lacks column {missing[0]}, which the first file has; mend or remove the file"
            )
        for batch in opened.batches(stored, rows, room):
            yield _fitted(batch, file, wanted)


def _fitted(batch: Any, file: TableFile, types: Mapping[str, Any]) -> Any:
    """The batch with all columns in order and in the first file's types."""
    import pyarrow as pa

    arrays = []
    for name, wanted in types.items():
        if name in file.constants:
            value = None if file.constants[name] == "__HIVE_DEFAULT_PARTITION__" else file.constants[name]
            array = _constant(value, wanted, batch.num_rows, file.name, name)
        else:
            array = batch.column(name)
        if array.type != wanted:
            try:
                if is_naive(array.type) != is_naive(wanted) and pa.types.is_timestamp(array.type):
                    raise pa.ArrowInvalid  # Arrow itself would take a local clock for UTC
                array = array.cast(wanted)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                here, there = storage_type(array.type), storage_type(wanted)
                raise DataError(
                    f"{file.name}: column {name} is {here}, in the first file {there}; write all files with "
                    "one type"
                ) from None
        arrays.append(array)
    return pa.record_batch(arrays, names=list(types))


def _constant(value: str | None, wanted: Any, rows: int, file: str, name: str) -> Any:
    import pyarrow as pa

    try:
        return pa.repeat(pa.scalar(value, pa.string()).cast(wanted), rows)
    except pa.ArrowInvalid:
        raise DataError(f"{file}: the folder's {name}={value} is no number; name another column") from None
