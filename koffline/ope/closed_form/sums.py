"""What rows with marginalised weights leave of a log: sums, their spread, what the weights are worth."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float

from koffline.errors import DataError
from koffline.ope.features import FeatureSystem
from koffline.ope.results import Interval, check_level
from koffline.ope.working_log import Columns

SANDWICH = "sandwich"
_FEW_UNITS = 10.0
_MASS_OFF, _UNBALANCED, _NEGATIVE = 0.1, 0.25, 0.2
_ASSUMPTIONS = (
    "Student t over {units}, each independent of the others: it covers the sampling of "
    "{units}{starts}, not what the features cannot express nor the pull of the ridge."
)


@dataclass(frozen=True, eq=False)
class RowSums:
    """What rows with weights ω and terms t (such as ω δ) leave of a log; two of them add up.

    ``units``: by unit Σ w as ``weight``, Σ w t as ``term``, Σ w ω as ``used``; where start states are the
    log's own, their weight and value as ``start_weight`` and ``start``. ``gap``: Σ u Z with u = w ω, (p,).
    ``totals``: numbers by name. ``start_value``, ``start_weight``: Σ w q(x0) and Σ w over start states.
    ``rows``, ``counted``: rows, and those with weight. ``unseen``: rows that a model valued which had not
    seen their episode. ``rewarded``: Σ u r. ``size``, ``negative``: Σ|u|, and where u is negative. ``mass``:
    Σ u (1 − discount).
    """

    units: Columns
    gap: Float[np.ndarray, " parameter"]
    totals: dict[str, float]

    @classmethod
    def of(
        cls,
        system: FeatureSystem,
        weights: Float[np.ndarray, " row"],
        terms: Float[np.ndarray, " row"],
        start_values: Float[np.ndarray, " start"],
        unseen: float = 0.0,
    ) -> RowSums:
        """Of a system's rows with ω (N,), t (N,) and values of start states (E,); unseen: a share of rows."""
        own, starts = system.row_weights.numpy(), system.start_weights.numpy()
        used = own * weights
        by_row = {"weight": own, "term": own * terms, "used": used}
        units = {name: np.add.reduceat(rows, system.unit_starts) for name, rows in by_row.items()}
        if not system.fixed_starts:
            units |= {"start_weight": starts, "start": start_values}
        totals = {
            "start_value": starts @ start_values,
            "start_weight": starts.sum(),
            "rows": len(own),
            "counted": np.count_nonzero(own),
            "unseen": unseen * len(own),
            "rewarded": used @ system.rewards.numpy(),
            "size": np.abs(used).sum(),
            "negative": np.abs(used[used < 0.0]).sum(),
            "mass": used @ (1.0 - system.discounts.numpy()),
        }
        plain = {name: float(total) for name, total in totals.items()}
        return cls(Columns((units,)), system.difference.numpy().T @ used, plain)

    def __add__(self, other: RowSums) -> RowSums:
        totals = {name: total + other.totals[name] for name, total in self.totals.items()}
        return RowSums(self.units + other.units, self.gap + other.gap, totals)

    def __getitem__(self, name: str) -> float:
        return self.totals[name]

    @cached_property
    def by_unit(self) -> dict[str, np.ndarray]:
        """The arrays of ``units``, (U,) each."""
        return self.units.joined()

    @property
    def weight(self) -> float:
        """Σ w."""
        return float(self.by_unit["weight"].sum())

    @property
    def count(self) -> int:
        """Units with weight."""
        return int((self.by_unit["weight"] > 0.0).sum())

    def standard_error(self, degrees_of_freedom: float = 0.0, drawing_variance: float = 0.0) -> float | None:
        """Of E q(x0) + Σ w t / Σ w; sums over units are independent. None where nothing is left to vary.

        degrees_of_freedom: parameters that the same rows decided; the variance is raised by n/(n − d). Start
        states that were given are taken as they are; those of the log are sampled with their units.
        drawing_variance: what actions drawn at given start states add.
        """
        units = self.by_unit
        mean = float(units["term"].sum() / self.weight)
        parts = (units["term"] - mean * units["weight"]) / self.weight
        if "start" in units:
            share = units["start_weight"] / units["start_weight"].sum()
            parts = parts + share * (units["start"] - float(share @ units["start"]))
        count, rows = self.count, self["counted"]
        left = rows - degrees_of_freedom
        if count < 2 or left <= 1e-9 * rows:  # by rounding alone
            return None
        influence = parts[units["weight"] > 0.0] * count
        variance = float(influence.var(ddof=1)) / count * rows / left
        return math.sqrt(variance + drawing_variance)

    def interval(self, value: float, error: float | None, level: float) -> Interval | None:
        """value ± t · standard error."""
        from scipy import stats

        check_level(level)
        if error is None:
            return None
        half = float(stats.t.ppf(0.5 + level / 2.0, df=self.count - 1)) * error
        text = _ASSUMPTIONS.format(
            units="episodes" if len(self.by_unit["weight"]) < self["rows"] else "rows",
            starts=" and their start states" if "start" in self.by_unit else "",
        )
        return Interval(value - half, value + half, level, SANDWICH, text)

    def diagnostics(self, start_mean: Float[np.ndarray, " parameter"]) -> dict[str, float]:
        """ω against what the density ratio d^π/μ would be, d^π = Σ_t γ^t P(x_t = ·).

        ``effective_units``: (Σu)²/Σu² of u = w ω summed over units. ``mass``: mean of w ω (1 − discount), 1
        for the true ratio, terminal rows included. ``imbalance``: length of n⁻¹ Σ w ω Z − c relative to c, 0
        for the true ratio but for sampling. ``negative_share``: of Σ|w ω|; a true ratio is nowhere negative.
        Raises DataError when ω is zero everywhere or not finite.
        """
        if not 0.0 < self["size"] < math.inf:
            raise DataError(
                "weights are all zero or not finite: the policy takes no logged action; use a log that "
                "covers the policy"
            )
        used, gap = self.by_unit["used"], self.gap / self.weight - start_mean
        return {
            "effective_units": float(used.sum()) ** 2 / max(float(np.square(used).sum()), 1e-300),
            "mass": self["mass"] / self.weight,
            "imbalance": float(np.linalg.norm(gap) / max(np.linalg.norm(start_mean), np.finfo(float).tiny)),
            "negative_share": self["negative"] / self["size"],
        }


def warnings_of_weights(found: dict[str, float], units: int) -> tuple[str, ...]:
    """Sentences for what should worry a reader of `RowSums.diagnostics`."""
    few = found["effective_units"] < min(_FEW_UNITS, 0.5 * units)
    sentences = {
        f"the weights make {units} units count as {found['effective_units']:.1f}: a few of them decide": few,
        f"the weights carry {found['mass']:.2f} of the policy's visits where 1 is right: the log misses "
        "states that the policy sees, or the features are too coarse": abs(found["mass"] - 1.0) > _MASS_OFF,
        f"the weighted log misses the start states' features by {found['imbalance']:.0%}: it does not cover "
        "the policy": found["imbalance"] > _UNBALANCED,
        f"{found['negative_share']:.0%} of the weights are negative, which no density ratio is: too many "
        "features for these rows": found["negative_share"] > _NEGATIVE,
    }
    return tuple(sentence for sentence, worries in sentences.items() if worries)
