"""The rows of a table as typed frames: read from its files each time, or held in memory; and their bounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import polars as pl

from koffline.data import remote
from koffline.data.table.arrow_files import arrow_reader, frame_of, polars_type, width_of
from koffline.data.table.csv_files import csv_frames, header
from koffline.data.table.files import CSV, TableFile, faults
from koffline.data.table.roles import Roles, check_unique
from koffline.data.table.times import TextKind
from koffline.errors import DataError
from koffline.untrusted.limits import EXPANSION, Refused, memory_allowance, shown_bytes

# Bytes that reading takes for each byte of the columns: as stored, in order, as rows that follow, checked.
COPIES = 6
# Every column costs its own reading, some tenths of a millisecond: more than this are rows by mistake.
_MOST_COLUMNS = 2**17
IN_PIECES = "convert it in pieces (`koffline data convert … --shard-rows N`)"
# Rows looked at in one go, fewer where they are wide; means are sums over such frames, however read.
BATCH_ROWS = 65_536
_BATCH_BYTES = 2**26
_PROBED_ROWS = 256
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class Layout:
    """Columns of a file with their types, those that are dictionaries, and what koffline wrote beside them.

    In CSV all are texts.
    """

    types: dict[str, Any]
    categories: frozenset[str]
    description: dict[str, str]


def layout(file: TableFile) -> Layout:
    """What a file says of its columns. Raises DataError."""
    description: dict[str, str] = {}
    if file.kind == CSV:
        with faults(file.name, CSV):
            fields = [(name, pl.String()) for name in header(file.name)[0]]
        categories: frozenset[str] = frozenset()
    else:
        import pyarrow as pa

        with arrow_reader(file) as opened:
            fields = [(each.name, polars_type(each.type)) for each in opened.schema]
            categories = frozenset(f.name for f in opened.stored if pa.types.is_dictionary(f.type))
            for key, value in (opened.schema.metadata or {}).items():
                if key.startswith(b"koffline"):
                    description[key.decode("ascii", "replace")] = value.decode("utf-8")
    if len(fields) > _MOST_COLUMNS:
        raise DataError(
            f"{file.name} has {len(fields)} columns, more than {_MOST_COLUMNS}; store observations as one "
            "column of lists, or export fewer columns"
        )
    check_unique([name for name, _ in fields], file.name)
    return Layout(dict(fields), categories, description)


@dataclass
class Room:
    """What rows that stay in memory together take, against ``memory_allowance``.

    A number counts ``itemsize`` bytes at least, which it takes in the log. Without ``remedy`` frames are let
    go one by one.
    """

    itemsize: int
    remedy: str | None
    taken: int = 0
    allowed: int = field(default_factory=memory_allowance)

    def declare(self, total: int, at_once: int) -> None:
        """Check a file before its rows are read: bytes of its columns, and of parts decoded in one go.

        Raises Refused.
        """
        if at_once > self.allowed:
            self._refuse(f"parts of it take {shown_bytes(at_once)} at once", "write it in smaller row groups")
        if self.remedy is not None:
            self._check(self.taken + total)

    def take(self, frame: pl.DataFrame) -> None:
        """Count the rows of a frame. Raises Refused where they do not fit."""
        self.taken = frame_bytes(frame, self.itemsize) + (self.taken if self.remedy is not None else 0)
        self._check(self.taken)

    def _check(self, held: int) -> None:
        if held * COPIES > self.allowed:
            needed = shown_bytes(held * COPIES)
            self._refuse(f"its rows need {needed} of memory to be read", self.remedy or "write shorter rows")

    def _refuse(self, what: str, remedy: str) -> None:
        limit = shown_bytes(self.allowed)
        raise Refused(f"{what}, allowed are {limit}; {remedy}, or allow more bytes (KOFFLINE_MAX_BYTES)")


def frame_bytes(frame: pl.DataFrame, itemsize: int = 1) -> int:
    """Bytes of a frame where a number takes ``itemsize`` at least, and a text counts wherever it stands."""
    total = 0
    for column in frame:
        kind: Any = column.dtype
        inner, items = kind, len(column)
        if isinstance(kind, (pl.List, pl.Array)):
            inner = kind.inner
            items = int(column.list.len().sum()) if isinstance(kind, pl.List) else items * kind.size
        total += items * max(itemsize, width_of(inner))
        if kind == pl.String:
            total += int(column.str.len_bytes().sum())
        if kind == pl.Binary:
            total += int(column.bin.size().sum())
    return total


@dataclass(frozen=True)
class TableRows:
    """The columns ``types`` of some files; ``texts`` says as what those of text are meant.

    ``itemsize`` is that of an observation's number, ``held`` has them all in memory. Each frame has at most
    ``batch_rows`` rows.
    """

    files: tuple[TableFile, ...]
    types: Mapping[str, Any]
    texts: Mapping[str, TextKind]
    itemsize: int
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
        total, room = 0, Room(self.itemsize, None)
        for frame in self.stored(chosen, None if again else room):
            room.take(frame)
            total += frame_bytes(frame)
            if total > max(memory_allowance(), self._bytes * EXPANSION):
                raise Refused(
                    f"its rows take more than {shown_bytes(total)}, the file {shown_bytes(self._bytes)}; it "
                    "is damaged or made to fill disks: export it again"
                )
            yield self.typed(frame)

    def stored(self, columns: Sequence[str], room: Room | None) -> Iterator[pl.DataFrame]:
        """The columns as the files have them, texts unread, in the first file's types."""
        wanted = {name: self.types[name] for name in columns}
        for file in self.files:
            read = {name: kind for name, kind in wanted.items() if name not in file.constants}
            above = 0
            for frame in _frames(file, read, self.batch_rows, room):
                if frame.height:
                    yield _fitted(frame, file, wanted, above)
                above += frame.height

    def typed(self, frame: pl.DataFrame) -> pl.DataFrame:
        """The frame with its texts as what they mean."""
        return frame.with_columns(self.texts[n].read(frame[n]) for n in frame.columns if n in self.texts)

    @cached_property
    def _bytes(self) -> int:
        return sum(remote.size(file.name) for file in self.files)


def column_types(files: Sequence[TableFile], stored: Mapping[str, Any], roles: Roles) -> dict[str, Any]:
    """Types of the columns that the roles name; what comes as text is numbers where roles ask for them."""
    numbers = set(roles.numbers)
    untyped = set(stored if files[0].kind == CSV else ()) | set(files[0].constants)
    return {
        name: stored.get(name) if name not in untyped else pl.Float64() if name in numbers else pl.String()
        for name in roles.columns
    }


def open_rows(files: tuple[TableFile, ...], types: Mapping[str, Any], itemsize: int) -> TableRows:
    """The rows of some files, in frames of about 64 MB, or as is allowed, going by the first rows."""
    rows = TableRows(files, types, {}, itemsize)
    probe = next(rows.stored(list(types), Room(itemsize, None)), None)
    row_bytes = 1 if probe is None else max(1, frame_bytes(probe) // probe.height)
    # a piece of whole episodes is more than one frame
    most = min(_BATCH_BYTES, memory_allowance() // (4 * COPIES))
    return replace(rows, batch_rows=max(1, min(BATCH_ROWS, most // row_bytes)))


def hold(rows: TableRows) -> TableRows:
    """The same with all rows in memory. Raises Refused where they do not fit."""
    room, frames = Room(rows.itemsize, IN_PIECES), [pl.DataFrame(schema=dict(rows.types))]
    for frame in rows.stored(list(rows.types), room):
        room.take(frame)
        frames.append(frame)
    return replace(rows, held=pl.concat(frames, rechunk=False))


def narrowed(rows: TableRows, names: Sequence[str], time: str | None, source: str) -> TableRows:
    """Columns of text as the narrowest that all their texts can be. Raises DataError naming the row."""
    texts = {name: TextKind(name, name == time) for name in names}
    for frame in rows.frames(names) if names else ():
        for name, text in texts.items():
            text.look(frame[name], source)
    found = replace(rows, texts=texts)
    return found if found.held is None else replace(found, held=found.typed(found.held))


def _frames(file: TableFile, columns: dict[str, Any], rows: int, room: Room | None) -> Iterator[pl.DataFrame]:
    """The columns in frames of at most ``rows`` rows. Raises DataError.

    ``columns`` have the types that are wanted: CSV is read so where that is possible, else as texts. Without
    ``room`` the file's size in memory is known.
    """
    if file.kind == CSV:
        with faults(file.name, CSV):
            _check_columns(file.name, columns, header(file.name)[0])
            yield from csv_frames(file.name, columns, rows)
        return
    with arrow_reader(file) as opened:
        _check_columns(file.name, columns, opened.schema.names)
        if room is not None:
            room.declare(*opened.declared(columns, room.itemsize))
        yield from map(frame_of, opened.batches(list(columns), rows))


def _check_columns(name: str, columns: Mapping[str, Any], present: Sequence[str]) -> None:
    there = set(present)
    missing = next((column for column in columns if column not in there), None)
    if missing is not None:
        raise DataError(f"{name} lacks column {missing}, which the first file has; mend or remove the file")


def _fitted(frame: pl.DataFrame, file: TableFile, types: Mapping[str, Any], above: int) -> pl.DataFrame:
    """The frame with all columns in order and in the first file's types. Raises DataError."""
    if dict(frame.schema) == types:
        return frame
    columns = []
    for name, wanted in types.items():
        if name in file.constants:
            value = None if file.constants[name] == _NO_VALUE else file.constants[name]
            column = pl.Series(name, [value], pl.String).new_from_index(0, frame.height)
        else:
            column = frame[name]
        if (
            column.dtype == pl.String
            and wanted == pl.Float64
            and (file.kind == CSV or name in file.constants)
        ):
            column = _numbers(column, file, above)
        elif column.dtype != wanted:
            column = _widened(column, wanted, file)
        columns.append(column)
    return pl.DataFrame(columns)


def _numbers(column: pl.Series, file: TableFile, above: int) -> pl.Series:
    found = column.cast(pl.Float64, strict=False)
    if found.null_count() > column.null_count():  # there may be spaces around them
        found = column.str.strip_chars().cast(pl.Float64, strict=False)
    if found.null_count() > column.null_count():
        row = (found.is_null() & column.is_not_null()).arg_max() or 0
        raise DataError(
            f"{file.name}: column {column.name} in row {above + row + 1} is not all numbers "
            f"({column[row][:60]!r}); mend it or leave it out"
        )
    return found


def _widened(column: pl.Series, wanted: Any, file: TableFile) -> pl.Series:
    """The column in a type that holds all its values. Raises DataError where the first file's does not."""
    try:
        empty = [pl.DataFrame(schema={"": kind}) for kind in (column.dtype, wanted)]
        if pl.concat(empty, how="vertical_relaxed").dtypes[0] == wanted:
            return column.cast(wanted)
    except pl.exceptions.PolarsError:
        pass
    raise DataError(
        f"{file.name}: column {column.name} is {column.dtype}, in the first file {wanted}; write all files "
        "with one type"
    )
