"""Which column of a table is what: one record, from keywords, a dict or a YAML file, and what it finds."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from koffline.data.flat import KEYS
from koffline.errors import DataError, nearest_name
from koffline.untrusted.yaml_files import read_yaml_file

_MOST_LISTED = 20
# Of the columns that koffline writes.
_OWN_ROLES = """observations action reward next_observations terminal truncated episode time
    behavior_log_probability weight""".split()  # noqa: SIM905
_EXAMPLE = "--observations 'x_*' --action a --reward r --episode id --time t"


def _different(names: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(map(str, names))) != len(names):
        raise ValueError("a value twice")
    return names


def _no_flag(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a yes or no is no number")
    return value


_Name = Annotated[str, pydantic.Field(min_length=1)]
_Names = Annotated[
    tuple[_Name, ...], pydantic.BeforeValidator(lambda it: (it,) if isinstance(it, str) else it)
]
_Number = Annotated[float, pydantic.Field(allow_inf_nan=False), pydantic.BeforeValidator(_no_flag)]
# A method by column, or one for all observations, whose column is "".
_Imputed = Annotated[
    dict[str, Literal["zero", "mean", "forward"] | _Number],
    pydantic.BeforeValidator(lambda given: {"": given} if isinstance(given, (str, int, float)) else given),
]
_MANY: Any = pydantic.Field((), description="a column name or a list of them")
_ONE: Any = pydantic.Field(None, description="one column name")


class TableMapping(pydantic.BaseModel):
    """Columns of a table by their part in a transition; the keys of a YAML mapping file are the same.

    ``observations``, ``action`` and ``next_observations`` take one name or several, with ``*`` and ``?`` for
    any text and any letter; matches are taken in natural order (x_2 before x_10). ``episode`` may hold ids of
    any type, ``time`` numbers or times. ``action_names`` lists the values of a discrete action in
    the order of their numbers; without it texts are sorted. ``impute`` replaces missing values: a method
    (zero, mean, forward or a number) for the observations, or a mapping from column to method. ``gamma`` is
    the log's discount hint. Raises DataError where the record contradicts itself.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    observations: _Names = _MANY
    action: _Names = _MANY
    reward: _Name | None = _ONE
    episode: _Name | None = _ONE
    time: _Name | None = _ONE
    terminal: _Name | None = _ONE
    truncated: _Name | None = _ONE
    behavior_probability: _Name | None = _ONE
    behavior_log_probability: _Name | None = _ONE
    weight: _Name | None = _ONE
    next_observations: _Names = _MANY
    action_names: Annotated[
        tuple[pydantic.StrictStr | pydantic.StrictBool | pydantic.StrictInt, ...],
        pydantic.AfterValidator(_different),
    ] = pydantic.Field((), description="a list of the column's values, each once")
    impute: _Imputed = pydantic.Field(
        {}, description="zero, mean, forward or a number, for all observations or by column"
    )
    gamma: float | None = pydantic.Field(None, gt=0.0, lt=1.0, description="a discount between 0 and 1")

    def __init__(self, *values: Any, **given: Any) -> None:
        given |= dict(zip(type(self).model_fields, values, strict=False))
        try:
            super().__init__(**given)
        except pydantic.ValidationError as error:
            name, known = str(error.errors()[0]["loc"][0]), type(self).model_fields
            if name not in known:
                said = f"the mapping has the unknown key '{name}'; {nearest_name(name, known)}"
            else:
                said = f"the mapping's {name} is {given[name]!r}; give {known[name].description}"
            raise DataError(said) from None
        missing = [name for name in ("observations", "action", "reward") if not getattr(self, name)]
        if missing:
            raise DataError(f"the mapping lacks {', '.join(missing)}; name columns, as in {_EXAMPLE}")
        if self.behavior_probability and self.behavior_log_probability:
            raise DataError("the mapping names behavior_probability and its logarithm; keep one of them")

    @property
    def behavior(self) -> str | None:
        """The column of the behaviour's probabilities, or of their logarithms."""
        return self.behavior_probability or self.behavior_log_probability

    @property
    def numbers(self) -> tuple[str, ...]:
        """Columns that must hold numbers."""
        named = (*self.observations, *self.next_observations, self.reward, self.behavior, self.weight)
        return tuple(dict.fromkeys(filter(None, named)))

    @property
    def measured(self) -> tuple[str, ...]:
        """Columns of numbers, and of actions."""
        return tuple(dict.fromkeys((*self.numbers, *self.action)))

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that is read, each once."""
        named = (*self.measured, self.episode, self.time, self.terminal, self.truncated)
        return tuple(dict.fromkeys(filter(None, named)))

    @property
    def stands_alone(self) -> bool:
        """Whether every row is a transition by itself."""
        return bool(self.next_observations) and self.episode is None and self.time is None


# What open_transitions takes as a mapping.
MappingRequest = TableMapping | Mapping[str, Any] | str | os.PathLike[str]


def as_mapping(given: MappingRequest) -> TableMapping:
    """The record itself, a dict with its keys, or the path of a YAML file with them. Raises DataError."""
    if isinstance(given, TableMapping):
        return given
    if not isinstance(given, Mapping):
        given = read_mapping_file(Path(given))
    return TableMapping(**{str(name): value for name, value in given.items() if value is not None})


def read_mapping_file(path: Path) -> dict[Any, Any]:
    """The top-level mapping of a YAML file; plain values only. Raises DataError in one line."""
    return read_yaml_file(path, f"mapping file {path}", DataError)


def resolved(mapping: TableMapping, names: Sequence[str], source: str) -> TableMapping:
    """The mapping with columns for its patterns, and with a method for each column that is imputed.

    Raises DataError with the nearest name for a column that is not there.
    """
    check_unique(names, source)
    present, taken = set(names), set()
    for role in ("reward", "episode", "time", "terminal", "truncated", "weight", "behavior"):
        name = getattr(mapping, role)
        if name is not None and name not in present:
            raise _unknown(name, role, names, source)
        taken.add(name)
    found: dict[str, Any] = {}
    for role in ("action", "next_observations", "observations"):
        found[role] = _fitting(names, getattr(mapping, role), role, taken, source)
        taken |= set(found[role])
    observations, following = found["observations"], found["next_observations"]
    if following and len(following) != len(observations):
        both = f"{len(following)} columns are next_observations, {len(observations)} observations"
        raise DataError(f"{source}: {both}; name the same columns in the same order")
    states, methods = (*observations, *following), {}
    allowed = {*states, mapping.reward, mapping.weight}
    for pattern, method in sorted(mapping.impute.items(), key=lambda pair: pair[0] != ""):
        chosen = _fitting(names, [pattern], "impute", set(), source) if pattern else states
        if pattern in present and pattern not in allowed:
            able = "only observations, reward and weight can be imputed"
            raise DataError(f"{source}: impute names {pattern}, but {able}; drop the rows without it")
        methods.update({name: method for name in chosen if name in allowed})
    return mapping.model_copy(update={**found, "impute": methods})


def _fitting(
    names: Sequence[str], patterns: Iterable[str], role: str, taken: set[Any], source: str
) -> tuple[str, ...]:
    """Columns of exactly these names, else those the wildcards fit that have no other role."""
    found: dict[str, None] = {}
    present = set(names)
    for pattern in patterns:
        parts = [pattern] if pattern in present else filter(None, map(str.strip, pattern.split(",")))
        for part in parts:
            fitting = [part]
            if part not in present:
                if "*" not in part and "?" not in part:
                    raise _unknown(part, role, names, source)
                expression = re.compile(re.escape(part).replace(r"\*", ".*").replace(r"\?", "."), re.S)
                fitting = sorted(
                    (n for n in names if n not in taken and expression.fullmatch(n)), key=natural_key
                )
            if not fitting:
                raise DataError(f"{source}: no column fits {role} '{part}'; the table has {_listed(names)}")
            found |= dict.fromkeys(fitting)
    return tuple(found)


def own_mapping(names: Iterable[str]) -> TableMapping | None:
    """The mapping of a table that koffline wrote, told by its column names; None for any other."""
    present = set(names)
    found: dict[str, Any] = {}
    for role, (key, *_) in zip(_OWN_ROLES, KEYS.values(), strict=True):
        found |= {role: key} if key in present else {role: f"{key}_*"} if f"{key}_0" in present else {}
    return TableMapping(**found) if {"observations", "action", "reward", "terminal"} <= set(found) else None


def unmapped(names: Sequence[str], source: str, kind: str) -> DataError:
    """The error for a table without a mapping: its columns, and options of an example."""
    return DataError(
        f"{source} is a {kind} table with columns {_listed(names)}; say what they are, as in {_EXAMPLE} "
        "(or --mapping FILE.yaml; in Python mapping=)"
    )


def natural_key(name: str) -> list[Any]:
    """Sorts x_2 before x_10."""
    return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in re.split(r"(\d+)", name)]


def check_unique(names: Sequence[str], source: str) -> None:
    """Raise DataError for a table without columns, or with two of one name."""
    if not names:
        raise DataError(f"{source} has no columns; export the table again with a header")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(f"{source} has more than one column named {_listed(twice)}; rename them")


def column_fault(source: str, column: str | None, words: str) -> DataError:
    """The error for a column of a table."""
    return DataError(f"{source}: column {column} {words}")


def _unknown(name: str, role: str, names: Sequence[str], source: str) -> DataError:
    return DataError(f"{source} has no column '{name}' ({role}); {nearest_name(name, names)}")


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(str(name) for name in names[:_MOST_LISTED])
    return shown + (f", … ({len(names)} in all)" if len(names) > _MOST_LISTED else "")
