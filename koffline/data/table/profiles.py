"""Profiles of the columns of a table: their values as they would be read, counts,
ranges and examples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl

from koffline.data.table.values import (
    DECIMAL_COMMAS,
    FALSE,
    FLAGS_OR_IDS,
    TEXT_WAYS,
    TRUE,
    as_read,
    is_missing_word,
    unread,
)
from koffline.errors import printable

IGNORED = "ignored"
# 31/01/2024, 20240131T1200, 2024-W05-3, 9:00 AM, Wed, 31 Jan 2024 12:00:00
_DATE = (
    r"^\d{1,4}[-./]\d{1,2}[-./]\d{1,4}([T"
    r" ].*)?$|^\d{8}T\d{4}|^\d{4}-?W\d\d|^\d{1,2}:\d\d|\d \d{1,2}:\d\d"
)
_MIXED = "times in a form that is not read"
DECIMAL_COMMA = "numbers with decimal commas"
_MOSTLY = 0.8  # share of numbers above which the texts among them are errors
_THOUSANDS = r"^[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?$"  # commas that may mark thousands
_SPELLINGS = 50  # more than there are of two words for yes and no, in any case
_CODES = 20  # most whole numbers that are taken to be codes


@dataclass
class Profile:
    """One column of the inspected rows: its ``values`` as they would be read, and their
    ``kind`` in words.

    ``texts``: the original texts of a text column; ``problem``: what may be wrong with
    them, and a remedy. ``role``, ``reason``: what the column seems to be, and why.
    ``formula``: how the mapping writes it, if not by its name. ``partner``: the
    observation whose next value it is.
    """

    name: str
    kind: str
    values: pl.Series
    texts: pl.Series | None = None
    problem: str = ""
    role: str = IGNORED
    reason: str = ""
    formula: str = ""
    partner: str = ""

    def __post_init__(self) -> None:
        there = self.values.drop_nulls()
        is_plain = not there.dtype.is_nested() and there.dtype not in (
            pl.Binary,
            pl.Object,
            pl.Unknown,
        )
        self.missing = (
            self.texts if self.problem and self.texts is not None else self.values
        ).null_count()
        self.present = len(self.values) - self.missing
        self.width = _width(there)
        is_vector = self.width is not None
        if is_plain:
            self.distinct = there.n_unique()
        else:
            self.distinct = len(there) * is_vector
        self.low: Any = there.min() if is_plain and self.distinct else None
        self.high: Any = there.max() if is_plain and self.distinct else None
        if self.texts is None or not self.is_time:
            shown = there
        else:
            shown = self.texts.drop_nulls()
        self.example = printable(str(next(iter(shown.head(1).to_list()), "")))[:40]
        self.has_digits = there.dtype == pl.String and there.str.contains(r"\d").all()
        self.is_flag = False
        may_be_flag = self.is_number or there.dtype == pl.String
        if may_be_flag and not self.problem and 0 < self.distinct <= _SPELLINGS:
            lower = there.cast(pl.String, strict=False).str.to_lowercase()
            self.is_flag = lower.n_unique() <= 2 and bool(
                lower.is_in([*TRUE, *FALSE]).all()
            )

    @property
    def is_struct(self) -> bool:
        """Whether every value has fields of its own."""
        return isinstance(self.values.dtype, pl.Struct)

    @property
    def unread_kind(self) -> str:
        """What a nested column holds that is not read; empty if it holds lists of
        numbers of one length.
        """
        if (
            not self.values.dtype.is_nested()
            or self.width is not None
            or not self.present
        ):
            return ""
        if self.is_struct:
            return "structs"
        inner = getattr(self.values.dtype, "inner", pl.Unknown())
        if inner.is_numeric():
            return "lists of different lengths"
        return "lists of what is no number"

    @property
    def is_number(self) -> bool:
        """Whether values are numbers or booleans."""
        return self.values.dtype.is_numeric() or self.values.dtype == pl.Boolean

    @property
    def is_time(self) -> bool:
        """Whether values are instants, dates or durations, or texts that seem to be
        meant as times.
        """
        return self.kind == _MIXED or self.values.dtype.is_temporal()

    @property
    def is_choice(self) -> bool:
        """Whether values are texts, or a few whole numbers other than 0, 1, 2, …"""
        is_code = self.values.dtype.is_integer() and 0 < self.distinct <= _CODES
        return self.values.dtype == pl.String or (
            is_code and (self.low, self.high) != (0, self.distinct - 1)
        )

    @property
    def range(self) -> str:
        """Smallest and largest value as text."""
        if self.is_time:
            return f"{self._read(self.low)} … {self._read(self.high)}"
        numbers = self.values.dtype.is_numeric() and self.low is not None
        if numbers:
            return f"{self.low:.6g} … {self.high:.6g}"
        return ""

    def _read(self, value: Any) -> str:
        """Text of a time after parsing."""
        return str(value).removesuffix("+00:00") + " UTC" * str(value).endswith(
            "+00:00"
        )

    def time_rule(self) -> str:
        """How a column of times is read, with an example; empty if it cannot be
        read.
        """
        if self.kind == _MIXED:
            return ""
        if self.values.dtype.is_numeric():
            return "numbers, in the order of their size"
        rule = (
            f"{self.kind}, in the order of instants,"
            f" {self.range.replace(' … ', ' to ')}"
        )
        first = self._read(self.values.drop_nulls()[0])
        if self.texts is None:
            return rule
        return f"{rule}: '{self.example}' is {first}"


def profile(column: pl.Series, is_typed: bool) -> Profile:
    """Profile a column; texts get the narrowest type that fits all. is_typed: the file
    declares types.
    """
    name = column.name
    kind = str(column.dtype).partition("(")[0].lower()
    if column.dtype != pl.String or column.null_count() == len(column):
        if column.dtype.is_float():
            column = column.fill_nan(None)
        return Profile(
            name, f"numbers ({kind})" if column.dtype.is_numeric() else kind, column
        )
    texts = column.str.strip_chars()
    is_word = texts.to_frame().select(is_missing_word(pl.col(name))).to_series()
    # in numbers, times and flags such words are missing values
    there = texts.filter(~is_word)
    way = next(
        (way for way, missed in unread(texts, TEXT_WAYS).items() if not missed.any()),
        None,
    )
    if way:
        values = texts.to_frame().select(as_read(name, way)).to_series()
        if values.dtype.is_temporal():
            kind = way
        else:
            kind = "numbers" + " as text" * is_typed
        return Profile(
            name,
            kind,
            values.fill_nan(None) if values.dtype.is_float() else values,
            texts,
        )
    without_words = texts.to_frame().select(as_read(name, FLAGS_OR_IDS)).to_series()
    if there.str.to_lowercase().is_in([*TRUE, *FALSE]).all():
        return Profile(name, "text", without_words, without_words)
    with_commas = there.filter(there.str.contains(",", literal=True))
    if (
        len(with_commas)
        and with_commas.str.contains(_THOUSANDS).all()
        and _are_all_numbers(there)
    ):
        said = (
            f"'{with_commas[0]}' may be a thousand or a number with decimals; write it"
            " without the comma"
        )
        kind = "numbers with commas, to be read in two ways"
        return Profile(
            name, kind, texts, texts, f"{printable(said)}, or say decimal_comma: true"
        )
    if len(with_commas) and not unread(texts, [DECIMAL_COMMAS])[DECIMAL_COMMAS].any():
        numbers = texts.to_frame().select(as_read(name, DECIMAL_COMMAS)).to_series()
        return Profile(name, DECIMAL_COMMA, numbers, without_words)
    if there.str.contains(_DATE).sum() > len(there) / 2:
        return Profile(name, _MIXED, without_words, without_words)
    strays = there.filter(there.cast(pl.Float64, strict=False).is_null())
    if len(strays) > (1.0 - _MOSTLY) * len(there):
        return Profile(name, "text", texts, texts)
    are = "is no number" if len(strays) == 1 else "are no numbers"
    said = f"{len(strays)} of {len(there)} values {are} ({printable(strays[0])[:24]!r})"
    said += "; write a number there, or leave it empty"
    return Profile(
        name, "numbers and texts", texts.cast(pl.Float64, strict=False), texts, said
    )


def _are_all_numbers(texts: pl.Series) -> bool:
    """Whether all texts are numbers if their commas are taken away."""
    plain = texts.str.replace_all(",", "", literal=True)
    return not plain.cast(pl.Float64, strict=False).has_nulls()


def _width(values: pl.Series) -> int | None:
    """Length of the lists of numbers in a column without missing values; None if it
    holds no such lists.
    """
    if not getattr(values.dtype, "inner", pl.String()).is_numeric():
        return None
    if not isinstance(values.dtype, pl.List):
        return int(getattr(values.dtype, "size", 0)) or None
    lengths = values.list.len().unique()
    if len(lengths) == 1:
        return int(lengths[0])
    return None
