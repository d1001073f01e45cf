"""DualDICE in closed form: both of its functions linear in features, the inner maximum solved exactly."""

from __future__ import annotations

import torch
from torch import Tensor

from koffline.errors import DataError
from koffline.ope.closed_form.fit import InstrumentPath, LinearFit, PrimalDual
from koffline.ope.closed_form.fitting import (
    CURVATURE_POWER,
    FOLDS,
    Considered,
    LinearProblem,
    MakePath,
    finish_fit,
    pairs,
)
from koffline.ope.closed_form.moments import (
    Moments,
    default_critics,
    folded_moments,
    leading_features,
    leading_instruments,
)
from koffline.ope.closed_form.ridges import candidate_ridges, held_out_losses
from koffline.ope.features import FeatureSystem

CRITIC_RIDGES = (1.0, 1e-1, 1e-2, 1e-3)


@torch.no_grad()
def fit_dualdice(
    system: FeatureSystem,
    ridge: float | None = None,
    critic_ridge: float | None = None,
    *,
    critics: int | None = None,
    folds: int = FOLDS,
    seed: int = 0,
) -> LinearFit:
    """ω = ζ of min_ν max_ζ n⁻¹ Σ w [ζ(x)(ν(x) − discount ν(x')) − ζ(x)²/2] − E ν(x0), both ridged.

    ν = φᵀu; ζ is linear in the first `critics` instruments (even; None: 300). The inner maximum
    regresses ν(x) − discount ν(x') on x before it is squared. Squaring it row by row would need two
    independent next states of each row, and is biased without them; that form is not offered.
    critic_ridge: of ζ, relative to the mean eigenvalue of E ψψᵀ. None: ridges by the held-out kernel loss.
    (Nachum et al. 2019, DualDICE)
    """
    critics = default_critics(system) if critics is None else critics
    features = leading_features(system.instruments, critics)
    ridges = candidate_ridges(system.log_rows, CURVATURE_POWER) if ridge is None else (ridge,)
    paths = {
        epsilon: whitened_path(system, critics, epsilon)
        for epsilon in (CRITIC_RIDGES if critic_ridge is None else (critic_ridge,))
    }
    considered: dict[float, Considered] = {}
    if ridge is None or critic_ridge is None:
        folded = folded_moments(system, folds, seed, critics)
        for epsilon, path in paths.items():
            considered[epsilon] = pairs(ridges, held_out_losses(folded, path, ridges))
    else:
        considered[critic_ridge] = ((ridge, 0.0),)
    best = min(considered, key=lambda epsilon: min(loss for _, loss in considered[epsilon]))
    return finish_fit(
        system,
        paths[best],
        min(considered[best], key=lambda candidate: candidate[1])[0],
        features,
        considered[best],
        critics,
    )


def whitened_path(system: LinearProblem, critics: int, epsilon: float) -> MakePath:
    """Fits with DualDICE's critics, from sums over any rows; epsilon: the ridge of ζ."""

    def make_path(moments: Moments) -> WhitenedPath:
        return WhitenedPath(system, moments, critics, epsilon)

    return make_path


class WhitenedPath:
    """θ and α with instruments in units in which their ridged second moment is the identity."""

    def __init__(self, system: LinearProblem, moments: Moments, critics: int, epsilon: float) -> None:
        instruments = len(moments.projected)
        second = moments.critic / moments.weight
        ridged = second + epsilon * second.diagonal().mean() * torch.eye(critics, dtype=second.dtype)
        self._root, failed = torch.linalg.cholesky_ex(ridged)
        if bool(failed):
            raise DataError(
                "DualDICE's critics cannot be told apart on these rows; give more rows of like weight"
            )
        rows = moments.projected[leading_instruments(instruments, critics)]
        rows = rows * ((instruments / critics) ** 0.5 / moments.weight)
        white = torch.linalg.solve_triangular(self._root, rows, upper=False)
        self._path = InstrumentPath(white[:, :-1], white[:, -1], system.start_mean, system.free)

    def solve_value(self, ridge: float) -> Tensor:
        """θ for one ridge."""
        return self._path.solve_value(ridge)

    def solve(self, ridge: float) -> PrimalDual:
        """The pair for one ridge; α in units of the instruments."""
        pair = self._path.solve(ridge)
        alpha: Tensor = torch.linalg.solve_triangular(self._root.mT, pair.alpha[:, None], upper=True)
        return PrimalDual(pair.theta, alpha[:, 0], pair.degrees_of_freedom)
