"""Gaps: time steps within episodes that are longer than others, where rows may be
missing.
"""

from __future__ import annotations

import datetime
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import polars as pl

from koffline.data.raw import GAPS
from koffline.errors import counted

_FEW = 0.01  # share of the steps: fewer gaps are only a note
# Steps are counted by the logarithm of their length; steps of about equal length share
# a bin.
_BINS_PER_OCTAVE = 16
# bins from the usual step of a regular log to a gap, which is 1.5 times as long
_BINS_TO_GAP = int(np.ceil(np.log2(1.5) * _BINS_PER_OCTAVE))
# Tukey's "far out": this many interquartile ranges above the third quartile (of the
# logarithm)
_FAR = 3.0
_PER_SECOND = {"ms": 1e3, "us": 1e6, "ns": 1e9}
# days as whole numbers: 20241027
_FIRST_DAY = 19_000_101
_LAST_DAY = 20_991_231


def _wide(numbers: pl.Series) -> pl.Series:
    """Numbers in a type that holds the difference of any two of them; -100 and 100 are
    both of 8 bits.

    Differences of times in nanoseconds stay exact; times of 64 bits without a sign
    become floats.
    """
    if not numbers.dtype.is_integer():
        return numbers
    if numbers.dtype == pl.UInt64:
        return numbers.cast(pl.Float64)
    return numbers.cast(pl.Int64)


def _are_days(times: pl.Series) -> bool:
    """Whether times are whole numbers that look like days."""
    # In a column's own type of 8 or 16 bits polars cannot even write these bounds.
    return bool(
        times.dtype.is_integer()
        and len(times)
        and _wide(times).is_between(_FIRST_DAY, _LAST_DAY).all()
    )


@dataclass
class StepLengths:
    """Histogram of time steps within episodes, by the logarithm of their length.

    counts: number of steps by bin. examples: by bin, the first step of that length: the
    time before it as a text, and its length. unit: seconds per unit of time, None if
    times are plain numbers.
    """

    counts: Counter[int] = field(default_factory=Counter)
    examples: dict[int, tuple[str, float]] = field(default_factory=dict)
    unit: float | None = None

    def add(self, times: pl.Series, inside: pl.Series) -> None:
        """Add times (N,) in order; ``inside``: (N,) whether a row continues the episode
        of the row before.
        """
        if _are_days(times):
            days = times.cast(pl.String).str.to_date("%Y%m%d", strict=False)
            if not days.null_count():
                times = days
        if times.dtype == pl.Date:
            self.unit = 86_400.0
        elif times.dtype.is_temporal():
            self.unit = 1.0 / _PER_SECOND[getattr(times.dtype, "time_unit", "ns")]
        lengths = _wide(times.to_physical()).diff().cast(pl.Float64)
        steps = pl.DataFrame({"before": times, "length": lengths})
        steps = steps.filter(
            inside & (steps["length"] > 0) & steps["length"].is_finite()
        )
        bins = (pl.col("length").log(2) * _BINS_PER_OCTAVE).round().cast(pl.Int64)
        by_bin = steps.group_by(bins.alias("bin")).agg(
            pl.len(), pl.first("before"), pl.first("length").alias("example")
        )
        for number, count, before, example in by_bin.iter_rows():
            self.counts[number] += count
            self.examples.setdefault(number, (str(before), example))

    def sentences(self) -> list[str]:
        """A note on outlying time steps, where rows may be missing; none without any.

        If most steps have one length, the log is regular, and any longer step is a gap.
        The same holds if lengths vary but cluster again at twice the usual length. In
        other logs, only steps whose logarithm is an outlier are gaps.
        """
        if not self.counts:
            return []
        bins, numbers = np.array(sorted(self.counts.items())).T
        n_steps = int(numbers.sum())
        share = np.cumsum(numbers) / n_steps
        low, usual, high = (
            int(bins[np.searchsorted(share, quartile)])
            for quartile in (0.25, 0.5, 0.75)
        )
        valley = self._valley_above(usual)
        is_even = self.counts[usual] > n_steps / 2
        bound: float
        if is_even:
            bound = usual + _BINS_TO_GAP
        elif valley is not None:
            bound = valley
        else:
            bound = high + max(_FAR * (high - low), _BINS_TO_GAP) + 1
        is_gap = bins >= bound
        if not is_gap.any():
            return []
        n_gaps = int(numbers[is_gap].sum())
        head = GAPS
        if n_gaps < _FEW * n_steps:
            head = "few " + GAPS
        lost = ""
        if is_even or valley is not None:
            # rows that all gaps together hide: a gap of three steps hides two
            octaves = (bins[is_gap] - usual) / _BINS_PER_OCTAVE
            n_lost = float((np.round(2.0**octaves) - 1.0) @ numbers[is_gap])
            share_lost = n_lost / (n_lost + n_steps)
            lost = f", about {share_lost:.1%} of the steps may be missing"
        gaps = counted(n_gaps, "step", "is", "are")
        before, gap_length = self.examples[int(bins[is_gap][0])]
        _, usual_length = self.examples[usual]
        return [
            f"{head}{gaps} longer than others (for example {self._shown(gap_length)}"
            f" before {before}; usually {self._shown(usual_length)}){lost}; where rows"
            " are missing, the row before is joined to a state that it did not lead to;"
            " give what follows another episode id"
        ]

    def _valley_above(self, usual: int) -> int | None:
        """The bin between the usual length and a cluster at twice that length; None if
        lengths do not cluster there, or if most are not near the usual one.

        usual: the bin of the median length.
        """
        near = {
            distance: self.counts[usual + distance]
            for distance in range(-_BINS_TO_GAP, _BINS_PER_OCTAVE + 4)
        }
        # mean numbers of steps of three bins in the valley, and of seven around double
        depth, to_valley = min(
            (sum(near[distance + i] for i in (-1, 0, 1)) / 3, distance)
            for distance in range(4, _BINS_TO_GAP + 3)
        )
        around_double = range(_BINS_PER_OCTAVE - 3, _BINS_PER_OCTAVE + 4)
        double = sum(near[distance] for distance in around_double) / 7
        n_near = sum(near[distance] for distance in range(-_BINS_TO_GAP, _BINS_TO_GAP))
        if n_near > 0.75 * self.counts.total() and double > 3 + 1.5 * depth:
            return usual + to_valley
        return None

    def _shown(self, length: float) -> str:
        """A length of steps for people: a number, or hours, minutes and seconds."""
        if self.unit is None:
            return f"{length:.6g}"
        return str(datetime.timedelta(seconds=round(length * self.unit, 6)))
