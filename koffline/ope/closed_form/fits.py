"""A value linear in features and the weights behind it: one pair of linear systems, two readings.

Every closed form here chooses θ by instruments: minimise ‖v − Bθ‖² + λ‖θ‖² with B = CᵀZ-moments and
v = r-moments of some critics. Its value cᵀθ is linear in the rewards,

    cᵀθ = (1/n) Σ w_i ω_i r_i,    ω_i = critics(x_i)ᵀ B (BᵀB + λ)⁻¹ c,

and ω is at the same time the minimiser of ‖Bᵀα − c‖² + λ‖α‖² over weights ω = criticsᵀα: the marginalised
importance weights that balance (1/n) Σ w ω Z against c. So one fit is both a value function (minimax
Q-learning) and a density ratio d^π/μ (minimax weight learning), with d^π = Σ_t γ^t P^π(x_t = ·) unnormalised.

The ridge is chosen on rows of episodes that a fit has not seen. On the twelve exact problems of
tests/exact_problems.py the held-out loss alone, free to take any ridge from 1e-8 to 1, is misled by chance in
small logs: with 400 rows its median error over problems is a tenth above that of the fixed ridge n^−1.5, and
its worst 116 % against 45 %. So candidates stay within a decade of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from jaxtyping import Float
from torch import Tensor

from koffline.errors import DataError
from koffline.kernels import FourierFeatures
from koffline.ope.closed_form.moments import BLOCK, Moments, dice_critics, folded_moments, whole_moments
from koffline.ope.features import FeatureSystem
from koffline.solvers.linear import RidgePath, check_ridge, mean_curvature

FOLDS = 5
CRITIC_RIDGES = (1.0, 1e-1, 1e-2, 1e-3)  # of DualDICE
_HALF_DECADES = (-2, -1, 0, 1, 2)
_SMALLEST, _LARGEST = 1e-10, 0.1

Solution = tuple[Tensor, Tensor, float]  # θ (p,), the coefficients α (k,) of the weights, degrees of freedom


@dataclass(frozen=True, eq=False)
class LinearFit:
    """θ (p,), the coefficients α of the weights ω = criticsᵀα, and how they were found; float64, units of the
    return.

    ``critics``: of kernel inputs; None: the features themselves. ``ridge``: relative to the mean curvature.
    ``degrees_of_freedom``: how many parameters the data, rather than the ridge, decide. ``scale``: that ω is
    multiplied by.
    """

    theta: Float[Tensor, " parameter"]
    alpha: Float[Tensor, " critic"]
    degrees_of_freedom: float
    ridge: float
    critics: FourierFeatures | None = None
    scale: float = 1.0

    def weights(self, system: FeatureSystem) -> Float[Tensor, " row"]:
        """ω of the rows of a system."""
        if self.critics is None:
            return self.scale * (system.now @ self.alpha)
        return self.scale * weights_of_rows(system.kernel_inputs, self.critics, self.alpha)


def weights_of_rows(
    inputs: Float[Tensor, "row column"], critics: FourierFeatures, alpha: Float[Tensor, " critic"]
) -> Float[Tensor, " row"]:
    """ω = critics(x)ᵀα of kernel inputs, in blocks."""
    return torch.cat([critics(block) @ alpha for block in inputs.split(BLOCK)])


class InstrumentPath:
    """θ and α for any ridge, from [B, v] (k, p + 1); free parameters are not penalised.

    ``root``: of the critics' ridged second moment, in whose units the rows of [B, v] are.
    """

    def __init__(
        self, columns: Float[Tensor, "critic column"], system: FeatureSystem, root: Tensor | None = None
    ) -> None:
        self._matrix, self._root, self._system = columns[:, :-1], root, system
        self._curvature = self._matrix.mT @ self._matrix
        self._primal = self._path(self._matrix.mT @ columns[:, -1])

    @cached_property
    def _dual(self) -> RidgePath:
        return self._path(self._system.start_mean)

    def _path(self, slope: Float[Tensor, " parameter"]) -> RidgePath:
        return RidgePath(self._curvature, slope, self._system.free)

    def theta(self, ridge: float) -> Float[Tensor, " parameter"]:
        """θ for one ridge, relative to the mean curvature."""
        return self._primal.solve(ridge).weights

    def solve(self, ridge: float) -> Solution:
        """θ and α for one ridge."""
        primal = self._primal.solve(ridge)
        alpha = self._matrix @ self._dual.solve(ridge).weights
        if self._root is not None:
            alpha = torch.linalg.solve_triangular(self._root.mT, alpha[:, None], upper=True)[:, 0]
        return primal.weights, alpha, primal.degrees_of_freedom


class TemporalPath:
    """θ = (A + λD)⁻¹b and α = (A + λD)⁻ᵀc for any ridge: A = φᵀWZ/n, b = φᵀWr/n, D spares free parameters.

    The shortest ones where the rows leave them open. (Feng et al. 2019, cor:same_as_td)
    """

    def __init__(self, columns: Float[Tensor, "parameter column"], system: FeatureSystem) -> None:
        self._matrix, self._vector, self._system = columns[:, :-1], columns[:, -1], system
        self._unit = mean_curvature(self._matrix.diagonal(), system.free) * (~system.free).to(self._matrix)

    def theta(self, ridge: float) -> Float[Tensor, " parameter"]:
        """θ for one ridge, relative to the mean |diagonal|."""
        return self._inverse(ridge) @ self._vector

    def solve(self, ridge: float) -> Solution:
        """θ and α for one ridge."""
        inverse = self._inverse(ridge)
        freedom = float((inverse * self._matrix.mT).sum())
        return inverse @ self._vector, inverse.mT @ self._system.start_mean, freedom

    def _inverse(self, ridge: float) -> Float[Tensor, "parameter parameter"]:
        check_ridge(ridge)
        ridged = self._matrix + torch.diag(ridge * self._unit)
        inverse, info = torch.linalg.inv_ex(ridged)
        return torch.linalg.pinv(ridged) if ridge == 0.0 or int(info) else inverse


Path = InstrumentPath | TemporalPath
MakePath = Callable[[FeatureSystem, Moments], Path]  # fits of a system from sums over any of its rows


def kernel_path(system: FeatureSystem, moments: Moments) -> Path:
    """Fits with the RKHS of the log's kernel as critics."""
    return InstrumentPath(moments.projected / moments.weight, system)


def temporal_path(system: FeatureSystem, moments: Moments) -> Path:
    """Fits with the features themselves as critics."""
    return TemporalPath(moments.temporal / moments.weight, system)


def whitened_path(critic_ridge: float, system: FeatureSystem, moments: Moments) -> Path:
    """Fits with DualDICE's critics, in units in which their ridged second moment is the identity."""
    critics, instruments = dice_critics(system), len(moments.projected)
    second = moments.critic / moments.weight
    ridged = second + critic_ridge * second.diagonal().mean() * torch.eye(len(critics), dtype=second.dtype)
    root, failed = torch.linalg.cholesky_ex(ridged)
    if bool(failed):
        raise DataError(
            "DualDICE's critics cannot be told apart on these rows; give more rows of like weight"
        )
    rows = moments.projected[critics] * ((instruments / len(critics)) ** 0.5 / moments.weight)
    return InstrumentPath(torch.linalg.solve_triangular(root, rows, upper=False), system, root)


def usual_ridge(rows: int, power: float = 1.5) -> float:
    """A relative ridge that fits n rows without asking them: n^−power, between 1e-10 and 0.1.

    power: 1.5 for curvatures BᵀB, 1 for LSTD's matrix, found by measurement.
    """
    return min(max(float(rows) ** -power, _SMALLEST), _LARGEST)


def candidate_ridges(centre: float) -> tuple[float, ...]:
    """A decade to either side of the usual ridge; farther ones win by chance more often than by merit."""
    return tuple(sorted({min(max(centre * 10.0 ** (0.5 * h), _SMALLEST), _LARGEST) for h in _HALF_DECADES}))


def held_out_losses(
    system: FeatureSystem, moments: Moments, make_path: MakePath, ridges: Sequence[float]
) -> Float[Tensor, " ridge"]:
    """Kernel loss of each ridge's fit on the fold left out, as a U-statistic pooled over folds.

    U = (‖ψᵀWδ‖² − Σw²δ²)/((Σw)² − Σw²) with k(x, x) = 1: unbiased for the loss of a value function that has
    not seen the fold, whatever the ridge.
    (Feng et al. 2019, equ:ourloss)
    """
    scores, pairs = torch.zeros(len(ridges), dtype=torch.float64), 0.0
    for part, rest in moments.folds():
        path = make_path(system, rest)
        thetas = torch.stack([path.theta(ridge) for ridge in ridges])  # (R, p)
        mixing = torch.cat((-thetas, torch.ones_like(thetas[:, :1])), dim=1)  # [Z, r] mixingᵀ = δ
        total = (part.projected @ mixing.mT).square().sum(dim=0)
        scores += total - ((mixing @ part.squares) * mixing).sum(dim=1)
        pairs += float(part.weight**2 - part.weight_squares)
    if pairs <= 0.0:
        raise DataError("a held-out loss needs two rows in a fold; give more rows")
    return torch.where(torch.isfinite(scores), scores / pairs, torch.inf)


PATHS: dict[str, tuple[MakePath, ...]] = {
    "mql": (kernel_path,),
    "lstdq": (temporal_path,),
    "mwl": (kernel_path,),
    "dualdice": tuple(partial(whitened_path, ridge) for ridge in CRITIC_RIDGES),
}


@torch.no_grad()
def fit(name: str, system: FeatureSystem, ridge: float | None = None, seed: int = 0) -> LinearFit:
    """A closed form by name; the ridge (and DualDICE's second one) of the least held-out kernel loss.

    ``mql``: minimax Q-learning with critics in an RKHS, the kernel loss minimised exactly over Q = φᵀθ (Feng
    et al. 2019, equ:vstat). ``lstdq``: critics are the features themselves, the kernel loss with the linear
    kernel φᵀφ (cor:same_as_td). ``mwl``: ω in the RKHS that balances n⁻¹ Σ w ω Z against c, the dual of
    ``mql``; no reward is read, so its ridge is the usual one (Uehara, Huang & Jiang 2020, Minimax Weight and
    Q-Function Learning). ``dualdice``: ω = ζ of min_ν max_ζ n⁻¹ Σ w [ζ(x)(ν(x) − discount ν(x')) − ζ(x)²/2]
    − E ν(x0), both ridged, ν = φᵀu; the inner maximum regresses ν(x) − discount ν(x') on x before it is
    squared (Nachum et al. 2019). Squaring it row by row would need two independent next states of each row,
    and is biased without them; that form is not offered.
    """
    usual = usual_ridge(system.log_rows, 1.0 if name == "lstdq" else 1.5)
    given = usual if name == "mwl" and ridge is None else ridge
    ridges, paths = candidate_ridges(usual) if given is None else (given,), PATHS[name]
    candidates = [(path, ridge) for path in paths for ridge in ridges]
    best = 0
    if len(candidates) > 1:
        moments = folded_moments(system, FOLDS, seed)
        losses = torch.cat([held_out_losses(system, moments, path, ridges) for path in paths])
        if not bool(torch.isfinite(losses).any()):
            raise DataError(
                "no ridge gave a fit with finite values; look for outliers in rewards and features"
            )
        best = int(losses.argmin())
    path, chosen = candidates[best]
    critics = None if name == "lstdq" else system.instruments
    if name == "dualdice":
        leading = dice_critics(system)[: len(dice_critics(system)) // 2]
        critics = FourierFeatures(system.instruments.frequencies[:, leading])
    return LinearFit(*path(system, whole_moments(system)).solve(chosen), chosen, critics)
