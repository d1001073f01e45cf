"""Formulas: rewards and flags that are computed from columns of a table."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from koffline.errors import DataError

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
