"""Rows of one Parquet, Arrow or CSV file as batches, in the columns and types that the table has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from koffline.data.table import csv_files
from koffline.data.table.faults import open_bytes, table_faults
from koffline.data.table.recognition import CSV, PARQUET, STREAM, TableFile
from koffline.data.table.values import is_naive, storage_type
from koffline.errors import DataError


@contextlib.contextmanager
def arrow_reader(file: TableFile) -> Iterator[Any]:
    """pyarrow's reader of a Parquet file, Arrow file or Arrow stream."""
    import pyarrow as pa
    import pyarrow.parquet

    with table_faults(file.name, file.kind), open_bytes(file.name) as source:
        if file.kind == PARQUET:
            # Texts as dictionaries: what repeats in the file does not multiply before it is looked at.
            with pyarrow.parquet.ParquetFile(source, pre_buffer=False) as opened:
                schema, metadata = opened.schema_arrow, opened.metadata  # made anew whenever asked for
                texts = [field.name for field in schema if pa.types.is_string(field.type)]
                texts += [field.name for field in schema if pa.types.is_binary(field.type)]
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
        open_reader = pa.ipc.open_stream if head == STREAM else pa.ipc.open_file
        with open_reader(source) as opened:
            yield _ArrowReader(opened)


@dataclass(frozen=True)
class _ParquetReader:
    opened: Any
    schema: Any

    def batches(self, columns: Sequence[str], batch_rows: int) -> Iterator[Any]:
        yield from self.opened.iter_batches(batch_rows, columns=list(columns), use_threads=False)


@dataclass(frozen=True)
class _ArrowReader:
    opened: Any

    @property
    def schema(self) -> Any:
        return self.opened.schema

    def batches(self, columns: Sequence[str], batch_rows: int) -> Iterator[Any]:
        stream = not hasattr(self.opened, "num_record_batches")
        parts = self.opened if stream else map(self.opened.get_batch, range(self.opened.num_record_batches))
        for whole in parts:
            chosen = whole.select(list(columns))
            chosen.validate(full=True)  # offsets of a stranger's file may point anywhere
            for start in range(0, chosen.num_rows, batch_rows):
                yield chosen.slice(start, batch_rows)


def file_batches(
    file: TableFile, columns: Sequence[str], types: Mapping[str, Any], rows: int
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
        for batch in opened.batches(stored, rows):
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
