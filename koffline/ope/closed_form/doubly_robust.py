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

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from koffline.ope.closed_form.fit import weights_of_rows
from koffline.ope.closed_form.fitting import CURVATURE_POWER, FOLDS, choose_ridge, kernel_path
from koffline.ope.closed_form.moments import folded_moments, folds_of_units
from koffline.ope.closed_form.ridges import usual_ridge
from koffline.ope.closed_form.sandwich import Spread, spread_of
from koffline.ope.closed_form.weights import RowSums
from koffline.ope.features import FeatureSystem
from koffline.ope.row_values import RowValues

ValuesOfPart = Callable[[FeatureSystem], RowValues]


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
        for fold, alpha in enumerate(self.alphas):
            rows = np.flatnonzero(fold_of == fold)
            if len(rows):
                found = weights_of_rows(system, system.instruments, alpha, torch.as_tensor(rows))
                omega[rows] = found.numpy()
        return omega


@dataclass(frozen=True, eq=False)
class DoublyRobustSums:
    """``rows``: with terms ω (r + discount · E q(x') − q(x)). ``start`` and ``start_weight``: Σ w q(x0), Σ w.

    ``unseen``: rows that a model valued which had not seen their episode.
    """

    rows: RowSums
    start: float
    start_weight: float
    unseen: float

    def __add__(self, other: DoublyRobustSums) -> DoublyRobustSums:
        return DoublyRobustSums(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def direct(self) -> float:
        """E q(x0)."""
        return self.start / self.start_weight

    @property
    def value(self) -> float:
        """J."""
        return self.direct + float(self.rows.by_unit["term"].sum()) / self.rows.weight


@dataclass(frozen=True, eq=False)
class DoublyRobustOfPart:
    """The sums of a part of a log, with q and ω of its rows."""

    values: ValuesOfPart
    weights: Callable[[FeatureSystem], np.ndarray]

    def __call__(self, system: FeatureSystem) -> DoublyRobustSums:
        """Over its rows. Raises DataError when arrays do not fit the log."""
        values, omega = self.values(system), np.asarray(self.weights(system), dtype=np.float64)
        values.check_sizes(len(system), len(system.start_weights))
        own = system.start_weights.numpy()
        residuals = system.rewards.numpy() + system.discounts.numpy() * values.later - values.now
        terms = omega * residuals if omega.shape == residuals.shape else residuals  # refused below
        return DoublyRobustSums(
            rows=RowSums.of(system, omega, terms, values.starts),
            start=float(own @ values.starts),
            start_weight=float(own.sum()),
            unseen=values.unseen * len(system),
        )


def doubly_robust_value(
    system: FeatureSystem, values: RowValues, weights: Float[np.ndarray, " row"]
) -> tuple[float, Spread]:
    """J and its spread over units; q and ω are taken as given, which is right when they are cross-fitted.

    Raises DataError when arrays do not fit the log.
    """
    sums = DoublyRobustOfPart(lambda part: values, lambda part: weights)(system)
    return sums.value, spread_of(sums.rows)


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
    episodes (one number that has seen every row), that of the weights is the usual one.
    """
    make_path = kernel_path(system)
    if value_ridge is None:
        value_ridge, _ = choose_ridge(system, make_path, CURVATURE_POWER, folds, seed)
    if weight_ridge is None:
        weight_ridge = usual_ridge(system.log_rows, CURVATURE_POWER)
    paths = [make_path(rest) for rest in folded_moments(system, folds, seed).without_each()]
    return CrossFit(
        thetas=torch.stack([path.solve(value_ridge).theta for path in paths]),
        alphas=torch.stack([path.solve(weight_ridge).alpha for path in paths]),
        value_ridge=value_ridge,
        weight_ridge=weight_ridge,
        seed=seed,
    )
