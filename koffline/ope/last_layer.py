"""The kernel loss minimised exactly over the last layer, on all rows at once.

A network is linear in its last layer θ, so its residual is r − Zθ with Z = φ(x) − discount · E φ(x'), and the
full-batch V-statistic with an explicit feature map ψ of the kernel, ‖ψᵀ(r − Zθ)‖²/n², is a least-squares
problem in θ. Only the sums ψᵀZ and ψᵀr over rows are needed: one pass in blocks, memory independent of n.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from koffline.batches import Table
from koffline.kernels import FourierFeatures
from koffline.ope.learning import Resampling, make_table, row_blocks, start_inputs, stops_at
from koffline.ope.problem import EvaluationProblem
from koffline.ope.working_log import Sums
from koffline.replicas import StackedMLP

_BLOCK = 8192
_LEVEL = 1e-9  # share of the ridge on the level of all values, so that the system stays solvable


def combine_features(
    features: Float[Tensor, "*replica drawn feature"],
    draws: int,
    readout: Float[Tensor, "row output"] | None,
    constant: bool,
) -> Float[Tensor, "*replica row parameter"]:
    """Combine features (…, N · draws, F) to φ (…, N, p), a mean over draws, with Σ readout · outputs = φᵀθ.

    θ is the last layer row by row: a weight of every output for the first feature, for the second, …, and
    with `constant` the outputs' constants last; p = (F + 1) · outputs.
    """
    mean = features if draws == 1 else features.unflatten(-2, (-1, draws)).mean(dim=-2)
    if constant:
        mean = torch.cat([mean, mean.new_ones(*mean.shape[:-1], 1)], dim=-1)
    if readout is None:
        return mean
    return (mean.unsqueeze(-1) * readout.to(mean).unsqueeze(-2)).flatten(-2)


def last_layer_features(
    network: StackedMLP, inputs: Float[Tensor, "row *draw input"], readout: Float[Tensor, "row output"] | None
) -> Float[Tensor, "replica row parameter"]:
    """φ with Σ readout · net(inputs) = φᵀθ for a network's last layer θ, averaged over draws; float64."""
    hidden = network.features(inputs.reshape(-1, inputs.shape[-1])).double()
    return combine_features(hidden, hidden.shape[1] // max(1, len(inputs)), readout, constant=True)


def exact_features(
    network: StackedMLP, inputs: Tensor, readout: Tensor | None, rows: slice
) -> Float[Tensor, "replica row parameter"]:
    """`last_layer_features` of a block of rows, computed in float64."""
    exact = network.with_flat(network.flat.double())
    return last_layer_features(exact, inputs[rows].double(), None if readout is None else readout[rows])


def last_layer(network: StackedMLP) -> Float[Tensor, "replica parameter"]:
    """θ (R, (H + 1) · n) in the order of `last_layer_features`; float64."""
    weight, bias = network.layers(network.flat)[-1]
    return torch.cat([weight, bias], dim=1).double().flatten(1)


def with_last_layer(network: StackedMLP, theta: Float[Tensor, "replica parameter"]) -> StackedMLP:
    """Copy of the networks in float64 with the last layer θ."""
    flat = network.flat.double().clone()
    flat[:, -theta.shape[1] :] = theta  # weight rows, then the bias row: the layout of the flat parameters
    return network.with_flat(flat)


@dataclass(frozen=True, eq=False)
class LoggedSystem(Sums):
    """Sums for the logging policy: LSTD with the log's next rows, and Σ w γ^t φ of the rows at cuts."""

    matrix: Float[Tensor, "replica parameter parameter"]
    vector: Float[Tensor, "replica parameter"]
    cuts: Float[Tensor, "replica 2 parameter"]


@dataclass(frozen=True, eq=False)
class LinearSystems(Sums):
    """Sums over rows for a stack of R networks with p last-layer parameters.

    ``kernel_matrix (R, m, p)`` is ψᵀWZ and ``kernel_vector (R, m)`` ψᵀWr for m instruments ψ and row weights
    W; ``temporal_matrix (R, p, p)`` is φᵀWZ and ``temporal_vector (R, p)`` φᵀWr; ``weight (R,)`` is Σ w. Sums
    of two parts of a log add up.
    """

    kernel_matrix: Float[Tensor, "replica instrument parameter"]
    kernel_vector: Float[Tensor, "replica instrument"]
    temporal_matrix: Float[Tensor, "replica parameter parameter"]
    temporal_vector: Float[Tensor, "replica parameter"]
    weight: Float[Tensor, " replica"]
    logged: LoggedSystem | None = None

    @property
    def kernel(self) -> tuple[Tensor, Tensor]:
        """B and v of the kernel loss ‖v − Bθ‖²."""
        return self.kernel_matrix, self.kernel_vector

    @property
    def temporal(self) -> tuple[Tensor, Tensor]:
        """B and v with the features themselves as instruments."""
        return self.temporal_matrix, self.temporal_vector

    def mean(self) -> LinearSystems:
        """The sums divided by Σ w of each replica, which changes no solution; zeros stay where that is 0."""
        weight, sums = self.weight.clamp_min(1e-300), vars(self).items()
        means = {k: each / weight.view(-1, *(1,) * (each.ndim - 1)) for k, each in sums if k != "logged"}
        return LinearSystems(**means, logged=self.logged)


def accumulate_systems(
    network: StackedMLP,
    table: Table,
    instruments: Callable[[Tensor], Tensor],
    row_weights: Float[Tensor, "replica row"],
    logged: tuple[Tensor, Callable[[slice], Tensor]] | None = None,
) -> LinearSystems:
    """Sums over blocks of rows. ``instruments`` maps kernel inputs (B, k) to ψ (B, m).

    In float64, because in single precision the output for a row depends on the other rows of its block.
    logged: the share of each row's weight that counts in the logged system, (N,), zero where the table's next
    row is not the log's; and the weights (R, 2, B) of a block's rows as cuts.
    """
    compared, count = table.compared, network.replicas
    sums: tuple[Tensor, ...] = ()
    for rows in row_blocks(network, len(table), table.draws):
        psi = instruments(compared[rows].double())  # (B, m)
        wide = exact_features(network, table.inputs, table.readout, slice(rows.start, rows.stop + 1))
        now = wide[:, : len(psi)]
        later = exact_features(network, table.next_inputs, table.next_readout, rows)
        discounts, rewards = table.discounts[rows].double(), table.rewards[rows].double()
        weights = row_weights[:, rows].double()
        weighted = (now - discounts[:, None] * later).mul_(weights.unsqueeze(-1))  # WZ, (R, B, p)
        weighted_rewards = weights * rewards  # (R, B)
        if not sums:
            (m, p), zeros = (psi.shape[1], now.shape[2]), psi.new_zeros
            sums = zeros(m, count * p), zeros(count, m), zeros(count, p, p), zeros(count, p), zeros(count)
            own = zeros(count, p, p), zeros(count, p), zeros(count, 2, p)
        sums[0].addmm_(psi.mT, weighted.transpose(0, 1).reshape(len(psi), -1))  # of all replicas at once
        sums[1].addmm_(weighted_rewards, psi)
        sums[2].baddbmm_(now.mT, weighted)
        sums[3].add_((weighted_rewards.unsqueeze(1) @ now).squeeze(1))
        sums[4].add_(weights.sum(dim=1))
        if logged is not None:
            weights, following = weights * logged[0][rows], wide.roll(-1, 1)[:, : len(psi)]
            own[0].baddbmm_(now.mT, (now - discounts[:, None] * following).mul_(weights.unsqueeze(-1)))
            own[1].add_(((weights * rewards).unsqueeze(1) @ now).squeeze(1))
            own[2].add_(logged[1](rows) @ now)
    kernel, found = sums[0].unflatten(1, (count, -1)).transpose(0, 1), logged and LoggedSystem(*own)
    return LinearSystems(kernel, sums[1], sums[2], sums[3], sums[4], found)


def minimise_kernel_loss(
    network: StackedMLP,
    matrix: Float[Tensor, "replica instrument parameter"],
    vector: Float[Tensor, "replica instrument"],
    ridge: float,
) -> StackedMLP:
    """The networks with the last layer θ of the least full-batch kernel loss ‖v − Bθ‖², ridged to the old.

    ``ridge`` is relative to the mean curvature and does not penalise the level of all values; a ridge toward
    zero would shrink the values. With the linear kernel (ψ = φ, temporal matrix and vector) this is the LSTD
    solution; solved as an equation it would blow up where states drift along short episodes.
    (Feng et al. 2019, cor:same_as_td)
    """
    theta = last_layer(network)
    gap = vector - (matrix @ theta.unsqueeze(-1)).squeeze(-1)  # ψᵀδ/n at the old layer, (R, m)
    pull = (matrix.mT @ gap.unsqueeze(-1)).squeeze(-1)
    return with_last_layer(network, theta + ridge_solve(matrix.mT @ matrix, pull, ridge, network.sizes[-1]))


def ridge_solve(
    matrix: Float[Tensor, "replica parameter parameter"],
    vector: Float[Tensor, "replica parameter"],
    ridge: float,
    outputs: int,
) -> Float[Tensor, "replica parameter"]:
    """(matrix + ridge · P)⁻¹ vector per replica; dead features make the matrix singular.

    NaN for a replica with a non-finite matrix (it diverged); the others are solved.
    """
    solution, info = torch.linalg.solve_ex(matrix + ridge * penalty(matrix, outputs), vector)
    return torch.where(info[:, None] == 0, solution, math.nan)


def penalty(matrix: Float[Tensor, "*replica parameter parameter"], outputs: int) -> Tensor:
    """Penalty P: the mean |diagonal| in all directions except that of a constant added to all outputs.

    A constant has the curvature (1 − γ)² of a kernel loss, so that any usual ridge would hold the level of
    all values where it was. The constants of the outputs are the last parameters.
    """
    scale = matrix.diagonal(dim1=-2, dim2=-1).abs().mean(dim=-1)
    level = matrix.new_zeros(matrix.shape[-1])
    level[-outputs:] = outputs**-0.5
    spared = torch.eye(len(level)).to(matrix) - (1.0 - _LEVEL) * torch.outer(level, level)
    return scale[..., None, None] * spared


def critic_moments(critics: FourierFeatures, problem: EvaluationProblem) -> Float[Tensor, "critic critic"]:
    """Σ w ψψᵀ over the rows of a part of the log."""
    inputs, weights = torch.as_tensor(problem.kernel_inputs).double(), torch.as_tensor(problem.row_weights)
    total = torch.zeros(2 * critics.frequencies.shape[1], 2 * critics.frequencies.shape[1]).double()
    for block, own in zip(inputs.split(_BLOCK), weights.split(_BLOCK), strict=True):
        psi = critics(block)
        total.addmm_(psi.mT, psi * own[:, None])
    return total


@dataclass(frozen=True, eq=False)
class StartSums(Sums):
    """Σ w E_{a~π} φ(s0, a) (R, 2, G, p) and Σ w (R, 2, G) of start states, for each of G groups.

    The axis of size 2: weights of each replica's sample, and of the log.
    """

    features: Float[Tensor, "replica 2 group parameter"]
    weights: Float[Tensor, "replica 2 group"]

    @property
    def means(self) -> Float[Tensor, "replica 2 group parameter"]:
        """Mean features."""
        return self.features / self.weights.to(self.features).unsqueeze(-1)


@dataclass(frozen=True, eq=False)
class PartSystems(Sums):
    """Sums over a part of the log for the last layers of all replicas.

    ``returns``: of episodes Σ w · discounted rewards before the cut (R, 2), None where starts are given.
    """

    systems: LinearSystems
    starts: StartSums
    returns: Tensor | None


def systems_of_part(
    network: StackedMLP,
    instruments: FourierFeatures,
    resampling: Resampling,
    gamma: float,
    stops: Float[np.ndarray, " step"] | None,
    problem: EvaluationProblem,
) -> PartSystems:
    """Last-layer sums of a part of the log. stops: as by `cut_shares`, None where no episode is cut.

    Rows after which recording stopped have no weight in the logged system, and start what follows the cuts.
    """
    device, start_weights = str(network.flat.device), resampling.start_weights(problem)
    table, weights = make_table(problem, device), resampling.row_weights(problem)
    powers, logged, returns = gamma**problem.steps, None, None
    stopped = np.zeros(problem.n_rows) if stops is None else stops_at(problem, stops)
    if stops is not None:
        kept, cut = torch.as_tensor(1.0 - stopped).to(device), torch.as_tensor(stopped * powers)
        unit = np.repeat(np.arange(len(problem.lengths)), problem.lengths)
        logged = kept, lambda rows: (start_weights[..., unit[rows]] * cut[rows]).to(device)
    if not problem.fixed_starts:
        discounted = problem.rewards * powers * (1.0 - stopped)
        returns = start_weights @ torch.as_tensor(np.add.reduceat(discounted, problem.episode_starts))
    systems = accumulate_systems(network, table, instruments, weights.to(device), logged)
    return PartSystems(systems, sum_starts(network, resampling, None, problem), returns)


def sum_starts(
    network: StackedMLP,
    resampling: Resampling,
    share_of: Callable[[np.ndarray], Tensor] | None,
    problem: EvaluationProblem,
) -> StartSums:
    """Sums over start states. share_of: from units to their shares (E, G) in groups; None: one group."""
    weights = resampling.start_weights(problem).unsqueeze(2)  # (R, 2, 1, E)
    if share_of is not None:
        weights = weights * share_of(problem.start_units).mT
    inputs, readout = start_inputs(network, problem)
    blocks, flat = row_blocks(network, len(inputs), inputs.shape[1]), weights.flatten(1, 2).to(inputs.device)
    parts = (flat[..., rows] @ exact_features(network, inputs, readout, rows) for rows in blocks)
    sums = functools.reduce(operator.add, parts).unflatten(1, weights.shape[1:3])
    return StartSums(sums, weights.sum(dim=-1))


def mean_values(
    starts: Float[Tensor, "replica *mean parameter"],
    theta: Float[Tensor, "replica parameter"],
    problem: EvaluationProblem,
) -> np.ndarray:
    """Mean values φ̄ᵀθ of start states with mean features φ̄, within the bounds of any return; its units."""
    values = torch.einsum("r...p,rp->r...", starts, theta).cpu()
    within = values.clamp(*problem.value_bounds) * problem.reward_scale
    return torch.where(values.isfinite(), within, math.nan).numpy()  # do not clip infinite values
