"""Which policies differ, from estimates of one log.

Networks are compared in pairs: every replica (a network retrained on resampled episodes) has a partner of the
same episodes, the same initial parameters and the same mini-batches for every other policy. What the draw of
the log does to both cancels in their difference, so a difference can be plain although the intervals overlap.
Estimators without replicas are compared by their intervals: the standard error of a difference is at most the
sum of the two, whatever the estimates have in common, which is safe and weak.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from koffline.errors import DataError
from koffline.ope.interval import Interval


@dataclass(frozen=True)
class Comparison:
    """``better`` is estimated above ``worse`` by ``difference`` ≥ 0, in units of the return.

    ``low``, ``high``: interval of this difference alone. ``p_value``: two-sided, of no difference;
    ``adjusted_p_value``: after Holm's correction for all pairs; ``significant`` judges that one.
    """

    better: str
    worse: str
    difference: float
    low: float
    high: float
    p_value: float
    adjusted_p_value: float
    significant: bool

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


@dataclass(frozen=True, eq=False)
class ReplicaValues:
    """J of K policies by R replicas that are paired across policies.

    ``values (K, R)``; ``full``: the first so many were trained on the whole log, their mean is the estimate;
    ``alive (K, R)``: which did not diverge.
    """

    values: Float[np.ndarray, "policy replica"]
    alive: Bool[np.ndarray, "policy replica"]
    full: int


def compare_policies(
    names: Sequence[str], replicas: ReplicaValues, level: float = 0.95
) -> tuple[Comparison, ...]:
    """All pairs, the largest difference first. Raises DataError when replicas are too few for a pair.

    A pair's standard error is the spread of the resampled replicas' differences, widened for the networks
    whose mean is the estimate as in ``koffline.evaluate``; Student's t. (Holm 1979)
    """
    pairs = _pairs(len(names))
    found = [_paired_difference(replicas, i, j, (names[i], names[j]), level) for i, j in pairs]
    return _corrected(names, pairs, found, level)


def compare_intervals(
    names: Sequence[str], values: Sequence[float], intervals: Sequence[Interval], level: float = 0.95
) -> tuple[Comparison, ...]:
    """All pairs, the largest difference first, as if estimates erred in opposite directions (normal law)."""
    from scipy import stats

    quantile = float(stats.norm.ppf(0.5 + level / 2.0))
    pairs, found = _pairs(len(names)), []
    for i, j in pairs:
        difference = values[i] - values[j]
        higher, lower = (i, j) if difference >= 0.0 else (j, i)
        # The sides that face each other: the far ones may have been cut at bounds of every value.
        half = max(values[higher] - intervals[higher].low, intervals[higher].width / 2.0)
        half += max(intervals[lower].high - values[lower], intervals[lower].width / 2.0)
        p_value = float(2.0 * stats.norm.sf(_ratio(difference, half) * quantile))
        found.append((difference, half, p_value))
    return _corrected(names, pairs, found, level)


def _pairs(count: int) -> list[tuple[int, int]]:
    return [(i, j) for i in range(count) for j in range(i + 1, count)]


def _ratio(difference: float, error: float) -> float:
    """|difference| / error; 0 / 0 is no evidence, anything else over 0 is all there can be."""
    if error > 0.0:
        return abs(difference) / error
    return math.inf if difference else 0.0


def _corrected(
    names: Sequence[str],
    pairs: list[tuple[int, int]],
    found: list[tuple[float, float, float]],
    level: float,
) -> tuple[Comparison, ...]:
    """Comparisons from differences, half widths and p-values, after Holm's correction."""
    adjusted = holm(np.array([p_value for *_, p_value in found]))
    compared = []
    for (i, j), (difference, half, p_value), corrected in zip(pairs, found, adjusted, strict=True):
        better, worse = (names[i], names[j]) if difference >= 0.0 else (names[j], names[i])
        gap = abs(difference)
        compared.append(
            Comparison(
                better=better,
                worse=worse,
                difference=gap,
                low=gap - half,
                high=gap + half,
                p_value=p_value,
                adjusted_p_value=float(corrected),
                significant=bool(corrected <= 1.0 - level),
            )
        )
    return tuple(sorted(compared, key=lambda comparison: -comparison.difference))


def holm(p_values: Float[np.ndarray, " test"]) -> Float[np.ndarray, " test"]:
    """Holm's step-down correction: rejecting what stays ≤ α errs anywhere with probability ≤ α."""
    count = len(p_values)
    order = np.argsort(p_values, kind="stable")
    stepped = np.maximum.accumulate(p_values[order] * (count - np.arange(count)))
    adjusted = np.empty(count)
    adjusted[order] = np.minimum(stepped, 1.0)
    return adjusted


def _paired_difference(
    replicas: ReplicaValues, i: int, j: int, names: tuple[str, str], level: float
) -> tuple[float, float, float]:
    """Difference, half width of its interval, two-sided p-value; pairs of which both are alive."""
    from scipy import stats

    alive = replicas.alive[i] & replicas.alive[j]
    gaps = replicas.values[i] - replicas.values[j]
    full, resampled = (gaps[part][alive[part]] for part in (slice(replicas.full), slice(replicas.full, None)))
    if len(full) == 0 or len(resampled) < 2:
        raise DataError(
            f"{names[0]} and {names[1]} have {len(resampled)} networks in common that did not diverge; "
            "lower learning_rate or leave one of them out"
        )
    difference, freedom = float(full.mean()), len(resampled) - 1
    error = float(resampled.std(ddof=1)) * math.sqrt(1.0 + 1.0 / len(full))
    half = float(stats.t.ppf(0.5 + level / 2.0, df=freedom)) * error
    return difference, half, float(2.0 * stats.t.sf(_ratio(difference, error), df=freedom))
