"""Standard errors over the independent units of a log, from what every row and start state contributes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from koffline.ope.features import FeatureSystem
from koffline.ope.interval import Interval, check_level

SANDWICH = "sandwich"
_ASSUMPTIONS = (
    "Student t over {units}, each independent of the others: it covers the sampling of "
    "{units}{starts}, not what the features cannot express nor the pull of the ridge."
)


@dataclass(frozen=True, eq=False)
class Spread:
    """How an estimate varies over the units of a log.

    ``influence (U,)``: what each unit moves the value by, times U. ``standard_error``: None for one unit or
    where every degree of freedom was spent on the fit.
    """

    influence: Float[np.ndarray, " unit"]
    standard_error: float | None
    by_episode: bool
    with_starts: bool

    def interval(self, value: float, level: float) -> Interval | None:
        """value ± t · standard error."""
        from scipy import stats

        check_level(level)
        if self.standard_error is None:
            return None
        quantile = float(stats.t.ppf(0.5 + level / 2.0, df=len(self.influence) - 1))
        half = quantile * self.standard_error
        assumptions = _ASSUMPTIONS.format(
            units="episodes" if self.by_episode else "rows",
            starts=" and their start states" if self.with_starts else "",
        )
        return Interval(value - half, value + half, level, SANDWICH, assumptions)


def sandwich(
    system: FeatureSystem,
    terms: Float[np.ndarray, " row"],
    start_values: Float[np.ndarray, " start"],
    degrees_of_freedom: float = 0.0,
    drawing_variance: float = 0.0,
) -> Spread:
    """Spread of E q(x0) + Σ w terms / Σ w, with terms = ω δ of the rows; sums over units are independent.

    degrees_of_freedom: parameters that the same rows decided; the variance is raised by n/(n − d). Start
    states that were given are taken as they are; those of the log are sampled with their units.
    drawing_variance: what actions drawn at given start states add.
    """
    weights = system.row_weights.numpy()
    lengths = np.diff(np.append(system.unit_starts, len(system)))
    totals = np.add.reduceat(weights, system.unit_starts)
    mean = float(weights @ terms / weights.sum())
    parts = np.add.reduceat(weights * (terms - mean), system.unit_starts) / weights.sum()
    if not system.fixed_starts:
        share = system.start_weights.numpy() / float(system.start_weights.sum())
        parts = parts + share * (start_values - float(share @ start_values))
    counted = totals > 0.0
    units, rows = int(counted.sum()), int(np.count_nonzero(weights))
    influence = parts[counted] * units
    error = None
    if units > 1 and rows > degrees_of_freedom:
        variance = float(influence.var(ddof=1)) / units * rows / (rows - degrees_of_freedom)
        error = math.sqrt(variance + drawing_variance)
    return Spread(influence, error, bool((lengths > 1).any()), not system.fixed_starts)
