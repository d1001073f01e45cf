"""What a set of marginalised importance weights is worth."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from jaxtyping import Float

from koffline.errors import DataError
from koffline.ope.features import FeatureSystem

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
    omega = np.asarray(weights, dtype=np.float64)
    if omega.shape != (len(system),) or not np.isfinite(omega).all():
        raise DataError(
            f"weights have shape {omega.shape} for {len(system)} rows or are not finite; "
            "give one finite number per row"
        )
    used = system.row_weights.numpy() * omega
    size = np.abs(used).sum()
    if size == 0.0:
        raise DataError(
            "weights are all zero: the policy takes no logged action; use a log that covers the policy"
        )
    by_unit = np.add.reduceat(used, system.unit_starts)
    start, n = system.start_mean.numpy(), len(system)
    gap = system.difference.numpy().T @ used / n - start
    return WeightDiagnostics(
        effective_rows=_effective(used),
        effective_units=_effective(by_unit),
        mass=normalising_mass(system, omega),
        imbalance=float(np.linalg.norm(gap) / max(np.linalg.norm(start), np.finfo(float).tiny)),
        negative_share=float(np.abs(used[used < 0.0]).sum() / size),
        largest_share=float(np.abs(used).max() / size),
    )


def normalising_mass(system: FeatureSystem, weights: Float[np.ndarray, " row"]) -> float:
    """Mean of w ω (1 − discount): 1 for the true ratio, since E_μ[ω (f − discount f')] = E f(x0) at f = 1."""
    left = 1.0 - system.discounts.numpy()
    return float((system.row_weights.numpy() * np.asarray(weights)) @ left / len(system))


def _effective(parts: np.ndarray) -> float:
    squares = float(np.square(parts).sum())
    return float(parts.sum()) ** 2 / squares if squares > 0.0 else 0.0
