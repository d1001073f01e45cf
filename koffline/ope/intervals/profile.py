"""The fitted value as a weighted sum of residuals: what calibrated intervals resample.

θ̂ = argmin V̂(θ) + τ‖θ − θ0‖² (constants are not ridged) gives η̂ = cᵀθ̂ with
η̂ − η = n⁻¹ Σ w_i ω(x_i) δ_i + (c − E c)ᵀθ at the true θ, up to the ridge, where ω = Ψ B(BᵀB + τD)⁻¹c: the
marginalised weights that are dual to the kernel loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from koffline.ope.features import FeatureSystem
from koffline.ope.intervals.value_range import best_constant

RIDGE = 1e-6  # of the fit, relative to the mean curvature: its bias is far below the noise
_PATH_RIDGE = 1e-8  # of the path through other values, relative to the mean of its own form
_BLOCK = 8192
_MOST_LEVERAGE = 0.9


@dataclass(frozen=True, eq=False)
class Profile:
    """η̂, its influences, and how they change along a path of parameters whose value is η̂ + t.

    ``rows (N,)`` and ``starts``: a with η̂ − η ≈ Σa, from residuals scaled for leverage (HC2) and from
    centred values of start states (where these are given: of the actions drawn there).
    ``row_slopes``, ``start_slopes``: da/dt.
    ``residuals (N,)``: scaled δ̂. ``loss``: V̂(θ̂).
    """

    value: float
    theta: Float[Tensor, " parameter"]
    residuals: Float[Tensor, " row"]
    rows: Float[Tensor, " row"]
    row_slopes: Float[Tensor, " row"]
    starts: Float[Tensor, " drawn"]
    start_slopes: Float[Tensor, " drawn"]
    leverage: Float[Tensor, " row"]
    loss: float

    @property
    def influences(self) -> Float[Tensor, " influence"]:
        """All influences."""
        return torch.cat([self.rows, self.starts])

    @property
    def slopes(self) -> Float[Tensor, " influence"]:
        """All slopes."""
        return torch.cat([self.row_slopes, self.start_slopes])

    @property
    def standard_error(self) -> float:
        """sqrt Σa²: residuals are martingale differences, so no covariances enter."""
        return float(self.influences.square().sum().sqrt())


@torch.no_grad()
def make_profile(system: FeatureSystem, ridge: float = RIDGE) -> Profile:
    """The fit and its influences. ridge: relative to the mean curvature of the parameters that it pulls."""
    matrix, vector = system.projected[:, :-1], system.projected[:, -1]
    curvature, centre, start = matrix.mT @ matrix, best_constant(system), system.start_mean
    step = solve_ridged(curvature, matrix.mT @ (vector - matrix @ centre), system.free, ridge)
    theta = centre + step
    dual = matrix @ solve_ridged(curvature, start, system.free, ridge)  # α with ω = Ψα, (m,)
    inverse = solve_ridged(curvature, matrix.mT, system.free, ridge)  # (p, m)
    weights, leverage = _weights_and_leverage(system, dual, inverse)
    scale = (1.0 - leverage.clamp(max=_MOST_LEVERAGE)).rsqrt()
    residuals = system.residuals(theta) * scale
    share = weights * system.row_weights / len(system)
    row_design = (share * scale)[:, None] * system.difference
    start_design = _start_design(system)
    path = _quietest_path(row_design, start_design, start)
    return Profile(
        value=system.value(theta),
        theta=theta,
        residuals=residuals,
        rows=share * residuals,
        row_slopes=-row_design @ path,
        starts=start_design @ theta,
        start_slopes=start_design @ path,
        leverage=leverage,
        loss=float((vector - matrix @ theta).square().sum()),
    )


def solve_ridged(
    curvature: Float[Tensor, "parameter parameter"], target: Tensor, free: Tensor, ridge: float
) -> Tensor:
    """(curvature + τD)⁻¹ target with τ relative to the mean curvature of what is pulled; free ones are not.

    Free parameters keep a floor of 1e-12, so that the system has an answer where they are not identified.
    """
    return torch.linalg.solve(curvature + torch.diag(ridge_sizes(curvature, free, ridge)), target)


def ridge_sizes(
    curvature: Float[Tensor, "parameter parameter"], free: Tensor, ridge: float
) -> Float[Tensor, " parameter"]:
    """The diagonal of τD, (p,)."""
    diagonal = curvature.diagonal()
    pulled = diagonal[~free].mean() if bool((~free).any()) else diagonal.mean()
    return torch.where(free, 1e-12 * diagonal.mean(), ridge * pulled).clamp(min=1e-300)


def _weights_and_leverage(
    system: FeatureSystem, dual: Float[Tensor, " instrument"], inverse: Float[Tensor, "parameter instrument"]
) -> tuple[Float[Tensor, " row"], Float[Tensor, " row"]]:
    """ω(x_i) = ψ_iᵀα and the share of its own reward in a row's fit, w_i z_iᵀM⁻¹Bᵀψ_i/n; both (N,)."""
    weights, leverage = [], []
    for begin in range(0, len(system), _BLOCK):
        rows = slice(begin, begin + _BLOCK)
        psi = system.instruments(system.kernel_inputs[rows])
        weights.append(psi @ dual)
        leverage.append(((psi @ inverse.mT) * system.difference[rows]).sum(dim=1))
    return torch.cat(weights), torch.cat(leverage) * system.row_weights / len(system)


def _start_design(system: FeatureSystem) -> Float[Tensor, "drawn parameter"]:
    """Weighted deviations of the start states' features from their mean; where the states are given, of the
    actions drawn there."""
    if system.fixed_starts:
        return torch.zeros_like(system.starts) if system.start_noise is None else system.start_noise
    share = system.start_weights / system.start_weights.sum()
    return share[:, None] * (system.starts - system.start_mean)


def _quietest_path(
    row_design: Float[Tensor, "row parameter"],
    start_design: Float[Tensor, "drawn parameter"],
    start: Float[Tensor, " parameter"],
) -> Float[Tensor, " parameter"]:
    """The d with cᵀd = 1 along which the influences change least, S⁻¹c/(cᵀS⁻¹c) for their form S.

    Any path through parameters of other values would do; one that shakes badly known parameters makes the
    test of far values powerless, and the interval without end.
    """
    form = row_design.mT @ row_design + start_design.mT @ start_design
    size = torch.full_like(start, _PATH_RIDGE * float(form.diagonal().mean())).clamp(min=1e-300)
    path = torch.linalg.solve(form + torch.diag(size), start)
    return path / (start @ path)
