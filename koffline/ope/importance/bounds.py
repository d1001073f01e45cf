"""Model-free bounds for the mean of independent bounded numbers: closed forms that hold for any n."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float


def hoeffding_width(n: int, value_range: float, alpha: float) -> float:
    """R·sqrt(log(1/α) / 2n): the mean of n numbers in an interval of length R exceeds its expectation by more
    with probability at most α. (Hoeffding 1963, Theorem 2)
    """
    return value_range * math.sqrt(math.log(1.0 / alpha) / (2.0 * n))


def empirical_bernstein_width(n: int, variance: float, value_range: float, alpha: float) -> float:
    """sqrt(2 s² log(2/α) / n) + 7 R log(2/α) / (3(n − 1)), s² the sample variance; infinite for n = 1.

    One-sided at α, like the Hoeffding width. (Maurer and Pontil 2009, Theorem 4)
    """
    if n < 2:
        return math.inf
    log_term = math.log(2.0 / alpha)
    return math.sqrt(2.0 * variance * log_term / n) + 7.0 * value_range * log_term / (3.0 * (n - 1))


def mean_lower_bound(
    values: Float[np.ndarray, " unit"], value_range: float, alpha: float, kind: str
) -> float:
    """A number that the expectation of ``values`` in [0, R] is below with probability at most α."""
    n = len(values)
    if kind == "hoeffding":
        width = hoeffding_width(n, value_range, alpha)
    else:
        variance = float(values.var(ddof=1)) if n > 1 else 0.0
        width = empirical_bernstein_width(n, variance, value_range, alpha)
    return max(float(values.mean()) - width, 0.0)
