"""Preparation of a table: apply the mapping, check it, and pass over the rows once."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl

from koffline.data.columns import counted
from koffline.data.features import ACTIONS, Features
from koffline.data.flat import ONE_STEP_NOTE
from koffline.data.raw import read_description, settle_space
from koffline.data.spaces import ActionSpace, Discrete, SpaceRequest
from koffline.data.table import mapping as mappings
from koffline.data.table.arrow_files import LEFT_OUT, SHAPE_KEY
from koffline.data.table.census import Table, action_dtype, look_through, number_dtype
from koffline.data.table.files import CSV, faults, find_tables
from koffline.data.table.problems import Problems, column_fault
from koffline.data.table.roles import compute_columns, fitting_types, formulas_of, resolved
from koffline.data.table.rows import TableRows, column_types, open_rows, stored_columns
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
    more rows are read into memory. Raises DataError where there is nothing to look at.
    """
    name, is_own = os.fspath(source), mapping is None
    kind, files = find_tables(name, is_table=not is_own)
    stored, dictionaries, beside = stored_columns(files[0], kind)
    chosen = mappings.own_mapping(stored) if mapping is None else mappings.as_mapping(mapping)
    if chosen is None:
        raise mappings.unmapped(list(stored), name, kind)
    left_out = beside.get(LEFT_OUT.encode(), b"").decode()
    described = read_description(beside.get(b"koffline")) if is_own else None
    sides = beside.get(SHAPE_KEY.encode(), b"").decode("ascii", "replace").split(",") if described else []
    shape = tuple(int(side) for side in sides if side.isdecimal() and len(side) < 10)
    problems = Problems(name)
    roles = resolved(chosen, list(stored), problems)
    formulas = formulas_of(roles, list(stored), name)
    types = column_types(stored, roles, formulas)
    roles, types = fitting_types(types, roles, formulas, problems)
    if problems.found and left_out:
        problems.add(left_out)
    if not types:  # no rows can be read
        problems.refuse()
    # Columns of text in CSV may be anything: what they are is found here. Ids given with a mapping stay as
    # they are. Times are such in files with types too: "10" comes after "9".
    time = roles.time if roles.time in types else None
    meant = [time, *([*roles.action, roles.episode if is_own else None] if kind == CSV else [])]
    untyped = [each for each in types if each in meant and types[each] == pl.String]
    states = (*roles.observations, *roles.next_observations)
    observed = [pl.Int16() if column in roles.encode else types[column] for column in states]
    dtype = number_dtype(observed, bytes_stay=not roles.impute)  # a mean is no whole number
    encoded: dict[str, str] = {}
    with faults(name, kind):
        rows = open_rows(
            TableRows(kind, files, types, dtype.itemsize, bool(roles.decimal_comma)), in_memory, first
        )
        rows = rows.with_texts(untyped, time, problems)
        roles = roles if time not in untyped or time in rows.texts else roles.without([time])
        if roles.encode or formulas:
            rows, roles, encoded = compute_columns(rows, roles, formulas, problems)
        table = Table(name, rows, roles, chosen, dtype, shape or None, problems, is_own, encoded)
        is_category = bool(chosen.action_names) or _is_category(table, dictionaries)
        values = look_through(table, is_category, census=not in_memory)
    _check_counts(table)
    extra = described.metadata.extra if described else {} if is_own else _features(table).to_extra()
    settled: tuple[str, ...] = ()
    with problems.noted():
        if is_category and values:
            table.categories = _in_order(values, table)
            extra = {**extra, ACTIONS: list(table.categories)}
        settled = _settle_space(table, action_space, described.action_space if described else None)
    before = described.metadata if described else Metadata(gamma=chosen.gamma)
    said = [sentence for is_so, sentence in _open_questions(table) if is_so]
    table.metadata = replace(before, source=name, extra=extra, notes=(*before.notes, *settled, *said))
    return table


def _settle_space(table: Table, asked: SpaceRequest | None, declared: ActionSpace | None) -> tuple[str, ...]:
    """The space of the actions; what there is to say of it. Raises DataError."""
    names, some = table.roles.action, table.seen  # a few actions that determine the space like all of them
    if table.categories:
        declared, some = Discrete(len(table.categories)), np.asarray([0, len(table.categories) - 1])
    elif some is None and names:
        some = np.zeros((1, table.widths.get(names[0], len(names))), action_dtype(table))
    if some is None:  # already reported
        return ()
    table.action_space, settled = settle_space(some, asked, declared, table.source)
    return settled


def _features(table: Table) -> Features:
    """Names of the numbers of an observation; numbers of a list are named by position."""
    names = table.roles.observations
    if names and names[0] in table.widths:
        names = tuple(f"{names[0]}[{i}]" for i in range(table.widths[names[0]]))
    computed = table.rows.computed
    encodings = {} if computed is None else computed.encodings
    return Features(names, {n: each for n, each in encodings.items() if set(each.names(n)) <= set(names)})


def _is_category(table: Table, dictionaries: frozenset[str]) -> bool:
    """Whether the action is a category: texts, booleans or a dictionary. Several columns are a problem."""
    types, names = table.rows.schema, table.roles.action
    named = [name for name in names if types[name] in (pl.String, pl.Boolean) or name in dictionaries]
    if named and len(names) > 1:
        said = f"holds a category, beside {len(names) - 1} other columns of the action"
        table.problems.add(f"column {named[0]} {said}; name one column, or columns of numbers")
        return False
    return bool(named)


def _check_counts(table: Table) -> None:
    """Add problems: missing, infinite or non-numeric values, and questions that only the user can answer."""
    roles, problems, unread = table.roles, table.problems, table.rows.unread
    for name, (count, where, text) in unread.items():
        more = f", as {count - 1} more" if count > 1 else ""
        is_state = name in (*roles.observations, *roles.next_observations)
        remedy = "write numbers alone, or leave it empty"
        if is_state:
            remedy = "mend it, leave it out, or encode categories (--encode COLUMN=one-hot)"
        if re.fullmatch(r"[+-]?\d{1,3},\d{3}", text.strip()):
            remedy = "write it without the comma if that marks thousands, else say --decimal-comma"
        elif text.count(",") == 1 and text.replace(",", "").strip(" +-").isdecimal():
            remedy = "say that commas are decimal (--decimal-comma), or write points"
        elif "," in text and text.replace(",", "").replace(".", "").strip(" +-").isdecimal():
            remedy = "write numbers without separators of thousands"
        problems.add(f"column {name} in {where} is not all numbers ({text!r}{more}); {remedy}")
    missing: dict[str, int] = {}
    formulas = () if table.rows.computed is None else table.rows.computed.formulas
    lost = {name: count for name, (count, *_) in unread.items()}
    lost |= {each.text: sum(lost.get(name, 0) for name in each.numbers) for each in formulas}
    for name, count in table.missing.items():
        if name not in roles.impute and (name != roles.by or name in roles.needed):
            missing[table.encoded.get(name, name)] = count - lost.get(name, 0)
    missing = {name: count for name, count in missing.items() if count > 0}
    infinite = {name: n for name, n in table.infinite.items() if n and name in roles.measured}
    for what, found, remedy in (
        ("values are missing", missing, _remedy(table, missing)),
        ("numbers are infinite", infinite, "mend them where the table is made, or leave the column out"),
    ):
        if found:
            shown = ", ".join(f"{name}: {count}" for name, count in found.items())
            problems.add(f"{what} ({shown}, of {counted(table.n_rows, 'row')}); {remedy}")
    for name in table.means:
        if table.missing[name] == table.n_rows:
            problems.add(f"column {name} has no value to take the mean of; leave it out")
    if table.is_own:
        return
    is_asked = roles.one_step is None and not table.asked.stands_alone and not table.flagged
    if is_asked and table.asked.episode is None and not (table.asked.terminal and roles.terminal is None):
        problems.add(mappings.WHICH_ROWS)
        table.is_open = True
    if table.asked.episode is not None and table.asked.terminal is None and roles.last_row is None:
        problems.add(mappings.HOW_EPISODES_END)


def _remedy(table: Table, missing: Iterable[str]) -> str:
    """Remedy for missing values of these columns."""
    roles = table.roles
    filled: set[str | None] = {*table.encoded.values()}
    filled |= {*roles.observations, *roles.next_observations, roles.reward, roles.weight}
    spelled = [(n, "reward" if n == roles.reward and n not in table.rows.types else n) for n in missing]
    can = [f"replace them on request, as in --impute {name}=mean" for n, name in spelled if n in filled][:1]
    held = {*filled, *roles.measured}
    cut = [name for n, name in reversed(spelled) if n in held][:1]
    if roles.stands_alone:
        can += [f"leave such rows out (--impute {name}=cut)" for name in cut]
        return ", or ".join(can) or "drop those rows"
    can += [f"end episodes before such rows (--impute {name}=cut)" for name in cut]
    joins = "a row dropped inside an episode joins two steps that did not follow each other"
    return f"{', or '.join(can)}; {joins}" if can else f"mend those rows: {joins}"


def _in_order(values: set[Any], table: Table) -> tuple[Any, ...]:
    """Values of a category, sorted or in the order of ``action_names``. Raises DataError for unknown ones."""
    names, column, kind = table.roles.action_names, table.roles.action[0], type(next(iter(values)))
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
    roles, texts, time = table.roles, table.rows.texts, table.roles.time or ""
    kind = table.rows.schema.get(time)
    is_clock = kind == pl.Time or (time in texts and texts[time].is_clock)
    yield is_clock, f"times in {time} have no date: rows after midnight were put before those of the evening"
    is_naive = isinstance(kind, pl.Datetime) and kind.time_zone is None
    is_naive = is_naive or (time in texts and texts[time].is_naive)
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
