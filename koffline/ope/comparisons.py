"""Comparisons of policies estimated from one log.

Networks are compared in pairs: every replica (a network retrained on resampled
episodes) has a partner for every other policy, with the same episodes, initial
parameters and mini-batches. Their common sampling error cancels in the difference,
which can be significant although the intervals overlap. Estimators without replicas are
compared by their intervals. For any correlation, the standard error of a difference is
at most the sum of both standard errors, so that this comparison is conservative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from jaxtyping import Float
from scipy import special

from koffline.errors import DataError
from koffline.ope.results import Interval, Record


@dataclass(frozen=True)
class Comparison(Record):
    """``better`` is estimated above ``worse`` by ``difference`` ≥ 0, in units of the
    return.

    ``low``, ``high``: interval of this difference alone. ``p_value``: two-sided, for no
    difference;
    ``adjusted_p_value``: after Holm's correction for all pairs; ``significant`` refers
    to it.
    """

    better: str
    worse: str
    difference: float
    low: float
    high: float
    p_value: float
    adjusted_p_value: float
    significant: bool


def compare_replicas(
    names: Sequence[str],
    estimates: Sequence[float],
    values: Float[np.ndarray, "policy replica"],
    full: int,
    level: float = 0.95,
) -> tuple[Comparison, ...]:
    """Compare all pairs, the largest difference first. Raises DataError if a pair has
    too few replicas.

    values: of each replica, NaN if it diverged; the first ``full`` were trained on the
    whole log. The standard error of a difference is the spread of the resampled
    replicas' differences, widened for the number of full replicas as in
    ``koffline.evaluate``. P-values and intervals are by Student's t.
    """

    def compare(i: int, j: int) -> _Difference:
        gaps = values[i] - values[j]
        is_finite = np.isfinite(gaps)
        trained = gaps[:full][is_finite[:full]]
        resampled = gaps[full:][is_finite[full:]]
        if len(trained) == 0 or len(resampled) < 2:
            raise DataError(
                f"{names[i]} and {names[j]} have {len(resampled)} networks in common"
                " that did not diverge; lower learning_rate or leave one of them out"
            )
        difference = estimates[i] - estimates[j]
        freedom = len(resampled) - 1
        error = float(resampled.std(ddof=1)) * math.sqrt(1.0 + 1.0 / len(trained))
        half = float(special.stdtrit(freedom, 0.5 + level / 2.0)) * error
        tail = special.stdtr(freedom, -_ratio(difference, error))
        return _Difference(difference, half, p_value=float(2.0 * tail))

    return _compare_all(names, compare, level)


def compare_intervals(
    names: Sequence[str],
    values: Sequence[float],
    intervals: Sequence[Interval],
    level: float = 0.95,
) -> tuple[Comparison, ...]:
    """Compare all pairs, largest difference first, with normal errors of worst-case
    correlation.
    """
    quantile = float(special.ndtri(0.5 + level / 2.0))

    def compare(i: int, j: int) -> _Difference:
        difference = values[i] - values[j]
        higher, lower = i, j
        if not difference >= 0.0:
            higher, lower = j, i
        # Uses the facing ends of the intervals; the outer ends may have been clipped to
        # value bounds.
        below = values[higher] - intervals[higher].low
        above = intervals[lower].high - values[lower]
        half = max(below, intervals[higher].width / 2.0)
        half += max(above, intervals[lower].width / 2.0)
        tail = special.ndtr(-_ratio(difference, half) * quantile)
        return _Difference(difference, half, p_value=float(2.0 * tail))

    return _compare_all(names, compare, level)


@dataclass(frozen=True)
class _Difference:
    """Difference of two values, half width of its interval, and its two-sided p-value
    alone.
    """

    value: float
    half_width: float
    p_value: float


def _ratio(difference: float, error: float) -> float:
    """Ratio |difference| / error; 0 / 0 is 0, any other difference over 0 is
    infinite.
    """
    if error > 0.0:
        return abs(difference) / error
    if difference:
        return math.inf
    return 0.0


def _compare_all(
    names: Sequence[str],
    compare: Callable[[int, int], _Difference],
    level: float,
) -> tuple[Comparison, ...]:
    """Comparisons of all pairs of names, after Holm's correction of the p-values.

    compare: from the numbers of two policies to the difference first − second.
    """
    pairs = list(combinations(range(len(names)), 2))
    differences = [compare(i, j) for i, j in pairs]
    adjusted = holm(np.array([difference.p_value for difference in differences]))
    comparisons = []
    for (i, j), difference, p_value in zip(pairs, differences, adjusted, strict=True):
        better = names[i]
        worse = names[j]
        if not difference.value >= 0.0:
            better = names[j]
            worse = names[i]
        gap = abs(difference.value)
        comparisons.append(
            Comparison(
                better=better,
                worse=worse,
                difference=gap,
                low=gap - difference.half_width,
                high=gap + difference.half_width,
                p_value=difference.p_value,
                adjusted_p_value=float(p_value),
                significant=float(p_value) <= 1.0 - level,
            )
        )
    return tuple(sorted(comparisons, key=lambda comparison: -comparison.difference))


def holm(p_values: Float[np.ndarray, " test"]) -> Float[np.ndarray, " test"]:
    """Holm's step-down correction (1979): rejecting p ≤ α has a false rejection with
    probability ≤ α.
    """
    order = np.argsort(p_values, kind="stable")
    stepped = np.maximum.accumulate(p_values[order] * np.arange(len(p_values), 0, -1))
    return np.minimum(stepped, 1.0)[np.argsort(order)]
