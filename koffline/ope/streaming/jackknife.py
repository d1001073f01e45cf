"""How an estimate from sums varies: it is made again without each group of units.

Groups are drawn by hashes of units, so they are of about equal size and independent. With D_g = (1 − share_g)
(J − J without g), which is the group's contribution where J is a mean, Σ D² / (1 − Σ share²) is unbiased for
the variance over units whatever the sizes of the groups, and has about 1/Σ share² − 1 degrees of freedom.
(Efron 1982; Busing, Meijer and Van der Leeden 1999, for groups of unequal size)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from koffline.ope.interval import Interval
from koffline.ope.streaming.moments import StreamingMoments

GROUP_JACKKNIFE = "group-jackknife"
_ASSUMPTIONS = "Student t with {freedom:.3g} degrees of freedom, jackknife over {groups} groups of {units}"
STARTS_OF_LOG = "it covers the sampling of {units} and their start states"
STARTS_GIVEN = "it covers the sampling of {units}, with the given start states held fixed"
NOT_FEATURES = "not what the features cannot express nor the pull of the ridge"
NOT_NETWORKS = (
    "not what the features cannot express, the pull of the ridge, nor how trained features vary with the "
    "sample of rows"
)


@dataclass(frozen=True, eq=False)
class GroupSpread:
    """``variance`` over units and its degrees of freedom; ``between``: variance of the mean over replicas."""

    variance: float
    freedom: float
    groups: int
    between: float = 0.0
    replicas: int = 1

    @property
    def standard_error(self) -> float:
        """Of the mean over replicas."""
        return math.sqrt(self.variance + self.between)

    @property
    def total_freedom(self) -> float:
        """Satterthwaite's, at least one."""
        parts = self.variance**2 / self.freedom
        if self.replicas > 1:
            parts += self.between**2 / (self.replicas - 1)
        total = (self.variance + self.between) ** 2
        return max(1.0, total / parts) if parts > 0.0 else max(1.0, self.freedom)

    def interval(self, value: float, level: float, units: str, covers: str) -> Interval:
        """value ± t · standard error. covers: what it does and what it does not, by the estimator."""
        from scipy import stats

        half = float(stats.t.ppf(0.5 + level / 2.0, df=self.total_freedom)) * self.standard_error
        replicas = f", and the spread of {self.replicas} networks" if self.replicas > 1 else ""
        text = _ASSUMPTIONS.format(freedom=self.total_freedom, groups=self.groups, units=units)
        return Interval(
            value - half,
            value + half,
            level,
            GROUP_JACKKNIFE,
            f"{text}{replicas}: {covers.format(units=units)}",
        )


def coverage_text(given_starts: bool, trained: bool) -> str:
    """What an interval of a value function covers and what it does not. trained: its features were."""
    return f"{STARTS_GIVEN if given_starts else STARTS_OF_LOG}, {NOT_NETWORKS if trained else NOT_FEATURES}"


def jackknife(
    sums: StreamingMoments, read: Callable[[StreamingMoments], Float[np.ndarray, " replica"]]
) -> GroupSpread | None:
    """Spread of the mean of ``read`` over replicas; None where fewer than two groups have rows."""
    shares = sums.shares
    total = sums.total()
    values = read(total)
    contributions = []
    for group in np.flatnonzero(shares > 0.0):
        if shares[group] == 1.0:
            return None
        rest = total.without(sums.part([int(group)]))
        contributions.append((1.0 - shares[group]) * float((values - read(rest)).mean()))
    return group_spread(np.array(contributions), shares[shares > 0.0], values)


def group_spread(
    contributions: Float[np.ndarray, " group"],
    shares: Float[np.ndarray, " group"],
    values: Float[np.ndarray, " replica"],
) -> GroupSpread | None:
    """From what each group contributes; None where that says nothing."""
    concentration = float(np.square(shares).sum())
    if concentration >= 1.0 or not np.isfinite(contributions).all():
        return None
    variance = float(np.square(contributions).sum()) / (1.0 - concentration)
    between = float(values.var(ddof=1)) / len(values) if len(values) > 1 else 0.0
    return GroupSpread(variance, 1.0 / concentration - 1.0, len(shares), between, len(values))
