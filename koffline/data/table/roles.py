"""A mapping applied to the columns of a table: patterns, formulas and what is said of columns by name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import polars as pl

from koffline.data.features import ONE_HOT, Encoding
from koffline.data.table.computed import Computed, Formula, parse_formula
from koffline.data.table.mapping import CUT, TableMapping
from koffline.data.table.problems import (
    Problems,
    check_unique,
    is_pattern,
    listed,
    natural_key,
    unknown_column,
)
from koffline.data.table.rows import TableRows

_REWARD = "reward"  # key in ``impute`` for the reward, whether a column or a formula
_MOST_ONE_HOT, _MOST_CATEGORIES, _LONGEST = 1000, 10_000, 1000
_BEHAVIOR = ("behavior_probability", "behavior_log_probability")
_SINGLE = ("episode", "time", "weight", *_BEHAVIOR)
_COMPUTED = ("reward", "terminal", "truncated")  # roles that a formula may have
_SIGNS = set("+-*/<>=!(`")


def resolved(mapping: TableMapping, names: Sequence[str], problems: Problems) -> TableMapping:
    """The mapping with columns for its patterns, methods by imputed column and encodings by column.

    A column that is not there is a problem, and has no role.
    """
    source = problems.source
    check_unique(names, source)
    names = [name for name in names if not is_pattern(name)]
    present = set(names)
    found: dict[str, Any] = {}
    for role in (*_SINGLE, "by"):
        if (name := getattr(mapping, role)) is not None and name not in present:
            problems.add(str(unknown_column(name, role, names, source)))
            found[role] = None
    single = {getattr(mapping, role) for role in (*_SINGLE, *_COMPUTED)}
    taken = set(single)
    for role in _COMPUTED:
        found[role] = None
        with problems.noted():
            formula = _formula(mapping, role, names, source)
            found[role] = getattr(mapping, role)
            taken |= set() if formula is None else {*formula.numbers, *formula.texts}
    for role in ("action", "next_observations", "observations"):
        found[role] = _fitting(names, getattr(mapping, role), role, taken, problems)
        taken |= set(found[role])
    observations, following = found["observations"], found["next_observations"]
    for name in observations:
        if name in (found["reward"], *found["action"]):
            problems.add(f"observations name {name}, the reward or the action, not known before it")
    if mapping.by in observations:  # the observations hold this column
        found["by"] = None
    if following and observations and len(following) != len(observations):
        both = f"{len(following)} columns are next_observations, {len(observations)} observations"
        problems.add(f"{both}; name the same columns in the same order")
    states = (*observations, *following)
    found["encode"], taken_else = {}, {*single, *found["action"]}
    for pattern, encoding in mapping.encode.items():
        for name in _fitting(states if "*" in pattern else names, [pattern], "encode", set(), problems):
            if name in states and name not in taken_else:
                found["encode"][name] = encoding
            else:
                what = "has another role too" if name in states else "is no observation"
                problems.add(f"encode names {name}, which {what}; only observations are encoded")
    partners = zip(following, observations, strict=False)
    found["encode"] |= {n: found["encode"][o] for n, o in partners if o in found["encode"]}
    applied = mapping.model_copy(update=found)
    return applied.model_copy(update={"impute": _methods(applied, states, names, problems)})


def _methods(
    mapping: TableMapping, states: tuple[str, ...], names: Sequence[str], problems: Problems
) -> dict[str, Any]:
    """Method that replaces missing values, by column."""
    methods: dict[str, Any] = {}
    filled, reward = {*states, mapping.reward, mapping.weight}, mapping.reward or ""
    cut = {*filled, *mapping.action, mapping.behavior}
    for pattern, method in sorted(mapping.impute.items(), key=lambda pair: pair[0] != ""):
        allowed = cut if method == CUT else filled
        if pattern in (_REWARD, reward) and _REWARD not in names:
            chosen: Sequence[str] = [reward]
        else:
            chosen = _fitting(names, [pattern], "impute", set(), problems) if pattern else states
        if pattern in names and pattern not in allowed:
            remedy = (
                f"end the episode before such a row ({pattern}=cut)"
                if pattern in cut
                else "take it out of impute"
            )
            said = f"impute names {pattern}, but only observations, reward and weight can be imputed"
            problems.add(f"{said}; {remedy}")
        methods.update({name: method for name in chosen if name in allowed})
    return methods


def formulas_of(mapping: TableMapping, names: Sequence[str], source: str) -> tuple[Formula, ...]:
    """The formulas among the roles, each once. Raises DataError for an unknown column."""
    found = (_formula(mapping, role, names, source) for role in _COMPUTED)
    return tuple({formula.text: formula for formula in found if formula is not None}.values())


def _formula(mapping: TableMapping, role: str, names: Sequence[str], source: str) -> Formula | None:
    """The formula of a role, None where a column has it. Raises DataError for an unknown column."""
    text = getattr(mapping, role) or ""
    if text in names or not text:
        return None
    formula = parse_formula(text) if _SIGNS & set(text) else None
    if formula is None:
        raise unknown_column(text, role, names, source)
    for name in (*formula.numbers, *formula.texts):
        if name not in names:
            raise unknown_column(name, f"{role} '{text}'", names, source)
    return formula


def _fitting(
    names: Sequence[str], patterns: Iterable[str], role: str, taken: set[Any], problems: Problems
) -> tuple[str, ...]:
    """Columns of exactly these names, else columns without another role that match the wildcards."""
    found: dict[str, None] = {}
    present = set(names)
    for pattern in patterns:
        parts = [pattern] if pattern in present else filter(None, map(str.strip, pattern.split(",")))
        for part in parts:
            fitting = [part]
            if part not in present:
                if "*" not in part and "?" not in part:
                    problems.add(str(unknown_column(part, role, names, problems.source)))
                    continue
                expression = re.compile(re.escape(part).replace(r"\*", ".*").replace(r"\?", "."), re.S)
                fitting = sorted(
                    (n for n in names if n and n not in taken and expression.fullmatch(n)), key=natural_key
                )
            if not fitting:
                problems.add(f"no column fits {role} '{part}'; the table has {listed(names)}")
            found |= dict.fromkeys(fitting)
    return tuple(found)


def _is_number(kind: Any) -> bool:
    return bool(kind.is_numeric() or kind == pl.Boolean)


def fitting_types(
    types: Mapping[str, Any], roles: TableMapping, formulas: Sequence[Formula], problems: Problems
) -> tuple[TableMapping, dict[str, Any]]:
    """Roles and types without columns of a wrong type, or lists beside others: those are problems."""
    states = (*roles.observations, *roles.next_observations)
    numbers = "needed are numbers; name other columns, or export it as numbers"
    coded = [name for name in states if name in roles.encode]
    plain = [name for name in states if name not in roles.encode]
    terms = [name for formula in formulas for name in formula.numbers]
    texts = [name for formula in formulas for name in formula.texts]
    rules: tuple[tuple[Iterable[str | None], Any, str], ...] = (
        (plain, lambda kind: _is_number(getattr(kind, "inner", kind)),
         f"{numbers}, or encode categories (--encode COLUMN=one-hot)"),
        ((*coded, roles.episode, roles.by), lambda kind: not kind.is_nested() and kind != pl.Unknown,
         "give one value per row"),
        (roles.action, lambda kind: kind == pl.String or _is_number(getattr(kind, "inner", kind)), numbers),
        ((roles.reward, roles.behavior, roles.weight, *terms), _is_number, numbers),
        (texts, lambda kind: not kind.is_numeric() and not kind.is_nested(), "compare it with a number"),
        ((roles.terminal, roles.truncated), lambda kind: kind == pl.String or _is_number(kind),
         "give true and false, or 1 and 0"),
        ((roles.time,), lambda kind: kind.is_numeric() or kind.is_temporal() or kind == pl.String,
         "which gives no order in time; name another"),
    )  # fmt: skip
    wrong: dict[str, str] = {}
    for names, fits, remedy in rules:
        there = [name for name in names if name and name in types]
        wrong |= {name: f"is {types[name]}, {remedy}" for name in there if not fits(types[name])}
    for names in (roles.observations, roles.next_observations, roles.action):
        lists = [name for name in names if name in types and types[name].is_nested() and name not in wrong]
        if lists and len(names) > 1:
            said = f"is {types[lists[0]]}, beside {len(names) - 1} other columns"
            wrong[lists[0]] = f"{said}; name one list, or columns of single numbers"
        for name in roles.impute.keys() & lists:
            wrong[name] = "holds lists, which cannot be imputed; drop those rows"
    for name, words in wrong.items():
        problems.add(f"column {name} {words}")
    lost = [each.text for each in formulas if {*each.numbers, *each.texts} & wrong.keys()]
    return roles.without({*wrong, *lost}), {name: kind for name, kind in types.items() if name not in wrong}


def compute_columns(
    rows: TableRows, roles: TableMapping, formulas: Sequence[Formula], problems: Problems
) -> tuple[TableRows, TableMapping, dict[str, str]]:
    """Rows with the columns of formulas and encoded observations, roles that name them, and what was encoded.

    The last are columns by the features that they became. Categories that are not declared are looked up, in
    natural order; a next observation has those of its observation.
    """
    partner = dict(zip(roles.next_observations, roles.observations, strict=False))
    found: dict[str, set[str]] = {partner.get(column, column): set() for column in roles.encode}
    for frame in rows.frames(list(roles.encode)) if roles.encode else ():
        for read in frame:
            values = found[partner.get(read.name, read.name)]
            texts = read.cast(pl.String).drop_nulls().unique()
            if len(values) <= _MOST_CATEGORIES:
                values |= {text[: _LONGEST + 1] for text in texts}
    encodings: dict[str, Encoding] = {}
    for column, encoding in roles.encode.items():
        values = found[partner.get(column, column)]
        known = encoding.categories or tuple(sorted(values, key=natural_key))
        unknown = sorted(values - set(known), key=natural_key)
        most = _MOST_ONE_HOT if encoding.kind == ONE_HOT else _MOST_CATEGORIES
        if len(known) > most or any(len(name) > _LONGEST for name in known):
            remedy = "group the rare ones, or leave the column out"
            problems.add(f"column {column} holds more than {most} categories, or long texts; {remedy}")
        elif not known:
            problems.add(f"column {column} has no value to encode; leave it out")
        elif unknown:
            said = f"holds {listed(list(map(repr, unknown)))}, which encode does not list"
            problems.add(f"column {column} {said}; list all its categories, or none to have them looked up")
        else:
            encodings[column] = Encoding(encoding.kind, known)
    roles = roles.without(set(roles.encode) - set(encodings))
    origin = {name: column for column, each in encodings.items() for name in each.names(column)}
    changes: dict[str, Any] = {"impute": {}}
    for role in ("observations", "next_observations"):
        names = [encodings[n].names(n) if n in encodings else (n,) for n in getattr(roles, role)]
        changes[role] = tuple(name for several in names for name in several)
    for name in (*roles.columns, *origin):
        if (method := roles.impute.get(origin.get(name, name))) is not None:
            changes["impute"][name] = method
    roles = roles.model_copy(update=changes)
    outside = [name for name in roles.columns if name not in origin]
    if twice := [name for name in origin if name in outside or name in set(rows.types) - {origin[name]}]:
        problems.add(f"column {origin[twice[0]]} would become {twice[0]}, another column; rename that one")
        return rows, roles.without(twice), {}
    left = tuple(each for each in formulas if each.text in outside)
    kept = tuple(name for name in outside if name not in {each.text for each in left})
    return rows.with_computed(Computed(kept, left, encodings)), roles, origin
