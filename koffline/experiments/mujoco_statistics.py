"""From curves of runs to numbers: final return, area under the curve, intervals and differences over seeds.

The interquartile mean and its bootstrap interval are those of `koffline sweep`; a difference of two critics
draws the seeds of both again, with the ends pushed outward in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int, Shaped
from scipy import stats

from koffline.experiments.comparisons import Comparison
from koffline.spread import LEVEL, interquartile_mean, spread_of

LAST_SHARE = 0.1  # of the evaluations, averaged into the final return: one evaluation of one policy is luck
_DRAWS, _BAND_DRAWS = 10_000, 2_000
_FEWEST = 5  # a bootstrap of less stays inside too few numbers to reach 95 %


@dataclass(frozen=True, eq=False)
class Scores:
    """One number per run, (R,). reached: environment steps at the first return of the threshold, else ∞."""

    final: Float[np.ndarray, " run"]
    area: Float[np.ndarray, " run"]
    reached: Float[np.ndarray, " run"]


@dataclass(frozen=True, eq=False)
class ReturnBand:
    """Interquartile mean over runs at each time, and its bootstrap interval, (T,)."""

    mean: Float[np.ndarray, " time"]
    low: Float[np.ndarray, " time"]
    high: Float[np.ndarray, " time"]


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


def spread(values: Shaped[np.ndarray, " run"]) -> Comparison:
    """Interquartile mean of runs and its interval."""
    found = spread_of([values])
    return Comparison(found.iqm, found.low, found.high)


def difference(first: Shaped[np.ndarray, " run"], second: Shaped[np.ndarray, " other"]) -> Comparison:
    """Interquartile mean of the first minus that of the second; an endless interval for fewer than 5 runs."""
    value = float(interquartile_mean(first) - interquartile_mean(second))
    if min(len(first), len(second)) < _FEWEST:
        return Comparison(value, -math.inf, math.inf)
    generator = np.random.default_rng(0)
    drawn = [
        interquartile_mean(part[generator.integers(len(part), size=(_DRAWS, len(part)))])
        for part in (np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64))
    ]
    tail = _tail(min(len(first), len(second)))
    low, high = np.quantile(drawn[0] - drawn[1], [tail, 1.0 - tail])
    return Comparison(value, float(low), float(high))


def band(curves: Shaped[np.ndarray, "run time"]) -> ReturnBand:
    """Over runs at each time; the same draws for all times."""
    runs = len(curves)
    mean = interquartile_mean(curves.T)
    if runs < 2:
        return ReturnBand(mean, np.full_like(mean, np.nan), np.full_like(mean, np.nan))
    rows = np.random.default_rng(0).integers(runs, size=(_BAND_DRAWS, runs))
    drawn = interquartile_mean(np.moveaxis(curves[rows], 1, -1))  # (draw, time)
    tail = _tail(runs)
    low, high = np.quantile(drawn, [tail, 1.0 - tail], axis=0)
    return ReturnBand(mean, low, high)


def median_reached(reached: Shaped[np.ndarray, " run"]) -> float:
    """Median of the steps to a threshold; ∞ where half of the runs never reached it."""
    return float(np.sort(reached)[len(reached) // 2])


def rank_settings(scores: Sequence[Shaped[np.ndarray, " run"]]) -> list[int]:
    """Places of the settings, best interquartile mean first; of equals the first."""
    means = [float(interquartile_mean(part)) for part in scores]
    return sorted(range(len(means)), key=lambda place: -means[place])


def _tail(count: int) -> float:
    """Share of draws beyond either end: Φ(−t √(n / (n − 1))), as wide as Student's (Hesterberg 2015)."""
    reach = stats.t.ppf(0.5 + LEVEL / 2.0, max(count - 1, 1)) * math.sqrt(count / (count - 1))
    return float(stats.norm.cdf(-reach))
