"""Bandwidth, ridge and features chosen without the truth, on rows that the candidates have not seen.

Two rules, each a score per candidate, the smaller the better:

- ``lstd_tournament`` (the default): for every pair of candidates LSTD finds the best point on the line
  through both; a candidate's score is the farthest that any opponent moves it. The true value function would
  not be moved at all. Unlike a loss this is a distance between values: a residual that is small but has one
  sign everywhere counts as the large error it means.
- ``held_out_loss``: the U-statistic of the held-out residuals under one kernel, the same for all candidates;
  losses under their own kernels cannot be compared.

scripts/bench/selection.py divides the mean squared error of a choice by that of the best candidate in
hindsight. On nine logs of three worlds the geometric mean is 2.0 for the tournament, 2.7 and 2.3 for the
held-out loss (inverse multiquadric, Gaussian), 6.6 for the median candidate: hence the default. On the
nearly greedy pole no rule is good (2.0 to 3.7): a constant error leaves hardly a residual to see.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from koffline.batches import Table
from koffline.errors import ConfigError, DataError
from koffline.kernels import (
    FourierFeatures,
    Gaussian,
    InverseMultiquadric,
    StationaryKernel,
    median_bandwidth,
    random_fourier_features,
)
from koffline.solvers.features import FeatureMap, RandomFourierFeatures
from koffline.solvers.linear import LinearResidual, kernel_inputs, normalised_weights
from koffline.solvers.quadratic import ResidualForms, RidgePath, check_ridge

_LEAST_DECAY = 1e-3
_ALIKE = 1e-6  # candidates closer than this, relative to their size, do not play against each other


@dataclass(frozen=True)
class Candidate:
    """One setting of the closed-form solver; the kernel is a Gaussian of that bandwidth."""

    features: FeatureMap
    bandwidth: float
    ridge: float


@dataclass(frozen=True)
class CandidateGrid:
    """Every feature map with every bandwidth and every ridge."""

    feature_maps: tuple[FeatureMap, ...]
    bandwidths: tuple[float, ...]
    ridges: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("feature_maps", "bandwidths", "ridges"):
            if not getattr(self, name):
                raise ConfigError(f"{name} is empty; give at least one candidate")
        for bandwidth in self.bandwidths:
            Gaussian(bandwidth)
        for ridge in self.ridges:
            check_ridge(ridge)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """All of them: ridges run fastest, then bandwidths."""
        axes = self.feature_maps, self.bandwidths, self.ridges
        return tuple(Candidate(*parts) for parts in itertools.product(*axes))


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Values and residuals that C candidates give to rows left out of their fit; weights have mean one."""

    values: Float[Tensor, "candidate row"]
    residuals: Float[Tensor, "candidate row"]
    kernel_inputs: Float[Tensor, "row column"]
    weights: Float[Tensor, " row"]
    fold_of: Int[Tensor, " row"]
    largest_discount: float

    @property
    def folds(self) -> list[Tensor]:
        """Row numbers of every fold."""
        return _members(self.fold_of)


@dataclass(frozen=True, eq=False)
class Selection:
    """Candidates and their scores (C,), smaller is better, infinite for candidates without a fit."""

    rule: str
    candidates: tuple[Candidate, ...]
    scores: Float[Tensor, " candidate"]

    @property
    def best(self) -> Candidate:
        """The candidate with the smallest score."""
        return self.candidates[int(self.scores.argmin())]


def default_grid(
    kernel_inputs: Float[Tensor, "row column"], feature_count: int = 400, seed: int = 0
) -> CandidateGrid:
    """Random Fourier features and Gaussian kernels, widths as multiples of the median distance of rows."""
    median = median_bandwidth(kernel_inputs)
    widths = (factor * median for factor in (0.15, 0.3, 0.6, 1.2))
    return CandidateGrid(
        feature_maps=tuple(RandomFourierFeatures(width, feature_count, seed) for width in widths),
        bandwidths=tuple(factor * median for factor in (0.1, 0.2, 0.4, 0.8, 1.6)),
        ridges=tuple(10.0**-power for power in range(8, 0, -1)),
    )


def select(
    table: Table,
    grid: CandidateGrid,
    generator: torch.Generator,
    *,
    rule: str = "lstd-tournament",
    folds: int = 5,
    groups: Int[Tensor, " row"] | None = None,
    diag_weight: float | None = None,
    kernel_features: int = 1000,
    row_weights: Float[Tensor, " row"] | None = None,
) -> Selection:
    """Score every candidate of the grid by a rule, "lstd-tournament" or "held-out-loss".

    groups (N,): rows that depend on each other (of one episode) are left out together. The held-out loss is
    judged by an inverse multiquadric kernel of a tenth of the median distance.
    Raises ConfigError, and DataError when no candidate has a fit.
    """
    fold_of = make_folds(len(table), folds, generator, groups)
    held_out = predict_held_out(table, grid, fold_of, generator, diag_weight, kernel_features, row_weights)
    if rule == "lstd-tournament":
        scores = lstd_tournament(held_out)
    else:
        judge = InverseMultiquadric(0.1 * median_bandwidth(held_out.kernel_inputs))
        scores = held_out_loss(held_out, judge, generator)
    if not bool(torch.isfinite(scores).any()):
        raise DataError("no candidate could be fitted; give larger ridges or a larger diag_weight")
    return Selection(rule, grid.candidates, scores)


def make_folds(
    rows: int, folds: int, generator: torch.Generator, groups: Int[Tensor, " row"] | None = None
) -> Int[Tensor, " row"]:
    """Fold of each row (N,), sizes as equal as can be; rows of one group (an episode) stay together."""
    units, unit_of = rows, torch.arange(rows)
    if groups is not None:
        distinct, unit_of = torch.unique(groups, return_inverse=True)
        units = len(distinct)
    if folds < 2 or units < folds:
        raise ConfigError(
            f"folds is {folds} for {units} {'rows' if groups is None else 'groups of rows'}; "
            "give at least 2 and no more than there are"
        )
    number = torch.empty(units, dtype=torch.int64)
    number[torch.randperm(units, generator=generator)] = torch.arange(units) % folds
    return number[unit_of]


@torch.no_grad()
def predict_held_out(
    table: Table,
    grid: CandidateGrid,
    fold_of: Int[Tensor, " row"],
    generator: torch.Generator,
    diag_weight: float | None = None,
    kernel_features: int = 1000,
    row_weights: Float[Tensor, " row"] | None = None,
) -> HeldOut:
    """Fit every candidate without each fold in turn and ask it about that fold.

    Kernels through `kernel_features` random features: O(n m p) for each feature map and bandwidth. A
    candidate whose loss has no minimum is NaN.
    """
    weights, members = normalised_weights(row_weights, len(table)), _members(fold_of)
    inputs = kernel_inputs(table).double()
    kernels = [
        random_fourier_features(Gaussian(bandwidth), inputs.shape[1], kernel_features, generator)
        for bandwidth in grid.bandwidths
    ]
    shape = (len(grid.feature_maps), len(kernels) * len(grid.ridges), len(table))
    values, residuals = (inputs.new_full(shape, torch.nan) for _ in range(2))
    for index, features in enumerate(grid.feature_maps):
        parts = [
            LinearResidual(table.select(rows), features, weights=None if weights is None else weights[rows])
            for rows in members
        ]
        thetas = _fits_without_each(parts, kernels, grid.ridges, diag_weight)
        for part, rows, theta in zip(parts, members, thetas, strict=True):
            for block in part.blocks():
                columns = part.augmented(block)
                values[index][:, rows[block]] = theta @ part.now(block).mT  # (C, p) @ (p, B)
                residuals[index][:, rows[block]] = columns[:, -1] - theta @ columns[:, :-1].mT
    return HeldOut(
        values=values.flatten(0, 1),
        residuals=residuals.flatten(0, 1),
        kernel_inputs=inputs,
        weights=inputs.new_ones(len(table)) if weights is None else weights,
        fold_of=fold_of,
        largest_discount=float(table.discounts.max()),
    )


def _fits_without_each(
    parts: Sequence[LinearResidual],
    kernels: Sequence[FourierFeatures],
    ridges: Sequence[float],
    diag_weight: float | None,
) -> list[Float[Tensor, "candidate parameter"]]:
    """θ for each kernel and ridge, fitted without each part; sums are subtracted, not computed again."""
    own, square = (
        _without_each(torch.stack(sums)) for sums in zip(*(part.own() for part in parts), strict=True)
    )
    sizes = _without_each(torch.tensor([part.weight_sums for part in parts], dtype=torch.float64)).tolist()
    thetas: list[list[Tensor]] = [[] for _ in parts]
    for kernel in kernels:
        projected = _without_each(torch.stack([part.project(kernel) for part in parts]))
        for fold, rest in enumerate(projected):
            forms = ResidualForms(rest.mT @ rest, own[fold], square[fold], *sizes[fold])
            path = RidgePath(forms.loss(diag_weight), parts[0].free)
            thetas[fold] += [path.solve(ridge).weights for ridge in ridges]
    return [torch.stack(found) for found in thetas]


def _members(fold_of: Tensor) -> list[Tensor]:
    return [torch.nonzero(fold_of == fold).flatten() for fold in range(int(fold_of.max()) + 1)]


def _without_each(parts: Tensor) -> Tensor:
    """Sums over the first axis with each of its entries left out."""
    return parts.sum(dim=0) - parts


def held_out_loss(
    held_out: HeldOut, judge: StationaryKernel, generator: torch.Generator, kernel_features: int = 2000
) -> Float[Tensor, " candidate"]:
    """U-statistic of the held-out residuals under `judge`: pairs within a fold, averaged over folds.

    Unbiased for each fold's kernel loss of a value function fitted to the other folds.
    (Feng et al. 2019, sec:batch_lv)
    """
    inputs = held_out.kernel_inputs
    psi = random_fourier_features(judge, inputs.shape[1], kernel_features, generator)
    scores = torch.zeros(len(held_out.residuals), dtype=torch.float64)
    pairs = 0.0
    for rows in held_out.folds:
        weight = held_out.weights[rows]
        residual = held_out.residuals[:, rows] * weight
        squares = residual.square().sum(dim=1)  # k(x, x) = 1
        scores += (residual @ psi(inputs[rows])).square().sum(dim=1) - squares
        pairs += float(weight.sum().square() - weight.square().sum())
    if pairs <= 0.0:
        raise DataError("the U-statistic needs two rows in a fold; give more rows or fewer folds")
    return torch.where(torch.isfinite(scores), scores / pairs, torch.inf)


def lstd_tournament(held_out: HeldOut) -> Float[Tensor, " candidate"]:
    """The farthest that LSTD on the line to any opponent moves a candidate, (C,), in units of the value.

    With D = V_j − V_i, LSTD with the one feature D moves V_i to V_i + cD, c = E[D δ_i] / E[D (δ_i − δ_j)],
    since δ_i − δ_j = D − discount · D'. The score of i is max_j |c| ‖D‖. Under the stationary distribution
    the denominator is at least (1 − γ) ‖D‖²; elsewhere it may be smaller and is raised to that.
    One matrix of products serves all pairs.
    """
    values, residuals = held_out.values, held_out.residuals
    fitted = torch.isfinite(values).all(dim=1) & torch.isfinite(residuals).all(dim=1)
    scores = torch.full((len(fitted),), torch.inf, dtype=torch.float64)
    if not bool(fitted.any()):
        return scores
    values, residuals = values[fitted], residuals[fitted]
    share = held_out.weights / held_out.weights.sum()
    pulls = (residuals * share) @ values.mT  # (i, j): E[δ_i V_j]
    products = (values * share) @ values.mT  # (i, j): E[V_i V_j]
    sizes = products.diagonal()
    squares = sizes[:, None] + sizes[None, :] - 2.0 * products  # ‖D‖²
    pull = pulls - pulls.diagonal()[:, None]  # E[D δ_i]
    decay = max(1.0 - held_out.largest_discount, _LEAST_DECAY)
    slope = torch.maximum(pull + pull.mT, decay * squares)  # E[D (δ_i − δ_j)]
    alike = squares <= _ALIKE**2 * (sizes[:, None] + sizes[None, :])
    distance = torch.where(alike, 0.0, pull.abs() / slope * squares.clamp_min(0.0).sqrt())
    scores[fitted] = distance.amax(dim=1)
    return scores
