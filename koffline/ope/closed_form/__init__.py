"""The closed forms as estimates: value, standard error over episodes, interval, effective sample size.

    estimate = closed_form("mql", make_feature_system(problem, gamma=0.95))

All of them are float64 and deterministic; each value is linear in the rewards.

The doubly robust combination takes any value function with marginalised weights. With ω = d^π/μ,
d^π = Σ_t γ^t P^π(x_t = ·) unnormalised and μ the (weighted) distribution of logged rows,
E_μ[ω (f(x) − discount · E f(x'))] = E f(x0) for every f. Hence

    J = E q(x0) + n⁻¹ Σ w ω (r + discount · E q(x') − q(x))

has the bias E_μ[(ω̂ − ω)(B^π q − q)]: none when either q = Q^π or ω̂ is the true ratio. The scale of ω is that
of the sum of visits, 1/(1 − γ) per row where nothing ends: no factor 1 − γ stands anywhere. Terminal rows
count with discount 0; rows cut by a time limit are rows like any other, since their next state is known.
(Kallus & Uehara 2020, Double Reinforcement Learning)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from koffline.ope.closed_form.fits import LinearFit, fit
from koffline.ope.closed_form.sums import RowSums, warnings_of_weights
from koffline.ope.features import FeatureSystem
from koffline.ope.importance.problem import RowValues
from koffline.ope.results import PointEstimate

ValuesOfPart = Callable[[FeatureSystem], RowValues]
_SEEN = (
    "the value function has seen the rows that correct it: the correction and its standard error are too "
    "small; cross-fit it"
)


def closed_form(
    name: str, system: FeatureSystem, level: float = 0.95, seed: int = 0, ridge: float | None = None
) -> PointEstimate:
    """Σ w ω r / n of a fit, its standard error from ω δ of the rows and Q of the start states.

    name: of `fit`. ω of ``mwl`` is scaled to the right mass: constants among the features give it
    already, only without them does scaling change it.
    """
    found = fit(name, system, ridge, seed)
    sums = system.fold(partial(fit_sums, found))
    if name == "mwl" and sums["mass"] > 0.0:
        found = dataclasses.replace(found, scale=sums.weight / sums["mass"])
        sums = system.fold(partial(fit_sums, found))
    noise = 0.0 if system.start_noise is None else float((system.start_noise @ found.theta).square().sum())
    freedom, warnings = found.degrees_of_freedom, []
    error = sums.standard_error(freedom, noise)
    if error is None and sums.count > 1:
        rows = f"{sums['rows']:.0f} rows"
        warnings.append(
            f"{freedom:.0f} degrees of freedom for {rows} leave no standard error; use fewer features"
        )
    diagnostics = {"ridge": found.ridge, "degrees_of_freedom": freedom, "parameters": system.parameters}
    return _estimate(name, system, sums["rewarded"] / sums.weight, error, sums, level, diagnostics, warnings)


def fit_sums(found: LinearFit, system: FeatureSystem) -> RowSums:
    """What a fit leaves of a part of the log: terms ω δ, and Q of start states."""
    omega, residuals = found.weights(system).numpy(), system.residuals(found.theta).numpy()
    return RowSums.of(system, omega, omega * residuals, (system.starts @ found.theta).numpy())


def drl(system: FeatureSystem, values: RowValues | ValuesOfPart, level: float = 0.95) -> PointEstimate:
    """The doubly robust combination of values and weights of rows.

    system: whose features say what the weights should balance. values: Q and ω of the rows by networks that
    did not see them, or what gives them for the rows of a part of the log.
    """
    known = (lambda part: values) if isinstance(values, RowValues) else values
    sums = system.fold(partial(doubly_robust_sums, known))
    if system.log is not None and system.fixed_starts:  # given start states belong to no part
        own = doubly_robust_sums(known, system)
        starts = {name: own[name] for name in ("start_value", "start_weight")}
        sums = dataclasses.replace(sums, totals=sums.totals | starts)
    value, direct = doubly_robust_value(sums), sums["start_value"] / sums["start_weight"]
    unseen = sums["unseen"] / sums["rows"]
    found = {
        "direct_value": direct,
        "correction": value - direct,
        "unseen": unseen,
    }
    warnings = [_SEEN] if unseen < 0.5 else []
    return _estimate("drl", system, value, sums.standard_error(), sums, level, found, warnings)


def doubly_robust_sums(values: ValuesOfPart, system: FeatureSystem) -> RowSums:
    """The sums of a part of a log, with q and ω of its rows and terms ω (r + discount · E q(x') − q(x))."""
    q = values(system)
    assert q.weights is not None
    residuals = system.rewards.numpy() + system.discounts.numpy() * q.later - q.now
    return RowSums.of(system, q.weights, q.weights * residuals, q.starts, q.unseen)


def doubly_robust_value(sums: RowSums) -> float:
    """J: E q(x0) and the mean of the terms."""
    return sums["start_value"] / sums["start_weight"] + float(sums.by_unit["term"].sum()) / sums.weight


def _estimate(
    name: str,
    system: FeatureSystem,
    value: float,
    error: float | None,
    sums: RowSums,
    level: float,
    diagnostics: dict[str, Any],
    warnings: list[str],
) -> PointEstimate:
    described, units = sums.diagnostics(system.start_mean.numpy()), sums.count
    if units < 2:
        warnings.append("a single episode has no spread: no standard error and no interval")
    return PointEstimate(
        name=name,
        value=value,
        standard_error=error,
        interval=sums.interval(value, error, level),
        effective_sample_size=described["effective_units"],
        warnings=(*warnings, *warnings_of_weights(described, units)),
        diagnostics={**diagnostics, **described},
    )
