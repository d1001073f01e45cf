"""Statistics over few seeds with intervals: means, ratios, rank correlations, returns.

Ratios and correlations have jackknife intervals with Student's t, on a scale where the
statistic is nearly normal (logarithm of a ratio, Fisher's z of a correlation): with
three seeds, a percentile bootstrap covers 77 % instead of 95 %. Returns have the
interquartile mean and the bootstrap interval of `koffline sweep`. For a difference of
two critics the seeds of both are resampled, and the interval is widened in the same
way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Shaped
from scipy import special

from koffline.spread import LEVEL, interquartile_mean, tail_share

HOLDS = "holds"
FAILS = "does not hold"
UNDECIDED = "undecided"
TIED = "level"
HOLDS_UNDER = "holds under"
UNSTABLE = 2.0  # a run oscillates if a late error is this many times its smallest one
MARGIN = 1.1  # errors within this factor of one another are level
_LEAST = 1e-12  # floor of errors, which may be negative after the correction
_DRAWS = 10_000
_BAND_DRAWS = 2_000
_FEWEST = 5  # least runs of a bootstrap: with fewer it cannot reach 95 %
PerSeed = Shaped[np.ndarray, " seed"]
Points = Shaped[np.ndarray, "point seed"]


class SeedInterval(NamedTuple):
    """An estimate with its 95 % interval over seeds: numbers, or arrays (T,) for a
    curve. None: no number.
    """

    value: Any = None
    low: Any = None
    high: Any = None

    def verdict(self, border: float) -> str:
        """Verdict on the claim that the number exceeds ``border``."""
        if self.low > border:
            return HOLDS
        if self.high < border:
            return FAILS
        return UNDECIDED

    def judged(self, border: float, low: float, high: float) -> str:
        """The verdict, with "level" for an undecided number whose interval lies between
        ``low`` and ``high``: no difference that would matter is left, as for two methods
        at a cap.
        """
        verdict = self.verdict(border)
        if verdict == UNDECIDED and low <= self.low and self.high <= high:
            return TIED
        return verdict

    def judged_ratio(self) -> str:
        """The verdict on a ratio of errors against 1."""
        return self.judged(1.0, 1.0 / MARGIN, MARGIN)


NO_NUMBER = SeedInterval()


def mean_over_seeds(values: Shaped[np.ndarray, "*time seed"]) -> SeedInterval:
    """Mean and t-interval: NaN if a seed is not finite, infinite ends for a single
    seed.
    """
    count = values.shape[-1]
    kept = np.where(
        np.isfinite(values).all(axis=-1, keepdims=True), values, np.nan
    ).astype(np.float64)
    mean = kept.mean(axis=-1)
    if count < 2:
        half = np.inf
    else:
        half = _quantile(count) * kept.std(axis=-1, ddof=1) / np.sqrt(count)
    return SeedInterval(mean, mean - half, mean + half)


def _quantile(count: int) -> float:
    return float(special.stdtrit(count - 1, 0.5 + LEVEL / 2.0))


def ratio_of_means(first: PerSeed, second: PerSeed) -> SeedInterval:
    """Ratio mean(first) / mean(second) with a jackknife interval over paired seeds.

    Infinite if the first is not finite for all seeds, zero if the second is not.
    """
    if not np.all(np.isfinite(first)):
        return SeedInterval(np.inf, np.inf, np.inf)
    if not np.all(np.isfinite(second)):
        return SeedInterval(0.0, 0.0, 0.0)

    def log_ratio(seeds: np.ndarray) -> float:
        above = max(float(first[seeds].mean()), _LEAST)
        below = max(float(second[seeds].mean()), _LEAST)
        return float(np.log(above / below))

    return _jackknife(log_ratio, len(first), np.exp)


def swinging_share(curves: Shaped[np.ndarray, "record rate *run"]) -> float:
    """Share of runs whose error in the last fifth of the records is far above their
    smallest error; diverged runs count.
    """
    late = curves[-max(1, len(curves) // 5) :]
    with np.errstate(invalid="ignore"):
        steady = late.max(axis=0) <= UNSTABLE * np.nanmin(curves, axis=0)
    return float(1.0 - steady.mean())


def spearman_over_seeds(first: Points, second: Points) -> SeedInterval:
    """Rank correlation over all points finite in both; jackknife interval over
    seeds.
    """
    from scipy.stats import spearmanr  # takes a second to import

    def z_value(seeds: np.ndarray) -> float:
        x = first[:, seeds].ravel()
        y = second[:, seeds].ravel()
        good = np.isfinite(x) & np.isfinite(y)
        rank: Any = np.nan
        if good.sum() > 2:
            rank = spearmanr(x[good], y[good]).statistic
        return float(np.arctanh(np.clip(rank, -1.0 + 1e-9, 1.0 - 1e-9)))

    return _jackknife(z_value, first.shape[1], np.tanh)


def _jackknife(
    statistic: Callable[[np.ndarray], float], seeds: int, back: Callable[..., float]
) -> SeedInterval:
    """Statistic of all seeds with its jackknife t-interval, both transformed by
    ``back``.
    """
    whole = np.arange(seeds)
    value = statistic(whole)
    half = math.inf
    if seeds > 1:
        without = np.array([statistic(np.delete(whole, seed)) for seed in whole])
        half = _quantile(seeds) * np.sqrt(
            (seeds - 1) / seeds * np.sum((without - without.mean()) ** 2)
        )
    return SeedInterval(
        *(float(back(end)) for end in (value, value - half, value + half))
    )


def difference(first: PerSeed, second: Shaped[np.ndarray, " other"]) -> SeedInterval:
    """Interquartile mean of the first minus the second's; infinite interval for fewer
    than 5 runs.
    """
    value = float(interquartile_mean(first) - interquartile_mean(second))
    count = min(len(first), len(second))
    if count < _FEWEST:
        return SeedInterval(value, -math.inf, math.inf)
    generator = np.random.default_rng(0)
    drawn = [
        interquartile_mean(
            part[generator.integers(len(part), size=(_DRAWS, len(part)))]
        )
        for part in (
            np.asarray(first, dtype=np.float64),
            np.asarray(second, dtype=np.float64),
        )
    ]
    tail = tail_share(count)
    low, high = np.quantile(drawn[0] - drawn[1], [tail, 1.0 - tail])
    return SeedInterval(value, float(low), float(high))


def band(curves: Shaped[np.ndarray, "run time"]) -> SeedInterval:
    """Interquartile mean over runs at each time, with bootstrap intervals (same
    resamples at all times).
    """
    runs = len(curves)
    mean = interquartile_mean(curves, axis=0)
    if runs < 2:
        return SeedInterval(
            mean, np.full_like(mean, np.nan), np.full_like(mean, np.nan)
        )
    rows = np.random.default_rng(0).integers(runs, size=(_BAND_DRAWS, runs))
    drawn = interquartile_mean(curves[rows], axis=1)  # (draw, time)
    tail = tail_share(runs)
    return SeedInterval(mean, *np.quantile(drawn, [tail, 1.0 - tail], axis=0))
