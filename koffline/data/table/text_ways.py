"""Ways to read texts: as numbers, with decimal points or commas, and as times, also in
a declared form and time zone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import polars as pl

from koffline.data.table.missing import is_missing_word, without_missing_words

# 2024-01-31, with 12:00 or 12:00:00.5 behind it: nanoseconds since 1970 in 64 bits
# reach from 1677 to 2262.
_TIME = (
    r"^(?<date>(?:1[7-9]|2[01])\d{2}-\d{2}-\d{2})"
    r"(?:[T ](?<clock>\d{2}:\d{2})(?<second>:\d{2}(?:\.\d{1,9})?)?)?"
    r"(?<zone>Z|[+-]\d{2}(?::?\d{2})?)$"
)
# 1.234 or 12.345.678,9: points that mark thousands, where commas mark decimals.
_THOUSANDS = r"^[+-]?[1-9]\d{0,2}(\.\d{3})+(,\d*)?$"


def _instants(texts: pl.Expr) -> pl.Expr:
    """Texts of times with a UTC offset as date-times in UTC, to the nanosecond; null if
    a text is no such time.
    """
    clock = pl.field("clock").fill_null("00:00")
    second = pl.field("second").fill_null(":00")
    whole = pl.concat_str(
        pl.field("date"), pl.lit("T"), clock, second, pl.field("zone")
    ).alias("whole")
    groups = texts.str.extract_groups(_TIME)
    instants = groups.struct.with_fields(whole).struct.field("whole")
    return instants.str.to_datetime(
        "%Y-%m-%dT%H:%M:%S%.f%#z", time_unit="ns", strict=False
    )


def _with_decimal_commas(texts: pl.Expr) -> pl.Expr:
    """Texts such as 3,5 and 1.234,5 as floats; null if a point marks no thousands."""
    without_points = texts.str.replace_all(".", "", literal=True)
    has_thousands = texts.str.contains(_THOUSANDS)
    digits = pl.when(has_thousands).then(without_points).otherwise(texts)
    numbers = digits.str.replace(",", ".", literal=True).cast(pl.Float64, strict=False)
    has_other_point = digits.str.contains(".", literal=True)
    return pl.when(~has_other_point).then(numbers)


# Ways to read texts, the narrowest first; all but the first two are for times.
WHOLE = "whole numbers"
NUMBERS = "numbers"
LOCAL = "times without a UTC offset"
_PLAIN_WAYS: dict[str, Callable[[pl.Expr], pl.Expr]] = {
    WHOLE: lambda texts: texts.cast(pl.Int64, strict=False),
    NUMBERS: lambda texts: texts.cast(pl.Float64, strict=False),
    "times with a UTC offset": _instants,
    "dates": lambda texts: _instants(texts + "T00:00Z"),
    LOCAL: lambda texts: _instants(texts + "Z"),
}
TEXT_WAYS = tuple(_PLAIN_WAYS)
# Only where the mapping says so.
DECIMAL_COMMAS = "numbers with decimal commas"
# Texts in which words for missing are missing.
FLAGS_OR_IDS = "texts"
_WAYS = {
    **_PLAIN_WAYS,
    DECIMAL_COMMAS: _with_decimal_commas,
    FLAGS_OR_IDS: without_missing_words,
}


# A way of reading times as the mapping says: this, the form, a blank line, the zone.
_DECLARED = "times as declared: "
_APART = "\n"


def declared_times(form: str | None, zone: str | None) -> str:
    """The way to read times of a declared form (None: ISO 8601) in a declared time zone
    (None: UTC, unless the form holds an offset).
    """
    return f"{_DECLARED}{form or ''}{_APART}{zone or ''}"


def in_zone(local_times: pl.Expr, zone: str) -> pl.Expr:
    """Date-times without a time zone as instants, by the clocks of a zone; null where
    these skipped the time, and the earlier where they showed it twice.
    """
    instants = local_times.dt.replace_time_zone(
        zone, ambiguous="earliest", non_existent="null"
    )
    return instants.dt.convert_time_zone("UTC")


def _times_as_declared(texts: pl.Expr, way: str) -> pl.Expr:
    """Texts as date-times in UTC, by a way from `declared_times`; null for others."""
    form, _, zone = way.removeprefix(_DECLARED).partition(_APART)
    if not form:
        return in_zone(_instants(texts + "Z").dt.replace_time_zone(None), zone)
    if has_offset(form):
        instants = texts.str.to_datetime(form, time_unit="ns", strict=False)
        return instants.dt.convert_time_zone("UTC")
    if has_clock(form):
        local_times = texts.str.to_datetime(form, time_unit="ns", strict=False)
    else:
        days = texts.str.to_date(form, strict=False)
        local_times = days.cast(pl.Datetime("ns"))
    return in_zone(local_times, zone or "UTC")


def has_offset(form: str) -> bool:
    """Whether a form of times holds an offset from UTC."""
    return "%z" in form or "%#z" in form or "%:z" in form


def has_clock(form: str) -> bool:
    """Whether a form of times holds the time of day."""
    return any(part in form for part in ("%H", "%I", "%T", "%R", "%X", "%c", "%s"))


def as_read(column: str, way: str) -> pl.Expr:
    """A column of texts read in one of the ways above, as integers, floats or
    date-times; null or NaN where a text is none.
    """
    texts = pl.col(column).str.strip_chars()
    if way.startswith(_DECLARED):
        return _times_as_declared(texts, way).alias(column)
    return _WAYS[way](texts).alias(column)


def unread(column: pl.Series, ways: Iterable[str]) -> dict[str, pl.Series]:
    """For each way to read texts, whether (N,) it cannot read a text that is there and
    is no word for a missing value.
    """
    frame = column.to_frame()
    texts = pl.col(column.name).str.strip_chars()
    is_missing = frame.select(is_missing_word(texts)).to_series()
    is_there = column.is_not_null() & ~is_missing
    masks = {}
    for way in ways:
        values = frame.select(as_read(column.name, way)).to_series()
        masks[way] = values.is_null() & is_there
    return masks
