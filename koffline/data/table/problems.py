"""Collected errors of a table and its mapping, raised together, and messages about column names."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from koffline.errors import DataError, nearest_name

_MOST_LISTED = 20
_LONGEST_NUMBER = 100  # digits


class Problems:
    """Sentences about a table, each once; ``refuse`` raises one DataError with all of them."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.found: list[str] = []

    def add(self, sentence: str) -> None:
        """Add a sentence, with or without the table's name before it."""
        for start in (f"{self.source}: ", f"{self.source} "):
            sentence = sentence.removeprefix(start)
        if sentence not in self.found:
            self.found.append(sentence)

    def unknown(self, name: str, role: str, names: Sequence[str]) -> None:
        """Add that a column is not there, with the nearest name."""
        self.add(f"has no column '{name}' ({role}); {nearest_name(name, names)}")

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Add a DataError raised inside the context to the problems."""
        try:
            yield
        except DataError as error:
            self.add(str(error))

    def refuse(self) -> None:
        """Raise DataError if there are problems."""
        if len(self.found) == 1:
            verb = self.found[0].startswith(("has ", "is ", "lacks "))
            raise DataError(f"{self.source}{' ' if verb else ': '}{self.found[0]}")
        if self.found:
            shown = [f"({i}) {said}" for i, said in enumerate(self.found[:_MOST_LISTED], 1)]
            more = len(self.found) - len(shown)
            shown += [f"and {more} more"] if more else []
            raise DataError(f"{self.source} has {len(self.found)} problems: {'; '.join(shown)}")


def natural_key(name: str) -> list[Any]:
    """Sort key of natural order: x_2 before x_10."""
    return [
        (0, int(p), "") if p.isdecimal() and len(p) < _LONGEST_NUMBER else (1, 0, p)
        for p in re.split(r"(\d+)", name)
    ]


def column_fault(source: str, column: str | None, words: str) -> DataError:
    """The error for a column of a table."""
    return DataError(f"{source}: column {column} {words}")


def is_pattern(name: str) -> bool:
    """Whether polars takes the name of a column for a pattern of names; such columns have no role."""
    return name == "*" or (name.startswith("^") and name.endswith("$"))
