"""Texts that mean numbers or times: what a whole column of them is, and its values in the order of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from koffline.errors import DataError

# 2024-01-31, 2024-01-31T12, 12:00:00.5, with Z or an offset behind a clock.
_ISO = (
    r"^(?:(\d{4}-\d{2}-\d{2})(?:[T ]|$))?"
    r"(?:(\d{2})(?::(\d{2})(?::(\d{2})(?:\.(\d{1,9}))?)?)?)?(?:(Z|[+-]\d{2})(?::?(\d{2}))?)?$"
)
_PARTS = ("date", "hour", "minute", "second", "fraction", "zone", "zone_minute")
_NUMBER, _DATE, _LOCAL, _EXACT, _DAY, _EXACT_DAY = range(1, 7)
_WORDS = {
    _NUMBER: "a number",
    _DATE: "a time without a UTC offset",
    _LOCAL: "a time without a UTC offset",
    _EXACT: "a time with a UTC offset",
    _DAY: "a time of day without a UTC offset",
    _EXACT_DAY: "a time of day with a UTC offset",
}
_MOST_SHOWN = 60


@dataclass
class TextKind:
    """What all texts of a column can be read as; ``as_time`` refuses what is neither a number nor a time."""

    name: str
    as_time: bool
    kind: int = 0
    numbers: bool = True
    whole: bool = True
    rows: int = 0

    def look(self, column: pl.Series, source: str) -> None:
        """Take the next rows into account. Raises DataError naming the first row unlike those above."""
        there = len(column) - column.null_count()
        if self.whole:
            self.whole = column.cast(pl.Int64, strict=False).count() == there
        if self.numbers and not self.whole:
            self.numbers = column.cast(pl.Float64, strict=False).count() == there
        if self.as_time:
            self._compare(column, source)
        self.rows += len(column)

    @property
    def is_naive(self) -> bool:
        """Whether the texts are times of a clock whose zone is not told."""
        return self.kind in (_LOCAL, _DAY)

    @property
    def dtype(self) -> Any:
        """Whole numbers and numbers where all are; instants are whole nanoseconds in UTC; else texts."""
        if self.numbers and self.kind in (0, _NUMBER):
            return pl.Int64() if self.whole else pl.Float64()
        return pl.Int128() if self.as_time else pl.String()

    def read(self, column: pl.Series) -> pl.Series:
        """The column as ``dtype``."""
        return _instants(column).alias(self.name) if self.dtype == pl.Int128 else column.cast(self.dtype)

    def _compare(self, column: pl.Series, source: str) -> None:
        kinds = pl.Series([_NUMBER]) if self.whole else _kinds(column)
        for kind in kinds.drop_nulls().unique(maintain_order=True):
            unlike = self.kind not in (0, kind) and {self.kind, kind} != {_DATE, _LOCAL}
            if kind == 0 or unlike:
                self._refuse(column, int((kinds == kind).arg_max() or 0), kind, source)
            self.kind = max(self.kind, kind)

    def _refuse(self, column: pl.Series, place: int, kind: int, source: str) -> None:
        text = repr(column[place])
        text = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
        where = f"{source}: column {self.name} holds {text} in row {self.rows + place + 1}"
        if not kind:
            raise DataError(
                f"{where}, neither a number nor a time that is read; write it as in 2024-01-31T12:00:00+01:00"
            )
        raise DataError(
            f"{where}, {_WORDS[kind]}, below rows with {_WORDS[self.kind]}; write all times in one way"
        )


def shown_time(value: object, dtype: Any) -> str:
    """A time of a table for messages; instants read from texts are nanoseconds."""
    if dtype == pl.Int128 and isinstance(value, int):
        return f"{np.datetime64(value // 1000, 'us')}{value % 1000:03}Z".replace("T", " ")
    return str(value)


def _kinds(column: pl.Series) -> pl.Series:
    """The kind of each text, 0 where it is none; null stays null."""
    frame = _parts(column)
    clock = pl.all_horizontal(
        pl.col("hour").cast(pl.Int8) < 24,
        pl.col("minute", "second", "zone_minute").cast(pl.Int8).fill_null(0) < 60,
    )
    date = pl.col("date").str.to_date("%Y-%m-%d", strict=False).is_not_null()
    length, zone = pl.col("text").str.len_bytes(), pl.col("zone").is_not_null()
    day = clock & pl.col("date").is_null() & pl.col("minute").is_not_null()
    number = pl.col("text").cast(pl.Float64, strict=False).is_finite()
    kind = (
        pl.when(pl.col("text").is_null()).then(None)
        .when(number).then(_NUMBER)
        .when(date & (length == 10)).then(_DATE)
        .when(date & clock & zone).then(_EXACT)
        .when(date & clock).then(_LOCAL)
        .when(day & zone).then(_EXACT_DAY)
        .when(day).then(_DAY)
        .otherwise(0)
    )  # fmt: skip
    return frame.select(kind.alias("kind").cast(pl.Int8)).to_series()


def _instants(column: pl.Series) -> pl.Series:
    """Nanoseconds since 1970 in UTC; times of day as what has passed since midnight."""
    number = {name: pl.col(name).cast(pl.Int128).fill_null(0) for name in ("hour", "minute", "second")}
    seconds = (number["hour"] * 60 + number["minute"]) * 60 + number["second"]
    days = pl.col("date").str.to_date("%Y-%m-%d", strict=False).cast(pl.Int32).cast(pl.Int128).fill_null(0)
    hours = pl.col("zone").str.replace("Z", "0", literal=True)
    sign = pl.when(hours.str.starts_with("-")).then(-1).otherwise(1)
    offset = hours.cast(pl.Int128) * 60 + sign * pl.col("zone_minute").cast(pl.Int128).fill_null(0)
    whole = days * 86_400 + seconds - offset.fill_null(0) * 60
    nanoseconds = pl.col("fraction").str.pad_end(9, "0").cast(pl.Int128).fill_null(0)
    return _parts(column).select(whole * 1_000_000_000 + nanoseconds).to_series()


def _parts(column: pl.Series) -> pl.DataFrame:
    """The text and its parts by name."""
    groups = column.str.extract_groups(_ISO).struct.rename_fields(list(_PARTS)).struct.unnest()
    return groups.with_columns(column.alias("text"))
