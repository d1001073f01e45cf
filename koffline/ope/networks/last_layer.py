"""The kernel loss minimised exactly over the last layer, on all rows at once.

A network is linear in its last layer θ, so its residual is r − Zθ with Z = φ(x) −
discount · E φ(x'), and the full-batch V-statistic with an explicit feature map ψ of the
kernel, ‖ψᵀ(r − Zθ)‖²/n², is a least-squares problem in θ. Only the sums ψᵀZ and ψᵀr
over rows are needed: one pass in blocks, memory independent of n.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from koffline.data.columns import blocks
from koffline.jobs.cores import PRODUCT_SECONDS, Tell, on_cores
from koffline.kernels import (
    FourierFeatures,
    Gaussian,
    median_bandwidth,
    random_fourier_features,
)
from koffline.ope.log.problem import EvaluationProblem
from koffline.ope.log.working_log import Sums
from koffline.ope.networks.resampling import Resampling, row_blocks, start_inputs
from koffline.replicas import StackedMLP

# numbers of instruments, by default
_FEWEST_INSTRUMENTS = 300
_MOST_INSTRUMENTS = 1000
# parameters from which the fastest solution is good enough; rows of a product
_MANY = 1000
_TOGETHER = 256
Matrices = Float[Tensor, "replica critic parameter"]
Goals = Float[Tensor, "replica critic"]
Parameters = Float[Tensor, "replica parameter"]
# share of the ridge on the level of all values, so that the system stays solvable
_LEVEL = 1e-9


def draw_instruments(
    problem: EvaluationProblem,
    bandwidth: float,
    count: int | None,
    parameters: int,
    seed: int,
) -> tuple[FourierFeatures, float]:
    """Instruments ψ with ψ(x)ᵀψ(y) ≈ k(x, y) of the Gaussian kernel, and its bandwidth.

    bandwidth: multiple of the median distance. count: None for twice the number of
    ``parameters`` to be solved for, but at least 300 and at most 1000.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = torch.as_tensor(problem.kernel_inputs[problem.row_weights > 0.0])
    bandwidth = bandwidth * median_bandwidth(rows, generator=generator)
    if not count:
        count = max(_FEWEST_INSTRUMENTS, min(2 * parameters, _MOST_INSTRUMENTS))
    instruments = random_fourier_features(
        Gaussian(bandwidth), rows.shape[1], count, generator
    )
    return instruments, bandwidth


def best_level(rows: Any) -> Any:
    """The constant that solves the Bellman equation on average: mean r / mean (1 −
    discount).

    rows: anything with ``row_weights``, ``rewards`` and ``discounts`` (N,).
    """
    ends = rows.row_weights @ (1.0 - rows.discounts)
    return (rows.row_weights @ rows.rewards) / ends


def hidden_features(
    network: StackedMLP, inputs: Float[Tensor, "row *draw input"]
) -> Tensor:
    """Last hidden layer averaged over draws, (R, N, H).

    Computed in float64: in single precision, a row's output depends on the other rows
    of its block.
    """
    hidden = network.with_flat(network.flat.double()).features(
        inputs.double().flatten(0, -2)
    )
    if hidden.shape[1] == len(inputs):
        return hidden
    return hidden.unflatten(1, inputs.shape[:-1]).mean(dim=2)


def features_agree(network: StackedMLP, inputs: Tensor, groups: list[slice]) -> bool:
    """Whether groups of the networks give the features of the whole stack, to the
    bit, in a block of rows.
    """
    of_groups = [
        hidden_features(network.with_flat(network.flat[group]), inputs)
        for group in groups
    ]
    return torch.equal(torch.cat(of_groups), hidden_features(network, inputs))


def last_layer(network: StackedMLP) -> Float[Tensor, "replica parameter"]:
    """θ (R, (H + 1) · n) in float64: the first feature's weights for all n outputs, …,
    the constants last.
    """
    weight, bias = network.layers(network.flat)[-1]
    return torch.cat([weight, bias], dim=1).double().flatten(1)


def with_last_layer(
    network: StackedMLP, theta: Float[Tensor, "replica parameter"]
) -> StackedMLP:
    """Copy of the networks in float64 with the last layer θ."""
    flat = network.flat.double().clone()
    # weight rows, then the bias row: the layout of the flat parameters
    flat[:, -theta.shape[1] :] = theta
    return network.with_flat(flat)


def minimise_kernel_loss(
    network: StackedMLP,
    system: Float[Tensor, "replica instrument column"],
    ridge: float,
) -> StackedMLP:
    """The networks with the last layer θ of least kernel loss ‖v − Bθ‖² for a system [B
    v], with a ridge.

    The ridge pulls toward the old layer (toward zero it would shrink the values).
    ``ridge`` is relative to the mean curvature; the level of all values is not
    penalised. With the linear kernel (ψ = φ, the temporal system) this is the LSTD
    solution. Solved as an equation it would blow up where states drift along short
    episodes. (Feng et al. 2019, cor:same_as_td)
    """
    theta = last_layer(network)
    matrix = system[..., :-1]
    # ψᵀδ, network by network
    gaps = []
    for of_network, old in zip(system, theta, strict=True):
        gaps.append(of_network[:, -1] - of_network[:, :-1] @ old)
    change = least_squares(matrix, torch.stack(gaps), ridge, network.sizes[-1])
    return with_last_layer(network, theta + change)


def least_squares(
    matrices: Matrices, goals: Goals, ridge: float, outputs: int
) -> Parameters:
    """θ (R, p) that minimise ‖v − Bθ‖² + ridge · θᵀPθ for matrices B and goals v (R,
    m).

    P is the mean diagonal of BᵀB, in all directions of θ except that of a constant
    added to all outputs. In a kernel loss this constant only has curvature (1 − γ)², so
    that any usual ridge would keep the level of all values from moving. Dead features
    do no harm; the result is not finite for a network that diverged.
    """

    def solve(matrix: Tensor, goal: Tensor) -> Tensor:
        critics, parameters = matrix.shape
        if critics < parameters or critics == parameters > _MANY:
            across, invert, level, along = _by_critics(matrix, ridge, outputs)
            of_level, of_goal = invert(torch.stack([along, goal], dim=1)).mT
            height = of_level @ goal / (of_level @ along + _LEVEL)
            return across.mT @ (of_goal - of_level * height) + level * height
        factor = _by_parameters(
            torch.cat([matrix, goal[:, None]], dim=1), ridge, outputs
        )
        return torch.linalg.solve_triangular(
            factor[:-1, :-1], factor[:-1, -1:], upper=True
        ).squeeze(1)

    return _solved_on_cores(solve, matrices, goals)


def dual_of(matrices: Matrices, goals: Parameters, ridge: float, outputs: int) -> Goals:
    """B (BᵀB + ridge · P)⁻¹ c (R, m) for matrices B and goals c (R, p), P as in
    `least_squares`.
    """

    def solve(matrix: Tensor, goal: Tensor) -> Tensor:
        if len(matrix) < len(goal):
            across, invert, level, along = _by_critics(matrix, ridge, outputs)
            of_level, of_goal = invert(torch.stack([along, across @ goal], dim=1)).mT
            return of_goal + of_level * (goal @ level - along @ of_goal) / (
                of_level @ along + _LEVEL
            )
        factor = _by_parameters(matrix, ridge, outputs, columns=0)
        half = torch.linalg.solve_triangular(factor.mT, goal[:, None], upper=False)
        return matrix @ torch.linalg.solve_triangular(factor, half, upper=True).squeeze(
            1
        )

    return _solved_on_cores(solve, matrices, goals)


def _solved_on_cores(
    solve: Callable[[Tensor, Tensor], Tensor], matrices: Matrices, goals: Tensor
) -> Tensor:
    """``solve(matrix, goal)`` of every replica, (R, …)."""

    def solve_some(replicas: slice, _: Tell) -> Tensor:
        # one after another, to save memory
        return torch.stack(list(map(solve, matrices[replicas], goals[replicas])))

    replicas, critics, parameters = matrices.shape
    products = 2.0 * replicas * critics * parameters * min(critics, parameters)
    return joined(on_cores(solve_some, replicas, seconds=products * PRODUCT_SECONDS))


def joined(parts: list[Tensor]) -> Tensor:
    """Arrays of groups of replicas as one (R, …); a single one is not copied."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts)


def _penalty(matrix: Tensor, ridge: float, outputs: int) -> tuple[Tensor, Tensor]:
    """√(ridge times the mean diagonal of BᵀB), and the direction (p,) of a constant
    added to all outputs.
    """
    level = matrix.new_zeros(matrix.shape[1])
    # the constants of the outputs are the last parameters
    level[-outputs:] = outputs**-0.5
    return matrix.norm() * (ridge / len(level)) ** 0.5, level


def _by_parameters(
    system: Tensor, ridge: float, outputs: int, columns: int = 1
) -> Tensor:
    """Triangular U with UᵀU = [B v]ᵀ[B v] + ridge · P, by QR. columns: how many of the
    system's are v.
    """
    scale, level = _penalty(system[:, : system.shape[1] - columns], ridge, outputs)
    spared = torch.eye(len(level)).to(level) - (1.0 - _LEVEL**0.5) * torch.outer(
        level, level
    )
    return torch.linalg.qr(
        torch.cat([system, pad(scale * spared, (0, columns))]), mode="r"
    ).R


def _by_critics(
    matrix: Tensor, ridge: float, outputs: int
) -> tuple[Tensor, Any, Tensor, Tensor]:
    """Solve by critics if there are fewer than parameters: B without the level l, x ↦
    A⁻¹x, l, and Bl.

    A = (B − Bllᵀ)(B − Bllᵀ)ᵀ + scale². The level has almost no ridge and is solved for
    separately (Sherman & Morrison).
    """
    scale, level = _penalty(matrix, ridge, outputs)
    along = matrix @ level
    across = matrix - along[:, None] * level
    gram = scale**2 * torch.eye(len(matrix)).to(matrix)
    for rows in blocks(len(gram), _TOGETHER):  # the lower triangle is enough
        gram[rows, : rows.stop] += across[rows] @ across[: rows.stop].mT
    factor, failed = torch.linalg.cholesky_ex(gram)
    if int(failed):  # a tiny ridge
        ridged = torch.cat([across.mT, scale * torch.eye(len(matrix)).to(matrix)])
        factor = torch.linalg.qr(ridged, mode="r").R.mT

    def invert(right: Tensor) -> Tensor:
        solution = torch.cholesky_solve(right, factor)
        gap = right - across @ (across.mT @ solution) - scale**2 * solution
        # refined: errors are a thousandth
        return solution + torch.cholesky_solve(gap, factor)

    return across, invert, level, along


@dataclass(frozen=True, eq=False)
class StartSums(Sums):
    """Σ w E_{a~π} φ(s0, a) (R, 2, G, p) and Σ w (R, 2, G) over start states, for each
    of G groups.

    The axis of size 2: weights of each replica's sample, then of the log.
    """

    features: Float[Tensor, "replica 2 group parameter"]
    weights: Float[Tensor, "replica 2 group"]

    @property
    def means(self) -> Float[Tensor, "replica 2 group parameter"]:
        """Mean features."""
        return self.features / self.weights.to(self.features).unsqueeze(-1)


def sum_starts(
    network: StackedMLP,
    resampling: Resampling,
    share_of: Callable[[np.ndarray], Tensor] | None,
    problem: EvaluationProblem,
) -> StartSums:
    """Sums over start states. share_of: from units to their shares (E, G) in groups;
    None: one group.
    """
    weights = resampling.start_weights(problem)  # (R, 2, E)
    units = problem.start_units
    if share_of is None:
        shares = torch.ones(len(units), 1, dtype=torch.float64)
    else:
        shares = share_of(units)
    inputs, readout = start_inputs(network, problem)
    sums = sum_features(network, inputs, readout, weights, shares)
    return StartSums(features=sums, weights=weights @ shares)


def sum_features(
    network: StackedMLP,
    inputs: Tensor,
    readout: Tensor | None,
    weights: Tensor,
    shares: Tensor,
) -> Float[Tensor, "replica 2 group parameter"]:
    """Σ w φ over states with inputs (E, m, d), for each group.

    w: ``weights`` (R, 2, E) times shares in groups (E, G).
    """
    if readout is None:
        readout = torch.ones(len(inputs), 1).to(inputs)

    # those of all networks also where only some are summed, so that sums are the same
    rows_of_blocks = list(row_blocks(network, len(inputs), inputs.shape[1]))

    def sum_of_some(replicas: slice, _: Tell) -> Tensor:
        """Sums (R', 2, G, p) of some of the networks."""
        some_networks = network.with_flat(network.flat[replicas])

        def sum_of(rows: slice) -> Tensor:
            """Sums (R', 2, G, h + 1, n) over a block of states."""
            of_groups = weights[replicas, ..., None, rows] * shares[rows].mT
            features = hidden_features(some_networks, inputs[rows])
            return torch.einsum(
                "rkge,ea,ref->rkgfa",
                of_groups.to(inputs.device),
                readout[rows].double(),
                pad(features, (0, 1), value=1.0),
            )

        return functools.reduce(operator.add, map(sum_of, rows_of_blocks)).flatten(-2)

    count, draws = inputs.shape[:2]
    products = 2.0 * count * draws * network.flat.numel()
    sums = on_cores(
        sum_of_some,
        network.replicas,
        seconds=products * PRODUCT_SECONDS,
        agree=partial(features_agree, network, inputs[rows_of_blocks[0]]),
    )
    return joined(sums)


def mean_values(
    starts: Float[Tensor, "replica *mean parameter"],
    theta: Float[Tensor, "replica parameter"],
    scale: float,
) -> np.ndarray:
    """Mean values φ̄ᵀθ of start states with mean features φ̄, in units of the return;
    NaN if not finite.

    They are not clipped to possible returns, because that would make intervals from
    their spread too narrow.
    """
    values = torch.einsum("r...p,rp->r...", starts, theta).cpu() * scale
    return torch.where(values.isfinite(), values, math.nan).numpy()
