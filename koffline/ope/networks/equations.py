"""Linear equations of the rows for the last layers of all replicas, summed in one pass
in blocks of rows.

A network is linear in its last layer θ, so its residuals are r − Zθ with Z = φ(x) −
discount · E φ(x'), and a system is ψᵀW [Z r] for critics ψ and row weights W. Several
systems of the same networks share the pass: the features of a block are computed once.

Features stand as columns, (R, h + 1, B): products of many small networks take two
thirds of the time so, and what a row is multiplied by lies along the fast axis. A
discrete action selects one of n outputs, so φ(x) is zero except for that output's
parameters. Sums are made output by output, and parameters are ordered output by output
until the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from koffline.batches import Table
from koffline.jobs.cores import PRODUCT_SECONDS, Tell, on_cores
from koffline.kernels import FourierFeatures
from koffline.ope.networks.last_layer import joined
from koffline.ope.networks.resampling import row_blocks
from koffline.replicas import StackedMLP

_SPARSE = 0.3  # share of the outputs below which sums are made output by output
_ALIGNED = 8  # numbers of a cache line
# Rows by which groups of networks are compared with all of them: too many for products
# of another routine (see `koffline.jobs.cores`), and few beside a log.
_COMPARED_ROWS = 128
Columns = Float[Tensor, "replica feature row"]


@dataclass(frozen=True, eq=False)
class RowEquations:
    """Which equations of the rows are summed.

    critics: from kernel inputs (B, k) to ψ (B, m); None: the features φ, and m = p.
    weights: W of each network and row. of_log: whether the next row is that of the log,
    whose value is the behavior policy's, else the policy's draws. A row that no other
    one follows must then have weight or discount zero.
    """

    critics: FourierFeatures | None
    weights: Float[Tensor, "replica row"]
    of_log: bool = False


@dataclass(frozen=True, eq=False)
class _Block:
    """B rows as R networks read them.

    ``now``: features (R, h + 1, B) of (s, a), and ``later`` of (s', a'), each as far as
    all outputs share them. ``psi`` (B, m): critics; None for the features. ``actions``
    (B,): the output that the logged action reads. ``next_probabilities`` (B, n): of the
    outputs in the next state. ``weights`` (R, 1, B).
    """

    now: Columns
    later: Columns
    psi: Float[Tensor, "row critic"] | None
    weights: Float[Tensor, "replica 1 row"]
    rewards: Float[Tensor, " row"]
    discounts: Float[Tensor, " row"]
    actions: Int[Tensor, " row"]
    next_probabilities: Float[Tensor, "row output"]

    @property
    def outputs(self) -> int:
        """Number n of outputs of a network."""
        return self.next_probabilities.shape[1]

    def critics(self, rows: Tensor | slice) -> Float[Tensor, "replica row critic"]:
        """ψ of some rows for each network, or their features."""
        if self.psi is None:
            return self.now[..., rows].mT
        return self.psi[rows].expand(len(self.now), -1, -1)

    def taken(self, action: int) -> Int[Tensor, " row"]:
        """Numbers of the rows with this logged action, filled up by `filled`."""
        return self.filled((self.actions == action).nonzero().squeeze(1))

    def filled(self, rows: Int[Tensor, " row"]) -> Int[Tensor, " filled"]:
        """Row numbers filled up to a multiple of a cache line by the block's last row,
        which has weight zero.
        """
        missing = -len(rows) % _ALIGNED
        return pad(rows, (0, missing), value=self.now.shape[2] - 1)

    def terms(
        self, outputs: slice, rows: Tensor | slice
    ) -> Float[Tensor, "replica output feature row"]:
        """W Zᵀ of the parameters of some outputs in some rows, (R, n', h + 1, B')."""
        now = self.now[..., rows].unsqueeze(1)
        later = self.later[..., rows].unsqueeze(1)
        later_shares = -self.discounts[:, None] * self.next_probabilities[:, outputs]
        terms = later * later_shares[rows].mT.unsqueeze(1)
        if self.outputs == 1:
            terms += now
        else:
            every = torch.arange(self.outputs, device=self.actions.device)
            numbers = every[outputs, None]
            is_taken = (self.actions[rows] == numbers).to(terms)  # (n', B')
            terms.addcmul_(now, is_taken.unsqueeze(1))
        return terms.mul_(self.weights[..., rows].unsqueeze(1))


def sum_equations(
    network: StackedMLP,
    table: Table,
    equations: Mapping[str, RowEquations],
    is_one_step: bool = False,
) -> dict[str, Float[Tensor, "replica critic column"]]:
    """ψᵀW [Z r] of each network and of each of the equations, by name, summed over
    blocks of rows; with last-layer parameters θ (p,) the residuals of the rows are
    r − Zθ.

    network: R networks, whose hidden layers give φ. table: the rows, with the policy's
    actions in the next states; where next rows are the log's, its rows in their order.
    is_one_step: whether no row of the log has a next one, so that Z = φ(x) and next
    rows are not read.
    """
    kinds = list(equations.values())
    # those of all networks also where only some are summed, so that sums are the same
    blocks_of_rows = list(row_blocks(network, len(table)))
    in_double = network.with_flat(network.flat.double())

    def sum_blocks(replicas: slice, rows_of_blocks: list[slice]) -> list[Tensor]:
        """Sums (R', p + 1, m) of some of the networks, parameters before critics."""
        some_networks = in_double.with_flat(in_double.flat[replicas])
        reader = _BlockReader(some_networks, table, kinds, replicas, is_one_step)
        totals = reader.zeros()
        for rows in rows_of_blocks:
            for total, block in zip(totals, reader.blocks(rows), strict=True):
                _add_block(total, block, is_one_step)
        return totals

    def accumulate(replicas: slice, _: Tell) -> list[Tensor]:
        """The systems (R', m, p + 1) of some of the networks."""
        totals = sum_blocks(replicas, blocks_of_rows)
        outputs = network.sizes[-1]
        return [
            _order_as_last_layer(total, outputs, is_temporal=wanted.critics is None)
            for total, wanted in zip(totals, kinds, strict=True)
        ]

    def agree(groups: list[slice]) -> bool:
        """Whether groups of networks give the digits of all, by some rows."""
        first = [slice(0, min(blocks_of_rows[0].stop, _COMPARED_ROWS))]
        of_all = sum_blocks(slice(0, network.replicas), first)
        for group in groups:
            of_group = sum_blocks(group, first)
            for part, whole in zip(of_group, of_all, strict=True):
                if not torch.equal(part, whole[group]):
                    return False
        return True

    pieces = on_cores(
        accumulate,
        network.replicas,
        seconds=_products(network, table, kinds, is_one_step) * PRODUCT_SECONDS,
        agree=agree,
    )
    return {
        name: joined([piece[number] for piece in pieces])
        for number, name in enumerate(equations)
    }


def accumulate_systems(
    network: StackedMLP,
    table: Table,
    critics: FourierFeatures | None,
    row_weights: Float[Tensor, "replica row"],
    is_one_step: bool = False,
) -> Float[Tensor, "replica critic column"]:
    """`sum_equations` of the policy's equations by one kind of critics.

    critics, row_weights: as in `RowEquations`.
    """
    name = "system"
    equations = {name: RowEquations(critics=critics, weights=row_weights)}
    return sum_equations(network, table, equations, is_one_step)[name]


class _BlockReader:
    """Reads blocks of a table's rows, for each of the equations, by networks in
    float64.

    replicas: which of the equations' weights the networks have.
    """

    def __init__(
        self,
        network: StackedMLP,
        table: Table,
        equations: Sequence[RowEquations],
        replicas: slice,
        is_one_step: bool,
    ) -> None:
        self._network = network
        self._table = table
        self._equations = equations
        self._replicas = replicas
        self._reads_policy = not is_one_step and not all(
            wanted.of_log for wanted in equations
        )
        self._reads_log = any(wanted.of_log for wanted in equations)

    def zeros(self) -> list[Float[Tensor, "replica column critic"]]:
        """Sums over no rows, one for each of the equations."""
        network = self._network
        p = network.sizes[-1] * (network.sizes[-2] + 1)
        totals = []
        for wanted in self._equations:
            critics = p
            if wanted.critics is not None:
                critics = 2 * wanted.critics.frequencies.shape[1]
            totals.append(network.flat.new_zeros(network.replicas, p + 1, critics))
        return totals

    def blocks(self, rows: slice) -> list[_Block]:
        """The rows as each of the equations reads them; features are computed once.

        They are filled up by one or more rows of weight zero, so that the arrays of
        every network begin at the same place of a cache line, on which the last digits
        of a product depend.
        """
        table = self._table
        count = math.ceil((rows.stop - rows.start + 1) / _ALIGNED) * _ALIGNED
        numbers = torch.arange(rows.start, rows.start + count) % len(table)
        # the first row stands after the last one
        next_numbers = (numbers + 1) % len(table)
        ones = table.rewards.new_ones(count, 1).double()
        actions = torch.zeros(count, dtype=torch.int64)
        next_probabilities = ones
        if table.readout is not None and table.next_readout is not None:
            actions = table.readout[numbers].argmax(dim=1)
            next_probabilities = table.next_readout[numbers].double()
        read = numbers
        if self._reads_log:
            read = torch.cat([numbers, next_numbers[-1:].expand(_ALIGNED)])
        # in single precision, a row's features depend on the other rows of its block
        features = self._network.feature_columns(table.inputs[read].double())
        now = features[..., :count]
        later = now
        if self._reads_policy:
            later = self._mean_over_draws(numbers)
        psi_of: dict[FourierFeatures, Tensor] = {}
        blocks = []
        for wanted in self._equations:
            psi = None
            if wanted.critics is not None:
                if wanted.critics not in psi_of:
                    compared = table.compared[numbers].double()
                    psi_of[wanted.critics] = wanted.critics(compared)
                psi = psi_of[wanted.critics]
            next_rows = later
            probabilities = next_probabilities
            if wanted.of_log:
                next_rows = features[..., 1 : count + 1]
                if table.readout is not None:
                    probabilities = table.readout[next_numbers].double()
            weights = wanted.weights[self._replicas, rows].double()
            filled = pad(weights, (0, count - weights.shape[1])).unsqueeze(1)
            blocks.append(
                _Block(
                    now=now,
                    later=next_rows,
                    psi=psi,
                    weights=filled,
                    rewards=table.rewards[numbers].double(),
                    discounts=table.discounts[numbers].double(),
                    actions=actions,
                    next_probabilities=probabilities,
                )
            )
        return blocks

    def _mean_over_draws(self, rows: Tensor) -> Columns:
        """Features of next rows, averaged over the draws of the policy's actions."""
        inputs = self._table.next_inputs[rows].double()
        if inputs.ndim == 2:
            return self._network.feature_columns(inputs)
        total = self._network.feature_columns(inputs[:, 0])
        for draw in range(1, inputs.shape[1]):
            total += self._network.feature_columns(inputs[:, draw])
        return total / inputs.shape[1]


def _products(
    network: StackedMLP,
    table: Table,
    equations: Sequence[RowEquations],
    is_one_step: bool,
) -> float:
    """Rough number of multiplications and additions of a pass."""
    width = network.sizes[-2] + 1
    p = width * network.sizes[-1]
    of_row = 2.0 * (1 + table.draws) * network.flat.shape[1]
    for wanted in equations:
        critics = width  # of the action's output
        if wanted.critics is not None:
            critics = 2 * wanted.critics.frequencies.shape[1]
        parameters = p
        if is_one_step:
            parameters = width  # of one output a row
        of_row += 2.0 * critics * parameters
    return of_row * len(table) * network.replicas


def _add_block(total: Tensor, block: _Block, is_one_step: bool) -> None:
    """Add (ψᵀW [Z r])ᵀ of a block of rows to total (R, p + 1, m)."""
    if is_one_step:
        _add_without_next_rows(total, block)
    elif block.psi is None:
        _add_by_action(total, block)
    elif _has_few_likely_outputs(block.next_probabilities):
        _add_by_output(total, block)
    else:
        _add_by_critics(total, block)


def _has_few_likely_outputs(next_probabilities: Float[Tensor, "row output"]) -> bool:
    """Whether a row has so few outputs above its least probability that sums output by
    output are faster.

    One output for the logged action and one product for the least probability are read
    in any case.
    """
    rows, outputs = next_probabilities.shape
    least = next_probabilities.amin(dim=1, keepdim=True)
    above = float((next_probabilities > least).sum()) / rows
    return 2.0 + above < _SPARSE * outputs


def _by_output(total: Tensor, outputs: int) -> Tensor:
    """The sums of Z without those of r, by output: a view (R, n, h + 1, m)."""
    return total[:, :-1].unflatten(1, (outputs, -1))


def _add_by_critics(total: Tensor, block: _Block) -> None:
    """Add one product for each output to total (R, p + 1, m)."""
    every_row = slice(None)
    psi = block.critics(every_row)
    for output, of_output in enumerate(_by_output(total, block.outputs).unbind(1)):
        terms = block.terms(slice(output, output + 1), every_row)
        of_output.baddbmm_(terms.squeeze(1), psi)
    total[:, -1:].baddbmm_(block.weights * block.rewards, psi)


def _add_by_output(total: Tensor, block: _Block) -> None:
    """Add to total (R, p + 1, m) where most actions have the least probability, such as
    zero.

    Only what exceeds the least probability is read output by output.
    """
    psi = block.critics(slice(None))
    least = block.next_probabilities.amin(dim=1)
    above_least = block.next_probabilities - least[:, None]
    now = block.now * block.weights
    later = block.later * (block.weights * -block.discounts)
    by_output = _by_output(total, block.outputs)
    for output, of_output in enumerate(by_output.unbind(1)):
        rows = block.taken(output)
        of_output.baddbmm_(now[..., rows], psi[:, rows])
        share = above_least[:, output]
        rows = block.filled(share.nonzero().squeeze(1))
        of_output.baddbmm_(later[..., rows] * share[rows], psi[:, rows])
    by_output += ((later * least) @ psi).unsqueeze(1)
    total[:, -1:].baddbmm_(block.weights * block.rewards, psi)


def _add_by_action(total: Tensor, block: _Block) -> None:
    """Add to total (R, p + 1, p) where the critics are the features, action by action:
    they are zero but for the action's parameters.
    """
    width = block.now.shape[1]
    # few rows at once, so that terms of all outputs take the memory of a block
    at_once = _ALIGNED * math.ceil(block.now.shape[2] / block.outputs / _ALIGNED)
    for action, of_action in enumerate(total.split(width, dim=2)):
        parts: tuple[Tensor | slice, ...] = (slice(None),)
        if block.outputs > 1:
            parts = block.taken(action).split(at_once)
        for rows in parts:
            psi = block.critics(rows)
            terms = block.terms(slice(None), rows).flatten(1, 2)
            of_action[:, :-1].baddbmm_(terms, psi)
            rewards = block.weights[..., rows] * block.rewards[rows]
            of_action[:, -1:].baddbmm_(rewards, psi)


def _add_without_next_rows(total: Tensor, block: _Block) -> None:
    """Add (ψᵀW [φ r])ᵀ to total (R, p + 1, m): φ is zero but for the action's
    parameters.
    """
    width = block.now.shape[1]
    by_output = _by_output(total, block.outputs)
    for action in block.actions.unique().tolist():
        rows = block.taken(action)
        of_critics: Tensor | slice = slice(None)
        if block.psi is None:
            of_critics = slice(action * width, (action + 1) * width)
        psi = block.critics(rows)
        weights = block.weights[..., rows]
        of_action = by_output[:, action, :, of_critics]
        of_action.baddbmm_(block.now[..., rows] * weights, psi)
        of_rewards = total[:, -1:, of_critics]
        of_rewards.baddbmm_(weights * block.rewards[rows], psi)


def _order_as_last_layer(
    total: Float[Tensor, "replica column critic"], outputs: int, is_temporal: bool
) -> Float[Tensor, "replica critic column"]:
    """Turn sums (R, p + 1, m), whose parameters stand output by output, into systems
    (R, m, p + 1) with the parameters of a last layer, in the same memory.

    is_temporal: whether the critics are the features, whose order changes too.
    """
    replicas, columns, critics = total.shape
    for of_network in total:
        ordered = of_network.new_empty(critics, columns)
        by_output = _by_output(of_network[None], outputs)[0]  # (n, h + 1, m)
        ordered[:, :-1] = by_output.permute(2, 1, 0).flatten(1)
        ordered[:, -1] = of_network[-1]
        if is_temporal:
            ordered = ordered.unflatten(0, (outputs, -1)).transpose(0, 1)
        of_network.view(-1).copy_(ordered.flatten())
    return total.view(replicas, critics, columns)
