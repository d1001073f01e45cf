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
from koffline.data.raw import merge_different, read_description, settle_actions
from koffline.data.spaces import ActionSpace, Discrete, SpaceRequest
from koffline.data.table import mapping as mappings
from koffline.data.table.arrow_files import SHAPE_KEY
from koffline.data.table.files import CSV, faults, find_tables
from koffline.data.table.rows import TableRows, column_types, open_rows, stored_columns
from koffline.data.transitions import Metadata
from koffline.errors import DataError

_MOST_CATEGORIES = 10_000
_LONGEST_NAME = 1000
_EXACT = 2**53
_NARROW = (pl.Boolean, pl.Float16, pl.Float32, pl.Int8, pl.UInt8, pl.Int16, pl.UInt16)


@dataclass(eq=False)
class Table:
    """Rows, the columns' roles, what a first pass finds, and the actions with what was assumed about them.

    By column: values that are ``missing``, numbers in a list (``widths``), ``means``. ``seen``: different
    whole-number actions, the extremes among as many as were collected. ``runs``: rows of one id that lie
    together.
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
    roles = mappings.resolved(chosen, names, name)
    types = column_types(files, stored, roles)
    # Columns of text in a file without types may still be anything: what they are is found below. Ids given
    # with a mapping stay as they are. Times are such in files with types too: "10" comes after "9".
    without_types = names if kind == CSV else files[0].constants
    meant = {*roles.action, roles.episode if mapping is None else ""}.intersection(without_types)
    meant |= {roles.time} if types.get(roles.time or "") == pl.String else set()
    untyped = [column for column in types if column in meant.difference(roles.numbers)]
    _check_types({**types, **dict.fromkeys(untyped, pl.Float64())}, roles, dictionaries, name)
    observed = [types[column] for column in (*roles.observations, *roles.next_observations)]
    dtype = number_dtype(observed, bytes_stay=not roles.impute)  # a mean is no whole number
    with faults(name, kind):
        rows = open_rows(files, types, dtype.itemsize, in_memory).with_texts(untyped, roles.time, name)
        shape = _shape(beside.get(SHAPE_KEY.encode()) if described else None)
        table = Table(name, kind, rows, roles, dtype, shape, dict(roles.impute))
        is_category = _check_types(rows.schema, roles, dictionaries, name) or bool(chosen.action_names)
        values = _look_through(table, is_category, census=not in_memory)
    if is_category:
        table.categories = _in_order(values, table)
    before = described.metadata if described else Metadata(gamma=chosen.gamma)
    declared = described.action_space if described else None
    if table.categories:
        declared, extra = Discrete(len(table.categories)), {"action_names": list(table.categories)}
        before = replace(before, extra={**before.extra, **extra})
    settled = settle_actions(_few_actions(table), action_space, declared, name)
    table.action_space = settled.space
    open_questions = [*_assumed(table), *(_left_open(roles) if mapping is not None else ())]
    notes = (*before.notes, *settled.notes, *(said for is_so, said in open_questions if is_so))
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


def _check_types(
    types: Mapping[str, Any], roles: mappings.TableMapping, dictionaries: frozenset[str], source: str
) -> bool:
    """Whether the action is a category. Raises DataError naming the first column of the wrong type."""
    impute: dict[Any, Any] = dict(roles.impute)
    wanted = "needed are numbers ({}); name other columns, or export it as numbers"

    def check(fits: bool, name: str, what: str) -> None:
        if not fits:
            raise DataError(f"{source}: column {name} is {types[name]}, {what}")

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
    for name in filter(None, (roles.reward, roles.behavior, roles.weight)):
        check(is_number(types[name]), name, wanted.format("one per row"))
    for name in filter(None, (roles.terminal, roles.truncated)):
        check(is_number(types[name]) or types[name] == pl.String, name, "give true and false, or 1 and 0")
    for name in filter(None, (roles.episode,)):
        check(not types[name].is_nested() and types[name] != pl.Unknown, name, "give one id per row")
    for name in filter(None, (roles.time,)):
        ordered = types[name].is_numeric() or types[name].is_temporal() or types[name] == pl.String
        check(ordered, name, "which gives no order in time; name another")
    return bool(texts)


def _look_through(table: Table, is_category: bool, census: bool) -> set[Any]:
    """Look at all rows; the different values of a category. Raises DataError for missing values."""
    roles, source = table.roles, table.source
    exact = {*roles.numbers, *(roles.action if len(roles.action) > 1 else ())}
    facts = [
        pl.struct(_facts(name, kind, name in exact, table.impute.get(name) == "mean")).alias(name)
        for name, kind in table.rows.schema.items()
    ]
    values: set[Any] = set()
    runs = []
    for frame in table.rows.frames():
        table.n_rows += frame.height
        for name, found in frame.select(facts).row(0, named=True).items():
            table.missing[name] += found["missing"]
            table.infinite[name] += found.get("infinite") or 0
            if "sum" in found:
                table.means[name] = table.means.get(name, 0.0) + found["sum"]
            widths = {found.get("shortest"), found.get("longest"), table.widths.get(name)} - {None}
            if len(widths) > 1:
                shown = " and ".join(map(str, sorted(widths)))
                what = f"lists in column {name} have {shown} numbers"
                raise DataError(f"{source}: {what}; give lists of one length")
            table.widths |= zip([name], widths, strict=False)
            if (found.get("largest") or 0) > _EXACT:
                raise DataError(
                    f"{source}: column {name} holds whole numbers up to {found['largest']}, which no float "
                    "holds exactly; leave out identifiers, or scale the column"
                )
        actions = frame[roles.action[0]].drop_nulls()
        if is_category:
            values |= set(actions.unique())
            longest: Any = actions.str.len_bytes().max() if actions.dtype == pl.String else 0
            if len(values) > _MOST_CATEGORIES or (longest or 0) > _LONGEST_NAME:
                most = f"{_MOST_CATEGORIES} different actions, or a text of more than {_LONGEST_NAME} bytes"
                raise DataError(f"{source}: column {actions.name} holds more than {most}; name another")
        elif actions.dtype.is_float():
            is_choice = (actions >= 0) & (actions == actions.floor()) & actions.is_finite()
            table.has_fractions = table.has_fractions or not is_choice.all()
        elif actions.dtype.is_integer() and len(actions):
            different = actions.unique().to_numpy()
            extremes = [different.min(), different.max()]
            table.seen = np.union1d(merge_different(table.seen, different), extremes)
        if census and roles.episode is not None:
            runs.append(_joined(frame.select(hashed(roles.episode), rows=1)))
    if not table.n_rows:
        raise DataError(f"{source} has no rows; give a table with at least one transition")
    _check_counts(table)
    for name, total in table.means.items():
        there = table.n_rows - table.missing[name]
        if not there:
            raise DataError(f"{source}: column {name} has no value to take the mean of; leave the column out")
        table.means[name] = total / there
    table.runs = _joined(pl.concat(runs)) if runs else None
    return values


def _facts(name: str, kind: Any, is_exact: bool, has_mean: bool) -> Iterator[pl.Expr]:
    """What a frame says of a column."""
    column = values = pl.col(name)
    missing = column.null_count()
    if kind.is_nested():
        lengths = column.list.len() if kind == pl.List else column.arr.len()
        yield from (lengths.min().alias("shortest"), lengths.max().alias("longest"))
        values, kind = column.drop_nulls().explode(empty_as_null=False), kind.inner
        missing += values.null_count()
    if kind.is_float():
        missing += values.is_nan().sum()
        yield values.is_infinite().sum().alias("infinite")
    yield missing.alias("missing")
    if is_exact and kind in (pl.Int64, pl.UInt64):
        extremes = values.max().cast(pl.Int128), values.min().cast(pl.Int128) * -1
        yield pl.max_horizontal(*extremes).cast(pl.Decimal(38, 0)).alias("largest")
    if has_mean:
        yield column.cast(pl.Float64).fill_nan(None).sum().alias("sum")


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
        found = table.rows.schema[column]
        raise DataError(f"{table.source}: column {column} is {found}; give actions as texts or numbers")
    if not names:
        return tuple(sorted(values))
    # names from a command line are texts: as numbers, or as yes and no, where the column holds those
    spelled = {str(value).lower() if kind is bool else str(value): value for value in values}
    if kind is int:
        spelled |= {name: int(name) for name in map(str, names) if name.lstrip("-").isdecimal()}
    if kind is not str:
        names = tuple(spelled.get(str(name).lower(), name) for name in names)
    if {type(name) for name in names} != {kind}:
        raise DataError(
            f"{table.source}: action_names are {names!r}, column {column} holds {next(iter(values))!r}; "
            "write the names as the column has them (in YAML put yes and no in quotes)"
        )
    unknown = sorted(values - set(names))
    if unknown:
        shown = f"{unknown[0]!r}{f' and {len(unknown) - 1} more' if len(unknown) > 1 else ''}"
        raise DataError(
            f"{table.source}: column {column} holds {shown}, which action_names lacks; list all values"
        )
    return names


def _few_actions(table: Table) -> np.ndarray:
    """Some that are to the action space what all are."""
    if table.categories:
        return np.asarray([0, len(table.categories) - 1])
    columns = table.roles.action
    width = table.widths.get(columns[0], len(columns))
    return np.zeros((1, width), action_dtype(table)) if table.seen is None else table.seen


def _assumed(table: Table) -> Iterator[tuple[bool, str]]:
    """How types were taken that leave it open."""
    types, texts, time = table.rows.types, table.rows.texts, table.roles.time or ""
    decimals = [name for name, kind in types.items() if kind.is_decimal()]
    yield bool(decimals), f"decimals were read as float64: {', '.join(decimals)}"
    kind = types.get(time)
    is_naive = kind == pl.Time or (isinstance(kind, pl.Datetime) and kind.time_zone is None)
    yield (
        is_naive or (time in texts and texts[time].is_naive),
        f"times in {time} have no UTC offset and were read as UTC; where a local clock was set "
        "back, rows of that hour may be out of order",
    )
    single = len(table.roles.action) == 1 and table.rows.schema[table.roles.action[0]].is_numeric()
    is_open = table.seen is None and not table.categories and not isinstance(table.action_space, Discrete)
    yield (
        single and is_open and not table.has_fractions,
        "all actions are whole numbers stored as fractions and were taken as continuous; --discrete N "
        "declares choices",
    )


def _left_open(roles: mappings.TableMapping) -> Iterator[tuple[bool, str]]:
    """What a mapping may leave open, and how it is taken then."""
    alone, named = roles.stands_alone, "column is named:"
    yield alone, "no episode and no time column is named: every row stands alone"
    record = "the rows were taken as one record, cut where flags end it"
    yield roles.episode is None and not alone, f"no episode {named} {record}"
    yield roles.time is None and not alone, f"no time {named} rows were taken in the order of the table"
    yield roles.terminal is None, f"no terminal {named} no episode was taken to have ended by itself"


def _shape(written: bytes | None) -> tuple[int, ...] | None:
    if written is None:
        return None
    sides = written.decode("ascii", "replace").split(",")
    if not all(side.isdecimal() and int(side) for side in sides):
        raise DataError("the table's koffline description is damaged; write the file again")
    return tuple(map(int, sides))
