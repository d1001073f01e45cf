"""The rows of a table as typed frames: read from its files each time, or held in memory; and their bounds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import polars as pl

from koffline.data import remote
from koffline.data.table.arrow_files import arrow_reader, frame_of, polars_type, width_of
from koffline.data.table.files import CSV, TableFile, csv_frames, csv_header, faults
from koffline.data.table.mapping import TableMapping, check_unique, column_fault
from koffline.data.table.times import TextKind
from koffline.errors import DataError
from koffline.untrusted.limits import EXPANSION, Refused, memory_allowance, shown_bytes

# Bytes that reading takes for each byte of the columns: as stored, in order, as rows that follow, checked.
COPIES = 6
# Every column costs its own reading, some tenths of a millisecond: more than this are rows by mistake.
_MOST_COLUMNS = 2**17
# Rows looked at in one go, fewer where they are wide; means are sums over such frames, however read.
BATCH_ROWS = 65_536
_BATCH_BYTES = 2**26
_PROBED_ROWS = 256
_NARROW = (pl.Boolean, pl.Float16, pl.Float32, pl.Int8, pl.UInt8, pl.Int16, pl.UInt16)


def stored_columns(file: TableFile) -> tuple[dict[str, Any], frozenset[str], dict[bytes, bytes]]:
    """Types of a file's columns, those that are dictionaries, and what is written beside them.

    In CSV all are texts. Raises DataError.
    """
    categories: frozenset[str] = frozenset()
    described: dict[bytes, bytes] = {}
    if file.kind == CSV:
        with faults(file.name, CSV):
            fields = [(name, pl.String()) for name in csv_header(file.name)[0]]
    else:
        import pyarrow as pa

        with arrow_reader(file) as opened:
            fields = [(each.name, polars_type(each.type)) for each in opened.schema]
            categories = frozenset(f.name for f in opened.schema if pa.types.is_dictionary(f.type))
            described = opened.schema.metadata or {}
    if len(fields) > _MOST_COLUMNS:
        found = f"{file.name} has {len(fields)} columns, more than {_MOST_COLUMNS}"
        raise DataError(f"{found}; store observations as one column of lists, or export fewer columns")
    check_unique([name for name, _ in fields], file.name)
    return dict(fields), categories, described


@dataclass
class Room:
    """What rows that stay in memory together take, against ``memory_allowance``.

    A number counts ``itemsize`` bytes at least, which it takes in the log. Without ``remedy`` frames are let
    go one by one.
    """

    itemsize: int
    remedy: str | None = None
    taken: int = 0
    allowed: int = field(default_factory=memory_allowance)

    def check(self, total: int, at_once: int = 0) -> None:
        """Raise Refused where so many bytes of columns, or of parts decoded in one go, do not fit."""
        if at_once > self.allowed:
            what = f"parts of it take {shown_bytes(at_once)} at once"
            remedy = "write it in smaller row groups"
        elif total * COPIES > self.allowed:
            what = f"its rows need {shown_bytes(total * COPIES)} of memory to be read"
            remedy = self.remedy or "write shorter rows"
        else:
            return
        allowed = f"allowed are {shown_bytes(self.allowed)}"
        raise Refused(f"{what}, {allowed}; {remedy}, or allow more bytes (KOFFLINE_MAX_BYTES)")

    def take(self, frame: pl.DataFrame) -> None:
        """Count the rows of a frame. Raises Refused where they do not fit."""
        self.taken = frame_bytes(frame, self.itemsize) + (self.taken if self.remedy else 0)
        self.check(self.taken)


def frame_bytes(frame: pl.DataFrame, itemsize: int = 1) -> int:
    """Bytes of a frame where a number takes ``itemsize`` at least, and a text counts wherever it stands."""
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


@dataclass(frozen=True)
class TableRows:
    """The columns ``types`` of some files; ``texts`` says as what those of text are meant.

    ``itemsize`` is that of an observation's number, ``held`` has them all in memory. Each frame has at most
    ``batch_rows`` rows.
    """

    files: tuple[TableFile, ...]
    types: Mapping[str, Any]
    itemsize: int
    texts: Mapping[str, TextKind] = field(default_factory=dict)
    batch_rows: int = _PROBED_ROWS
    held: pl.DataFrame | None = None

    @property
    def schema(self) -> dict[str, Any]:
        """Types of the columns of each frame."""
        return {name: self.texts[name].dtype if name in self.texts else t for name, t in self.types.items()}

    def frames(self, columns: Sequence[str] | None = None, again: bool = False) -> Iterator[pl.DataFrame]:
        """The given columns (or all) in their order; ``again`` after a first pass. Raises DataError."""
        chosen = list(self.types if columns is None else columns)
        if self.held is not None:
            yield from self.held.select(chosen).iter_slices(self.batch_rows)
            return
        size = sum(remote.size(file.name) for file in self.files)
        total, room = 0, Room(self.itemsize)
        for frame in self.stored(chosen, None if again else room):
            room.take(frame)
            total += frame_bytes(frame)
            if total > max(room.allowed, size * EXPANSION):
                found = f"its rows take more than {shown_bytes(total)}, the file {shown_bytes(size)}"
                raise Refused(f"{found}; it is damaged or made to fill disks: export it again")
            yield self._typed(frame)

    def stored(self, columns: Sequence[str], room: Room | None) -> Iterator[pl.DataFrame]:
        """The columns as the files have them, texts unread, in the first file's types.

        Without ``room`` a file's size in memory is known.
        """
        wanted = {name: self.types[name] for name in columns}
        for file in self.files:
            read, above = {name: kind for name, kind in wanted.items() if name not in file.constants}, 0
            for frame in _frames(file, read, self.batch_rows, room):
                if frame.height:
                    yield _fitted(frame, file, wanted, above)
                above += frame.height

    def with_texts(self, names: Sequence[str], time: str | None, source: str) -> TableRows:
        """Columns of text as the narrowest that all their texts can be. Raises DataError naming the row."""
        texts = {name: TextKind(name, name == time) for name in names}
        for frame in self.frames(names) if names else ():
            for name, text in texts.items():
                text.look(frame[name], source)
        found = replace(self, texts=texts)
        return found if self.held is None else replace(found, held=found._typed(self.held))

    def _typed(self, frame: pl.DataFrame) -> pl.DataFrame:
        return frame.with_columns(self.texts[n].read(frame[n]) for n in frame.columns if n in self.texts)


def open_rows(files: tuple[TableFile, ...], types: Mapping[str, Any], itemsize: int, hold: bool) -> TableRows:
    """The rows of some files, in frames of about 64 MB, or as is allowed, going by the first rows.

    hold: all of them in memory. Raises Refused where they do not fit.
    """
    rows = TableRows(files, types, itemsize)
    probe = next(rows.stored(list(types), Room(itemsize)), None)
    row_bytes = 1 if probe is None else max(1, frame_bytes(probe) // probe.height)
    # a piece of whole episodes is more than one frame
    most = min(_BATCH_BYTES, memory_allowance() // (4 * COPIES))
    rows = replace(rows, batch_rows=max(1, min(BATCH_ROWS, most // row_bytes)))
    if not hold:
        return rows
    room, frames = Room(itemsize, IN_PIECES), [pl.DataFrame(schema=dict(types))]
    for frame in rows.stored(list(types), room):
        room.take(frame)
        frames.append(frame)
    return replace(rows, held=pl.concat(frames, rechunk=False))


IN_PIECES = "convert it in pieces (`koffline data convert … --shard-rows N`)"


def _frames(file: TableFile, columns: dict[str, Any], rows: int, room: Room | None) -> Iterator[pl.DataFrame]:
    """The columns of a file: texts of CSV as these types where that is possible. Raises DataError."""
    with faults(file.name, file.kind), contextlib.ExitStack() as stack:
        opened = None if file.kind == CSV else stack.enter_context(arrow_reader(file))
        present = set(opened.schema.names if opened else csv_header(file.name)[0])
        missing = next((name for name in columns if name not in present), None)
        if missing is not None:
            raise DataError(f"{file.name} lacks column {missing}, which the first file has; mend it")
        if opened is None:
            yield from csv_frames(file.name, columns, rows)
            return
        if room is not None:
            total, at_once = opened.declared(columns, room.itemsize)
            room.check(room.taken + total if room.remedy else 0, at_once)
        yield from map(frame_of, opened.batches(list(columns), rows))


def _fitted(frame: pl.DataFrame, file: TableFile, types: Mapping[str, Any], above: int) -> pl.DataFrame:
    """The frame with all columns in order and in the first file's types. Raises DataError."""
    if dict(frame.schema) == types:
        return frame
    frame = frame.with_columns(pl.lit(text).alias(name) for name, text in file.constants.items())
    return pl.DataFrame([_converted(frame[name], wanted, file, above) for name, wanted in types.items()])


def _converted(column: pl.Series, wanted: Any, file: TableFile, above: int) -> pl.Series:
    name, untyped = column.name, file.kind == CSV or column.name in file.constants
    if column.dtype == pl.String and wanted == pl.Float64 and untyped:
        found = column.str.strip_chars().cast(wanted, strict=False)
        wrong = found.is_null() & column.is_not_null()
        if not wrong.any():
            return found
        row = wrong.arg_max() or 0
        where = f"in row {above + row + 1} is not all numbers ({column[row][:60]!r})"
        raise column_fault(file.name, name, f"{where}; mend it or leave it out")
    with contextlib.suppress(pl.exceptions.PolarsError):  # a type that holds all values of both
        empty = [pl.DataFrame(schema={name: kind}) for kind in (column.dtype, wanted)]
        if pl.concat(empty, how="vertical_relaxed").dtypes[0] == wanted:
            return column.cast(wanted)
    both = f"is {column.dtype}, in the first file {wanted}"
    raise column_fault(file.name, name, f"{both}; write all files with one type")


def column_types(
    files: Sequence[TableFile], stored: Mapping[str, Any], roles: TableMapping
) -> dict[str, Any]:
    """Types of the columns that are named; what comes as text is numbers where these are asked for."""
    numbers, untyped = set(roles.numbers), set(files[0].constants)
    untyped |= set(stored if files[0].kind == CSV else ())
    return {
        name: stored.get(name) if name not in untyped else pl.Float64() if name in numbers else pl.String()
        for name in roles.columns
    }


def number_dtype(kinds: Sequence[Any], bytes_stay: bool = False) -> np.dtype:
    """The dtype in which columns of these types stand side by side; by type alone, never by value.

    uint8 may stay where all are; float16, float32 and integers of at most 16 bits are float32; else float64.
    """
    bases = [getattr(kind, "inner", kind) for kind in kinds]
    if bytes_stay and all(base == pl.UInt8 for base in bases):
        return np.dtype(np.uint8)
    return np.dtype(np.float32 if all(base in _NARROW for base in bases) else np.float64)
