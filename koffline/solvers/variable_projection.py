"""Variable projection: networks whose last layer is solved exactly while the hidden layers follow a gradient.

The kernel loss is quadratic in the last layer θ. With θ at its minimum the loss is a function of the hidden
layers W alone, J(W) = min_θ L(W, θ), and by the envelope theorem its gradient is that of L with θ held
still: nothing is differentiated through the solve.
(Golub & Pereyra 1973, for nonlinear least squares)
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from koffline.batches import BatchSchedule, ReplicaPlan, Table
from koffline.errors import ConfigError
from koffline.fitting import threads
from koffline.replicas import StackedMLP
from koffline.solvers.closed_form import LinearValue, solve_kernel_loss
from koffline.solvers.features import UnitBox
from koffline.solvers.linear import (
    KernelMap,
    as_double,
    free_parameters,
    kernel_inputs,
    last_layer_features,
    with_last_layer,
)
from koffline.solvers.quadratic import ResidualForms, RidgePath
from koffline.steps import StackedAdam


@dataclass(frozen=True, eq=False)
class ProjectedNetworks:
    """R trained networks, the last layer solved on all rows; a replica that diverged is NaN.

    solutions: the last layers as linear value functions, None where diverged. losses (K, R): mean reduced
    loss, ridge included, over the steps up to `loss_steps` (K,). diverged_at: the step per replica, or None.
    scale: applied to inputs before the networks.
    """

    network: StackedMLP
    solutions: tuple[LinearValue | None, ...]
    losses: Float[Tensor, "record replica"]
    loss_steps: tuple[int, ...]
    diverged_at: tuple[int | None, ...]
    seconds: float
    scale: UnitBox | None = None

    @torch.no_grad()
    def values(self, inputs: Any, readout: Any = None) -> Float[Tensor, "replica row"]:
        """Values (R, M) float64 of rows (M, d); readout (M, n) for Q functions."""
        rows = as_double(inputs, self.network.flat.device)
        rows = rows if self.scale is None else self.scale(rows)
        blank = rows.new_full((len(rows),), math.nan)
        return torch.stack([blank if one is None else one.values(rows, readout) for one in self.solutions])


def reduced_loss(
    network: StackedMLP,
    table: Table,
    psi: Float[Tensor, "row instrument"],
    ridge: float,
    diag_weight: float | None = None,
) -> tuple[Float[Tensor, " replica"], Float[Tensor, "replica parameter"]]:
    """J(W) = min_θ L(W, θ) + λ(W)‖θ‖² on all rows of the table, and the minimising θ (detached).

    Differentiable in ``network.flat``; ψ (N, m) are the kernel's features of the rows. λ is `ridge` times
    the mean curvature, so it depends on W too and its gradient is part of J's.
    """
    now = last_layer_features(network, table.inputs, table.readout)  # (R, N, p)
    later = last_layer_features(network, table.next_inputs, table.next_readout)
    difference = now - table.discounts.double()[:, None] * later
    rewards = table.rewards.double()[:, None].expand(*difference.shape[:2], 1)
    columns = torch.cat((difference, rewards), dim=-1)  # A = [Z, r], (R, N, p + 1)
    projected = psi.mT @ columns  # (m, N) @ (R, N, p + 1)
    total = projected.mT @ projected
    own = total  # unused by the V-statistic
    if diag_weight is not None:
        own = columns.mT @ (columns * psi.square().sum(dim=1, keepdim=True))
    count = float(len(table))
    loss = ResidualForms(total, own, own, count, count).loss(diag_weight)
    free = free_parameters(difference.shape[-1], network.sizes[-1]).to(psi.device)
    theta = RidgePath(loss.detach(), free).solve(ridge).weights
    penalty = ridge * loss.ridge_scale(free) * theta[:, ~free].square().sum(dim=-1)
    return loss.at(theta) + penalty, theta


def fit_variable_projection(
    table: Table,
    network: StackedMLP,
    kernel: KernelMap,
    plan: ReplicaPlan,
    *,
    steps: int = 500,
    batch_size: int = 1000,
    ridge: float = 1e-4,
    diag_weight: float | None = None,
    record_every: int = 10,
) -> ProjectedNetworks:
    """Train copies of `network`'s replicas; all arithmetic in float64.

    kernel: a feature map ψ of the kernel (`random_fourier_features`). Row sets of the plan decide the rows of
    a replica, for the final solve too. steps: gradient steps of the hidden layers, at the plan's learning
    rates, which fall to zero by a cosine. batch_size: rows whose loss a step solves and descends; many more
    than the last layer has weights, or each step fits its own noise. ridge, diag_weight: as in
    `solve_kernel_loss`. Raises ConfigError when plan and network do not fit.
    """
    if network.replicas != len(plan):
        raise ConfigError(f"network has {network.replicas} replicas, the plan {len(plan)}; make them equal")
    started, table = time.perf_counter(), table.to(table.inputs.device, torch.float64)
    # The last layer is solved: a fixed scale or offset of the outputs has nothing left to do.
    network = StackedMLP(network.sizes, network.flat.detach().double().clone(), network.activation)
    flat = network.flat
    rates = flat.new_tensor(plan.learning_rates)[:, None]
    adam, unit = StackedAdam(flat), torch.ones_like(rates)
    diverged_at: list[int | None] = [None] * len(plan)
    losses = flat.new_zeros(steps, len(plan))
    with threads(1):
        batches = _batches(table, kernel, plan, batch_size)
        for step in range(steps):
            gradient = torch.zeros_like(flat)
            for replicas, part, psi in next(batches):
                leaf = flat[replicas].clone().requires_grad_()
                moving = StackedMLP(network.sizes, leaf, network.activation)
                loss, _ = reduced_loss(moving, part, psi, ridge, diag_weight)
                (gradient[replicas],) = torch.autograd.grad(loss.sum(), leaf)
                losses[step, replicas] = loss.detach()
            if step == 0:  # losses of the first step: Adam's ε knows no units
                unit = losses[0].abs().clamp_min(torch.finfo(losses.dtype).tiny)[:, None]
            adam.update(flat, gradient / unit, rates * (0.5 * (1.0 + math.cos(math.pi * step / steps))))
            for replica in torch.nonzero(~torch.isfinite(losses[step])).flatten().tolist():
                diverged_at[replica] = step if diverged_at[replica] is None else diverged_at[replica]
                flat[replica] = math.nan
        solutions = [
            _solve(network.select([replica]), _rows_of(table, plan, replica), kernel, ridge, diag_weight)
            for replica in range(len(plan))
        ]
    blank = flat.new_full(((network.sizes[-2] + 1) * network.sizes[-1],), math.nan)
    theta = torch.stack([blank if one is None else one.weights for one in solutions])
    return ProjectedNetworks(
        network=with_last_layer(network, theta),
        solutions=tuple(solutions),
        losses=torch.stack([part.mean(dim=0) for part in losses.split(record_every)]).cpu(),
        loss_steps=tuple(min(start + record_every, steps) for start in range(0, steps, record_every)),
        diverged_at=tuple(diverged_at),
        seconds=time.perf_counter() - started,
    )


def _batches(
    table: Table, kernel: KernelMap, plan: ReplicaPlan, batch_size: int
) -> Iterator[list[tuple[Tensor, Table, Tensor]]]:
    """For each step the replicas of each group of mini-batches, their rows and ψ."""
    batch_size, step = min(batch_size, len(table)), 0
    if batch_size == len(table) and not plan.row_sets:
        whole = [(torch.arange(len(plan)), table, kernel(kernel_inputs(table)))]
        while True:
            yield whole
    schedule = BatchSchedule(plan, len(table), batch_size, device=table.inputs.device)
    groups = torch.tensor(plan.group_of)
    while True:
        parts = [table.select(rows) for rows in schedule.rows(step)]
        yield [
            (torch.nonzero(groups == group).flatten(), part, kernel(kernel_inputs(part)))
            for group, part in enumerate(parts)
        ]
        step += 1


def _rows_of(table: Table, plan: ReplicaPlan, replica: int) -> Table:
    return table.select(plan.row_sets[plan.row_set_of[replica]]) if plan.row_sets else table


def _solve(
    network: StackedMLP, table: Table, kernel: KernelMap, ridge: float, diag_weight: float | None
) -> LinearValue | None:
    """The last layer of one network on all of its rows; None where it diverged."""
    if not bool(torch.isfinite(network.flat).all()):
        return None
    return solve_kernel_loss(
        table, lambda x: network.features(x)[0], kernel, ridge=ridge, diag_weight=diag_weight
    )
