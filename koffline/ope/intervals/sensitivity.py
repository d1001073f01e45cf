"""How an interval depends on ρ, the norm that is assumed of the true values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float

from koffline.errors import ConfigError
from koffline.ope.features import FeatureSystem
from koffline.ope.intervals.calibrated import make_profile
from koffline.ope.intervals.kernel_sets import KernelSet
from koffline.ope.intervals.settings import KernelIntervalSettings
from koffline.ope.names import KERNEL_CERTIFIED, KERNEL_CERTIFIED_IID, KERNEL_SIMULTANEOUS
from koffline.ope.results import Record

_KINDS = (KERNEL_CERTIFIED, KERNEL_CERTIFIED_IID, KERNEL_SIMULTANEOUS)
_FACTORS = tuple(float(factor) for factor in np.logspace(-1.0, 1.5, 51))


@dataclass(frozen=True, eq=False)
class NormSensitivity(Record):
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

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return super().as_dict() | {"least_norm": self.least_norm}


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
    known = KernelSet.of(system, kind, settings)
    fitted = known.fitted_norm
    tried = tuple(factor * (fitted or 1.0) for factor in _FACTORS) if norms is None else tuple(sorted(norms))
    if not tried or not all(replace(settings, norm_bound=norm).norm_bound for norm in tried):
        raise ConfigError("norms is empty; give at least one positive number")
    ends = np.full((len(tried), 2), np.nan)
    for position, norm in enumerate(tried):
        found = known.feasible.value_range(known.threshold, norm)
        if found is not None:
            ends[position] = np.clip((found.low - known.margin, found.high + known.margin), *known.bounds)
    value = make_profile(system).value
    lows, highs = ends.T
    return NormSensitivity(
        kind, settings.level, np.array(tried), lows, highs, known.norm_bound, fitted, value, known.bounds
    )
