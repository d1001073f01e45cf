"""Counts of changes to the rows of a table, and lengths of the time steps between rows."""

from __future__ import annotations

import datetime
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from koffline.data.columns import counted
from koffline.data.raw import UNFOLLOWED

GAPS = "gaps: "  # beginning of a note on missing rows
ORDER = "order: "  # beginning of a note on rows whose order is not known
_FEW = 0.01  # share of the steps: fewer gaps are only a note
_PARTS = 16  # bins per octave: steps of about equal length share a bin
_LONGER = int(np.ceil(np.log2(1.5) * _PARTS))  # bins from the usual step of a regular log to a gap
_FAR = 3.0  # Tukey's "far out": this many interquartile ranges above the third quartile (of the logarithm)


def as_days(times: pl.Series) -> pl.Series | None:
    """Dates, of whole numbers such as 20241027; None where one is no date from 1900 to 2099."""
    if not times.dtype.is_integer() or not times.is_between(19_000_101, 20_991_231).all() or not len(times):
        return None
    days = times.cast(pl.String).str.to_date("%Y%m%d", strict=False)
    return None if days.null_count() else days


_BY_CHANCE = 5  # rows: fewer may be last ones by chance


def only_last(values: pl.Series, episodes: pl.Series, times: pl.Series | None) -> list[Any]:
    """Values that stand in last rows of episodes alone; none where episodes have fewer than two rows."""
    rows = pl.DataFrame({"value": values, "episode": episodes}).with_row_index("time")
    rows = rows if times is None else rows.with_columns(times.alias("time"))
    rows = rows.unique(maintain_order=True).sort("episode", "time", maintain_order=True)
    is_last = (pl.col("episode") != pl.col("episode").shift(-1)).fill_null(True)
    seen = rows.with_columns(last=is_last).drop_nulls().group_by("value").agg(pl.len(), pl.col("last").all())
    found = seen.filter(pl.col("last") & (pl.col("len") >= _BY_CHANCE))["value"].sort().to_list()
    return found if 2 * rows["episode"].n_unique() <= rows.height else []


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
