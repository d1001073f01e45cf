"""A symptom: what a log's rows say against its own reading, with its size, its strength
and a remedy.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Symptom:
    """One sign that rows are not what the log says they are.

    test: name of the test, as the table of tests in the documentation lists it. kind:
    word of the verdict's reason. rows: number of rows that show it, of ``of`` rows that
    could. p_value: chance of so many such rows in a log that was read rightly; 0.0 if
    that is impossible (an exact count). statement: what was seen, in a clause. remedy:
    what to do, in a clause.
    """

    test: str
    kind: str
    rows: int
    of: int
    p_value: float
    statement: str
    remedy: str

    @property
    def share(self) -> float:
        """Share of the rows that could show the symptom and do."""
        return self.rows / max(1, self.of)

    @property
    def text(self) -> str:
        """Statement and remedy in one clause."""
        return f"{self.statement}; {self.remedy}"
