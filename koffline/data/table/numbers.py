"""Columns as numbers: their common type, the features that encode categories, and
hashes of ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import polars as pl

from koffline.data.spaces import ONE_HOT, Encoding
from koffline.data.table.column_types import ColumnType

_NARROW = (pl.Boolean, pl.Float16, pl.Float32, pl.Int8, pl.UInt8, pl.Int16, pl.UInt16)


def number_type(kinds: Iterable[ColumnType], bytes_stay: bool = False) -> ColumnType:
    """Common numeric type of columns of these polars types (of lists: of their
    numbers); it depends on the types only, never on values.

    float16, float32 and integers of at most 16 bits become float32, others float64.
    bytes_stay: whether uint8 stays if all are uint8.
    """
    bases = [getattr(kind, "inner", kind) for kind in kinds]
    if bytes_stay and all(base == pl.UInt8 for base in bases):
        return pl.UInt8()
    if all(base in _NARROW for base in bases):
        return pl.Float32()
    return pl.Float64()


def category_features(
    column: str, encoding: Encoding, spelled: Mapping[str, str]
) -> list[pl.Expr]:
    """The numbers that encode a column of categories, an expression each: one (N,) for
    an ordinal encoding, one of 0 and 1 for each category if one-hot.

    spelled: by another spelling, the category that is meant. Missing values stay
    missing.
    """
    texts = pl.col(column).cast(pl.String)
    if spelled:
        texts = texts.replace(dict(spelled))
    if encoding.kind == ONE_HOT:
        pairs = zip(encoding.categories, encoding.names(column), strict=True)
        return [
            (texts == category).cast(pl.Int8).alias(name) for category, name in pairs
        ]
    categories = pl.Series(encoding.categories, dtype=pl.String)
    codes = texts.replace_strict(
        categories, range(len(categories)), default=None, return_dtype=pl.Int16
    )
    return [codes.alias(column)]


def hashed_ids(ids: pl.Series) -> pl.Series:
    """Hash ids to 64 bits.

    A collision is harmless: both ids go to the same temporary file.
    """
    return ids.hash(0).alias("id")
