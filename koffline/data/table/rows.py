"""The rows of a table as typed frames: read from its files each time, or held in memory; and their bounds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import polars as pl

from koffline.data import remote
from koffline.data.table.arrow_files import frame_of, polars_type, table_reader
from koffline.data.table.computed import Computed, Formula
from koffline.data.table.files import COPIES, CSV, Room, csv_frames, csv_header, faults, frame_bytes, width_of
from koffline.data.table.mapping import TableMapping
from koffline.data.table.problems import Problems, check_unique, column_fault
from koffline.errors import DataError
from koffline.untrusted.limits import EXPANSION, Refused, memory_allowance, shown_bytes

# Limit of columns: each costs some tenths of a millisecond, and more are probably transposed rows.
_MOST_COLUMNS = 2**17
# Rows looked at in one go, fewer where they are wide; means are sums over such frames, however read.
BATCH_ROWS = 65_536
_BATCH_BYTES = 2**26
_PROBED_ROWS = 256


def stored_columns(name: str, kind: str) -> tuple[dict[str, Any], frozenset[str], dict[bytes, bytes]]:
    """Types of a file's columns, those that are dictionaries, and what is written beside them.

    In CSV all are texts. Raises DataError.
    """
    categories: frozenset[str] = frozenset()
    described: dict[bytes, bytes] = {}
    if kind == CSV:
        with faults(name, CSV):
            fields = [(each, pl.String()) for each in csv_header(name)[0]]
    else:
        import pyarrow as pa

        with table_reader(name, kind) as opened:
            fields = [(each.name, polars_type(each.type)) for each in opened.schema]
            categories = frozenset(f.name for f in opened.schema if pa.types.is_dictionary(f.type))
            described = opened.schema.metadata or {}
    if len(fields) > _MOST_COLUMNS:
        found = f"{name} has {len(fields)} columns, more than {_MOST_COLUMNS}"
        raise DataError(f"{found}; store observations as one column of lists, or export fewer columns")
    check_unique([each for each, _ in fields], name)
    return dict(fields), categories, described


def column_types(
    stored: Mapping[str, Any], roles: TableMapping, formulas: Sequence[Formula] = ()
) -> dict[str, Any]:
    """Types of the columns that are used; decimals, and texts of what is to be numbers, are float64."""
    terms = [name for formula in formulas for name in formula.numbers]
    texts = [name for formula in formulas for name in formula.texts]
    numbers, types = {*roles.numbers, *terms} - set(roles.encode), {}
    for name in dict.fromkeys((*roles.columns, *terms, *texts)):
        if name in stored:  # else it is a formula
            kind = stored[name]
            as_float = (kind == pl.String and name in numbers) or (
                kind.is_decimal() and name in roles.measured
            )
            types[name] = pl.Float64() if as_float else kind
    return types


# 2024-01-31, with 12:00 or 12:00:00.5 behind it: nanoseconds since 1970 in 64 bits reach from 1677 to 2262.
_CLOCK = r"(?:[T ](?<clock>\d{2}:\d{2})(?<second>:\d{2}(?:\.\d{1,9})?)?)?"
_TIME = r"^(?<date>(?:1[7-9]|2[01])\d{2}-\d{2}-\d{2})" + _CLOCK
_OFFSET = r"(?<zone>Z|[+-]\d{2}(?::?\d{2})?)$"


def _times(texts: pl.Series, ending: str) -> pl.Series:
    """Instants to the nanosecond, null where a text is none; no offset is UTC."""
    parts = texts.str.extract_groups(_TIME + ending).struct.unnest()
    clock, second = pl.col("clock").fill_null("00:00"), pl.col("second").fill_null(":00")
    zone = pl.col("zone") if "zone" in parts.columns else pl.lit("Z")
    told = pl.concat_str("date", pl.lit("T"), clock, second, zone)
    form = "%Y-%m-%dT%H:%M:%S%.f%#z"
    instants = told.str.to_datetime(form, time_unit="ns", strict=False)
    return parts.select(instants.alias(texts.name)).to_series()


# Ways to read texts, the narrowest first; the last three are for times.
_LOCAL, CLOCK = "times without a UTC offset", "times of day"
_WAYS: dict[str, Callable[[pl.Series], pl.Series]] = {
    "whole numbers": lambda texts: texts.cast(pl.Int64, strict=False),
    "numbers": lambda texts: texts.cast(pl.Float64, strict=False),
    "times with a UTC offset": lambda texts: _times(texts, _OFFSET),
    _LOCAL: lambda texts: _times(texts, "$"),
    CLOCK: lambda texts: _times("1970-01-01T" + texts, "$"),
}
TEXT_WAYS = tuple(_WAYS)
_MOST_SHOWN = 60


@dataclass
class TextKind:
    """Types that all texts of a column allow: the remaining ``ways`` to read them, and the rows checked."""

    name: str
    is_time: bool
    ways: list[str]
    rows: int = 0
    has_clock: bool = False

    def look(self, column: pl.Series, source: str) -> None:
        """Check the next rows. Raises DataError if the times in a column are written in different ways."""
        column = column.str.strip_chars()
        unread = {way: _WAYS[way](column).is_null() & column.is_not_null() for way in self.ways}
        self.ways = [way for way, rows in unread.items() if not rows.any()]
        if self.is_time and not self.ways:
            place = max(int(rows.arg_max() or 0) for rows in unread.values())
            text = column[place] if len(column[place]) <= _MOST_SHOWN else f"{column[place][:_MOST_SHOWN]}…"
            remedy = "write all in one way, as in 2024-01-31T12:00:00+01:00"
            like = " like those above" if self.rows + place else " that is read"
            said = f"holds {text!r} in row {self.rows + place + 1}, no number or time{like}; {remedy}"
            raise column_fault(source, self.name, said)
        self.has_clock = self.has_clock or bool(column.str.contains(":", literal=True).any())
        self.rows += len(column)

    @property
    def is_naive(self) -> bool:
        """Whether the texts are times without a time zone."""
        return self.ways == [_LOCAL] and self.has_clock

    @property
    def is_clock(self) -> bool:
        """Whether the texts are times of day."""
        return self.ways == [CLOCK]

    @property
    def dtype(self) -> Any:
        """Integers or floats if all texts are numbers, date-times if all are times, else texts."""
        if not self.ways:
            return pl.String()
        kinds = {"whole numbers": pl.Int64(), "numbers": pl.Float64()}
        return kinds.get(self.ways[0], pl.Datetime("ns", "UTC"))

    def read(self, column: pl.Series) -> pl.Series:
        """The column as ``dtype``."""
        return _WAYS[self.ways[0]](column.str.strip_chars()).alias(self.name) if self.ways else column


@dataclass(frozen=True)
class TableRows:
    """The columns ``types`` of files of one kind; ``texts`` says as what those of text are meant.

    ``computed`` is what frames then consist of; ``itemsize`` is that of an observation's number, ``held`` has
    them all in memory. Each frame has at most ``batch_rows`` rows. ``unread`` collects texts that are no
    numbers, by column: how many, where the first stands and what it is.
    """

    kind: str
    files: tuple[str, ...]
    types: Mapping[str, Any]
    itemsize: int
    decimal_comma: bool = False
    texts: Mapping[str, TextKind] = field(default_factory=dict)
    computed: Computed | None = None
    batch_rows: int = _PROBED_ROWS
    held: pl.DataFrame | None = None
    unread: dict[str, tuple[int, str, str]] = field(default_factory=dict)

    @property
    def schema(self) -> dict[str, Any]:
        """Types of the columns of each frame."""
        read = {name: self.texts[name].dtype if name in self.texts else t for name, t in self.types.items()}
        return read if self.computed is None else self.computed.schema(read)

    def frames(self, columns: Sequence[str] | None = None, again: bool = False) -> Iterator[pl.DataFrame]:
        """The given columns (or all) in their order; ``again`` after a first pass. Raises DataError."""
        if self.held is not None:
            chosen = self.held if columns is None else pl.DataFrame([self.held[name] for name in columns])
            yield from chosen.iter_slices(self.batch_rows)
            return
        size = sum(map(remote.size, self.files))
        total, room = 0, Room(self.itemsize)
        for frame in self.stored(list(self.types if columns is None else columns), None if again else room):
            room.take(frame)
            total += frame_bytes(frame)
            if total > max(room.allowed, size * EXPANSION):
                found = f"its rows take more than {shown_bytes(total)}, the file {shown_bytes(size)}"
                raise Refused(f"{found}; it is damaged or made to fill disks: export it again")
            frame = self._typed(frame)
            if self.computed is not None:
                room.check(frame_bytes(frame, self.itemsize))
            yield frame

    def stored(self, columns: Sequence[str], room: Room | None) -> Iterator[pl.DataFrame]:
        """The columns as the files have them, texts unread, in the first file's types.

        Without ``room`` a file's size in memory is known. Raises DataError.
        """
        wanted = {name: self.types[name] for name in columns}
        for file in self.files:
            above = 0
            for frame in self._frames(file, wanted, room):
                if frame.height:
                    yield frame if dict(frame.schema) == wanted else self._fitted(frame, file, wanted, above)
                above += frame.height

    def _frames(self, file: str, columns: dict[str, Any], room: Room | None) -> Iterator[pl.DataFrame]:
        """The columns of a file: texts of CSV as these types where that is possible."""
        with faults(file, self.kind), contextlib.ExitStack() as stack:
            opened = None if self.kind == CSV else stack.enter_context(table_reader(file, self.kind))
            present = set(opened.schema.names if opened else csv_header(file)[0])
            missing = next((name for name in columns if name not in present), None)
            if missing is not None:
                raise DataError(f"{file} lacks column {missing}, which the first file has; mend it")
            if opened is None:
                yield from csv_frames(file, columns, self.batch_rows)
                return
            if room is not None:
                total, at_once = opened.declared(columns, room.itemsize)
                room.check(room.taken + total if room.remedy else 0, at_once)
            yield from map(frame_of, opened.batches(list(columns), self.batch_rows))

    def _fitted(self, frame: pl.DataFrame, file: str, types: Mapping[str, Any], above: int) -> pl.DataFrame:
        """The frame in the first file's types."""
        columns = []
        for name, wanted in types.items():
            column = frame[name]
            if column.dtype == pl.String and wanted == pl.Float64:
                texts = column.str.strip_chars()
                texts = texts.str.replace(",", ".", literal=True) if self.decimal_comma else texts
                found = texts.cast(wanted, strict=False)
                wrong = found.is_null() & column.is_not_null()
                if wrong.any():
                    place = int(wrong.arg_max() or 0)
                    where = f"row {above + place + 1}{f' of {file}' if len(self.files) > 1 else ''}"
                    before = self.unread.get(name, (0, where, column[place][:_MOST_SHOWN]))
                    self.unread[name] = (before[0] + int(wrong.sum()), *before[1:])
                column = found
            with contextlib.suppress(pl.exceptions.PolarsError):  # a type that holds all values of both
                empty = [pl.DataFrame(schema={name: kind}) for kind in (column.dtype, wanted)]
                if pl.concat(empty, how="vertical_relaxed").dtypes[0] == wanted:
                    column = column.cast(wanted)
            if column.dtype != wanted:
                both = f"is {column.dtype}, in the first file {wanted}"
                raise column_fault(file, name, f"{both}; write all files with one type")
            columns.append(column)
        return pl.DataFrame(columns)

    def with_texts(self, names: Sequence[str], time: str | None, problems: Problems) -> TableRows:
        """Columns of text as the narrowest that all their texts can be; what no text can be is a problem."""
        ways = list(_WAYS)
        texts = {name: TextKind(name, name == time, ways if name == time else ways[:2]) for name in names}
        for frame in self.frames(names) if names else ():
            for name, text in list(texts.items()):
                with problems.noted():
                    text.look(frame[name], problems.source)
                    continue
                del texts[name]
        found = replace(self, texts=texts)
        return found if self.held is None else replace(found, held=found._typed(self.held))

    def with_computed(self, computed: Computed) -> TableRows:
        """Frames of the computed columns. Raises Refused where those in memory do not fit."""
        found = replace(self, computed=computed)
        if self.held is None:
            return found
        widths = [max(self.itemsize, width_of(kind)) for kind in found.schema.values()]
        Room(self.itemsize).check(self.held.height * sum(widths))
        return replace(found, held=computed.frame(self.held))

    def _typed(self, frame: pl.DataFrame) -> pl.DataFrame:
        frame = frame.with_columns(self.texts[n].read(frame[n]) for n in frame.columns if n in self.texts)
        return frame if self.computed is None else self.computed.frame(frame)


def open_rows(rows: TableRows, hold: bool, first: int | None = None) -> TableRows:
    """The rows in frames of about 64 MB, or as is allowed, going by the first ones.

    hold: all of them in memory, or the ``first``. Raises Refused where they do not fit.
    """
    columns, itemsize = list(rows.types), rows.itemsize
    probe = next(rows.stored(columns, Room(itemsize)), None)
    row_bytes = 1 if probe is None else max(1, frame_bytes(probe) // probe.height)
    rows.unread.clear()  # later passes read them again
    # a piece of whole episodes is more than one frame
    most = min(_BATCH_BYTES, memory_allowance() // (4 * COPIES))
    rows = replace(rows, batch_rows=max(1, min(BATCH_ROWS, most // row_bytes)))
    if not hold:
        return rows
    in_pieces = "convert it in pieces (`koffline data convert … --shard-rows N`)"
    room = Room(itemsize, in_pieces if first is None else "look at fewer rows")
    frames = [pl.DataFrame(schema=dict(rows.types))]
    for frame in rows.stored(columns, room if first is None else None):
        room.take(frame)
        frames.append(frame)
        if first is not None and sum(each.height for each in frames) >= first:
            break
    held = pl.concat(frames, rechunk=False)
    return replace(rows, held=held if first is None else held.head(first))
