"""Profiles of the columns of a table: their values as they would be read, counts,
ranges and examples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl

from koffline.data.table.flag_values import FALSE, TRUE
from koffline.data.table.missing import is_missing_word
from koffline.data.table.text_ways import (
    DECIMAL_COMMAS,
    FLAGS_OR_IDS,
    TEXT_WAYS,
    as_read,
    unread,
)
from koffline.errors import printable

IGNORED = "ignored"
# 31/01/2024, 20240131T1200, 2024-W05-3, 9:00 AM, Wed, 31 Jan 2024 12:00:00
_DATE = (
    r"^\d{1,4}[-./]\d{1,2}[-./]\d{1,4}([T ].*)?$"
    r"|^\d{8}T\d{4}|^\d{4}-?W\d\d|^\d{1,2}:\d\d|\d \d{1,2}:\d\d"
    r"|^\d{1,2}[-/][A-Za-z]{3}[-/]\d{2,4}"
)
_MIXED = "times in a form that is not read"
DECIMAL_COMMA = "numbers with decimal commas"
NUMBERS_AS_TEXT = "numbers as text"  # in files that declare types
_MOSTLY = 0.8  # share of numbers above which the texts among them are errors
_THOUSANDS = r"^[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?$"  # commas that may mark thousands
_SPELLINGS = 50  # more than there are of two words for yes and no, in any case
_CODES = 20  # most whole numbers that are taken to be codes


@dataclass
class ColumnProfile:
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
        present = self.values.drop_nulls()
        # Texts that are no number are missing in the values alone.
        if self.problem and self.texts is not None:
            self.missing = self.texts.null_count()
        else:
            self.missing = self.values.null_count()
        self.present = len(self.values) - self.missing
        self.width = _width(present)
        self.distinct = 0
        self.low: Any = None
        self.high: Any = None
        unordered = (pl.Binary, pl.Object, pl.Unknown)
        if not present.dtype.is_nested() and present.dtype not in unordered:
            self.distinct = present.n_unique()
            if self.distinct:
                self.low = present.min()
                self.high = present.max()
        elif self.width is not None:
            self.distinct = len(present)
        shown = present
        if self.texts is not None and self.is_time:
            shown = self.texts.drop_nulls()
        self.example = printable(str(next(iter(shown.head(1).to_list()), "")))[:40]
        is_text = present.dtype == pl.String
        self.has_digits = is_text and present.str.contains(r"\d").all()
        self.is_flag = False
        may_be_flag = self.is_number or is_text
        if may_be_flag and not self.problem and 0 < self.distinct <= _SPELLINGS:
            lower = present.cast(pl.String, strict=False).str.to_lowercase()
            are_words = bool(lower.is_in([*TRUE, *FALSE]).all())
            self.is_flag = lower.n_unique() <= 2 and are_words

    def leave_out(self, reason: str) -> None:
        """Give the column no role, for a reason."""
        self.role = IGNORED
        self.reason = reason

    @property
    def formula_name(self) -> str:
        """The name as a formula writes it: in backticks where it is no plain word."""
        if self.name.isidentifier():
            return self.name
        return f"`{self.name}`"

    @property
    def is_struct(self) -> bool:
        """Whether every value has fields of its own."""
        return isinstance(self.values.dtype, pl.Struct)

    @property
    def unread_kind(self) -> str:
        """What a nested column holds that is not read; empty if it holds lists of
        numbers of one length.
        """
        is_nested = self.values.dtype.is_nested()
        if not is_nested or self.width is not None or not self.present:
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
        if self.values.dtype == pl.String:
            return True
        is_code = self.values.dtype.is_integer() and 0 < self.distinct <= _CODES
        return is_code and (self.low, self.high) != (0, self.distinct - 1)

    @property
    def range(self) -> str:
        """Smallest and largest value as text."""
        if self.is_time:
            return f"{self._read(self.low)} … {self._read(self.high)}"
        if self.values.dtype.is_numeric() and self.low is not None:
            return f"{self.low:.6g} … {self.high:.6g}"
        return ""

    def _read(self, value: object) -> str:
        """Text of a time after parsing."""
        text = str(value)
        if text.endswith("+00:00"):
            return text.removesuffix("+00:00") + " UTC"
        return text

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


def profile(column: pl.Series, is_typed: bool) -> ColumnProfile:
    """Profile a column; texts get the narrowest type that fits all. is_typed: the file
    declares types.
    """
    name = column.name
    if column.dtype != pl.String or column.null_count() == len(column):
        return _profile_as_stored(column)
    texts = column.str.strip_chars()
    is_word = texts.to_frame().select(is_missing_word(pl.col(name))).to_series()
    # in numbers, times and flags such words are missing values
    present = texts.filter(~is_word)
    for way, missed in unread(texts, TEXT_WAYS).items():
        if not missed.any():
            return _profile_as_read(texts, way, is_typed)
    without_words = texts.to_frame().select(as_read(name, FLAGS_OR_IDS)).to_series()
    if present.str.to_lowercase().is_in([*TRUE, *FALSE]).all():
        return ColumnProfile(name, "text", without_words, without_words)
    with_commas = present.filter(present.str.contains(",", literal=True))
    if len(with_commas):
        may_be_thousands = with_commas.str.contains(_THOUSANDS).all()
        if may_be_thousands and _are_all_numbers(present):
            kind = "numbers with commas, to be read in two ways"
            shown = printable(f"'{with_commas[0]}'")
            problem = (
                f"{shown} may be a thousand or a number with decimals; write it without"
                " the comma, or say decimal_comma: true"
            )
            return ColumnProfile(name, kind, texts, texts, problem)
        if not unread(texts, [DECIMAL_COMMAS])[DECIMAL_COMMAS].any():
            as_numbers = as_read(name, DECIMAL_COMMAS)
            numbers = texts.to_frame().select(as_numbers).to_series()
            return ColumnProfile(name, DECIMAL_COMMA, numbers, without_words)
    if present.str.contains(_DATE).sum() > len(present) / 2:
        return ColumnProfile(name, _MIXED, without_words, without_words)
    strays = present.filter(present.cast(pl.Float64, strict=False).is_null())
    if len(strays) > (1.0 - _MOSTLY) * len(present):
        return ColumnProfile(name, "text", texts, texts)
    are = "is no number" if len(strays) == 1 else "are no numbers"
    problem = (
        f"{len(strays)} of {len(present)} values {are} ({printable(strays[0])[:24]!r});"
        " write a number there, or leave it empty"
    )
    numbers = texts.cast(pl.Float64, strict=False)
    return ColumnProfile(name, "numbers and texts", numbers, texts, problem)


def _profile_as_stored(column: pl.Series) -> ColumnProfile:
    """The profile of a column of any type but texts, or of one without values."""
    kind = str(column.dtype).partition("(")[0].lower()
    if column.dtype.is_numeric():
        kind = f"numbers ({kind})"
    if column.dtype.is_float():
        column = column.fill_nan(None)
    return ColumnProfile(column.name, kind, column)


def _profile_as_read(texts: pl.Series, way: str, is_typed: bool) -> ColumnProfile:
    """The profile of texts that one way reads all as numbers or as times. is_typed: the
    file declares types, and calls these texts.
    """
    name = texts.name
    values = texts.to_frame().select(as_read(name, way)).to_series()
    kind = "numbers"
    if values.dtype.is_temporal():
        kind = way
    elif is_typed:
        kind = NUMBERS_AS_TEXT
    if values.dtype.is_float():
        values = values.fill_nan(None)
    return ColumnProfile(name, kind, values, texts)


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
