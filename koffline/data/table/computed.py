"""How columns are read: texts as numbers or times, flags, numbers of categories, and formulas."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from koffline.data.features import ONE_HOT, Encoding
from koffline.data.table.problems import column_fault
from koffline.errors import DataError

_NARROW = (pl.Boolean, pl.Float16, pl.Float32, pl.Int8, pl.UInt8, pl.Int16, pl.UInt16)
_TRUE, _FALSE = ("true", "t", "yes", "y", "1", "1.0"), ("false", "f", "no", "n", "0", "0.0")
# 2024-01-31, with 12:00 or 12:00:00.5 behind it: nanoseconds since 1970 in 64 bits reach from 1677 to 2262.
_CLOCK = r"(?:[T ](?<clock>\d{2}:\d{2})(?<second>:\d{2}(?:\.\d{1,9})?)?)?"
_TIME = r"^(?<date>(?:1[7-9]|2[01])\d{2}-\d{2}-\d{2})" + _CLOCK
_OFFSET = r"(?<zone>Z|[+-]\d{2}(?::?\d{2})?)$"


def _times(texts: pl.Series, ending: str) -> pl.Series:
    """Instants to the nanosecond, null where a text is none; no offset is UTC."""
    parts = texts.str.extract_groups(_TIME + ending).struct.unnest()
    clock, second = pl.col("clock").fill_null("00:00"), pl.col("second").fill_null(":00")
    zone = pl.col("zone") if "zone" in parts.columns else pl.lit("Z")
    told = pl.concat_str("date", pl.lit("T"), clock, second, zone)
    form = "%Y-%m-%dT%H:%M:%S%.f%#z"
    instants = told.str.to_datetime(form, time_unit="ns", strict=False)
    return parts.select(instants.alias(texts.name)).to_series()


# Ways to read texts, the narrowest first; the last three are for times.
_LOCAL, CLOCK = "times without a UTC offset", "times of day"
_WAYS: dict[str, Callable[[pl.Series], pl.Series]] = {
    "whole numbers": lambda texts: texts.cast(pl.Int64, strict=False),
    "numbers": lambda texts: texts.cast(pl.Float64, strict=False),
    "times with a UTC offset": lambda texts: _times(texts, _OFFSET),
    _LOCAL: lambda texts: _times(texts, "$"),
    CLOCK: lambda texts: _times("1970-01-01T" + texts, "$"),
}
TEXT_WAYS = tuple(_WAYS)
_MOST_SHOWN = 60


@dataclass
class TextKind:
    """Types that all texts of a column allow: the remaining ``ways`` to read them, and the rows checked."""

    name: str
    is_time: bool
    ways: list[str]
    rows: int = 0
    has_clock: bool = False

    def look(self, column: pl.Series, source: str) -> None:
        """Check the next rows. Raises DataError if the times in a column are written in different ways."""
        column = column.str.strip_chars()
        unread = {way: _WAYS[way](column).is_null() & column.is_not_null() for way in self.ways}
        self.ways = [way for way, rows in unread.items() if not rows.any()]
        if self.is_time and not self.ways:
            place = max(int(rows.arg_max() or 0) for rows in unread.values())
            remedy = "write all in one way, as in 2024-01-31T12:00:00+01:00"
            like = " like those above" if self.rows + place else " that is read"
            said = f"holds {column[place][:_MOST_SHOWN]!r} in row {self.rows + place + 1}, no number or time"
            raise column_fault(source, self.name, f"{said}{like}; {remedy}")
        self.has_clock = self.has_clock or bool(column.str.contains(":", literal=True).any())
        self.rows += len(column)

    @property
    def form(self) -> str:
        """The narrowest way to read all texts; empty where there is none."""
        return self.ways[0] if self.ways else ""

    @property
    def is_naive(self) -> bool:
        """Whether the texts are times without a time zone."""
        return self.form == _LOCAL and self.has_clock

    @property
    def dtype(self) -> Any:
        """Integers or floats if all texts are numbers, date-times if all are times, else texts."""
        kinds = {"": pl.String(), "whole numbers": pl.Int64(), "numbers": pl.Float64()}
        return kinds.get(self.form, pl.Datetime("ns", "UTC"))

    @property
    def expression(self) -> pl.Expr:
        """The column as ``dtype``, of frames."""
        return pl.col(self.name).map_batches(self.read, return_dtype=self.dtype)

    def read(self, column: pl.Series) -> pl.Series:
        """The column as ``dtype``."""
        return _WAYS[self.form](column.str.strip_chars()).alias(self.name) if self.ways else column


def number_type(kinds: Iterable[Any], bytes_stay: bool = False) -> Any:
    """Common type of columns of these types as numbers; it depends on the types alone, never on values.

    uint8 may stay where all are; float16, float32 and integers of at most 16 bits are float32; else float64.
    """
    bases = [getattr(kind, "inner", kind) for kind in kinds]
    if bytes_stay and all(base == pl.UInt8 for base in bases):
        return pl.UInt8()
    return pl.Float32() if all(base in _NARROW for base in bases) else pl.Float64()


def read_flags(frame: pl.DataFrame, name: str | None, source: str) -> pl.Series:
    """Yes/no, 0/1, or texts such as true and false, as booleans. Raises DataError for anything else."""
    if name is None:
        return pl.repeat(False, frame.height, eager=True)
    column = frame[name]
    if column.dtype == pl.Boolean:
        return column.fill_null(False)  # missing values are refused elsewhere
    if column.dtype == pl.String:
        lower = column.str.strip_chars().str.to_lowercase()
        yes, no = lower.is_in(_TRUE), lower.is_in(_FALSE)
    else:
        number = column.cast(pl.Float64)
        yes, no = number == 1, number == 0
    wrong = ~(yes | no) & column.is_not_null()
    if wrong.any():
        compare = f", or compare: \"{name} == '…'\"" if column.dtype == pl.String else ""
        said = f"holds {column[int(wrong.arg_max() or 0)]!r}, neither yes nor no"
        raise column_fault(source, name, f"{said}; give true and false, or 1 and 0{compare}")
    return yes.fill_null(False)


def features(column: str, encoding: Encoding) -> list[pl.Expr]:
    """The numbers that encode a column; missing values stay missing."""
    texts = pl.col(column).cast(pl.String)
    if encoding.kind != ONE_HOT:
        known = pl.Series(encoding.categories, dtype=pl.String)
        codes = texts.replace_strict(known, range(len(known)), default=None, return_dtype=pl.Int16)
        return [codes.alias(column)]
    pairs = zip(encoding.categories, encoding.names(column), strict=True)
    return [(texts == category).cast(pl.Int8).alias(name) for category, name in pairs]


_LONGEST = 500
_GRAMMAR = (
    "write numbers, columns (`in backticks` where they are no plain words), + - * /, comparisons, min, max, "
    "or a column of texts == or != a 'text'"
)
_OPERATORS: dict[type, Callable[[Any, Any], pl.Expr]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
_CALLED: dict[str, Callable[..., pl.Expr]] = {"min": pl.min_horizontal, "max": pl.max_horizontal}


@dataclass(frozen=True)
class Formula:
    """Arithmetic over columns, which polars computes; nothing of the text is executed.

    ``value`` is a column named by the text: null where a value that it needs is missing.
    """

    text: str
    numbers: tuple[str, ...]  # columns that are read as numbers, each once
    texts: tuple[str, ...]  # columns that are compared with texts
    value: pl.Expr = field(repr=False, compare=False)

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that are read."""
        return (*self.numbers, *self.texts)


def parse_formula(text: str) -> Formula | None:
    """The formula that a text is; None for a single word. Raises DataError for anything else."""
    quoted: list[str] = re.findall(r"`([^`]+)`", text)
    places = iter(range(len(quoted)))
    names = {f"_quoted_{i}": name for i, name in enumerate(quoted)}
    columns: dict[str, bool] = {}
    try:
        if len(text) > _LONGEST:
            raise ValueError
        plain = re.sub(r"`[^`]+`", lambda _: f"_quoted_{next(places)}", text)
        tree = ast.parse(plain.strip(), mode="eval").body
        value = _expression(tree, names, columns)
    except (SyntaxError, ValueError, KeyError, OverflowError, RecursionError, MemoryError):
        raise DataError(f"the formula '{text[:_LONGEST]}' cannot be read; {_GRAMMAR}") from None
    if isinstance(tree, ast.Name) and not quoted:
        return None
    numbers = tuple(name for name, is_text in columns.items() if not is_text)
    texts = tuple(name for name, is_text in columns.items() if is_text)
    is_missing = pl.any_horizontal(pl.lit(False), *(_read(*each).is_null() for each in columns.items()))
    return Formula(text, numbers, texts, pl.when(~is_missing).then(value).alias(text))


def _read(name: str, is_text: bool) -> pl.Expr:
    """A column as texts or as numbers."""
    column = pl.col(name)
    return column.cast(pl.String).str.strip_chars() if is_text else column.cast(pl.Float64).fill_nan(None)


def _expression(node: ast.expr, names: Mapping[str, str], columns: dict[str, bool]) -> pl.Expr:
    """polars' expression of a tree; ``columns`` gets what it reads and whether as texts.

    Raises ValueError or KeyError for what is not in the grammar.
    """

    def of(each: ast.expr) -> pl.Expr:
        return _expression(each, names, columns)

    def column(word: str, is_text: bool) -> pl.Expr:
        name = names.get(word, word)
        if columns.setdefault(name, is_text) != is_text:
            raise ValueError
        return _read(name, is_text)

    match node:
        case ast.Name(id=word):
            return column(word, False)
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return pl.lit(float(number))
        case ast.BinOp():
            return _OPERATORS[type(node.op)](of(node.left), of(node.right))
        case ast.UnaryOp(op=ast.USub()):
            return -of(node.operand)
        case ast.Compare(
            left=ast.Name(id=word),
            ops=[ast.Eq() | ast.NotEq() as how],
            comparators=[ast.Constant(value=str(text))],
        ):
            return _OPERATORS[type(how)](column(word, True), pl.lit(text.strip())).cast(pl.Float64)
        case ast.Compare():
            sides = [of(each) for each in (node.left, *node.comparators)]
            hows = [_OPERATORS[type(how)] for how in node.ops]
            pairs = zip(hows, sides, sides[1:], strict=False)
            return pl.all_horizontal(how(*both) for how, *both in pairs).cast(pl.Float64)
        case ast.Call(func=ast.Name(id="min" | "max" as word), keywords=[]) if node.args:
            return _CALLED[word](*map(of, node.args))
    raise ValueError
