"""Sums over rows from which last layers are solved, for all replicas: one pass in blocks of rows.

A discrete action selects one of several outputs, so φ(x) is zero except for that output's parameters. To save
time, rows are sorted by action and parameters ordered output by output.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from koffline.batches import Table
from koffline.kernels import FourierFeatures
from koffline.ope.last_layer import StartSums, hidden_features, sum_starts
from koffline.ope.learning import Resampling, make_table, row_blocks, stops_at
from koffline.ope.problem import EvaluationProblem
from koffline.ope.working_log import Sums
from koffline.replicas import StackedMLP

_BLOCK = 8192


@dataclass(frozen=True, eq=False)
class LinearSystems(Sums):
    """Sums over rows for R networks with p last-layer parameters θ, whose residuals are r − Zθ.

    ``system (R, m, p + 1)``: ψᵀW [Z r] for m critics ψ and row weights W. ``weight (R,)``: Σ w. ``starts``:
    sums over start states.

    For the logging policy, with q the probability that recording stopped after a row (`stops_at`; 1 at cuts):
    ``logged (R, p, p + 1)`` is φᵀW [Z r] with the log's next rows and weights (1 − q) w. ``cuts (R, 2, p)``
    is Σ q γ^t w φ and ``returns (R, 2)`` Σ (1 − q) γ^t w r, with weights of the episodes as in `StartSums`.
    """

    system: Float[Tensor, "replica critic column"]
    weight: Float[Tensor, " replica"]
    logged: Float[Tensor, "replica parameter column"] | None = None
    cuts: Float[Tensor, "replica 2 parameter"] | None = None
    returns: Float[Tensor, "replica 2"] | None = None
    starts: StartSums | None = None


def accumulate_systems(
    network: StackedMLP,
    table: Table,
    critics: Callable[[Tensor], Tensor] | None,
    row_weights: Float[Tensor, "replica row"],
    logged: tuple[Tensor, Callable[[slice], Tensor]] | None = None,
) -> LinearSystems:
    """Sums over blocks of rows. ``critics`` maps kernel inputs (B, k) to ψ (B, m); None: the features φ.

    logged: 1 − q (N,), zero in the last row of an episode that goes on; and q γ^t w (R, 2, B) of a block.
    """
    count, outputs, width = network.replicas, network.sizes[-1], network.sizes[-2] + 1
    ones, p = table.rewards.new_ones(len(table), 1), outputs * width
    readout, expected = (ones, ones) if table.readout is None else (table.readout, table.next_readout)
    assert expected is not None
    zeros = partial(torch.zeros, dtype=torch.float64, device=table.inputs.device)
    instruments = 0 if critics is None else critics(table.compared[:1].double()).shape[1]
    kernel = zeros(count, instruments, p + 1)
    asked = (count if critics is None else 0, 1), (0 if logged is None else count, 3)
    temporal, own = (zeros(number, outputs, width, p + more) for number, more in asked)
    for rows in row_blocks(network, len(table), table.draws):
        order: Any = slice(0, rows.stop - rows.start)
        if outputs > 1:  # rows of like actions together
            order = readout[rows].argmax(dim=1).argsort(stable=True)
        further = slice(rows.start, rows.stop + 1)
        wide = hidden_features(network, table.inputs[further])
        later = hidden_features(network, table.next_inputs[rows])
        taken, chances = readout[rows][order].double(), expected[rows][order].double()
        ends = taken.sum(dim=0).cumsum(dim=0).int().tolist()
        facts = table.discounts[rows][order].double(), table.rewards[rows][order].double()
        psi = None if critics is None else critics(table.compared[rows][order].double()).mT
        if logged is not None:
            share, cuts = logged[0][rows][order], logged[1](rows)[..., order].mT
            following, after = wide.roll(-1, 1), readout[further].roll(-1, 0)[order].double()
        for r, weights in enumerate(row_weights[:, rows][:, order].double()):
            now = wide[r, order]
            moved = _moves(now, taken, later[r, order], chances, weights, *facts)
            if psi is None:
                _add_by_action(temporal[r], now, ends, moved)
            else:
                kernel[r].addmm_(psi, moved)
            if logged is not None:
                moved = _moves(now, taken, following[r, order], after, weights * share, *facts)
                _add_by_action(own[r], now, ends, torch.cat([moved, cuts[r]], dim=1))
    by_kernel, by_features, moves = (
        torch.cat([each[..., :p].unflatten(-1, (outputs, width)).mT.flatten(-2), each[..., p:]], dim=-1)
        for each in (kernel, temporal.transpose(1, 2).flatten(1, 2), own.transpose(1, 2).flatten(1, 2))
    )  # parameters in the order of a last layer
    about_log = () if logged is None else (moves[..., : p + 1], moves[..., p + 1 :].mT)
    system = by_features if critics is None else by_kernel
    return LinearSystems(system, row_weights.double().sum(dim=1), *about_log)


def _moves(
    now: Float[Tensor, "row feature"],
    taken: Float[Tensor, "row output"],
    later: Float[Tensor, "row feature"],
    expected: Float[Tensor, "row output"],
    weights: Float[Tensor, " row"],
    discounts: Float[Tensor, " row"],
    rewards: Float[Tensor, " row"],
) -> Float[Tensor, "row column"]:
    """WZ = W(φ(x) − discount · E φ(x')) of one network, output by output, with Wr as the last column."""
    (size, width), outputs, discounts = now.shape, taken.shape[1], weights * discounts
    made = now.new_empty(size, outputs * (width + 1) + 1)
    moves = made[:, :-1].unflatten(1, (outputs, -1))
    torch.mul(taken.unsqueeze(2), (weights[:, None] * now).unsqueeze(1), out=moves[..., :width])
    moves[..., :width].addcmul_(expected.unsqueeze(2), (discounts[:, None] * later).unsqueeze(1), value=-1.0)
    moves[..., width] = weights[:, None] * taken - discounts[:, None] * expected  # constants
    made[:, -1] = weights * rewards
    return made


def _add_by_action(
    total: Float[Tensor, "output width column"],
    now: Float[Tensor, "row feature"],
    ends: list[int],
    moved: Float[Tensor, "row column"],
) -> None:
    """Add φᵀ · moved, for rows sorted by action."""
    for sums, start, end in zip(total, [0, *ends], ends, strict=False):
        sums[:-1].addmm_(now[start:end].mT, moved[start:end])
        sums[-1].add_(moved[start:end].sum(dim=0))


def critic_moments(critics: FourierFeatures, problem: EvaluationProblem) -> Float[Tensor, "critic critic"]:
    """Σ w ψψᵀ over the rows of a part of the log."""
    inputs, weights = torch.as_tensor(problem.kernel_inputs).double(), torch.as_tensor(problem.row_weights)
    blocks = zip(map(critics, inputs.split(_BLOCK)), weights.split(_BLOCK), strict=True)
    return functools.reduce(operator.add, (psi.mT @ (psi * own[:, None]) for psi, own in blocks))


def systems_of_part(
    network: StackedMLP,
    critics: FourierFeatures | None,
    resampling: Resampling,
    gamma: float,
    stops: Float[np.ndarray, " step"] | None,
    problem: EvaluationProblem,
) -> LinearSystems:
    """Last-layer sums of a part of the log. stops: as by `cut_shares`, None where no episode is cut."""
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
    sums = accumulate_systems(network, table, critics, weights.to(device), logged)
    return replace(sums, returns=returns, starts=sum_starts(network, resampling, None, problem))
