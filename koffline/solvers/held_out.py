"""Candidate settings of the closed-form solver, and what they say about rows they have not seen."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from koffline.batches import Table
from koffline.errors import ConfigError
from koffline.kernels import FourierFeatures, Gaussian, random_fourier_features
from koffline.solvers.features import FeatureMap
from koffline.solvers.forms import ResidualForms, accumulate_own, normalised_weights, project
from koffline.solvers.linear import LinearResidual
from koffline.solvers.quadratic import RidgePath, check_ridge


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
        return tuple(
            Candidate(*parts) for parts in itertools.product(self.feature_maps, self.bandwidths, self.ridges)
        )


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
    *,
    diag_weight: float | None = None,
    kernel_features: int = 1000,
    constant: bool = True,
    row_weights: Float[Tensor, " row"] | None = None,
) -> HeldOut:
    """Fit every candidate without each fold in turn and ask it about that fold.

    Kernels through `kernel_features` random features: O(n m p) for each feature map and bandwidth. A
    candidate whose loss has no minimum is NaN.
    """
    weights = normalised_weights(row_weights, len(table))
    members = _members(fold_of)
    inputs = (table.inputs if table.kernel_inputs is None else table.kernel_inputs).double()
    maps = [
        random_fourier_features(Gaussian(bandwidth), inputs.shape[1], kernel_features, generator)
        for bandwidth in grid.bandwidths
    ]
    shape = (len(grid.feature_maps), len(maps) * len(grid.ridges), len(table))
    values, residuals = (inputs.new_full(shape, torch.nan) for _ in range(2))
    for index, features in enumerate(grid.feature_maps):
        parts = [LinearResidual(table.select(rows), features, constant) for rows in members]
        fits = _FoldFits(parts, [None if weights is None else weights[rows] for rows in members])
        solutions = [fits.solve(kernel, grid.ridges, diag_weight) for kernel in maps]
        for fold, rows in enumerate(members):
            theta = torch.cat([solution[fold] for solution in solutions])
            values[index][:, rows], residuals[index][:, rows] = _predict(parts[fold], theta)
    return HeldOut(
        values=values.flatten(0, 1),
        residuals=residuals.flatten(0, 1),
        kernel_inputs=inputs,
        weights=inputs.new_ones(len(table)) if weights is None else weights,
        fold_of=fold_of,
        largest_discount=float(table.discounts.max()),
    )


class _FoldFits:
    """Fits without each fold of one feature map; sums over folds are subtracted, not computed again."""

    def __init__(self, parts: Sequence[LinearResidual], weights: Sequence[Tensor | None]) -> None:
        self._parts, self._weights = parts, weights
        own, square = zip(
            *(accumulate_own(part, weight) for part, weight in zip(parts, weights, strict=True)), strict=True
        )
        self._own, self._square = _without_each(torch.stack(own)), _without_each(torch.stack(square))
        sums = [
            (len(part), len(part)) if weight is None else (float(weight.sum()), float(weight.square().sum()))
            for part, weight in zip(parts, weights, strict=True)
        ]
        self._weight, self._weight_squares = _without_each(torch.tensor(sums, dtype=torch.float64)).T.tolist()

    def solve(
        self, kernel: FourierFeatures, ridges: Sequence[float], diag_weight: float | None
    ) -> list[Float[Tensor, "ridge parameter"]]:
        """θ for each ridge, fitted without each fold."""
        pairs = zip(self._parts, self._weights, strict=True)
        projected = _without_each(torch.stack([project(part, kernel, weight) for part, weight in pairs]))
        solutions = []
        for fold, rest in enumerate(projected):
            forms = ResidualForms(
                total=rest.mT @ rest,
                own=self._own[fold],
                square=self._square[fold],
                weight=self._weight[fold],
                weight_squares=self._weight_squares[fold],
            )
            path = RidgePath(forms.loss(diag_weight), self._parts[0].free)
            solutions.append(torch.stack([path.solve(ridge).weights for ridge in ridges]))
        return solutions


def _members(fold_of: Tensor) -> list[Tensor]:
    return [torch.nonzero(fold_of == fold).flatten() for fold in range(int(fold_of.max()) + 1)]


def _without_each(parts: Tensor) -> Tensor:
    """Sums over the first axis with each of its entries left out."""
    return parts.sum(dim=0) - parts


def _predict(part: LinearResidual, theta: Tensor) -> tuple[Tensor, Tensor]:
    """Values and residuals (C, B) of the rows of one fold."""
    values, residuals = [], []
    for rows in part.blocks():
        values.append(theta @ part.now(rows).mT)  # (C, p) @ (p, B)
        columns = part.augmented(rows)
        residuals.append(columns[:, -1] - theta @ columns[:, :-1].mT)
    return torch.cat(values, dim=1), torch.cat(residuals, dim=1)
