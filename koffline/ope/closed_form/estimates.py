"""The closed forms as estimates: value, standard error over episodes, interval, effective sample size.

    estimate = CLOSED_FORMS["mql"](make_feature_system(problem, gamma=0.95))

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
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from koffline.ope.closed_form import fits
from koffline.ope.closed_form.moments import folded_moments, folds_of_units
from koffline.ope.closed_form.sums import RowSums, Spread, warnings_of_weights
from koffline.ope.features import FeatureSystem
from koffline.ope.results import PointEstimate
from koffline.ope.value_functions import RowValues

_LEVEL = 0.95
_SEEN = (
    "the value function has seen the rows that correct it: the correction and its standard error are too "
    "small; cross-fit it"
)
ValuesOfPart = Callable[[FeatureSystem], RowValues]
WeightsOfPart = Callable[[FeatureSystem], np.ndarray]


def fit_sums(fit: fits.LinearFit, system: FeatureSystem) -> RowSums:
    """What a fit leaves of a part of the log: terms ω δ, and Q of start states."""
    omega, residuals = fit.weights(system).numpy(), system.residuals(fit.theta).numpy()
    return RowSums.of(system, omega, omega * residuals, (system.starts @ fit.theta).numpy())


def estimate_of_fit(
    name: str,
    fitted: Callable[..., fits.LinearFit],
    system: FeatureSystem,
    *,
    level: float = _LEVEL,
    **options: Any,
) -> PointEstimate:
    """Σ w ω r / n of a fit, its standard error from ω δ of the rows and Q of the start states.

    ω of `fit_mwl` is scaled to the right mass: constants among the features give it already, only without
    them does scaling change it. options: of the fit.
    """
    fit = fitted(system, **options)
    sums = system.fold(partial(fit_sums, fit))
    if name == "mwl" and sums["mass"] > 0.0:
        fit = dataclasses.replace(fit, scale=sums.weight / sums["mass"])
        sums = system.fold(partial(fit_sums, fit))
    noise = 0.0 if system.start_noise is None else float((system.start_noise @ fit.theta).square().sum())
    diagnostics = {
        "ridge": fit.ridge,
        "degrees_of_freedom": fit.degrees_of_freedom,
        "parameters": system.parameters,
    }
    spread = sums.spread(fit.degrees_of_freedom, noise)
    return _estimate(name, system, sums["rewarded"] / sums.weight, sums, spread, level, diagnostics)


@dataclass(frozen=True, eq=False)
class CrossFit:
    """Fits of K folds, each for the rows of the one it has not seen: θ (K, p) and α (K, m) of the weights.

    Start states of the log are valued without their episode, given ones by the mean over the fits.
    """

    thetas: Float[Tensor, "fold parameter"]
    alphas: Float[Tensor, "fold critic"]
    value_ridge: float
    weight_ridge: float
    seed: int

    def fold_of(self, system: FeatureSystem) -> Int[np.ndarray, " row"]:
        """The fold of each row of a system."""
        return folds_of_units(system, len(self.thetas), self.seed)

    def values(self, system: FeatureSystem) -> RowValues:
        """Q of the rows of a system, by the fit that has not seen them."""
        theta = self.thetas[torch.as_tensor(self.fold_of(system))]  # (N, p)
        now, later = ((columns * theta).sum(dim=1) for columns in (system.now, system.later))
        if system.fixed_starts:
            starts = system.starts @ self.thetas.mean(dim=0)
        else:
            starts = (system.starts * theta[system.unit_starts.tolist()]).sum(dim=1)
        return RowValues(now.numpy(), later.numpy(), starts.numpy(), unseen=1.0)

    def weights(self, system: FeatureSystem) -> Float[np.ndarray, " row"]:
        """ω (N,) of the rows of a system."""
        omega, fold_of = np.zeros(len(system)), self.fold_of(system)
        for fold in np.unique(fold_of):
            rows, alpha = np.flatnonzero(fold_of == fold), self.alphas[fold]
            inputs = system.kernel_inputs[torch.as_tensor(rows)]
            found = fits.weights_of_rows(inputs, system.instruments, alpha)
            omega[rows] = found.numpy()
        return omega


@torch.no_grad()
def cross_fit(system: FeatureSystem, folds: int = fits.FOLDS, seed: int = 0) -> CrossFit:
    """Kernel-loss values and dual weights of every fold from the rows of the others.

    Ridges are the same for all folds: that of the values has the least kernel loss on held-out episodes (one
    number that has seen every row), that of the weights is the usual one.
    """
    moments, power = folded_moments(system, folds, seed), fits.CURVATURE_POWER
    ridges = fits.candidate_ridges(system.log_rows, power)
    weight_ridge = fits.usual_ridge(system.log_rows, power)
    _, value_ridge = fits.choose_ridge(system, fits.kernel_path, ridges, moments)
    paths = [fits.kernel_path(system, rest) for _, rest in moments.folds()]
    return CrossFit(
        thetas=torch.stack([path.theta(value_ridge) for path in paths]),
        alphas=torch.stack([path.solve(weight_ridge)[1] for path in paths]),
        value_ridge=value_ridge,
        weight_ridge=weight_ridge,
        seed=seed,
    )


def doubly_robust_sums(values: ValuesOfPart, weights: WeightsOfPart, system: FeatureSystem) -> RowSums:
    """The sums of a part of a log, with q and ω of its rows and terms ω (r + discount · E q(x') − q(x))."""
    q, omega = values(system), weights(system)
    residuals = system.rewards.numpy() + system.discounts.numpy() * q.later - q.now
    return RowSums.of(system, omega, omega * residuals, q.starts, q.unseen)


def doubly_robust_value(sums: RowSums) -> float:
    """J: E q(x0) and the mean of the terms."""
    return sums["start_value"] / sums["start_weight"] + float(sums.by_unit["term"].sum()) / sums.weight


def drl(
    system: FeatureSystem,
    values: RowValues | ValuesOfPart | None = None,
    *,
    level: float = _LEVEL,
    folds: int = fits.FOLDS,
    seed: int = 0,
) -> PointEstimate:
    """The doubly robust combination; weights, and values that are not given, are cross-fitted over episodes.

    values: Q of the rows, such as that of networks that did not see them, or what gives it for the rows of a
    part of the log.
    """
    fitted = cross_fit(system, folds, seed)
    known: Any = (lambda part: values) if isinstance(values, RowValues) else values or fitted.values
    sums = system.fold(partial(doubly_robust_sums, known, fitted.weights))
    if system.log is not None and system.fixed_starts:  # given start states belong to no part
        own = doubly_robust_sums(known, fitted.weights, system)
        starts = {name: own[name] for name in ("start_value", "start_weight")}
        sums = dataclasses.replace(sums, totals=sums.totals | starts)
    value, direct, unseen = (
        doubly_robust_value(sums),
        sums["start_value"] / sums["start_weight"],
        sums["unseen"] / sums["rows"],
    )
    diagnostics = {
        "direct_value": direct,
        "correction": value - direct,
        "unseen": unseen,
        "value_ridge": fitted.value_ridge,
        "weight_ridge": fitted.weight_ridge,
    }
    warnings = (_SEEN,) if unseen < 0.5 else ()
    return _estimate("drl", system, value, sums, sums.spread(), level, diagnostics, warnings)


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
            f"{diagnostics['degrees_of_freedom']:.0f} degrees of freedom for {sums['rows']:.0f} rows leave "
            "no standard error; use fewer features or a larger ridge",
        )
    return PointEstimate(
        name=name,
        value=value,
        standard_error=spread.standard_error,
        interval=spread.interval(value, level),
        effective_sample_size=described["effective_units"],
        warnings=(*warnings, *warnings_of_weights(described, units)),
        diagnostics={**diagnostics, **described},
    )


FITS = {"mql": fits.fit_mql, "lstdq": fits.fit_lstdq, "mwl": fits.fit_mwl, "dualdice": fits.fit_dualdice}
CLOSED_FORMS: dict[str, Callable[..., PointEstimate]] = {
    **{name: partial(estimate_of_fit, name, fit) for name, fit in FITS.items()},
    "drl": drl,
}
