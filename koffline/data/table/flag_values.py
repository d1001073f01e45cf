"""What flags hold: yes and no, as booleans, numbers or words."""

from __future__ import annotations

import polars as pl

from koffline.errors import DataError

# Texts in small letters.
TRUE = ("true", "t", "yes", "y", "1", "1.0")
FALSE = ("false", "f", "no", "n", "0", "0.0")


def read_flags(frame: pl.DataFrame, name: str | None, source: str) -> pl.Series:
    """The column ``name`` of flags as booleans (N,): booleans, 0 and 1, or texts of
    `TRUE` and `FALSE`; missing values are false, and without a column (None) all are.

    source: the table's name for messages. Raises DataError for any other value.
    """
    if name is None:
        return pl.repeat(False, frame.height, eager=True)
    column = frame[name]
    if column.dtype == pl.Boolean:
        return column.fill_null(False)  # missing values are refused elsewhere
    compare = ""
    if column.dtype == pl.String:
        lower = column.str.strip_chars().str.to_lowercase()
        yes = lower.is_in(TRUE)
        no = lower.is_in(FALSE)
        compare = f", or compare: \"{name} == '…'\""
    else:
        number = column.cast(pl.Float64)
        yes = number == 1
        no = number == 0
    wrong = ~(yes | no) & column.is_not_null()
    if wrong.any():
        value = column[int(wrong.arg_max() or 0)]
        raise DataError(
            f"{source}: column {name} holds {value!r}, neither yes nor no; give true"
            f" and false, or 1 and 0{compare}"
        )
    return yes.fill_null(False)
