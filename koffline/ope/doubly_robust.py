"""Doubly robust combination of values and marginalised weights of rows, and diagnostics of the weights.

With ω = d^π/μ, d^π = Σ_t γ^t P^π(x_t = ·) unnormalised and μ the (weighted) distribution of logged rows,
E_μ[ω (f(x) − discount · E f(x'))] = E f(x0) for every f. Hence

    J = E q(x0) + n⁻¹ Σ w ω (r + discount · E q(x') − q(x))

has the bias E_μ[(ω̂ − ω)(B^π q − q)]: none when either q = Q^π or ω̂ is the true ratio. The scale of ω is that
of the sum of visits, 1/(1 − γ) per row where nothing ends: no factor 1 − γ stands anywhere. Terminal rows
count with discount 0; rows cut by a time limit are rows like any other, since their next state is known.
(Kallus & Uehara 2020, Double Reinforcement Learning)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from koffline.errors import DataError
from koffline.ope.importance.problem import RowValues
from koffline.ope.problem import EvaluationProblem
from koffline.ope.results import Interval, PointEstimate, check_level
from koffline.ope.working_log import Columns

SANDWICH = "sandwich"
_FEW_UNITS = 10.0
_MASS_OFF, _NEGATIVE = 0.1, 0.2
_ASSUMPTIONS = (
    "Student t over {units}, each independent of the others, or over resampled networks where these differ "
    "by more: it covers the sampling of {units}{starts}, not what no network can express."
)
_SEEN = (
    "the value function has seen the rows that correct it: the correction and its standard error are too "
    "small; resample more networks"
)


@dataclass(frozen=True, eq=False)
class RowSums:
    """Additive sums over rows with values q and weights ω, where u = w ω.

    ``units``: by unit Σ w as ``weight``, Σ u δ as ``term``, Σ u as ``used``; where start states are the log's
    own, their weight and value as ``start_weight`` and ``start``. ``totals``: by name. ``start_value``,
    ``start_weight``: Σ w q(x0) and Σ w over start states. ``rows``; ``unseen``: those whose values come from
    networks that had not seen their episode. ``size``, ``negative``: Σ|u|, and where u is negative. ``mass``:
    Σ u (1 − discount).
    """

    units: Columns
    totals: dict[str, float]

    @classmethod
    def of(cls, problem: EvaluationProblem, values: RowValues) -> RowSums:
        """Sums over a problem's rows; values are in units of the return and include ω."""
        assert values.weights is not None
        own, starts, discounts = problem.row_weights, problem.start_weights, problem.discounts
        used = own * values.weights
        term = used * (problem.rewards * problem.reward_scale + discounts * values.later - values.now)
        by_row = {"weight": own, "term": term, "used": used}
        units = {name: np.add.reduceat(rows, problem.episode_starts) for name, rows in by_row.items()}
        if not problem.fixed_starts:
            units |= {"start_weight": starts, "start": values.starts}
        totals = {
            "start_value": starts @ values.starts,
            "start_weight": starts.sum(),
            "rows": len(own),
            "unseen": values.unseen * len(own),
            "size": np.abs(used).sum(),
            "negative": np.abs(used[used < 0.0]).sum(),
            "mass": used @ (1.0 - discounts),
        }
        plain = {name: float(total) for name, total in totals.items()}
        return cls(Columns((units,)), plain)

    def __add__(self, other: RowSums) -> RowSums:
        totals = {name: total + other.totals[name] for name, total in self.totals.items()}
        return RowSums(self.units + other.units, totals)

    def with_starts_of(self, other: RowSums) -> RowSums:
        """Copy with the start states of another problem, for given start states, which belong to no part."""
        known = {name: other.totals[name] for name in ("start_value", "start_weight")}
        return RowSums(self.units, self.totals | known)

    def __getitem__(self, name: str) -> float:
        return self.totals[name]

    @cached_property
    def by_unit(self) -> dict[str, np.ndarray]:
        """The arrays of ``units``, (U,) each."""
        return self.units.joined()

    @property
    def weight(self) -> float:
        """Total weight Σ w."""
        return float(self.by_unit["weight"].sum())

    @property
    def count(self) -> int:
        """Number of units with positive weight."""
        return int((self.by_unit["weight"] > 0.0).sum())

    @property
    def direct_value(self) -> float:
        """Direct estimate E q(x0)."""
        return self["start_value"] / self["start_weight"]

    @property
    def value(self) -> float:
        """Estimate J: E q(x0) plus the mean of the terms."""
        return self.direct_value + float(self.by_unit["term"].sum()) / self.weight

    def standard_error(self) -> float | None:
        """Standard error of J over independent units; None for one unit.

        Start states that were given are taken as they are; those of the log are sampled with their units.
        """
        units = self.by_unit
        mean = float(units["term"].sum() / self.weight)
        parts = (units["term"] - mean * units["weight"]) / self.weight
        if "start" in units:
            share = units["start_weight"] / units["start_weight"].sum()
            parts = parts + share * (units["start"] - float(share @ units["start"]))
        if self.count < 2:
            return None
        influence = parts[units["weight"] > 0.0] * self.count
        return math.sqrt(float(influence.var(ddof=1)) / self.count)

    def diagnostics(self) -> dict[str, float]:
        """Properties of ω compared with those of the true ratio d^π/μ, d^π = Σ_t γ^t P(x_t = ·).

        ``effective_units``: (Σu)²/Σu² of u = w ω summed over units. ``mass``: mean of w ω (1 − discount), 1
        for the true ratio, terminal rows included. ``negative_share``: of Σ|w ω|; a true ratio is nowhere
        negative. Raises DataError when ω is zero everywhere or not finite.
        """
        if not 0.0 < self["size"] < math.inf:
            raise DataError(
                "weights are all zero or not finite: the policy takes no logged action; use a log that "
                "covers the policy"
            )
        used = self.by_unit["used"]
        return {
            "effective_units": float(used.sum()) ** 2 / max(float(np.square(used).sum()), 1e-300),
            "mass": self["mass"] / self.weight,
            "negative_share": self["negative"] / self["size"],
        }

    def warnings(self) -> tuple[str, ...]:
        """Sentences for what should worry a reader of the diagnostics."""
        found, units = self.diagnostics(), self.count
        few = found["effective_units"] < min(_FEW_UNITS, 0.5 * units)
        sentences = {
            f"the weights make {units} units count as {found['effective_units']:.1f}: a few decide": few,
            f"the weights carry {found['mass']:.2f} of the policy's visits where 1 is right: the log misses "
            "states that the policy sees": abs(found["mass"] - 1.0) > _MASS_OFF,
            f"{found['negative_share']:.0%} of the weights are negative, which no density ratio is": found[
                "negative_share"
            ]
            > _NEGATIVE,
        }
        return tuple(sentence for sentence, worries in sentences.items() if worries)


def drl(sums: RowSums, spread: float = 0.0, level: float = 0.95) -> PointEstimate:
    """The doubly robust estimate: J, its standard error, value ± t · standard error.

    spread: standard deviation of J over resampled networks. The standard error over units takes values and
    weights as known; where networks differ by more, the error is theirs.
    """
    from scipy import stats

    check_level(level)
    error, interval, unseen = sums.standard_error(), None, sums["unseen"] / sums["rows"]
    warnings = [_SEEN] if unseen < 0.5 else []
    if error is None:
        warnings.append("a single episode has no spread: no standard error and no interval")
    else:
        error = max(error, spread)
        half = float(stats.t.ppf(0.5 + level / 2.0, df=sums.count - 1)) * error
        text = _ASSUMPTIONS.format(
            units="episodes" if len(sums.by_unit["weight"]) < sums["rows"] else "rows",
            starts=" and their start states" if "start" in sums.by_unit else "",
        )
        interval = Interval(sums.value - half, sums.value + half, level, SANDWICH, text)
    described = sums.diagnostics()
    return PointEstimate(
        name="drl",
        value=sums.value,
        standard_error=error,
        interval=interval,
        effective_sample_size=described["effective_units"],
        warnings=(*warnings, *sums.warnings()),
        diagnostics={
            "direct_value": sums.direct_value,
            "correction": sums.value - sums.direct_value,
            "unseen": unseen,
            **described,
        },
    )
