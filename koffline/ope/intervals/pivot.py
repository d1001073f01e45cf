"""The episode bootstrap of the closed-form estimate."""

from __future__ import annotations

import torch

from koffline.ope.features import FeatureSystem
from koffline.ope.interval import Interval
from koffline.ope.intervals.profile import RIDGE, ridge_sizes, solve_ridged
from koffline.ope.intervals.resampling import (
    ONE_UNIT,
    LinearEquation,
    Units,
    pivotal_interval,
    resample_values,
    usable,
)
from koffline.ope.intervals.result import IntervalResult
from koffline.ope.intervals.settings import KernelIntervalSettings
from koffline.ope.intervals.value_range import best_constant
from koffline.ope.names import BOOTSTRAP_PIVOT

_BLOCK = 8192
_FEW_UNITS = 30
_ASSUMPTIONS = (
    "Asymptotic: {units} resampled, the estimate solved again for each ({matrix}; features and instruments "
    "as they are), errors turned around; {starts}. It does not know what the class cannot express."
)


@torch.no_grad()
def pivot_interval(system: FeatureSystem, settings: KernelIntervalSettings) -> IntervalResult:
    """[2η̂ − q_high, 2η̂ − q_low] of the kernel-loss minimiser over resampled episodes (rows without episodes).

    (Hao et al. 2021)
    """
    units = Units(system.unit_starts, system.row_weights, system.fixed_starts)
    if len(units.present) < 2:
        return IntervalResult(BOOTSTRAP_PIVOT, None, warnings=(ONE_UNIT,))
    equation = kernel_equation(system)
    values, exact = resample_values(equation, units, units.draw_counts(settings.draws, settings.seed))
    value = system.value(equation.theta)
    name = "episodes" if len(units) < len(system) else "rows"
    warnings = []
    if len(units.present) < _FEW_UNITS:
        warnings.append(
            f"the bootstrap has {len(units.present)} {name} to draw from; its interval is too narrow"
        )
    if not usable(values):
        warnings.append("too many resampled logs have no answer; there is no bootstrap interval")
        return IntervalResult(BOOTSTRAP_PIVOT, None, value=value, warnings=tuple(warnings))
    low, high = pivotal_interval(value, values, settings.level)
    interval = Interval(
        low,
        high,
        settings.level,
        BOOTSTRAP_PIVOT,
        describe(name, exact, system.fixed_starts),
    ).within(settings.values_within(system))
    return IntervalResult(
        BOOTSTRAP_PIVOT,
        interval,
        value=value,
        warnings=tuple(warnings),
        details={"draws": len(values), "spread": float(values.std(ddof=1)), "units": len(units.present)},
    )


def describe(units: str, exact: bool, fixed_starts: bool) -> str:
    """The assumptions in a sentence."""
    return _ASSUMPTIONS.format(
        units=units,
        matrix="its matrix too" if exact else "its matrix held: the first order",
        starts="given start states as they are" if fixed_starts else "start states resampled with them",
    )


def kernel_equation(system: FeatureSystem) -> LinearEquation:
    """Bᵀ(v − Bθ) = τD(θ − θ0), with Ω_i = w_i Bᵀψ_i held as instruments."""
    matrix, vector = system.projected[:, :-1], system.projected[:, -1]
    centre, curvature = best_constant(system), matrix.mT @ matrix
    step = solve_ridged(curvature, matrix.mT @ (vector - matrix @ centre), system.free, RIDGE)
    instruments = torch.cat(
        [
            system.instruments(system.kernel_inputs[begin : begin + _BLOCK]) @ matrix
            for begin in range(0, len(system), _BLOCK)
        ]
    )
    return LinearEquation(
        instruments=instruments * system.row_weights[:, None],
        difference=system.difference,
        residuals=system.residuals(centre + step),
        starts=system.starts,
        start_weights=system.start_weights,
        ridge=ridge_sizes(curvature, system.free, RIDGE),
        theta=centre + step,
    )
