"""A table, its mapping applied, checked and looked through: all that is needed to make rows of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl

from koffline.data.raw import read_description, settle_actions
from koffline.data.spaces import ActionSpace, Discrete, SpaceRequest
from koffline.data.table.files import CSV, faults, find_tables
from koffline.data.table.mapping import MappingRequest, TableMapping, as_mapping
from koffline.data.table.notes import assumptions, left_open
from koffline.data.table.roles import Roles, own_mapping, resolve_roles, unmapped
from koffline.data.table.rows import TableRows, column_types, hold, layout, narrowed, open_rows
from koffline.data.table.survey import TableSurvey, check_types, number_dtype, survey_rows
from koffline.data.transitions import Metadata
from koffline.errors import DataError

# Beside the description of the log: the shape of an observation that is stored as one list of numbers.
SHAPE_KEY = "koffline_observation_shape"


@dataclass(frozen=True, eq=False)
class PreparedTable:
    """Rows, roles, what a first pass found, and the action space with what was assumed about it."""

    source: str
    kind: str
    rows: TableRows
    roles: Roles
    survey: TableSurvey
    observation_dtype: np.dtype
    action_dtype: np.dtype
    categories: tuple[Any, ...]
    action_space: ActionSpace
    observation_shape: tuple[int, ...] | None
    metadata: Metadata


def prepare_table(
    source: str | os.PathLike[str],
    mapping: MappingRequest | None,
    action_space: SpaceRequest | None,
    *,
    in_memory: bool,
) -> PreparedTable:
    """Find the files, apply the mapping, look through the rows once. Raises DataError in one line.

    Without ``in_memory`` the rows are read from the files in every pass, and episodes are counted.
    """
    name = os.fspath(source)
    files = find_tables(name, is_table=mapping is not None)
    kind, stored = files[0].kind, layout(files[0])
    names = [*stored.types, *(key for key in files[0].constants if key not in stored.types)]
    described = None
    if mapping is not None:
        chosen = as_mapping(mapping)
    else:
        own = own_mapping(names)
        if own is None:
            raise unmapped(names, name, kind)
        chosen, described = own, read_description(stored.description.get("koffline"))
    roles = resolve_roles(names, chosen, name)
    types = column_types(files, stored.types, roles)
    # Columns of text in a file without types may still be anything: what they are is found below.
    untyped = _untyped(names if kind == CSV else files[0].constants, roles, types, mapping is not None)
    checked = {**types, **dict.fromkeys(untyped, pl.Float64())}
    check_types(checked, roles, stored.categories, name)
    dtype = _observation_dtype(roles, types)
    with faults(name, kind):
        rows = open_rows(files, types, dtype.itemsize)
        rows = narrowed(hold(rows) if in_memory else rows, untyped, roles.time, name)
        types = rows.schema
        is_category = check_types(types, roles, stored.categories, name) or bool(chosen.action_names)
        survey = survey_rows(rows, roles, name, is_category, census=not in_memory)
    _check_widths(roles, survey, name)
    categories = _categories(survey, chosen, roles, types, name) if is_category else ()
    declared: ActionSpace | None = described.action_space if described is not None else None
    declared = Discrete(len(categories)) if categories else declared
    action_dtype = _action_dtype([types[n] for n in roles.action], is_category)
    settled = settle_actions(
        _sample(survey, roles, action_dtype, len(categories)), action_space, declared, name,
        None if survey.actions_seen is None else len(survey.actions_seen),
    )  # fmt: skip
    before = described.metadata if described is not None else Metadata(gamma=chosen.gamma)
    extra = {**before.extra, "action_names": list(categories)} if categories else before.extra
    notes = [*before.notes, *settled.notes, *assumptions(rows, survey, roles, settled.space)]
    notes += left_open(roles) if mapping is not None else []
    return PreparedTable(
        source=name,
        kind=kind,
        rows=rows,
        roles=roles,
        survey=survey,
        observation_dtype=dtype,
        action_dtype=action_dtype,
        categories=categories,
        action_space=settled.space,
        observation_shape=_shape(stored.description) if described is not None else None,
        metadata=replace(before, source=name, extra=extra, notes=tuple(notes)),
    )


def _untyped(untyped: Any, roles: Roles, types: Mapping[str, Any], keep_ids: bool) -> tuple[str, ...]:
    """Columns of text that may stand for something else; ids given with a mapping stay as they are.

    Times are such in files with types too: "10" comes after "9".
    """
    meant = (*roles.action, None if keep_ids else roles.episode)
    found = [n for n in meant if n and n in untyped]
    if roles.time and types[roles.time] == pl.String:
        found.append(roles.time)
    numbers = set(roles.numbers)
    return tuple(n for n in dict.fromkeys(found) if n not in numbers)


def _observation_dtype(roles: Roles, types: Mapping[str, Any]) -> np.dtype:
    dtype = number_dtype([types[name] for name in (*roles.observations, *roles.next_observations)])
    # a mean is no whole number
    return np.dtype(np.float32) if roles.impute and dtype == np.uint8 else dtype


def _action_dtype(kinds: list[Any], is_category: bool) -> np.dtype:
    """Integers stay integers where there is one column of them."""
    if is_category:
        return np.dtype(np.float64)
    if len(kinds) == 1 and kinds[0].is_integer():
        return np.dtype(np.int64)
    dtype = number_dtype(kinds)
    return np.dtype(np.float32) if dtype == np.uint8 else dtype


def _check_widths(roles: Roles, survey: TableSurvey, source: str) -> None:
    first, following = roles.observations[0], (*roles.next_observations, None)[0]
    widths = survey.widths.get(first), survey.widths.get(following or "")
    if following is not None and widths[0] != widths[1]:
        raise DataError(
            f"{source}: lists in column {following} have {widths[1]} numbers, in {first} {widths[0]}; "
            "give equal lengths"
        )
    if widths[0] == 0:
        raise DataError(f"{source}: lists in column {first} are empty; give at least one feature")


def _categories(
    survey: TableSurvey, mapping: TableMapping, roles: Roles, types: Mapping[str, Any], source: str
) -> tuple[Any, ...]:
    """The values of the action column in the order of their numbers."""
    column, values = roles.action[0], survey.categories
    if not all(isinstance(value, (str, int)) for value in values):
        raise DataError(f"{source}: column {column} is {types[column]}; give actions as texts or numbers")
    if not mapping.action_names:
        return tuple(sorted(values))
    names, kinds = mapping.action_names, {type(value) for value in values}
    # names from a command line are texts: as numbers, or as yes and no, where the column holds those
    if kinds == {int} and all(isinstance(name, str) and name.lstrip("-").isdecimal() for name in names):
        names = tuple(map(int, names))
    if kinds == {bool} and {str(name).lower() for name in names} == {"true", "false"}:
        names = tuple(str(name).lower() == "true" for name in names)
    if {type(name) for name in names} != kinds:
        raise DataError(
            f"{source}: action_names are {names!r}, column {column} holds {next(iter(values))!r}; "
            "write the names as the column has them (in YAML put yes and no in quotes)"
        )
    unknown = sorted(values - set(names))
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise DataError(
            f"{source}: column {column} holds {unknown[0]!r}{more}, which action_names lacks; list all values"
        )
    return names


def _sample(survey: TableSurvey, roles: Roles, dtype: np.dtype, n_categories: int) -> np.ndarray:
    """A few rows that are to the action space what all rows are."""
    if n_categories:
        return np.asarray([0, n_categories - 1])
    if survey.action_range is not None:
        return np.asarray(survey.action_range)
    width = survey.widths.get(roles.action[0], len(roles.action))
    single = width == 1 and roles.action[0] not in survey.widths and dtype.kind == "i"
    return np.zeros((1,) if single else (1, width), dtype=dtype)


def _shape(description: Mapping[str, str]) -> tuple[int, ...] | None:
    text = description.get(SHAPE_KEY)
    if text is None:
        return None
    if not all(part.isdecimal() and int(part) > 0 for part in text.split(",")):
        raise DataError("the table's koffline description is damaged; write the file again")
    return tuple(int(part) for part in text.split(","))
