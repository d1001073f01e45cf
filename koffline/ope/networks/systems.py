"""Sums over rows from which last layers are solved, for all replicas: one pass in
blocks of rows.

A discrete action selects one of several outputs, so φ(x) is zero except for that
output's parameters. To save time, sums with φ are made action by action, and parameters
are ordered output by output until the end.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from koffline.batches import Table
from koffline.data.columns import blocks
from koffline.kernels import FourierFeatures
from koffline.ope.log.problem import EvaluationProblem
from koffline.ope.log.working_log import Sums
from koffline.ope.networks.last_layer import (
    StartSums,
    hidden_features,
    sum_features,
    sum_starts,
)
from koffline.ope.networks.resampling import (
    Resampling,
    make_table,
    row_blocks,
    stops_at,
)
from koffline.replicas import StackedMLP

_BLOCK = 8192
_SPARSE = 0.3  # of the outputs
# numbers in the logging policy's systems of one pass: 128 MB in float64
_MOST_LOGGED = 1 << 24


@dataclass(frozen=True, eq=False)
class LoggedSystems(Sums):
    """Sums over rows for the logging policy, with q the probability that recording
    stopped after a row.

    q as by `stops_at`; 1 at cuts. ``system (R, p, p + 1)``: φᵀW [Z r] with the log's
    next rows and weights (1 − q) w. ``cuts (R, 2, p)``: Σ q γ^t w φ, with weights of
    the episodes as in `StartSums`.
    """

    system: Float[Tensor, "replica parameter column"]
    cuts: Float[Tensor, "replica 2 parameter"]


@dataclass(frozen=True, eq=False)
class LinearSystems(Sums):
    """Sums over rows for R networks with p last-layer parameters θ, whose residuals are
    r − Zθ.

    ``system (R, m, p + 1)``: ψᵀW [Z r] for m critics ψ and row weights W. ``weight
    (R,)``: Σ w. ``starts``: sums over start states. ``logged``: None where no episode
    is cut, or too large for the same pass. ``returns (R, 2)``: Σ (1 − q) γ^t w r, with
    q and w as in `LoggedSystems`.
    """

    system: Float[Tensor, "replica critic column"]
    weight: Float[Tensor, " replica"]
    logged: LoggedSystems | None
    returns: Float[Tensor, "replica 2"] | None
    starts: StartSums


def accumulate_systems(
    network: StackedMLP,
    table: Table,
    critics: FourierFeatures | None,
    row_weights: Tensor,
) -> Float[Tensor, "replica critic column"]:
    """ψᵀW [Z r], summed over blocks of rows of positive weight. row_weights: (R, N).

    ``critics`` maps kernel inputs (B, k) to ψ (B, m); None: the features φ.
    """
    count = network.replicas
    outputs = network.sizes[-1]
    width = network.sizes[-2] + 1
    ones = table.rewards.new_ones(len(table), 1)
    p = outputs * width
    readout, expected = (
        (ones, ones) if table.readout is None else (table.readout, table.next_readout)
    )
    assert expected is not None
    if critics is None:
        size = p
    else:
        size = critics(table.compared[:1].double()).shape[1]
    total = torch.zeros(
        count, size, p + 1, dtype=torch.float64, device=table.inputs.device
    )
    for rows in row_blocks(network, len(table), table.draws):
        actions = readout[rows].argmax(dim=1)
        chances = expected[rows].double()
        inputs = table.inputs[rows], table.next_inputs[rows]
        now, later = (
            pad(hidden_features(network, each), (0, 1), value=1.0) for each in inputs
        )
        rewards = table.rewards[rows].double()
        discounts = table.discounts[rows].double()
        if critics is None:
            psi = None
        else:
            psi = critics(table.compared[rows].double())
        parts = 2.0 + float((chances > chances.amin(dim=1, keepdim=True)).sum()) / len(
            chances
        )
        for system, *states, weights in zip(
            total, now, later, row_weights[:, rows].double(), strict=True
        ):
            some = weights.nonzero().squeeze(1)
            facts = (weights, weights * rewards, -weights * discounts)
            known = [each[some] for each in (*states, *facts, actions, chances)]
            if psi is None:
                _add_by_action(system, *known)
            elif parts < _SPARSE * outputs:
                _add_by_output(system, psi[some], *known)
            else:
                system.addmm_(psi[some].mT, _moves(*known))
    for system in total:  # parameters in the order of a last layer
        system[:, :-1] = system[:, :-1].unflatten(1, (outputs, width)).mT.flatten(1)
        if critics is None:
            system.copy_(
                system.unflatten(0, (outputs, width)).transpose(0, 1).flatten(0, 1)
            )
    return total


def _moves(now: Tensor, later: Tensor, *facts: Tensor) -> Float[Tensor, "row column"]:
    """WZ = W(φ(x) − discount · E φ(x')) of one network, output by output, with Wr as
    the last column.

    now, later: features (B, h + 1). facts: w, wr and −w · discount, (B,), actions (B,)
    and probabilities of next ones (B, n).
    """
    weights, rewards, discounted, actions, chances = facts
    made = now.new_empty(len(now), chances.shape[1] * now.shape[1] + 1)
    moves = made[:, :-1].unflatten(1, (-1, now.shape[1]))
    torch.mul(
        chances.unsqueeze(2), (discounted[:, None] * later).unsqueeze(1), out=moves
    )
    moves[torch.arange(len(now)), actions] += weights[:, None] * now
    made[:, -1] = rewards
    return made


def _add_by_action(total: Tensor, *known: Tensor) -> None:
    """Add φᵀWZ and φᵀWr, action by action. known: as in `_moves`."""
    for action, sums in enumerate(total.split(known[0].shape[1])):
        rows = (known[-2] == action).nonzero().squeeze(1)
        own = [each[rows] for each in known]
        sums.addmm_(own[0].mT, _moves(*own))


def _add_by_output(
    total: Tensor, psi: Tensor, now: Tensor, later: Tensor, *facts: Tensor
) -> None:
    """Add ψᵀWZ and ψᵀWr where most actions have the least probability, such as zero;
    facts: as in `_moves`.

    Only what exceeds it is read output by output.
    """
    weights, rewards, discounted, actions, chances = facts
    least = chances.amin(dim=1)
    states = torch.cat([now, later])
    both = torch.cat([psi, psi])
    taken = torch.zeros_like(chances).scatter_(1, actions[:, None], weights[:, None])
    shares = torch.cat([taken, discounted[:, None] * (chances - least[:, None])])
    moves = total[:, :-1].unflatten(1, (-1, now.shape[1]))
    for sums, share in zip(moves.unbind(1), shares.mT, strict=True):
        rows = share.nonzero().squeeze(1)
        sums.addmm_(both[rows].mT, share[rows, None] * states[rows])
    moves += (psi.mT @ ((discounted * least)[:, None] * later)).unsqueeze(1)
    total[:, -1].addmv_(psi.mT, rewards)


def critic_moments(
    critics: FourierFeatures, problem: EvaluationProblem
) -> Float[Tensor, "critic critic"]:
    """Σ w ψψᵀ over the rows of a part of the log."""
    inputs = torch.as_tensor(problem.kernel_inputs).double()
    weights = torch.as_tensor(problem.row_weights)
    blocks = zip(map(critics, inputs.split(_BLOCK)), weights.split(_BLOCK), strict=True)
    return functools.reduce(
        operator.add, (psi.mT @ (psi * own[:, None]) for psi, own in blocks)
    )


def systems_of_part(
    network: StackedMLP,
    critics: FourierFeatures | None,
    resampling: Resampling,
    gamma: float,
    stops: Float[np.ndarray, " step"] | None,
    problem: EvaluationProblem,
) -> LinearSystems:
    """Last-layer sums of a part of the log. stops: as by `cut_shares`, None where no
    episode is cut.
    """
    weights = resampling.row_weights(problem).to(network.flat.device)
    system = accumulate_systems(
        network, make_table(problem, str(weights.device)), critics, weights
    )
    logged = returns = None
    if not problem.fixed_starts:
        stopped = 0.0 if stops is None else stops_at(problem, stops)
        discounted = problem.rewards * gamma**problem.steps * (1.0 - stopped)
        by_unit = torch.as_tensor(np.add.reduceat(discounted, problem.episode_starts))
        returns = resampling.start_weights(problem) @ by_unit
    if stops is not None and len(list(groups_of(network))) == 1:
        logged = logged_of_part(network, resampling, gamma, stops, problem)
    starts = sum_starts(network, resampling, None, problem)
    return LinearSystems(system, weights.sum(dim=1), logged, returns, starts)


def groups_of(network: StackedMLP) -> Iterator[slice]:
    """Slices of replicas whose `LoggedSystems` are small enough to be in memory
    together.
    """
    parameters = (network.sizes[-2] + 1) * network.sizes[-1]
    return blocks(network.replicas, max(1, _MOST_LOGGED // parameters**2))


def logged_of_part(
    network: StackedMLP,
    resampling: Resampling,
    gamma: float,
    stops: np.ndarray,
    problem: EvaluationProblem,
) -> LoggedSystems:
    """Sums of a part of the log for the logging policy. stops: as by `cut_shares`."""
    table = make_table(problem, str(network.flat.device))
    stopped = stops_at(problem, stops)
    if table.readout is None:
        after = None
    else:
        after = table.readout.roll(-1, 0)
    table = replace(table, next_inputs=table.inputs.roll(-1, 0), next_readout=after)
    weights = resampling.row_weights(problem) * torch.as_tensor(1.0 - stopped)
    cut = np.union1d(0, np.flatnonzero(stopped))  # never empty
    unit = np.searchsorted(problem.episode_starts, cut, side="right") - 1
    shares = torch.as_tensor((stopped * gamma**problem.steps)[cut, None])
    own = resampling.start_weights(problem)[..., unit]
    readout = table.readout
    asked = (
        table.inputs[cut].unsqueeze(1),
        None if readout is None else readout[cut],
        own,
        shares,
    )
    cuts = sum_features(network, *asked)[:, :, 0]
    return LoggedSystems(
        accumulate_systems(network, table, None, weights.to(table.inputs.device)), cuts
    )
