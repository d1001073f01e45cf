"""Apply a mapping to the columns of a table: patterns, formulas, encodings, and
required types.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import polars as pl

from koffline.data.columns import in_natural_order, natural_key
from koffline.data.kinds import CSV
from koffline.data.spaces import ONE_HOT, Encoding
from koffline.data.table.mapping import CUT, Formula, TableMapping, parse_formula
from koffline.data.table.rows import TableRows
from koffline.data.table.texts import doubtful_spellings, one_spelling
from koffline.data.table.values import (
    DECIMAL_COMMAS,
    FLAGS_OR_IDS,
    NUMBERS,
    TEXT_WAYS,
    WHOLE,
    Problems,
    is_pattern,
    unread,
)
from koffline.errors import DataError, listed

_REWARD = "reward"  # key in ``impute`` for the reward, whether a column or a formula
_MOST_ONE_HOT = 1000
_MOST_CATEGORIES = 10_000
_LONGEST = 1000
_MOST_SHOWN = 60
_SINGLE = (
    "episode",
    "time",
    "weight",
    "behavior_probability",
    "behavior_log_probability",
    "cluster",
)
# roles that a formula may have
_COMPUTED = (
    "reward",
    "terminal",
    "truncated",
    "starts",
)
_SIGNS = set("+-*/<>=!(`")


def resolved(  # noqa: C901
    mapping: TableMapping, names: Sequence[str], problems: Problems
) -> tuple[TableMapping, tuple[Formula, ...]]:
    """The mapping with patterns replaced by columns and ``impute`` and ``encode`` by
    column; its formulas.

    Missing columns are problems.
    """
    names = [name for name in names if not is_pattern(name)]
    found: dict[str, Any] = {}
    formulas: dict[str, Formula] = {}
    for role in (*_SINGLE, *_COMPUTED, "by"):
        name = getattr(mapping, role)
        if name is None or name in names:
            continue
        with problems.noted():
            if role in _COMPUTED and _SIGNS & set(name):
                formula = parse_formula(name)
            else:
                formula = None
            formulas |= {name: formula} if formula else {}
            for part in formula.columns if formula else [name]:
                if part not in names:
                    problems.unknown(
                        part, f"{role} '{name}'" if formula else role, names
                    )
    single = {getattr(mapping, role) for role in (*_SINGLE, *_COMPUTED)}
    taken = single.union(*(each.columns for each in formulas.values()))
    for role in ("action", "next_observations", "observations"):
        found[role] = _fitting(names, getattr(mapping, role), role, taken, problems)
        taken |= set(found[role])
    action = found["action"]
    observations = found["observations"]
    following = found["next_observations"]
    for name in observations:
        if name in (mapping.reward, *action):
            problems.add(
                f"observations name {name}, the reward or the action, not known"
                " before it"
            )
    if mapping.by in observations:  # the observations hold this column
        found["by"] = None
    if following and observations and len(following) != len(observations):
        both = (
            f"{len(following)} columns are next_observations, {len(observations)}"
            " observations"
        )
        problems.add(f"{both}; name the same columns in the same order")
    states = {*observations, *following} - {*single, *action}
    for name in mapping.encode:
        if name not in names:
            problems.unknown(name, "encode", names)
        elif name not in states:
            what = "is no observation, or has another role too"
            problems.add(
                f"encode names {name}, which {what}; only observations are encoded"
            )
    encode = {name: each for name, each in mapping.encode.items() if name in states}
    partners = zip(following, observations, strict=False)
    found["encode"] = encode | {
        name: encode[now] for name, now in partners if now in encode
    }
    applied = mapping.model_copy(update=found)
    return applied.model_copy(
        update={"impute": _methods(applied, names, problems)}
    ), tuple(formulas.values())


def _methods(
    mapping: TableMapping, names: Sequence[str], problems: Problems
) -> dict[str, Any]:
    """Method for replacing missing values, by column."""
    methods: dict[str, Any] = {}
    states = (*mapping.observations, *mapping.next_observations)
    reward = mapping.reward or ""
    for name, method in sorted(mapping.impute.items(), key=lambda pair: pair[0] != ""):
        allowed = {*states, reward, mapping.weight}
        allowed |= (
            {*mapping.action, mapping.behavior, mapping.cluster}
            if method == CUT
            else set()
        )
        if name == _REWARD and name not in names:
            one = reward
        else:
            one = name
        if one not in (*names, reward, ""):
            problems.unknown(name, "impute", names)
        elif one not in allowed and name:
            said = "but only observations, reward and weight can be imputed"
            problems.add(
                f"impute names {name}, {said} (cut: also actions, probabilities and"
                " clusters)"
            )
        methods |= dict.fromkeys([one] if name else states, method)
    return methods


def _fitting(
    names: Sequence[str],
    patterns: Iterable[str],
    role: str,
    taken: set[Any],
    problems: Problems,
) -> tuple[str, ...]:
    """Columns with exactly these names, else columns without another role that match
    the wildcards.
    """
    found: dict[str, None] = {}
    present = set(names)
    for pattern in patterns:
        for part in (
            [pattern]
            if pattern in present
            else filter(None, map(str.strip, pattern.split(",")))
        ):
            if part in present:
                found[part] = None
            elif "*" not in part and "?" not in part:
                problems.unknown(part, role, names)
            else:
                expression = re.compile(
                    re.escape(part).replace(r"\*", ".*").replace(r"\?", "."), re.S
                )
                free = (name for name in names if name and name not in taken)
                fitting = sorted(filter(expression.fullmatch, free), key=natural_key)
                found |= dict.fromkeys(fitting)
                if not fitting:
                    problems.add(
                        f"no column fits {role} '{part}'; the table has {listed(names)}"
                    )
    return tuple(found)


def _is_number(kind: Any) -> bool:
    return bool(kind.is_numeric() or kind == pl.Boolean)


def _are_numbers(kind: Any) -> bool:
    return _is_number(getattr(kind, "inner", kind))


def _has_labels(kind: Any) -> bool:
    """Whether every value of a type can be written as a text."""
    return not kind.is_nested() and not isinstance(kind, pl.Duration)


def column_types(
    stored: Mapping[str, Any],
    roles: TableMapping,
    formulas: Sequence[Formula],
    problems: Problems,
) -> dict[str, Any]:
    """Types of the used columns; decimals, and texts that must be numbers, are float64.

    Columns of a wrong type, and lists beside other columns, are problems.
    """
    parts = {
        name: is_text
        for formula in formulas
        for name, is_text in formula.columns.items()
    }
    terms = [name for name, is_text in parts.items() if not is_text]
    several = roles.action if len(roles.action) > 1 else ()
    texts = {*roles.numbers, *terms, *several} - set(roles.encode)
    # what is not stored is a formula
    types = {name: stored[name] for name in (*roles.columns, *parts) if name in stored}
    for name in [name for name, kind in types.items() if kind == pl.Unknown]:
        problems.add(
            f"column {name} has a type that is not read; export it as numbers, texts or"
            " times"
        )
        del types[name]
    for name, kind in types.items():
        is_decimal = kind.is_decimal() and name in (*roles.numbers, *roles.action)
        if is_decimal or (kind == pl.String and name in texts):
            types[name] = pl.Float64()
        else:
            types[name] = kind
    states = (*roles.observations, *roles.next_observations)
    needed = "needed are numbers; name other columns, or export it as numbers"
    coded, plain = (
        [n for n in states if (n in roles.encode) == is_coded]
        for is_coded in (True, False)
    )
    rules: tuple[tuple[Iterable[str | None], Any, str], ...] = (
        (
            plain,
            _are_numbers,
            f"{needed}, or encode categories (--encode COLUMN=one-hot)",
        ),
        (
            (roles.episode, roles.cluster),
            lambda kind: not kind.is_nested(),
            "give one value per row",
        ),
        ((*coded, roles.by), _has_labels, "give one number, text or date per row"),
        (roles.action, lambda kind: kind == pl.String or _are_numbers(kind), needed),
        (
            (roles.reward, roles.behavior, roles.weight, *several, *terms),
            _is_number,
            needed,
        ),
        (
            [n for n, is_text in parts.items() if is_text],
            lambda kind: not kind.is_numeric() and _has_labels(kind),
            "compare it with a number",
        ),
        (
            (roles.terminal, roles.truncated, roles.starts),
            lambda kind: kind == pl.String or _is_number(kind),
            "give true and false, or 1 and 0",
        ),
        (
            (roles.time,),
            lambda kind: (
                kind.is_numeric()
                or (kind.is_temporal() and kind != pl.Time)
                or kind == pl.String
            ),
            "which gives no order in time; name another",
        ),
    )
    for names, fits, remedy in rules:
        for each in names:
            if each in types and not fits(types[each]):
                problems.add(f"column {each} is {types[each]}, {remedy}")
    for several in (roles.observations, roles.next_observations, roles.action):
        lists = [name for name in several if name in types and types[name].is_nested()]
        if lists and len(several) > 1:
            said = f"is {types[lists[0]]}, beside {len(several) - 1} other columns"
            problems.add(
                f"column {lists[0]} {said}; name one list, or columns of single numbers"
            )
        for name in roles.impute.keys() & lists:
            problems.add(
                f"column {name} holds lists, which cannot be imputed; drop those rows"
            )
    for now, later in zip(roles.observations, roles.next_observations, strict=False):
        if (
            now in types
            and later in types
            and types[now].is_nested() != types[later].is_nested()
        ):
            said = f"column {later} is {types[later]}, {now} is {types[now]}"
            problems.add(
                f"{said}; next observations must be of the same kind as observations"
            )
    return types


def ways_of_numbers(
    rows: TableRows, stored: Mapping[str, Any], source: str
) -> dict[str, str]:
    """How texts of numbers are read if decimals have commas, by column: with such
    commas, or as they are.

    One column has one meaning: where a comma occurs, points mark thousands. Raises
    DataError for columns in which all points may mark thousands or decimals.
    """
    names = [
        name
        for name, kind in rows.types.items()
        if kind == pl.Float64 and stored[name] == pl.String
    ]
    ways = {name: [NUMBERS, DECIMAL_COMMAS] for name in names}
    dotted: dict[str, str] = {}
    as_stored = replace(rows, types={name: pl.String() for name in names})
    for frame in as_stored.frames() if names else ():
        for column in frame:
            _narrow(ways, dotted, column)
    _refuse_ambiguous(ways, dotted, source)
    return {name: each[0] if each else DECIMAL_COMMAS for name, each in ways.items()}


def _narrow(
    ways: dict[str, list[str]], dotted: dict[str, str], column: pl.Series
) -> dict[str, pl.Series]:
    """Keep the ways that read all texts of a column, and note a text with a point;
    masks of those unread.
    """
    rest = unread(column, ways[column.name])
    ways[column.name] = [way for way, missed in rest.items() if not missed.any()]
    points = column.filter(column.str.contains(".", literal=True))
    if len(points):
        dotted.setdefault(column.name, points[0])
    return rest


def _refuse_ambiguous(
    ways: Mapping[str, Sequence[str]], dotted: Mapping[str, str], source: str
) -> None:
    """Raise DataError if a number with a point is one as it is, and another if decimals
    have commas.
    """
    for name, each in ways.items():
        if name in dotted and NUMBERS in each and DECIMAL_COMMAS in each:
            said = (
                f"holds {dotted[name][:_MOST_SHOWN]!r}, a thousand or a number with"
                " decimals"
            )
            raise DataError(
                f"{source}: column {name} {said}; write it without the point"
            )


def ways_of_texts(
    rows: TableRows, roles: TableMapping, is_own: bool, source: str
) -> dict[str, str]:
    """How texts are read, by column: times and flags; in CSV, where all values are
    texts, actions and ids.

    Episode ids stay texts, unless koffline wrote the table. Raises DataError for times
    that cannot be read.
    """
    numbers = (WHOLE, NUMBERS, *([DECIMAL_COMMAS] if roles.decimal_comma else []))
    if rows.kind == CSV:
        meant = (*roles.action, roles.cluster, roles.episode)
    else:
        meant = ()
    wanted: dict[Any, Sequence[str]] = dict.fromkeys(meant, numbers)
    wanted[roles.time] = (*numbers, *TEXT_WAYS[2:])
    ways = {
        name: list(each)
        for name, each in wanted.items()
        if name and rows.types.get(name) == pl.String
    }
    dotted: dict[str, str] = {}
    above = 0
    for frame in rows.only(list(ways)).frames() if ways else ():
        for column in frame:
            rest = _narrow(ways, dotted, column)
            if column.name == roles.time and not ways[column.name]:
                place = max(int(missed.arg_max() or 0) for missed in rest.values())
                text = column.str.strip_chars()[place][:_MOST_SHOWN]
                if above + place:
                    like = " like those above"
                else:
                    like = " that is read"
                said = (
                    f"holds {text!r} in row {above + place + 1}, no number or"
                    f" time{like}"
                )
                remedy = "write all in one way, as in 2024-01-31T12:00:00+01:00"
                raise DataError(f"{source}: column {column.name} {said}; {remedy}")
        above += frame.height
    _refuse_ambiguous(
        {name: each for name, each in ways.items() if name != roles.episode},
        dotted,
        source,
    )
    action = roles.action[0]
    if ways.get(action) == [] and not roles.action_names:
        _check_texts_in_every_file(rows, action)
    decided = {name: each[0] for name, each in ways.items() if each}
    if roles.episode in decided and not is_own and roles.episode != roles.time:
        decided[roles.episode] = FLAGS_OR_IDS
    for flag in (roles.terminal, roles.truncated, roles.starts):
        if flag is not None and rows.types.get(flag) == pl.String:
            decided.setdefault(flag, FLAGS_OR_IDS)
    return decided


def _check_texts_in_every_file(rows: TableRows, action: str) -> None:
    """Raise DataError if all actions of one file are numbers; those of the whole table
    are not.

    Such files may number the actions that others name.
    """
    kinds: dict[str, bool] = {}
    for file in rows.files if len(rows.files) > 1 else ():
        of_file = replace(rows, files=(file,), held=None, computed=()).only([action])
        is_number = [
            not unread(frame[action], [NUMBERS])[NUMBERS].any()
            for frame in of_file.frames()
        ]
        if is_number:
            kinds[file] = all(is_number)
    others = [
        file
        for file, is_number in kinds.items()
        if is_number != next(iter(kinds.values()))
    ]
    if others:
        if kinds[others[0]]:
            what = "numbers, in the first file texts"
        else:
            what = "texts, in the first file numbers"
        remedy = "write all files alike, or list all values as texts (--action-names)"
        raise DataError(f"{others[0]}: column {action} holds {what}; {remedy}")


def gather(values: set[Any], column: pl.Series) -> None:
    """Add the values of a column of categories to ``values``, up to a limit; long texts
    are shortened.
    """
    if len(values) <= _MOST_CATEGORIES:
        if column.dtype == pl.String:
            shown = column.str.head(_LONGEST + 1)
        else:
            shown = column
        shown = shown.drop_nulls().unique()
        values |= set(map(str, shown.to_list()) if shown.dtype.is_nested() else shown)


def _are_too_many(categories: Collection[Any], most: int) -> bool:
    return len(categories) > most or any(
        len(str(each)) > _LONGEST for each in categories
    )


def look_up(
    rows: TableRows, roles: TableMapping, problems: Problems
) -> tuple[dict[str, Encoding], dict[str, dict[str, str]]]:
    """Encodings by column, and other spellings of their categories.

    Categories that are not declared are looked up, in natural order. A next observation
    has the categories of its observation.
    """
    partner = dict(zip(roles.next_observations, roles.observations, strict=False))
    found: dict[str, set[str]] = defaultdict(set)
    for frame in rows.only(list(roles.encode)).frames() if roles.encode else ():
        for read in frame:
            gather(found[partner.get(read.name, read.name)], read.cast(pl.String))
    encodings: dict[str, Encoding] = {}
    spelled: dict[str, dict[str, str]] = {}
    for column, encoding in roles.encode.items():
        stored = found[partner.get(column, column)]
        spelled[column] = one_spelling(stored, encoding.categories)
        values = {spelled[column].get(value, value) for value in stored}
        doubtful = doubtful_spellings(stored, encoding.categories)
        if doubtful:
            said = (
                f"column {column} holds {listed(map(repr, doubtful[0]))}: one category,"
                " or several?"
            )
            remedy = "list each category once, or all spellings if they differ"
            problems.add(
                f"{said} Write them alike, or {remedy} (--encode"
                f" {column}={encoding.kind}:a,b,c)"
            )
        known = encoding.categories or tuple(in_natural_order(values))
        unknown = in_natural_order(values - set(known))
        if encoding.kind == ONE_HOT:
            most = _MOST_ONE_HOT
        else:
            most = _MOST_CATEGORIES
        encodings[column] = Encoding(encoding.kind, known)
        if _are_too_many(known, most):
            remedy = "group the rare ones, or leave the column out"
            problems.add(
                f"column {column} holds more than {most} categories, or long texts;"
                f" {remedy}"
            )
        elif not known:
            problems.add(f"column {column} has no value to encode; leave it out")
        elif unknown:
            said = (
                f"column {column} holds {listed(map(repr, unknown))}, no category of"
                f" {listed(known)}"
            )
            problems.add(
                f"{said}; list all of them (--encode {column}={encoding.kind}:a,b,c)"
            )
        others = {*rows.types, *roles.columns} - {column}
        for twice in others.intersection(encodings[column].names(column)):
            problems.add(
                f"column {column} would become {twice}, another column; rename that one"
            )
    return encodings, spelled


def encoded(
    roles: TableMapping, encodings: Mapping[str, Encoding]
) -> tuple[TableMapping, dict[str, str]]:
    """Roles with features in place of categories, and the original column of each
    feature.
    """
    origin = {
        name: column
        for column, each in encodings.items()
        for name in each.names(column)
    }
    changes: dict[str, Any] = {}
    for role in ("observations", "next_observations"):
        names = [
            encodings[n].names(n) if n in encodings else (n,)
            for n in getattr(roles, role)
        ]
        changes[role] = tuple(name for several in names for name in several)
    sources = {name: origin.get(name, name) for name in (*roles.columns, *origin)}
    changes["impute"] = {
        n: roles.impute[each] for n, each in sources.items() if each in roles.impute
    }
    return roles.model_copy(update=changes), origin


def action_spellings(
    values: set[Any], roles: TableMapping, source: str
) -> dict[str, str]:
    """Other spellings of the actions' names.

    Raises DataError if two may be one action, or two.
    """
    column = roles.action[0]
    doubtful = doubtful_spellings(values, roles.action_names)
    if doubtful:
        said = (
            f"column {column} holds {listed(map(repr, doubtful[0]))}: one action, or"
            " several?"
        )
        remedy = (
            "list each action once, or all spellings if they differ (--action-names)"
        )
        raise DataError(f"{source}: {said} Write them alike, or {remedy}")
    return one_spelling(values, roles.action_names)


def ordered_actions(
    values: set[Any], roles: TableMapping, source: str
) -> tuple[Any, ...]:
    """Values of a categorical action, in the order of ``action_names``, else in natural
    order.

    Raises DataError for unknown values, or too many.
    """
    names = roles.action_names
    column = roles.action[0]
    if _are_too_many(values, _MOST_CATEGORIES):
        said = (
            f"{_MOST_CATEGORIES} different actions, or a text of more than {_LONGEST}"
            " letters"
        )
        remedy = "group the rare ones, or name another column"
        raise DataError(f"{source}: column {column} holds more than {said}; {remedy}")
    if not names or not values:
        are_texts = all(isinstance(value, str) for value in values)
        return tuple(in_natural_order(values) if are_texts else sorted(values))
    kind = type(next(iter(values)))
    # names from a command line are texts: convert them to integers or booleans
    if kind is not str:
        spelled: dict[str, Any] = {"true": True, "false": False}
        if kind is int:
            spelled = {
                name: int(name)
                for name in map(str, names)
                if name.lstrip("-").isdecimal()
            }
        names = tuple(spelled.get(str(name).lower(), name) for name in names)
    unknown = sorted(values - set(names)) or [next(iter(values))]
    if unknown[0] not in names or {type(name) for name in names} != {kind}:
        said = f"holds {unknown[0]!r}, action_names are {names!r}"
        remedy = (
            "list all values as the column has them (in YAML put yes and no in quotes)"
        )
        raise DataError(f"{source}: column {column} {said}; {remedy}")
    return names
