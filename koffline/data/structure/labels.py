"""Whole numbers that look like labels: few values, and nothing in the log knows their
order.

A quantity shows its order: one step leads to a value near the present one, and
neighbouring values have similar rewards, actions and next values. If the values were
numbered anew at random, that would be gone. A label shows as much order as a random
numbering of its values. For each whole-number column two things are measured:

- *structure*: what comes next, the reward or the action depends on the value (else its
  numbering does not matter, and nothing is said);
- *order*: the length of steps, on a line and on a circle, the variety of strides, and
  the differences between neighbouring values' mean next value, reward, action and other
  columns, each as a share of its mean over random numberings.

A column is reported if it has structure, and neither measure with structure tells it
from a random numbering: no p-value is small and no share is far below one. That errs
towards silence: a label that is numbered partly in order, such as the cell
``row * width + column`` of a grid, is not reported.

Rows of one episode are no independent witnesses: an age is constant in an episode, and
so is all else that makes its rewards high or low. So the rows of one episode with one
value count once, with their means, and equal steps of one episode count once. With
fewer than 20 episodes the stretches of rows with one value are compared within their
episodes instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped
from scipy import special

NAME = "labels"
# few values show too little of their order
FEWEST_VALUES = 8
MOST_VALUES = 1000
_ROWS_PER_VALUE = 10  # on average, and _FEWEST_ROWS at each value that is looked at
_FEWEST_ROWS = 5
_FEWEST_VISITS = 2  # of a value whose means are compared: one shows no spread
_ODD = 0.1  # of the values, whose means say nothing of the others
_FEWEST_UNITS = 20  # fewer episodes are compared within themselves
_MOST_ROWS = 20_000  # looked at, evenly spread
_MOST_COLUMNS = 50  # looked at; wide observations are images, spectra or one-hot
_MOST_PROFILES = 20
_NUMBERINGS = 400
_STRUCTURE = 1e-8  # p-value
_CLEARLY_MORE = 1.3  # equal pairs of steps, relative to shuffled next values
_ORDER = 0.05  # p-value below which an order is taken to be there
# share of a random numbering's, below which an order is taken to be there
_ORDERED = 0.5


@dataclass(frozen=True)
class LabelColumn:
    """A column of whole numbers that looks like labels.

    ``column``: its number. ``values``: how many different ones there are. ``effect``:
    the smallest of the measures of order, as a share of its mean over random numberings
    (0: in order, 1: as at random). ``p_value``: the smallest p-value of an order.
    ``structure_p_value``: of the values' influence. ``influence``: what depends on the
    values, in words.
    """

    column: int
    label: str
    values: int
    effect: float
    p_value: float
    structure_p_value: float
    influence: str
    name: str = NAME

    @property
    def statement(self) -> str:
        """What was seen, in words."""
        return (
            f"{self.label} holds {self.values} whole numbers that look like labels read"
            f" as quantities: {self.influence} depends on them, but not on their order"
            " (neighbouring numbers are no more alike than any two)"
        )

    @property
    def remedy(self) -> str:
        """What to do, for tables and for arrays."""
        return (
            f"if they are labels, say so (--encode '{self.label}=one-hot'); if"
            " quantities, leave it"
        )

    def __str__(self) -> str:
        return f"{self.statement}; {self.remedy}"


@dataclass(frozen=True)
class _Measure:
    """Order of the values in one respect: its share of a random numbering's, and its
    two-sided p-value.

    influence: the respect in words, such as ``the reward``.
    """

    influence: str
    share: float
    p_value: float
    structure_p_value: float


@dataclass(frozen=True, eq=False)
class _SampledRows:
    """The rows that are looked at.

    units: the number (N,) of the episode or cluster of each row; rows of different
    units are independent. goes_on: rows whose next value counts.
    """

    units: Int[np.ndarray, " row"]
    goes_on: Bool[np.ndarray, " row"]
    rewards: Float[np.ndarray, " row"]
    actions: Shaped[np.ndarray, "row ..."]

    @property
    def has_many_units(self) -> bool:
        """Whether there are enough units to compare them with each other."""
        return len(np.unique(self.units)) >= _FEWEST_UNITS


@dataclass(frozen=True, eq=False)
class _Visits:
    """Rows of one unit with one value, counted once; ``C`` visits.

    of_row: the visit (N,) of each row. value: the value (C,) of a visit as a number
    below ``count``. rows: the number (C,) of rows. unit: the unit (N,) of each row if
    visits are compared within their units, else None.
    """

    of_row: Int[np.ndarray, " row"]
    value: Int[np.ndarray, " visit"]
    rows: Int[np.ndarray, " visit"]
    count: int
    unit: Int[np.ndarray, " row"] | None

    @classmethod
    def of(
        cls,
        values: Int[np.ndarray, " row"],
        units: Int[np.ndarray, " row"],
        count: int,
        has_many_units: bool,
    ) -> _Visits:
        """All rows of a unit with one value; with few units, each stretch of such
        rows.

        values: numbers (N,) below ``count``.
        """
        _, unit = np.unique(units, return_inverse=True)
        if has_many_units:
            keys = unit * count + values
            _, first, of_row, rows = np.unique(
                keys, return_index=True, return_inverse=True, return_counts=True
            )
            return cls(
                of_row=of_row, value=values[first], rows=rows, count=count, unit=None
            )
        is_new = np.ones(len(values), dtype=np.bool_)
        is_new[1:] = (np.diff(values) != 0) | (np.diff(unit) != 0)
        of_row = np.cumsum(is_new) - 1
        return cls(
            of_row=of_row,
            value=values[is_new],
            rows=np.bincount(of_row),
            count=count,
            unit=unit,
        )

    def means(self, numbers: Float[np.ndarray, " row"]) -> Float[np.ndarray, " visit"]:
        """Mean (C,) of numbers (N,) in each visit; with few units, less their unit's
        mean.
        """
        if self.unit is not None:
            sizes = np.bincount(self.unit)
            of_units = np.bincount(self.unit, weights=numbers) / sizes
            numbers = numbers - of_units[self.unit]
        sums = np.bincount(self.of_row, weights=numbers, minlength=len(self.rows))
        return sums / self.rows


def find_labels(
    observations: Shaped[np.ndarray, "row ..."],
    next_observations: Shaped[np.ndarray, "row ..."],
    goes_on: Bool[np.ndarray, " row"],
    rewards: Float[np.ndarray, " row"],
    actions: Shaped[np.ndarray, "row ..."],
    units: Int[np.ndarray, " row"] | None = None,
    names: Sequence[str] = (),
) -> tuple[LabelColumn, ...]:
    """Columns of observations that look like labels.

    observations, next_observations: (N, d); of images, (N, h, w), nothing is said.
    goes_on: rows whose next observation counts (not terminated). actions: (N,) of
    discrete actions, or (N, k). units: the episode or cluster (N,) of each row; without
    them all rows are independent. names: of the columns; by default
    ``observations[3]``, or ``observations`` if there is one.
    """
    if observations.ndim != 2 or observations.shape[1] > _MOST_COLUMNS:
        return ()
    count = observations.shape[1]
    chosen = np.arange(
        0, len(observations), max(1, -(-len(observations) // _MOST_ROWS))
    )
    states = observations[chosen]
    following = next_observations[chosen]
    if units is None:
        units = np.arange(len(observations))
    if len(names) == count:
        labels = list(names)
    elif count > 1:
        labels = [f"observations[{number}]" for number in range(count)]
    else:
        labels = ["observations"]
    rows = _SampledRows(
        units=np.asarray(units)[chosen],
        goes_on=goes_on[chosen],
        rewards=np.asarray(rewards[chosen], dtype=np.float64),
        actions=actions[chosen],
    )
    columns = []
    for column in range(count):
        judgement = _judge(
            values=states[:, column],
            following=following[:, column],
            beside=_OtherColumns.without(states, labels, column),
            rows=rows,
        )
        if judgement is None:
            continue
        columns.append(
            LabelColumn(
                column=column,
                label=labels[column],
                values=judgement.values,
                effect=min(measure.share for measure in judgement.measures),
                p_value=min(measure.p_value for measure in judgement.measures),
                structure_p_value=judgement.strongest.structure_p_value,
                influence=judgement.strongest.influence,
            )
        )
    return tuple(columns)


@dataclass(frozen=True, eq=False)
class _OtherColumns:
    """The other columns (N, d − 1) of the observations, and their names."""

    columns: Shaped[np.ndarray, "row column"]
    names: tuple[str, ...]

    @classmethod
    def without(
        cls, states: Shaped[np.ndarray, "row d"], names: Sequence[str], column: int
    ) -> _OtherColumns:
        """All columns but one."""
        kept = [number for number in range(states.shape[1]) if number != column]
        return cls(
            columns=states[:, kept], names=tuple(names[number] for number in kept)
        )


@dataclass(frozen=True)
class _Judgement:
    """Number of values of a column that looks like labels, and its measures with
    structure.
    """

    values: int
    measures: tuple[_Measure, ...]

    @property
    def strongest(self) -> _Measure:
        """The measure with the clearest structure."""
        return min(self.measures, key=lambda measure: measure.structure_p_value)


def _judge(
    values: Shaped[np.ndarray, " row"],
    following: Shaped[np.ndarray, " row"],
    beside: _OtherColumns,
    rows: _SampledRows,
) -> _Judgement | None:
    """What a column shows if it looks like labels, else None."""
    if not _are_whole(values):
        return None
    known, ranks, counts = np.unique(values, return_inverse=True, return_counts=True)
    if not FEWEST_VALUES <= len(known) <= MOST_VALUES:
        return None
    if len(values) < _ROWS_PER_VALUE * len(known):
        return None
    is_frequent = counts >= _FEWEST_ROWS
    if is_frequent.sum() < FEWEST_VALUES:
        return None
    is_kept = is_frequent[ranks]
    place = np.cumsum(is_frequent) - 1  # of a value among the frequent ones
    frequent = known[is_frequent]
    later = np.searchsorted(frequent, following)
    later = np.minimum(later, len(frequent) - 1)
    has_next = is_kept & rows.goes_on & (frequent[later] == following)
    generator = np.random.default_rng(0)
    measures = [
        *_of_steps(
            now=place[ranks[has_next]],
            later=later[has_next],
            units=rows.units[has_next],
            has_many_units=rows.has_many_units,
            count=len(frequent),
            generator=generator,
        ),
        *_of_profiles(
            values=place[ranks],
            is_kept=is_kept,
            beside=beside,
            rows=rows,
            count=len(frequent),
            generator=generator,
        ),
    ]
    measures = [
        measure for measure in measures if measure.structure_p_value < _STRUCTURE
    ]
    if not measures:
        return None
    if min(measure.share for measure in measures) < _ORDERED:
        return None
    if min(measure.p_value for measure in measures) < _ORDER:
        return None
    return _Judgement(values=len(known), measures=tuple(measures))


def _are_whole(values: Shaped[np.ndarray, " row"]) -> bool:
    """Whether all values are finite whole numbers."""
    if values.dtype.kind in "iu":
        return True
    if values.dtype.kind != "f":
        return False
    return bool((np.isfinite(values) & (values == np.trunc(values))).all())


def _of_steps(
    now: Int[np.ndarray, " step"],
    later: Int[np.ndarray, " step"],
    units: Int[np.ndarray, " step"],
    has_many_units: bool,
    count: int,
    generator: np.random.Generator,
) -> Iterator[_Measure]:
    """Order in steps that change the value: their length on a line and a circle,
    strides, mean next value.
    """
    is_move = now != later
    now = now[is_move]
    later = later[is_move]
    units = units[is_move]
    if len(now) < _ROWS_PER_VALUE * FEWEST_VALUES:
        return
    numberings = _numberings(count, generator)
    visits = _Visits.of(
        values=now, units=units, count=count, has_many_units=has_many_units
    )
    yield from _of_profile(
        influence="the next number",
        visits=visits,
        numbers=later.astype(np.float64),
        numberings=numberings,
    )
    if has_many_units:
        now, later = _once_per_unit(now, later=later, units=units)
    pairs, weights = np.unique(now * count + later, return_counts=True)
    structure = _p_value_of_pairs(now, later, count, weights, generator)
    first, second = np.divmod(pairs, count)
    length = np.abs(numberings[:, first] - numberings[:, second])
    for lengths in (length, np.minimum(length, count - length)):
        yield _compared(
            influence="the next number",
            totals=lengths @ weights.astype(np.float64),
            structure=structure,
        )
    yield _compared(
        influence="the next number",
        totals=_variety_of_strides(numberings, first, second, weights),
        structure=structure,
    )


def _once_per_unit(
    now: Int[np.ndarray, " step"],
    later: Int[np.ndarray, " step"],
    units: Int[np.ndarray, " step"],
) -> tuple[Int[np.ndarray, " kept"], Int[np.ndarray, " kept"]]:
    """The steps without repetitions of a step in its unit."""
    steps = np.stack([units, now, later], axis=1)
    kept = np.unique(steps, axis=0)
    return kept[:, 1], kept[:, 2]


def _variety_of_strides(
    numberings: Int[np.ndarray, "numbering value"],
    first: Int[np.ndarray, " pair"],
    second: Int[np.ndarray, " pair"],
    weights: Int[np.ndarray, " pair"],
) -> Float[np.ndarray, " numbering"]:
    """One over the share of equal strides, on a circle: a quantity may take few long
    ones.
    """
    total, count = numberings.shape
    strides = (numberings[:, second] - numberings[:, first]) % count
    places = strides + count * np.arange(total)[:, None]
    shares = np.bincount(
        places.ravel(), weights=np.tile(weights, total), minlength=total * count
    )
    return 1.0 / np.square(shares.reshape(total, count) / weights.sum()).sum(axis=1)


def _p_value_of_pairs(
    now: Int[np.ndarray, " step"],
    later: Int[np.ndarray, " step"],
    count: int,
    weights: Int[np.ndarray, " pair"],
    generator: np.random.Generator,
) -> float:
    """p-value of the number of equal pairs of steps, by the normal limit over shuffled
    next values.
    """
    equal = float(weights @ (weights - 1.0))
    shuffled = []
    for _ in range(30):
        _, drawn = np.unique(
            now * count + generator.permutation(later), return_counts=True
        )
        shuffled.append(float(drawn @ (drawn - 1.0)))
    if equal < _CLEARLY_MORE * np.mean(shuffled):
        # that steps change the value is no structure, yet makes some pairs more
        # frequent
        return 1.0
    deviation = max(float(np.std(shuffled, ddof=1)), 1.0)
    return float(special.ndtr(-(equal - np.mean(shuffled)) / deviation))


def _of_profiles(
    values: Int[np.ndarray, " row"],
    is_kept: Bool[np.ndarray, " row"],
    beside: _OtherColumns,
    rows: _SampledRows,
    count: int,
    generator: np.random.Generator,
) -> Iterator[_Measure]:
    """Order in the mean reward, action and other columns of neighbouring values.

    values: numbers (N,) below ``count`` where ``is_kept``.
    """
    visits = _Visits.of(
        values=values[is_kept],
        units=rows.units[is_kept],
        count=count,
        has_many_units=rows.has_many_units,
    )
    actions = rows.actions
    if actions.ndim == 1:
        choices = np.unique(actions)[:_MOST_PROFILES]
        taken = [np.asarray(actions == action, dtype=np.float64) for action in choices]
    else:
        taken = [np.asarray(column, dtype=np.float64) for column in actions.T]
    columns = [("the reward", rows.rewards)]
    columns += [("the action", column) for column in taken]
    columns += [
        (name, np.asarray(column, dtype=np.float64))
        for name, column in zip(beside.names, beside.columns.T, strict=True)
    ]
    numberings = _numberings(count, generator)
    for influence, column in columns[:_MOST_PROFILES]:
        yield from _of_profile(
            influence=influence,
            visits=visits,
            numbers=column[is_kept],
            numberings=numberings,
        )


def _of_profile(
    influence: str,
    visits: _Visits,
    numbers: Float[np.ndarray, " row"],
    numberings: Int[np.ndarray, "numbering value"],
) -> Iterator[_Measure]:
    """Order in the means of numbers by value: squared differences between neighbours.

    Each difference is weighted by the inverse of its variance, so that rare values do
    not decide. Values with a single visit are left out; nothing is measured if fewer
    than eight values remain.
    """
    visited = np.bincount(visits.value, minlength=visits.count)
    is_frequent = visited >= _FEWEST_VISITS
    if is_frequent.sum() < FEWEST_VALUES:
        return
    is_used = is_frequent[visits.value]
    values = visits.value[is_used]
    outcomes = visits.means(numbers)[is_used]
    sizes = np.where(is_frequent, visited, 0).astype(np.float64)
    sums = np.bincount(values, weights=outcomes, minlength=visits.count)
    means = sums / np.maximum(sizes, 1.0)
    structure = _p_value_of_means(values, outcomes, sizes, means)
    # the frequent values in the order of each numbering
    ordered = np.argsort(numberings, axis=1)
    ordered = ordered[is_frequent[ordered]].reshape(len(numberings), -1)
    left = sizes[ordered[:, :-1]]
    right = sizes[ordered[:, 1:]]
    weights = left * right / (left + right)
    differences = np.square(np.diff(means[ordered], axis=1))
    totals = (weights * differences).sum(axis=1) / weights.sum(axis=1)
    yield _compared(influence=influence, totals=totals, structure=structure)


def _p_value_of_means(
    values: Int[np.ndarray, " visit"],
    outcomes: Float[np.ndarray, " visit"],
    sizes: Float[np.ndarray, " value"],
    means: Float[np.ndarray, " value"],
) -> float:
    """p-value of an F-test that the means of outcomes differ by value, without the
    tenth of the values (at least one) that differs most.

    A few odd values (an empty stock, the ground floor, the one customer who paid) say
    nothing of the order of the others.
    """
    visited = np.flatnonzero(sizes > 0.0)
    n_odd = max(1, int(_ODD * len(visited)))
    shares = sizes[visited] * np.square(means[visited] - outcomes.mean())
    kept = visited[np.argsort(shares)[:-n_odd]]
    is_kept = np.isin(values, kept)
    count = int(is_kept.sum())
    # degrees of freedom
    of_between = len(kept) - 1
    of_within = count - len(kept)
    if of_between < 1 or of_within < 1:
        return 1.0
    seen = outcomes[is_kept]
    within = float(np.square(seen - means[values[is_kept]]).sum())
    between = float(sizes[kept] @ np.square(means[kept] - seen.mean()))
    if between + within <= 1e-12 * max(1.0, float(np.square(seen).sum())):
        return 1.0
    noise = max(within / of_within, 1e-12 * (between + within))
    ratio = (between / of_between) / noise
    return float(special.fdtrc(of_between, of_within, ratio))


def _numberings(
    count: int, generator: np.random.Generator
) -> Int[np.ndarray, "numbering value"]:
    """The values' own numbering, then random ones."""
    drawn = generator.permuted(np.tile(np.arange(count), (_NUMBERINGS, 1)), axis=1)
    return np.concatenate([np.arange(count)[None], drawn])


def _compared(
    influence: str, totals: Float[np.ndarray, " numbering"], structure: float
) -> _Measure:
    """The first total compared with the others."""
    logged = float(totals[0])
    drawn = totals[1:]
    tails = (1.0 + (drawn <= logged).sum(), 1.0 + (drawn >= logged).sum())
    p_value = min(1.0, 2.0 * float(min(tails)) / (len(drawn) + 1.0))
    return _Measure(
        influence=influence,
        share=logged / max(float(drawn.mean()), 1e-300),
        p_value=p_value,
        structure_p_value=structure,
    )
