"""Sums over rows from which last layers are solved, for all replicas: one pass in
blocks of rows (`koffline.ope.networks.equations`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from koffline.batches import Table
from koffline.data.columns import blocks
from koffline.kernels import FourierFeatures
from koffline.ope.log.problem import EvaluationProblem
from koffline.ope.log.working_log import Sums
from koffline.ope.networks.equations import RowEquations, sum_equations
from koffline.ope.networks.last_layer import StartSums, sum_features, sum_starts
from koffline.ope.networks.resampling import (
    Resampling,
    make_table,
    stop_probabilities,
)
from koffline.replicas import StackedMLP

_BLOCK = 8192
# names of equations
SYSTEM = "system"
TEMPORAL = "temporal"
EVERY_ROW = "every row"
LOGGED = "logged"
# numbers in the behavior policy's systems of one pass: 128 MB in float64
_MOST_LOGGED = 1 << 24


@dataclass(frozen=True, eq=False)
class LoggedSystems(Sums):
    """Sums over rows for the behavior policy, with q the probability that recording
    stopped after a row.

    q as by `stop_probabilities`; 1 at cuts. ``system (R, p, p + 1)``: φᵀW [Z r] with
    the log's next rows and weights (1 − q) w. ``cuts (R, 2, p)``: Σ q γ^t w φ, with
    weights of the episodes as in `StartSums`.
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
    q and w as in `LoggedSystems`. The fields of `Further` are None if not asked for.
    ``temporal (R, p, p + 1)``: φᵀW [Z r]. ``of_every_row (R, m, p + 1)``: as
    ``system``, with the log's own weights for all networks. ``critic_moments (m, m)``:
    Σ w ψψᵀ.
    """

    system: Float[Tensor, "replica critic column"]
    weight: Float[Tensor, " replica"]
    logged: LoggedSystems | None
    returns: Float[Tensor, "replica 2"] | None
    starts: StartSums
    temporal: Float[Tensor, "replica parameter column"] | None = None
    of_every_row: Float[Tensor, "replica critic column"] | None = None
    critic_moments: Float[Tensor, "critic critic"] | None = None


@dataclass(frozen=True)
class Further:
    """Sums that some estimators need beside the systems, in the same pass over the
    log: fields of `LinearSystems`.
    """

    temporal: bool = False
    of_every_row: bool = False
    critic_moments: bool = False


NOTHING_FURTHER = Further()


def critic_moments(
    critics: FourierFeatures, problem: EvaluationProblem
) -> Float[Tensor, "critic critic"]:
    """Σ w ψψᵀ over the rows of a part of the log."""
    inputs = torch.as_tensor(problem.kernel_inputs).double()
    weights = torch.as_tensor(problem.row_weights)

    def moments_of(rows: slice) -> Tensor:
        psi = critics(inputs[rows])
        return psi.mT @ (psi * weights[rows, None])

    return functools.reduce(operator.add, map(moments_of, blocks(len(inputs), _BLOCK)))


def systems_of_part(
    network: StackedMLP,
    critics: FourierFeatures | None,
    resampling: Resampling,
    gamma: float,
    cuts_by_step: Float[np.ndarray, " step"] | None,
    problem: EvaluationProblem,
    further: Further = NOTHING_FURTHER,
) -> LinearSystems:
    """Last-layer sums of a part of the log.

    network: R networks. critics: as in `RowEquations`. resampling: how often each
    network counts an episode. gamma: discount of logged rewards. cuts_by_step (T,): as
    by `cut_shares`, None where no episode is cut. further: sums beside the systems.
    """
    weights = resampling.row_weights(problem).to(network.flat.device)
    table = make_table(problem, str(weights.device))
    equations = {SYSTEM: RowEquations(critics=critics, weights=weights)}
    if further.temporal:
        equations[TEMPORAL] = RowEquations(critics=None, weights=weights)
    if further.of_every_row:
        row_weights = torch.as_tensor(problem.row_weights).to(weights)
        of_every_row = row_weights.expand_as(weights)
        equations[EVERY_ROW] = RowEquations(critics=critics, weights=of_every_row)
    has_logged = len(list(groups_of(network))) == 1
    if cuts_by_step is not None and has_logged:
        equations[LOGGED] = _logged_equations(problem, weights, cuts_by_step)
    sums = sum_equations(network, table, equations, is_one_step=problem.is_one_step)
    logged = None
    if cuts_by_step is not None and has_logged:
        logged = LoggedSystems(
            system=sums[LOGGED],
            cuts=_sum_cuts(network, table, resampling, gamma, cuts_by_step, problem),
        )
    moments = None
    if further.critic_moments and critics is not None:
        moments = critic_moments(critics, problem)
    returns = None
    if not problem.fixed_starts:
        discounted = problem.rewards * gamma**problem.steps
        if cuts_by_step is not None:
            discounted = discounted * (1.0 - stop_probabilities(problem, cuts_by_step))
        by_unit = torch.as_tensor(np.add.reduceat(discounted, problem.episode_starts))
        returns = resampling.start_weights(problem) @ by_unit
    starts = sum_starts(network, resampling, None, problem)
    return LinearSystems(
        system=sums[SYSTEM],
        weight=weights.sum(dim=1),
        logged=logged,
        returns=returns,
        starts=starts,
        temporal=sums.get(TEMPORAL),
        of_every_row=sums.get(EVERY_ROW),
        critic_moments=moments,
    )


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
    cuts_by_step: Float[np.ndarray, " step"],
    problem: EvaluationProblem,
) -> LoggedSystems:
    """Sums of a part of the log from which last layers for the behavior policy's value
    are solved.

    network: R networks. resampling: how often each counts an episode. gamma: discount
    of the rows before a cut. cuts_by_step (T,): as by `cut_shares`.
    """
    weights = resampling.row_weights(problem).to(network.flat.device)
    table = make_table(problem, str(weights.device))
    equations = {LOGGED: _logged_equations(problem, weights, cuts_by_step)}
    sums = sum_equations(network, table, equations)
    return LoggedSystems(
        system=sums[LOGGED],
        cuts=_sum_cuts(network, table, resampling, gamma, cuts_by_step, problem),
    )


def _logged_equations(
    problem: EvaluationProblem,
    weights: Float[Tensor, "replica row"],
    cuts_by_step: Float[np.ndarray, " step"],
) -> RowEquations:
    """The behavior policy's equations, with weights (1 − q) w.

    Its next action is the action of the next row. After a cut there is none, but such
    rows have weight zero.
    """
    goes_on = torch.as_tensor(1.0 - stop_probabilities(problem, cuts_by_step))
    return RowEquations(
        critics=None, weights=weights * goes_on.to(weights), of_log=True
    )


def _sum_cuts(
    network: StackedMLP,
    table: Table,
    resampling: Resampling,
    gamma: float,
    cuts_by_step: Float[np.ndarray, " step"],
    problem: EvaluationProblem,
) -> Float[Tensor, "replica 2 parameter"]:
    """Σ q γ^t w φ over the rows after which recording may have stopped."""
    stop_probability = stop_probabilities(problem, cuts_by_step)  # (N,)
    # with row 0, so that there is one
    rows = np.union1d(0, np.flatnonzero(stop_probability))
    unit = np.searchsorted(problem.episode_starts, rows, side="right") - 1
    discounted = (stop_probability * gamma**problem.steps)[rows]
    readout = None
    if table.readout is not None:
        readout = table.readout[rows]
    cuts = sum_features(
        network,
        inputs=table.inputs[rows].unsqueeze(1),
        readout=readout,
        weights=resampling.start_weights(problem)[..., unit],
        shares=torch.as_tensor(discounted[:, None]),
    )
    return cuts[:, :, 0]
