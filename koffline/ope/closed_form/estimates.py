"""The closed forms as estimates: value, standard error over episodes, interval, effective sample size.

    estimate = mql(make_feature_system(problem, gamma=0.95))

All of them are float64 and deterministic; each value is linear in the rewards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float

from koffline.ope.closed_form.doubly_robust import CrossFit, DoublyRobustOfPart, ValuesOfPart, cross_fit
from koffline.ope.closed_form.dualdice import fit_dualdice
from koffline.ope.closed_form.fit import LinearFit
from koffline.ope.closed_form.minimax import fit_lstdq, fit_mql, fit_mwl
from koffline.ope.closed_form.sandwich import Spread, spread_of
from koffline.ope.closed_form.weights import RowSums
from koffline.ope.features import FeatureSystem
from koffline.ope.point_estimate import PointEstimate
from koffline.ope.row_values import RowValues

_LEVEL = 0.95


def mql(system: FeatureSystem, *, level: float = _LEVEL, **options: Any) -> PointEstimate:
    """Minimax Q-learning, the exact minimiser of the kernel loss over Q = φᵀθ; options of `fit_mql`."""
    return estimate_of_fit("mql", system, fit_mql(system, **options), level)


def lstdq(system: FeatureSystem, *, level: float = _LEVEL, **options: Any) -> PointEstimate:
    """LSTD-Q, the same with critics linear in the features; options of `fit_lstdq`."""
    return estimate_of_fit("lstdq", system, fit_lstdq(system, **options), level)


def dualdice(system: FeatureSystem, *, level: float = _LEVEL, **options: Any) -> PointEstimate:
    """DualDICE in closed form; options of `fit_dualdice`."""
    return estimate_of_fit("dualdice", system, fit_dualdice(system, **options), level)


def mwl(
    system: FeatureSystem,
    *,
    level: float = _LEVEL,
    normalised: bool = True,
    ridge: float | None = None,
    seed: int = 0,
) -> PointEstimate:
    """Minimax weight learning: Σ w ω r / n, ω scaled to the right mass if `normalised`; see `fit_mwl`.

    Constants among the features give ω the right mass already: only without them does scaling change it.
    seed: nothing is drawn here; taken so that all estimators are called alike.
    """
    fit = fit_mwl(system, ridge)
    if normalised:
        sums = system.fold(FitOfPart(fit))
        if sums.mass > 0.0:
            fit = dataclasses.replace(fit, scale=sums.weight / sums.mass)
    return estimate_of_fit("mwl", system, fit, level)


def drl(
    system: FeatureSystem,
    values: RowValues | ValuesOfPart | None = None,
    weights: Float[np.ndarray, " row"] | None = None,
    *,
    level: float = _LEVEL,
    folds: int = 5,
    seed: int = 0,
) -> PointEstimate:
    """The doubly robust combination; what is not given is cross-fitted in closed form over episodes.

    values: Q of the rows, such as that of networks that did not see them, or what gives it for the rows of a
    part of the log. weights: ω (N,), see `doubly_robust`. Raises DataError.
    """
    fitted: CrossFit | None = None
    if values is None or weights is None:
        fitted = cross_fit(system, folds=folds, seed=seed)
        values = fitted.values if values is None else values
    known = (lambda part: values) if isinstance(values, RowValues) else values
    assert known is not None
    if weights is not None:
        of_part = DoublyRobustOfPart(known, lambda part: weights)
    else:
        assert fitted is not None
        of_part = DoublyRobustOfPart(known, fitted.weights)
    sums = system.fold(of_part)
    if system.log is not None and system.fixed_starts:  # given start states belong to no part
        own = of_part(system)
        sums = dataclasses.replace(sums, start=own.start, start_weight=own.start_weight)
    unseen = sums.unseen / sums.rows.rows
    diagnostics = {
        "direct_value": sums.direct,
        "correction": sums.value - sums.direct,
        "unseen": unseen,
    }
    if fitted is not None:
        diagnostics.update(value_ridge=fitted.value_ridge, weight_ridge=fitted.weight_ridge)
    warnings: tuple[str, ...] = ()
    if unseen < 0.5:
        warnings = (
            "the value function has seen the rows that correct it: the correction and its standard error are "
            "too small; cross-fit it",
        )
    return _estimate("drl", system, sums.value, sums.rows, spread_of(sums.rows), level, diagnostics, warnings)


@dataclasses.dataclass(frozen=True, eq=False)
class FitOfPart:
    """What a fit leaves of a part of the log: terms ω δ, and Q of start states."""

    fit: LinearFit

    def __call__(self, system: FeatureSystem) -> RowSums:
        """Sums over its rows."""
        omega, residuals = self.fit.weights(system).numpy(), system.residuals(self.fit.theta).numpy()
        return RowSums.of(system, omega, omega * residuals, (system.starts @ self.fit.theta).numpy())


def estimate_of_fit(name: str, system: FeatureSystem, fit: LinearFit, level: float) -> PointEstimate:
    """What a fit says: Σ w ω r / n, its standard error from ω δ of the rows and Q of the start states."""
    sums = system.fold(FitOfPart(fit))
    noise = 0.0 if system.start_noise is None else float((system.start_noise @ fit.theta).square().sum())
    diagnostics = {
        "ridge": fit.ridge,
        "degrees_of_freedom": fit.degrees_of_freedom,
        "parameters": system.parameters,
    }
    spread = spread_of(sums, fit.degrees_of_freedom, noise)
    return _estimate(name, system, sums.rewarded / sums.weight, sums, spread, level, diagnostics)


def _estimate(
    name: str,
    system: FeatureSystem,
    value: float,
    sums: RowSums,
    spread: Spread,
    level: float,
    diagnostics: dict[str, Any],
    warnings: tuple[str, ...] = (),
) -> PointEstimate:
    described, units = sums.diagnostics(system.start_mean.numpy()), len(spread.influence)
    if units < 2:
        warnings = (*warnings, "a single episode has no spread: no standard error and no interval")
    elif spread.standard_error is None:
        warnings = (
            *warnings,
            f"{diagnostics['degrees_of_freedom']:.0f} degrees of freedom for {sums.rows} rows leave no "
            "standard error; use fewer features or a larger ridge",
        )
    return PointEstimate(
        name=name,
        value=value,
        standard_error=spread.standard_error,
        interval=spread.interval(value, level),
        effective_sample_size=described.effective_units,
        warnings=(*warnings, *described.warnings(units)),
        diagnostics={**diagnostics, **described.as_dict()},
    )


CLOSED_FORMS: dict[str, Callable[..., PointEstimate]] = {
    "mql": mql,
    "lstdq": lstdq,
    "mwl": mwl,
    "dualdice": dualdice,
    "drl": drl,
}
