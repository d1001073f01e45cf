"""Numbers that stand for "missing", and single numbers that outweigh all others."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float

from koffline.data.structure.symptom import Symptom
from koffline.data.transitions import Transitions
from koffline.errors import percent

_GAP = 5.0  # distance of a sentinel from all other numbers, in their whole range
_MOST_SHARE = 0.5  # a number that most rows hold is no mark of the missing ones
_LONELY = 50.0  # times the second largest deviation
_OUTWEIGHS = 0.5  # of the sum of squared deviations
_FAR = 30.0  # standard deviations
_MOST_COLUMNS = 200
_NINES = frozenset(float(10**digits - 1) for digits in range(2, 13))
_LIMITS = frozenset(
    float(number)
    for number in (
        2**7 - 1,
        2**7,
        2**15 - 1,
        2**15,
        2**31 - 1,
        2**31,
        2**63,
        1e10,
        1e20,
        1e30,
        1e38,
        1e100,
        1e300,
    )
)


def is_sentinel(number: float) -> bool:
    """Whether people and programs write such a number for "missing": 99, −999, 9999,
    −32768, 1e30, …
    """
    size = abs(number)
    largest = (float(np.finfo(np.float32).max), float(np.finfo(np.float64).max))
    return size in _NINES or size in _LIMITS or size in largest


def sentinel_symptoms(log: Transitions) -> Iterator[Symptom]:
    """Yield a symptom for each of reward and observation that holds numbers like −999
    far from others.
    """
    yield from _of_column(
        name="reward", column=np.asarray(log.rewards, dtype=np.float64)
    )
    observations = log.observations
    if observations.dtype == np.uint8:
        return
    width = int(np.prod(observations.shape[1:], dtype=np.int64))
    if width > _MOST_COLUMNS:
        return
    names = log.feature_names
    for number in range(width):
        column = observations.reshape(len(log), -1)[:, number]
        if number < len(names):
            name = names[number]
        else:
            name = f"number {number} of the observation"
        yield from _of_column(name=name, column=np.asarray(column, dtype=np.float64))


def _of_column(name: str, column: Float[np.ndarray, " row"]) -> Iterator[Symptom]:
    """Look at the smallest and at the largest number of a column."""
    lowest = float(column.min())
    highest = float(column.max())
    if lowest == highest:
        return
    for extreme in (lowest, highest):
        is_extreme = column == extreme
        rest = column[~is_extreme]
        spread = float(rest.max() - rest.min())
        gap = float(np.abs(rest - extreme).min())
        scale = max(spread, 1e-12 * abs(extreme), 1.0)
        is_mark = is_sentinel(extreme) and gap > _GAP * scale
        count = int(is_extreme.sum())
        if is_mark and count <= _MOST_SHARE * len(column):
            yield Symptom(
                test="marks of missing values",
                kind="values",
                rows=count,
                of=len(column),
                p_value=0.0,
                statement=(
                    f"{name} is exactly {extreme:g} in {count} of {len(column)} rows"
                    f" ({percent(count / len(column))}), far from all others"
                    f" ({rest.min():g} to {rest.max():g})"
                ),
                remedy="if that stands for a missing value, drop or mend these rows",
            )
            return
    yield from _of_one_row(name=name, column=column)


def _of_one_row(name: str, column: Float[np.ndarray, " row"]) -> Iterator[Symptom]:
    """One number that outweighs all others together."""
    with np.errstate(over="ignore"):
        scale = float(np.abs(column).max())
        deviations = (column / scale - float(np.median(column / scale))) ** 2
    farthest = int(deviations.argmax())
    total = float(deviations.sum())
    second = float(np.sqrt(np.partition(deviations, -2)[-2]))
    if second == 0.0:
        # among equal rewards a prize that was won once is no error
        second = max(1.0, abs(float(np.median(column)))) / scale
    is_lonely = np.sqrt(deviations[farthest]) > _LONELY * second
    is_far = (
        is_lonely
        and len(column) > _FAR**2
        and deviations[farthest] > _FAR**2 * total / len(column)
    )
    if name != "reward" or not is_far or deviations[farthest] < _OUTWEIGHS * total:
        return
    yield Symptom(
        test="one row outweighs all",
        kind="values",
        rows=1,
        of=len(column),
        p_value=0.0,
        statement=(
            f"one {name}, {column[farthest]:g} in row {farthest}, outweighs all others"
            " together"
        ),
        remedy="check whether that is an error; the value rests on this row",
    )
