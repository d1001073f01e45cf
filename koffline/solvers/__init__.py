"""The kernel Bellman loss minimised exactly over values V(s) linear in features.

    value = solve(log, gamma=0.98)
    value.values(states)  # (M,) float64

With A = [Z, r] the residual of θ is A[−θ; 1], so δᵀKδ is a quadratic form of θ: one pass over the rows gives
AᵀKA, and every ridge afterwards costs nothing that grows with rows.

What is not given (bandwidth, ridge, width of the features) is chosen on episodes that a fit has not seen, by
a tournament: for every pair of candidates LSTD finds the best point on the line through both; a candidate's
score is the farthest that any opponent moves it. The true value function would not be moved at all. Unlike
a loss this is a distance between values: a residual that is small but has one sign everywhere counts as the
large error it means. scripts/bench/selection.py compares the choices with the best in hindsight.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from koffline.config import Section, read_section
from koffline.data.transitions import Transitions
from koffline.errors import ConfigError, DataError
from koffline.kernels import FourierFeatures, Gaussian, Kernel, median_bandwidth, random_fourier_features
from koffline.solvers.linear import (
    BLOCK,
    FeatureMap,
    RandomFourierFeatures,
    RidgePath,
    StateRows,
    UnitBox,
    as_double,
    free_parameters,
    with_constant,
)

__all__ = ["FeatureMap", "LinearValue", "RandomFourierFeatures", "UnitBox", "solve"]

_EXACT_ROWS, _MANY_FEATURES = 10_000, 2000  # above, kernels go through random features
_CANDIDATE_FEATURES = 1000  # of the kernels of candidates
_LEAST_DECAY = 1e-3
_ALIKE = 1e-6  # candidates closer than this, relative to their size, do not play against each other


class SolverSettings(Section):
    """Options of `solve`; lengths are in units of the box, and what is unset is chosen on held-out rows.

    bandwidth: of the Gaussian kernel. ridge: relative to the mean curvature. feature_width: of the random
    features. feature_count: how many. kernel_features: random features in place of the exact kernel. folds:
    parts of the rows in the choice. seed: of features and folds.
    """

    bandwidth: float | None = Field(default=None, gt=0.0)
    ridge: float | None = Field(default=None, ge=0.0)
    feature_width: float | None = Field(default=None, gt=0.0)
    feature_count: int = Field(default=400, ge=2, multiple_of=2)
    kernel_features: int | None = Field(default=None, ge=2, multiple_of=2)
    folds: int = Field(default=5, ge=2)
    seed: int = Field(default=0, ge=0)


@dataclass(frozen=True, eq=False)
class LinearValue:
    """A value function V(s) linear in features of states in units of a box, and how it was found.

    weights (p,) float64: the constant last. loss: what was minimised, on the rows it was fitted to, without
    the ridge. degrees_of_freedom: how many weights the data, rather than the ridge, decide. condition: of the
    ridged system, infinite where the data leave a direction open. ridge: relative to the mean curvature.
    """

    features: FeatureMap
    weights: Float[Tensor, " parameter"]
    scale: UnitBox
    kernel: Kernel | FourierFeatures
    ridge: float
    loss: float
    degrees_of_freedom: float
    condition: float

    @torch.no_grad()
    def values(self, states: Any) -> Float[Tensor, " row"]:
        """Values (M,) float64 of states (M, …), an array or a tensor."""
        rows = self.scale(as_double(states).flatten(1))
        return torch.cat([with_constant(self.features, block) @ self.weights for block in rows.split(BLOCK)])


class Candidates(NamedTuple):
    """Every feature map with every bandwidth of a Gaussian kernel and every ridge."""

    features: tuple[FeatureMap, ...]
    bandwidths: tuple[float, ...]
    ridges: tuple[float, ...]

    @classmethod
    def of(cls, rows: StateRows, settings: SolverSettings, features: FeatureMap | None = None) -> Candidates:
        """What is given, else widths as multiples of the median distance of rows and eight powers of ten."""
        median = median_bandwidth(rows.states)
        widths = [factor * median for factor in (0.15, 0.3, 0.6, 1.2)]
        bandwidths = [factor * median for factor in (0.1, 0.2, 0.4, 0.8, 1.6)]
        ridges = [10.0**-power for power in range(8, 0, -1)]
        if settings.feature_width is not None:
            widths = [settings.feature_width]
        random = (RandomFourierFeatures(width, settings.feature_count, settings.seed) for width in widths)
        return cls(
            tuple(random) if features is None else (features,),
            tuple(bandwidths) if settings.bandwidth is None else (settings.bandwidth,),
            tuple(ridges) if settings.ridge is None else (settings.ridge,),
        )


@torch.no_grad()
def solve(
    log: Transitions,
    *,
    gamma: float,
    box: UnitBox | None = None,
    features: FeatureMap | None = None,
    **settings: Any,
) -> LinearValue:
    """The V of least kernel Bellman loss for a log whose actions are the evaluated policy's own.

    box: units of observations, by default the range of the data. features: any callable (N, d) -> (N, F) of
    states in these units, in place of random Fourier features; a constant is added.
    settings: bandwidth, ridge and feature_width, chosen where not given; feature_count (400);
    kernel_features (the exact kernel up to 10,000 rows, 2000 random features above); folds (5); seed.
    Raises ConfigError, DataError.
    (Feng et al. 2019, equ:vstat)
    """
    if not isinstance(log, Transitions):
        raise DataError(f"the log is a {type(log).__name__}; give what koffline.open_transitions reads")
    chosen = read_section(SolverSettings, settings)
    box = UnitBox.around(log) if box is None else box
    rows = StateRows.of(log, gamma, box)
    candidates, best = Candidates.of(rows, chosen, features), 0
    every = list(itertools.product(*candidates))
    if len(every) > 1:
        generator = torch.Generator().manual_seed(chosen.seed + 1)
        groups = torch.from_numpy(np.array(log.episode_ids)) if log.has_episodes else None
        fold_of = make_folds(len(rows), chosen.folds, generator, groups)
        scores = tournament(*held_out(rows, candidates, fold_of, generator), rows)
        if not bool(torch.isfinite(scores).any()):
            raise DataError("no candidate could be fitted; look for outliers in rewards and observations")
        best = int(scores.argmin())
    mapping, bandwidth, ridge = every[best]
    kernel = Gaussian(bandwidth)
    count = chosen.kernel_features or (_MANY_FEATURES if len(rows) > _EXACT_ROWS else 0)
    generator = torch.Generator().manual_seed(chosen.seed)
    used = random_fourier_features(kernel, rows.states.shape[1], count, generator) if count else kernel
    form = rows.kernel_form(mapping, used) / float(len(rows)) ** 2
    found = ridge_path(form).solve(ridge)
    if not bool(torch.isfinite(found.weights).all()):
        raise DataError("the kernel loss has no finite minimum on these rows; raise the ridge")
    mixing = torch.cat((-found.weights, torch.ones(1, dtype=torch.float64)))
    loss = float(mixing @ form @ mixing)
    return LinearValue(
        mapping, found.weights, box, used, ridge, loss, found.degrees_of_freedom, found.condition
    )


def ridge_path(form: Float[Tensor, "column column"]) -> RidgePath:
    """Minimisers of [−θ; 1]ᵀ form [−θ; 1], the last parameter a constant."""
    return RidgePath(form[:-1, :-1], form[:-1, -1], free_parameters(len(form) - 1, 1))


def make_folds(
    rows: int, folds: int, generator: torch.Generator, groups: Int[Tensor, " row"] | None = None
) -> Int[Tensor, " row"]:
    """Fold of each row (N,), sizes as equal as can be; rows of one group (an episode) stay together."""
    units, unit_of = rows, torch.arange(rows)
    if groups is not None:
        distinct, unit_of = torch.unique(groups, return_inverse=True)
        units = len(distinct)
    if units < folds:
        what = "rows" if groups is None else "episodes"
        raise ConfigError(f"folds is {folds} for {units} {what}; give no more than there are")
    number = torch.empty(units, dtype=torch.int64)
    number[torch.randperm(units, generator=generator)] = torch.arange(units) % folds
    return number[unit_of]


@torch.no_grad()
def held_out(
    rows: StateRows, candidates: Candidates, fold_of: Int[Tensor, " row"], generator: torch.Generator
) -> tuple[Float[Tensor, "candidate row"], Float[Tensor, "candidate row"]]:
    """Values and residuals (C, N) of every row by every candidate's fit to the other folds.

    Kernels through random features: O(n m p) for each feature map and bandwidth; what the rows of a fold add
    to a sum is subtracted from it. A candidate whose loss has no minimum is NaN.
    """
    kernels = [
        random_fourier_features(Gaussian(width), rows.states.shape[1], _CANDIDATE_FEATURES, generator)
        for width in candidates.bandwidths
    ]
    members = [torch.nonzero(fold_of == fold).flatten() for fold in range(int(fold_of.max()) + 1)]
    parts = [rows.select(inside) for inside in members]
    sizes = _without_each(torch.stack([part.weights.sum() for part in parts])).tolist()
    shape = (len(candidates.features), len(kernels) * len(candidates.ridges), len(rows))
    values, residuals = (torch.full(shape, torch.nan, dtype=torch.float64) for _ in range(2))
    for index, features in enumerate(candidates.features):
        thetas: list[list[Tensor]] = [[] for _ in parts]
        for kernel in kernels:
            projected = torch.stack([part.project(features, kernel) for part in parts])
            for fold, rest in enumerate(_without_each(projected)):
                path = ridge_path(rest.mT @ rest / sizes[fold] ** 2)
                thetas[fold] += [path.solve(ridge).weights for ridge in candidates.ridges]
        for part, inside, found in zip(parts, members, thetas, strict=True):
            theta = torch.stack(found)
            for block, now, columns in part.blocks(features):
                values[index][:, inside[block]] = theta @ now.mT  # (C, p) @ (p, B)
                residuals[index][:, inside[block]] = columns[:, -1] - theta @ columns[:, :-1].mT
    return values.flatten(0, 1), residuals.flatten(0, 1)


def _without_each(parts: Tensor) -> Tensor:
    """Sums over the first axis with each of its entries left out."""
    return parts.sum(dim=0) - parts


def tournament(
    values: Float[Tensor, "candidate row"], residuals: Float[Tensor, "candidate row"], rows: StateRows
) -> Float[Tensor, " candidate"]:
    """The farthest that LSTD on the line to any opponent moves a candidate, (C,), in units of the value.

    With D = V_j − V_i, LSTD with the one feature D moves V_i to V_i + cD, c = E[D δ_i] / E[D (δ_i − δ_j)],
    since δ_i − δ_j = D − discount · D'. The score of i is max_j |c| ‖D‖. Under the stationary distribution
    the denominator is at least (1 − γ) ‖D‖²; elsewhere it may be smaller and is raised to that.
    One matrix of products serves all pairs. Infinite for candidates without a fit.
    """
    fitted = torch.isfinite(values).all(dim=1) & torch.isfinite(residuals).all(dim=1)
    scores = torch.full((len(fitted),), torch.inf, dtype=torch.float64)
    if not bool(fitted.any()):
        return scores
    values, residuals, share = values[fitted], residuals[fitted], rows.weights / rows.weights.sum()
    pulls = (residuals * share) @ values.mT  # (i, j): E[δ_i V_j]
    products = (values * share) @ values.mT  # (i, j): E[V_i V_j]
    sizes = products.diagonal()
    squares = sizes[:, None] + sizes[None, :] - 2.0 * products  # ‖D‖²
    pull = pulls - pulls.diagonal()[:, None]  # E[D δ_i]
    decay = max(1.0 - float(rows.discounts.max()), _LEAST_DECAY)
    slope = torch.maximum(pull + pull.mT, decay * squares)  # E[D (δ_i − δ_j)]
    alike = squares <= _ALIKE**2 * (sizes[:, None] + sizes[None, :])
    distance = torch.where(alike, 0.0, pull.abs() / slope * squares.clamp_min(0.0).sqrt())
    scores[fitted] = distance.amax(dim=1)
    return scores
