"""Scores of several runs in one number: the interquartile mean and its bootstrap
interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Shaped
from scipy import special

LEVEL = 0.95
_DRAWS = 10_000
_MOST_DRAWN = 20_000_000


@dataclass(frozen=True)
class Spread:
    """Interquartile mean of scores and its 95 % interval; NaN for the interval of a
    single score.
    """

    iqm: float
    low: float
    high: float


def interquartile_mean(
    scores: Shaped[np.ndarray, "*draw score"], axis: int = -1
) -> np.ndarray:
    """Mean along an axis without the lowest and the highest quarter, both rounded down
    to whole scores.

    (Agarwal et al. 2021, Deep reinforcement learning at the edge of the statistical
    precipice)
    """
    ordered = np.sort(np.moveaxis(scores, axis, -1))
    cut = scores.shape[axis] // 4
    return np.asarray(ordered[..., cut : ordered.shape[-1] - cut].mean(axis=-1))


def spread_of(scores: Shaped[np.ndarray, " score"], draws: int = _DRAWS) -> Spread:
    """Interquartile mean of scores and its bootstrap interval.

    Percentiles are moved outward, to those for which a normal interval is as wide as
    Student's, because the bootstrap's interval is too narrow for few scores (Hesterberg
    2015). It stays within the scores, so that with fewer than five it cannot reach 95
    %.
    """
    count = len(scores)
    scores = np.asarray(scores, dtype=np.float64)
    if not count:
        return Spread(math.nan, math.nan, math.nan)
    value = float(interquartile_mean(scores))
    if count < 2:
        return Spread(value, math.nan, math.nan)
    draws = min(draws, max(1000, _MOST_DRAWN // count))
    means = interquartile_mean(
        scores[np.random.default_rng(0).integers(count, size=(draws, count))]
    )
    tail = tail_share(count)
    # The inverse of the distribution itself: infinite
    # scores have no point between them.
    low, high = np.quantile(means, [tail, 1.0 - tail], method="inverted_cdf")
    return Spread(value, float(low), float(high))


def tail_share(count: int) -> float:
    """Share of draws beyond either end: Φ(−t √(n / (n − 1))) for n scores."""
    reach = special.stdtrit(count - 1, 0.5 + LEVEL / 2.0) * math.sqrt(
        count / (count - 1)
    )
    return float(special.ndtr(-reach))
