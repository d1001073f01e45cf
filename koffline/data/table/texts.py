"""Columns of text: what all rows can be read as, be it numbers, times or texts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

from koffline.data.table.values import is_text
from koffline.errors import DataError

_DAY = "1970-01-01T"  # times of day are read as those of this day
_NUMBER = "a number"
_WORDS = {
    "date32[day]": "a time without a UTC offset",
    "timestamp[ns]": "a time without a UTC offset",
    "timestamp[us]": "a time without a UTC offset",
    "timestamp[ns, tz=UTC]": "a time with a UTC offset",
    "timestamp[us, tz=UTC]": "a time with a UTC offset",
    "time64[ns]": "a time of day without a UTC offset",
    "duration[ns]": "a time of day with a UTC offset",
}
_MOST_SHOWN = 60


def narrow_types(
    batches: Iterable[Any], names: Sequence[str], time: str | None, source: str
) -> dict[str, Any]:
    """The narrowest type that all of a text column can be: whole numbers, numbers, times, or text.

    The column ``time`` must be numbers or ISO 8601 times: the order of other texts says nothing about time.
    Times are held as whole microseconds or nanoseconds in UTC, so that every digit counts; with and without
    a UTC offset they cannot stand in one column. Raises DataError naming the row.
    """
    ladders = {name: _rungs(name == time) for name in names}
    rows = 0
    for batch in batches:
        for name in names:
            column = batch.column(name)
            fitting = _fitting(column, ladders[name])
            if not fitting:
                raise DataError(f"{source}: column {name} holds {_unlike(column, ladders[name], rows)}")
            ladders[name] = fitting
        rows += batch.num_rows
    return {name: ladder[0] for name, ladder in ladders.items()}


def read_texts(array: Any, kind: Any) -> Any:
    """A column of texts as ``kind``; times of day as what has passed since midnight. Raises ArrowInvalid."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_string_view(array.type):  # casts know the older kinds of text only
        array = array.cast(pa.large_string())
    of_day, with_offset = pa.types.is_time(kind), pa.types.is_duration(kind)
    if not is_text(array.type) or not (of_day or with_offset):
        return array.cast(kind)
    day, nothing = pa.scalar(_DAY, array.type), pa.scalar("", array.type)
    moments = pc.binary_join_element_wise(day, array, nothing)
    if of_day:
        return moments.cast(pa.timestamp("ns")).cast(kind)
    return moments.cast(pa.timestamp("ns", "UTC")).cast(pa.int64()).cast(kind)


def _rungs(is_time: bool) -> list[Any]:
    """Types from narrow to wide; Arrow reads a text as a type with a zone only where it has an offset."""
    import pyarrow as pa

    numbers = [pa.int64(), pa.float64()]
    if not is_time:
        return [*numbers, pa.timestamp("ns"), pa.string()]
    naive = [pa.date32(), pa.timestamp("ns"), pa.timestamp("us")]
    with_offset = [pa.timestamp("ns", "UTC"), pa.timestamp("us", "UTC")]
    return [*numbers, *naive, *with_offset, pa.time64("ns"), pa.duration("ns")]


def _fitting(column: Any, rungs: list[Any]) -> list[Any]:
    import pyarrow as pa

    fitting = []
    for kind in rungs:
        try:
            read_texts(column, kind)
        except pa.ArrowInvalid:
            continue
        fitting.append(kind)
    return fitting


def _unlike(column: Any, rungs: list[Any], rows_above: int) -> str:
    """The first text that cannot stand below those above it, and why."""
    lengths = range(1, len(column) + 1)
    place = bisect_left(lengths, True, key=lambda n: not _fitting(column.slice(0, n), rungs))
    text = repr(column[place].as_py())
    text = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
    where = f"{text} in row {rows_above + place + 1}"
    alone = _fitting(column.slice(place, 1), _rungs(True))
    if not alone:
        return f"{where}, neither a number nor a time that is read; write it as in 2024-01-31T12:00:00+01:00"
    here, above = (
        _WORDS.get(str(kinds[0]), _NUMBER)
        for kinds in (alone, _fitting(column.slice(0, place), rungs) or rungs)
    )
    if here == above:
        return f"{where}, beside times of nanoseconds, which reach from 1677 to 2262; write fewer digits"
    return f"{where}, {here}, below rows with {above}; write all times in one way"
