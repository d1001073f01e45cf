"""What was assumed, derived or replaced while a table was read, in sentences for people."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import polars as pl

from koffline.data.columns import counted
from koffline.data.spaces import ActionSpace, Discrete
from koffline.data.table.roles import Roles
from koffline.data.table.rows import TableRows
from koffline.data.table.survey import TableSurvey

# More different time differences than this are no regular clock.
_MOST_GAPS = 1000
# A clock is regular where so many of its differences are one and the same.
_REGULAR = 0.9


@dataclass
class TableCounts:
    """What was done to the rows, summed over all pieces of a table."""

    episodes: int = 0
    left_out: int = 0
    reordered: bool = False
    cut: int = 0
    derived: bool = False
    imputed: Counter[tuple[str, str]] = field(default_factory=Counter)
    differences: Counter[int] = field(default_factory=Counter)
    regular: bool = True

    def add_differences(self, differences: pl.Series) -> None:
        """Count the time differences between rows of one episode."""
        if not self.regular:
            return
        for difference, count in differences.value_counts(name="n").head(2 * _MOST_GAPS).iter_rows():
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
        total = sum(self.differences.values()) if self.regular else 0
        if total:
            usual, count = max(self.differences.items(), key=lambda item: (item[1], -item[0]))
            longer = sum(n for difference, n in self.differences.items() if difference > usual)
            if longer and count >= _REGULAR * total:
                notes.append(
                    f"{longer} of {counted(total, 'step')} within episodes span more time than the usual "
                    "one: where rows are missing, a next observation is the one after the gap"
                )
        if self.derived:
            lost = (
                f"; {counted(self.left_out, 'row', 'was', 'were')} left out: the last step of an episode "
                "that did not terminate has no next observation in this table"
            )
            notes.append(
                f"next observations were taken from the rows that follow in time{lost * bool(self.left_out)}"
            )
        if self.cut:
            notes.append(
                f"{counted(self.cut, 'episode', 'that ends', 'that end')} without a flag "
                f"{_were(self.cut)} marked as truncated"
            )
        return tuple(notes)


def _were(count: int) -> str:
    return "was" if count == 1 else "were"


def assumptions(rows: TableRows, survey: TableSurvey, roles: Roles, space: ActionSpace) -> list[str]:
    """How types were taken that leave it open."""
    notes, time = [], roles.time
    decimals = [name for name, kind in rows.types.items() if kind.is_decimal()]
    if decimals:
        notes.append(f"decimals were read as float64: {', '.join(decimals)}")
    kind = rows.types.get(time or "")
    without_zone = kind == pl.Time or (isinstance(kind, pl.Datetime) and kind.time_zone is None)
    if without_zone or (time and time in rows.texts and rows.texts[time].is_naive):
        notes.append(
            f"times in {time} have no UTC offset and were read as UTC; where a local clock was set "
            "back, rows of that hour may be out of order"
        )
    single = len(roles.action) == 1 and roles.action[0] not in survey.widths
    floats = survey.action_range is None and not survey.categories
    if single and floats and survey.actions_whole and not isinstance(space, Discrete):
        notes.append(
            "all actions are whole numbers stored as fractions and were taken as continuous; "
            "--discrete N declares choices"
        )
    return notes


def left_open(roles: Roles) -> list[str]:
    """What a mapping leaves open, and how it was taken."""
    notes = []
    if roles.stands_alone:
        notes.append("no episode and no time column is named: every row stands alone")
    elif roles.episode is None:
        notes.append("no episode column is named: the rows were taken as one record, cut where flags end it")
    if roles.time is None and not roles.stands_alone:
        notes.append("no time column is named: rows were taken in the order of the table")
    if roles.terminal is None:
        notes.append("no terminal column is named: no episode was taken to have ended by itself")
    return notes
