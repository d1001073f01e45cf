"""Numbers over seeds with intervals for few seeds: means, ratios, rank correlations, returns of curves.

Intervals of ratios and correlations are jackknife ones on a scale where the statistic is nearly normal (the
logarithm of a ratio, Fisher's z of a correlation) with Student's t: a percentile bootstrap of three seeds
covers 77 % and not 95. Returns have the interquartile mean and the bootstrap interval of `koffline sweep`; a
difference of two critics draws the seeds of both again, with the ends pushed outward in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped
from scipy import stats

from koffline.spread import LEVEL, interquartile_mean, spread_of, tail_share

_LEAST = 1e-12  # errors freed of the truth's noise may fall below zero
LAST_SHARE = 0.1  # of the evaluations, averaged into the final return: one evaluation of one policy is luck
_DRAWS, _BAND_DRAWS = 10_000, 2_000
_FEWEST = 5  # a bootstrap of less stays inside too few numbers to reach 95 %


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % interval over seeds: numbers, or arrays (T,) of a curve."""

    value: Any
    low: Any
    high: Any

    def named(self, name: str) -> dict[str, Any]:
        """As the fields name, name_low and name_high of a row of results."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


def mean_over_seeds(values: Shaped[np.ndarray, " seed"]) -> Interval:
    """The mean and its t-interval: NaN where a seed has no finite number, the whole line for a single one."""
    mean, count = float(np.mean(values, dtype=np.float64)), len(values)
    if not np.isfinite(mean):
        return Interval(np.nan, np.nan, np.nan)
    if count < 2:
        return Interval(mean, -np.inf, np.inf)
    half = float(stats.t.ppf(0.5 + LEVEL / 2.0, count - 1) * np.std(values, ddof=1) / np.sqrt(count))
    return Interval(mean, mean - half, mean + half)


def ratio_of_means(first: Shaped[np.ndarray, " seed"], second: Shaped[np.ndarray, " seed"]) -> Interval:
    """mean(first) / mean(second), seeds left out in pairs.

    Infinite where the first has no finite mean, zero where the second has none.
    """
    if not np.all(np.isfinite(first)):
        return Interval(np.inf, np.inf, np.inf)
    if not np.all(np.isfinite(second)):
        return Interval(0.0, 0.0, 0.0)

    def log_ratio(seeds: np.ndarray) -> float:
        above, below = (max(float(part[seeds].mean()), _LEAST) for part in (first, second))
        return float(np.log(above / below))

    value, low, high = _jackknife(log_ratio, len(first))
    return Interval(float(np.exp(value)), float(np.exp(low)), float(np.exp(high)))


def spearman_over_seeds(
    first: Shaped[np.ndarray, "point seed"], second: Shaped[np.ndarray, "point seed"]
) -> Interval:
    """Rank correlation of all points (finite in both), interval by leaving out whole seeds."""

    def z_value(seeds: np.ndarray) -> float:
        x, y = first[:, seeds].ravel(), second[:, seeds].ravel()
        good = np.isfinite(x) & np.isfinite(y)
        rank: Any = stats.spearmanr(x[good], y[good]).statistic if good.sum() > 2 else np.nan
        return float(np.arctanh(np.clip(rank, -1.0 + 1e-9, 1.0 - 1e-9)))

    value, low, high = _jackknife(z_value, first.shape[1])
    return Interval(float(np.tanh(value)), float(np.tanh(low)), float(np.tanh(high)))


def _jackknife(statistic: Callable[[np.ndarray], float], seeds: int) -> tuple[float, float, float]:
    """The statistic of all seeds and its t-interval from leaving out one at a time."""
    whole = np.arange(seeds)
    value = statistic(whole)
    if seeds < 2:
        return value, -np.inf, np.inf
    without = np.array([statistic(np.delete(whole, seed)) for seed in whole])
    spread = (seeds - 1) / seeds * np.sum((without - without.mean()) ** 2)
    half = float(stats.t.ppf(0.5 + LEVEL / 2.0, seeds - 1) * np.sqrt(spread))
    return value, value - half, value + half


@dataclass(frozen=True, eq=False)
class Scores:
    """One number per run, (R,). reached: environment steps at the first return of the threshold, else ∞."""

    final: Float[np.ndarray, " run"]
    area: Float[np.ndarray, " run"]
    reached: Float[np.ndarray, " run"]


def scores_of(
    steps: Int[np.ndarray, " time"], curves: Shaped[np.ndarray, "run time"], threshold: float | None = None
) -> Scores:
    """Final return (mean of the last tenth of the evaluations) and mean height of the curve over steps."""
    last = max(1, round(LAST_SHARE * len(steps)))
    widths = np.diff(steps)
    heights = (curves[:, 1:] + curves[:, :-1]) / 2.0
    area = heights @ widths / widths.sum() if len(widths) else curves[:, 0]
    reached = np.full(len(curves), math.inf)
    if threshold is not None:
        is_there = curves >= threshold
        reached = np.where(is_there.any(axis=1), steps[is_there.argmax(axis=1)], math.inf)
    return Scores(curves[:, -last:].mean(axis=1), np.asarray(area), reached)


def fill_gaps(curves: Shaped[np.ndarray, "run time"]) -> Float[np.ndarray, "run time"]:
    """NaN where no training episode had ended yet becomes the run's first number; 0 where it has none."""
    found = np.asarray(curves, dtype=np.float64).copy()
    for row in found:
        good = np.flatnonzero(np.isfinite(row))
        row[~np.isfinite(row)] = row[good[0]] if len(good) else 0.0
    return found


def without_the_worst(values: Shaped[np.ndarray, " run"]) -> float:
    """Mean of all runs but the worst: the paper's best 5 of 6. (Feng et al. 2019, Training Details)"""
    return float(np.sort(values)[1:].mean()) if len(values) > 1 else float(values[0])


def spread(values: Shaped[np.ndarray, " run"]) -> Interval:
    """Interquartile mean of runs and its interval."""
    found = spread_of([values])
    return Interval(found.iqm, found.low, found.high)


def difference(first: Shaped[np.ndarray, " run"], second: Shaped[np.ndarray, " other"]) -> Interval:
    """Interquartile mean of the first minus that of the second; an endless interval for fewer than 5 runs."""
    value = float(interquartile_mean(first) - interquartile_mean(second))
    if min(len(first), len(second)) < _FEWEST:
        return Interval(value, -math.inf, math.inf)
    generator = np.random.default_rng(0)
    drawn = [
        interquartile_mean(part[generator.integers(len(part), size=(_DRAWS, len(part)))])
        for part in (np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64))
    ]
    count = min(len(first), len(second))
    tail = tail_share(count - 1, count)
    low, high = np.quantile(drawn[0] - drawn[1], [tail, 1.0 - tail])
    return Interval(value, float(low), float(high))


def band(curves: Shaped[np.ndarray, "run time"]) -> Interval:
    """Over runs at each time; the same draws for all times."""
    runs = len(curves)
    mean = interquartile_mean(curves.T)
    if runs < 2:
        return Interval(mean, np.full_like(mean, np.nan), np.full_like(mean, np.nan))
    rows = np.random.default_rng(0).integers(runs, size=(_BAND_DRAWS, runs))
    drawn = interquartile_mean(np.moveaxis(curves[rows], 1, -1))  # (draw, time)
    tail = tail_share(runs - 1, runs)
    low, high = np.quantile(drawn, [tail, 1.0 - tail], axis=0)
    return Interval(mean, low, high)


def median_reached(reached: Shaped[np.ndarray, " run"]) -> float:
    """Median of the steps to a threshold; ∞ where half of the runs never reached it."""
    return float(np.sort(reached)[len(reached) // 2])


def rank_settings(scores: Sequence[Shaped[np.ndarray, " run"]]) -> list[int]:
    """Places of the settings, best interquartile mean first; of equals the first."""
    means = [float(interquartile_mean(part)) for part in scores]
    return sorted(range(len(means)), key=lambda place: -means[place])
