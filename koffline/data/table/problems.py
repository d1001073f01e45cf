"""What is wrong with a table, collected so that one refusal tells all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from koffline.data.table.column_names import is_pattern
from koffline.errors import DataError, nearest_name

_MOST_LISTED = 20


class Problems:
    """Sentences on what is wrong with a table, each once; ``refuse`` raises one
    DataError with all.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.sentences: list[str] = []

    def add(self, sentence: str) -> None:
        """Add a sentence, with or without the table's name before it."""
        for start in (f"{self.source}: ", f"{self.source} "):
            sentence = sentence.removeprefix(start)
        if sentence not in self.sentences:
            self.sentences.append(sentence)

    def unknown(self, name: str, role: str, names: Sequence[str]) -> None:
        """Add that a column does not exist, with the nearest name."""
        if is_pattern(name):
            remedy = "name single columns here"
        else:
            remedy = nearest_name(name, names)
        self.add(f"has no column '{name}' ({role}); {remedy}")

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Add a DataError raised inside the context to the problems."""
        try:
            yield
        except DataError as error:
            self.add(str(error))

    def refuse(self) -> None:
        """Raise DataError if there are problems."""
        if not self.sentences:
            return
        if len(self.sentences) == 1:
            problem = self.sentences[0]
            if problem.startswith(("has ", "is ", "lacks ")):
                raise DataError(f"{self.source} {problem}")
            raise DataError(f"{self.source}: {problem}")
        shown = [
            f"({number}) {problem}"
            for number, problem in enumerate(self.sentences[:_MOST_LISTED], 1)
        ]
        n_hidden = len(self.sentences) - len(shown)
        if n_hidden:
            shown.append(f"and {n_hidden} more")
        raise DataError(
            f"{self.source} has {len(self.sentences)} problems: {'; '.join(shown)}"
        )
