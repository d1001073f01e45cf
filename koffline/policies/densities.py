"""Densities of actions that are Gaussian, cut off at bounds or squashed into them; all in float64.

Where draws are cut off at a bound, probability collects there: the density then counts volume inside the
bounds and one unit for each action number on a bound. Ratios of two such densities are importance ratios
as long as both are cut off at the same bounds.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float
from scipy.special import log_ndtr

_NEAR = 1e-6  # of the box: actions went through float32
_LARGEST_SQUASHED = 1.0 - 1e-6  # tanh of anything beyond 7.25 is stored as ±1
_HALF_LOG_TAU = 0.5 * float(np.log(2.0 * np.pi))


def at_bounds(
    actions: Float[np.ndarray, "row k"], low: Float[np.ndarray, " k"], high: Float[np.ndarray, " k"]
) -> tuple[Bool[np.ndarray, "row k"], Bool[np.ndarray, "row k"]]:
    """Which action numbers lie on the lower and on the upper bound, up to rounding; none on infinite ones."""
    low, high = np.broadcast_to(low, actions.shape[1:]), np.broadcast_to(high, actions.shape[1:])
    slack = _NEAR * np.where(np.isfinite(high - low), high - low, 0.0)
    return actions <= low + slack, actions >= high - slack


def gaussian_log_density(
    actions: Float[np.ndarray, "row k"],
    mean: np.ndarray,
    deviation: np.ndarray,
    low: np.ndarray | None = None,
    high: np.ndarray | None = None,
) -> Float[np.ndarray, " row"]:
    """log N(a; mean, deviation²) summed over action numbers; with bounds, log of the mass beyond them there.

    ``mean``, ``deviation``, ``low``, ``high``: scalar, (k,) or (N, k). Actions outside the bounds have −inf.
    """
    scaled = (actions - mean) / deviation
    logs = -0.5 * np.square(scaled) - np.log(deviation) - _HALF_LOG_TAU
    if low is not None and high is not None:
        below, above = at_bounds(actions, np.asarray(low), np.asarray(high))
        logs = np.where(below, log_ndtr((low - mean) / deviation), logs)
        logs = np.where(above, log_ndtr((mean - high) / deviation), logs)
        slack = _NEAR * (np.asarray(high) - np.asarray(low))
        logs = np.where((actions < low - slack) | (actions > high + slack), -np.inf, logs)
    return logs.sum(axis=1)


def squashed_gaussian_log_density(
    actions: Float[np.ndarray, "row k"], mean: Float[np.ndarray, "row k"], deviation: np.ndarray
) -> Float[np.ndarray, " row"]:
    """Log density of tanh(z), z ~ N(mean, deviation²), summed over action numbers; −inf outside [−1, 1]."""
    inside = np.clip(actions, -_LARGEST_SQUASHED, _LARGEST_SQUASHED)
    raw = np.arctanh(inside)
    logs = gaussian_log_density(raw, mean, deviation) - np.log1p(-np.square(inside)).sum(axis=1)
    return np.where((np.abs(actions) > 1.0 + _NEAR).any(axis=1), -np.inf, logs)
