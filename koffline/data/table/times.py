"""Texts that mean numbers or times: what a whole column of them is, and its values in the order of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from koffline.errors import DataError

# 2024-01-31, 2024-01-31T12, 12:00:00.5, with Z or an offset behind a clock.
_ISO = (
    r"^(?:(?<date>\d{4}-\d{2}-\d{2})(?:[T ]|$))?"
    r"(?:(?<hour>\d{2})(?::(?<minute>\d{2})(?::(?<second>\d{2})(?:\.(?<fraction>\d{1,9}))?)?)?)?"
    r"(?:(?<zone>Z|[+-]\d{2})(?::?(?<zone_minute>\d{2}))?)?$"
)
_KINDS = {
    1: "a number",
    2: "a time without a UTC offset",  # a date alone
    3: "a time without a UTC offset",
    4: "a time with a UTC offset",
    5: "a time of day without a UTC offset",
    6: "a time of day with a UTC offset",
}
_NUMBER, _DATE, _LOCAL, _EXACT, _DAY, _EXACT_DAY = _KINDS
INSTANT = pl.Decimal(38, 0)  # nanoseconds since 1970 in UTC, or since midnight
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
        there = column.count()
        self.whole = self.whole and column.cast(pl.Int64, strict=False).count() == there
        self.numbers = self.whole or (self.numbers and column.cast(pl.Float64, strict=False).count() == there)
        if self.as_time:
            kinds = pl.Series([_NUMBER]) if self.whole else _kinds(column)
            for kind in kinds.drop_nulls().unique(maintain_order=True):
                unlike = self.kind not in (0, kind) and {self.kind, kind} != {_DATE, _LOCAL}
                if kind == 0 or unlike:
                    self._refuse(column, int((kinds == kind).arg_max() or 0), kind, source)
                self.kind = max(self.kind, kind)
        self.rows += len(column)

    @property
    def is_naive(self) -> bool:
        """Whether the texts are times of a clock whose zone is not told."""
        return self.kind in (_LOCAL, _DAY)

    @property
    def dtype(self) -> Any:
        """Whole numbers and numbers where all are; instants; else texts."""
        if self.numbers and self.kind in (0, _NUMBER):
            return pl.Int64() if self.whole else pl.Float64()
        return INSTANT if self.as_time else pl.String()

    def read(self, column: pl.Series) -> pl.Series:
        """The column as ``dtype``."""
        return _instants(column).alias(self.name) if self.dtype == INSTANT else column.cast(self.dtype)

    def _refuse(self, column: pl.Series, place: int, kind: int, source: str) -> None:
        text = repr(column[place])
        text = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
        said = "neither a number nor a time that is read; write it as in 2024-01-31T12:00:00+01:00"
        if kind:
            said = f"{_KINDS[kind]}, below rows with {_KINDS[self.kind]}; write all times in one way"
        raise DataError(f"{source}: column {self.name} holds {text} in row {self.rows + place + 1}, {said}")


def shown_time(value: Any, dtype: Any) -> str:
    """A time of a table for messages; instants read from texts are nanoseconds."""
    if dtype != INSTANT:
        return str(value)
    return f"{np.datetime64(int(value) // 1000, 'us')}{int(value) % 1000:03}Z".replace("T", " ")


def _kinds(column: pl.Series) -> pl.Series:
    """The kind of each text, 0 where it is none; null stays null."""
    clock = pl.all_horizontal(
        pl.col("hour").cast(pl.Int8) < 24,
        pl.col("minute", "second", "zone_minute").cast(pl.Int8).fill_null(0) < 60,
    )
    date = pl.col("date").str.to_date("%Y-%m-%d", strict=False).is_not_null()
    zone = pl.col("zone").is_not_null()
    day = clock & pl.col("date").is_null() & pl.col("minute").is_not_null()
    kind = (
        pl.when(pl.col("text").is_null()).then(None)
        .when(pl.col("text").cast(pl.Float64, strict=False).is_finite()).then(_NUMBER)
        .when(date & (pl.col("text").str.len_bytes() == 10)).then(_DATE)
        .when(date & clock).then(pl.when(zone).then(_EXACT).otherwise(_LOCAL))
        .when(day).then(pl.when(zone).then(_EXACT_DAY).otherwise(_DAY))
        .otherwise(0)
    )  # fmt: skip
    return _parts(column).select(kind.alias("kind").cast(pl.Int8)).to_series()


def _instants(column: pl.Series) -> pl.Series:
    """Nanoseconds since 1970 in UTC; times of day as what has passed since midnight."""
    hour, minute, second, zone_minute = (
        pl.col(name).cast(pl.Int128).fill_null(0) for name in ("hour", "minute", "second", "zone_minute")
    )
    days = pl.col("date").str.to_date("%Y-%m-%d", strict=False).cast(pl.Int32).cast(pl.Int128).fill_null(0)
    zone = pl.col("zone").str.replace("Z", "0", literal=True).fill_null("0")
    sign = pl.when(zone.str.starts_with("-")).then(-1).otherwise(1)
    offset = zone.cast(pl.Int128) * 60 + sign * zone_minute
    seconds = days * 86_400 + (hour * 60 + minute - offset) * 60 + second
    nanoseconds = pl.col("fraction").str.pad_end(9, "0").cast(pl.Int128).fill_null(0)
    instant = pl.when(pl.col("text").is_not_null()).then(seconds * 1_000_000_000 + nanoseconds)
    return _parts(column).select(instant.cast(INSTANT)).to_series()


def _parts(column: pl.Series) -> pl.DataFrame:
    """The text and its parts by name."""
    return column.str.extract_groups(_ISO).struct.unnest().with_columns(column.alias("text"))
