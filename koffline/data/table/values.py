"""Values in a table: texts as numbers and times, flags, categories; problems and
counts.
"""

from __future__ import annotations

import contextlib
import datetime
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from koffline.data.raw import GAPS, ORDER, STARTS, UNFOLLOWED
from koffline.data.spaces import ONE_HOT, Encoding
from koffline.errors import DataError, counted, nearest_name

_NARROW = (pl.Boolean, pl.Float16, pl.Float32, pl.Int8, pl.UInt8, pl.Int16, pl.UInt16)
TRUE = ("true", "t", "yes", "y", "1", "1.0")
FALSE = ("false", "f", "no", "n", "0", "0.0")
# 2024-01-31, with 12:00 or 12:00:00.5 behind it: nanoseconds since 1970 in 64 bits
# reach from 1677 to 2262.
_TIME = (
    r"^(?<date>(?:1[7-9]|2[01])\d{2}-\d{2}-\d{2})"
    r"(?:[T ](?<clock>\d{2}:\d{2})(?<second>:\d{2}(?:\.\d{1,9})?)?)?"
    r"(?<zone>Z|[+-]\d{2}(?::?\d{2})?)$"
)


def _instants(texts: pl.Expr) -> pl.Expr:
    """Times with an offset as instants to the nanosecond; null if a text is no such
    time.
    """
    clock = pl.field("clock").fill_null("00:00")
    second = pl.field("second").fill_null(":00")
    whole = pl.concat_str(
        pl.field("date"), pl.lit("T"), clock, second, pl.field("zone")
    ).alias("whole")
    groups = texts.str.extract_groups(_TIME)
    instants = groups.struct.with_fields(whole).struct.field("whole")
    return instants.str.to_datetime(
        "%Y-%m-%dT%H:%M:%S%.f%#z", time_unit="ns", strict=False
    )


# In columns of numbers, times and flags these words are missing values, in whatever
# case; in columns of labels they are labels (NA is Namibia).
MISSING_WORDS = (
    "na",
    "n/a",
    "nan",
    "-nan",
    "null",
    "none",
    "#n/a",
    "#n/a n/a",
    "#na",
    "<na>",
)
# 1.234 or 12.345.678,9: points that mark thousands, where commas mark decimals.
_THOUSANDS = r"^[+-]?[1-9]\d{0,2}(\.\d{3})+(,\d*)?$"


def is_missing_word(texts: pl.Expr) -> pl.Expr:
    """Whether texts without blanks around them are words for a missing value; null
    stays null.
    """
    return texts.str.to_lowercase().is_in(MISSING_WORDS)


def _without_missing_words(texts: pl.Expr) -> pl.Expr:
    return pl.when(~is_missing_word(texts)).then(texts)


def _with_decimal_commas(texts: pl.Expr) -> pl.Expr:
    """Texts such as 3,5 and 1.234,5 as floats; null if a point marks no thousands."""
    has_thousands = texts.str.contains(_THOUSANDS)
    digits = (
        pl.when(has_thousands)
        .then(texts.str.replace_all(".", "", literal=True))
        .otherwise(texts)
    )
    numbers = digits.str.replace(",", ".", literal=True).cast(pl.Float64, strict=False)
    return pl.when(~digits.str.contains(".", literal=True)).then(numbers)


# Ways to read texts, the narrowest first; all but the first two are for times.
WHOLE = "whole numbers"
NUMBERS = "numbers"
LOCAL = "times without a UTC offset"
_PLAIN_WAYS: dict[str, Callable[[pl.Expr], pl.Expr]] = {
    WHOLE: lambda texts: texts.cast(pl.Int64, strict=False),
    NUMBERS: lambda texts: texts.cast(pl.Float64, strict=False),
    "times with a UTC offset": _instants,
    "dates": lambda texts: _instants(texts + "T00:00Z"),
    LOCAL: lambda texts: _instants(texts + "Z"),
}
TEXT_WAYS = tuple(_PLAIN_WAYS)
# Numbers with decimal commas, only where the mapping says so; texts in which words for
# missing are missing.
DECIMAL_COMMAS = "numbers with decimal commas"
FLAGS_OR_IDS = "texts"
_WAYS = {
    **_PLAIN_WAYS,
    DECIMAL_COMMAS: _with_decimal_commas,
    FLAGS_OR_IDS: _without_missing_words,
}


def as_read(column: str, way: str) -> pl.Expr:
    """A column of texts as integers, floats or date-times; null or NaN if a text is
    none.
    """
    return _WAYS[way](pl.col(column).str.strip_chars()).alias(column)


def unread(column: pl.Series, ways: Iterable[str]) -> dict[str, pl.Series]:
    """For each way to read texts, a mask of the texts that it cannot read, words for
    missing apart.
    """
    frame = column.to_frame()
    name = column.name
    is_word = frame.select(is_missing_word(pl.col(name).str.strip_chars())).to_series()
    read = {way: frame.select(as_read(name, way)).to_series() for way in ways}
    return {
        way: values.is_null() & column.is_not_null() & ~is_word
        for way, values in read.items()
    }


def number_type(kinds: Iterable[Any], bytes_stay: bool = False) -> Any:
    """Common numeric type of columns of these types; it depends on the types only,
    never on values.

    uint8 may stay if all are; float16, float32 and integers of at most 16 bits become
    float32, others float64.
    """
    bases = [getattr(kind, "inner", kind) for kind in kinds]
    if bytes_stay and all(base == pl.UInt8 for base in bases):
        return pl.UInt8()
    if all(base in _NARROW for base in bases):
        return pl.Float32()
    return pl.Float64()


def read_flags(frame: pl.DataFrame, name: str | None, source: str) -> pl.Series:
    """Yes/no, 0/1, or texts such as true and false, as booleans (N,); all false without
    a column.

    Raises DataError for anything else.
    """
    if name is None:
        return pl.repeat(False, frame.height, eager=True)
    column = frame[name]
    if column.dtype == pl.Boolean:
        return column.fill_null(False)  # missing values are refused elsewhere
    compare = ""
    if column.dtype == pl.String:
        lower = column.str.strip_chars().str.to_lowercase()
        yes = lower.is_in(TRUE)
        no = lower.is_in(FALSE)
        compare = f", or compare: \"{name} == '…'\""
    else:
        number = column.cast(pl.Float64)
        yes = number == 1
        no = number == 0
    wrong = ~(yes | no) & column.is_not_null()
    if wrong.any():
        value = column[int(wrong.arg_max() or 0)]
        raise DataError(
            f"{source}: column {name} holds {value!r}, neither yes nor no; give true"
            f" and false, or 1 and 0{compare}"
        )
    return yes.fill_null(False)


def features(
    column: str, encoding: Encoding, spelled: Mapping[str, str]
) -> list[pl.Expr]:
    """The numbers that encode a column; missing values stay missing.

    ``spelled``: as categories are meant.
    """
    texts = pl.col(column).cast(pl.String)
    if spelled:
        texts = texts.replace(dict(spelled))
    if encoding.kind != ONE_HOT:
        known = pl.Series(encoding.categories, dtype=pl.String)
        codes = texts.replace_strict(
            known, range(len(known)), default=None, return_dtype=pl.Int16
        )
        return [codes.alias(column)]
    pairs = zip(encoding.categories, encoding.names(column), strict=True)
    return [(texts == category).cast(pl.Int8).alias(name) for category, name in pairs]


_MOST_LISTED = 20
# A name that ends in a word for an id: user_id, userId, customer.
ID_NAME = re.compile(
    r"(?:^|[_. -])"
    r"(?i:id|uid|guid|uuid|user|customer|patient|client|visitor|subscriber)$"
    r"|[a-z]I[dD]$"
)


class Problems:
    """Sentences on what is wrong with a table, each once; ``refuse`` raises one
    DataError with all.
    """

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
        if not self.found:
            return
        if len(self.found) == 1:
            problem = self.found[0]
            if problem.startswith(("has ", "is ", "lacks ")):
                raise DataError(f"{self.source} {problem}")
            raise DataError(f"{self.source}: {problem}")
        shown = [
            f"({number}) {problem}"
            for number, problem in enumerate(self.found[:_MOST_LISTED], 1)
        ]
        n_hidden = len(self.found) - len(shown)
        if n_hidden:
            shown.append(f"and {n_hidden} more")
        raise DataError(
            f"{self.source} has {len(self.found)} problems: {'; '.join(shown)}"
        )


def is_pattern(name: str) -> bool:
    """Whether polars reads a column's name as a pattern of names; such columns get no
    role.
    """
    return name == "*" or (name.startswith("^") and name.endswith("$"))


def hashed(ids: pl.Series) -> pl.Series:
    """Hash ids to 64 bits.

    A collision is harmless: both ids go to the same temporary file.
    """
    return ids.hash(0).alias("id")


_FEW = 0.01  # share of the steps: fewer gaps are only a note
# bins per octave of the steps' lengths: steps of about equal length share a bin
_PARTS = 16
# bins from the usual step of a regular log to a gap
_LONGER = int(np.ceil(np.log2(1.5) * _PARTS))
# Tukey's "far out": this many interquartile ranges above the third quartile (of the
# logarithm)
_FAR = 3.0
_PER_SECOND = {"ms": 1e3, "us": 1e6, "ns": 1e9}
# days as whole numbers: 20241027
_FIRST_DAY = 19_000_101
_LAST_DAY = 20_991_231
# Episodes, and the share of them, that begin after the first step: fewer are no note.
_FEW_LATE = 5
_LATE = 0.1


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
    """Histogram of time steps within episodes, by the logarithm of their length, with
    one example each.

    ``unit``: seconds per unit of time, unless times are plain numbers.
    """

    counts: Counter[int] = field(default_factory=Counter)
    first: dict[int, tuple[str, float]] = field(default_factory=dict)
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
        bins = (pl.col("length").log(2) * _PARTS).round().cast(pl.Int64)
        by_length = steps.group_by(bins.alias("bin")).agg(
            pl.len(), pl.first("before"), pl.first("length").alias("example")
        )
        for length, count, before, example in by_length.iter_rows():
            self.counts[length] += count
            self.first.setdefault(length, (str(before), example))

    def sentences(self) -> list[str]:
        """Notes on outlying time steps, where rows may be missing.

        If most steps have one length, the log is regular, and any longer step is a gap.
        The same holds if lengths vary but cluster again at twice the usual length. In
        other logs, only steps whose logarithm is an outlier are gaps.
        """
        if not self.counts:
            return []
        # Lengths are bins of the logarithm from here on: `_PARTS` more are twice as long.
        lengths, numbers = np.array(sorted(self.counts.items())).T
        n_steps = numbers.sum()
        share = np.cumsum(numbers) / n_steps
        low, middle, high = (
            int(lengths[np.searchsorted(share, quartile)])
            for quartile in (0.25, 0.5, 0.75)
        )
        valley = self._valley_above(middle)
        is_even = self.counts[middle] > n_steps / 2
        is_regular = is_even or valley is not None
        bound: float
        if is_even:
            bound = middle + _LONGER
        elif valley is not None:
            bound = valley
        else:
            bound = high + max(_FAR * (high - low), _LONGER) + 1
        is_gap = lengths >= bound
        gaps = lengths[is_gap]
        gap_numbers = numbers[is_gap]
        if not len(gaps):
            return []
        head = GAPS
        if gap_numbers.sum() < _FEW * n_steps:
            head = "few " + GAPS
        rows = ""
        if is_regular:
            # rows that all gaps together hide: a gap of three steps hides two
            hidden = np.round(2.0 ** ((gaps - middle) / _PARTS)) - 1.0
            n_lost = float(hidden @ gap_numbers)
            missing = n_lost / (n_lost + n_steps)
            rows = f", about {missing:.1%} of the steps may be missing"
        steps = counted(int(gap_numbers.sum()), "step", "is", "are")
        before, longer = self.first[int(gaps[0])]
        _, usual = self.first[middle]
        return [
            f"{head}{steps} longer than others (for example {self._shown(longer)}"
            f" before {before}; usually {self._shown(usual)}){rows}; where rows are"
            " missing, the row before is joined to a state that it did not lead to;"
            " give what follows another episode id"
        ]

    def _valley_above(self, middle: int) -> int | None:
        """The bin between the usual length and a cluster at twice that length; None if
        lengths do not cluster there, or if most are not near the usual one.

        middle: the bin of the median length.
        """
        near = {
            part: self.counts[middle + part] for part in range(-_LONGER, _PARTS + 4)
        }
        # mean numbers of steps of three bins in the valley, and of seven around double
        depth, place = min(
            (sum(near[part + i] for i in (-1, 0, 1)) / 3, part)
            for part in range(4, _LONGER + 3)
        )
        double = sum(near[part] for part in range(_PARTS - 3, _PARTS + 4)) / 7
        within = sum(near[part] for part in range(-_LONGER, _LONGER))
        if within > 0.75 * self.counts.total() and double > 3 + 1.5 * depth:
            return middle + place
        return None

    def _shown(self, length: float) -> str:
        if self.unit is None:
            return f"{length:.6g}"
        return str(datetime.timedelta(seconds=round(length * self.unit, 6)))


def without(column: pl.Expr, no_values: Sequence[str | int | float]) -> pl.Expr:
    """A column in which some values, numbers or texts, are missing."""
    texts = [str(value).strip() for value in no_values]
    as_series = pl.Series(texts, dtype=pl.String)
    numbers = as_series.cast(pl.Float64, strict=False).drop_nulls().to_list()
    is_none = column.cast(pl.String).str.strip_chars().is_in(texts)
    if numbers:
        as_numbers = column.cast(pl.Float64, strict=False)
        is_none = is_none | as_numbers.is_in(numbers)
    return pl.when(is_none.fill_null(False)).then(None).otherwise(column)


@dataclass
class TableCounts:
    """Counts of changes to the rows, summed over all pieces of a table.

    ``left_out``: rows left out because they have no next observation; None if every row
    of the table has one.
    ``dropped_others``: repeated rows that differ from all that stay.
    ``final_states``: last rows without an action. ``ends_lost``: rows flagged terminal
    that were left out. ``firsts``: number of episodes by their first step.
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

    def _of_repeated_rows(self) -> Iterator[str]:
        """Yield notes on rows that repeat others."""
        if self.repeated:
            yield f"{counted(self.repeated, 'repeated row', 'was', 'were')} dropped"
        if self.dropped_others:
            rows = counted(self.dropped_others, "row", "was", "were")
            yield (
                f"{ORDER}{rows} dropped that stand elsewhere in the table and differ"
                " from those that stay; where ids begin anew, make them different"
            )

    def sentences(self, is_timed: bool) -> Iterator[str]:
        """Yield notes for people, in the order of the changes. is_timed: whether the
        mapping names a time.
        """
        yield from self._of_repeated_rows()
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
        if self.reordered and is_timed:
            yield "the rows of each episode were put together and in time order"
        elif self.reordered:
            yield (
                f"{ORDER}rows of several episodes are mixed; without a time column the"
                " table's order was taken; name it (--time), or sort the table by"
                " episode and time; where ids begin anew, make them different first"
            )
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
        first = min(self.firsts, default=2)
        total = self.firsts.total()
        late = total - self.firsts[first]
        if first in (0, 1) and late >= max(_FEW_LATE, _LATE * total):
            yield (
                f"{STARTS}{late} of {total} episodes begin after the first step: the"
                " value is that of such states too; leave these out if it should not be"
            )
        yield from self.steps.sentences()
