"""The mapping of a log whose tool the user names, as in ``--format rllib``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from koffline.data.log_readers import Place, recognise
from koffline.data.table.inspection import Inspection, inspect_table, needs_mapping
from koffline.data.table.mapping import TableMapping
from koffline.data.table.tools import check_name
from koffline.errors import DataError
from koffline.store.files import Location

# Layouts that need no mapping, by the names that tools have for them.
_READ_BY_THEMSELVES = {"groups": "robomimic", "lerobot": "lerobot"}
_ROLES = ("action", "episode", "time")  # of `inspect_table`; a reward may be a formula
_LINKS = ("episode", "starts", "one_step")


def mapping_of_tool(
    source: Location, tool: str, request: Mapping[str, Any] | None
) -> TableMapping | Mapping[str, Any] | None:
    """What the columns of a log are: as ``koffline data inspect --format`` proposes,
    and where the user says so otherwise, as the user says.

    tool: the name of the tool that wrote the log (`tools.tool_names`). request: what
    the user says of columns, by keys of a mapping; it need not be complete. Returns the
    request for a log that needs no mapping.
    Raises DataError for unknown tools, logs of others, and where a question is open.
    """
    check_name(tool)
    name = os.fspath(source)
    if not needs_mapping(name):
        with Place(name) as place:
            reader = recognise(place)
        if _READ_BY_THEMSELVES.get(reader.name) != tool:
            raise DataError(
                f"{name} is no log of {tool} but a {reader.title}, which says itself"
                " what its columns are; leave --format out"
            )
        return request
    written = dict(request or {})
    known = {role: _columns(written[role]) for role in _ROLES if written.get(role)}
    inspection = inspect_table(name, known=known, format=tool)
    proposed = dict(inspection.mapping)
    if any(written.get(link) for link in _LINKS):
        for link in _LINKS:
            proposed.pop(link, None)
    mapping = {**proposed, **written}
    _check_is_settled(inspection, mapping, tool)
    return TableMapping(**mapping)


def _columns(role: Any) -> tuple[str, ...]:
    if isinstance(role, str):
        return (role,)
    return tuple(role)


def _check_is_settled(
    inspection: Inspection, mapping: Mapping[str, Any], tool: str
) -> None:
    """Raise DataError with the questions that only the user can answer."""
    name = inspection.source
    questions = [
        str(mapping[key]).removeprefix("? ")
        for key in inspection.open
        if str(mapping.get(key)).startswith("?")
    ]
    if inspection.is_open and not any(mapping.get(link) for link in _LINKS):
        questions.append("episode: COLUMN | starts: COLUMN | one_step: true")
    if questions:
        raise DataError(
            f"{name}: only you can say {' and '.join(questions)}; write it with"
            f" koffline data inspect {name} --format {tool} --out mapping.yaml, and give"
            " --mapping mapping.yaml"
        )
