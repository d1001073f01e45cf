"""One pass over a table before its rows are used: what is missing, which actions and episodes there are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from koffline.data.raw import merge_different
from koffline.data.table import values
from koffline.data.table.census import CensusTaker, EpisodeCensus
from koffline.data.table.kinds import ColumnKinds
from koffline.data.table.roles import Roles
from koffline.data.wording import counted
from koffline.errors import DataError

_MOST_CATEGORIES = 10_000
_LONGEST_NAME = 1000
_EXACT = 2**53


@dataclass
class TableSurvey:
    """What one pass found. ``widths`` are the lengths of list columns, ``means`` of columns to impute so."""

    rows: int = 0
    missing: dict[str, int] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)
    means: dict[str, float] = field(default_factory=dict)
    categories: set[Any] = field(default_factory=set)
    action_range: tuple[int, int] | None = None
    actions_seen: np.ndarray | None = None  # the different whole numbers, as far as they were collected
    infinite: dict[str, int] = field(default_factory=dict)
    actions_whole: bool = True
    episodes: EpisodeCensus | None = None


def survey_rows(
    batches: Iterable[Any], roles: Roles, kinds: ColumnKinds, source: str, categorical: bool, census: bool
) -> TableSurvey:
    """Look through batches of all columns. Raises DataError for missing values, with the count per column."""
    found, sums = TableSurvey(), {name: 0.0 for name, how in roles.impute.items() if how == "mean"}
    taker = CensusTaker() if census and roles.episode is not None else None
    finite = {*roles.numbers, *roles.action}
    for batch in batches:
        found.rows += batch.num_rows
        for name in roles.columns:
            column = values.plain(batch.column(name))
            missing = values.count_missing(column)
            found.missing[name] = found.missing.get(name, 0) + missing
            _check_column(name, column, found, kinds, source)
            if name in finite:
                found.infinite[name] = found.infinite.get(name, 0) + values.count_infinite(column)
            if name in sums:
                sums[name] += float(np.nansum(values.numbers(column, np.dtype(np.float64))))
        _look_at_actions(batch, roles, found, categorical, source)
        if taker is not None:
            taker.append(batch.column(roles.episode))
    if not found.rows:
        raise DataError(f"{source} has no rows; give a table with at least one transition")
    _check_missing(found, roles, source)
    _check_infinite(found, source)
    for name, total in sums.items():
        counted = found.rows - found.missing[name]
        if not counted:
            raise DataError(f"{source}: column {name} has no value to take the mean of; leave the column out")
        found.means[name] = total / counted
    found.episodes = taker.finish() if taker is not None else None
    return found


def _check_column(name: str, column: Any, found: TableSurvey, kinds: ColumnKinds, source: str) -> None:
    """Lists of one length; whole numbers that a float can hold."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = kinds.types[name]
    if values.is_list(kind):
        lengths = pc.min_max(pc.list_value_length(column.drop_null())).as_py()
        for length in filter(lambda each: each is not None, lengths.values()):
            if found.widths.setdefault(name, int(length)) != length:
                raise DataError(
                    f"{source}: lists in column {name} have {found.widths[name]} and {length} numbers; "
                    "give lists of one length"
                )
    elif kind in (pa.int64(), pa.uint64()) and name in kinds.exact:
        extremes = pc.min_max(column).as_py()
        worst = max((extremes["max"] or 0), -(extremes["min"] or 0))
        if worst > _EXACT:
            raise DataError(
                f"{source}: column {name} holds whole numbers up to {worst}, which no float holds exactly; "
                "leave out identifiers, or scale the column"
            )


def _look_at_actions(batch: Any, roles: Roles, found: TableSurvey, categorical: bool, source: str) -> None:
    import pyarrow as pa
    import pyarrow.compute as pc

    if len(roles.action) > 1:
        return
    column = values.plain(batch.column(roles.action[0]))
    if categorical:
        _check_texts(column, roles.action[0], source)
        found.categories |= set(pc.unique(column.drop_null()).to_pylist())
        if len(found.categories) > _MOST_CATEGORIES:
            raise DataError(
                f"{source}: column {roles.action[0]} holds more than {_MOST_CATEGORIES} different actions; "
                "name another column"
            )
    elif pa.types.is_integer(column.type):
        extremes = pc.min_max(column).as_py()
        if extremes["min"] is not None:
            low, high = found.action_range or (extremes["min"], extremes["max"])
            found.action_range = min(low, extremes["min"]), max(high, extremes["max"])
            seen = np.asarray(pc.unique(column.drop_null()).to_numpy(zero_copy_only=False))
            found.actions_seen = merge_different(found.actions_seen, seen)
    elif pa.types.is_floating(column.type) and found.actions_whole:
        drawn = values.numbers(column, np.dtype(np.float64))
        found.actions_whole = bool((np.isfinite(drawn) & (drawn >= 0) & (drawn == np.floor(drawn))).all())


def _check_texts(column: Any, name: str, source: str) -> None:
    import pyarrow.compute as pc

    longest = int(pc.max(pc.binary_length(column)).as_py() or 0) if values.is_text(column.type) else 0
    if longest > _LONGEST_NAME:
        raise DataError(
            f"{source}: column {name} holds a text of {longest} bytes as an action; name another column"
        )


def _check_missing(found: TableSurvey, roles: Roles, source: str) -> None:
    refused = {name: n for name, n in found.missing.items() if n and name not in roles.impute}
    if not refused:
        return
    can = [name for name in refused if name in {*roles.observations, *roles.next_observations}]
    remedy = "drop those rows"
    if can:
        remedy += f", or replace values on request, as in --impute {can[0]}=mean"
    raise DataError(f"{source}: values are missing ({_counts(refused, found)}); {remedy}")


def _check_infinite(found: TableSurvey, source: str) -> None:
    wrong = {name: count for name, count in found.infinite.items() if count}
    if wrong:
        raise DataError(
            f"{source}: numbers are infinite ({_counts(wrong, found)}); drop or mend those rows, or leave "
            "the column out"
        )


def _counts(columns: dict[str, int], found: TableSurvey) -> str:
    counts = ", ".join(f"{name}: {count}" for name, count in columns.items())
    return f"{counts}, of {counted(found.rows, 'row')}"
