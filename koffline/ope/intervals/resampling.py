"""The bootstrap of a linear estimating equation: many resampled logs for the price of sums over units.

θ̂ solves n⁻¹ Σ Ω_i (r_i − z_iᵀθ) = τD(θ − θ0) with fixed instruments Ω (N, p). A resampled log weighs the
units (episodes, or rows) by how often they were drawn; its θ* = θ̂ + (n⁻¹ΣwΩzᵀ + τD)⁻¹ n⁻¹Σ(w − 1)Ωδ̂.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

ONE_UNIT = "the log has one episode: a bootstrap has nothing to choose from; log more episodes"
_STREAM = 6061
_MOST_PRODUCTS = 3e10  # of the sums of one bootstrap: some seconds of a core
_MOST_NUMBERS = 5e7  # in the matrices of all draws: 400 MB


@dataclass(frozen=True, eq=False)
class LinearEquation:
    """One estimating equation at its solution.

    ``instruments (N, p)``: Ω, row weights included. ``difference (N, p)``: Z. ``residuals (N,)``: δ̂.
    ``starts (E, p)`` with ``start_weights (E,)``. ``ridge (p,)``: the diagonal of τD. ``theta (p,)``: θ̂.
    """

    instruments: Float[Tensor, "row parameter"]
    difference: Float[Tensor, "row parameter"]
    residuals: Float[Tensor, " row"]
    starts: Float[Tensor, "start parameter"]
    start_weights: Float[Tensor, " start"]
    ridge: Float[Tensor, " parameter"]
    theta: Float[Tensor, " parameter"]


@dataclass(frozen=True, eq=False)
class Units:
    """Which rows are drawn together. ``firsts (U,)``: first row of each unit; ``row_weights (N,)``."""

    firsts: np.ndarray
    row_weights: Float[Tensor, " row"]
    fixed_starts: bool

    @cached_property
    def present(self) -> Int[np.ndarray, " unit"]:
        """Units with weight."""
        return np.flatnonzero(self.sum_rows(self.row_weights.numpy()) > 0.0)

    def draw_counts(self, draws: int, seed: int) -> Int[np.ndarray, "draw unit"]:
        """How often each unit occurs in each resampled log; units without weight are not drawn."""
        # A stream of its own: a log simulated from the same seed would be correlated with its resampling.
        generator = np.random.default_rng([seed, _STREAM])
        present = self.present
        counts = np.empty((draws, len(self.firsts)), dtype=np.int64)
        for draw in counts:
            chosen = present[generator.integers(len(present), size=len(present))]
            draw[:] = np.bincount(chosen, minlength=len(draw))
        return counts

    def sum_rows(self, values: np.ndarray) -> np.ndarray:
        """Sums over the rows of each unit, (U, …)."""
        return np.add.reduceat(values, self.firsts, axis=0)

    def __len__(self) -> int:
        return len(self.firsts)


def resample_values(
    equation: LinearEquation, units: Units, counts: Int[np.ndarray, "draw unit"]
) -> tuple[Float[np.ndarray, " draw"], bool]:
    """cᵀθ of every resampled log, and whether the matrices were resampled too.

    Where that would take too long or too much memory the matrix of the whole log stands in (the first order).
    Start states are resampled with their units unless they are given.
    """
    size = equation.theta.numel()
    exact = len(units) * size**2 * len(counts) <= _MOST_PRODUCTS and size**2 * len(counts) <= _MOST_NUMBERS
    weights = counts @ units.sum_rows(units.row_weights.numpy())  # Σw per draw
    share = torch.as_tensor(counts / weights[:, None])  # of each unit's sums in a mean over the draw's rows
    gap = (equation.instruments * equation.residuals[:, None]).numpy()
    pull = share @ torch.as_tensor(units.sum_rows(gap)) - torch.as_tensor(gap.sum(axis=0) / len(gap))
    if exact:
        steps = torch.linalg.solve(_matrices(equation, units, share), pull)
    else:
        whole = equation.instruments.mT @ equation.difference / len(gap) + torch.diag(equation.ridge)
        steps = torch.linalg.solve(whole, pull.mT).mT
    return _start_means(equation, units, counts, equation.theta + steps), exact


def _matrices(
    equation: LinearEquation, units: Units, share: Float[Tensor, "draw unit"]
) -> Float[Tensor, "draw parameter parameter"]:
    """n⁻¹ΣwΩzᵀ + τD of every draw, one column of z at a time."""
    columns = []
    for column in range(equation.theta.numel()):
        products = equation.instruments * equation.difference[:, column, None]
        columns.append(share @ torch.as_tensor(units.sum_rows(products.numpy())))
    return torch.stack(columns, dim=-1) + torch.diag(equation.ridge)


def _start_means(
    equation: LinearEquation,
    units: Units,
    counts: Int[np.ndarray, "draw unit"],
    thetas: Float[Tensor, "draw parameter"],
) -> Float[np.ndarray, " draw"]:
    """cᵀθ per draw; draws that hold no start state with weight are NaN."""
    if units.fixed_starts:
        mean = equation.start_weights @ equation.starts / equation.start_weights.sum()
        return (thetas @ mean).numpy()
    weights = torch.as_tensor(counts, dtype=torch.float64) * equation.start_weights
    means = (weights @ equation.starts) / weights.sum(dim=1, keepdim=True)
    return (means * thetas).sum(dim=1).numpy()


def pivotal_interval(value: float, draws: Float[np.ndarray, " draw"], level: float) -> tuple[float, float]:
    """[2v − q_high, 2v − q_low]: the bootstrap distribution of the error, turned around.

    (Hao et al. 2021, the distributional correction)
    """
    tail = (1.0 - level) / 2.0
    low, high = np.quantile(draws[np.isfinite(draws)], (tail, 1.0 - tail))
    return 2.0 * value - float(high), 2.0 * value - float(low)


def usable(draws: Float[np.ndarray, " draw"]) -> bool:
    """Whether enough draws are numbers for a quantile to mean something."""
    return bool(np.isfinite(draws).sum() >= max(2, math.ceil(0.9 * len(draws))))
