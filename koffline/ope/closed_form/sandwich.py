"""Standard errors over the independent units of a log, from what every row and start state contributes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from koffline.ope.closed_form.weights import RowSums
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
    sums = RowSums.of(system, np.zeros(len(system)), terms, start_values)
    return spread_of(sums, degrees_of_freedom, drawing_variance)


def spread_of(sums: RowSums, degrees_of_freedom: float = 0.0, drawing_variance: float = 0.0) -> Spread:
    """The same from what the rows of a log left."""
    units = sums.by_unit
    mean = float(units["term"].sum() / sums.weight)
    parts = (units["term"] - mean * units["weight"]) / sums.weight
    with_starts = "start" in units
    if with_starts:
        share = units["start_weight"] / units["start_weight"].sum()
        parts = parts + share * (units["start"] - float(share @ units["start"]))
    counted = units["weight"] > 0.0
    count, rows = int(counted.sum()), sums.counted
    influence = parts[counted] * count
    error = None
    if count > 1 and rows > degrees_of_freedom:
        variance = float(influence.var(ddof=1)) / count * rows / (rows - degrees_of_freedom)
        error = math.sqrt(variance + drawing_variance)
    return Spread(influence, error, len(units["weight"]) < sums.rows, with_starts)
