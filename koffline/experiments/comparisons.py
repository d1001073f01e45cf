"""Comparisons over seeds: ratios of mean errors and rank correlations, each with a bootstrap interval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Shaped
from scipy import stats

_DRAWS = 2000


@dataclass(frozen=True)
class Comparison:
    """An estimate and its 95 % bootstrap interval over seeds."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


def ratio_of_means(
    first: Shaped[np.ndarray, " seed"], second: Shaped[np.ndarray, " seed"], seed: int = 0
) -> Comparison:
    """mean(first) / mean(second); seeds are drawn in pairs where both have equally many.

    Infinite where the first has no finite mean, zero where the second has none.
    """
    if not np.all(np.isfinite(first)):
        return Comparison(np.inf, np.inf, np.inf)
    if not np.all(np.isfinite(second)):
        return Comparison(0.0, 0.0, 0.0)
    generator = np.random.default_rng(seed)
    draws = generator.integers(len(first), size=(_DRAWS, len(first)))
    others = (
        draws if len(first) == len(second) else generator.integers(len(second), size=(_DRAWS, len(second)))
    )
    below = np.maximum(second[others].mean(axis=1), 1e-12)
    ratios = first[draws].mean(axis=1) / below
    low, high = np.quantile(ratios, [0.025, 0.975])
    return Comparison(float(first.mean() / max(second.mean(), 1e-12)), float(low), float(high))


def spearman_over_seeds(
    first: Shaped[np.ndarray, "point seed"], second: Shaped[np.ndarray, "point seed"], seed: int = 0
) -> Comparison:
    """Rank correlation of all points (finite in both), interval by drawing whole seeds."""
    generator = np.random.default_rng(seed)

    def correlation(seeds: Any) -> float:
        x, y = first[:, seeds].ravel(), second[:, seeds].ravel()
        good = np.isfinite(x) & np.isfinite(y)
        return float(stats.spearmanr(x[good], y[good]).statistic) if good.sum() > 2 else np.nan

    count = first.shape[1]
    drawn = [correlation(generator.integers(0, count, size=count)) for _ in range(200)]
    low, high = np.nanquantile(drawn, [0.025, 0.975])
    return Comparison(correlation(np.arange(count)), float(low), float(high))
