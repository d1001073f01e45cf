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
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from koffline.batches import Table
from koffline.data.columns import blocks
from koffline.jobs.cores import Tell, on_cores
from koffline.kernels import FourierFeatures
from koffline.ope.log.problem import EvaluationProblem
from koffline.ope.log.working_log import Sums
from koffline.ope.networks.last_layer import (
    PRODUCT_SECONDS,
    StartSums,
    features_agree,
    hidden_features,
    joined,
    sum_features,
    sum_starts,
)
from koffline.ope.networks.resampling import (
    Resampling,
    make_table,
    row_blocks,
    stop_probabilities,
)
from koffline.replicas import StackedMLP

_BLOCK = 8192
_SPARSE = 0.3  # share of the outputs below which sums are made output by output
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
    q and w as in `LoggedSystems`.
    """

    system: Float[Tensor, "replica critic column"]
    weight: Float[Tensor, " replica"]
    logged: LoggedSystems | None
    returns: Float[Tensor, "replica 2"] | None
    starts: StartSums


@dataclass(frozen=True, eq=False)
class _Block:
    """B rows as one network reads them.

    ``now``: features (B, h + 1) of (s, a), and ``later`` of (s', a' ~ π), each as far
    as all outputs share them. Row weights w, and products with them:
    ``weighted_rewards`` w r, ``weighted_discounts`` w · discount. ``actions``: the
    output that the logged action reads. ``next_probabilities`` (B, n): of the outputs
    under the policy.
    """

    now: Float[Tensor, "row feature"]
    later: Float[Tensor, "row feature"]
    weights: Float[Tensor, " row"]
    weighted_rewards: Float[Tensor, " row"]
    weighted_discounts: Float[Tensor, " row"]
    actions: Int[Tensor, " row"]
    next_probabilities: Float[Tensor, "row output"]

    def select(self, rows: Tensor) -> _Block:
        """The rows with these numbers."""
        return _Block(
            now=self.now[rows],
            later=self.later[rows],
            weights=self.weights[rows],
            weighted_rewards=self.weighted_rewards[rows],
            weighted_discounts=self.weighted_discounts[rows],
            actions=self.actions[rows],
            next_probabilities=self.next_probabilities[rows],
        )

    def equations(self) -> Float[Tensor, "row column"]:
        """W [Z r] with Z = φ(x) − discount · E φ(x'), output by output: (B, p + 1)."""
        width = self.now.shape[1]
        outputs = self.next_probabilities.shape[1]
        equations = self.now.new_empty(len(self.now), outputs * width + 1)
        by_output = equations[:, :-1].unflatten(1, (-1, width))  # a view
        next_terms = -self.weighted_discounts[:, None] * self.later
        torch.mul(
            self.next_probabilities.unsqueeze(2), next_terms.unsqueeze(1), out=by_output
        )
        rows = torch.arange(len(self.now))
        by_output[rows, self.actions] += self.weights[:, None] * self.now
        equations[:, -1] = self.weighted_rewards
        return equations


def accumulate_systems(
    network: StackedMLP,
    table: Table,
    critics: FourierFeatures | None,
    row_weights: Float[Tensor, "replica row"],
    is_one_step: bool = False,
) -> Float[Tensor, "replica critic column"]:
    """ψᵀW [Z r] of each network, summed over blocks of rows of positive weight; with
    last-layer parameters θ (p,) the residuals of the rows are r − Zθ.

    network: R networks, whose hidden layers give φ. table: the rows, with the policy's
    actions in the next states. critics: from kernel inputs (B, k) to ψ (B, m); None:
    the features φ, and m = p. row_weights: W of each network. is_one_step: whether no
    row of the log has a next one, so that Z = φ(x) and next rows are not read.
    """
    outputs = network.sizes[-1]
    width = network.sizes[-2] + 1
    p = outputs * width
    ones = table.rewards.new_ones(len(table), 1)
    readout = ones if table.readout is None else table.readout
    next_readout = ones if table.next_readout is None else table.next_readout
    if critics is None:
        n_critics = p
    else:
        n_critics = critics(table.compared[:1].double()).shape[1]
    # those of all networks also where only some are summed, so that sums are the same
    blocks_of_rows = list(row_blocks(network, len(table), table.draws))

    def accumulate(replicas: slice, _: Tell) -> Tensor:
        """The sums of some of the networks."""
        some_networks = network.with_flat(network.flat[replicas])
        total = torch.zeros(
            some_networks.replicas,
            n_critics,
            p + 1,
            dtype=torch.float64,
            device=table.inputs.device,
        )
        for rows in blocks_of_rows:
            add_block(total, some_networks, row_weights[replicas], rows)
        for system in total:
            _order_as_last_layer(system, outputs, is_temporal=critics is None)
        return total

    def add_block(
        total: Tensor, networks: StackedMLP, weights_of_rows: Tensor, rows: slice
    ) -> None:
        """Add the sums over a block of rows to total (R', m, p + 1)."""
        now = _features_with_constant(networks, table.inputs[rows])
        if is_one_step:
            later = now
        else:
            later = _features_with_constant(networks, table.next_inputs[rows])
        rewards = table.rewards[rows].double()
        discounts = table.discounts[rows].double()
        actions = readout[rows].argmax(dim=1)
        next_probabilities = next_readout[rows].double()
        use_outputs = _has_few_likely_outputs(next_probabilities, outputs)
        psi = None
        if critics is not None:
            psi = critics(table.compared[rows].double())
        weights_of_networks = weights_of_rows[:, rows].double()
        for replica, weights in enumerate(weights_of_networks):
            counted = weights.nonzero().squeeze(1)
            block = _Block(
                now=now[replica],
                later=later[replica],
                weights=weights,
                weighted_rewards=weights * rewards,
                weighted_discounts=weights * discounts,
                actions=actions,
                next_probabilities=next_probabilities,
            ).select(counted)
            if is_one_step:
                _add_rewards(total[replica], psi, counted, block)
            elif psi is None:
                _add_by_action(total[replica], block)
            elif use_outputs:
                _add_by_output(total[replica], psi[counted], block)
            else:
                total[replica].addmm_(psi[counted].mT, block.equations())

    sums = on_cores(
        accumulate,
        network.replicas,
        seconds=_seconds_of_pass(network, table, n_critics, is_one_step),
        agree=partial(features_agree, network, table.inputs[blocks_of_rows[0]]),
    )
    return joined(sums)


def _seconds_of_pass(
    network: StackedMLP, table: Table, n_critics: int, is_one_step: bool
) -> float:
    """About how long the sums of all networks take on one core (s)."""
    outputs = network.sizes[-1]
    parameters = network.sizes[-2] + 1
    if not is_one_step:  # those of all outputs, and not of the row's action only
        parameters *= outputs
    of_features = 2.0 * (1 + table.draws) * network.flat.shape[1]
    of_row = of_features + 2.0 * n_critics * parameters
    return len(table) * network.replicas * of_row * PRODUCT_SECONDS


def _features_with_constant(network: StackedMLP, inputs: Tensor) -> Tensor:
    """Last hidden layer with a one appended, (R, B, h + 1)."""
    return pad(hidden_features(network, inputs), (0, 1), value=1.0)


def _has_few_likely_outputs(next_probabilities: Tensor, outputs: int) -> bool:
    """Whether a row has so few outputs above its least probability that sums output by
    output are faster.

    One output for the logged action and one product for the least probability are read
    in any case.
    """
    least = next_probabilities.amin(dim=1, keepdim=True)
    above = float((next_probabilities > least).sum()) / len(next_probabilities)
    return 2.0 + above < _SPARSE * outputs


def _order_as_last_layer(system: Tensor, outputs: int, is_temporal: bool) -> None:
    """Reorder the parameters in place, from output by output to those of a last layer.

    is_temporal: whether the critics are the features, whose order changes too.
    """
    width = (system.shape[1] - 1) // outputs
    system[:, :-1] = system[:, :-1].unflatten(1, (outputs, width)).mT.flatten(1)
    if is_temporal:
        by_output = system.unflatten(0, (outputs, width))
        system.copy_(by_output.transpose(0, 1).flatten(0, 1))


def _add_by_action(total: Tensor, block: _Block) -> None:
    """Add φᵀW [Z r] to total (p, p + 1), action by action: φ is zero but for the
    action's parameters.
    """
    width = block.now.shape[1]
    for action, of_action in enumerate(total.split(width)):
        rows = (block.actions == action).nonzero().squeeze(1)
        taken = block.select(rows)
        of_action.addmm_(taken.now.mT, taken.equations())


def _add_rewards(
    total: Tensor, psi: Tensor | None, counted: Tensor, block: _Block
) -> None:
    """Add ψᵀW [φ r] to total (m, p + 1), where no row has a next one: φ is zero but for
    the action's parameters.

    psi: critics (B, m) of all rows; None: the features themselves, and m = p. counted:
    which of all rows the block holds.
    """
    width = block.now.shape[1]
    by_output = total[:, :-1].unflatten(1, (-1, width))  # a view
    for action in block.actions.unique().tolist():
        rows = (block.actions == action).nonzero().squeeze(1)
        taken = block.select(rows)
        if psi is None:
            of_critics = taken.now
            of_action = slice(action * width, (action + 1) * width)
        else:
            of_critics = psi[counted[rows]]
            of_action = slice(None)
        weighted = taken.weights[:, None] * taken.now
        by_output[of_action, action].addmm_(of_critics.mT, weighted)
        total[of_action, -1].addmv_(of_critics.mT, taken.weighted_rewards)


def _add_by_output(total: Tensor, psi: Tensor, block: _Block) -> None:
    """Add ψᵀW [Z r] to total (m, p + 1) where most actions have the least probability,
    such as zero.

    Only what exceeds the least probability is read output by output. psi: critics (B,
    m) of the rows.
    """
    width = block.now.shape[1]
    probabilities = block.next_probabilities
    least = probabilities.amin(dim=1)
    states = torch.cat([block.now, block.later])
    psi_twice = torch.cat([psi, psi])
    # shares (2B, n) of each output in Z: of the logged action, then of the policy's
    now_shares = torch.zeros_like(probabilities)
    now_shares.scatter_(1, block.actions[:, None], block.weights[:, None])
    above_least = probabilities - least[:, None]
    later_shares = -block.weighted_discounts[:, None] * above_least
    shares = torch.cat([now_shares, later_shares])
    by_output = total[:, :-1].unflatten(1, (-1, width))  # a view
    for of_output, share in zip(by_output.unbind(1), shares.mT, strict=True):
        rows = share.nonzero().squeeze(1)
        of_output.addmm_(psi_twice[rows].mT, share[rows, None] * states[rows])
    least_terms = (-block.weighted_discounts * least)[:, None] * block.later
    by_output += (psi.mT @ least_terms).unsqueeze(1)
    total[:, -1].addmv_(psi.mT, block.weighted_rewards)


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
) -> LinearSystems:
    """Last-layer sums of a part of the log.

    critics: as in `accumulate_systems`. cuts_by_step (T,): as by `cut_shares`, None
    where no episode is cut.
    """
    weights = resampling.row_weights(problem).to(network.flat.device)
    table = make_table(problem, str(weights.device))
    system = accumulate_systems(
        network, table, critics, weights, is_one_step=problem.is_one_step
    )
    logged = None
    returns = None
    if not problem.fixed_starts:
        discounted = problem.rewards * gamma**problem.steps
        if cuts_by_step is not None:
            discounted = discounted * (1.0 - stop_probabilities(problem, cuts_by_step))
        by_unit = torch.as_tensor(np.add.reduceat(discounted, problem.episode_starts))
        returns = resampling.start_weights(problem) @ by_unit
    if cuts_by_step is not None and len(list(groups_of(network))) == 1:
        logged = logged_of_part(network, resampling, gamma, cuts_by_step, problem)
    starts = sum_starts(network, resampling, None, problem)
    return LinearSystems(
        system=system,
        weight=weights.sum(dim=1),
        logged=logged,
        returns=returns,
        starts=starts,
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
    table = make_table(problem, str(network.flat.device))
    stop_probability = stop_probabilities(problem, cuts_by_step)  # (N,)
    # The behavior policy's next action is the action of the next row. After a cut there
    # is none, but such rows have weight zero.
    readout = table.readout
    next_readout = None
    if readout is not None:
        next_readout = readout.roll(-1, 0)
    next_inputs = table.inputs.roll(-1, 0)
    table = replace(table, next_inputs=next_inputs, next_readout=next_readout)
    goes_on = torch.as_tensor(1.0 - stop_probability)
    system = accumulate_systems(
        network,
        table,
        critics=None,
        row_weights=(resampling.row_weights(problem) * goes_on).to(table.inputs.device),
    )
    # Rows after which recording may have stopped; with row 0, so that there is one.
    rows = np.union1d(0, np.flatnonzero(stop_probability))
    unit = np.searchsorted(problem.episode_starts, rows, side="right") - 1
    discounted = (stop_probability * gamma**problem.steps)[rows]
    if readout is not None:
        readout = readout[rows]
    cuts = sum_features(
        network,
        inputs=table.inputs[rows].unsqueeze(1),
        readout=readout,
        weights=resampling.start_weights(problem)[..., unit],
        shares=torch.as_tensor(discounted[:, None]),
    )
    return LoggedSystems(system=system, cuts=cuts[:, :, 0])
