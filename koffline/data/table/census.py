"""One pass over all rows of a table: missing values, flags, and the actions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from koffline.data.columns import counted
from koffline.data.features import Encoding
from koffline.data.spaces import ActionSpace, Discrete
from koffline.data.table.computed import Formula
from koffline.data.table.counts import TableCounts
from koffline.data.table.mapping import HOW_EPISODES_END, WHICH_ROWS, TableMapping
from koffline.data.table.problems import Problems, column_fault
from koffline.data.table.rows import TableRows, TextKind
from koffline.data.transitions import Metadata
from koffline.errors import DataError

_MOST_CATEGORIES = 10_000
_LONGEST_NAME = 1000
_NARROW = (pl.Boolean, pl.Float16, pl.Float32, pl.Int8, pl.UInt8, pl.Int16, pl.UInt16)
_TRUE, _FALSE = ("true", "t", "yes", "y", "1", "1.0"), ("false", "f", "no", "n", "0", "0.0")


@dataclass(eq=False)
class Table:
    """Rows, the columns' roles, what a first pass finds, and the actions with what was assumed about them.

    By column: values that are ``missing``, numbers in a list (``widths``), ``means``. ``flagged``: flags that
    a row has. ``seen``: the least and the greatest of whole-number actions. ``values`` of a category, and the
    ``categories`` in their order. ``runs``: rows of one id that lie together. ``origin``: columns of
    categories by the features that they became. ``counts``: what is done to the rows afterwards.
    """

    source: str
    rows: TableRows
    roles: TableMapping
    asked: TableMapping  # the mapping before it was applied
    observation_type: Any  # of a number
    observation_shape: tuple[int, ...] | None
    problems: Problems
    is_own: bool  # the mapping came from koffline's own column names
    formulas: tuple[Formula, ...]
    texts: Mapping[str, TextKind]
    encodings: Mapping[str, Encoding]
    origin: Mapping[str, str]
    action_space: ActionSpace = field(default_factory=lambda: Discrete(1))
    metadata: Metadata = field(default_factory=Metadata)
    counts: TableCounts = field(default_factory=TableCounts)
    n_rows: int = 0
    missing: Counter[str] = field(default_factory=Counter)
    widths: dict[str, int] = field(default_factory=dict)
    means: dict[str, float] = field(default_factory=dict)  # sums until the pass ends
    flagged: set[str] = field(default_factory=set)
    is_open: bool = False  # whether the mapping leaves open which rows form an episode
    values: set[Any] = field(default_factory=set)
    categories: tuple[Any, ...] = ()
    seen: np.ndarray | None = None
    runs: pl.DataFrame | None = None


def number_type(kinds: Iterable[Any], bytes_stay: bool = False) -> Any:
    """Common type of columns of these types as numbers; it depends on the types alone, never on values.

    uint8 may stay where all are; float16, float32 and integers of at most 16 bits are float32; else float64.
    """
    bases = [getattr(kind, "inner", kind) for kind in kinds]
    if bytes_stay and all(base == pl.UInt8 for base in bases):
        return pl.UInt8()
    return pl.Float32() if all(base in _NARROW for base in bases) else pl.Float64()


def hashed(ids: pl.Series) -> pl.Series:
    """Hash ids to 64 bits. A collision is harmless: both ids go to the same temporary file."""
    return ids.hash(0).alias("id")


def look_through(table: Table, is_category: bool, census: bool) -> None:
    """Pass over all rows and fill in the table's statistics. Raises DataError."""
    roles, runs = table.roles, []
    flags = [name for name in (roles.terminal, roles.truncated) if name]
    for frame in table.rows.frames():
        table.n_rows += frame.height
        if census and roles.episode is not None:
            runs.append(_joined(pl.DataFrame([hashed(frame[roles.episode])]).with_columns(rows=1)))
        for column in frame:
            _look_at(table, column)
        table.flagged |= {name for name in flags if read_flags(frame, name, table.source).any()}
        actions = frame[roles.action[0]].drop_nulls()
        if is_category:
            longest: Any = actions.str.len_bytes().max() if actions.dtype == pl.String else 0
            table.values |= set(actions.unique()) if (longest or 0) <= _LONGEST_NAME else set()
            if len(table.values) > _MOST_CATEGORIES or (longest or 0) > _LONGEST_NAME:
                most = f"{_MOST_CATEGORIES} different actions, or a text of more than {_LONGEST_NAME} bytes"
                raise column_fault(table.source, actions.name, f"holds more than {most}; name another")
        elif len(roles.action) == 1 and actions.dtype.is_integer() and len(actions):
            found = actions.to_numpy()
            ends = found if table.seen is None else np.append(table.seen, [found.min(), found.max()])
            table.seen = np.array([ends.min(), ends.max()])
    if not table.n_rows:
        raise DataError(f"{table.source} has no rows; give a table with at least one transition")
    for name, total in table.means.items():
        table.means[name] = total / max(1, table.n_rows - table.missing[name])
    table.runs = _joined(pl.concat(runs)) if runs else None


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
        compare = f", or compare: \"{name} == '…'\"" if column.dtype == pl.String else ""
        said = f"holds {column[int(wrong.arg_max() or 0)]!r}, neither yes nor no"
        raise column_fault(source, name, f"{said}; give true and false, or 1 and 0{compare}")
    return yes.fill_null(False)


def _look_at(table: Table, column: pl.Series) -> None:
    """Count the missing values of a column; lists of different lengths are a problem."""
    name, missing = column.name, column.null_count()
    if table.roles.impute.get(name) == "mean":
        total = float(column.cast(pl.Float64).fill_nan(None).sum())
        table.means[name] = table.means.get(name, 0.0) + total
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
    table.missing[name] += missing


def _joined(runs: pl.DataFrame) -> pl.DataFrame:
    """Merge neighbouring runs of the same id and sum their rows."""
    by_run = runs.group_by(pl.col("id").rle_id().alias("run"), maintain_order=True)
    return by_run.agg(pl.col("id").first(), pl.col("rows").sum()).drop("run")


def check_counts(table: Table) -> None:
    """Add problems: missing values, and questions that only the user can answer."""
    roles, problems = table.roles, table.problems
    spelled = {**table.origin, **{f.text: "reward" for f in table.formulas if f.text == roles.reward}}
    missing = {
        spelled.get(name, name): count
        for name, count in table.missing.items()
        if count and name not in roles.impute and (name != roles.by or name in roles.needed)
    }
    cut = "end episodes before such rows (COLUMN=cut), or mend them: a row dropped inside joins two steps"
    cut = "leave such rows out (COLUMN=cut), or mend them" if roles.stands_alone else cut
    if missing:
        shown = ", ".join(f"{name}: {count}" for name, count in missing.items())
        shown = f"values are missing ({shown}, of {counted(table.n_rows, 'row')})"
        problems.add(f"{shown}; replace them (--impute COLUMN=mean), {cut}")
    for name in table.means:
        if table.missing[name] == table.n_rows:
            problems.add(f"column {name} has no value to take the mean of; leave it out")
    if table.is_own:
        return
    if roles.episode is None and roles.one_step is None and not (roles.stands_alone or table.flagged):
        problems.add(WHICH_ROWS)
        table.is_open = True
    if roles.episode is not None and roles.terminal is None and roles.last_row is None:
        problems.add(HOW_EPISODES_END)
    for each in table.formulas if not problems.found else ():
        if each.texts and each.text in (roles.terminal, roles.truncated) and each.text not in table.flagged:
            said = "check how the column writes it, or leave the formula out"
            problems.add(f"no row fulfils {each.text}; {said}")
