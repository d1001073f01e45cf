"""A table, its mapping applied, checked and looked through once: all that is needed to make rows of it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
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
from koffline.data.table.rows import TableRows, column_types, number_dtype, open_rows, stored_columns
from koffline.data.transitions import Metadata
from koffline.errors import DataError

_MOST_CATEGORIES = 10_000
_LONGEST_NAME = 1000
_EXACT = 2**53


@dataclass(eq=False)
class Table:
    """Rows, the columns' roles, what a first pass finds, and the actions with what was assumed about them.

    By column: values that are ``missing``, numbers in a list (``widths``), ``means``. ``seen``: the
    least and the greatest of whole-number actions. ``runs``: rows of one id that lie together.
    """

    source: str
    kind: str
    rows: TableRows
    roles: mappings.TableMapping
    observation_dtype: np.dtype
    observation_shape: tuple[int, ...] | None
    impute: dict[Any, str | float]
    action_space: ActionSpace = field(default_factory=lambda: Discrete(1))
    metadata: Metadata = field(default_factory=Metadata)
    n_rows: int = 0
    missing: Counter[str] = field(default_factory=Counter)
    infinite: Counter[str] = field(default_factory=Counter)
    widths: dict[str, int] = field(default_factory=dict)
    means: dict[str, float] = field(default_factory=dict)  # sums, until all rows were seen
    categories: tuple[Any, ...] = ()
    seen: np.ndarray | None = None
    has_fractions: bool = False
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
    files = find_tables(name, is_table=mapping is not None)
    kind, (stored, dictionaries, beside) = files[0].kind, stored_columns(files[0])
    names = list({**stored, **files[0].constants})
    chosen = mappings.own_mapping(names) if mapping is None else mappings.as_mapping(mapping)
    if chosen is None:
        raise mappings.unmapped(names, name, kind)
    described = None if mapping is not None else read_description(beside.get(b"koffline"))
    sides = beside.get(SHAPE_KEY.encode(), b"").decode("ascii", "replace").split(",") if described else []
    shape = tuple(int(side) for side in sides if side.isdecimal() and len(side) < 10)
    roles = mappings.resolved(chosen, names, name)
    types = column_types(files, stored, roles)
    # Columns of text in a file without types may still be anything: what they are is found below. Ids given
    # with a mapping stay as they are. Times are such in files with types too: "10" comes after "9".
    without_types = names if kind == CSV else files[0].constants
    meant: set[str | None] = {*roles.action, roles.episode if mapping is None else ""}
    meant &= set(without_types)
    meant |= {roles.time} if types.get(roles.time or "") == pl.String else set()
    meant -= set(roles.numbers)
    untyped = [column for column in types if column in meant]
    _check_types({**types, **dict.fromkeys(untyped, pl.Float64())}, roles, dictionaries, name)
    observed = [types[column] for column in (*roles.observations, *roles.next_observations)]
    dtype = number_dtype(observed, bytes_stay=not roles.impute)  # a mean is no whole number
    with faults(name, kind):
        rows = open_rows(files, types, dtype.itemsize, in_memory).with_texts(untyped, roles.time, name)
        table = Table(name, kind, rows, roles, dtype, shape or None, dict(roles.impute))
        is_category = _check_types(rows.schema, roles, dictionaries, name) or bool(chosen.action_names)
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


def action_dtype(table: Table) -> np.dtype:
    """Whole numbers stay where one column has them."""
    kinds = [table.rows.schema[name] for name in table.roles.action]
    return np.dtype(np.int64) if len(kinds) == 1 and kinds[0].is_integer() else number_dtype(kinds)


def hashed(name: str) -> pl.Expr:
    """Eight bytes for an id. Two ids with one hash only share a place among temporary files."""
    return pl.col(name).hash(0).alias("id")


def _check_types(
    types: Mapping[str, Any], roles: mappings.TableMapping, dictionaries: frozenset[str], source: str
) -> bool:
    """Whether the action is a category. Raises DataError naming the first column of the wrong type."""
    impute: dict[Any, Any] = dict(roles.impute)
    wanted = "needed are numbers ({}); name other columns, or export it as numbers"

    def check(fits: bool, name: str, what: str) -> None:
        if not fits:
            raise mappings.column_fault(source, name, f"is {types[name]}, {what}")

    def is_number(kind: Any) -> bool:
        return bool(kind.is_numeric() or kind == pl.Boolean)

    texts = {n for n in roles.action if types[n] in (pl.String, pl.Boolean) or n in dictionaries}
    for role in ("observations", "next_observations", "action"):
        columns = getattr(roles, role)
        for name in columns:
            is_list = isinstance(types[name], (pl.List, pl.Array))
            base = types[name].inner if is_list else types[name]
            check(is_number(base) or (role == "action" and name in texts), name, wanted.format(role))
            alone = len(columns) == 1 or not (is_list or (role == "action" and name in texts))
            beside = f"beside {len(columns) - 1} other columns ({role})"
            check(alone, name, f"{beside}; name one list or category, or columns of single numbers")
            constant = not is_list or impute.get(name) not in ("mean", "forward")
            check(constant, name, "where only a constant can replace numbers; impute zero or another number")
    flags, single = (roles.terminal, roles.truncated), (roles.reward, roles.behavior, roles.weight)
    for name, kind in ((name, types[name]) for name in (*single, *flags, roles.episode, roles.time) if name):
        is_text = kind == pl.String
        check(is_number(kind) or name not in single, name, wanted.format("one per row"))
        check(is_number(kind) or is_text or name not in flags, name, "give true and false, or 1 and 0")
        is_id = not kind.is_nested() and kind != pl.Unknown
        check(is_id or name != roles.episode, name, "give one id per row")
        is_time = kind.is_numeric() or kind.is_temporal() or is_text
        check(is_time or name != roles.time, name, "which gives no order in time; name another")
    return bool(texts)


def _look_through(table: Table, is_category: bool, census: bool) -> set[Any]:
    """Look at all rows; the different values of a category. Raises DataError for missing values."""
    roles, source = table.roles, table.source
    exact = {*roles.numbers, *(roles.action if len(roles.action) > 1 else ())}
    values: set[Any] = set()
    runs = []
    for frame in table.rows.frames():
        table.n_rows += frame.height
        if census and roles.episode is not None:
            runs.append(_joined(frame.select(hashed(roles.episode), rows=1)))
        for column in frame:
            _look_at(table, column, column.name in exact)
        actions = frame[roles.action[0]].drop_nulls()
        if len(roles.action) > 1:
            continue
        if is_category:
            values |= set(actions.unique())
            longest: Any = actions.str.len_bytes().max() if actions.dtype == pl.String else 0
            if len(values) > _MOST_CATEGORIES or (longest or 0) > _LONGEST_NAME:
                most = f"{_MOST_CATEGORIES} different actions, or a text of more than {_LONGEST_NAME} bytes"
                raise mappings.column_fault(source, actions.name, f"holds more than {most}; name another")
        elif actions.dtype.is_float():
            is_choice = (actions >= 0) & (actions == actions.floor()) & actions.is_finite()
            table.has_fractions = table.has_fractions or not is_choice.all()
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
            raise mappings.column_fault(source, name, "has no value to take the mean of; leave it out")
        table.means[name] = total / there
    table.runs = _joined(pl.concat(runs)) if runs else None
    return values


def _look_at(table: Table, column: pl.Series, is_exact: bool) -> None:
    """Missing and infinite numbers; lists of one length; whole numbers that a float can hold."""
    name = column.name
    if table.impute.get(name) == "mean":
        total = float(column.cast(pl.Float64).fill_nan(None).sum())
        table.means[name] = table.means.get(name, 0.0) + total
    missing = column.null_count()
    if column.dtype.is_nested():
        column = column.drop_nulls()
        lengths = column.list.len() if column.dtype == pl.List else column.arr.len()
        for length in lengths.unique(maintain_order=True):
            if table.widths.setdefault(name, length) != length:
                said = f"holds lists of {table.widths[name]} and {length} numbers"
                raise mappings.column_fault(table.source, name, f"{said}; give lists of one length")
        column = column.explode(empty_as_null=False)
        missing += column.null_count()
    if column.dtype.is_float():
        missing += int(column.is_nan().sum())
        table.infinite[name] += int(column.is_infinite().sum())
    table.missing[name] += missing
    if is_exact and column.dtype in (pl.Int64, pl.UInt64):
        extremes: Any = column.max() or 0, -(column.min() or 0)  # type: ignore[operator]
        if max(extremes) > _EXACT:
            said = f"holds whole numbers up to {max(extremes)}, which no float holds exactly"
            raise mappings.column_fault(table.source, name, f"{said}; leave it out, or scale it")


def _joined(runs: pl.DataFrame) -> pl.DataFrame:
    """Neighbours of one id as one, with their rows."""
    by_run = runs.group_by(pl.col("id").rle_id().alias("run"), maintain_order=True)
    return by_run.agg(pl.col("id").first(), pl.col("rows").sum()).drop("run")


def _check_counts(table: Table) -> None:
    roles, observed = table.roles, {*table.roles.observations, *table.roles.next_observations}
    missing = {name: n for name, n in table.missing.items() if n and name not in table.impute}
    must_be_finite = {*roles.numbers, *roles.action}
    infinite = {name: n for name, n in table.infinite.items() if n and name in must_be_finite}
    can = next((name for name in missing if name in observed), None)
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
        raise mappings.column_fault(table.source, column, said)
    if not names:
        return tuple(sorted(values))
    # names from a command line are texts: as numbers, or as yes and no, where the column holds those
    spelled: dict[str, Any] = {"true": True, "false": False}
    if kind is int:
        spelled = {name: int(name) for name in map(str, names) if name.lstrip("-").isdecimal()}
    if kind is not str:
        names = tuple(spelled.get(str(name).lower(), name) for name in names)
    if {type(name) for name in names} != {kind}:
        said = f"holds {next(iter(values))!r}, action_names are {names!r}"
        remedy = "write the names as the column has them (in YAML put yes and no in quotes)"
        raise mappings.column_fault(table.source, column, f"{said}; {remedy}")
    unknown = sorted(values - set(names))
    if unknown:
        said = f"holds {unknown[0]!r}, which action_names lacks ({len(unknown)} in all); list all values"
        raise mappings.column_fault(table.source, column, said)
    return names


def _open_questions(table: Table, has_mapping: bool) -> Iterator[tuple[bool, str]]:
    """What the table or its mapping leaves open, whether it does, and how it was taken."""
    roles, types, texts, time = table.roles, table.rows.types, table.rows.texts, table.roles.time or ""
    decimals, kind = [name for name, kind in types.items() if kind.is_decimal()], types.get(time)
    yield bool(decimals), f"decimals were read as float64: {', '.join(decimals)}"
    is_naive = kind == pl.Time or (isinstance(kind, pl.Datetime) and kind.time_zone is None)
    is_naive = is_naive or (time in texts and texts[time].is_naive)
    where = "where a local clock was set back, rows of that hour may be out of order"
    yield is_naive, f"times in {time} have no UTC offset and were read as UTC; {where}"
    single = len(roles.action) == 1 and table.rows.schema[roles.action[0]].is_float()
    taken = "all actions are whole numbers stored as fractions and were taken as continuous"
    choices = table.has_fractions or isinstance(table.action_space, Discrete)
    yield single and not choices, f"{taken}; --discrete N declares choices"
    alone, named = roles.stands_alone, "column is named:"
    record = "the rows were taken as one record, cut where flags end it"
    if has_mapping:
        yield alone, "no episode and no time column is named: every row stands alone"
        yield roles.episode is None and not alone, f"no episode {named} {record}"
        yield roles.time is None and not alone, f"no time {named} rows were taken in the order of the table"
        yield roles.terminal is None, f"no terminal {named} no episode was taken to have ended by itself"
