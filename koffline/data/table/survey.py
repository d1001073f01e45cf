"""A table, its mapping applied, checked and looked through once: all that is needed to make rows of it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import polars as pl

from koffline.data.columns import counted
from koffline.data.raw import read_description, settle_space
from koffline.data.spaces import ActionSpace, Discrete, SpaceRequest
from koffline.data.table import mapping as mappings
from koffline.data.table.arrow_files import SHAPE_KEY
from koffline.data.table.files import CSV, faults, find_tables
from koffline.data.table.mapping import column_fault
from koffline.data.table.rows import TableRows, column_types, open_rows, stored_columns
from koffline.data.transitions import Metadata
from koffline.errors import DataError

_MOST_CATEGORIES = 10_000
_LONGEST_NAME = 1000
_NARROW = (pl.Boolean, pl.Float16, pl.Float32, pl.Int8, pl.UInt8, pl.Int16, pl.UInt16)


@dataclass(eq=False)
class Table:
    """Rows, the columns' roles, what a first pass finds, and the actions with what was assumed about them.

    By column: values that are ``missing``, numbers in a list (``widths``), ``means``. ``seen``: the
    least and the greatest of whole-number actions. ``runs``: rows of one id that lie together.
    """

    source: str
    rows: TableRows
    roles: mappings.TableMapping
    observation_dtype: np.dtype
    observation_shape: tuple[int, ...] | None
    action_space: ActionSpace = field(default_factory=lambda: Discrete(1))
    metadata: Metadata = field(default_factory=Metadata)
    n_rows: int = 0
    missing: Counter[str] = field(default_factory=Counter)
    infinite: Counter[str] = field(default_factory=Counter)
    widths: dict[str, int] = field(default_factory=dict)
    means: dict[str, float] = field(default_factory=dict)  # sums, until all rows were seen
    categories: tuple[Any, ...] = ()
    seen: np.ndarray | None = None
    runs: pl.DataFrame | None = None


def prepare_table(
    source: str | os.PathLike[str],
    mapping: mappings.MappingRequest | None,
    action_space: SpaceRequest | None,
    *,
    in_memory: bool,
) -> Table:
    """Find the files, apply the mapping, look through the rows once. Raises DataError in one line.

    Without ``in_memory`` the rows are read from the files in every pass, and episodes are counted.
    """
    name = os.fspath(source)
    kind, files = find_tables(name, is_table=mapping is not None)
    stored, dictionaries, beside = stored_columns(files[0], kind)
    chosen = mappings.own_mapping(stored) if mapping is None else mappings.as_mapping(mapping)
    if chosen is None:
        raise mappings.unmapped(list(stored), name, kind)
    described = None if mapping is not None else read_description(beside.get(b"koffline"))
    sides = beside.get(SHAPE_KEY.encode(), b"").decode("ascii", "replace").split(",") if described else []
    shape = tuple(int(side) for side in sides if side.isdecimal() and len(side) < 10)
    roles = mappings.resolved(chosen, list(stored), name)
    types = column_types(stored, kind, roles)
    _check_types(types, roles, dictionaries, name)
    # Columns of text in CSV may be anything: what they are is found here. Ids given with a mapping stay as
    # they are. Times are such in files with types too: "10" comes after "9".
    meant = [*roles.action, roles.episode if mapping is None else None] if kind == CSV else []
    untyped = [each for each in types if each in (*meant, roles.time) and types[each] == pl.String]
    observed = [types[column] for column in (*roles.observations, *roles.next_observations)]
    dtype = number_dtype(observed, bytes_stay=not roles.impute)  # a mean is no whole number
    with faults(name, kind):
        rows = open_rows(TableRows(kind, files, types, dtype.itemsize), in_memory)
        table = Table(name, rows.with_texts(untyped, roles.time, name), roles, dtype, shape or None)
        is_category = bool(chosen.action_names) or _is_category(table.rows.schema, roles, dictionaries, name)
        values = _look_through(table, is_category, census=not in_memory)
    if is_category:
        table.categories = _in_order(values, table)
    before = described.metadata if described else Metadata(gamma=chosen.gamma)
    declared = described.action_space if described else None
    some = table.seen  # actions that are to the space what all are
    if table.categories:
        declared, some = Discrete(len(table.categories)), np.asarray([0, len(table.categories) - 1])
        before = replace(before, extra={**before.extra, "action_names": list(table.categories)})
    elif some is None:
        width = table.widths.get(roles.action[0], len(roles.action))
        some = np.zeros((1, width), action_dtype(table))
    table.action_space, settled = settle_space(some, action_space, declared, name)
    said = [sentence for is_so, sentence in _open_questions(table, mapping is not None) if is_so]
    notes = (*before.notes, *settled, *said)
    table.metadata = replace(before, source=name, notes=notes)
    return table


def number_dtype(kinds: Sequence[Any], bytes_stay: bool = False) -> np.dtype:
    """The dtype in which columns of these types stand side by side; by type alone, never by value.

    uint8 may stay where all are; float16, float32 and integers of at most 16 bits are float32; else float64.
    """
    bases = [getattr(kind, "inner", kind) for kind in kinds]
    if bytes_stay and all(base == pl.UInt8 for base in bases):
        return np.dtype(np.uint8)
    return np.dtype(np.float32 if all(base in _NARROW for base in bases) else np.float64)


def action_dtype(table: Table) -> np.dtype:
    """Whole numbers stay where one column has them."""
    kinds = [table.rows.schema[name] for name in table.roles.action]
    return np.dtype(np.int64) if len(kinds) == 1 and kinds[0].is_integer() else number_dtype(kinds)


def hashed(name: str) -> pl.Expr:
    """Eight bytes for an id. Two ids with one hash only share a place among temporary files."""
    return pl.col(name).hash(0).alias("id")


def _is_number(kind: Any) -> bool:
    return bool(kind.is_numeric() or kind == pl.Boolean)


def _check_types(
    types: Mapping[str, Any], roles: mappings.TableMapping, dictionaries: frozenset[str], source: str
) -> None:
    """Raise DataError naming the first column of the wrong type, or a list that does not stand alone."""
    states = (*roles.observations, *roles.next_observations)
    numbers = "needed are numbers; name other columns, or export it as numbers"
    rules: tuple[tuple[Sequence[str | None], Any, str], ...] = (
        (states, lambda kind: _is_number(getattr(kind, "inner", kind)), numbers),
        (roles.action, lambda kind: kind == pl.String or _is_number(getattr(kind, "inner", kind)), numbers),
        ((roles.reward, roles.behavior, roles.weight), _is_number, numbers),
        ((roles.terminal, roles.truncated), lambda kind: kind == pl.String or _is_number(kind),
         "give true and false, or 1 and 0"),
        ((roles.episode,), lambda kind: not kind.is_nested() and kind != pl.Unknown, "give one id per row"),
        ((roles.time,), lambda kind: kind.is_numeric() or kind.is_temporal() or kind == pl.String,
         "which gives no order in time; name another"),
    )  # fmt: skip
    for names, fits, remedy in rules:
        for name in filter(None, names):
            if not fits(types[name]):
                raise column_fault(source, name, f"is {types[name]}, {remedy}")
    for names in (roles.observations, roles.next_observations, roles.action):
        lists = [name for name in names if types[name].is_nested()]
        if lists and len(names) > 1:
            said = f"is {types[lists[0]]}, beside {len(names) - 1} other columns"
            raise column_fault(source, lists[0], f"{said}; name one list, or columns of single numbers")
        if roles.impute.keys() & lists:
            raise column_fault(source, lists[0], "holds lists, which cannot be imputed; drop those rows")


def _is_category(
    types: Mapping[str, Any], roles: mappings.TableMapping, dictionaries: frozenset[str], source: str
) -> bool:
    """Whether the action is one: texts, yes and no, or a dictionary. Raises DataError for one of several."""
    named = [name for name in roles.action if types[name] in (pl.String, pl.Boolean) or name in dictionaries]
    if named and len(roles.action) > 1:
        said = f"holds a category, beside {len(roles.action) - 1} other columns of the action"
        raise column_fault(source, named[0], f"{said}; name one column, or columns of numbers")
    return bool(named)


def _look_through(table: Table, is_category: bool, census: bool) -> set[Any]:
    """Look at all rows; the different values of a category. Raises DataError for missing values."""
    roles, source = table.roles, table.source
    values: set[Any] = set()
    runs = []
    for frame in table.rows.frames():
        table.n_rows += frame.height
        if census and roles.episode is not None:
            runs.append(_joined(frame.select(hashed(roles.episode), rows=1)))
        for column in frame:
            _look_at(table, column)
        actions = frame[roles.action[0]].drop_nulls()
        if len(roles.action) > 1:
            continue
        if is_category:
            values |= set(actions.unique())
            longest: Any = actions.str.len_bytes().max() if actions.dtype == pl.String else 0
            if len(values) > _MOST_CATEGORIES or (longest or 0) > _LONGEST_NAME:
                most = f"{_MOST_CATEGORIES} different actions, or a text of more than {_LONGEST_NAME} bytes"
                raise column_fault(source, actions.name, f"holds more than {most}; name another")
        elif actions.dtype.is_integer() and len(actions):
            found = actions.to_numpy()
            ends = found if table.seen is None else np.append(table.seen, [found.min(), found.max()])
            table.seen = np.array([ends.min(), ends.max()])
    if not table.n_rows:
        raise DataError(f"{source} has no rows; give a table with at least one transition")
    _check_counts(table)
    for name, total in table.means.items():
        there = table.n_rows - table.missing[name]
        if not there:
            raise column_fault(source, name, "has no value to take the mean of; leave it out")
        table.means[name] = total / there
    table.runs = _joined(pl.concat(runs)) if runs else None
    return values


def _look_at(table: Table, column: pl.Series) -> None:
    """Missing and infinite numbers; lists of one length."""
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
                raise column_fault(table.source, name, f"{said}; give lists of one length")
        column = column.explode(empty_as_null=False)
        missing += column.null_count()
    if column.dtype.is_float():
        missing += int(column.is_nan().sum())
        table.infinite[name] += int(column.is_infinite().sum())
    table.missing[name] += missing


def _joined(runs: pl.DataFrame) -> pl.DataFrame:
    """Neighbours of one id as one, with their rows."""
    by_run = runs.group_by(pl.col("id").rle_id().alias("run"), maintain_order=True)
    return by_run.agg(pl.col("id").first(), pl.col("rows").sum()).drop("run")


def _check_counts(table: Table) -> None:
    roles = table.roles
    missing = {name: n for name, n in table.missing.items() if n and name not in roles.impute}
    infinite = {name: n for name, n in table.infinite.items() if n and name in roles.measured}
    can = next((name for name in missing if name in (*roles.observations, *roles.next_observations)), None)
    impute = f", or replace values on request, as in --impute {can}=mean" if can else ""
    for what, found, remedy in (
        ("values are missing", missing, f"drop those rows{impute}"),
        ("numbers are infinite", infinite, "drop or mend those rows, or leave the column out"),
    ):
        if found:
            shown = ", ".join(f"{name}: {count}" for name, count in found.items())
            raise DataError(f"{table.source}: {what} ({shown}, of {counted(table.n_rows, 'row')}); {remedy}")


def _in_order(values: set[Any], table: Table) -> tuple[Any, ...]:
    """The values of a category in the order of their numbers."""
    names, column, kind = table.roles.action_names, table.roles.action[0], type(next(iter(values)))
    if not issubclass(kind, (str, int)):
        said = f"is {table.rows.schema[column]}; give actions as texts or numbers"
        raise column_fault(table.source, column, said)
    if not names:
        return tuple(sorted(values))
    if kind is not str:  # names from a command line are texts: as the column's values, or yes and no
        spelled: dict[str, Any] = {"true": True, "false": False}
        if kind is int:
            spelled = {name: int(name) for name in map(str, names) if name.lstrip("-").isdecimal()}
        names = tuple(spelled.get(str(name).lower(), name) for name in names)
    unknown = sorted(values - set(names)) or [next(iter(values))]
    if unknown[0] not in names or {type(name) for name in names} != {kind}:
        said = f"holds {unknown[0]!r}, action_names are {names!r}"
        remedy = "list all values as the column has them (in YAML put yes and no in quotes)"
        raise column_fault(table.source, column, f"{said}; {remedy}")
    return names


def _open_questions(table: Table, has_mapping: bool) -> Iterator[tuple[bool, str]]:
    """What the table or its mapping leaves open, whether it does, and how it was taken."""
    roles, texts, time = table.roles, table.rows.texts, table.roles.time or ""
    kind = table.rows.schema.get(time)
    is_naive = kind == pl.Time or (isinstance(kind, pl.Datetime) and kind.time_zone is None)
    is_naive = is_naive or (time in texts and texts[time].is_naive)
    where = "where a local clock was set back, rows of that hour may be out of order"
    yield is_naive, f"times in {time} have no UTC offset and were read as UTC; {where}"
    alone, named = roles.stands_alone, "column is named:"
    record = "the rows were taken as one record, cut where flags end it"
    if has_mapping:
        yield alone, "no episode and no time column is named: every row stands alone"
        yield roles.episode is None and not alone, f"no episode {named} {record}"
        yield roles.time is None and not alone, f"no time {named} rows were taken in the order of the table"
        yield roles.terminal is None, f"no terminal {named} no episode was taken to have ended by itself"
