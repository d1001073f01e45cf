"""From curves of seeds to numbers: final errors with intervals, the best learning rate by two rules."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Shaped
from scipy import stats

from koffline.experiments.cells import CellResult

LAST_RECORDS = 5  # averaged into the final number of a seed: a single record of a noisy curve is luck
LEVEL = 0.95
_FAR = 10.0

TRUTHS = {"paper": "mse_paper", "monte_carlo": "mse_monte_carlo"}


@dataclass(frozen=True)
class MeanInterval:
    """A mean over seeds and its t-interval at `LEVEL`; all NaN where a seed has no finite number."""

    mean: float
    low: float
    high: float

    @classmethod
    def of_seeds(cls, values: Shaped[np.ndarray, " seed"]) -> MeanInterval:
        """From one number per seed; the interval of a single seed is the whole line."""
        mean, count = float(np.mean(values, dtype=np.float64)), len(values)
        if not np.isfinite(mean):
            return cls(np.nan, np.nan, np.nan)
        if count < 2:
            return cls(mean, -np.inf, np.inf)
        half = stats.t.ppf(0.5 + LEVEL / 2.0, count - 1) * np.std(values, ddof=1) / np.sqrt(count)
        return cls(mean, mean - float(half), mean + float(half))


def final_values(result: CellResult, curve: str) -> Float[np.ndarray, "rate seed"]:
    """Mean of the last records of a curve, per learning rate and seed; NaN after a divergence."""
    return result.curves[curve][-LAST_RECORDS:].mean(axis=0, dtype=np.float64)


def best_rate_by_truth(result: CellResult, truth: str) -> int:
    """Index of the learning rate with the smallest mean error against a truth: the paper's rule.

    Rates with a diverged seed lose against any other. (Feng et al. 2019, sec:exp_eval)
    """
    return _smallest(final_values(result, TRUTHS[truth]).mean(axis=1))


def best_rate_without_truth(result: CellResult) -> int:
    """Index of the learning rate with the smallest kernel loss on tuples that were kept aside."""
    return _smallest(result.held_out.mean(axis=1))


def diverged_seeds(result: CellResult) -> Shaped[np.ndarray, "rate seed"]:
    """Whether a number stopped being finite, or V grew to ten times any return that the rewards allow."""
    with np.errstate(invalid="ignore"):
        beyond = np.nanmax(
            np.where(np.isnan(result.curves["largest_value"]), 0.0, result.curves["largest_value"]), axis=0
        )
    return (result.diverged_at >= 0) | (beyond > _FAR * result.largest_return)


def _smallest(means: Shaped[np.ndarray, " rate"]) -> int:
    return int(np.where(np.isfinite(means), means, np.inf).argmin())
