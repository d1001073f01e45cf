"""What was done to the rows of a table, counted while they are made, and said at the end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from koffline.data.wording import counted

# More different time differences than this are no regular clock.
_MOST_GAPS = 1000
# A clock is regular where so many of its differences are one and the same.
_REGULAR = 0.9


@dataclass
class TableCounts:
    """Sums over all pieces of a table."""

    episodes: int = 0
    left_out: int = 0
    reordered: bool = False
    cut: int = 0
    derived: bool = False
    imputed: Counter[tuple[str, str]] = field(default_factory=Counter)
    differences: Counter[float] = field(default_factory=Counter)
    regular: bool = True

    def add_differences(self, differences: np.ndarray) -> None:
        """Count the time differences (M,) between rows of one episode."""
        if not self.regular:
            return
        found, counts = np.unique(differences, return_counts=True)
        if len(found) + len(self.differences) > 2 * _MOST_GAPS:
            self.regular = False
            self.differences.clear()
            return
        for difference, count in zip(found.tolist(), counts.tolist(), strict=True):
            self.differences[difference] += count
        self.regular = len(self.differences) <= _MOST_GAPS

    def sentences(self) -> tuple[str, ...]:
        """Notes for people, in the order in which things were done."""
        notes = [
            f"{counted(count, 'missing value')} in {column} {_were(count)} replaced ({how})"
            for (column, how), count in sorted(self.imputed.items())
        ]
        if self.reordered:
            notes.append("the rows of each episode were put together and in time order")
        notes += self._gaps()
        if self.derived:
            notes.append(f"next observations were taken from the rows that follow in time{self._lost()}")
        if self.cut:
            notes.append(
                f"{counted(self.cut, 'episode', 'that ends', 'that end')} without a flag "
                f"{_were(self.cut)} marked as truncated"
            )
        return tuple(notes)

    def _lost(self) -> str:
        if not self.left_out:
            return ""
        return (
            f"; {counted(self.left_out, 'row', 'was', 'were')} left out: the last step of an episode that "
            "did not terminate has no next observation in this table"
        )

    def _gaps(self) -> list[str]:
        total = sum(self.differences.values())
        if not self.regular or not total:
            return []
        usual, count = max(self.differences.items(), key=lambda item: (item[1], -item[0]))
        longer = sum(n for difference, n in self.differences.items() if difference > usual)
        if not longer or count < _REGULAR * total:
            return []
        return [
            f"{longer} of {counted(total, 'step')} within episodes span more time than the usual one: "
            "where rows are missing, a next observation is the one after the gap"
        ]


def _were(count: int) -> str:
    return "was" if count == 1 else "were"
