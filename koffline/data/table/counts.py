"""Counts of what was done to the rows of a table, and the notes that tell it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from koffline.data.raw import GAPS, ORDER, STARTS, UNFOLLOWED
from koffline.data.table.gaps import StepLengths
from koffline.errors import counted

# Episodes, and the share of them, that begin after the first step: fewer are no note.
_FEWEST_LATE = 5
_LATE_SHARE = 0.1


@dataclass
class TableCounts:
    """Counts of changes to the rows, summed over all pieces of a table.

    episodes: read so far. repeated: rows dropped because they repeat the time of
    another row of their episode. dropped_others: those of them that differ from all
    rows that stay. reordered: whether rows were put into another order.
    ended: rows left out from a missing value on. ends_lost: those of them that were
    flagged terminal. final_states: last rows without an action.
    left_out: rows left out because they have no next observation; None if every row
    of the table has one. cut: episodes marked as truncated because no flag ends them.
    imputed: values replaced, by column and method. steps: time steps. firsts: number
    of episodes by the number of their first step.
    """

    episodes: int = 0
    repeated: int = 0
    ended: int = 0
    ends_lost: int = 0
    final_states: int = 0
    dropped_others: int = 0
    reordered: bool = False
    left_out: int | None = None
    cut: int = 0
    imputed: Counter[tuple[str, str]] = field(default_factory=Counter)
    steps: StepLengths = field(default_factory=StepLengths)
    firsts: Counter[int] = field(default_factory=Counter)

    def sentences(self, is_timed: bool) -> Iterator[str]:
        """Yield notes for people, in the order of the changes. is_timed: whether the
        mapping names a time.
        """
        yield from self._of_repeated_rows()
        yield from self._of_missing_values()
        if self.reordered and is_timed:
            yield "the rows of each episode were put together and in time order"
        elif self.reordered:
            yield (
                f"{ORDER}rows of several episodes are mixed; without a time column the"
                " table's order was taken; name it (--time), or sort the table by"
                " episode and time; where ids begin anew, make them different first"
            )
        yield from self._of_last_rows()
        yield from self._of_late_episodes()
        yield from self.steps.sentences()

    def _of_repeated_rows(self) -> Iterator[str]:
        if self.repeated:
            yield f"{counted(self.repeated, 'repeated row', 'was', 'were')} dropped"
        if self.dropped_others:
            rows = counted(self.dropped_others, "row", "was", "were")
            yield (
                f"{ORDER}{rows} dropped that stand elsewhere in the table and differ"
                " from those that stay; where ids begin anew, make them different"
            )

    def _of_missing_values(self) -> Iterator[str]:
        """Yield notes on values that were replaced, and on rows left out for them."""
        for (column, method), count in sorted(self.imputed.items()):
            missing = counted(
                count, "missing value", f"in {column} was", f"in {column} were"
            )
            yield f"{missing} replaced ({method})"
        if self.final_states:
            rows = counted(self.final_states, "last row", "holds", "hold")
            yield (
                f"{rows} the final state alone, without an action: the next"
                " observation of the row above"
            )
        if self.ended:
            lost = counted(self.ended, "row", "was", "were")
            yield (
                f"{lost} left out: from a missing value on, as asked, to the end of the"
                " episode"
            )
        if self.ends_lost:
            lost = counted(self.ends_lost, "row", "is", "are")
            yield (
                f"{GAPS}{lost} flagged terminal among those left out; fill these in, or"
                " ends are lost"
            )

    def _of_last_rows(self) -> Iterator[str]:
        """Yield notes on last rows, which no row follows."""
        if self.left_out is not None:
            lost = ""
            if self.left_out:
                rows = counted(self.left_out, "row", "was", "were")
                lost = f"; {rows} left out: {UNFOLLOWED} in this table"
            yield f"next observations were taken from the rows that follow{lost}"
        if self.cut:
            ending = counted(self.cut, "episode", "that ends", "that end")
            verb = "was" if self.cut == 1 else "were"
            yield f"{ending} without a flag {verb} marked as truncated"

    def _of_late_episodes(self) -> Iterator[str]:
        """Yield a note on episodes that begin after the first step, where steps are
        counted from 0 or 1.
        """
        first = min(self.firsts, default=2)
        total = self.firsts.total()
        late = total - self.firsts[first]
        if first in (0, 1) and late >= max(_FEWEST_LATE, _LATE_SHARE * total):
            yield (
                f"{STARTS}{late} of {total} episodes begin after the first step: the"
                " value is that of such states too; leave these out if it should not be"
            )
