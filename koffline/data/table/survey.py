"""Preparation of a table: apply the mapping, check it, and pass over the rows once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl

from koffline.data.features import ACTIONS, Features
from koffline.data.flat import ONE_STEP_NOTE
from koffline.data.raw import FileDescription, read_description, settle_space
from koffline.data.spaces import Discrete, SpaceRequest
from koffline.data.table import mapping as mappings
from koffline.data.table import roles as applied
from koffline.data.table.arrow_files import SHAPE_KEY
from koffline.data.table.census import Table, check_counts, look_through, number_type
from koffline.data.table.files import CSV, faults, find_tables, width_of
from koffline.data.table.problems import Problems, column_fault
from koffline.data.table.rows import CLOCK, TEXT_WAYS, TableRows, TextKind, described, open_rows
from koffline.data.transitions import Metadata


def prepare_table(
    source: str | os.PathLike[str],
    mapping: mappings.MappingRequest | None,
    action_space: SpaceRequest | None,
    *,
    in_memory: bool,
    first: int | None = None,
) -> Table:
    """Find the files, apply the mapping, look through the rows once: what is wrong is in ``problems``.

    Without ``in_memory`` the rows are read from the files in every pass, and episodes are counted. first: no
    more rows are read into memory. Raises DataError for all that is wrong with the mapping.
    """
    name, is_own = os.fspath(source), mapping is None
    kind, files = find_tables(name, is_table=not is_own)
    file = described(files[0], kind)
    stored = dict(file.fields)
    chosen = mappings.own_mapping(stored) if mapping is None else mappings.as_mapping(mapping)
    if chosen is None:
        raise mappings.unmapped(list(stored), name, kind)
    described_log = read_description(file.described.get(b"koffline")) if is_own else None
    sides = file.described.get(SHAPE_KEY.encode(), b"").decode("ascii", "replace").split(",")
    shape = tuple(int(side) for side in sides if side.isdecimal() and len(side) < 10)
    problems = Problems(name)
    roles, formulas = applied.resolved(chosen, list(stored), problems)
    types = applied.column_types(stored, roles, formulas)
    applied.check_types(types, roles, formulas, problems)
    problems.refuse()
    states = (*roles.observations, *roles.next_observations)
    observed = [pl.Int16() if column in roles.encode else types[column] for column in states]
    number = number_type(observed, bytes_stay=not roles.impute)  # a mean is no whole number
    with faults(name, kind):
        rows = TableRows(kind, files, types, width_of(number), bool(roles.decimal_comma))
        rows = open_rows(rows, in_memory, first)
        # Columns of text in CSV may be anything: what they are is found here. Ids given with a mapping stay
        # as they are. Times are such in files with types too: "10" comes after "9".
        meant = [*roles.action, roles.episode if is_own else None] if kind == CSV else []
        ways = {name: TEXT_WAYS[:2] for name in meant if name} | {roles.time: TEXT_WAYS}
        texts = {
            n: TextKind(n, n == roles.time, list(each))
            for n, each in ways.items()
            if n and types.get(n) == pl.String
        }
        for frame in rows.only(list(texts)).frames() if texts else ():
            for column in frame:
                texts[column.name].look(column, name)
        encodings = applied.look_up(rows, roles, problems)
        problems.refuse()
        roles, origin = applied.encoded(roles, encodings)
        if texts or formulas or encodings:
            made = {*origin, *(each.text for each in formulas)}
            kept = [n for n in roles.columns if n not in made]
            computed = [texts[n].expression if n in texts else pl.col(n) for n in kept]
            computed += [formula.value for formula in formulas]
            computed += [each for n in encodings for each in applied.features(n, encodings[n])]
            rows = rows.computing(computed)
        table = Table(
            name, rows, roles, chosen, number, (shape or None) if described_log else None, problems, is_own,
            formulas, texts, encodings, origin,
        )  # fmt: skip
        is_category = bool(chosen.action_names) or _is_category(table)
        look_through(table, is_category, census=not in_memory)
    check_counts(table)
    _describe(table, action_space, described_log)
    return table


def _describe(table: Table, asked: SpaceRequest | None, described: FileDescription | None) -> None:
    """Settle categories, action space and metadata; what is wrong with the actions is a problem."""
    extra = described.metadata.extra if described else {} if table.is_own else _features(table).to_extra()
    names, settled = table.roles.action, ()
    declared = described.action_space if described else None
    with table.problems.noted():
        some = table.seen  # a few actions that determine the space like all of them
        if table.values:
            table.categories = _in_order(table)
            extra = {**extra, ACTIONS: list(table.categories)}
            declared, some = Discrete(len(table.categories)), np.asarray([0, len(table.categories) - 1])
        elif some is None:
            some = np.zeros((1, table.widths.get(names[0], len(names))))
        table.action_space, settled = settle_space(some, asked, declared, table.source)
    before = described.metadata if described else Metadata(gamma=table.asked.gamma)
    said = [sentence for is_so, sentence in _open_questions(table) if is_so]
    table.metadata = replace(before, source=table.source, extra=extra, notes=(*before.notes, *settled, *said))


def _features(table: Table) -> Features:
    """Names of the numbers of an observation; numbers of a list are named by position."""
    names = table.roles.observations
    if names[0] in table.widths:
        names = tuple(f"{names[0]}[{i}]" for i in range(table.widths[names[0]]))
    return Features(
        names, {n: each for n, each in table.encodings.items() if set(each.names(n)) <= set(names)}
    )


def _is_category(table: Table) -> bool:
    """Whether the action is a category: texts or booleans. Raises DataError beside others."""
    types, names = table.rows.schema, table.roles.action
    named = [name for name in names if types[name] in (pl.String, pl.Boolean)]
    if named and len(names) > 1:
        said = f"holds a category, beside {len(names) - 1} other columns of the action"
        raise column_fault(table.source, named[0], f"{said}; name one column, or columns of numbers")
    return bool(named)


def _in_order(table: Table) -> tuple[Any, ...]:
    """Values of a category, sorted or in the order of ``action_names``. Raises DataError for unknown ones."""
    values, names, column = table.values, table.roles.action_names, table.roles.action[0]
    kind = type(next(iter(values)))
    if not issubclass(kind, (str, int)):
        said = f"is {table.rows.schema[column]}; give actions as texts or numbers"
        raise column_fault(table.source, column, said)
    if not names:
        return tuple(sorted(values))
    if kind is not str:  # names from a command line are texts: convert them to integers or booleans
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


def _open_questions(table: Table) -> Iterator[tuple[bool, str]]:
    """Yield notes on what the mapping leaves open: whether each applies, and how it was decided."""
    roles, time = table.roles, table.roles.time or ""
    kind, text = table.rows.schema.get(time), table.texts.get(time)
    is_clock = kind == pl.Time or (text is not None and text.form == CLOCK)
    yield is_clock, f"times in {time} have no date: rows after midnight were put before those of the evening"
    is_naive = isinstance(kind, pl.Datetime) and kind.time_zone is None
    is_naive = is_naive or (text is not None and text.is_naive)
    where = "where a local clock was set back, rows of that hour may be out of order"
    yield is_naive, f"times in {time} have no UTC offset and were read as UTC; {where}"
    if table.is_own or table.is_open:
        return
    yield bool(roles.one_step), ONE_STEP_NOTE
    if roles.one_step:
        return
    alone, named = roles.stands_alone, "column is named:"
    record = "the rows were taken as one record, cut where flags end it"
    yield alone, "no episode and no time column is named: every row stands alone"
    yield roles.episode is None and not alone, f"no episode {named} {record}"
    yield roles.time is None and not alone, f"no time {named} rows were taken in the order of the table"
    is_open = roles.terminal is None and roles.last_row != "terminal"
    yield is_open, f"no terminal {named} no episode was taken to have ended by itself"
    ended = "to have ended by itself" if roles.last_row == "terminal" else "to be cut by the end of logging"
    yield roles.last_row is not None, f"an episode whose last row has no flag was taken {ended} (last_row)"
