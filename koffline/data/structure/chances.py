"""Chances of counts, by which the tests of structure judge what they see."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int
from scipy.special import bdtrc

SIGNIFICANT = 1e-6  # p-value of one test; some ten tests look at a log
_LEAST_ROWS = 3
_LEAST_SHARE = 0.005  # of the rows that could show a symptom


def chance_of_count(count: int, trials: int, rate: float) -> float:
    """Probability of at least ``count`` successes in ``trials`` independent trials of a
    rate.
    """
    if count <= 0:
        return 1.0
    return float(bdtrc(count - 1, trials, min(max(rate, 0.0), 1.0)))


def coincidence_rate(
    ends: Int[np.ndarray, " end"], starts: Int[np.ndarray, " start"]
) -> float:
    """Chance that an end drawn at random equals a start drawn at random, with one more
    pair for caution.
    """
    values, end_counts = np.unique(ends, return_counts=True)
    start_values, start_counts = np.unique(starts, return_counts=True)
    place = np.searchsorted(start_values, values)
    place = np.minimum(place, len(start_values) - 1)
    is_shared = start_values[place] == values
    pairs = float((end_counts[is_shared] * start_counts[place[is_shared]]).sum())
    return (pairs + 1.0) / (float(len(ends)) * float(len(starts)) + 1.0)


def is_clear(count: int, of: int, p_value: float) -> bool:
    """Whether enough rows show a symptom, and more than chance allows."""
    return count >= _LEAST_ROWS and count >= _LEAST_SHARE * of and p_value < SIGNIFICANT
