"""Mappings: which columns of a table are which parts of a transition; formulas over
columns.
"""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
import zoneinfo
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

import polars as pl
import pydantic
import yaml

from koffline.data.flat import KEYS
from koffline.data.spaces import ONE_HOT, ORDINAL, Encoding
from koffline.data.table.text_ways import as_read, declared_times, has_offset
from koffline.errors import DataError, nearest_name
from koffline.json_types import JsonObject
from koffline.store.files import Location
from koffline.untrusted.limits import parse_yaml, read_yaml_file

# Names of the columns that koffline writes.
_OWN_ROLES = (
    "observations",
    "action",
    "reward",
    "next_observations",
    "terminal",
    "truncated",
    "episode",
    "time",
    "behavior_log_probability",
    "weight",
    "cluster",
    "action_mask",
    "next_action_mask",
)
EXAMPLE = (
    "--observations 'x_*' --action a --reward r --episode id --time t --terminal done"
)
PYTHON_EXAMPLE = (
    "mapping={'observations': 'x_*', 'action': 'a', 'reward': 'r', 'episode': 'id',"
    " 'time': 't', 'terminal': 'done'} (every row a decision of its own: 'one_step':"
    " True, not the last three)"
)
# What every mapping must have, with an example.
_EXAMPLES = {"observations": "x_*", "action": "a", "reward": "r"}
INSPECT = (
    "`koffline data inspect FILE --out mapping.yaml` writes a first mapping; to train,"
    " `data convert`"
)
CUT = "cut"
# What becomes of rewards in rows that are left out.
PREVIOUS = "previous"
DROP = "drop"
_OPEN = "?"  # a value that is a question; after it, the lines that would answer it
_BETWEEN = " | "
_END_OF_SCALAR = "...\n"  # PyYAML writes it below a single value
_LONGEST_ANSWER = 200  # characters of one in a message
_ANSWERS = {"last_row": ("last_row: cut", "last_row: terminal")}
# Roles of several columns, in whose names ? stands for any letter.
_PATTERNS = (
    "observations",
    "action",
    "next_observations",
    "action_mask",
    "next_action_mask",
)
# Fields that do not apply to one-step episodes.
_OF_EPISODES = (
    "episode",
    "starts",
    "terminal",
    "truncated",
    "next_observations",
    "last_row",
    "final_state",
    "reward_row",
    "drop_duplicates",
)


def _different(names: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(map(str, names))) != len(names):
        raise ValueError("holds a value twice; list each once")
    return names


def as_encoding(value: Any) -> Any:
    """An Encoding from ``ordinal``, ``ordinal:s,m,l`` or ``{ordinal: [s, m, l]}``.

    Raises ValueError.
    """
    kind, names = _kind_and_categories(value)
    if kind not in (ONE_HOT, ORDINAL) or not isinstance(names, (list, tuple)):
        raise ValueError(
            "give one-hot or ordinal by column, or {ordinal: [small, large]}"
        )
    if any(isinstance(name, (bool, dict, list)) or name is None for name in names):
        raise ValueError("a category is no text; put yes and no in quotes")
    return Encoding(kind, _different(tuple(map(str, names))))


def _kind_and_categories(value: Any) -> tuple[Any, Any]:
    """What a value says of an encoding, unchecked; the kind "" if it says nothing."""
    if isinstance(value, str):
        kind, colon, names = value.partition(":")
        if not colon:
            return kind, []
        return kind, [name.strip() for name in names.split(",")]
    if isinstance(value, Mapping) and len(value) == 1:
        ((kind, categories),) = value.items()
        return kind, categories
    return "", []


def as_question(answers: Iterable[Mapping[str, Any]]) -> str:
    """The value of a key that is left open. answers: what to write instead, by key,
    each with one key.
    """
    return f"{_OPEN} {_BETWEEN.join(map(as_line, answers))}"


def as_line(answer: Mapping[str, Any]) -> str:
    """One line of a mapping file."""
    ((key, value),) = answer.items()
    dumped = yaml.safe_dump(
        value, allow_unicode=True, default_flow_style=True, width=10**9
    )
    return f"{key}: {dumped.removesuffix(_END_OF_SCALAR).rstrip()}"


def _answers(key: str, value: Any) -> tuple[str, ...]:
    """The lines that would answer a key that is left open; none if it is not open."""
    if not isinstance(value, str) or not value.startswith(_OPEN):
        return ()
    text = value.removeprefix(_OPEN)
    if text.startswith(" ") and text.strip():
        lines = map(str.strip, text.split(_BETWEEN.strip()))
        return tuple(filter(None, lines))
    if not text.strip() and key not in _PATTERNS:
        return _ANSWERS.get(key, (f"{key}: COLUMN",))
    return ()


def _questions(values: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Lines that would answer each key that is left open; none where another key is the
    answer. values: of the mapping, by key.
    """
    questions: dict[str, tuple[str, ...]] = {}
    for key, value in values.items():
        lines = _answers(key, value)
        if not lines:
            continue
        alternatives = {line.partition(":")[0] for line in lines} - {key}
        is_answered = any(
            values.get(other) and not _answers(other, values[other])
            for other in alternatives
        )
        questions[key] = () if is_answered else lines
    return questions


def _asked(key: str, lines: tuple[str, ...]) -> str:
    """Sentence that refuses a mapping in which a key is left open."""
    shown = []
    for line in lines:
        if len(line) > _LONGEST_ANSWER:
            line = f"{line[:_LONGEST_ANSWER]} …"
        shown.append(line)
    return (
        f"the mapping leaves {key} open; write one of: {'; '.join(shown)} (as an"
        f" option: {_option(lines[0])}; in Python: {_call(lines[0])})"
    )


def _call(line: str) -> str:
    """The call in Python that answers by a line of a mapping."""
    name, value = _key_and_value(line)
    return f"inspection.answer({name}={value!r})"


def _option(line: str) -> str:
    """The command line's option for a line of a mapping."""
    name, value = _key_and_value(line)
    if isinstance(value, list):
        text = ",".join(map(str, value))
    elif isinstance(value, bool):
        text = "no"
        if value:
            text = "yes"
    else:
        text = str(value).strip()
    return f"--{name.replace('_', '-')} {shlex.quote(text)}"


def _key_and_value(line: str) -> tuple[str, Any]:
    """The key of a line of a mapping, and its value: a text where it is no YAML."""
    try:
        ((name, value),) = parse_yaml(line).items()
    except (yaml.YAMLError, AttributeError, ValueError):
        name, _, value = line.partition(":")
        value = value.strip()
    return str(name), value


def _no_flag(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a yes or no is no number")
    return value


def _several(value: Any) -> Any:
    """One name as a tuple of names; anything else as it is."""
    if isinstance(value, str):
        return (value,)
    return value


def _several_values(value: Any) -> Any:
    """One text or number as a tuple of one; anything else as it is."""
    if isinstance(value, (str, int, float)):
        return (value,)
    return value


def _by_column(value: Any) -> Any:
    """One method for all observations by the column ""; anything else as it is."""
    if isinstance(value, (str, int, float)):
        return {"": value}
    return value


def _form_of_times(form: str | None) -> str | None:
    """A form of times that polars can read. Raises ValueError for others."""
    if form is None:
        return None
    example = pl.select(pl.lit("2024").alias("time"))
    try:
        if "%" not in form:
            raise ValueError
        example.select(as_read("time", declared_times(form, None)))
    except (ValueError, pl.exceptions.PolarsError):
        raise ValueError(
            "write the parts of a time as %Y %m %d %H %M %S, as in %d/%m/%Y %H:%M"
        ) from None
    return form


def _zone(name: str | None) -> str | None:
    """A known time zone. Raises ValueError for others."""
    if name is not None and name not in zoneinfo.available_timezones():
        raise ValueError(
            "give the name of a time zone, as in Europe/Berlin or America/New_York"
        )
    return name


_Name = Annotated[str, pydantic.Field(min_length=1)]
_Names = Annotated[tuple[_Name, ...], pydantic.BeforeValidator(_several)]
_Number = Annotated[
    float, pydantic.Field(allow_inf_nan=False), pydantic.BeforeValidator(_no_flag)
]
# A method by column, or one for all observations, whose column is "".
_Imputed = Annotated[
    dict[str, Literal["zero", "mean", "forward", "cut"] | _Number],
    pydantic.BeforeValidator(_by_column),
]


class TableMapping(pydantic.BaseModel):
    """Columns of a table by their part in a transition; the keys of a YAML mapping file
    are the same.

    Raises DataError if fields contradict each other.

    observations, action, next_observations: one column or several, with ``*`` and ``?``
    for any text and any letter; matches are taken in natural order (x_2 before x_10).
    reward, terminal, truncated: a column, or a formula (``spend - 0.1 * cost``,
    ``status == 'died'``).
    episode: a column of ids of any type.
    starts: instead of ids, a flag (or formula) that is true in the first row of every
    episode.
    time: a column of numbers or times.
    time_format: how texts of times are written, such as ``%d/%m/%Y %H:%M``; by default
    ISO 8601.
    time_zone: the zone of the clock that times without a UTC offset were read from,
    such as ``Europe/Berlin``; by default UTC.
    behavior_probability, behavior_log_probability: the column of the logged action's
    probability.
    weight: a column of numbers of at least 0.
    cluster: a column of ids (such as the user's) that several dependent episodes share.
    action_mask: which actions were available: a column of 0 and 1 for each action, or
    one column of lists, of the available actions or of 0 and 1.
    next_action_mask: likewise in the next state; by default that of the row below.
    action_names: the values of a discrete action in the order of their numbers; by
    default texts are in natural order (banner_2 before banner_10).
    impute: what replaces missing values (zero, mean, forward, a number; cut ends the
    episode before the row).
    encode: which observations are categories, one-hot or ordinal by column, or
    {ordinal: [small, large]}.
    one_step: true if every row is an episode of one step, false if all rows are one
    episode.
    last_row: terminal or cut: what an episode's last row without a flag means.
    final_state: true if every episode's last row holds its final state alone, beside an
    action and a reward that mean nothing (RLDS); its flags are those of the row above.
    no_action: values of the action column that mean that no action was taken.
    reward_row: previous: a reward in a row without an action is added to the row above
    that has one; drop: rewards in rows that are left out do not count.
    decimal_comma: true if the text 1,5 means 1.5.
    drop_duplicates: of rows of one episode and time, drop those that are equal (exact),
    or keep one (first, last).
    gamma: the log's discount hint, inside (0, 1).
    by: a column whose value in an episode's first row defines the episode's group.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    observations: _Names = ()
    encode: dict[_Name, Annotated[Any, pydantic.AfterValidator(as_encoding)]] = {}
    next_observations: _Names = ()
    action: _Names = ()
    action_names: Annotated[
        tuple[pydantic.StrictStr | pydantic.StrictBool | pydantic.StrictInt, ...],
        pydantic.AfterValidator(_different),
    ] = ()
    reward: _Name | None = None
    episode: _Name | None = None
    starts: _Name | None = None
    time: _Name | None = None
    time_format: Annotated[_Name | None, pydantic.AfterValidator(_form_of_times)] = None
    time_zone: Annotated[_Name | None, pydantic.AfterValidator(_zone)] = None
    terminal: _Name | None = None
    truncated: _Name | None = None
    last_row: Literal["terminal", "cut"] | None = None
    final_state: bool | None = None
    no_action: Annotated[
        tuple[pydantic.StrictStr | pydantic.StrictInt | pydantic.StrictFloat, ...],
        pydantic.BeforeValidator(_several_values),
        pydantic.AfterValidator(_different),
    ] = ()
    reward_row: Literal["previous", "drop"] | None = None
    one_step: bool | None = None
    behavior_probability: _Name | None = None
    behavior_log_probability: _Name | None = None
    weight: _Name | None = None
    cluster: _Name | None = None
    action_mask: _Names = ()
    next_action_mask: _Names = ()
    impute: _Imputed = {}
    drop_duplicates: Literal["exact", "first", "last"] | None = None
    decimal_comma: bool | None = None
    gamma: float | None = pydantic.Field(None, gt=0.0, lt=1.0)
    by: _Name | None = None

    def __init__(self, **values: Any) -> None:
        questions = _questions(values)
        # A key whose question another key answers is as if it was not there.
        values = {
            name: value for name, value in values.items() if questions.get(name) != ()
        }
        problems = _contradictions(values)
        values = {
            name: value for name, value in values.items() if name not in questions
        }
        remedies: dict[str, list[str]] = {}
        try:
            super().__init__(**values)
        except pydantic.ValidationError as error:
            for detail in error.errors():
                text = detail["msg"].removeprefix("Value error, ")
                remedy = f"{text[0].lower()}{text[1:]}"
                remedies.setdefault(str(detail["loc"][0]), []).append(remedy)
        problems += [_asked(key, lines) for key, lines in questions.items() if lines]
        known = type(self).model_fields
        for name, texts in remedies.items():
            if name in known:
                problems.append(
                    f"the mapping's {name} is {values[name]!r}: {', or '.join(texts)}"
                )
            else:
                problems.append(
                    f"the mapping has the unknown key '{name}';"
                    f" {nearest_name(name, known)}"
                )
        if problems:
            raise DataError("; ".join(problems))

    @property
    def behavior(self) -> str | None:
        """The column of the behavior policy's probabilities of the logged actions, or
        of their logarithms.
        """
        return self.behavior_probability or self.behavior_log_probability

    @property
    def numbers(self) -> tuple[str, ...]:
        """Columns that must hold numbers."""
        return _distinct(
            *self.observations,
            *self.next_observations,
            self.reward,
            self.behavior,
            self.weight,
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that are read."""
        return _distinct(*self.needed, self.by)

    @property
    def needed(self) -> tuple[str, ...]:
        """All columns that transitions are made of."""
        time = self.time
        if self.one_step:  # rows that are episodes have no order
            time = None
        return _distinct(
            *self.numbers,
            *self.action,
            self.episode,
            time,
            self.terminal,
            self.truncated,
            self.starts,
            self.cluster,
            *self.action_mask,
            *self.next_action_mask,
        )

    @property
    def stands_alone(self) -> bool:
        """Whether every row is a transition without links to other rows."""
        if self.one_step:
            return True
        links = (self.episode, self.starts, self.time, self.one_step)
        has_links = any(link is not None for link in links)
        return bool(self.next_observations) and not has_links


def _distinct(*names: str | None) -> tuple[str, ...]:
    """The names, each once, without None."""
    return tuple(dict.fromkeys(filter(None, names)))


def _contradictions(values: Mapping[str, Any]) -> list[str]:
    """Errors of a mapping: missing or contradictory keys. values: by key."""
    problems = []
    missing = [name for name in _EXAMPLES if not values.get(name)]
    if missing:
        options = [f"--{name} {shlex.quote(_EXAMPLES[name])}" for name in missing]
        arguments = ", ".join(f"'{name}': {_EXAMPLES[name]!r}" for name in missing)
        problems.append(
            f"the mapping lacks {', '.join(missing)}; name columns, as in"
            f" {' '.join(options)} (in Python {arguments} in the mapping), or"
            f" {INSPECT}"
        )
    if values.get("behavior_probability") and values.get("behavior_log_probability"):
        problems.append(
            "the mapping names behavior_probability and its logarithm; keep one of them"
        )
    for key in ("time_format", "time_zone"):
        if values.get(key) and not values.get("time"):
            problems.append(
                f"{key} says how times are read, and no column of times is named; name"
                " it (--time), or leave it out"
            )
    form = values.get("time_format")
    if isinstance(form, str) and values.get("time_zone") and has_offset(form):
        problems.append(
            "time_zone is for times without a UTC offset, and time_format holds one;"
            " keep one of them"
        )
    of_episodes = [name for name in _OF_EPISODES if values.get(name)]
    if values.get("one_step") is True and of_episodes:
        problems.append(
            "one_step says that every row is an episode that ends, beside"
            f" {', '.join(of_episodes)}; keep one or the other"
        )
    elif values.get("drop_duplicates") and not values.get("time"):
        problems.append(
            "drop_duplicates needs a time column: equal rows may be different steps;"
            " name it (--time)"
        )
    if values.get("final_state") and values.get("next_observations"):
        problems.append(
            "final_state says that last rows hold the final state alone, beside"
            " next_observations, which every row has; keep one of them"
        )
    if values.get("starts") and values.get("episode"):
        problems.append(
            "the mapping names starts and episode, which both tell episodes apart; keep"
            " one of them"
        )
    elif values.get("starts") and values.get("time"):
        problems.append(
            "starts takes the rows in the table's order, so it cannot have a time"
            " column; leave time out, or name ids of the episodes (--episode)"
        )
    return problems


@runtime_checkable
class Inspected(Protocol):
    """What `koffline.inspect` returns: it holds a mapping."""

    mapping: JsonObject


# Types that open_transitions accepts as a mapping.
MappingRequest = TableMapping | Mapping[str, Any] | Inspected | Location


def as_mapping(request: MappingRequest) -> TableMapping:
    """A mapping from the record itself, a dict with its keys, an inspection, or a YAML
    file.

    Raises DataError.
    """
    if isinstance(request, TableMapping):
        return request
    if isinstance(request, Inspected):
        values: Mapping[str, Any] = request.mapping
    elif isinstance(request, Mapping):
        values = request
    elif not isinstance(request, (str, os.PathLike)):
        raise DataError(
            f"mapping is of type {type(request).__name__}; give a dict of columns by"
            " key, what koffline.inspect returns, or the path of a YAML file"
        )
    else:
        values = read_yaml_file(Path(request), f"mapping file {request}", DataError)
    return TableMapping(
        **{str(name): value for name, value in values.items() if value is not None}
    )


def own_mapping(names: Iterable[str]) -> TableMapping | None:
    """The mapping of a table that koffline wrote, recognised by its column names; None
    for other tables.
    """
    present = set(names)
    columns: dict[str, Any] = {}
    for role, (key, *_) in zip(_OWN_ROLES, KEYS.values(), strict=True):
        if key in present:
            columns[role] = key
        elif f"{key}_0" in present:
            columns[role] = f"{key}_*"
    if {"observations", "action", "reward", "terminal"} <= set(columns):
        return TableMapping(**columns)
    return None


_LONGEST = 500
_GRAMMAR = (
    "write numbers, columns (`in backticks` where they are no plain words), + - * /,"
    " comparisons, min, max, or a column of texts == or != a 'text'"
)
_OPERATORS: dict[type, Callable[[Any, Any], pl.Expr]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_CALLED: dict[str, Callable[..., pl.Expr]] = {
    "min": pl.min_horizontal,
    "max": pl.max_horizontal,
}


@dataclass(frozen=True)
class Formula:
    """Arithmetic over columns, computed by polars; the text is never executed.

    ``value``: a column named by the text, null where a needed number is missing.
    """

    text: str
    # Columns in the formula: True if compared with texts, else numbers.
    columns: Mapping[str, bool]
    # Columns and the texts that they are compared with.
    comparisons: tuple[tuple[str, str], ...]
    value: pl.Expr = field(repr=False, compare=False)


def parse_formula(text: str) -> Formula:
    """Parse a formula. Raises DataError for anything else."""
    quoted: list[str] = re.findall(r"`([^`]+)`", text)
    names = {f"_quoted_{i}": name for i, name in enumerate(quoted)}
    places = iter(names)
    columns = dict[str, bool]()
    comparisons: dict[tuple[str, str], None] = {}
    try:
        if len(text) > _LONGEST:
            raise ValueError
        plain = re.sub(r"`[^`]+`", lambda _: next(places), text).strip()
        tree = ast.parse(plain, mode="eval").body
        value = _expression(tree, names, columns, comparisons)
    except (
        SyntaxError,
        ValueError,
        KeyError,
        OverflowError,
        RecursionError,
        MemoryError,
    ):
        raise DataError(
            f"the formula '{text[:_LONGEST]}' cannot be read; {_GRAMMAR}"
        ) from None
    missing = [_read(name, is_text).is_null() for name, is_text in columns.items()]
    # any_horizontal of nothing is an error
    is_missing = pl.any_horizontal(pl.lit(False), *missing)
    value = pl.when(~is_missing).then(value).alias(text)
    return Formula(
        text=text, columns=columns, comparisons=tuple(comparisons), value=value
    )


def _read(name: str, is_text: bool) -> pl.Expr:
    """A column as texts (an empty cell as ''), or as numbers."""
    column = pl.col(name)
    if is_text:
        return column.cast(pl.String).str.strip_chars().fill_null("")
    return column.cast(pl.Float64).fill_nan(None)


def equals_text(name: str, text: str) -> pl.Expr:
    """Whether a column has this text; true and false may be written in any case, or be
    booleans.
    """
    values = _read(name, True)
    if text.lower() in ("true", "false"):
        return values.str.to_lowercase() == text.lower()
    return values == text


def _expression(
    node: ast.expr,
    names: Mapping[str, str],
    columns: dict[str, bool],
    comparisons: dict[tuple[str, str], None],
) -> pl.Expr:
    """The polars expression of a syntax tree.

    names: columns that were written in backticks, by the words that stand for them.
    Adds to ``columns`` what it reads, and whether as text, and to ``comparisons``
    columns with their texts. Raises ValueError or KeyError for anything outside the
    grammar.
    """

    def of(part: ast.expr) -> pl.Expr:
        return _expression(part, names, columns, comparisons)

    def column(word: str, is_text: bool) -> str:
        name = names.get(word, word)
        if columns.setdefault(name, is_text) != is_text:
            raise ValueError
        return name

    match node:
        case ast.Name(id=word):
            return _read(column(word, False), False)
        case ast.Constant(value=int() | float() as number) if not isinstance(
            number, bool
        ):
            return pl.lit(float(number))
        case ast.BinOp():
            return _OPERATORS[type(node.op)](of(node.left), of(node.right))
        case ast.UnaryOp(op=ast.USub()):
            return -of(node.operand)
        case ast.Compare(
            left=ast.Name(id=word),
            ops=[ast.Eq() | ast.NotEq() as comparison],
            comparators=[ast.Constant(value=str(text))],
        ):
            name = column(word, True)
            text = text.strip()
            comparisons[name, text] = None
            fulfilled = equals_text(name, text)
            if isinstance(comparison, ast.NotEq):
                fulfilled = ~fulfilled
            return fulfilled.cast(pl.Float64)
        case ast.Compare():
            # a < b < c is (a < b) and (b < c)
            sides = [of(side) for side in (node.left, *node.comparators)]
            operators = [_OPERATORS[type(comparison)] for comparison in node.ops]
            links = zip(operators, sides[:-1], sides[1:], strict=True)
            return pl.all_horizontal(
                compare(left, right) for compare, left, right in links
            ).cast(pl.Float64)
        case ast.Call(func=ast.Name(id="min" | "max" as word), keywords=[]) if (
            node.args
        ):
            return _CALLED[word](*map(of, node.args))
    raise ValueError
