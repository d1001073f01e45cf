"""Apply a mapping to the columns of a table: patterns, formulas, encodings, and
required types.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import polars as pl

from koffline.data.columns import in_natural_order, natural_key
from koffline.data.kinds import CSV
from koffline.data.spaces import ONE_HOT, Encoding
from koffline.data.table.column_names import is_pattern
from koffline.data.table.column_types import ColumnType, Types
from koffline.data.table.mapping import CUT, Formula, TableMapping, parse_formula
from koffline.data.table.problems import Problems
from koffline.data.table.table_rows import TableRows
from koffline.data.table.text_ways import (
    DECIMAL_COMMAS,
    FLAGS_OR_IDS,
    NUMBERS,
    TEXT_WAYS,
    WHOLE,
    declared_times,
    unread,
)
from koffline.data.table.texts import doubtful_spellings, one_spelling
from koffline.errors import DataError, listed

_REWARD = "reward"  # key in ``impute`` for the reward, whether a column or a formula
_MOST_ONE_HOT = 1000
_MOST_CATEGORIES = 10_000
_LONGEST = 1000
_MOST_SHOWN = 60
# roles that are one column
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
# roles that may be several columns, in the order in which patterns take columns
_OF_SEVERAL = (
    "action",
    "next_observations",
    "action_mask",
    "next_action_mask",
    "observations",
)
_SIGNS = set("+-*/<>=!(`")  # of formulas; a column's name with one is in backticks


def resolved(
    mapping: TableMapping, names: Sequence[str], problems: Problems
) -> tuple[TableMapping, tuple[Formula, ...]]:
    """The mapping with patterns replaced by columns and ``impute`` and ``encode`` by
    column; its formulas.

    names: the table's columns. Missing columns are problems.
    """
    names = [name for name in names if not is_pattern(name)]
    formulas = _formulas(mapping, names, problems)
    single = {getattr(mapping, role) for role in (*_SINGLE, *_COMPUTED)}
    taken = single.union(*(formula.columns for formula in formulas))
    changes: dict[str, Any] = {}
    for role in _OF_SEVERAL:
        columns = _fitting(names, getattr(mapping, role), role, taken, problems)
        changes[role] = columns
        taken |= set(columns)
    observations = changes["observations"]
    following = changes["next_observations"]
    for name in observations:
        if name in (mapping.reward, *changes["action"]):
            problems.add(
                f"observations name {name}, the reward or the action, not known"
                " before it"
            )
    if mapping.by in observations:  # the observations hold this column
        changes["by"] = None
    if following and observations and len(following) != len(observations):
        problems.add(
            f"{len(following)} columns are next_observations, {len(observations)}"
            " observations; name the same columns in the same order"
        )
    states = {*observations, *following} - {*single, *changes["action"]}
    encode = _encodings_of_states(mapping, names, states, problems)
    # A next observation is encoded as its observation is.
    partners = zip(following, observations, strict=False)
    changes["encode"] = encode | {
        later: encode[now] for later, now in partners if now in encode
    }
    changes["action_names"] = tuple(
        name for name in mapping.action_names if name not in mapping.no_action
    )
    applied = mapping.model_copy(update=changes)
    methods = _methods(applied, names, problems)
    return applied.model_copy(update={"impute": methods}), formulas


def _formulas(
    mapping: TableMapping, names: Sequence[str], problems: Problems
) -> tuple[Formula, ...]:
    """The formulas of a mapping, each once.

    Columns of formulas, and of roles with one column, that the table does not have are
    problems, and so are formulas that cannot be read.
    """
    formulas: dict[str, Formula] = {}
    for role in (*_SINGLE, *_COMPUTED, "by"):
        name = getattr(mapping, role)
        if name is None or name in names:
            continue
        is_formula = role in _COMPUTED and _SIGNS & set(name)
        if not is_formula:
            problems.unknown(name, role, names)
            continue
        with problems.noted():
            formulas[name] = parse_formula(name)
            for column in formulas[name].columns:
                if column not in names:
                    problems.unknown(column, f"{role} '{name}'", names)
    return tuple(formulas.values())


def _encodings_of_states(
    mapping: TableMapping, names: Sequence[str], states: set[str], problems: Problems
) -> dict[str, Encoding]:
    """The mapping's encodings of columns of observations, by column; encodings of other
    columns are problems.
    """
    for name in mapping.encode:
        if name not in names:
            problems.unknown(name, "encode", names)
        elif name not in states:
            problems.add(
                f"encode names {name}, which is no observation, or has another role"
                " too; only observations are encoded"
            )
    return {
        name: encoding for name, encoding in mapping.encode.items() if name in states
    }


def _methods(
    mapping: TableMapping, names: Sequence[str], problems: Problems
) -> dict[str, str | float]:
    """Method for replacing missing values, by column: of ``impute``, whose key "" is
    every observation, and whose key `_REWARD` may be a column or the reward's formula.

    Columns that do not exist, or cannot be imputed, are problems.
    """
    methods: dict[str, str | float] = {}
    states = (*mapping.observations, *mapping.next_observations)
    reward = mapping.reward or ""
    # The method for all observations comes first: those of single columns replace it.
    for name, method in sorted(mapping.impute.items(), key=lambda pair: pair[0] != ""):
        if not name:
            methods |= dict.fromkeys(states, method)
            continue
        column = name
        if name == _REWARD and name not in names:
            column = reward
        allowed = {*states, reward, mapping.weight}
        if method == CUT:
            allowed |= {*mapping.action, mapping.behavior, mapping.cluster}
            allowed |= {*mapping.action_mask}
        if column not in (*names, reward, ""):
            problems.unknown(name, "impute", names)
        elif column not in allowed:
            problems.add(
                f"impute names {name}, but only observations, reward and weight can be"
                " imputed (cut: also actions, probabilities and clusters)"
            )
        methods[column] = method
    if mapping.no_action and mapping.action:
        methods.setdefault(mapping.action[0], CUT)
    return methods


def _fitting(
    names: Sequence[str],
    patterns: Iterable[str],
    role: str,
    taken: set[str | None],
    problems: Problems,
) -> tuple[str, ...]:
    """Columns of a role: those with exactly these names, and those without another role
    that match a wildcard, in natural order.

    names: the table's columns. patterns: names or wildcards, or several with commas
    between them. taken: columns that have another role. What fits no column is a
    problem.
    """
    columns: dict[str, None] = {}
    present = set(names)
    for pattern in patterns:
        if pattern in present:  # a name may hold a comma
            columns[pattern] = None
            continue
        for part in filter(None, map(str.strip, pattern.split(","))):
            if part in present:
                columns[part] = None
            elif "*" not in part and "?" not in part:
                problems.unknown(part, role, names)
            else:
                expression = re.compile(
                    re.escape(part).replace(r"\*", ".*").replace(r"\?", "."), re.S
                )
                free = (name for name in names if name and name not in taken)
                fitting = sorted(filter(expression.fullmatch, free), key=natural_key)
                columns |= dict.fromkeys(fitting)
                if not fitting:
                    problems.add(
                        f"no column fits {role} '{part}'; the table has {listed(names)}"
                    )
    return tuple(columns)


def _is_number(kind: ColumnType) -> bool:
    return bool(kind.is_numeric() or kind == pl.Boolean)


def _are_numbers(kind: ColumnType) -> bool:
    return _is_number(getattr(kind, "inner", kind))


def _is_single(kind: ColumnType) -> bool:
    """Whether a value of a type is one value, no list or struct."""
    return not kind.is_nested()


def _has_labels(kind: ColumnType) -> bool:
    """Whether every value of a type can be written as a text."""
    return not kind.is_nested() and not isinstance(kind, pl.Duration)


def _has_words(kind: ColumnType) -> bool:
    """Whether values of a type can be compared with a text."""
    return not kind.is_numeric() and _has_labels(kind)


def _has_actions(kind: ColumnType) -> bool:
    return kind == pl.String or _are_numbers(kind)


def _has_flags(kind: ColumnType) -> bool:
    return kind == pl.String or _is_number(kind)


def _has_mask(kind: ColumnType) -> bool:
    """Whether a type is of flags, or of lists of numbers or texts."""
    return _has_flags(getattr(kind, "inner", kind))


def _has_order_in_time(kind: ColumnType) -> bool:
    is_date = kind.is_temporal() and kind != pl.Time
    return kind.is_numeric() or is_date or kind == pl.String


@dataclass(frozen=True)
class _TypeRule:
    """What the type of ``columns`` must fulfil, and what to do where it does not; a
    column may be None or one that is not read.
    """

    columns: Iterable[str | None]
    fits: Callable[[ColumnType], bool]
    remedy: str


def column_types(
    stored: Types,
    roles: TableMapping,
    formulas: Sequence[Formula],
    problems: Problems,
) -> dict[str, ColumnType]:
    """Types of the used columns; decimals, and texts that must be numbers, are float64.

    stored: types by column, as in the file. Columns of a wrong type, and lists beside
    other columns, are problems.
    """
    parts = {
        name: is_text
        for formula in formulas
        for name, is_text in formula.columns.items()
    }
    terms = [name for name, is_text in parts.items() if not is_text]
    several_actions: tuple[str, ...] = ()
    if len(roles.action) > 1:
        several_actions = roles.action
    are_numbers = {*roles.numbers, *terms, *several_actions} - set(roles.encode)
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
        if is_decimal or (kind == pl.String and name in are_numbers):
            types[name] = pl.Float64()
    for rule in _type_rules(roles, parts, several_actions):
        for column in rule.columns:
            if column in types and not rule.fits(types[column]):
                problems.add(f"column {column} is {types[column]}, {rule.remedy}")
    _check_lists(roles, types, problems)
    _check_declared_times(roles, types, problems)
    return types


def _check_declared_times(
    roles: TableMapping, types: Types, problems: Problems
) -> None:
    """Add problems for forms and zones of times that the file has typed already.

    types: by column that is read.
    """
    kind = types.get(roles.time or "")
    if kind is None or kind == pl.String:
        return
    if roles.time_format:
        problems.add(
            f"column {roles.time} is {kind}, and time_format is for texts; leave it out"
        )
    is_local = isinstance(kind, pl.Datetime) and kind.time_zone is None
    if roles.time_zone and not is_local:
        problems.add(
            f"column {roles.time} is {kind}, and time_zone is for times without a UTC"
            " offset; leave it out"
        )


def _type_rules(
    roles: TableMapping, parts: Mapping[str, bool], several_actions: tuple[str, ...]
) -> tuple[_TypeRule, ...]:
    """What the types of columns must fulfil by their roles.

    parts: columns of formulas, True if compared with texts. several_actions: columns
    of an action that has more than one.
    """
    states = (*roles.observations, *roles.next_observations)
    terms = [name for name, is_text in parts.items() if not is_text]
    compared = [name for name, is_text in parts.items() if is_text]
    needed = "needed are numbers; name other columns, or export it as numbers"
    return (
        _TypeRule(
            [name for name in states if name not in roles.encode],
            _are_numbers,
            f"{needed}, or encode categories (--encode COLUMN=one-hot)",
        ),
        _TypeRule((roles.episode, roles.cluster), _is_single, "give one value per row"),
        _TypeRule(
            (*[name for name in states if name in roles.encode], roles.by),
            _has_labels,
            "give one number, text or date per row",
        ),
        _TypeRule(roles.action, _has_actions, needed),
        _TypeRule(
            (roles.reward, roles.behavior, roles.weight, *several_actions, *terms),
            _is_number,
            needed,
        ),
        _TypeRule(
            (*roles.action_mask, *roles.next_action_mask),
            _has_mask,
            "give a column of 0 and 1 for each action, or one of lists",
        ),
        _TypeRule(compared, _has_words, "compare it with a number"),
        _TypeRule(
            (roles.terminal, roles.truncated, roles.starts),
            _has_flags,
            "give true and false, or 1 and 0",
        ),
        _TypeRule(
            (roles.time,),
            _has_order_in_time,
            "which gives no order in time; name another",
        ),
    )


def _check_lists(roles: TableMapping, types: Types, problems: Problems) -> None:
    """Add problems for lists beside other columns, lists that are imputed, and next
    observations of another kind than the observations. types: by column that is read.
    """
    by_role = [getattr(roles, role) for role in _OF_SEVERAL]
    for columns in by_role:
        lists = [name for name in columns if name in types and types[name].is_nested()]
        if lists and len(columns) > 1:
            problems.add(
                f"column {lists[0]} is {types[lists[0]]}, beside {len(columns) - 1}"
                " other columns; name one list, or columns of single numbers"
            )
        for name in sorted(roles.impute.keys() & lists):
            problems.add(
                f"column {name} holds lists, which cannot be imputed; drop those rows"
            )
    for now, later in zip(roles.observations, roles.next_observations, strict=False):
        if now not in types or later not in types:
            continue
        if types[now].is_nested() != types[later].is_nested():
            problems.add(
                f"column {later} is {types[later]}, {now} is {types[now]}; next"
                " observations must be of the same kind as observations"
            )


def ways_of_numbers(rows: TableRows, stored: Types, source: str) -> dict[str, str]:
    """How texts of numbers are read if decimals have commas, by column: with such
    commas, or as they are.

    One column has one meaning: where a comma occurs, points mark thousands. stored:
    types by column, as in the file. Raises DataError for columns in which all points
    may mark thousands or decimals.
    """
    names = [
        name
        for name, kind in rows.types.items()
        if kind == pl.Float64 and stored[name] == pl.String
    ]
    if not names:
        return {}
    ways = {name: [NUMBERS, DECIMAL_COMMAS] for name in names}
    dotted: dict[str, str] = {}
    as_stored = replace(rows, types={name: pl.String() for name in names})
    for frame in as_stored.frames():
        for column in frame:
            _narrow(ways, dotted, column)
    _refuse_ambiguous(ways, dotted, source)
    # Where no way reads all texts, the rows are refused when they are read.
    return {name: next(iter(left), DECIMAL_COMMAS) for name, left in ways.items()}


def _narrow(
    ways: dict[str, list[str]], dotted: dict[str, str], column: pl.Series
) -> dict[str, pl.Series]:
    """Keep the ways that read all texts of a column; masks (N,) of the texts that each
    way does not read.

    Changes ``ways`` and ``dotted``, a text with a point, both by column.
    """
    missed_by = unread(column, ways[column.name])
    ways[column.name] = [way for way, missed in missed_by.items() if not missed.any()]
    points = column.filter(column.str.contains(".", literal=True))
    if len(points):
        dotted.setdefault(column.name, points[0])
    return missed_by


def _refuse_ambiguous(
    ways: Mapping[str, Sequence[str]], dotted: Mapping[str, str], source: str
) -> None:
    """Raise DataError if a number with a point is one as it is, and another if decimals
    have commas.

    ways: that read all texts, and dotted: a text with a point, both by column.
    """
    for name, left in ways.items():
        if name in dotted and NUMBERS in left and DECIMAL_COMMAS in left:
            shown = f"{dotted[name][:_MOST_SHOWN]!r}"
            raise DataError(
                f"{source}: column {name} holds {shown}, a thousand or a number with"
                " decimals; write it without the point"
            )


def ways_of_texts(
    rows: TableRows, roles: TableMapping, is_own: bool, source: str
) -> dict[str, str]:
    """How texts are read, by column: times and flags; in CSV, where all values are
    texts, actions and ids.

    Episode ids stay texts, unless koffline wrote the table (``is_own``). Raises
    DataError for times that cannot be read.
    """
    ways = _possible_ways(rows, roles)
    dotted = _narrow_by_rows(rows, ways, roles, source)
    _refuse_ambiguous(
        {name: left for name, left in ways.items() if name != roles.episode},
        dotted,
        source,
    )
    action = roles.action[0]
    if ways.get(action) == [] and not roles.action_names:
        _check_texts_in_every_file(rows, action)
    decided = {name: left[0] for name, left in ways.items() if left}
    if roles.episode in decided and not is_own and roles.episode != roles.time:
        decided[roles.episode] = FLAGS_OR_IDS
    flags = (roles.terminal, roles.truncated, roles.starts)
    for flag in (*flags, *roles.action_mask, *roles.next_action_mask):
        if flag is not None and rows.types.get(flag) == pl.String:
            decided.setdefault(flag, FLAGS_OR_IDS)
    return decided


def _narrow_by_rows(
    rows: TableRows, ways: dict[str, list[str]], roles: TableMapping, source: str
) -> dict[str, str]:
    """Keep the ways that read all texts of the rows, in place; a text with a point, by
    column.

    ways: by column. Raises DataError if no way reads all times.
    """
    dotted: dict[str, str] = {}
    if not ways:
        return dotted
    above = 0
    for frame in rows.only(list(ways)).frames():
        for column in frame:
            missed_by = _narrow(ways, dotted, column)
            if column.name == roles.time and not ways[column.name]:
                problem = _unreadable_time(column, missed_by, above, roles)
                raise DataError(f"{source}: {problem}")
        above += frame.height
    return dotted


def _possible_ways(rows: TableRows, roles: TableMapping) -> dict[str, list[str]]:
    """The ways in which texts may be read, the narrowest first, by column."""
    numbers = [WHOLE, NUMBERS]
    if roles.decimal_comma:
        numbers.append(DECIMAL_COMMAS)
    wanted: dict[str | None, Sequence[str]] = {}
    if rows.kind == CSV:
        for name in (*roles.action, roles.cluster, roles.episode):
            wanted[name] = numbers
    wanted[roles.time] = (*numbers, *TEXT_WAYS[2:])
    if roles.time_format or roles.time_zone:
        wanted[roles.time] = (declared_times(roles.time_format, roles.time_zone),)
    return {
        name: list(ways)
        for name, ways in wanted.items()
        if name and rows.types.get(name) == pl.String
    }


def _unreadable_time(
    column: pl.Series,
    missed_by: Mapping[str, pl.Series],
    above: int,
    roles: TableMapping,
) -> str:
    """The problem of a column of times that cannot be read in one way.

    missed_by: masks (N,) of the texts that each way does not read. above: rows before
    these in the table.
    """
    # the row at which the way that came furthest ends
    place = max(int(missed.arg_max() or 0) for missed in missed_by.values())
    text = column.str.strip_chars()[place][:_MOST_SHOWN]
    row = above + place
    if roles.time_format:
        remedy = "write all in that form, or mend time_format"
        if roles.time_zone:
            remedy = f"{remedy}; or the clocks of {roles.time_zone} skipped it"
        return (
            f"column {column.name} holds {text!r} in row {row + 1}, no time in the form"
            f" {roles.time_format}; {remedy}"
        )
    if roles.time_zone:
        return (
            f"column {column.name} holds {text!r} in row {row + 1}, no time without a"
            f" UTC offset that the clocks of {roles.time_zone} showed; leave time_zone"
            " out, or write such times as in 2024-01-31T12:00:00"
        )
    like = "that is read"
    if row:
        like = "like those above"
    return (
        f"column {column.name} holds {text!r} in row {row + 1}, no number or time"
        f" {like}; write all in one way, as in 2024-01-31T12:00:00+01:00"
    )


def _check_texts_in_every_file(rows: TableRows, action: str) -> None:
    """Raise DataError if all actions of one file are numbers; those of the whole table
    are not.

    Such files may number the actions that others name.
    """
    if len(rows.files) == 1:
        return
    has_numbers: dict[str, bool] = {}
    for file in rows.files:
        of_file = replace(rows, files=(file,), held=None, computed=()).only([action])
        frames_are_numbers = [
            not unread(frame[action], [NUMBERS])[NUMBERS].any()
            for frame in of_file.frames()
        ]
        if frames_are_numbers:
            has_numbers[str(file)] = all(frames_are_numbers)
    first = next(iter(has_numbers.values()), None)
    for file, is_number in has_numbers.items():
        if is_number == first:
            continue
        kinds = "texts, in the first file numbers"
        if is_number:
            kinds = "numbers, in the first file texts"
        raise DataError(
            f"{file}: column {action} holds {kinds}; write all files alike, or list all"
            " values as texts (--action-names)"
        )


def gather(values: set[Any], column: pl.Series) -> None:
    """Add the values of a column of categories to ``values``, up to a limit; long texts
    are shortened, and lists become texts.
    """
    if len(values) > _MOST_CATEGORIES:
        return
    if column.dtype == pl.String:
        column = column.str.head(_LONGEST + 1)
    distinct = column.drop_nulls().unique()
    if distinct.dtype.is_nested():
        values |= set(map(str, distinct.to_list()))
    else:
        values |= set(distinct)


def _are_too_many(categories: Collection[object], most: int) -> bool:
    """Whether there are more than ``most`` categories, or one is a long text."""
    if len(categories) > most:
        return True
    return any(len(str(category)) > _LONGEST for category in categories)


def look_up(
    rows: TableRows, roles: TableMapping, problems: Problems
) -> tuple[dict[str, Encoding], dict[str, dict[str, str]]]:
    """Encodings by column, and other spellings of their categories.

    Categories that are not declared are looked up, in natural order. A next observation
    has the categories of its observation.
    """
    partner = dict(zip(roles.next_observations, roles.observations, strict=False))
    stored = _stored_categories(rows, list(roles.encode), partner)
    encodings: dict[str, Encoding] = {}
    spelled: dict[str, dict[str, str]] = {}
    for column, encoding in roles.encode.items():
        texts = stored[partner.get(column, column)]
        spelled[column] = one_spelling(texts, encoding.categories)
        categories = {spelled[column].get(text, text) for text in texts}
        known = encoding.categories or tuple(in_natural_order(categories))
        encodings[column] = Encoding(encoding.kind, known)
        option = f"--encode {column}={encoding.kind}:a,b,c"
        doubtful = doubtful_spellings(texts, encoding.categories)
        if doubtful:
            shown = listed(map(repr, doubtful[0]))
            problems.add(
                f"column {column} holds {shown}: one category, or several? Write them"
                " alike, or list each category once, or all spellings if they differ"
                f" ({option})"
            )
        _check_categories(column, encodings[column], categories, option, problems)
        other_columns = {*rows.types, *roles.columns} - {column}
        for twice in other_columns.intersection(encodings[column].names(column)):
            problems.add(
                f"column {column} would become {twice}, another column; rename that one"
            )
    return encodings, spelled


def _stored_categories(
    rows: TableRows, columns: list[str], partner: Mapping[str, str]
) -> Mapping[str, set[str]]:
    """The texts of columns of categories, by column; those of next observations count
    for the observation that is their ``partner``.
    """
    stored: dict[str, set[str]] = defaultdict(set)
    if not columns:
        return stored
    for frame in rows.only(columns).frames():
        for values in frame:
            column = partner.get(values.name, values.name)
            gather(stored[column], values.cast(pl.String))
    return stored


def _check_categories(
    column: str,
    encoding: Encoding,
    categories: set[str],
    option: str,
    problems: Problems,
) -> None:
    """Add problems: too many categories, none, or some that are not declared.

    categories: those of the rows. option: how a command declares them.
    """
    declared = encoding.categories
    unknown = in_natural_order(categories - set(declared))
    most = _MOST_CATEGORIES
    if encoding.kind == ONE_HOT:
        most = _MOST_ONE_HOT
    if _are_too_many(declared, most):
        problems.add(
            f"column {column} holds more than {most} categories, or long texts;"
            " group the rare ones, or leave the column out"
        )
    elif not declared:
        problems.add(f"column {column} has no value to encode; leave it out")
    elif unknown:
        problems.add(
            f"column {column} holds {listed(map(repr, unknown))}, no category of"
            f" {listed(declared)}; list all of them ({option})"
        )


def encoded(
    roles: TableMapping, encodings: Mapping[str, Encoding]
) -> tuple[TableMapping, dict[str, str]]:
    """Roles with features in place of categories, and the original column of each
    feature.
    """
    origin = {
        name: column
        for column, encoding in encodings.items()
        for name in encoding.names(column)
    }
    changes: dict[str, Any] = {}
    for role in ("observations", "next_observations"):
        features: list[str] = []
        for column in getattr(roles, role):
            if column in encodings:
                features += encodings[column].names(column)
            else:
                features.append(column)
        changes[role] = tuple(features)
    sources = {name: origin.get(name, name) for name in (*roles.columns, *origin)}
    changes["impute"] = {
        name: roles.impute[column]
        for name, column in sources.items()
        if column in roles.impute
    }
    return roles.model_copy(update=changes), origin


def action_spellings(
    values: set[Any], roles: TableMapping, source: str
) -> dict[str, str]:
    """Other spellings of the actions' names.

    Raises DataError if two may be one action, or two.
    """
    doubtful = doubtful_spellings(values, roles.action_names)
    if doubtful:
        shown = listed(map(repr, doubtful[0]))
        raise DataError(
            f"{source}: column {roles.action[0]} holds {shown}: one action, or several?"
            " Write them alike, or list each action once, or all spellings if they"
            " differ (--action-names)"
        )
    return one_spelling(values, roles.action_names)


def ordered_actions(
    values: set[Any], roles: TableMapping, source: str
) -> tuple[Any, ...]:
    """Values of a categorical action, in the order of ``action_names``, else in natural
    order.

    Raises DataError for unknown values, or too many.
    """
    column = roles.action[0]
    if _are_too_many(values, _MOST_CATEGORIES):
        raise DataError(
            f"{source}: column {column} holds more than {_MOST_CATEGORIES} different"
            f" actions, or a text of more than {_LONGEST} letters; group the rare ones,"
            " or name another column"
        )
    if not roles.action_names or not values:
        if all(isinstance(value, str) for value in values):
            return tuple(in_natural_order(values))
        return tuple(sorted(values))
    kind = type(next(iter(values)))
    names = _names_as_values(roles.action_names, kind)
    unknown = sorted(values - set(names)) or [next(iter(values))]
    if unknown[0] not in names or {type(name) for name in names} != {kind}:
        raise DataError(
            f"{source}: column {column} holds {unknown[0]!r}, action_names are"
            f" {names!r}; list all values as the column has them (in YAML put yes and"
            " no in quotes)"
        )
    return names


def _as_text(name: Any) -> Any:
    """A whole number as its text; anything else as it is."""
    if isinstance(name, int) and not isinstance(name, bool):
        return str(name)
    return name


def _names_as_values(names: tuple[Any, ...], kind: type) -> tuple[Any, ...]:
    """Names of actions as values of a column's type: those from a command line are
    texts, also where the column has integers or booleans, and those of a mapping may be
    numbers where it has texts.
    """
    if kind is str:
        return tuple(_as_text(name) for name in names)
    spelled: dict[str, object] = {"true": True, "false": False}
    if kind is int:
        spelled = {
            name: int(name) for name in map(str, names) if name.lstrip("-").isdecimal()
        }
    return tuple(spelled.get(str(name).lower(), name) for name in names)
