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

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from koffline.batches import Table
from koffline.errors import ConfigError, DataError
from koffline.kernels import InverseMultiquadric, StationaryKernel, median_bandwidth, random_fourier_features
from koffline.solvers.features import RandomFourierFeatures
from koffline.solvers.held_out import Candidate, CandidateGrid, HeldOut, make_folds, predict_held_out

RULES = ("lstd-tournament", "held-out-loss")
_LEAST_DECAY = 1e-3
_ALIKE = 1e-6  # candidates closer than this, relative to their size, do not play against each other


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
    return CandidateGrid(
        feature_maps=tuple(
            RandomFourierFeatures(factor * median, feature_count, seed) for factor in (0.15, 0.3, 0.6, 1.2)
        ),
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
    judge: StationaryKernel | None = None,
    diag_weight: float | None = None,
    kernel_features: int = 1000,
    constant: bool = True,
    row_weights: Float[Tensor, " row"] | None = None,
) -> Selection:
    """Score every candidate of the grid by a rule.

    groups (N,): rows that depend on each other (of one episode) are left out together. judge: kernel of the
    held-out loss, by default the inverse multiquadric of a tenth of the median distance.
    Raises ConfigError, and DataError when no candidate has a fit.
    """
    if rule not in RULES:
        raise ConfigError(f"rule is '{rule}'; use one of {', '.join(RULES)}")
    held_out = predict_held_out(
        table,
        grid,
        make_folds(len(table), folds, generator, groups),
        generator,
        diag_weight=diag_weight,
        kernel_features=kernel_features,
        constant=constant,
        row_weights=row_weights,
    )
    if rule == "lstd-tournament":
        scores = lstd_tournament(held_out)
    else:
        judge = judge or InverseMultiquadric(0.1 * median_bandwidth(held_out.kernel_inputs))
        scores = held_out_loss(held_out, judge, generator)
    if not bool(torch.isfinite(scores).any()):
        raise DataError("no candidate could be fitted; give larger ridges or a larger diag_weight")
    return Selection(rule, grid.candidates, scores)


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
    weights = 0.0
    for rows in held_out.folds:
        weight = held_out.weights[rows]
        pairs = float(weight.sum().square() - weight.square().sum())
        residual = held_out.residuals[:, rows] * weight
        squares = residual.square().sum(dim=1)  # k(x, x) = 1
        off_diagonal = (residual @ psi(inputs[rows])).square().sum(dim=1) - squares
        scores, weights = scores + off_diagonal, weights + pairs
    if weights <= 0.0:
        raise DataError("the U-statistic needs two rows in a fold; give more rows or fewer folds")
    return torch.where(torch.isfinite(scores), scores / weights, torch.inf)


def lstd_tournament(held_out: HeldOut) -> Float[Tensor, " candidate"]:
    """The farthest that LSTD on the line to any opponent moves a candidate, (C,), in units of the value.

    With D = V_j − V_i, LSTD with the one feature D moves V_i to V_i + cD, c = E[D δ_i] / E[D (δ_i − δ_j)],
    since δ_i − δ_j = D − discount · D'. The score of i is max_j |c| ‖D‖. Under the stationary distribution
    the denominator is at least (1 − γ) ‖D‖²; elsewhere it may be smaller and is raised to that.
    One matrix of products serves all pairs.
    """
    values, residuals = held_out.values, held_out.residuals
    fitted = torch.isfinite(values).all(dim=1) & torch.isfinite(residuals).all(dim=1)
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
    scores = torch.full((len(fitted),), torch.inf, dtype=torch.float64)
    scores[fitted] = distance.amax(dim=1) if len(distance) else scores[fitted]
    return scores
