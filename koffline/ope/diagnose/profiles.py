"""Mean Bellman residual along one number: the value itself, or the time step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Float

from koffline.ope.interval import finite_or_none

_BINS = 12
_FEWEST = 8  # rows in a bin, where there are enough
_ROUNDING = 1e-12


@dataclass(frozen=True, eq=False)
class Profile:
    """Rows in bins of nearly equal weight, in the order of ``label``.

    (B,) each: ``center``: weighted mean of the number; ``mean`` ± ``standard_error`` of the residual;
    ``low``, ``high``: its 10 % and 90 % quantiles; ``rows``: how many.
    """

    label: str
    center: np.ndarray
    mean: np.ndarray
    standard_error: np.ndarray
    low: np.ndarray
    high: np.ndarray
    rows: np.ndarray

    @property
    def z_scores(self) -> np.ndarray:
        """(B,) mean in standard errors; without spread infinite for enough rows of a mean, else 0."""
        certain = (self.mean != 0.0) & (self.rows >= _FEWEST)
        otherwise = np.where(certain, np.copysign(np.inf, self.mean), 0.0)
        return np.divide(self.mean, self.standard_error, out=otherwise, where=self.standard_error > 0.0)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        arrays = {
            name: [finite_or_none(float(number)) for number in getattr(self, name)]
            for name in ("center", "mean", "standard_error", "low", "high")
        }
        return {"label": self.label, **arrays, "rows": [int(count) for count in self.rows]}


def make_profile(
    label: str,
    numbers: Float[np.ndarray, " row"],
    residuals: Float[np.ndarray, " row"],
    weights: Float[np.ndarray, " row"],
    bins: int = _BINS,
) -> Profile:
    """Bins by quantiles of ``numbers``; equal numbers share a bin. Rows of weight zero are no evidence."""
    kept = np.flatnonzero(weights > 0.0)
    order = kept[np.argsort(numbers[kept], kind="stable")]
    parts = _parts(numbers[order], weights[order], max(1, min(bins, len(order) // _FEWEST)))
    columns = [_summary(numbers, residuals, weights, order[part]) for part in parts]
    center, mean, error, low, high, rows = (np.array(column) for column in zip(*columns, strict=True))
    return Profile(label, center, mean, error, low, high, rows.astype(np.int64))


def _parts(ordered: np.ndarray, weights: np.ndarray, bins: int) -> list[slice]:
    """Slices of sorted numbers; a run of equal ones is never cut."""
    reached = np.cumsum(weights) / weights.sum()
    cuts = np.searchsorted(reached, np.arange(1, bins) / bins + 1e-9, side="right")
    cuts = np.minimum(cuts, len(ordered) - 1)
    firsts = np.searchsorted(ordered, ordered[cuts], side="left")
    edges = np.unique(np.concatenate([[0], firsts, [len(ordered)]]))
    return [slice(int(a), int(b)) for a, b in pairwise(edges)]


def _summary(
    numbers: np.ndarray, residuals: np.ndarray, weights: np.ndarray, rows: np.ndarray
) -> tuple[float, ...]:
    share = weights[rows] / weights[rows].sum()
    inside = residuals[rows]
    mean = float(share @ inside)
    error = math.sqrt(float(np.square(share) @ np.square(inside - mean)))
    if np.ptp(inside) <= _ROUNDING * abs(mean):  # equal residuals have no spread
        error = 0.0
    if len(rows) > 1:
        error *= math.sqrt(len(rows) / (len(rows) - 1))
    low, high = np.quantile(inside, [0.1, 0.9])
    return float(share @ numbers[rows]), mean, error, float(low), float(high), float(len(rows))
