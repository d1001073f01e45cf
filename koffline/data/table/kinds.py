"""What the columns of a table may hold for the roles they have; wrong types are refused before reading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from koffline.data.table import values
from koffline.data.table.roles import Roles
from koffline.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class ColumnKinds:
    """Types by column, and the dtypes in which observations and continuous actions are held."""

    types: Mapping[str, Any]
    observation_dtype: np.dtype
    action_is_text: bool
    action_dtype: np.dtype
    exact: frozenset[str]  # columns whose whole numbers become floats

    @property
    def decimals(self) -> tuple[str, ...]:
        """Columns of decimals, which are read as float64."""
        import pyarrow as pa

        return tuple(n for n, kind in self.types.items() if pa.types.is_decimal(kind))


def check_kinds(schema: Mapping[str, pa.DataType], roles: Roles, source: str) -> ColumnKinds:
    """Check every column's type against its role. Raises DataError naming the first that does not fit."""
    import pyarrow as pa

    types = {name: values.storage_type(kind) for name, kind in schema.items()}
    for name in (*roles.observations, *roles.next_observations):
        _check_numbers(name, types[name], "observations", source, lists=True)
    for name in filter(None, (roles.reward, roles.behavior, roles.weight)):
        _check_numbers(name, types[name], "one number per row", source)
    for name in filter(None, (roles.terminal, roles.truncated)):
        if not (values.is_number(types[name]) or values.is_text(types[name])):
            raise DataError(f"{source}: column {name} is {types[name]}; give true and false, or 1 and 0")
    if roles.episode is not None and pa.types.is_nested(types[roles.episode]):
        raise DataError(f"{source}: column {roles.episode} is {types[roles.episode]}; give one id per row")
    if roles.time is not None:
        _check_time(roles.time, types[roles.time], source)
    _check_lists(roles, types, source)
    is_text = _check_actions(roles, schema, types, source)
    observed = [types[name] for name in (*roles.observations, *roles.next_observations)]
    observation_dtype = values.number_dtype(observed)
    if roles.impute and observation_dtype == np.uint8:
        observation_dtype = np.dtype(np.float32)  # a mean is no whole number
    action_dtype = np.dtype(np.float64) if is_text else _action_dtype([types[n] for n in roles.action])
    return ColumnKinds(types, observation_dtype, is_text, action_dtype, _floats(roles))


def _floats(roles: Roles) -> frozenset[str]:
    several = roles.action if len(roles.action) > 1 else ()
    return frozenset((*roles.numbers, *several))


def _check_numbers(name: str, kind: Any, what: str, source: str, lists: bool = False) -> None:
    inner = values.storage_type(kind.value_type) if lists and values.is_list(kind) else kind
    if not values.is_number(inner):
        remedy = "name other columns, or export it as numbers"
        raise DataError(f"{source}: column {name} is {kind}, needed are numbers ({what}); {remedy}")


def _check_time(name: str, kind: Any, source: str) -> None:
    import pyarrow as pa

    t = pa.types
    number = values.is_number(kind) and not t.is_boolean(kind)
    moment = t.is_timestamp(kind) or t.is_date(kind) or t.is_time(kind) or t.is_duration(kind)
    if not (number or moment or values.is_text(kind)):
        raise DataError(f"{source}: column {name} is {kind}, which gives no order in time; name another")


def _check_lists(roles: Roles, types: Mapping[str, Any], source: str) -> None:
    for columns in (roles.observations, roles.next_observations, roles.action):
        lists = [name for name in columns if values.is_list(types[name])]
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


def _check_actions(roles: Roles, schema: Mapping[str, Any], types: Mapping[str, Any], source: str) -> bool:
    """Whether the action is a category; dictionaries are categories whatever is in them."""
    import pyarrow as pa

    for name in roles.action:
        kind = types[name]
        category = values.is_text(kind) or pa.types.is_boolean(kind) or pa.types.is_dictionary(schema[name])
        if category and len(roles.action) == 1:
            return True
        if category:
            raise DataError(
                f"{source}: action column {name} holds categories ({kind}) and there are "
                f"{len(roles.action)} action columns; give one column of categories, or numbers"
            )
        _check_numbers(name, kind, "actions", source, lists=True)
    return False


def _action_dtype(kinds: list[Any]) -> np.dtype:
    """Integers stay integers where there is one column of them."""
    import pyarrow as pa

    if len(kinds) == 1 and pa.types.is_integer(kinds[0]):
        return np.dtype(np.int64)
    dtype = values.number_dtype(kinds)
    return np.dtype(np.float32) if dtype == np.uint8 else dtype
