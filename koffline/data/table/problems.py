"""Sentences about a table: what is wrong with it, raised together, and notes on what was done to its rows."""

from __future__ import annotations

import contextlib
import datetime
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from koffline.data.columns import counted
from koffline.data.raw import UNFOLLOWED
from koffline.errors import DataError, nearest_name

GAPS = "gaps: "  # beginning of a note on missing rows
ORDER = "order: "  # beginning of a note on rows whose order is not known
_FEW = 0.01  # share of the steps: fewer gaps are only a note
_PARTS = 16  # bins per octave: steps of about equal length share a bin
_LONGER = int(np.ceil(np.log2(1.5) * _PARTS))  # bins from the usual step of a regular log to a gap
_FAR = 3.0  # Tukey's "far out": this many interquartile ranges above the third quartile (of the logarithm)
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
        remedy = "name single columns here" if is_pattern(name) else nearest_name(name, names)
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


def as_days(times: pl.Series) -> pl.Series | None:
    """Dates, of whole numbers such as 20241027; None where one is no date from 1900 to 2099."""
    if not times.dtype.is_integer() or not times.is_between(19_000_101, 20_991_231).all() or not len(times):
        return None
    days = times.cast(pl.String).str.to_date("%Y%m%d", strict=False)
    return None if days.null_count() else days


@dataclass
class StepLengths:
    """Histogram of time steps between rows of an episode, by the logarithm of length, with one example each.

    ``unit``: seconds, where times are not plain numbers.
    """

    counts: Counter[int] = field(default_factory=Counter)
    first: dict[int, tuple[str, float]] = field(default_factory=dict)
    unit: float | None = None

    def add(self, times: pl.Series, inside: pl.Series) -> None:
        """Add times in order; ``inside``: whether a row continues the episode of the row above."""
        days = as_days(times)
        times = times if days is None else days
        if times.dtype.is_temporal():
            per_second = {"ms": 1e3, "us": 1e6, "ns": 1e9}.get(getattr(times.dtype, "time_unit", ""), 1e9)
            self.unit = 86_400.0 if times.dtype == pl.Date else 1.0 / per_second
        steps = times.to_physical().diff().cast(pl.Float64).to_numpy()
        rows = np.flatnonzero(inside.to_numpy() & (steps > 0) & np.isfinite(steps))
        lengths = np.round(np.log2(steps[rows]) * _PARTS).astype(np.int64)
        for length, place, count in zip(
            *np.unique(lengths, return_index=True, return_counts=True), strict=True
        ):
            self.counts[int(length)] += int(count)
            row = int(rows[place])
            self.first.setdefault(int(length), (str(times[row]), float(steps[row])))

    def sentences(self) -> list[str]:
        """Note on outlying time steps, where rows may be missing.

        Most steps of a regular log have one length, and any longer step is a gap; so it is where lengths vary
        but heap up again at twice the usual one. In any other log only steps whose logarithm is an outlier
        are gaps.
        """
        lengths = np.array(sorted(self.counts), dtype=np.int64)
        if not len(lengths):
            return []
        number = np.array([self.counts[int(length)] for length in lengths])
        share = np.cumsum(number) / number.sum()
        low, middle, high = (int(lengths[np.searchsorted(share, part)]) for part in (0.25, 0.5, 0.75))
        near = {part: self.counts[middle + part] for part in range(-_LONGER, _PARTS + 4)}
        valley, place = min((sum(near[p + i] for i in (-1, 0, 1)) / 3, p) for p in range(4, _LONGER + 3))
        double = sum(near[part] for part in range(_PARTS - 3, _PARTS + 4)) / 7
        within = sum(near[part] for part in range(-_LONGER, _LONGER))
        is_even = self.counts[middle] > number.sum() / 2
        is_jittered = within > 0.75 * number.sum() and double > 3 + 1.5 * valley
        is_regular = is_even or is_jittered
        far = high + max(_FAR * (high - low), _LONGER)
        bound = middle + _LONGER if is_even else middle + place if is_jittered else far
        gaps = lengths[lengths >= bound] if is_regular else lengths[lengths > bound]
        if not len(gaps):
            return []
        where, length = self.first[int(gaps[0])]
        said = counted(int(number[-len(gaps) :].sum()), "step", "is", "are")
        usual, found = self._shown(self.first[middle][1]), self._shown(length)
        lost = np.round(2.0 ** ((gaps - middle) / _PARTS)) - 1.0  # rows, at each
        share = float(lost @ number[-len(gaps) :]) / float(lost @ number[-len(gaps) :] + number.sum())
        head = "few " + GAPS if number[-len(gaps) :].sum() < _FEW * number.sum() else GAPS
        rows = f", about {share:.1%} of the steps may be missing" if is_regular else ""
        return [
            f"{head}{said} longer than others (for example {found} before {where}; usually {usual}){rows}; "
            "where rows are missing, the row before is joined to a state that it did not lead to; give what "
            "follows another episode id"
        ]

    def _shown(self, length: float) -> str:
        if self.unit is None:
            return f"{length:.6g}"
        return str(datetime.timedelta(seconds=round(length * self.unit, 6)))


@dataclass
class TableCounts:
    """Counts of changes to the rows, summed over all pieces of a table."""

    episodes: int = 0
    left_out: int = 0
    repeated: int = 0
    ended: int = 0
    reordered: bool = False
    is_timed: bool = True
    cut: int = 0
    derived: bool = False
    imputed: Counter[tuple[str, str]] = field(default_factory=Counter)
    steps: StepLengths = field(default_factory=StepLengths)

    def sentences(self) -> tuple[str, ...]:
        """Notes for people, in the order in which things were done."""
        notes = [
            f"{counted(count, 'missing value', f'in {column} was', f'in {column} were')} replaced ({how})"
            for (column, how), count in sorted(self.imputed.items())
        ]
        if self.repeated:
            notes.insert(0, f"{counted(self.repeated, 'repeated row', 'was', 'were')} dropped")
        if self.ended:
            lost = counted(self.ended, "row", "was", "were")
            notes.append(f"{lost} left out: from a missing value on, as asked, to the end of the episode")
        if self.reordered and self.is_timed:
            notes.append("the rows of each episode were put together and in time order")
        elif self.reordered:
            said = "rows of several episodes are mixed; without a time column the table's order was taken"
            notes.append(f"{ORDER}{said}; name it (--time), or sort the table by episode and time")
        if self.derived:
            lost = f"; {counted(self.left_out, 'row', 'was', 'were')} left out: {UNFOLLOWED} in this table"
            taken = "next observations were taken from the rows that follow"
            notes.append(taken + (lost if self.left_out else ""))
        if self.cut:
            ending = counted(self.cut, "episode", "that ends", "that end")
            notes.append(f"{ending} without a flag {'was' if self.cut == 1 else 'were'} marked as truncated")
        return (*notes, *self.steps.sentences())
