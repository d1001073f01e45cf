"""Names for the types of columns.

polars's classes of types show themselves without their module, so that beartype, with
which tests check annotations, cannot tell them from names: at run time any object will
do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import polars as pl

    ColumnType: TypeAlias = pl.DataType
    # with or without its options, as polars takes types
    Kind: TypeAlias = pl.DataType | pl.datatypes.DataTypeClass
else:
    ColumnType = object
    Kind = object

Types: TypeAlias = Mapping[str, ColumnType]  # by column
