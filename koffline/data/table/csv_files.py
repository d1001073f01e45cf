"""CSV files, plain or compressed: the header, and rows as Arrow batches of the types that roles ask for."""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from koffline.data.table.faults import open_bytes, table_faults
from koffline.data.table.roles import Roles
from koffline.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

_DELIMITERS = ",;\t|"
_MOST_HEADER = 2**22
_BLOCK = 2**22
_CODECS = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\x28\xb5\x2f\xfd": "zstd"}
_WIDE = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


def header(name: str) -> tuple[str, ...]:
    """Column names, from the first line. Raises DataError for what is not UTF-8 text with a header."""
    with table_faults(name, "CSV"):
        names, _ = _header(name)
    return names


def column_types(roles: Roles) -> dict[str, pa.DataType]:
    """Numbers where the roles ask for them, text elsewhere."""
    import pyarrow as pa

    numbers = set(roles.numbers)
    return {name: pa.float64() if name in numbers else pa.string() for name in roles.columns}


def batches(
    name: str, columns: Sequence[str], types: Mapping[str, Any], batch_rows: int
) -> Iterator[pa.RecordBatch]:
    """The chosen columns in batches of at most ``batch_rows`` rows; empty fields are null."""
    import pyarrow.csv

    with table_faults(name, "CSV"):
        names, delimiter = _header(name)
    present = set(names)
    missing = [column for column in columns if column not in present]
    if missing:
        raise DataError(f"{name} lacks column {missing[0]}, which the first file has; mend or remove it")
    with table_faults(name, "CSV", names), _text(name) as source:
        opened = pyarrow.csv.open_csv(
            source,
            read_options=pyarrow.csv.ReadOptions(use_threads=False, block_size=_BLOCK),
            parse_options=pyarrow.csv.ParseOptions(delimiter=delimiter),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types={column: types[column] for column in columns},
                include_columns=list(columns),
                strings_can_be_null=True,
            ),
        )
        for whole in opened:
            for start in range(0, whole.num_rows, batch_rows):
                yield whole.slice(start, batch_rows)


def _header(name: str) -> tuple[tuple[str, ...], str]:
    with _text(name) as source:
        head = source.read(_MOST_HEADER)
    if not head.strip():
        raise DataError(f"{name} is empty; copy or export it again")
    line = head.splitlines()[0]
    if len(line) == _MOST_HEADER:
        raise DataError(f"{name} has no line ends in its first {_MOST_HEADER} bytes; check that it is CSV")
    if head[:2] in _WIDE:
        raise DataError(f"{name} is {_WIDE[head[:2]]} text; save the table as UTF-8 (or as Parquet)")
    if b"\0" in line:
        raise DataError(f"{name} holds zero bytes and is no CSV text; save the table as UTF-8")
    text = line.decode("utf-8-sig")
    delimiter = max(_DELIMITERS, key=text.count)
    names = next(csv.reader([text], delimiter=delimiter), [])
    return tuple(names), delimiter


@contextlib.contextmanager
def _text(name: str) -> Iterator[Any]:
    """The bytes of the file, decompressed where its first bytes say so."""
    import pyarrow as pa

    with open_bytes(name) as file:
        head = file.read(4)
        file.seek(0)
        codec = next((codec for mark, codec in _CODECS.items() if head.startswith(mark)), None)
        if codec is None:
            yield file
            return
        with pa.CompressedInputStream(file, codec) as stream:
            yield stream
