"""The files of a table, and their rows as typed frames: read each time, or held in memory; their bounds."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl

from koffline.data import remote
from koffline.data.table.readers import (
    ARROW,
    CSV,
    HDF5,
    NO_TABLE,
    NPZ,
    PARQUET,
    STREAM,
    Reader,
    table_reader,
    width_of,
)
from koffline.data.table.values import column_fault, natural_key
from koffline.errors import DataError, listed
from koffline.store.files import MINARI
from koffline.untrusted.limits import EXPANSION, Refused, memory_allowance, shown_bytes

_SUFFIXES = {
    PARQUET: (".parquet", ".pq"),
    ARROW: (".arrow", ".feather", ".arrows", ".ipc"),
    CSV: tuple(f"{name}{packed}" for name in (".csv", ".tsv") for packed in ("", ".gz", ".zst")),
}
_CONTENTS: dict[bytes, str | None] = {
    b"PAR1": PARQUET, b"ARROW1": ARROW, STREAM: ARROW, b"\x89HDF": HDF5, b"PK": NPZ,
    b"\x80": None,  # a pickle
}  # fmt: skip
# Bytes of memory per byte of the columns: reading makes stored, ordered, shifted and checked copies.
COPIES = 6
# Limit of columns: each costs some tenths of a millisecond, and more are probably transposed rows.
_MOST_COLUMNS = 2**17
# Rows looked at in one go, fewer where they are wide; means are sums over such frames, however read.
BATCH_ROWS = 65_536
_BATCH_BYTES = 2**26
_PROBED_ROWS, _MOST_SHOWN = 256, 60
_SHORTER = "write shorter rows in smaller row groups"
_IN_PIECES = "convert it in pieces (`koffline data convert … --shard-rows N`)"


def is_log_source(name: str) -> bool:
    """Whether a path or URL is a folder of shards or a Minari dataset."""
    from koffline.data.disk.writer import is_shard_folder
    from koffline.data.minari import data_folder

    is_minari = name.startswith(MINARI) or (not remote.is_url(name) and data_folder(Path(name)) is not None)
    return is_minari or is_shard_folder(name)


def is_table_source(name: str) -> bool:
    """Whether a path, URL or pattern is a table: told by content for Parquet and Arrow, by name for CSV.

    A folder is one where it holds such files and is no log of another kind.
    """
    return not is_log_source(name) and any(_kind_of(each, is_table=False) for each in _candidates(name)[:1])


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
    head, lower = remote.read_bytes(name, 16), name.lower()
    for mark, kind in _CONTENTS.items():
        if head.startswith(mark):
            return kind if is_table or kind in (PARQUET, ARROW) else None
    for kind in (PARQUET, ARROW):
        if lower.endswith(_SUFFIXES[kind]):
            state = f"a truncated or corrupt {kind} table (damaged header)" if head else "empty (0 bytes)"
            raise DataError(f"{name} is {state}; copy or export it again")
    return CSV if lower.endswith(_SUFFIXES[CSV]) or (is_table and head) else None


def _files_below(folder: str) -> list[str]:
    """Files with a table's suffix, in natural order; names that begin with _ or . are others' notes."""
    if not remote.is_url(folder):
        below = [os.path.join(place, each) for place, _, inside in os.walk(folder) for each in inside]
    else:
        import fsspec

        with remote.storage_faults(folder):
            system, path = fsspec.core.url_to_fs(folder)
            below = [system.unstrip_protocol(found) for found in system.find(path)]
    known = tuple(suffix for suffixes in _SUFFIXES.values() for suffix in suffixes)
    shown = (each for each in below if not re.search(r"/[_.]", f"/{each[len(folder) :]}"))
    return sorted((each for each in shown if each.lower().endswith(known)), key=natural_key)


def header_of(name: str, kind: str) -> Reader:
    """The columns of a file, to be asked for no rows. Raises DataError for too many, or two of one name."""
    with table_reader(name, kind) as found:
        if len(found.fields) > _MOST_COLUMNS:
            said = f"{name} has {len(found.fields)} columns, more than {_MOST_COLUMNS}"
            raise DataError(f"{said}; store observations as one column of lists, or export fewer columns")
        if not found.fields:
            raise DataError(f"{name} has no columns; export the table again with a header")
        counts = Counter(each for each, _ in found.fields)
        if twice := [each for each, count in counts.items() if count > 1]:
            raise DataError(f"{name} has more than one column named {listed(twice)}; rename them")
        return found


def check_room(total: int, remedy: str = _SHORTER, at_once: int = 0) -> None:
    """Raise Refused if ``total`` bytes of columns, or ``at_once`` bytes decoded together, do not fit."""
    needed, allowed = max(total * COPIES, at_once), memory_allowance()
    if needed > allowed:
        what = f"its rows need {shown_bytes(needed)} of memory to be read"
        remedy += ", or allow more bytes (KOFFLINE_MAX_BYTES)"
        raise Refused(f"{what}, allowed are {shown_bytes(allowed)}; {remedy}")


def frame_bytes(frame: pl.DataFrame, itemsize: int = 1) -> int:
    """Bytes of a frame: numbers count at least ``itemsize``, repeated texts count every time."""
    total = 0
    for column in frame:
        kind: Any = column.dtype
        items = len(column)
        if kind.is_nested():
            items = int(column.list.len().sum()) if kind == pl.List else items * getattr(kind, "size", 1)
        total += items * max(itemsize, width_of(kind))
        if kind in (pl.String, pl.Binary):
            total += int((column.str.len_bytes() if kind == pl.String else column.bin.size()).sum())
    return total


@dataclass(frozen=True)
class TableRows:
    """The columns ``types`` of files of one kind, or those ``computed`` of them, in frames of ``batch_rows``.

    ``itemsize`` is that of an observation's number, ``held`` has all columns in memory.
    """

    kind: str
    files: tuple[str, ...]
    types: Mapping[str, Any]
    itemsize: int
    decimal_comma: bool = False
    computed: Sequence[pl.Expr] = ()
    batch_rows: int = _PROBED_ROWS
    held: pl.DataFrame | None = None

    @property
    def schema(self) -> Mapping[str, Any]:
        """Types of the columns of each frame."""
        empty = pl.DataFrame(schema=dict(self.types)) if self.held is None else self.held
        return empty.clear().select(self.computed).schema if self.computed else empty.schema

    def only(self, columns: Sequence[str]) -> TableRows:
        """These columns alone, as they are read."""
        held = None if self.held is None else self.held.select(columns)
        return replace(self, types={name: self.types[name] for name in columns}, computed=(), held=held)

    def computing(self, columns: Sequence[pl.Expr]) -> TableRows:
        """Frames of these columns. Raises Refused where those in memory do not fit."""
        found = replace(self, computed=columns)
        if self.held is None:
            return found
        widths = [max(self.itemsize, width_of(kind)) for kind in found.schema.values()]
        check_room(self.held.height * sum(widths))
        return replace(found, computed=(), held=self.held.select(columns))

    def frames(self, again: bool = False) -> Iterator[pl.DataFrame]:
        """All rows; ``again`` after a first pass. Raises DataError."""
        if self.held is not None:
            yield from self.held.iter_slices(self.batch_rows)
            return
        size = sum(map(remote.size, self.files))
        total = 0
        for frame in self.stored(sized=again):
            check_room(frame_bytes(frame, self.itemsize))
            total += frame_bytes(frame)
            if total > max(memory_allowance(), size * EXPANSION):
                found = f"its rows take more than {shown_bytes(total)}, the file {shown_bytes(size)}"
                raise Refused(f"{found}; it is damaged or made to fill disks: export it again")
            if self.computed:
                frame = frame.select(self.computed)
                check_room(frame_bytes(frame, self.itemsize))
            yield frame

    def stored(self, sized: bool = False, whole: bool = False) -> Iterator[pl.DataFrame]:
        """The columns as the files have them, texts unread, in the first file's types.

        sized: their size in memory was checked before; else it is now, with ``whole`` that of all together.
        Raises DataError.
        """
        wanted, together = dict(self.types), 0
        for file in self.files:
            above = 0
            with table_reader(file, self.kind) as opened:
                present = dict(opened.fields)
                if missing := [name for name in wanted if name not in present]:
                    raise DataError(f"{file} lacks column {missing[0]}, which the first file has; mend it")
                if not sized:
                    total, at_once = opened.declared(wanted, self.itemsize)
                    together += total if whole else 0
                    check_room(together, _IN_PIECES if whole else _SHORTER, at_once)
                for frame in opened.frames(wanted, self.batch_rows):
                    if frame.height:
                        yield frame if dict(frame.schema) == wanted else self._fitted(frame, file, above)
                    above += frame.height

    def _fitted(self, frame: pl.DataFrame, file: str, above: int) -> pl.DataFrame:
        """The frame in the first file's types; ``above``: rows of the file before it. Raises DataError."""
        columns = []
        for name, kind in self.types.items():
            column = frame[name]
            if column.dtype == pl.String and kind == pl.Float64:
                texts = column.str.strip_chars()
                texts = texts.str.replace(",", ".", literal=True) if self.decimal_comma else texts
                found = texts.cast(kind, strict=False)
                wrong = found.is_null() & column.is_not_null()
                if wrong.any():
                    place = int(wrong.arg_max() or 0)
                    text = column[place][:_MOST_SHOWN]
                    remedy = "mend it or leave it empty, or encode categories (--encode COLUMN=one-hot)"
                    if "," in text:
                        remedy = "write no comma if that marks thousands, or say --decimal-comma"
                    said = f"is not all numbers: row {above + place + 1} holds {text!r}"
                    raise column_fault(file, name, f"{said}; {remedy}")
                column = found
            with contextlib.suppress(pl.exceptions.PolarsError):  # no type holds all values of both
                both = [pl.DataFrame(schema={name: kind}), column.to_frame()]
                column = pl.concat(both, how="vertical_relaxed")[name]
            if column.dtype != kind:
                found_types = f"is {frame[name].dtype}, in the first file {kind}"
                raise column_fault(file, name, f"{found_types}; write all files with one type")
            columns.append(column)
        return pl.DataFrame(columns)


def open_rows(rows: TableRows, hold: bool, first: int | None = None) -> TableRows:
    """The rows in frames of about 64 MB, or as is allowed, going by the first ones.

    hold: all of them in memory, or the ``first``. Raises Refused where they do not fit.
    """
    probe = next(rows.stored(), None)
    row_bytes = 1 if probe is None else max(1, frame_bytes(probe) // probe.height)
    # a piece of whole episodes is more than one frame
    most = min(_BATCH_BYTES, memory_allowance() // (4 * COPIES))
    rows = replace(rows, batch_rows=max(1, min(BATCH_ROWS, most // row_bytes)))
    if not hold:
        return rows
    frames, count, taken = [pl.DataFrame(schema=dict(rows.types))], 0, 0
    for frame in rows.stored(sized=first is not None, whole=True):
        taken += frame_bytes(frame, rows.itemsize)
        check_room(taken, _IN_PIECES if first is None else "look at fewer rows")
        frames.append(frame)
        count += frame.height
        if first is not None and count >= first:
            break
    return replace(rows, held=pl.concat(frames, rechunk=False).head(first or count))
