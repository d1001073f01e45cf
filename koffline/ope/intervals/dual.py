"""The dual interval: weights on the rows bound the value, whatever the search for the weights did."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from koffline.errors import ConfigError
from koffline.ope.features import FeatureSystem
from koffline.ope.interval import Interval
from koffline.ope.intervals.calibrated import describe_misspecified
from koffline.ope.intervals.feature_interval import (
    assumptions,
    loss_threshold,
    norm_bound,
    start_margin,
    vacuous_warning,
)
from koffline.ope.intervals.result import IntervalResult
from koffline.ope.intervals.settings import KernelIntervalSettings
from koffline.ope.intervals.value_range import best_constant, feasible_set
from koffline.ope.names import DUAL

DUAL_STEPS = 500
_RIDGES = np.logspace(-14.0, 2.0, 33)  # of the closed-form weights that the search starts from
_NO_CURVATURE = 1e-14  # singular values below this share of the largest


@dataclass(frozen=True, eq=False)
class DualProblem:
    """An upper bound of cᵀθ for weights ω = Ψα: offset + αᵀv + ρ‖c − Bᵀα‖ + sqrt(λ)‖α‖.

    It holds for every α at once, chosen by the data or not: cᵀθ = cᵀθ0 + αᵀv + (c − Bᵀα)ᵀ(θ − θ0) − αᵀg with
    v = (Ψᵀδ(θ0))/n, where ‖θ − θ0‖ ≤ ρ and g, the projected residual of θ, has ‖g‖² ≤ λ.
    ``matrix (m, p)``: B; ``vector (m,)``: v; ``direction (p,)``: c.
    (Feng et al. 2021, the dual bound)
    """

    matrix: np.ndarray
    vector: np.ndarray
    direction: np.ndarray
    offset: float
    norm_bound: float
    threshold: float

    def bound(self, alpha: np.ndarray) -> float:
        """The upper bound for any α (m,)."""
        balance = float(np.linalg.norm(self.direction - self.matrix.T @ alpha))
        noise = self.threshold**0.5 * float(np.linalg.norm(alpha))
        return self.offset + float(alpha @ self.vector) + self.norm_bound * balance + noise

    def mirrored(self) -> DualProblem:
        """The problem of −cᵀθ: minus its upper bound is a lower bound of cᵀθ."""
        return replace(self, direction=-self.direction, offset=-self.offset)

    def minimise(self, steps: int = DUAL_STEPS) -> np.ndarray:
        """α after at most ``steps`` iterations; 0: the best of the closed-form weights alone.

        Convex; searched in the span of B and v (whatever is orthogonal to it only adds noise), in
        coordinates in which the two norms have the same curvature.
        """
        ridge, start = min(
            ((ridge, self.closed_form(ridge)) for ridge in _RIDGES), key=lambda pair: self.bound(pair[1])
        )
        return start if steps == 0 else self._descend(start, ridge, steps)

    def closed_form(self, ridge: float) -> np.ndarray:
        """B(BᵀB + τI)⁻¹c, τ relative to the largest curvature: marginalised weights by ridge regression."""
        left, values, right = self._basis
        curvature = np.square(values)
        shrunk = values / (curvature + ridge * max(float(curvature.max()), 1e-300))
        return left @ (shrunk * (right @ self.direction))

    def _descend(self, start: np.ndarray, ridge: float, steps: int) -> np.ndarray:
        from scipy.optimize import minimize

        left, values, right = self._basis
        kept = values > _NO_CURVATURE * values.max()
        left, values, right = left[:, kept], values[kept], right[kept]
        rest = self.vector - left @ (left.T @ self.vector)
        length = float(np.linalg.norm(rest))
        span = np.column_stack([left, rest / length]) if length > 0.0 else left
        gain = np.append(values, 0.0)[: span.shape[1]]
        scale = 1.0 / np.sqrt(gain**2 + ridge * values.max() ** 2)
        direction, pull = right @ self.direction, span.T @ self.vector
        missing = max(float(self.direction @ self.direction - direction @ direction), 0.0)
        tiny = 1e-20 * max(float(self.direction @ self.direction), 1e-300)

        def objective(point: np.ndarray) -> tuple[float, np.ndarray]:
            beta = scale * point
            gap = direction - (gain * beta)[: len(values)]
            balance = np.sqrt(gap @ gap + missing + tiny)
            size = np.sqrt(beta @ beta + tiny)
            slope = pull + self.threshold**0.5 * beta / size
            slope[: len(values)] -= self.norm_bound * values * gap / balance
            value = pull @ beta + self.norm_bound * balance + self.threshold**0.5 * size
            return float(value), scale * slope

        found = minimize(
            objective, (span.T @ start) / scale, jac=True, method="L-BFGS-B",
            options={"maxiter": steps, "maxfun": 3 * steps, "ftol": 1e-15, "gtol": 1e-12, "maxcor": 30},
        )  # fmt: skip
        alpha = span @ (scale * found.x)
        return alpha if self.bound(alpha) <= self.bound(start) else start

    @cached_property
    def _basis(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return np.linalg.svd(self.matrix, full_matrices=False)


def dual_interval(
    system: FeatureSystem, settings: KernelIntervalSettings | None = None, steps: int = DUAL_STEPS
) -> IntervalResult:
    """Bounds from weights found in at most ``steps`` iterations: valid after any number, tighter with more.

    At the optimum it is the "kernel-certified" interval (strong duality). Bounds that cross prove that no θ
    of the class explains the log: no interval, and ``misspecified``.
    (Feng et al. 2021)
    """
    if steps < 0:
        raise ConfigError(f"steps is {steps}; give 0 or more")
    settings = settings or KernelIntervalSettings()
    problem, fitted = dual_problem(system, settings)
    mirrored = problem.mirrored()
    above, below = problem.minimise(steps), mirrored.minimise(steps)
    high, low = problem.bound(above), -mirrored.bound(below)
    spread = start_margin(system, DUAL, settings)
    shared: dict[str, Any] = {
        "threshold": problem.threshold,
        "norm_bound": problem.norm_bound,
        "fitted_norm": fitted,
        "details": {"steps": steps, "start_margin": spread},
    }
    if low > high:
        least = feasible_set(system).least_loss(problem.norm_bound)
        alarm = describe_misspecified(least, problem.threshold)
        return IntervalResult(DUAL, None, least_loss=least, misspecified=True, warnings=(alarm,), **shared)
    bounds = settings.values_within(system)
    interval = Interval(
        low - spread,
        high + spread,
        settings.level,
        DUAL,
        assumptions(system, DUAL, settings, problem.norm_bound),
        problem.norm_bound,
    ).within(bounds)
    return IntervalResult(DUAL, interval, warnings=vacuous_warning(interval, bounds), **shared)


def dual_problem(system: FeatureSystem, settings: KernelIntervalSettings) -> tuple[DualProblem, float]:
    """The upper problem of a system and the fitted norm behind the default ρ."""
    norm, fitted = norm_bound(feasible_set(system), settings)
    centre = best_constant(system)
    matrix = system.projected[:, :-1]
    problem = DualProblem(
        matrix=matrix.numpy(),
        vector=(system.projected[:, -1] - matrix @ centre).numpy(),
        direction=system.start_mean.numpy(),
        offset=system.value(centre),
        norm_bound=norm,
        threshold=loss_threshold(system, DUAL, settings),
    )
    return problem, fitted
