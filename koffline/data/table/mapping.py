"""Which column of a table is what: one frozen record, from keywords, a dict or a YAML file."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from koffline.errors import DataError, nearest_name
from koffline.untrusted.limits import Refused
from koffline.untrusted.yaml_files import LARGEST_TEXT, DuplicateKeyError, parse_yaml

# How missing values may be replaced, on request; a number is a constant.
METHODS = ("zero", "mean", "forward")
_NAMES = (
    "reward",
    "episode",
    "time",
    "terminal",
    "truncated",
    "behavior_probability",
    "behavior_log_probability",
    "weight",
)
_MANY = ("observations", "action", "next_observations")


# Whatever a file or a caller hands over; the constructor checks it and keeps a str, or a tuple of them.
ColumnName = Any
ColumnNames = Any


@dataclass(frozen=True)
class TableMapping:
    """Columns of a table by their part in a transition; the keys of a YAML mapping file are the same.

    ``observations``, ``action`` and ``next_observations`` take one name or several, with ``*`` and ``?`` for
    any text and any letter; matches are taken in natural order (x_2 before x_10). ``episode`` may hold ids of
    any type, ``time`` numbers or times. ``action_names`` lists the values of a discrete action in
    the order of their numbers; without it texts are sorted. ``impute`` replaces missing values: a method
    (zero, mean, forward or a number) for the observations, or a mapping from column to method. ``gamma`` is
    the log's discount hint. Raises DataError where the record contradicts itself.
    """

    observations: ColumnNames = ()
    action: ColumnNames = ()
    reward: ColumnName = None
    episode: ColumnName = None
    time: ColumnName = None
    terminal: ColumnName = None
    truncated: ColumnName = None
    behavior_probability: ColumnName = None
    behavior_log_probability: ColumnName = None
    weight: ColumnName = None
    next_observations: ColumnNames = ()
    action_names: Any = ()
    impute: Any = ()
    gamma: Any = None

    def __post_init__(self) -> None:
        for name in _MANY:
            object.__setattr__(self, name, _names(name, getattr(self, name)))
        for name in _NAMES:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise DataError(f"the mapping's {name} is {value!r}; give one column name")
        object.__setattr__(self, "action_names", _action_names(self.action_names))
        object.__setattr__(self, "impute", _imputations(self.impute))
        missing = [name for name in ("observations", "action", "reward") if not getattr(self, name)]
        if missing:
            raise DataError(
                f"the mapping lacks {', '.join(missing)}; name the columns of a table, as in --observations "
                "'x_*' --action a --reward r --episode id --time t"
            )
        if self.behavior_probability and self.behavior_log_probability:
            raise DataError(
                "the mapping names behavior_probability and behavior_log_probability; keep one of them"
            )
        gamma = self.gamma
        if gamma is not None and not (isinstance(gamma, (int, float)) and 0.0 < gamma < 1.0):
            raise DataError(f"the mapping's gamma is {gamma!r}; give a discount between 0 and 1")

    def to_dict(self) -> dict[str, Any]:
        """What was given, as plain values; ``as_mapping`` reads it."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        found["impute"] = {"" if column is None else column: method for column, method in self.impute}
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}
        return {name: value for name, value in plain.items() if value not in (None, [], {})}


# What open_transitions takes as a mapping.
MappingRequest = TableMapping | Mapping[str, Any] | str | os.PathLike[str]


def as_mapping(given: MappingRequest) -> TableMapping:
    """The record itself, a dict with its keys, or the path of a YAML file with them. Raises DataError."""
    if isinstance(given, TableMapping):
        return given
    if isinstance(given, Mapping):
        return mapping_from_dict(given, "the mapping")
    return mapping_from_dict(read_mapping_file(Path(given)), f"mapping file {os.fspath(given)}")


def mapping_from_dict(given: Mapping[Any, Any], source: str) -> TableMapping:
    """The record from plain values. Raises DataError for an unknown key, with the nearest known one."""
    known = [field.name for field in dataclasses.fields(TableMapping)]
    for key in given:
        if key not in known:
            raise DataError(f"{source} has the unknown key '{key}'; {nearest_name(str(key), known)}")
    return TableMapping(**{name: value for name, value in given.items() if value is not None})


def _names(role: str, value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) and name for name in names):
        raise DataError(f"the mapping's {role} is {value!r}; give a column name or a list of them")
    return tuple(names)


def _action_names(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, (tuple, list)) or not all(isinstance(name, (str, int)) for name in value):
        raise DataError(f"the mapping's action_names is {value!r}; give a list of the column's values")
    if len(set(map(str, value))) != len(value):
        raise DataError("the mapping's action_names holds a value twice; list each once")
    return tuple(value)


def _imputations(value: Any) -> tuple[tuple[str | None, str | float], ...]:
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        pairs: list[Any] = [(None, value)]
    elif isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, (tuple, list)) and all(
        isinstance(p, (tuple, list)) and len(p) == 2 for p in value
    ):
        pairs = list(value)
    else:
        raise DataError(f"the mapping's impute is {value!r}; give a method, or columns with a method each")
    return tuple((str(column) if column else None, _method(column, method)) for column, method in pairs)


def _method(column: Any, value: Any) -> str | float:
    if value in METHODS:
        return str(value)
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not math.isfinite(number):
        where = f" for {column}" if column else ""
        raise DataError(f"impute is {value!r}{where}; choose {', '.join(METHODS)} or a number")
    return number


def read_mapping_file(path: Path) -> dict[Any, Any]:
    """The top-level mapping of a YAML file; plain values only. Raises DataError in one line."""
    name = f"mapping file {path}"
    try:
        with path.open("rb") as file:
            found = parse_yaml(file.read(LARGEST_TEXT + 4).decode("utf-8-sig"))
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror}; check the path") from None
    except UnicodeDecodeError:
        raise DataError(f"{name} is no UTF-8 text; write lines of 'key: value'") from None
    except DuplicateKeyError as error:
        raise DataError(f"{name} names '{error}' twice; keep one of them") from None
    except Refused as error:
        raise DataError(f"{name} is not read: {error}") from None
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark else ""
        raise DataError(f"{name} is not valid YAML{line}; write lines of 'key: value'") from None
    if not isinstance(found, dict):
        raise DataError(f"{name} holds no keys; write lines such as 'reward: r'")
    return found
