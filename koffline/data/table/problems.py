"""Collected errors of a table and its mapping, raised together, and messages about column names."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
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


def check_unique(names: Sequence[str], source: str) -> None:
    """Raise DataError for a table without columns, or with two of one name."""
    if not names:
        raise DataError(f"{source} has no columns; export the table again with a header")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(f"{source} has more than one column named {listed(twice)}; rename them")


def column_fault(source: str, column: str | None, words: str) -> DataError:
    """The error for a column of a table."""
    return DataError(f"{source}: column {column} {words}")


def is_pattern(name: str) -> bool:
    """Whether polars takes the name of a column for a pattern of names; such columns have no role."""
    return name == "*" or (name.startswith("^") and name.endswith("$"))


def unknown_column(name: str, role: str, names: Sequence[str], source: str) -> DataError:
    """The error for a column that is not there, with the nearest name."""
    return DataError(f"{source} has no column '{name}' ({role}); {nearest_name(name, names)}")


def listed(names: Sequence[str]) -> str:
    """Text that lists names, only the first ones of many."""
    shown = ", ".join(str(name) for name in names[:_MOST_LISTED])
    return shown + (f", … ({len(names)} in all)" if len(names) > _MOST_LISTED else "")
