"""Comparisons over seeds: ratios of mean errors and rank correlations, with intervals for few seeds.

Both intervals are jackknife ones on a scale where the statistic is nearly normal (the logarithm of a ratio,
Fisher's z of a correlation) with Student's t: a percentile bootstrap of three seeds covers 77 % and not 95.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Shaped
from scipy import stats

_LEVEL = 0.95
_LEAST = 1e-12  # errors freed of the truth's noise may fall below zero


@dataclass(frozen=True)
class Comparison:
    """An estimate and its 95 % interval over seeds."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


def ratio_of_means(first: Shaped[np.ndarray, " seed"], second: Shaped[np.ndarray, " seed"]) -> Comparison:
    """mean(first) / mean(second), seeds left out in pairs.

    Infinite where the first has no finite mean, zero where the second has none.
    """
    if not np.all(np.isfinite(first)):
        return Comparison(np.inf, np.inf, np.inf)
    if not np.all(np.isfinite(second)):
        return Comparison(0.0, 0.0, 0.0)

    def log_ratio(seeds: np.ndarray) -> float:
        above, below = (max(float(part[seeds].mean()), _LEAST) for part in (first, second))
        return float(np.log(above / below))

    value, low, high = _jackknife(log_ratio, len(first))
    return Comparison(float(np.exp(value)), float(np.exp(low)), float(np.exp(high)))


def spearman_over_seeds(
    first: Shaped[np.ndarray, "point seed"], second: Shaped[np.ndarray, "point seed"]
) -> Comparison:
    """Rank correlation of all points (finite in both), interval by leaving out whole seeds."""

    def z_value(seeds: np.ndarray) -> float:
        x, y = first[:, seeds].ravel(), second[:, seeds].ravel()
        good = np.isfinite(x) & np.isfinite(y)
        rank: Any = stats.spearmanr(x[good], y[good]).statistic if good.sum() > 2 else np.nan
        return float(np.arctanh(np.clip(rank, -1.0 + 1e-9, 1.0 - 1e-9)))

    value, low, high = _jackknife(z_value, first.shape[1])
    return Comparison(float(np.tanh(value)), float(np.tanh(low)), float(np.tanh(high)))


def _jackknife(statistic: Callable[[np.ndarray], float], seeds: int) -> tuple[float, float, float]:
    """The statistic of all seeds and its t-interval from leaving out one at a time."""
    whole = np.arange(seeds)
    value = statistic(whole)
    if seeds < 2:
        return value, -np.inf, np.inf
    without = np.array([statistic(np.delete(whole, seed)) for seed in whole])
    spread = (seeds - 1) / seeds * np.sum((without - without.mean()) ** 2)
    half = float(stats.t.ppf(0.5 + _LEVEL / 2.0, seeds - 1) * np.sqrt(spread))
    return value, value - half, value + half
