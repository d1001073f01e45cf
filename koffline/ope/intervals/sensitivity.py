"""How an interval depends on ρ, the norm that is assumed of the true values."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float

from koffline.errors import ConfigError
from koffline.ope.features import FeatureSystem
from koffline.ope.interval import finite_or_none
from koffline.ope.intervals.feature_interval import loss_threshold, norm_bound, start_margin
from koffline.ope.intervals.profile import make_profile
from koffline.ope.intervals.settings import KernelIntervalSettings
from koffline.ope.intervals.value_range import feasible_set
from koffline.ope.names import KERNEL_CERTIFIED, KERNEL_CERTIFIED_IID, KERNEL_SIMULTANEOUS

_KINDS = (KERNEL_CERTIFIED, KERNEL_CERTIFIED_IID, KERNEL_SIMULTANEOUS)
_FACTORS = tuple(float(factor) for factor in np.logspace(-1.0, 1.5, 51))


@dataclass(frozen=True, eq=False)
class NormSensitivity:
    """Ends of one kind of interval for growing ρ.

    ``norms (K,)``: ρ. ``lows``, ``highs (K,)``: NaN where ρ is too small for any θ to explain the log.
    ``chosen``: the ρ in use, ``fitted``: the norm of the fit. ``value``: the fitted value. ``bounds``: of
    every value, which cut the ends. ``least_norm``: the smallest ρ tried that is feasible; None if none is.
    """

    kind: str
    level: float
    norms: Float[np.ndarray, " norm"]
    lows: Float[np.ndarray, " norm"]
    highs: Float[np.ndarray, " norm"]
    chosen: float
    fitted: float
    value: float
    bounds: tuple[float, float]

    @property
    def least_norm(self) -> float | None:
        """The smallest ρ tried for which the class explains the log."""
        feasible = self.norms[np.isfinite(self.lows)]
        return float(feasible[0]) if len(feasible) else None

    def as_dict(self) -> dict[str, object]:
        """Plain JSON types."""
        return {
            "kind": self.kind,
            "level": self.level,
            "norms": [float(norm) for norm in self.norms],
            "lows": [finite_or_none(low) for low in self.lows],
            "highs": [finite_or_none(high) for high in self.highs],
            "chosen": self.chosen,
            "fitted": self.fitted,
            "value": self.value,
            "bounds": list(self.bounds),
            "least_norm": self.least_norm,
        }


def norm_sensitivity(
    system: FeatureSystem,
    norms: tuple[float, ...] | None = None,
    kind: str = KERNEL_CERTIFIED,
    settings: KernelIntervalSettings | None = None,
) -> NormSensitivity:
    """The interval of a kind for each ρ in ``norms``; by default a tenth of the fitted norm to thirty times.

    The rest (λ, start states) is computed once. Raises ConfigError.
    """
    settings = settings or KernelIntervalSettings()
    if kind not in _KINDS:
        raise ConfigError(f"sensitivity to the norm is for {', '.join(_KINDS)}; received '{kind}'")
    feasible = feasible_set(system)
    chosen, fitted = norm_bound(feasible, settings)
    tried = tuple(factor * (fitted or 1.0) for factor in _FACTORS) if norms is None else tuple(sorted(norms))
    if not tried or not all(replace(settings, norm_bound=norm).norm_bound for norm in tried):
        raise ConfigError("norms is empty; give at least one positive number")
    threshold = loss_threshold(system, kind, settings)
    margin = start_margin(system, kind, settings)
    bounds = settings.values_within(system)
    ends = np.full((len(tried), 2), np.nan)
    for position, norm in enumerate(tried):
        found = feasible.value_range(threshold, norm)
        if found is not None:
            ends[position] = np.clip((found.low - margin, found.high + margin), *bounds)
    return NormSensitivity(
        kind=kind,
        level=settings.level,
        norms=np.array(tried),
        lows=ends[:, 0],
        highs=ends[:, 1],
        chosen=chosen,
        fitted=fitted,
        value=make_profile(system).value,
        bounds=bounds,
    )
