"""A table, its mapping applied, looked through once: types, what is missing, actions and episodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from koffline.data.columns import counted
from koffline.data.raw import merge_different
from koffline.data.table.roles import Roles
from koffline.data.table.rows import TableRows
from koffline.errors import DataError

_MOST_CATEGORIES = 10_000
_LONGEST_NAME = 1000
_EXACT = 2**53
_NARROW = (pl.Boolean, pl.Float16, pl.Float32, pl.Int8, pl.UInt8, pl.Int16, pl.UInt16)


def is_list(kind: Any) -> bool:
    """Whether a value is a list of others."""
    return isinstance(kind, (pl.List, pl.Array))


def is_number(kind: Any) -> bool:
    """Whether a column counts as numbers: integers, floats, decimals and yes/no."""
    return bool(kind.is_numeric() or kind == pl.Boolean)


def number_dtype(kinds: list[Any]) -> np.dtype:
    """The dtype in which columns of these types stand side by side; by type alone, never by value.

    uint8 stays where all are; float16, float32 and integers of at most 16 bits are float32; else float64.
    """
    bases = [kind.inner if is_list(kind) else kind for kind in kinds]
    if all(base == pl.UInt8 for base in bases):
        return np.dtype(np.uint8)
    return np.dtype(np.float32 if all(base in _NARROW for base in bases) else np.float64)


def check_types(types: Mapping[str, Any], roles: Roles, categories: frozenset[str], source: str) -> bool:
    """Whether the action is a category. Raises DataError naming the first column of the wrong type."""

    def check_numbers(name: str, what: str, lists: bool = False) -> None:
        kind = types[name]
        if not is_number(kind.inner if lists and is_list(kind) else kind):
            remedy = "name other columns, or export it as numbers"
            raise DataError(f"{source}: column {name} is {kind}, needed are numbers ({what}); {remedy}")

    for name in (*roles.observations, *roles.next_observations):
        check_numbers(name, "observations", lists=True)
    for name in filter(None, (roles.reward, roles.behavior, roles.weight)):
        check_numbers(name, "one number per row")
    for name in filter(None, (roles.terminal, roles.truncated)):
        if not (is_number(types[name]) or types[name] == pl.String):
            raise DataError(f"{source}: column {name} is {types[name]}; give true and false, or 1 and 0")
    episode, time = types.get(roles.episode or ""), types.get(roles.time or "")
    if episode is not None and (episode.is_nested() or episode == pl.Unknown):
        raise DataError(f"{source}: column {roles.episode} is {episode}; give one id per row")
    if time is not None and not (time.is_numeric() or time.is_temporal() or time == pl.String):
        raise DataError(
            f"{source}: column {roles.time} is {time}, which gives no order in time; name another"
        )
    for columns in (roles.observations, roles.next_observations, roles.action):
        lists = [name for name in columns if is_list(types[name])]
        if lists and len(columns) > 1:
            raise DataError(
                f"{source}: column {lists[0]} is {types[lists[0]]} beside {len(columns) - 1} other columns; "
                "name one list column, or columns of single numbers"
            )
        if lists and roles.impute.get(lists[0]) in ("mean", "forward"):
            raise DataError(
                f"{source}: column {lists[0]} holds lists, where only a constant can replace numbers; "
                "impute zero or another number"
            )
    for name in roles.action:
        category = types[name] in (pl.String, pl.Boolean) or name in categories
        if category and len(roles.action) > 1:
            raise DataError(
                f"{source}: action column {name} holds categories ({types[name]}) and there are "
                f"{len(roles.action)} action columns; give one column of categories, or numbers"
            )
        if category:
            return True
        check_numbers(name, "actions", lists=True)
    return False


@dataclass
class TableSurvey:
    """What one pass found. ``widths`` are the lengths of list columns, ``means`` of columns to impute so.

    ``runs`` are the runs of rows of one episode, by a hash of its id, where they were asked for.
    """

    rows: int = 0
    missing: dict[str, int] = field(default_factory=dict)
    infinite: dict[str, int] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)
    means: dict[str, float] = field(default_factory=dict)
    categories: set[Any] = field(default_factory=set)
    action_range: tuple[int, int] | None = None
    actions_seen: np.ndarray | None = None  # the different whole numbers, as far as they were collected
    actions_whole: bool = True
    runs: pl.DataFrame | None = None


def survey_rows(rows: TableRows, roles: Roles, source: str, categorical: bool, census: bool) -> TableSurvey:
    """Look through all rows. Raises DataError for missing values, with the count per column."""
    found = TableSurvey()
    sums = {name: 0.0 for name, how in roles.impute.items() if how == "mean"}
    finite = {*roles.numbers, *roles.action}
    exact = {*roles.numbers, *(roles.action if len(roles.action) > 1 else ())}
    runs = []
    for frame in rows.frames():
        found.rows += frame.height
        for column in frame:
            _look_at(column, found, source, column.name in finite, column.name in exact)
        for name in sums:
            sums[name] += float(frame[name].cast(pl.Float64).fill_nan(None).sum())
        if len(roles.action) == 1:
            _look_at_actions(frame[roles.action[0]], found, categorical, source)
        if census and roles.episode is not None:
            ids = frame.select(id=hashed(roles.episode))
            runs.append(ids.group_by(pl.col("id").rle_id().alias("run"), maintain_order=True).agg(
                pl.col("id").first(), rows=pl.len()).drop("run"))  # fmt: skip
    if not found.rows:
        raise DataError(f"{source} has no rows; give a table with at least one transition")
    _check_counts(found, roles, source)
    for name, total in sums.items():
        there = found.rows - found.missing[name]
        if not there:
            raise DataError(f"{source}: column {name} has no value to take the mean of; leave the column out")
        found.means[name] = total / there
    found.runs = _joined(pl.concat(runs)) if runs else None
    return found


def hashed(name: str) -> pl.Expr:
    """Eight bytes for an id. Two ids with one hash only share a place among temporary files."""
    return pl.col(name).hash(0)


def _joined(runs: pl.DataFrame) -> pl.DataFrame:
    """Runs that two frames share as one."""
    number = pl.col("id").rle_id().alias("run")
    return (
        runs.group_by(number, maintain_order=True).agg(pl.col("id").first(), pl.col("rows").sum()).drop("run")
    )


def _look_at(column: pl.Series, found: TableSurvey, source: str, finite: bool, exact: bool) -> None:
    """Missing and infinite numbers; lists of one length; whole numbers that a float can hold."""
    name, missing = column.name, column.null_count()
    if is_list(column.dtype):
        column = column.drop_nulls()
        lengths = column.list.len() if column.dtype == pl.List else column.arr.len()
        for length in lengths.unique(maintain_order=True):
            if found.widths.setdefault(name, length) != length:
                raise DataError(
                    f"{source}: lists in column {name} have {found.widths[name]} and {length} numbers; "
                    "give lists of one length"
                )
        column = column.explode(empty_as_null=False)
        missing += column.null_count()
    if column.dtype.is_float():
        missing += int(column.is_nan().sum())
        if finite:
            found.infinite[name] = found.infinite.get(name, 0) + int(column.is_infinite().sum())
    found.missing[name] = found.missing.get(name, 0) + missing
    if exact and column.dtype in (pl.Int64, pl.UInt64):
        extremes: Any = column.min() or 0, column.max() or 0
        worst = max(extremes[1], -extremes[0])
        if worst > _EXACT:
            raise DataError(
                f"{source}: column {name} holds whole numbers up to {worst}, which no float holds exactly; "
                "leave out identifiers, or scale the column"
            )


def _look_at_actions(column: pl.Series, found: TableSurvey, categorical: bool, source: str) -> None:
    column = column.drop_nulls()
    if categorical:
        longest: Any = column.str.len_bytes().max() if column.dtype == pl.String else 0
        if (longest or 0) > _LONGEST_NAME:
            raise DataError(
                f"{source}: column {column.name} holds a text of {longest} bytes as an action; name another "
                "column"
            )
        found.categories |= set(column.unique())
        if len(found.categories) > _MOST_CATEGORIES:
            raise DataError(
                f"{source}: column {column.name} holds more than {_MOST_CATEGORIES} different actions; name "
                "another column"
            )
    elif column.dtype.is_integer() and len(column):
        seen = column.unique().to_numpy()
        low, high = found.action_range or (seen[0], seen[0])
        found.action_range = min(int(low), int(seen.min())), max(int(high), int(seen.max()))
        found.actions_seen = merge_different(found.actions_seen, seen)
    elif column.dtype.is_float() and found.actions_whole:
        found.actions_whole = bool(((column >= 0) & (column == column.floor()) & column.is_finite()).all())


def _check_counts(found: TableSurvey, roles: Roles, source: str) -> None:
    def listed(columns: Mapping[str, int]) -> str:
        return (
            ", ".join(f"{n}: {count}" for n, count in columns.items()) + f", of {counted(found.rows, 'row')}"
        )

    refused = {name: n for name, n in found.missing.items() if n and name not in roles.impute}
    if refused:
        can = [name for name in refused if name in {*roles.observations, *roles.next_observations}]
        remedy = "drop those rows"
        if can:
            remedy += f", or replace values on request, as in --impute {can[0]}=mean"
        raise DataError(f"{source}: values are missing ({listed(refused)}); {remedy}")
    wrong = {name: count for name, count in found.infinite.items() if count}
    if wrong:
        raise DataError(
            f"{source}: numbers are infinite ({listed(wrong)}); drop or mend those rows, or leave the column "
            "out"
        )
