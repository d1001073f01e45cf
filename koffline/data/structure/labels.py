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
    (0: in order, 1: as at random).
    ``p_value``: the smallest p-value of an order. ``structure_p_value``: of the values'
    influence.
    """

    column: int
    label: str
    values: int
    effect: float
    p_value: float
    structure_p_value: float
    name: str = NAME

    @property
    def remedy(self) -> str:
        """What to do, for tables and for arrays."""
        return (
            f"if they are labels, say so (--encode '{self.label}=one-hot'); if"
            " quantities, leave it"
        )

    def __str__(self) -> str:
        return (
            f"{self.label} holds {self.values} whole numbers that look like labels read"
            " as quantities: what follows depends on them, but not on their order:"
            f" {self.effect:.0%} of what a random numbering shows (p ="
            f" {self.p_value:.2g}); {self.remedy}"
        )


@dataclass(frozen=True)
class _Measure:
    """Order of the values in one respect: its share of a random numbering's, and its
    two-sided p-value.
    """

    share: float
    p_value: float
    structure_p_value: float


def find_labels(
    observations: Shaped[np.ndarray, "row ..."],
    next_observations: Shaped[np.ndarray, "row ..."],
    goes_on: Bool[np.ndarray, " row"],
    rewards: Float[np.ndarray, " row"],
    actions: Shaped[np.ndarray, "row ..."],
    names: Sequence[str] = (),
) -> tuple[LabelColumn, ...]:
    """Columns of observations that look like labels.

    observations, next_observations: (N, d); of images, (N, h, w), nothing is said.
    goes_on: rows whose next observation counts (not terminated). actions: (N,) of
    discrete actions, or (N, k). names: of the columns; by default ``observations[3]``,
    or ``observations`` if there is one.
    """
    if observations.ndim != 2 or observations.shape[1] > _MOST_COLUMNS:
        return ()
    count = observations.shape[1]
    stride = max(1, -(-len(observations) // _MOST_ROWS))
    rows = np.arange(0, len(observations), stride)
    states = observations[rows]
    following = next_observations[rows]
    labels: Sequence[str] = ["observations"]
    if len(names) == count:
        labels = names
    elif count > 1:
        labels = [f"observations[{i}]" for i in range(count)]
    columns = []
    for number in range(count):
        column = _judged(
            number=number,
            label=labels[number],
            values=states[:, number],
            following=following[:, number],
            other_columns=np.delete(states, number, axis=1),
            goes_on=goes_on[rows],
            rewards=np.asarray(rewards[rows], dtype=np.float64),
            actions=actions[rows],
        )
        if column is not None:
            columns.append(column)
    return tuple(columns)


def _judged(
    number: int,
    label: str,
    values: Shaped[np.ndarray, " row"],
    following: Shaped[np.ndarray, " row"],
    other_columns: Shaped[np.ndarray, "row column"],
    goes_on: Bool[np.ndarray, " row"],
    rewards: Float[np.ndarray, " row"],
    actions: Shaped[np.ndarray, "row ..."],
) -> LabelColumn | None:
    """A column that looks like labels, by its number and name; None if it does not.

    values, following: the column in the observations and in the next observations;
    following counts where ``goes_on``. other_columns: of the observations.
    """
    if not _are_whole(values):
        return None
    known, ranks, counts = np.unique(values, return_inverse=True, return_counts=True)
    if not FEWEST_VALUES <= len(known) <= MOST_VALUES:
        return None
    if len(values) < _ROWS_PER_VALUE * len(known):
        return None
    kept = counts[ranks] >= _FEWEST_ROWS
    is_frequent = counts >= _FEWEST_ROWS
    if is_frequent.sum() < FEWEST_VALUES:
        return None
    place = np.cumsum(is_frequent) - 1  # of a value among the frequent ones
    frequent = known[is_frequent]
    later = np.searchsorted(frequent, following)
    later = np.minimum(later, len(frequent) - 1)
    has_next = kept & goes_on & (frequent[later] == following)
    generator = np.random.default_rng(0)
    measures = [
        *_of_steps(place[ranks[has_next]], later[has_next], len(frequent), generator),
        *_of_profiles(
            place[ranks[kept]],
            other_columns[kept],
            rewards[kept],
            actions[kept],
            len(frequent),
            generator,
        ),
    ]
    measures = [
        measure for measure in measures if measure.structure_p_value < _STRUCTURE
    ]
    if not measures:
        return None
    share = min(measure.share for measure in measures)
    p_value = min(measure.p_value for measure in measures)
    if share < _ORDERED or p_value < _ORDER:
        return None
    return LabelColumn(
        column=number,
        label=label,
        values=len(known),
        effect=share,
        p_value=p_value,
        structure_p_value=min(measure.structure_p_value for measure in measures),
    )


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
    count: int,
    generator: np.random.Generator,
) -> Iterator[_Measure]:
    """Order in steps that change the value: their length on a line and a circle,
    strides, mean next value.
    """
    moves = now != later
    now = now[moves]
    later = later[moves]
    if len(now) < _ROWS_PER_VALUE * FEWEST_VALUES:
        return
    pairs, weights = np.unique(now * count + later, return_counts=True)
    structure = _p_value_of_pairs(now, later, count, weights, generator)
    first, second = np.divmod(pairs, count)
    numberings = _numberings(count, generator)
    length = np.abs(numberings[:, first] - numberings[:, second])
    for lengths in (length, np.minimum(length, count - length)):
        yield _compared(lengths @ weights.astype(np.float64), structure)
    yield _compared(_variety_of_strides(numberings, first, second, weights), structure)
    yield _of_profile(now, later.astype(np.float64), count, numberings)


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
    other_columns: Shaped[np.ndarray, "row column"],
    rewards: Float[np.ndarray, " row"],
    actions: Shaped[np.ndarray, "row ..."],
    count: int,
    generator: np.random.Generator,
) -> Iterator[_Measure]:
    """Order in the mean reward, action and other columns of neighbouring values."""
    if actions.ndim == 1:
        taken = np.unique(actions)[:_MOST_PROFILES]
        chosen = [np.asarray(actions == action, dtype=np.float64) for action in taken]
    else:
        chosen = [np.asarray(column, dtype=np.float64) for column in actions.T]
    columns = [rewards, *chosen]
    columns += [np.asarray(column, dtype=np.float64) for column in other_columns.T]
    numberings = _numberings(count, generator)
    for column in columns[:_MOST_PROFILES]:
        yield _of_profile(values, column, count, numberings)


def _of_profile(
    values: Int[np.ndarray, " row"],
    numbers: Float[np.ndarray, " row"],
    count: int,
    numberings: Int[np.ndarray, "numbering value"],
) -> _Measure:
    """Order in the means of numbers by value: squared differences between neighbours.

    Each difference is weighted by the inverse of its variance, so that rare values do
    not decide.
    """
    rows = np.bincount(values, minlength=count).astype(np.float64)
    means = np.bincount(values, weights=numbers, minlength=count) / np.maximum(
        rows, 1.0
    )
    structure = _p_value_of_means(values, numbers, rows, means)
    ordered = np.argsort(numberings, axis=1)  # values in the order of each numbering
    sizes = rows[ordered]
    heights = means[ordered]
    weights = (
        sizes[:, 1:] * sizes[:, :-1] / np.maximum(sizes[:, 1:] + sizes[:, :-1], 1.0)
    )
    total = (weights * np.square(np.diff(heights, axis=1))).sum(axis=1) / weights.sum(
        axis=1
    )
    return _compared(total, structure)


def _p_value_of_means(
    values: Int[np.ndarray, " row"],
    numbers: Float[np.ndarray, " row"],
    rows: Float[np.ndarray, " value"],
    means: Float[np.ndarray, " value"],
) -> float:
    """p-value of an F-test that means differ by value, also without the value that
    differs most.

    A single odd value (an empty stock, the ground floor) says nothing of the order of
    the others.
    """
    shares = rows * np.square(means - numbers.mean())
    kept = np.flatnonzero((rows > 0.0) & (np.arange(len(rows)) != shares.argmax()))
    chosen = np.isin(values, kept)
    count = int(chosen.sum())
    # degrees of freedom
    of_between = len(kept) - 1
    of_within = count - len(kept)
    if of_between < 1 or of_within < 1:
        return 1.0
    seen = numbers[chosen]
    within = float(np.square(seen - means[values[chosen]]).sum())
    between = float(rows[kept] @ np.square(means[kept] - seen.mean()))
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


def _compared(totals: Float[np.ndarray, " numbering"], structure: float) -> _Measure:
    """The first total compared with the others."""
    logged = float(totals[0])
    drawn = totals[1:]
    tails = (1.0 + (drawn <= logged).sum(), 1.0 + (drawn >= logged).sum())
    return _Measure(
        share=logged / max(float(drawn.mean()), 1e-300),
        p_value=min(1.0, 2.0 * float(min(tails)) / (len(drawn) + 1.0)),
        structure_p_value=structure,
    )
