"""Variable projection: networks whose last layer is solved exactly while the hidden layers follow a gradient.

The kernel loss is quadratic in the last layer θ. With θ at its minimum the loss is a function of the hidden
layers W alone, J(W) = min_θ L(W, θ), and by the envelope theorem its gradient is that of L with θ held
still: nothing is differentiated through the solve.
(Golub & Pereyra 1973, for nonlinear least squares)
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from koffline.batches import BatchSchedule, ReplicaPlan, Table
from koffline.errors import ConfigError
from koffline.fitting import Progress, threads
from koffline.kernel_loss import check_diag_weight
from koffline.replicas import StackedMLP
from koffline.solvers.closed_form import LinearValue, solve_kernel_loss
from koffline.solvers.features import UnitBox
from koffline.solvers.forms import KernelMap, ResidualForms
from koffline.solvers.last_layer import last_layer_features, with_last_layer
from koffline.solvers.linear import as_double, free_parameters
from koffline.solvers.quadratic import RidgePath, check_ridge
from koffline.steps import StackedAdam

_MOST_NUMBERS = 1 << 25


@dataclass(frozen=True)
class ProjectionSettings:
    """steps: gradient steps of the hidden layers. batch_size: rows whose loss a step solves and descends;
    many more than the last layer has weights, or each step fits its own noise. ridge, diag_weight: as in
    `solve_kernel_loss`. The learning rates are the plan's and fall to zero by a cosine.
    """

    steps: int = 500
    batch_size: int = 1000
    ridge: float = 1e-4
    diag_weight: float | None = None
    record_every: int = 10
    threads: int = 1

    def __post_init__(self) -> None:
        for name in ("steps", "record_every", "threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give a positive whole number")
        if self.batch_size < 2:
            raise ConfigError(f"batch_size is {self.batch_size}; give at least 2 rows")
        check_ridge(self.ridge)
        if self.diag_weight is not None:
            check_diag_weight(self.diag_weight)


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
        blank = torch.full((len(rows),), math.nan, dtype=torch.float64, device=rows.device)
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
    parameters = difference.shape[-1]
    free = free_parameters(parameters, network.sizes[-1]).to(psi.device)
    theta = RidgePath(loss.detach(), free).solve(ridge).weights
    penalty = ridge * loss.ridge_scale(free) * theta[:, ~free].square().sum(dim=-1)
    return loss.at(theta) + penalty, theta


def fit_variable_projection(
    table: Table,
    network: StackedMLP,
    kernel: KernelMap,
    plan: ReplicaPlan,
    settings: ProjectionSettings | None = None,
    *,
    progress: Progress | None = None,
) -> ProjectedNetworks:
    """Train copies of `network`'s replicas; all arithmetic in float64.

    kernel: a feature map ψ of the kernel (`random_fourier_features`). Row sets of the plan decide the rows of
    a replica, for the final solve too. Raises ConfigError when plan and network do not fit.
    """
    settings = settings or ProjectionSettings()
    if network.replicas != len(plan):
        raise ConfigError(f"network has {network.replicas} replicas, the plan {len(plan)}; make them equal")
    started = time.perf_counter()
    with threads(settings.threads):
        run = _Projection(table.to(table.inputs.device, torch.float64), network, kernel, plan, settings)
        for step in range(settings.steps):
            run.update(step)
            if progress is not None and (step + 1) % settings.record_every == 0:
                progress.update(step + 1, settings.steps, run.last_loss())
        return run.finish(started)


class _Projection:
    """The state of one fit."""

    def __init__(
        self,
        table: Table,
        network: StackedMLP,
        kernel: KernelMap,
        plan: ReplicaPlan,
        settings: ProjectionSettings,
    ) -> None:
        self._table, self._kernel, self._plan, self._settings = table, kernel, plan, settings
        # The last layer is solved: a fixed scale or offset of the outputs has nothing left to do.
        self._network = StackedMLP(network.sizes, network.flat.detach().double().clone(), network.activation)
        device = table.inputs.device
        self._batch_size = min(settings.batch_size, len(table))
        self._schedule = BatchSchedule(plan, len(table), self._batch_size, device=device)
        flat = self._network.flat
        self._adam = StackedAdam(flat)
        self._unit = flat.new_ones(len(flat), 1)  # losses of the first step: Adam's ε knows no units
        self._rates = torch.tensor(plan.learning_rates, dtype=flat.dtype, device=device)[:, None]
        self._group_of = torch.tensor(plan.group_of)
        self._whole = self._batch_size == len(table) and not plan.row_sets
        self._psi = self._features(table) if self._whole else None
        self._diverged_at: list[int | None] = [None] * len(plan)
        self._recent: list[Tensor] = []
        self._losses: list[Tensor] = []
        self._loss_steps: list[int] = []

    def update(self, step: int) -> None:
        """One step of Adam on the hidden layers of every replica."""
        flat = self._network.flat
        gradient, losses = torch.zeros_like(flat), flat.new_full((len(flat),), math.nan)
        for replicas, part, psi in self._batches(step):
            leaf = flat[replicas].clone().requires_grad_()
            network = StackedMLP(self._network.sizes, leaf, self._network.activation)
            loss, _ = reduced_loss(network, part, psi, self._settings.ridge, self._settings.diag_weight)
            (gradient[replicas],) = torch.autograd.grad(loss.sum(), leaf)
            losses[replicas] = loss.detach()
        if step == 0:
            self._unit = losses.abs().clamp_min(torch.finfo(losses.dtype).tiny)[:, None]
        gradient /= self._unit
        factor = 0.5 * (1.0 + math.cos(math.pi * step / self._settings.steps))
        self._adam.update(flat, gradient, self._rates * factor)
        self._record(step, losses)

    def last_loss(self) -> float:
        """Median over replicas of the last record."""
        return float(self._losses[-1].nanmedian()) if self._losses else math.nan

    def finish(self, started: float) -> ProjectedNetworks:
        """Solve the last layers on all rows."""
        solutions = [self._solve(replica) for replica in range(len(self._plan))]
        width = (self._network.sizes[-2] + 1) * self._network.sizes[-1]
        blank = self._network.flat.new_full((width,), math.nan)
        theta = torch.stack([blank if one is None else one.weights for one in solutions])
        return ProjectedNetworks(
            network=with_last_layer(self._network, theta),
            solutions=tuple(solutions),
            losses=torch.stack(self._losses),
            loss_steps=tuple(self._loss_steps),
            diverged_at=tuple(self._diverged_at),
            seconds=time.perf_counter() - started,
        )

    def _batches(self, step: int) -> list[tuple[Tensor, Table, Tensor]]:
        """Replicas of each group of mini-batches, their rows and ψ."""
        if self._psi is not None:
            return [(torch.arange(len(self._plan)), self._table, self._psi)]
        batches = []
        for group, rows in enumerate(self._schedule.rows(step)):
            part = self._table.select(rows)
            batches.append((torch.nonzero(self._group_of == group).flatten(), part, self._features(part)))
        return batches

    def _features(self, part: Table) -> Tensor:
        inputs = part.inputs if part.kernel_inputs is None else part.kernel_inputs
        return self._kernel(inputs)

    def _record(self, step: int, losses: Tensor) -> None:
        for replica in torch.nonzero(~torch.isfinite(losses)).flatten().tolist():
            if self._diverged_at[replica] is None:
                self._diverged_at[replica] = step
            self._network.flat[replica] = math.nan
        self._recent.append(losses)
        if (step + 1) % self._settings.record_every == 0 or step + 1 == self._settings.steps:
            self._losses.append(torch.stack(self._recent).mean(dim=0).cpu())
            self._loss_steps.append(step + 1)
            self._recent = []

    def _solve(self, replica: int) -> LinearValue | None:
        if not bool(torch.isfinite(self._network.flat[replica]).all()):
            return None
        network = self._network.select([replica])
        table = self._table
        if self._plan.row_sets:
            table = table.select(self._plan.row_sets[self._plan.row_set_of[replica]])
        return solve_kernel_loss(
            table,
            lambda x: network.features(x)[0],
            self._kernel,
            ridge=self._settings.ridge,
            diag_weight=self._settings.diag_weight,
        )
