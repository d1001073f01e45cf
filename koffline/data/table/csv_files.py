"""CSV files, plain or compressed: the header, and rows as frames."""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from koffline.data import remote
from koffline.data.table.files import open_bytes
from koffline.errors import DataError
from koffline.untrusted.limits import EXPANSION, Refused, memory_allowance, shown_bytes

_DELIMITERS = ",;\t|"
_MOST_HEADER = 2**22
_CODECS = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\x28\xb5\x2f\xfd": "zstd"}
_MISSING = ["", "#N/A", "#N/A N/A", "#NA", "-NaN", "-nan", "N/A", "NA", "NULL", "NaN", "n/a", "nan", "null"]


def csv_frames(name: str, columns: dict[str, Any], rows: int) -> Iterator[pl.DataFrame]:
    """With numbers all columns are read, so that rows of more fields than the header has are found."""
    names, delimiter, end = header(name)
    done = 0
    with _local_text(name) as path:
        for types in (columns, {}):
            scan = pl.scan_csv(
                path, glob=False, separator=delimiter, eol_char=end, infer_schema=False,
                schema_overrides=types, null_values=_MISSING, truncate_ragged_lines=False,
                raise_if_empty=False,
            )  # fmt: skip
            if pl.Float64 not in columns.values():
                scan = scan.select(list(columns))
            try:
                for whole in scan.slice(done).collect_batches(chunk_size=rows, engine="streaming"):
                    done += whole.height
                    if whole.to_series(0).null_count():  # polars takes empty lines for rows
                        whole = whole.filter(~pl.all_horizontal(pl.all().is_null()))
                    yield from whole.select(list(columns)).iter_slices(rows)
                return
            except pl.exceptions.ComputeError as error:
                if "more fields" in str(error):
                    found = f"{name} has a row of more fields than the {len(names)} of its header"
                    raise DataError(f"{found}; check its separators and quotes") from None
                if not types or "could not parse" not in str(error):
                    raise


def header(name: str) -> tuple[list[str], str, str]:
    """Column names, the separator and the end of a line. Raises DataError for what is no UTF-8 text."""
    with _open_text(name) as source:
        head = source.read(_MOST_HEADER)
    if not head.strip():
        raise DataError(f"{name} is empty; copy or export it again")
    line = head.partition(b"\n")[0].partition(b"\r")[0]
    if len(line) == _MOST_HEADER:
        raise DataError(f"{name} has no line ends in its first {_MOST_HEADER} bytes; check that it is CSV")
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(f"{name} is UTF-16 text; save the table as UTF-8 (or as Parquet)")
    if b"\0" in line:
        raise DataError(f"{name} holds zero bytes and is no CSV text; save the table as UTF-8")
    text = line.decode("utf-8-sig")
    delimiter = max(_DELIMITERS, key=text.count)
    end = "\r" if b"\r" in head and b"\n" not in head else "\n"
    return next(csv.reader([text], delimiter=delimiter), []), delimiter, end


@contextlib.contextmanager
def _open_text(name: str) -> Iterator[Any]:
    """The bytes of the file, decompressed where its first bytes say so."""
    import pyarrow as pa

    with open_bytes(name) as file:
        head = file.read(4)
        file.seek(0)
        codec = next((codec for mark, codec in _CODECS.items() if head.startswith(mark)), None)
        yield file if codec is None else pa.CompressedInputStream(file, codec)


@contextlib.contextmanager
def _local_text(name: str) -> Iterator[Path]:
    """A path that polars reads: a copy of what lies elsewhere, or is compressed in a way it does not know."""
    with remote.local_file(name) as path:
        if remote.read_bytes(str(path), 3) != b"BZh":
            yield path
            return
        most, written = max(memory_allowance(), path.stat().st_size * EXPANSION), 0
        with remote.temporary_folder() as folder, (folder / "text").open("wb") as copy:
            with _open_text(str(path)) as source:
                while part := source.read(_MOST_HEADER):
                    written += copy.write(part)
                    if written > most:
                        raise Refused(f"its text takes more than {shown_bytes(most)}; export it again")
            copy.flush()
            yield Path(copy.name)
