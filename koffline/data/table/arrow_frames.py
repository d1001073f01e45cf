"""Arrow types and record batches as polars types and frames, and times that no calendar
can show.

polars prints a panic on standard error where it meets a type or a time that it does not
know, before Python sees an exception. Therefore such types are recognised by Arrow's
own description, and such times by their number, and polars never sees them.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from functools import cache
from typing import Any

import polars as pl
import pyarrow as pa

from koffline.data.table.column_types import ColumnType, Kind
from koffline.errors import DataError
from koffline.untrusted.limits import one_line

_DAY = 86_400
# Python's first and last dates, in days since 1970; polars knows more.
_FIRST_DAY = (datetime.date.min - datetime.date(1970, 1, 1)).days
_LAST_DAY = (datetime.date.max - datetime.date(1970, 1, 1)).days
# Half of Python's longest length of time, in days: the difference of two lengths can
# then be shown, too.
_MOST_DAYS = datetime.timedelta.max.days // 2
# Numbers of nanoseconds in 64 bits reach less far than the calendar.
_LEAST = -(2**63)
_MOST = 2**63 - 1
_PER_SECOND = {"ms": 10**3, "us": 10**6, "ns": 10**9}


class UnreadableColumn(DataError):
    """One column of a table has values that cannot be read; ``column`` is its name."""

    def __init__(self, message: str, column: str) -> None:
        super().__init__(message)
        self.column = column


@cache
def polars_type(kind: pa.DataType) -> ColumnType:
    """The polars type for a column of an Arrow type (of a dictionary: for its values),
    or Unknown.
    """
    if pa.types.is_dictionary(kind):
        value = polars_type(kind.value_type)
        # One list in every row would be a small file with long rows.
        if value.is_nested():
            return pl.Unknown()
        return value
    if isinstance(kind, pa.BaseExtensionType):
        return polars_type(kind.storage_type)
    if pa.types.is_timestamp(kind):
        kind = _in_known_zone(kind)
    if not _is_known(kind):
        return pl.Unknown()
    try:
        return pl.DataFrame(pa.table({"": pa.nulls(0, kind)})).dtypes[0]
    except (ValueError, pl.exceptions.PolarsError, pl.exceptions.PanicException):
        return pl.Unknown()


def _is_known(kind: pa.DataType) -> bool:
    """Whether polars has this Arrow type, which may hold others."""
    types = pa.types
    if types.is_struct(kind):
        names = [field.name for field in kind]
        has_names = len(set(names)) == len(names) > 0
        return has_names and all(_is_known(field.type) for field in kind)
    if types.is_fixed_size_list(kind):
        return kind.list_size > 0 and _is_known(kind.value_type)
    if types.is_list(kind) or types.is_large_list(kind):
        return _is_known(kind.value_type)
    if types.is_timestamp(kind):
        return _in_known_zone(kind) == kind
    if types.is_decimal(kind):
        return not types.is_decimal256(kind) and 0 <= kind.scale <= kind.precision
    if types.is_fixed_size_binary(kind):
        return kind.byte_width > 0
    return any(is_kind(kind) for is_kind in _PLAIN)


_PLAIN = (
    pa.types.is_boolean,
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_date,
    pa.types.is_time,
    pa.types.is_duration,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_string_view,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
    pa.types.is_null,
)


def _in_known_zone(kind: pa.TimestampType) -> pa.TimestampType:
    """A type of timestamps; in UTC if polars does not know its zone.

    Timestamps with a zone are stored as instants in UTC, whatever the zone: it says
    only how to show them.
    """
    if kind.tz is None or _is_zone(kind.tz):
        return kind
    return pa.timestamp(kind.unit, "UTC")


@cache
def _is_zone(name: str) -> bool:
    """Whether polars knows a time zone."""
    try:
        pl.Series([0]).cast(pl.Datetime("us")).dt.replace_time_zone(name)
    except pl.exceptions.PolarsError:
        return False
    return True


def frame_of_batch(batch: pa.RecordBatch, file: str) -> pl.DataFrame:
    """Convert a record batch to a frame, with dictionaries decoded.

    Raises UnreadableColumn if a column is damaged: an untrusted file may hold wrong
    offsets or invalid texts.
    """
    batch.validate()
    columns = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            raise UnreadableColumn(
                f"{file}: column {name} is damaged ({one_line(error)}); export the file"
                " again, or leave the column out",
                name,
            ) from None
        columns.append(_plain(column))
    # Without the fields' metadata: polars would make its own types of them.
    table = pa.Table.from_arrays(columns, names=batch.schema.names)
    return pl.DataFrame(table).with_columns(pl.col(pl.Categorical).cast(pl.String))


def _plain(column: pa.Array) -> pa.Array:
    """An Arrow column as polars knows it: extensions as they are stored, timestamps in
    a known zone.
    """
    if isinstance(column.type, pa.BaseExtensionType):
        return _plain(column.storage)
    if pa.types.is_dictionary(column.type) and not _is_text(column.type.value_type):
        return _plain(column.dictionary_decode())
    if pa.types.is_timestamp(column.type):
        return column.cast(_in_known_zone(column.type))
    return column


def _is_text(kind: pa.DataType) -> bool:
    return (
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_string_view(kind)
    )


def check_times(frame: pl.DataFrame, file: str) -> None:
    """Raise UnreadableColumn for a time outside of the calendar's years, or a duration
    beyond Python's.
    """
    for name, kind in frame.schema.items():
        for values in _leaves(frame[name]):
            outside = _outside_of_calendar(values)
            if outside is None:
                continue
            unit = getattr(values.dtype, "time_unit", "ns")
            if values.dtype == pl.Date:
                unit = "days"
            if isinstance(values.dtype, pl.Duration):
                wrong = f"a duration that no calendar has, {outside} {unit}"
            else:
                wrong = f"a time that no calendar has, {outside} {unit} since 1970"
            raise UnreadableColumn(
                f"{file}: column {name} ({kind}) holds {wrong}; check its unit, mend"
                " it, or leave the column out",
                name,
            )


def _leaves(column: pl.Series) -> Iterator[pl.Series]:
    """The values of a column; of lists and structs, those inside."""
    kind = column.dtype
    if isinstance(kind, (pl.List, pl.Array)):
        if _holds_times(kind):
            yield from _leaves(column.drop_nulls().explode(empty_as_null=False))
    elif isinstance(kind, pl.Struct):
        for field in kind.fields:
            yield from _leaves(column.struct.field(field.name))
    elif kind.is_temporal():
        yield column


def _holds_times(kind: Kind) -> bool:
    if isinstance(kind, (pl.List, pl.Array)):
        return _holds_times(kind.inner)
    if isinstance(kind, pl.Struct):
        return any(_holds_times(field.dtype) for field in kind.fields)
    return bool(kind.is_temporal())


def _outside_of_calendar(times: pl.Series) -> int | None:
    """The first number of a column of times that cannot be shown; None if there is
    none.
    """
    first, end = _range_of(times.dtype)
    numbers = times.to_physical().cast(pl.Int64)
    wrong = (numbers < first) | (numbers >= end)
    if not wrong.any():
        return None
    return int(numbers[int(wrong.arg_max() or 0)])


def _range_of(kind: Any) -> tuple[int, int]:
    """The first number that can be shown as a time of this type, and the first after it
    that cannot.
    """
    if kind == pl.Date:
        return _FIRST_DAY, _LAST_DAY + 1
    if isinstance(kind, pl.Time):
        return 0, _DAY * _PER_SECOND["ns"]
    per_day = _DAY * _PER_SECOND[kind.time_unit]
    if isinstance(kind, pl.Duration):
        return max(-_MOST_DAYS * per_day, _LEAST), min(_MOST_DAYS * per_day, _MOST)
    zone_days = 0
    if kind.time_zone is not None:
        zone_days = 1  # a zone moves a clock by less than a day
    first = (_FIRST_DAY + zone_days) * per_day
    end = (_LAST_DAY + 1 - zone_days) * per_day
    return max(first, _LEAST), min(end, _MOST)
