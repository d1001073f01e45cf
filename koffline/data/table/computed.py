"""Columns that are computed from those of a table: rewards by a formula, categories as numbers."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from koffline.data.features import ONE_HOT, Encoding
from koffline.errors import DataError

_LONGEST = 500
_GRAMMAR = (
    "write numbers, columns (`in backticks` where they are no plain words), + - * /, comparisons, min, max"
)
_BINARY: dict[type, Callable[..., Any]] = {
    ast.Add: np.add, ast.Sub: np.subtract, ast.Mult: np.multiply, ast.Div: np.divide,
}  # fmt: skip
_UNARY: dict[type, Callable[..., Any]] = {ast.USub: np.negative, ast.UAdd: np.positive}
_COMPARED: dict[type, Callable[..., Any]] = {
    ast.Lt: np.less, ast.LtE: np.less_equal, ast.Gt: np.greater, ast.GtE: np.greater_equal,
    ast.Eq: np.equal, ast.NotEq: np.not_equal,
}  # fmt: skip
_CALLED: dict[str, Callable[..., Any]] = {"min": np.minimum, "max": np.maximum}


@dataclass(frozen=True)
class Formula:
    """Arithmetic over columns; nothing of it is executed: its syntax tree is walked."""

    text: str
    tree: ast.expr = field(repr=False, compare=False)
    named: Mapping[str, str] = field(repr=False, compare=False)  # columns by the words that stand for them

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that it reads, each once."""
        return tuple(dict.fromkeys(self.named.values()))

    def values(self, frame: pl.DataFrame) -> pl.Series:
        """A column named by the text: NaN where a value that it needs is missing."""
        read = {word: frame[column].cast(pl.Float64).to_numpy() for word, column in self.named.items()}
        with np.errstate(all="ignore"):  # a division by zero is infinite, and refused as such
            found = np.broadcast_to(_value(self.tree, read), frame.height)
        return pl.Series(self.text, found.astype(np.float64))


def parse_formula(text: str) -> Formula | None:
    """The formula that a text is; None for a single word. Raises DataError for anything else."""
    quoted: dict[str, str] = {}

    def word(found: re.Match[str]) -> str:
        return next(k for k in (f"_quoted_{len(quoted)}",) if quoted.setdefault(k, found[1]))

    try:
        if len(text) > _LONGEST:
            raise ValueError
        tree = ast.parse(re.sub(r"`([^`]+)`", word, text).strip(), mode="eval").body
        words: dict[str, str] = {}
        _check(tree, words)
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        raise DataError(f"the formula '{text[:_LONGEST]}' cannot be read; {_GRAMMAR}") from None
    if isinstance(tree, ast.Name) and not quoted:
        return None
    return Formula(text, tree, {name: quoted.get(name, name) for name in words})


def _check(node: ast.expr, words: dict[str, str]) -> None:
    """Collect the words of a tree. Raises ValueError for what is not in the grammar."""
    inside: list[ast.expr] = []
    if isinstance(node, ast.Name):
        words[node.id] = node.id
    elif isinstance(node, ast.Constant):
        if type(node.value) not in (int, float) or not np.isfinite(float(node.value)):  # type: ignore[arg-type]
            raise ValueError
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        inside = [node.left, node.right]
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        inside = [node.operand]
    elif isinstance(node, ast.Compare) and {type(each) for each in node.ops} <= _COMPARED.keys():
        inside = [node.left, *node.comparators]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLED:
        if len(node.args) < 2 or node.keywords:
            raise ValueError
        inside = node.args
    else:
        raise ValueError
    for each in inside:
        _check(each, words)


def _value(node: ast.expr, read: Mapping[str, np.ndarray]) -> Any:
    if isinstance(node, ast.Name):
        return read[node.id]
    if isinstance(node, ast.Constant):
        return np.float64(node.value)  # type: ignore[arg-type]
    if isinstance(node, ast.BinOp):
        return _BINARY[type(node.op)](_value(node.left, read), _value(node.right, read))
    if isinstance(node, ast.UnaryOp):
        return _UNARY[type(node.op)](_value(node.operand, read))
    if isinstance(node, ast.Call):
        found = [_value(each, read) for each in node.args]
        for other in found[1:]:
            found[0] = _CALLED[node.func.id](found[0], other)  # type: ignore[attr-defined]
        return found[0]
    assert isinstance(node, ast.Compare), "checked"
    sides = [_value(each, read) for each in (node.left, *node.comparators)]
    holds: Any = np.float64(1)
    for left, right, how in zip(sides, sides[1:], node.ops, strict=False):
        missing = np.isnan(left) | np.isnan(right)
        holds = holds * np.where(missing, np.nan, _COMPARED[type(how)](left, right))
    return holds


@dataclass(frozen=True)
class Computed:
    """Columns that are ``kept`` as they are read, a reward by its formula, and encoded columns."""

    kept: tuple[str, ...]
    formula: Formula | None
    encodings: Mapping[str, Encoding]

    def schema(self, types: Mapping[str, Any]) -> dict[str, Any]:
        """Types of the columns of ``frame``, from those that are read."""
        found = {name: types[name] for name in self.kept}
        if self.formula is not None:
            found[self.formula.text] = pl.Float64()
        for column, encoding in self.encodings.items():
            kind: Any = pl.Int8() if encoding.kind == ONE_HOT else pl.Int16()
            found.update(dict.fromkeys(encoding.names(column), kind))
        return found

    def frame(self, read: pl.DataFrame) -> pl.DataFrame:
        """The same rows with these columns; what is missing stays so."""
        columns = [read[name] for name in self.kept]
        if self.formula is not None:
            columns.append(self.formula.values(read))
        for column, encoding in self.encodings.items():
            texts, known = read[column].cast(pl.String), pl.Series(encoding.categories, dtype=pl.String)
            codes = texts.replace_strict(known, range(len(known)), default=None, return_dtype=pl.Int16)
            there, kind = codes.is_not_null(), pl.Int8 if encoding.kind == ONE_HOT else pl.Int16
            numbers = encoding.numbers(codes.fill_null(-1).to_numpy())
            for i, name in enumerate(encoding.names(column)):
                made = pl.Series(name, np.ascontiguousarray(numbers[:, i])).cast(kind)
                columns.append(made if there.all() else made.zip_with(there, pl.Series([None], dtype=kind)))
        return pl.DataFrame(columns)
