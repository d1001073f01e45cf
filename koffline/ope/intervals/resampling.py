"""The bootstrap of a linear estimating equation: many resampled logs for the price of sums over units.

θ̂ solves n⁻¹ Σ Ω_i (r_i − z_iᵀθ) = τD(θ − θ0) with fixed instruments Ω (N, p). A resampled log weighs the
units (episodes, or rows) by how often they were drawn; its θ* = θ̂ + (n⁻¹ΣwΩzᵀ + τD)⁻¹ n⁻¹Σ(w − 1)Ωδ̂.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from koffline.errors import KofflineError
from koffline.ope.features import FeatureSystem
from koffline.ope.fitted import LSTD_RIDGE, FittedValues
from koffline.ope.intervals.base import (
    RIDGE,
    IntervalResult,
    KernelIntervalSettings,
    describe_starts,
    enough_draws,
    instruments,
    ridge_sizes,
    ridged_fit,
)
from koffline.ope.last_layer import accumulate_systems, last_layer, last_layer_features, penalty
from koffline.ope.learning import row_blocks
from koffline.ope.names import BOOTSTRAP_PIVOT
from koffline.ope.results import Interval
from koffline.replicas import StackedMLP

_STREAM, _NOISE_STREAM = 6061, 6062  # random streams
_MOST_PRODUCTS = 3e10  # multiplications in the sums of one bootstrap: some seconds on one core
_MOST_NUMBERS = 5e7  # numbers in the matrices of all draws: 400 MB
_FEW_UNITS = 30
_ASSUMPTIONS = (
    "Asymptotic: {units} resampled, the estimate solved again for each ({matrix}; features and instruments "
    "as they are), errors turned around; {starts}. It does not know what the class cannot express."
)
_NETWORK_ASSUMPTIONS = (
    "Asymptotic: {units} resampled, last layers solved again for each ({equation}; {matrix}), errors turned "
    "around, plus the spread of the networks trained on the whole log; {starts}. Hidden layers are held: it "
    "does not know what other features, or the class, would have said."
)


@dataclass(frozen=True, eq=False)
class LinearEquation:
    """One estimating equation at its solution.

    ``instruments (N, p)``: Ω, row weights included. ``difference (N, p)``: Z. ``residuals (N,)``: δ̂.
    ``starts (E, p)`` with ``start_weights (E,)``. ``ridge (p, p)``: τD. ``theta (p,)``: θ̂.
    """

    instruments: Float[Tensor, "row parameter"]
    difference: Float[Tensor, "row parameter"]
    residuals: Float[Tensor, " row"]
    starts: Float[Tensor, "start parameter"]
    start_weights: Float[Tensor, " start"]
    ridge: Float[Tensor, "parameter parameter"]
    theta: Float[Tensor, " parameter"]

    @property
    def value(self) -> float:
        """Value cᵀθ̂."""
        return float(self.start_weights @ (self.starts @ self.theta)) / float(self.start_weights.sum())


@dataclass(frozen=True, eq=False)
class Units:
    """Units of resampling, whose rows are drawn together. ``firsts (U,)``: first row of each unit."""

    firsts: np.ndarray
    row_weights: Float[Tensor, " row"]
    fixed_starts: bool

    @property
    def name(self) -> str:
        """Plural noun for the units: episodes or rows."""
        return "episodes" if len(self.firsts) < len(self.row_weights) else "rows"

    @cached_property
    def present(self) -> Int[np.ndarray, " unit"]:
        """Units with positive weight."""
        return np.flatnonzero(self.sum_rows(self.row_weights.numpy()) > 0.0)

    def draw_counts(self, draws: int, seed: int) -> Int[np.ndarray, "draw unit"]:
        """Draw how often each unit occurs in each resampled log; units without weight are not drawn."""
        # A separate stream: a log simulated from the same seed must not correlate with its resampling.
        generator, present = np.random.default_rng([seed, _STREAM]), self.present
        counts = np.empty((draws, len(self.firsts)), dtype=np.int64)
        for draw in counts:
            chosen = present[generator.integers(len(present), size=len(present))]
            draw[:] = np.bincount(chosen, minlength=len(draw))
        return counts

    def sum_rows(self, values: np.ndarray) -> np.ndarray:
        """Sums over the rows of each unit, (U, …)."""
        return np.add.reduceat(values, self.firsts, axis=0)


def resample_values(
    equation: LinearEquation, units: Units, counts: Int[np.ndarray, "draw unit"]
) -> tuple[Float[np.ndarray, " draw"], bool]:
    """cᵀθ of every resampled log, and whether the matrices were resampled too.

    If that would take too much time or memory the matrix of the whole log is used (first-order bootstrap).
    Start states are resampled with their units unless they are given; draws without any are NaN.
    """
    size = equation.theta.numel() ** 2 * len(counts)
    exact = len(units.firsts) * size <= _MOST_PRODUCTS and size <= _MOST_NUMBERS
    weights = counts @ units.sum_rows(units.row_weights.numpy())  # Σw per draw
    share = torch.as_tensor(counts / weights[:, None])  # weight of each unit's sums
    gap = (equation.instruments * equation.residuals[:, None]).numpy()
    pull = share @ torch.as_tensor(units.sum_rows(gap)) - torch.as_tensor(gap.sum(axis=0) / len(gap))
    if exact:  # n⁻¹ΣwΩzᵀ of every draw, one column of z at a time
        products = (equation.instruments * column[:, None] for column in equation.difference.T)
        columns = [share @ torch.as_tensor(units.sum_rows(product.numpy())) for product in products]
        steps = torch.linalg.solve(torch.stack(columns, dim=-1) + equation.ridge, pull)
    else:
        whole = equation.instruments.mT @ equation.difference / len(gap) + equation.ridge
        steps = torch.linalg.solve(whole, pull.mT).mT
    thetas, start_weights = equation.theta + steps, equation.start_weights
    if units.fixed_starts:
        return (thetas @ (start_weights @ equation.starts / start_weights.sum())).numpy(), exact
    drawn = torch.as_tensor(counts, dtype=torch.float64) * start_weights
    means = (drawn @ equation.starts) / drawn.sum(dim=1, keepdim=True)
    return (means * thetas).sum(dim=1).numpy(), exact


def resampled_errors(
    equations: Iterable[LinearEquation], units: Units, draws: int, seed: int
) -> tuple[Float[np.ndarray, " draw"], str]:
    """Errors of the mean value of several equations over the same resampled logs, and what was resampled.

    Raises KofflineError for a single unit, and if more than a tenth of the resampled logs have no answer.
    """
    if len(units.present) < 2:
        raise KofflineError(
            "the log has one episode: a bootstrap has nothing to choose from; log more episodes"
        )
    counts, parts, exact = units.draw_counts(draws, seed), [], True
    for equation in equations:
        values, exact = resample_values(equation, units, counts)
        parts.append(values - equation.value)
    errors = np.mean(parts, axis=0)
    if np.isfinite(errors).sum() < max(2, math.ceil(0.9 * draws)):
        raise KofflineError("too many resampled logs have no answer; give more episodes")
    return errors, "its matrix too" if exact else "its matrix held: the first order"


def turned_around(value: float, errors: Float[np.ndarray, " draw"], level: float, text: str) -> Interval:
    """[v − q_high, v − q_low] of the distribution of errors, those that are finite.

    (Hao et al. 2021, the distributional correction)
    """
    tail = (1.0 - level) / 2.0
    low, high = np.quantile(errors[np.isfinite(errors)], (tail, 1.0 - tail))
    return Interval(value - float(high), value - float(low), level, BOOTSTRAP_PIVOT, text)


@torch.no_grad()
def pivot_interval(system: FeatureSystem, settings: KernelIntervalSettings) -> IntervalResult:
    """Bootstrap of the kernel-loss minimiser over resampled episodes (rows without episodes)."""
    units = Units(system.unit_starts, system.row_weights, system.fixed_starts)
    equation, count = kernel_equation(system), len(units.present)
    value, warnings = system.value(equation.theta), []
    if 2 <= count < _FEW_UNITS:
        warnings.append(f"the bootstrap has {count} {units.name} to draw from; its interval is too narrow")
    try:
        errors, matrix = resampled_errors([equation], units, settings.draws, settings.seed)
    except KofflineError as error:
        return IntervalResult(BOOTSTRAP_PIVOT, None, value=value, warnings=(*warnings, str(error)))
    starts = describe_starts(system.fixed_starts, "start states resampled with them")
    text = _ASSUMPTIONS.format(units=units.name, matrix=matrix, starts=starts)
    interval = turned_around(value, errors, settings.level, text).within(settings.values_within(system))
    return IntervalResult(BOOTSTRAP_PIVOT, interval, value=value, warnings=tuple(warnings))


def kernel_equation(system: FeatureSystem) -> LinearEquation:
    """Bᵀ(v − Bθ) = τD(θ − θ0), with Ω_i = w_i Bᵀψ_i held as instruments."""
    matrix, theta = system.projected[:, :-1], ridged_fit(system, RIDGE)
    omega = torch.cat([psi @ matrix for _, psi in instruments(system)])
    return LinearEquation(
        instruments=omega * system.row_weights[:, None],
        difference=system.difference,
        residuals=system.residuals(theta),
        starts=system.starts,
        start_weights=system.start_weights,
        ridge=torch.diag(ridge_sizes(matrix.mT @ matrix, system.free, RIDGE)),
        theta=theta,
    )


@torch.no_grad()
def last_layer_bootstrap(fitted: FittedValues, head: str, level: float = 0.95, seed: int = 0) -> Interval:
    """Bootstrap over resampled episodes from the networks trained on the whole log.

    For ``kloss`` each draw solves the kernel loss again (its instruments ΨᵀWZ held), for ``lstd`` and ``fqe``
    the temporal-difference equation, which a converged fitted Q evaluation has solved. Differences between
    the networks (initial weights, mini-batches) are drawn on top, normal with the spread of their mean.
    Raises KofflineError when all of these networks diverged, or the log is one episode.
    (Hao et al. 2021)
    """
    draws, problem = enough_draws(level), fitted.problem
    alive = np.flatnonzero(fitted.alive[: fitted.resampling.full])
    if not len(alive):
        raise KofflineError(f"{fitted.describe_diverged()}; lower learning_rate")
    units = Units(problem.episode_starts, torch.as_tensor(problem.row_weights), problem.fixed_starts)
    equations = (network_equation(fitted, replica, head) for replica in alive.tolist())
    errors, matrix = resampled_errors(equations, units, draws, seed)
    errors *= problem.reward_scale
    replicas = fitted.replica_values[head][alive, 1]
    if len(replicas) > 1:
        spread = float(replicas.std(ddof=1)) / len(replicas) ** 0.5
        errors += np.random.default_rng([seed, _NOISE_STREAM]).normal(0.0, spread, size=draws)
    text = _NETWORK_ASSUMPTIONS.format(
        units=units.name,
        equation="kernel loss" if head == "kloss" else "temporal-difference equation",
        matrix=matrix,
        starts=describe_starts(problem.fixed_starts, "start states with them"),
    )
    return turned_around(float(replicas.mean()), errors, level, text)


def network_equation(fitted: FittedValues, replica: int, head: str) -> LinearEquation:
    """The equation that a head's last layer solves on the whole log; in scaled rewards."""
    problem, table, instruments = fitted.problem, fitted.table, fitted.instruments
    network = fitted.record.network.select([replica])
    weights = torch.as_tensor(problem.row_weights)
    now = _features(network, table.inputs, table.readout)
    later = _features(network, table.next_inputs, table.next_readout)
    difference = now - table.discounts.double().cpu()[:, None] * later
    systems = accumulate_systems(network, table, instruments, weights[None].to(table.inputs.device)).mean()
    if head == "kloss":
        matrix, ridge, solved = systems.kernel_matrix[0].cpu(), fitted.settings.ridge, "kloss"
        blocks, compared = row_blocks(network, len(table), table.draws), table.compared
        omega = torch.cat([instruments(compared[rows].double()).cpu() @ matrix for rows in blocks])
        curvature = matrix.mT @ matrix
    else:
        curvature, ridge, omega, solved = systems.temporal_matrix[0].cpu(), LSTD_RIDGE, now, "lstd"
    theta = last_layer(fitted.heads[solved].select([replica]))[0].cpu()
    like, probabilities = table.inputs, problem.start_probabilities
    readout = None if probabilities is None else torch.as_tensor(probabilities).to(like)
    return LinearEquation(
        instruments=omega * weights[:, None],
        difference=difference,
        residuals=table.rewards.double().cpu() - difference @ theta,
        starts=_features(network, torch.as_tensor(problem.start_inputs).to(like), readout),
        start_weights=torch.as_tensor(problem.start_weights),
        ridge=ridge * penalty(curvature, network.sizes[-1]),
        theta=theta,
    )


def _features(network: StackedMLP, inputs: Tensor, readout: Tensor | None) -> Float[Tensor, "row parameter"]:
    """Features φ of the one network, in blocks."""
    draws = inputs.shape[1] if inputs.ndim == 3 else 1
    parts = [
        last_layer_features(network, inputs[rows], None if readout is None else readout[rows])[0].cpu()
        for rows in row_blocks(network, len(inputs), draws)
    ]
    return torch.cat(parts)
