"""Shared parts of kernel intervals: options, result, and the fit of a class by the
kernel loss.

The fit θ̂ = argmin V̂(θ) + τ‖θ − θ0‖² (constants have no ridge) gives η̂ = cᵀθ̂. At the
true θ, up to the ridge, η̂ − η = n⁻¹ Σ w_i ω(x_i) δ_i + (c − E c)ᵀθ: a weighted sum of
residuals, which a bootstrap resamples. ω = Ψ B(BᵀB + τD)⁻¹c are the marginalised
weights dual to the kernel loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from pydantic import Field
from scipy import special
from torch import Tensor

from koffline.config import Section
from koffline.data.columns import blocks
from koffline.errors import ConfigError
from koffline.ope.bellman_test.forms import random_signs
from koffline.ope.intervals.feature_system import FeatureSystem
from koffline.ope.log.bounds import check_reward_bounds, value_bounds
from koffline.ope.networks.last_layer import best_level
from koffline.ope.results import Interval, Record

DRAWS = 999
_MOST_DRAWS = 200_000
# ridge of the fit, relative to the mean curvature; its bias is far below the noise
RIDGE = 1e-6
# ridge of the path through other values, relative to the mean curvature of its form
_PATH_RIDGE = 1e-8
_BLOCK = 8192
_SIGNS_BLOCK = 4096
_MOST_LEVERAGE = 0.9
# effective influences above which the bootstrap equals its normal limit to 0.1 %
_NORMAL_FROM = 200.0
# the largest influences get random signs, the sum of the others is drawn as a normal
_SIGNED = 1000
_STREAM = 6063  # random stream, other than that of a log simulated from the same seed


class KernelIntervalSettings(Section):
    """Options of the intervals on a feature system.

    level: nominal coverage. seed: of the draws. norm_bound: ρ, the largest ‖θ − θ0‖ of
    a value function in the class, in units of the value; None: twice that of the fit,
    which is a guess and no theorem.
    value_bounds: known bounds of every Q^π(s, a), by default those that rewards and γ
    imply. reward_bounds: known bounds of every reward, by default the logged range.
    draws: bootstrap draws, raised to the number that the level needs.
    """

    level: float = Field(default=0.95, gt=0.0, lt=1.0)
    norm_bound: float | None = Field(default=None, gt=0.0)
    value_bounds: tuple[float, float] | None = None
    reward_bounds: tuple[float, float] | None = None
    draws: int = DRAWS
    seed: int = 0

    def values_within(self, system: FeatureSystem) -> tuple[float, float]:
        """Bounds of every Q(s, a): the given ones, or those implied by reward bounds
        and γ.
        """
        if self.value_bounds is not None:
            return self.value_bounds
        if self.reward_bounds is None:
            return system.value_bounds
        rewards = self.rewards_within(system)
        final = (math.inf, -math.inf)  # of no row
        if bool((system.discounts == 0.0).any()):
            final = rewards
        return value_bounds(rewards, final, system.gamma)

    def rewards_within(self, system: FeatureSystem) -> tuple[float, float]:
        """Bounds of every reward: given, or the log's range.

        Raises ConfigError if the log exceeds them.
        """
        counted = system.rewards[system.row_weights > 0.0]
        seen = float(counted.min()), float(counted.max())
        slack = 1e-9 * max(map(abs, seen))  # rewards were scaled and rescaled
        return check_reward_bounds(self.reward_bounds, seen, slack)


def enough_draws(level: float, draws: int = DRAWS) -> int:
    """Number of draws, raised until each tail of the level holds at least one.

    Raises ConfigError.
    """
    fewest = math.ceil(2.0 / (1.0 - level) - 1e-9) - 1
    if fewest > _MOST_DRAWS:
        raise ConfigError(
            f"level is {level}, which a bootstrap could only tell by {fewest:,} draws;"
            f" give a level up to {1.0 - 2.0 / _MOST_DRAWS:g}"
        )
    return max(draws, fewest)


@dataclass(frozen=True, eq=False)
class IntervalResult(Record):
    """An interval and the evidence around it; ``interval`` is None if the class cannot
    explain the log.

    ``value``: the fitted value of the same class (None if the kind has none).
    ``threshold``: λ, an upper limit for the kernel loss of the true values;
    ``least_loss``: the smallest kernel loss in the class. A class is ``misspecified``
    if least_loss exceeds the threshold: an alarm about the class, not an error of the
    log.
    """

    kind: str
    interval: Interval | None
    value: float | None = None
    threshold: float | None = None
    least_loss: float | None = None
    misspecified: bool = False
    warnings: tuple[str, ...] = ()


def describe_misspecified(loss: float, threshold: float) -> str:
    """Warning that the class cannot explain the log."""
    return (
        f"the class cannot explain the log: its smallest kernel loss {loss:.3g} exceeds"
        f" {threshold:.3g}, what the true values would leave by chance; use richer"
        " features or a larger norm_bound"
    )


def describe_starts(fixed: bool, sampled: str) -> str:
    """Assumption on start states; ``sampled``: the text for the log's own start
    states.
    """
    if fixed:
        return "given start states as they are"
    return sampled


@dataclass(frozen=True, eq=False)
class FitProfile:
    """The fit η̂, its influences, and their change along a path of parameters with
    value η̂ + t.

    ``influences``: a with η̂ − η ≈ Σa: (N,) from residuals scaled for leverage (HC2),
    then from centred values of start states (if these are given: from the actions drawn
    there). ``slopes``: da/dt. ``residuals (N,)``: scaled δ̂. ``loss``: V̂(θ̂).
    Residuals are martingale differences and therefore uncorrelated, so the standard
    error of η̂ is ‖a‖.
    """

    value: float
    theta: Float[Tensor, " parameter"]
    residuals: Float[Tensor, " row"]
    influences: Float[Tensor, " influence"]
    slopes: Float[Tensor, " influence"]
    loss: float


@torch.no_grad()
def make_profile(system: FeatureSystem, ridge: float = RIDGE) -> FitProfile:
    """Fit θ̂ and compute its influences. ridge: relative to the mean curvature of the
    ridged parameters.
    """
    matrix = system.projected[:, :-1]
    vector = system.projected[:, -1]
    curvature = matrix.mT @ matrix
    start = system.start_mean
    theta = ridged_fit(system, ridge)
    # α with ω = Ψα, (m,)
    dual = matrix @ solve_ridged(curvature, start, system.free, ridge)
    inverse = solve_ridged(curvature, matrix.mT, system.free, ridge)  # (p, m)
    omega = []  # ω(x_i) = ψ_iᵀα
    effect = []  # of its own reward on a row's fit, without w_i/n: z_iᵀM⁻¹Bᵀψ_i
    for rows, psi in instruments(system):
        omega.append(psi @ dual)
        effect.append(((psi @ inverse.mT) * system.difference[rows]).sum(dim=1))
    weights = torch.cat(omega)
    leverage = torch.cat(effect) * system.row_weights / len(system)
    scale = (1.0 - leverage.clamp(max=_MOST_LEVERAGE)).rsqrt()
    residuals = system.residuals(theta) * scale
    share = weights * system.row_weights / len(system)
    row_design = (share * scale)[:, None] * system.difference
    # deviations of the start states' features from their mean
    if not system.fixed_starts:
        of_start = system.start_weights / system.start_weights.sum()
        start_design = of_start[:, None] * (system.starts - start)
    else:  # where the states are given, of the actions drawn there
        if system.start_noise is None:
            start_design = torch.zeros_like(system.starts)
        else:
            start_design = system.start_noise
    path = _quietest_path(row_design, start_design, start)
    return FitProfile(
        value=system.value(theta),
        theta=theta,
        residuals=residuals,
        influences=torch.cat([share * residuals, start_design @ theta]),
        slopes=torch.cat([-row_design @ path, start_design @ path]),
        loss=float((vector - matrix @ theta).square().sum()),
    )


def instruments(
    system: FeatureSystem, size: int = _BLOCK
) -> Iterator[tuple[slice, Tensor]]:
    """Yield blocks of rows and their instruments ψ (B, m)."""
    for rows in blocks(len(system), size):
        yield rows, system.instruments(system.kernel_inputs[rows])


def best_constant(system: FeatureSystem) -> Float[Tensor, " parameter"]:
    """θ0: the constant that solves the Bellman equation on average; zero if the class
    has no constants.
    """
    return torch.where(
        system.free, best_level(system), torch.zeros_like(system.start_mean)
    )


def ridged_fit(system: FeatureSystem, ridge: float) -> Float[Tensor, " parameter"]:
    """Fit θ̂ with a ridge toward the best constant."""
    matrix = system.projected[:, :-1]
    vector = system.projected[:, -1]
    centre = best_constant(system)
    pull = matrix.mT @ (vector - matrix @ centre)
    return centre + solve_ridged(matrix.mT @ matrix, pull, system.free, ridge)


def solve_ridged(
    curvature: Float[Tensor, "parameter parameter"],
    target: Tensor,
    free: Tensor,
    ridge: float,
) -> Tensor:
    """Solve (curvature + τD)⁻¹ target; τ is relative to the mean curvature of the
    ridged parameters.

    ``free`` parameters have a ridge of 1e-12 only, so that the system can be solved if
    they are not identified.
    """
    return torch.linalg.solve(
        curvature + torch.diag(ridge_sizes(curvature, free, ridge)), target
    )


def ridge_sizes(
    curvature: Float[Tensor, "parameter parameter"], free: Tensor, ridge: float
) -> Float[Tensor, " parameter"]:
    """The diagonal of τD, (p,)."""
    diagonal = curvature.diagonal()
    if bool((~free).any()):
        pulled = diagonal[~free].mean()
    else:
        pulled = diagonal.mean()
    return torch.where(free, 1e-12 * diagonal.mean(), ridge * pulled).clamp(min=1e-300)


def _quietest_path(
    row_design: Float[Tensor, "row parameter"],
    start_design: Float[Tensor, "drawn parameter"],
    start: Float[Tensor, " parameter"],
) -> Float[Tensor, " parameter"]:
    """The d with cᵀd = 1 along which the influences change least: S⁻¹c/(cᵀS⁻¹c) for
    their form S.

    Any path with cᵀd = 1 is valid. Along poorly identified parameters, however, the
    test of distant values has no power, and the interval becomes infinite.
    """
    form = row_design.mT @ row_design + start_design.mT @ start_design
    size = torch.full_like(start, _PATH_RIDGE * float(form.diagonal().mean())).clamp(
        min=1e-300
    )
    path = torch.linalg.solve(form + torch.diag(size), start)
    return path / (start @ path)


@torch.no_grad()
def wild_threshold(
    system: FeatureSystem, profile: FitProfile, draws: int, seed: int, level: float
) -> float:
    """Threshold λ: the level's quantile of V̂ with randomly signed residuals, ‖n⁻¹ Σ
    ±w_i ψ_i δ̂_i‖².
    """
    generator = np.random.default_rng([seed, _STREAM])
    scaled = profile.residuals * system.row_weights / len(system)
    totals = scaled.new_zeros(draws, 2 * system.instruments.frequencies.shape[1])
    for rows, psi in instruments(system, _SIGNS_BLOCK):
        signs = torch.as_tensor(random_signs((draws, len(psi)), generator))
        totals += (signs * scaled[rows]) @ psi  # (draws, B) @ (B, m)
    return _upper_quantile(totals.square().sum(dim=1), level)


def studentised_quantile(
    influences: Float[Tensor, " influence"], settings: KernelIntervalSettings
) -> tuple[float, float]:
    """The level's quantile of |Σ ±a| / sqrt(Σa²) over random signs, and the effective
    number of influences.

    The effective number is (Σa²)²/Σa⁴; if it is large, the normal quantile is used.
    """
    squares = influences.square()
    share = squares / squares.sum()
    if float(squares.sum()) == 0.0:
        counted = 0.0
    else:
        counted = 1.0 / float(share.square().sum())
    if counted == 0.0 or counted >= _NORMAL_FROM:
        return float(special.ndtri(0.5 + settings.level / 2.0)), counted
    generator = np.random.default_rng([settings.seed, _STREAM])
    ordered = torch.sqrt(share).sort(descending=True).values
    largest = ordered[:_SIGNED]
    rest = float(ordered[_SIGNED:].square().sum())
    draws = (
        torch.as_tensor(random_signs((settings.draws, len(largest)), generator))
        @ largest
    )
    draws += math.sqrt(rest) * torch.as_tensor(
        generator.standard_normal(settings.draws)
    )
    return _upper_quantile(draws.abs(), settings.level), counted


def invert_test(
    influences: Float[Tensor, " influence"],
    slopes: Float[Tensor, " influence"],
    quantile: float,
) -> tuple[float, float]:
    """Both ends of all t with t² ≤ q² Σ (a + t·slope)²; infinite if distant t are not
    rejected.
    """
    constant = quantile**2 * float(influences.square().sum())
    linear = quantile**2 * float(influences @ slopes)
    quadratic = 1.0 - quantile**2 * float(slopes.square().sum())
    if quadratic <= 0.0:
        return -math.inf, math.inf
    root = math.sqrt(max(linear**2 + quadratic * constant, 0.0))
    return (linear - root) / quadratic, (linear + root) / quadratic


def _upper_quantile(draws: Float[Tensor, " draw"], level: float) -> float:
    """The ⌈level · (draws + 1)⌉-th smallest; a new draw exceeds it with probability at
    most 1 − level.
    """
    rank = min(math.ceil(level * (len(draws) + 1) - 1e-9), len(draws))
    return float(draws.kthvalue(rank).values)
