"""A table that is in memory, read like a file: a frame of pandas, polars or Arrow, or
columns by name.

Every frame becomes an Arrow table, because that is what the reader of files knows; then
the same types are known, the same values count as missing, and the same questions are
asked. pandas is never imported here: a frame of pandas shows that it is there.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import polars as pl
import pyarrow as pa

from koffline.data.kinds import HELD, find_tables
from koffline.errors import DataError, listed
from koffline.untrusted.limits import one_line


@dataclass(frozen=True, eq=False)
class HeldTable:
    """A table in memory. ``name``: what it is, for messages and for the log's source
    ("the pandas DataFrame").
    """

    name: str
    table: pa.Table = field(repr=False)

    def __str__(self) -> str:
        return self.name

    @property
    def size(self) -> int:
        """Bytes of the columns."""
        return int(self.table.nbytes)


# where a table is: a path, URL or pattern of files, or the table itself
TableSource: TypeAlias = str | HeldTable


def find_files(
    source: TableSource, is_table: bool
) -> tuple[str, tuple[TableSource, ...]]:
    """Kind and files of a table; a table in memory is its own only file. Arguments and
    errors as of `koffline.data.kinds.find_tables`.
    """
    if isinstance(source, HeldTable):
        return HELD, (source,)
    return find_tables(source, is_table)


def held_frame(value: Any) -> HeldTable | None:
    """A frame of pandas, polars or Arrow as a table in memory; None for anything else.

    A named index of pandas is a column, as it would be in a file; an index without a
    name is left out, and the rows keep their order. A column of mixed objects is read
    as its texts, as in a CSV file. Any object that offers its rows as an Arrow stream
    (``__arrow_c_stream__``), such as a result of DuckDB, is a frame, too. Raises
    DataError.
    """
    if isinstance(value, pl.LazyFrame):
        value = value.collect()
    if isinstance(value, pl.DataFrame):
        return HeldTable("the polars DataFrame", _of_polars(value))
    if isinstance(value, pa.RecordBatchReader):
        raise DataError(
            "the log is a pyarrow.RecordBatchReader, which can be read once only; give"
            " the table reader.read_all()"
        )
    if isinstance(value, pa.RecordBatch):
        return HeldTable("the Arrow table", pa.Table.from_batches([value]))
    if isinstance(value, pa.Table):
        return HeldTable("the Arrow table", value)
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(value, pandas.DataFrame):
        return HeldTable("the pandas DataFrame", _of_pandas(value))
    if hasattr(value, "__arrow_c_stream__"):
        name = f"the {type(value).__name__}"
        try:
            return HeldTable(name, pa.table(value))
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise DataError(
                f"{name} cannot be read as an Arrow table ({one_line(error)}); make a"
                " polars or pandas frame of it"
            ) from None
    return None


def held_columns(columns: Mapping[Any, object], name: str) -> HeldTable:
    """Columns by name as a table in memory: each (N,) numbers, texts or times, or (N,
    d) numbers.

    name: of the table, for messages. Raises DataError.
    """
    series = []
    rows: dict[str, int] = {}
    for key, values in columns.items():
        column = _series(str(key), values, name)
        series.append(column)
        rows[column.name] = len(column)
    if len(set(rows.values())) > 1:
        shown = [f"{key} {count}" for key, count in rows.items()]
        raise DataError(
            f"{name} has columns of different lengths ({listed(shown)}); give one value"
            " per row in each"
        )
    if len(rows) < len(series):
        raise DataError(
            f"{name} has two columns of one name ({listed(rows)}); rename one"
        )
    return HeldTable(name, _of_polars(pl.DataFrame(series)))


def _series(key: str, values: Any, name: str) -> pl.Series:
    """One column of a dict of arrays. Raises DataError."""
    if np.ma.isMaskedArray(values):
        values = values.tolist()  # None where it is masked
    if not isinstance(values, (list, tuple)):
        values = np.asarray(values)
        if values.ndim not in (1, 2):
            raise DataError(
                f"{name}: {key} has shape {values.shape}; a column has one number, one"
                " text or one list of numbers per row, (N,) or (N, d)"
            )
        if values.shape[1:] == (1,):
            values = values.reshape(-1)
        if values.dtype == object:
            values = values.tolist()
    try:
        return pl.Series(key, values)
    except (TypeError, ValueError, OverflowError, pl.exceptions.PolarsError) as error:
        raise DataError(
            f"{name}: {key} is no column ({one_line(error)}); give one value per row,"
            " all of one kind"
        ) from None


def _of_polars(frame: pl.DataFrame) -> pa.Table:
    """A frame of polars as an Arrow table; columns of Python objects as their texts."""
    objects = [name for name, kind in frame.schema.items() if kind == pl.Object]
    as_texts = [
        pl.Series(name, _texts(frame[name].to_list()), dtype=pl.String)
        for name in objects
    ]
    frame = frame.with_columns(as_texts)
    return frame.to_arrow(compat_level=pl.CompatLevel.oldest())


def _of_pandas(frame: Any) -> pa.Table:
    """A frame of pandas as an Arrow table, column by column. Raises DataError."""
    if frame.columns.nlevels > 1:
        raise DataError(
            "the pandas DataFrame has columns of several levels; join their names first"
            " (frame.columns = frame.columns.map('_'.join))"
        )
    named_levels = [name for name in frame.index.names if name is not None]
    columns = []
    names = []
    for level in named_levels:
        names.append(str(level))
        columns.append(_of_series(frame.index.get_level_values(level).to_series()))
    for place, name in enumerate(frame.columns):
        names.append(str(name))
        columns.append(_of_series(frame.iloc[:, place]))
    return pa.table(columns, names=names)


def _of_series(series: Any) -> pa.Array:
    """One column of pandas as an Arrow array; its texts if its objects are of several
    kinds.
    """
    try:
        return pa.Array.from_pandas(series)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        objects = series.astype(object).where(series.notna(), None)
        return pa.array(_texts(objects.tolist()), pa.string())


def _texts(values: list[object]) -> list[str | None]:
    """Texts of Python objects; None where one is missing."""
    texts: list[str | None] = []
    for value in values:
        if value is None:
            texts.append(None)
        else:
            texts.append(str(value))
    return texts
