"""What stands for a missing value: words in texts, and values that a mapping declares
to be none.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

# In columns of numbers, times and flags these words are missing values, in whatever
# case; in columns of labels they are labels (NA is Namibia).
MISSING_WORDS = (
    "na",
    "n/a",
    "nan",
    "-nan",
    "null",
    "none",
    "#n/a",
    "#n/a n/a",
    "#na",
    "<na>",
)


def is_missing_word(texts: pl.Expr) -> pl.Expr:
    """Whether texts without blanks around them are words for a missing value; null
    stays null.
    """
    return texts.str.to_lowercase().is_in(MISSING_WORDS)


def without_missing_words(texts: pl.Expr) -> pl.Expr:
    """Texts, null where they are words for a missing value."""
    return pl.when(~is_missing_word(texts)).then(texts)


def without_values(column: pl.Expr, no_values: Sequence[str | int | float]) -> pl.Expr:
    """The column, null where it holds one of ``no_values``: the same text without
    blanks around it, or the same number (1 is 1.0).
    """
    no_texts = [str(value).strip() for value in no_values]
    as_series = pl.Series(no_texts, dtype=pl.String)
    no_numbers = as_series.cast(pl.Float64, strict=False).drop_nulls().to_list()
    is_missing = column.cast(pl.String).str.strip_chars().is_in(no_texts)
    if no_numbers:
        numbers = column.cast(pl.Float64, strict=False)
        is_missing = is_missing | numbers.is_in(no_numbers)
    return pl.when(is_missing.fill_null(False)).then(None).otherwise(column)
