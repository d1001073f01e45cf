"""What a set of marginalised importance weights is worth."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from functools import cached_property

import numpy as np
from jaxtyping import Float

from koffline.errors import DataError
from koffline.ope.features import FeatureSystem
from koffline.ope.working_log import Columns

_FEW_UNITS = 10.0
_MASS_OFF, _UNBALANCED, _NEGATIVE = 0.1, 0.25, 0.2


@dataclass(frozen=True)
class WeightDiagnostics:
    """Weights ω of rows against what the density ratio d^π/μ would be, d^π = Σ_t γ^t P(x_t = ·).

    ``effective_rows`` and ``effective_units``: (Σu)²/Σu² of u = w ω, by row and summed over units.
    ``mass``: mean of w ω (1 − discount), 1 for the true ratio, terminal rows included. ``imbalance``: length
    of n⁻¹ Σ w ω Z − c relative to c, 0 for the true ratio but for sampling. ``negative_share`` and
    ``largest_share``: of Σ|w ω|; a true ratio is nowhere negative.
    """

    effective_rows: float
    effective_units: float
    mass: float
    imbalance: float
    negative_share: float
    largest_share: float

    def as_dict(self) -> dict[str, float]:
        """Plain numbers."""
        return asdict(self)

    def warnings(self, units: int) -> tuple[str, ...]:
        """Sentences for what should worry a reader."""
        found = []
        if self.effective_units < min(_FEW_UNITS, 0.5 * units):
            found.append(
                f"the weights make {units} units count as {self.effective_units:.1f}: a few of them decide"
            )
        if abs(self.mass - 1.0) > _MASS_OFF:
            found.append(
                f"the weights carry {self.mass:.2f} of the policy's visits where 1 is right: "
                "the log misses states that the policy sees, or the features are too coarse"
            )
        if self.imbalance > _UNBALANCED:
            found.append(
                f"the weighted log misses the start states' features by {self.imbalance:.0%}: "
                "it does not cover the policy"
            )
        if self.negative_share > _NEGATIVE:
            found.append(
                f"{self.negative_share:.0%} of the weights are negative, which no density ratio is: "
                "too many features for these rows"
            )
        return tuple(found)


def describe_weights(system: FeatureSystem, weights: Float[np.ndarray, " row"]) -> WeightDiagnostics:
    """Diagnostics of ω (N,). DataError when they are all zero or not finite."""
    nothing = np.zeros(len(system))
    sums = RowSums.of(system, weights, nothing, np.zeros(len(system.start_weights)))
    return sums.diagnostics(system.start_mean.numpy())


@dataclass(frozen=True, eq=False)
class RowSums:
    """What rows with weights ω and terms t (such as ω δ) leave of a log; two of them add up.

    ``units``: by unit Σ w as ``weight``, Σ w t as ``term``, Σ w ω as ``used``; where start states are the
    log's own, their weight and value as ``start_weight`` and ``start``. ``counted``: rows with weight.
    ``rewarded``: Σ w ω r. ``squares``, ``size``, ``negative``, ``largest``: of u = w ω, Σu², Σ|u|, Σ|u| where
    negative, max|u|. ``mass``: Σ u (1 − discount). ``gap``: Σ u Z, (p,).
    """

    units: Columns
    rows: int
    counted: int
    rewarded: float
    squares: float
    size: float
    negative: float
    largest: float
    mass: float
    gap: Float[np.ndarray, " parameter"]

    @classmethod
    def of(
        cls,
        system: FeatureSystem,
        weights: Float[np.ndarray, " given"],
        terms: Float[np.ndarray, " row"],
        start_values: Float[np.ndarray, " start"],
    ) -> RowSums:
        """Of a system's rows with ω (N,), t (N,) and values of start states (E,). Raises DataError."""
        omega = np.asarray(weights, dtype=np.float64)
        if omega.shape != (len(system),) or not np.isfinite(omega).all():
            raise DataError(
                f"weights have shape {omega.shape} for {len(system)} rows or are not finite; "
                "give one finite number per row"
            )
        own = system.row_weights.numpy()
        used = own * omega
        units = {
            name: np.add.reduceat(rows, system.unit_starts)
            for name, rows in (("weight", own), ("term", own * terms), ("used", used))
        }
        if not system.fixed_starts:
            units |= {"start_weight": system.start_weights.numpy(), "start": start_values}
        return cls(
            units=Columns((units,)),
            rows=len(system),
            counted=int(np.count_nonzero(own)),
            rewarded=float(used @ system.rewards.numpy()),
            squares=float(np.square(used).sum()),
            size=float(np.abs(used).sum()),
            negative=float(np.abs(used[used < 0.0]).sum()),
            largest=float(np.abs(used).max()),
            mass=float(used @ (1.0 - system.discounts.numpy())),
            gap=system.difference.numpy().T @ used,
        )

    def __add__(self, other: RowSums) -> RowSums:
        added = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        return RowSums(**{**added, "largest": max(self.largest, other.largest)})

    @cached_property
    def by_unit(self) -> dict[str, np.ndarray]:
        """The arrays of ``units``, (U,) each."""
        return self.units.joined()

    @property
    def weight(self) -> float:
        """Σ w."""
        return float(self.by_unit["weight"].sum())

    def diagnostics(self, start_mean: Float[np.ndarray, " parameter"]) -> WeightDiagnostics:
        """What ω is worth. DataError when it is zero everywhere."""
        if self.size == 0.0:
            raise DataError(
                "weights are all zero: the policy takes no logged action; use a log that covers the policy"
            )
        used = self.by_unit["used"]
        gap = self.gap / self.weight - start_mean
        total = float(used.sum())
        return WeightDiagnostics(
            effective_rows=total**2 / self.squares if self.squares > 0.0 else 0.0,
            effective_units=_effective(used),
            mass=self.mass / self.weight,
            imbalance=float(np.linalg.norm(gap) / max(np.linalg.norm(start_mean), np.finfo(float).tiny)),
            negative_share=self.negative / self.size,
            largest_share=self.largest / self.size,
        )


def _effective(parts: np.ndarray) -> float:
    squares = float(np.square(parts).sum())
    return float(parts.sum()) ** 2 / squares if squares > 0.0 else 0.0
