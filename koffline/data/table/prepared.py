"""A table, its mapping applied, checked and surveyed: all that is needed to make rows of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from koffline.data.raw import FileDescription, read_description, settle_actions
from koffline.data.spaces import ActionSpace, Discrete, SpaceRequest
from koffline.data.table.faults import table_faults
from koffline.data.table.files import TableFiles, as_csv, find_tables
from koffline.data.table.kinds import ColumnKinds, check_kinds
from koffline.data.table.mapping import MappingRequest, TableMapping, as_mapping
from koffline.data.table.roles import Roles, own_mapping, resolve_roles, unmapped
from koffline.data.table.rows import TableRows, hold, open_rows
from koffline.data.table.survey import TableSurvey, survey_rows
from koffline.data.table.texts import narrow_types
from koffline.data.table.values import is_naive, is_text, storage_type
from koffline.data.transitions import Metadata
from koffline.errors import DataError

# Beside the description of the log: the shape of an observation that is stored as one list of numbers.
SHAPE_KEY = "koffline_observation_shape"


@dataclass(frozen=True, eq=False)
class PreparedTable:
    """Rows, roles, types, what a first pass found, and the action space with what was assumed about it."""

    source: str
    rows: TableRows
    roles: Roles
    kinds: ColumnKinds
    survey: TableSurvey
    categories: tuple[Any, ...]
    action_space: ActionSpace
    observation_shape: tuple[int, ...] | None
    metadata: Metadata

    @property
    def width(self) -> int | None:
        """Numbers per row where observations are one list column."""
        return self.survey.widths.get(self.roles.observations[0])


def prepare_table(
    source: str | os.PathLike[str],
    mapping: MappingRequest | None = None,
    action_space: SpaceRequest | None = None,
    *,
    in_memory: bool,
) -> PreparedTable:
    """Find the files, apply the mapping, look through the rows once. Raises DataError in one line.

    Without ``in_memory`` the rows are read from the files in every pass, and episodes are counted.
    """
    import pyarrow as pa

    name = os.fspath(source)
    files = _find(name, mapping)
    chosen, described = _mapping(files, mapping, name)
    roles = resolve_roles(files.names, chosen, name)
    types = files.schema(roles)
    # Columns of text in a file without types may still be anything: what they are is found below.
    untyped = _untyped(files, roles, types, keep_ids=mapping is not None)
    typed = {n: pa.float64() if n in untyped else k for n, k in types.items()}
    itemsize = check_kinds(typed, roles, name).observation_dtype.itemsize
    with table_faults(name, files.kind):
        rows = open_rows(files, types, itemsize)
        rows = hold(rows) if in_memory else rows
        texts = rows.batches(untyped) if untyped else ()
        narrowed = narrow_types(texts, untyped, roles.time, name)
        rows = replace(rows, narrowed=narrowed)
        kinds = check_kinds({**types, **narrowed}, roles, name)
        categorical = kinds.action_is_text or bool(chosen.action_names)
        survey = survey_rows(rows.batches(), roles, kinds, name, categorical, census=not in_memory)
    _check_widths(roles, survey, name)
    categories = _categories(survey, chosen, roles, kinds, name) if categorical else ()
    declared: ActionSpace | None = described.action_space if described is not None else None
    declared = Discrete(len(categories)) if categories else declared
    different = None if survey.actions_seen is None else len(survey.actions_seen)
    sample = _sample(survey, roles, kinds, len(categories))
    settled = settle_actions(sample, action_space, declared, name, different)
    notes = [*settled.notes, *_notes(survey, roles, kinds, settled.space)]
    if mapping is not None:
        notes += _unnamed(roles)
    return PreparedTable(
        source=name,
        rows=rows,
        roles=roles,
        kinds=kinds,
        survey=survey,
        categories=categories,
        action_space=settled.space,
        observation_shape=_shape(files.description) if described is not None else None,
        metadata=_metadata(name, chosen, described, categories, notes),
    )


def _find(name: str, mapping: MappingRequest | None) -> TableFiles:
    found = find_tables(name)
    if found is None and mapping is not None:
        return as_csv(name)
    if found is None:
        raise DataError(f"{name} is no table that koffline knows; give Parquet, Arrow or CSV")
    return found


def _mapping(
    files: TableFiles, given: MappingRequest | None, name: str
) -> tuple[TableMapping, FileDescription | None]:
    if given is not None:
        return as_mapping(given), None
    own = own_mapping(files.names)
    if own is None:
        raise unmapped(files.names, name, files.kind)
    text = files.description.get("koffline")
    return own, None if text is None else read_description(text)


def _untyped(files: TableFiles, roles: Roles, types: Mapping[str, Any], keep_ids: bool) -> tuple[str, ...]:
    """Columns of text that may stand for something else; ids given with a mapping stay as they are.

    Times are such in files with types too: "10" comes after "9".
    """
    meant = (*roles.action, None if keep_ids else roles.episode)
    found = [n for n in meant if n and files.is_text(n)]
    time = roles.time
    if time and (files.is_text(time) or is_text(storage_type(types[time]))):
        found.append(time)
    numbers = set(roles.numbers)
    return tuple(n for n in dict.fromkeys(found) if n not in numbers)


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
    survey: TableSurvey, mapping: TableMapping, roles: Roles, kinds: ColumnKinds, source: str
) -> tuple[Any, ...]:
    """The values of the action column in the order of their numbers."""
    column = roles.action[0]
    values = survey.categories
    if not all(isinstance(value, (str, int)) for value in values):
        raise DataError(
            f"{source}: column {column} is {kinds.types[column]}; give actions as texts or numbers"
        )
    if not mapping.action_names:
        return tuple(sorted(values))
    names = _as_values(mapping.action_names, values)
    if {type(name) for name in names} != {type(value) for value in values}:
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


def _as_values(names: tuple[Any, ...], values: set[Any]) -> tuple[Any, ...]:
    """Names from a command line are texts: as numbers, or as yes and no, where the column holds those."""
    kinds = {type(value) for value in values}
    if kinds == {int} and all(isinstance(name, str) and name.lstrip("-").isdecimal() for name in names):
        return tuple(int(name) for name in names)
    if kinds == {bool} and {str(name).lower() for name in names} == {"true", "false"}:
        return tuple(str(name).lower() == "true" for name in names)
    return names


def _sample(survey: TableSurvey, roles: Roles, kinds: ColumnKinds, n_categories: int) -> np.ndarray:
    """A few rows that are to the action space what all rows are."""
    if n_categories:
        return np.asarray([0, n_categories - 1])
    if survey.action_range is not None:
        return np.asarray(survey.action_range)
    width = survey.widths.get(roles.action[0], len(roles.action))
    single = width == 1 and roles.action[0] not in survey.widths and kinds.action_dtype.kind == "i"
    return np.zeros((1,) if single else (1, width), dtype=kinds.action_dtype)


def _notes(survey: TableSurvey, roles: Roles, kinds: ColumnKinds, space: ActionSpace) -> list[str]:
    notes = []
    if kinds.decimals:
        notes.append(f"decimals were read as float64: {', '.join(kinds.decimals)}")
    if roles.time is not None and is_naive(kinds.types[roles.time]):
        notes.append(
            f"times in {roles.time} have no UTC offset and were read as UTC; where a local clock was set "
            "back, rows of that hour may be out of order"
        )
    single = len(roles.action) == 1 and roles.action[0] not in survey.widths
    floats = survey.action_range is None and not survey.categories
    if single and floats and survey.actions_whole and not isinstance(space, Discrete):
        notes.append(
            "all actions are whole numbers stored as fractions and were taken as continuous; "
            "--discrete N declares choices"
        )
    return notes


def _unnamed(roles: Roles) -> list[str]:
    """What a mapping leaves open, and how it was taken."""
    notes = []
    if roles.stands_alone:
        notes.append("no episode and no time column is named: every row stands alone")
    elif roles.episode is None:
        notes.append("no episode column is named: the rows were taken as one record, cut where flags end it")
    if roles.time is None and not roles.stands_alone:
        notes.append("no time column is named: rows were taken in the order of the table")
    if roles.terminal is None:
        notes.append("no terminal column is named: no episode was taken to have ended by itself")
    return notes


def _metadata(
    name: str,
    mapping: TableMapping,
    described: FileDescription | None,
    categories: tuple[Any, ...],
    notes: list[str],
) -> Metadata:
    before = described.metadata if described is not None else Metadata(gamma=mapping.gamma)
    extra: Mapping[str, Any] = before.extra
    if categories:
        extra = {**extra, "action_names": list(categories)}
    return Metadata(name, before.sha256, before.gamma, extra, (*before.notes, *notes))


def _shape(description: Mapping[str, str]) -> tuple[int, ...] | None:
    text = description.get(SHAPE_KEY)
    if text is None:
        return None
    if not all(part.isdecimal() and int(part) > 0 for part in text.split(",")):
        raise DataError("the table's koffline description is damaged; write the file again")
    return tuple(int(part) for part in text.split(","))
