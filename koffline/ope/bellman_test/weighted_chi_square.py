"""Tail of a weighted sum of independent chi-squares with one degree of freedom each."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float

_NEGLIGIBLE = 1e-10  # of the largest weight: such terms act as their mean
_TERMS = 256
_MOST_TERMS = 40_000
_TOLERANCE = 1e-9
_SMALLEST = 1e-6


def weighted_chi_square_tail(weights: Float[np.ndarray, " term"], threshold: float) -> float:
    """P(Σ λ_i χ²_i > q), any signs of λ, by inversion of the characteristic function.

    Trapezoid rule of Davies (Applied Statistics 1980, AS 155) for Imhof's integral: the error of the grid is
    a tail beyond q ± 2π/step, kept below 1e-9, and the sum is cut: what is below 1e-6 is not to be trusted
    and becomes 1e-6 (for a single chi-square errors reach 1e-4).
    """
    weights = np.asarray(weights, dtype=np.float64)
    largest = float(np.abs(weights).max(initial=0.0))
    if largest == 0.0:
        return float(threshold < 0.0)
    small = np.abs(weights) < _NEGLIGIBLE * largest
    scaled, point = weights[~small] / largest, (threshold - float(weights[small].sum())) / largest
    deviation = math.sqrt(2.0 * float(np.square(scaled).sum()))
    reach = abs(point - float(scaled.sum())) + 8.0 * deviation + 25.0
    step = 2.0 * math.pi / (2.0 * reach)
    total, first = 0.0, 0
    while first < _MOST_TERMS:
        at = (np.arange(first, first + _TERMS) + 0.5) * step
        turns = 2.0 * scaled[None] * at[:, None]  # characteristic function Π (1 − 2iλu)^(−1/2)
        angle = 0.5 * np.arctan(turns).sum(axis=1) - at * point
        size = np.exp(-0.25 * np.log1p(turns**2).sum(axis=1))
        terms = np.sin(angle) * size / (np.arange(first, first + _TERMS) + 0.5)
        total += float(terms.sum())
        first += _TERMS
        if float(size[-1]) < _TOLERANCE * first:  # the terms that follow alternate and fall
            break
    return min(max(0.5 + total / math.pi, _SMALLEST), 1.0)
