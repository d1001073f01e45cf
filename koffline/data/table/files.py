"""The files of a table: names, kinds, errors and memory limits; reading of CSV."""

from __future__ import annotations

import contextlib
import csv
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from koffline.data import remote
from koffline.data.table.problems import natural_key
from koffline.errors import DataError, listed
from koffline.store.files import MINARI, reading
from koffline.untrusted.limits import Refused, memory_allowance, shown_bytes

PARQUET, ARROW, CSV, HDF5, NPZ = "Parquet", "Arrow", "CSV", "HDF5", "NPZ"
NO_TABLE = (
    "is no table that koffline knows (Parquet, Arrow, CSV, or arrays with one row per transition in "
    "HDF5 or NPZ); a mapping is for tables, `koffline data info` looks into other logs"
)
_SUFFIXES = {
    **dict.fromkeys((".parquet", ".pq"), PARQUET),
    **dict.fromkeys((".arrow", ".feather", ".arrows", ".ipc"), ARROW),
    **{f"{name}{packed}": CSV for name in (".csv", ".tsv") for packed in ("", ".gz", ".zst")},
}
# Arrow's streams begin with the mark of a message; its files, and Feather version 2, with their own name.
STREAM = b"\xff\xff\xff\xff"
_CONTENTS = {b"PAR1": PARQUET, b"ARROW1": ARROW, STREAM: ARROW}
_ARRAYS = {b"\x89HDF": HDF5, b"PK": NPZ}
_PICKLE = b"\x80"


def is_table_source(name: str) -> bool:
    """Whether a path, URL or pattern is a table: told by content for Parquet and Arrow, by name for CSV.

    A folder is one where it holds such files and is neither a folder of shards nor a Minari dataset.
    """
    from koffline.data.disk.writer import is_shard_folder
    from koffline.data.minari import data_folder

    if name.startswith(MINARI) or is_shard_folder(name):
        return False
    if not remote.is_url(name) and data_folder(Path(name)) is not None:
        return False
    heads = [(remote.read_bytes(each, 16), each) for each in _candidates(name)[:1]]
    return any(_begins(head, _CONTENTS) or (_kind_said(each) and not _is_other(head)) for head, each in heads)


def find_tables(name: str, is_table: bool) -> tuple[str, tuple[str, ...]]:
    """Kind and names of the files at a path or URL: a file, a folder of files, or a pattern.

    With ``is_table`` a text file is CSV whatever its name, and arrays of HDF5 and NPZ files are columns.
    Raises DataError where there is none, for one that is damaged, or for files of different kinds.
    """
    kinds = {each: kind for each in _candidates(name) if (kind := _kind_of(each, is_table))}
    if len(set(kinds.values())) > 1:
        shown = " and ".join(sorted(set(kinds.values())))
        raise DataError(f"{name} holds files of different kinds ({shown}); keep one in a folder")
    if not kinds:
        raise DataError(f"{name} {NO_TABLE if remote.exists(name) else 'does not exist; check the path'}")
    return next(iter(kinds.values())), tuple(kinds)


def _candidates(name: str) -> list[str]:
    """The file at a path, those below a folder, or those that fit a pattern."""
    if remote.is_folder(name):
        return _files_below(name)
    is_pattern = ("*" in name or "?" in name) and not remote.exists(name)
    return remote.listed(name) if is_pattern else [name] * remote.exists(name)


def _kind_of(name: str, is_table: bool) -> str | None:
    """Kind of a file by its first bytes and its name; None if it is no table. Raises DataError if damaged."""
    head, said = remote.read_bytes(name, 16), _kind_said(name)
    kind = _begins(head, _CONTENTS) or (CSV if said == CSV else None)
    if kind is None and said is not None:
        state = f"a truncated or corrupt {said} table (damaged header)" if head else "empty (0 bytes)"
        raise DataError(f"{name} is {state}; copy or export it again")
    is_text = bool(head) and not _is_other(head)
    return kind or ((_begins(head, _ARRAYS) or (CSV if is_text else None)) if is_table else None)


def _begins(head: bytes, marks: Mapping[bytes, str]) -> str | None:
    return next((kind for mark, kind in marks.items() if head.startswith(mark)), None)


def _is_other(head: bytes) -> bool:
    return head.startswith((*_ARRAYS, _PICKLE))


def _kind_said(name: str) -> str | None:
    suffixes = Path(name.lower()).suffixes
    return _SUFFIXES.get("".join(suffixes[-2:])) or _SUFFIXES.get("".join(suffixes[-1:]))


def _files_below(folder: str) -> list[str]:
    """Files with a table's suffix, in natural order; names that begin with _ or . are others' notes."""
    if not remote.is_url(folder):
        below = [os.path.join(place, each) for place, _, inside in os.walk(folder) for each in inside]
    else:
        import fsspec

        with remote.storage_faults(folder):
            system, path = fsspec.core.url_to_fs(folder)
            below = [system.unstrip_protocol(found) for found in system.find(path)]
    chosen = []
    for name in below:
        parts = name[len(folder) :].strip("/").split("/")
        if _kind_said(name) and not any(part.startswith(("_", ".")) for part in parts):
            chosen.append(name)
    return sorted(chosen, key=natural_key)


@contextlib.contextmanager
def faults(name: str, kind: str) -> Iterator[None]:
    """Turn the errors of polars, pyarrow and the storage into one DataError; our own pass as they are."""
    with remote.storage_faults(name) if remote.is_url(name) else reading(name, kind):
        try:
            yield
        except Refused as error:
            raise DataError(f"{name} is not read: {error}") from None
        except (pl.exceptions.PanicException, pl.exceptions.PolarsError, ValueError) as error:
            reason = " ".join(str(error).partition("You might want")[0].split())[:300]
            if "utf" in reason.lower():
                raise DataError(f"{name} is not UTF-8 text; save it as UTF-8 (or as Parquet)") from None
            reason = f"{name} is a truncated or corrupt {kind} file ({reason}); copy or export it again"
            raise DataError(reason) from None


@contextlib.contextmanager
def open_bytes(name: str) -> Iterator[Any]:
    """A file to read from, local or remote.

    A local one is Arrow's own: its threads then hold no Python object when the process ends, which would
    abort it.
    """
    if remote.is_url(name):
        import fsspec

        source = fsspec.open(name, "rb")
    else:
        import pyarrow as pa

        source = pa.OSFile(name)
    with source as file:
        yield file


# Bytes of memory per byte of the columns: reading makes stored, ordered, shifted and checked copies.
COPIES = 6


@dataclass
class Room:
    """Memory of the rows that are held together, limited by ``memory_allowance``.

    A number counts at least ``itemsize`` bytes, its size in the log. Without ``remedy`` frames are freed one
    by one.
    """

    itemsize: int
    remedy: str | None = None
    taken: int = 0
    allowed: int = field(default_factory=memory_allowance)

    def check(self, total: int, at_once: int = 0) -> None:
        """Raise Refused if ``total`` bytes of columns, or ``at_once`` bytes decoded together, do not fit."""
        needed = max(total * COPIES, at_once)
        if needed > self.allowed:
            what = f"its rows need {shown_bytes(needed)} of memory to be read, allowed are"
            remedy = self.remedy or "write shorter rows in smaller row groups"
            more = "allow more bytes (KOFFLINE_MAX_BYTES)"
            raise Refused(f"{what} {shown_bytes(self.allowed)}; {remedy}, or {more}")

    def take(self, frame: pl.DataFrame) -> None:
        """Count the bytes of a frame. Raises Refused if they do not fit."""
        self.taken = frame_bytes(frame, self.itemsize) + (self.taken if self.remedy else 0)
        self.check(self.taken)


def frame_bytes(frame: pl.DataFrame, itemsize: int = 1) -> int:
    """Bytes of a frame: numbers count at least ``itemsize``, repeated texts count every time."""
    total = 0
    for column in frame:
        kind: Any = column.dtype
        items = len(column)
        if kind.is_nested():
            items = int(column.list.len().sum()) if kind == pl.List else items * getattr(kind, "size", 1)
        total += items * max(itemsize, width_of(getattr(kind, "inner", kind)))
        if kind in (pl.String, pl.Binary):
            total += int((column.str.len_bytes() if kind == pl.String else column.bin.size()).sum())
    return total


def width_of(kind: Any) -> int:
    """Bytes of a value of fixed size, or of the reference to any other value."""
    found = re.search(r"\d+", str(kind)) if kind.is_numeric() else None
    return int(found.group()) // 8 if found and not kind.is_decimal() else 1 if kind == pl.Boolean else 8


@dataclass(frozen=True)
class Reader:
    """An open file of a table: names and types of its columns, and what is written beside them."""

    fields: list[tuple[str, Any]]
    described: Mapping[bytes, bytes]

    def frames(self, columns: Mapping[str, Any], rows: int) -> Iterator[pl.DataFrame]:
        """The columns, of these types where that is possible, in frames of at most ``rows`` rows."""
        raise NotImplementedError

    def declared(self, columns: Mapping[str, Any], itemsize: int) -> tuple[int, int]:
        """Bytes of the columns in memory, and of what is decoded at once; 0 where a format tells no sizes."""
        return 0, 0


_DELIMITERS = ",;\t|"
_MOST_HEADER = 2**22
_CODECS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_MISSING = ["", "#N/A", "#N/A N/A", "#NA", "-NaN", "-nan", "N/A", "NA", "NULL", "NaN", "n/a", "nan", "null"]


@dataclass(frozen=True)
class CsvReader(Reader):
    """A CSV file: its separator, and the end of a line."""

    name: str
    delimiter: str
    end: str

    def frames(self, columns: Mapping[str, Any], rows: int) -> Iterator[pl.DataFrame]:
        """The columns in frames of at most ``rows`` rows: numbers where all are, as asked for, else texts.

        With numbers all columns are read, so that rows of more fields than the header has are found.
        """
        names, done = [name for name, _ in self.fields], 0
        with remote.local_file(self.name) as path:
            for types in (columns, {}):
                scan = pl.scan_csv(
                    path, glob=False, separator=self.delimiter, eol_char=self.end, infer_schema=False,
                    schema_overrides=types, null_values=_MISSING, raise_if_empty=False,
                    with_column_names=lambda _: names,
                )  # fmt: skip
                texts = pl.col(pl.String).str.strip_chars()
                scan = scan.with_columns(pl.when(texts != "").then(texts))
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
                        found = (
                            f"has a row of more fields than the first line, its header ({listed(names, 8)})"
                        )
                        raise DataError(f"{self.name} {found}; check its separators and quotes") from None
                    if "could not parse" not in str(error):
                        raise
                    if not types:  # as texts, anything can be read but this
                        found = "has a quote mark that is not closed, or a blank before one"
                        raise DataError(f"{self.name} {found}; mend that row") from None


def csv_reader(name: str) -> CsvReader:
    """The file as its first line tells: names without blanks around them. Raises DataError."""
    import pyarrow as pa

    with open_bytes(name) as file:
        mark = file.read(4)
        file.seek(0)
        codec = next((codec for start, codec in _CODECS.items() if mark.startswith(start)), None)
        head = (pa.CompressedInputStream(file, codec) if codec else file).read(_MOST_HEADER)
    line = head.partition(b"\n")[0].partition(b"\r")[0]
    if not head.strip():
        raise DataError(f"{name} is empty; copy or export it again")
    if len(line) == _MOST_HEADER:
        raise DataError(f"{name} has no line ends in its first {_MOST_HEADER} bytes; check that it is CSV")
    text = line.decode("utf-8-sig")
    if text.count('"') % 2:
        raise DataError(f"{name} has a line break or a single quote mark in a column name; rename it")
    delimiter = max(_DELIMITERS, key=text.count)
    end = "\r" if b"\r" in head and b"\n" not in head else "\n"
    names = next(csv.reader([text], delimiter=delimiter, skipinitialspace=True), [])
    return CsvReader([(each.strip(), pl.String()) for each in names], {}, name, delimiter, end)
