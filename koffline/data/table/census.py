"""One pass over all rows of a table: missing and infinite values, flags, and the actions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from koffline.data.columns import counted
from koffline.data.spaces import ActionSpace, Discrete
from koffline.data.table.mapping import TableMapping
from koffline.data.table.problems import Problems, column_fault
from koffline.data.table.rows import TableRows
from koffline.data.transitions import Metadata
from koffline.errors import DataError

_MOST_CATEGORIES = 10_000
_LONGEST_NAME = 1000
_NARROW = (pl.Boolean, pl.Float16, pl.Float32, pl.Int8, pl.UInt8, pl.Int16, pl.UInt16)
_TRUE, _FALSE = ("true", "t", "yes", "y", "1", "1.0"), ("false", "f", "no", "n", "0", "0.0")


@dataclass(eq=False)
class Table:
    """Rows, the columns' roles, what a first pass finds, and the actions with what was assumed about them.

    By column: values that are ``missing``, numbers in a list (``widths``), ``means``. ``flagged``: whether a
    row is terminal or truncated. ``seen``: the least and the greatest of whole-number actions. ``runs``: rows
    of one id that lie together. ``encoded``: columns of categories by the features that they became.
    """

    source: str
    rows: TableRows
    roles: TableMapping
    asked: TableMapping  # the mapping before it was applied
    observation_dtype: np.dtype
    observation_shape: tuple[int, ...] | None
    problems: Problems
    is_own: bool  # the mapping came from koffline's own column names
    encoded: Mapping[str, str] = field(default_factory=dict)
    action_space: ActionSpace = field(default_factory=lambda: Discrete(1))
    metadata: Metadata = field(default_factory=Metadata)
    n_rows: int = 0
    missing: Counter[str] = field(default_factory=Counter)
    infinite: Counter[str] = field(default_factory=Counter)
    widths: dict[str, int] = field(default_factory=dict)
    means: dict[str, float] = field(default_factory=dict)  # sums until the pass ends
    flagged: bool = False
    is_open: bool = False  # whether the mapping leaves open which rows form an episode
    categories: tuple[Any, ...] = ()
    seen: np.ndarray | None = None
    runs: pl.DataFrame | None = None

    @property
    def knows_order(self) -> bool:
        """Whether the requested columns for episode and time exist, so that rows can be put in order."""
        kept = (self.roles.episode, self.roles.time) == (self.asked.episode, self.asked.time)
        return kept and not self.is_open


def number_dtype(kinds: Sequence[Any], bytes_stay: bool = False) -> np.dtype:
    """Common dtype of columns of these types; it depends on the types alone, never on values.

    uint8 may stay where all are; float16, float32 and integers of at most 16 bits are float32; else float64.
    """
    bases = [getattr(kind, "inner", kind) for kind in kinds]
    if bytes_stay and all(base == pl.UInt8 for base in bases):
        return np.dtype(np.uint8)
    return np.dtype(np.float32 if all(base in _NARROW for base in bases) else np.float64)


def action_dtype(table: Table) -> np.dtype:
    """Dtype of the actions: int64 for a single column of integers, else a float type."""
    kinds = [table.rows.schema[name] for name in table.roles.action]
    return np.dtype(np.int64) if len(kinds) == 1 and kinds[0].is_integer() else number_dtype(kinds)


def hashed(ids: pl.Series) -> pl.Series:
    """Hash ids to 64 bits. A collision is harmless: both ids go to the same temporary file."""
    return ids.hash(0).alias("id")


def look_through(table: Table, is_category: bool, census: bool) -> set[Any]:
    """Pass over all rows, fill in the table's statistics, and return the distinct values of a category."""
    roles, problems = table.roles, table.problems
    values: set[Any] = set()
    runs = []
    flags = {name for name in (roles.terminal, roles.truncated) if name}
    formulas = () if table.rows.computed is None else table.rows.computed.formulas
    unmet = {each.text for each in formulas if each.texts} & flags
    for frame in table.rows.frames():
        table.n_rows += frame.height
        if census and roles.episode is not None:
            runs.append(_joined(pl.DataFrame([hashed(frame[roles.episode])]).with_columns(rows=1)))
        for column in frame:
            _look_at(table, column)
        for name in tuple(flags):
            with problems.noted():
                if read_flags(frame, name, table.source).any():
                    table.flagged = True
                    unmet.discard(name)
                continue
            flags.remove(name)
        if len(roles.action) != 1:
            continue
        actions = frame[roles.action[0]].drop_nulls()
        if is_category:
            longest: Any = actions.str.len_bytes().max() if actions.dtype == pl.String else 0
            values |= set(actions.unique()) if (longest or 0) <= _LONGEST_NAME else set()
            if len(values) > _MOST_CATEGORIES or (longest or 0) > _LONGEST_NAME:
                most = f"{_MOST_CATEGORIES} different actions, or a text of more than {_LONGEST_NAME} bytes"
                problems.add(f"column {actions.name} holds more than {most}; name another")
                is_category, values = False, set()
                roles = roles.without([actions.name])
        elif actions.dtype.is_integer() and len(actions):
            found = actions.to_numpy()
            ends = found if table.seen is None else np.append(table.seen, [found.min(), found.max()])
            table.seen = np.array([ends.min(), ends.max()])
    if not table.n_rows:
        raise DataError(f"{table.source} has no rows; give a table with at least one transition")
    for name in sorted(unmet & flags):
        problems.add(f"no row fulfils {name}; check how the column writes it, or leave the formula out")
    for name, total in table.means.items():
        table.means[name] = total / max(1, table.n_rows - table.missing[name])
    table.runs = _joined(pl.concat(runs)) if runs else None
    return values


def read_flags(frame: pl.DataFrame, name: str | None, source: str) -> pl.Series:
    """Yes/no, 0/1, or texts such as true and false, as booleans. Raises DataError for anything else."""
    if name is None:
        return pl.repeat(False, frame.height, eager=True)
    column = frame[name]
    if column.dtype == pl.Boolean:
        return column.fill_null(False)  # missing values are refused elsewhere
    if column.dtype == pl.String:
        lower = column.str.strip_chars().str.to_lowercase()
        yes, no = lower.is_in(_TRUE), lower.is_in(_FALSE)
    else:
        number = column.cast(pl.Float64)
        yes, no = number == 1, number == 0
    wrong = ~(yes | no) & column.is_not_null()
    if wrong.any():
        count = counted(int(wrong.sum()), "row", "is", "are")
        said = f"holds {column[int(wrong.arg_max() or 0)]!r} ({count} neither yes nor no)"
        compare = f", or compare: \"{name} == '…'\"" if column.dtype == pl.String else ""
        raise column_fault(source, name, f"{said}; give true and false, or 1 and 0{compare}")
    return yes.fill_null(False)


def _look_at(table: Table, column: pl.Series) -> None:
    """Count the missing and infinite numbers of a column; lists of different lengths are a problem."""
    name = column.name
    if table.roles.impute.get(name) == "mean":
        total = float(column.cast(pl.Float64).fill_nan(None).sum())
        table.means[name] = table.means.get(name, 0.0) + total
    missing = column.null_count()
    if column.dtype.is_nested():
        column = column.drop_nulls()
        lengths = column.list.len() if column.dtype == pl.List else column.arr.len()
        for length in lengths.unique(maintain_order=True):
            if table.widths.setdefault(name, length) != length:
                said = f"holds lists of {table.widths[name]} and {length} numbers"
                table.problems.add(f"column {name} {said}; give lists of one length")
        column = column.explode(empty_as_null=False)
        missing += column.null_count()
    if column.dtype.is_float():
        missing += int(column.is_nan().sum())
        table.infinite[name] += int(column.is_infinite().sum())
    table.missing[name] += missing


def _joined(runs: pl.DataFrame) -> pl.DataFrame:
    """Merge neighbouring runs of the same id and sum their rows."""
    by_run = runs.group_by(pl.col("id").rle_id().alias("run"), maintain_order=True)
    return by_run.agg(pl.col("id").first(), pl.col("rows").sum()).drop("run")
