"""The doubly robust combination of any value function with marginalised weights.

With ω = d^π/μ, d^π = Σ_t γ^t P^π(x_t = ·) unnormalised and μ the (weighted) distribution of logged rows,
E_μ[ω (f(x) − discount · E f(x'))] = E f(x0) for every f. Hence

    J = E q(x0) + n⁻¹ Σ w ω (r + discount · E q(x') − q(x))

has the bias E_μ[(ω̂ − ω)(B^π q − q)]: none when either q = Q^π or ω̂ is the true ratio. The scale of ω is that
of the sum of visits, 1/(1 − γ) per row where nothing ends: no factor 1 − γ stands anywhere. Terminal rows
count with discount 0; rows cut by a time limit are rows like any other, since their next state is known.
(Kallus & Uehara 2020, Double Reinforcement Learning)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float

from koffline.errors import DataError
from koffline.ope.closed_form.fit import weights_of_rows
from koffline.ope.closed_form.fitting import CURVATURE_POWER, FOLDS, choose_ridge, kernel_path
from koffline.ope.closed_form.moments import folded_moments
from koffline.ope.closed_form.ridges import usual_ridge
from koffline.ope.closed_form.sandwich import Spread, sandwich
from koffline.ope.features import FeatureSystem
from koffline.ope.row_values import RowValues


@dataclass(frozen=True, eq=False)
class CrossFit:
    """Values and weights (N,) of every row from fits that did not see its episode."""

    values: RowValues
    weights: Float[np.ndarray, " row"]
    value_ridge: float
    weight_ridge: float


def doubly_robust_value(
    system: FeatureSystem, values: RowValues, weights: Float[np.ndarray, " row"]
) -> tuple[float, Spread]:
    """J and its spread over units; q and ω are taken as given, which is right when they are cross-fitted.

    Raises DataError when arrays do not fit the log.
    """
    omega = np.asarray(weights, dtype=np.float64)
    if omega.shape != (len(system),) or not np.isfinite(omega).all():
        raise DataError(
            f"weights has shape {omega.shape} or is not finite; give ({len(system)},) finite numbers"
        )
    values.check_sizes(len(system), len(system.start_weights))
    now, later, starts = values.now, values.later, values.starts
    residuals = system.rewards.numpy() + system.discounts.numpy() * later - now
    row_weights, start_weights = system.row_weights.numpy(), system.start_weights.numpy()
    base = float(start_weights @ starts / start_weights.sum())
    correction = float(row_weights @ (omega * residuals) / row_weights.sum())
    return base + correction, sandwich(system, omega * residuals, starts)


@torch.no_grad()
def cross_fit(
    system: FeatureSystem,
    value_ridge: float | None = None,
    weight_ridge: float | None = None,
    *,
    folds: int = FOLDS,
    seed: int = 0,
) -> CrossFit:
    """Kernel-loss values and dual weights of every fold from the rows of the others.

    Ridges that are None are the same for all folds: that of the values has the least kernel loss on held-out
    episodes (one number that has seen every row), that of the weights is the usual one. Start states of the
    log are valued without their episode, given ones by the mean over the fits.
    """
    make_path, n = kernel_path(system), len(system)
    folded = folded_moments(system, folds, seed)
    if value_ridge is None:
        value_ridge, _ = choose_ridge(system, make_path, CURVATURE_POWER, folds, seed)
    if weight_ridge is None:
        weight_ridge = usual_ridge(n, CURVATURE_POWER)
    now, later, omega = (torch.zeros(n, dtype=torch.float64) for _ in range(3))
    thetas = []
    for fold, rest in enumerate(folded.without_each()):
        rows = torch.as_tensor(np.flatnonzero(folded.fold_of == fold))
        path = make_path(rest)
        theta, alpha = path.solve(value_ridge).theta, path.solve(weight_ridge).alpha
        thetas.append(theta)
        now[rows], later[rows] = system.now[rows] @ theta, system.later[rows] @ theta
        omega[rows] = weights_of_rows(system, system.instruments, alpha, rows)
    stacked = torch.stack(thetas)
    if system.fixed_starts:
        starts = system.starts @ stacked.mean(dim=0)
    else:
        starts = (system.starts * stacked[torch.as_tensor(folded.fold_of[system.unit_starts])]).sum(dim=1)
    values = RowValues(now.numpy(), later.numpy(), starts.numpy(), unseen=1.0)
    return CrossFit(values, omega.numpy(), value_ridge, weight_ridge)
