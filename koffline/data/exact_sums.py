"""Sums of float64 numbers without any rounding: the same whatever the order and however the rows are cut."""

from __future__ import annotations

import numpy as np

# float64 is a whole number of 53 bits times 2^(e − 53), with e at least −1073; all are whole at this scale.
_MANTISSA_BITS, _HALF_BITS, _SCALE_BITS = 53, 27, 1126
# So many halves of a mantissa add up exactly in float64, which bincount counts in.
_MOST_ROWS = 2**25


class ExactSums:
    """Sums of k columns. ``float`` of one is what ``math.fsum`` gives for the same numbers."""

    def __init__(self, columns: int) -> None:
        self._totals = [0] * columns

    def add(self, values: np.ndarray) -> None:
        """Rows (B, k) of finite numbers."""
        for start in range(0, len(values), _MOST_ROWS):
            for i, column in enumerate(np.asarray(values[start : start + _MOST_ROWS], dtype=np.float64).T):
                self._totals[i] += _scaled_sum(column)

    def merge(self, other: ExactSums) -> None:
        """Add the sums of other rows."""
        self._totals = [a + b for a, b in zip(self._totals, other._totals, strict=True)]

    def values(self) -> list[float]:
        """(k) sums, rounded once. Raises OverflowError above the largest float."""
        return [total / (1 << _SCALE_BITS) for total in self._totals]


def _scaled_sum(column: np.ndarray) -> int:
    """Σ x · 2^1126 as a whole number: mantissas are added up by exponent, in two halves."""
    fractions, exponents = np.frexp(column)
    mantissas = np.ldexp(fractions, _MANTISSA_BITS).astype(np.int64)
    lowest = int(exponents.min(initial=0))
    places = exponents - lowest
    total = 0
    for halves, shift in ((mantissas >> _HALF_BITS, _HALF_BITS), (mantissas & (2**_HALF_BITS - 1), 0)):
        sums = np.bincount(places, weights=halves)
        for place in np.flatnonzero(sums):
            power = lowest + int(place) - _MANTISSA_BITS + _SCALE_BITS + shift
            total += int(sums[place]) << power
    return total
