"""What is measured of value networks while they train: errors against both truths, Bellman error, losses.

And networks with an output offset of their own, which the ablation compares with those without.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from koffline.bellman import state_value_residual
from koffline.envs.boxes import to_unit_square
from koffline.experiments.problem import GAMMA, Problem
from koffline.kernel_loss import u_statistic
from koffline.kernels import Gaussian, Kernel
from koffline.replicas import StackedMLP, StackedModule, StackedNetwork

NAMES = ("mse_monte_carlo", "mse_paper", "bellman_error", "kernel_loss", "l2_loss", "largest_value")
_JUDGE = Gaussian(0.5)  # one kernel judges all methods and settings
_LOSS_ROWS = 2000


class Metrics:
    """Callable as a probe of `fitting.fit`: (step, network) -> (R, len(NAMES)), in native reward units.

    The errors against Monte Carlo are free of the noise of the truth (its mean squared standard error is
    taken off); the squared Bellman error is unbiased and may be slightly negative.
    """

    def __init__(self, problem: Problem, reward_scale: float, kernel: Kernel | None = None) -> None:
        world = problem.world
        self._scale, self._noise = reward_scale, problem.monte_carlo.noise
        self._table = problem.log.table(world, 1.0)
        self._truths = [to_tensor(t.values) for t in (problem.monte_carlo, problem.paper)]
        self._gram = (kernel or _JUDGE).gram(self._table.inputs[:_LOSS_ROWS])
        backups = problem.backups
        self._backup_states = to_tensor(to_unit_square(world, backups.states))
        flat = backups.next_states.reshape(-1, 2)
        self._backup_next = to_tensor(to_unit_square(world, flat))
        self._backup_rewards = to_tensor(backups.rewards)
        self._backup_discounts = to_tensor(GAMMA * ~backups.terminated)
        self._backup_weights = to_tensor(backups.weights)

    def __call__(self, step: int, network: StackedNetwork) -> Tensor:
        """(R, len(NAMES)); NaN for replicas that diverged."""
        value = self._values(network, self._table.inputs)
        errors = [(value - truth).square().mean(dim=1) for truth in self._truths]
        errors[0] = errors[0] - self._noise
        rows = slice(0, _LOSS_ROWS)
        following = self._values(network, self._table.next_inputs[rows])
        residual = state_value_residual(
            self._table.rewards[rows].expand_as(following),
            self._table.discounts[rows].expand_as(following),
            value[:, rows],
            following,
        )
        kernel = ((residual @ self._gram) * residual).mean(dim=1) / residual.shape[1]
        largest = value.abs().amax(dim=1)
        columns = (*errors, self._bellman_error(network), kernel, residual.square().mean(dim=1), largest)
        return torch.stack(columns, dim=1)

    def _values(self, network: StackedNetwork, states: Tensor) -> Float[Tensor, "replica row"]:
        return network.forward(states).squeeze(-1) * self._scale

    def _bellman_error(self, network: StackedNetwork) -> Float[Tensor, " replica"]:
        """Mean over states of (B₁V − V)(B₂V − V), the two backups from independent draws."""
        value = self._values(network, self._backup_states)
        shape = self._backup_rewards.shape
        following = self._values(network, self._backup_next).unflatten(1, shape)  # (R, M, A, K)
        targets = self._backup_rewards + self._backup_discounts * following
        halves = [
            (part.mean(dim=-1) * self._backup_weights).sum(dim=-1) - value
            for part in targets.chunk(2, dim=-1)
        ]
        return (halves[0] * halves[1]).mean(dim=1)


@torch.no_grad()
def held_out_kernel_loss(problem: Problem, network: StackedNetwork, reward_scale: float) -> np.ndarray:
    """The kernel loss (U-statistic, bandwidth 0.5) of tuples that no method saw, (R,): needs no truth."""
    table = problem.held_out.table(problem.world, 1.0)
    value, following = (
        network.forward(states).squeeze(-1).double() * reward_scale
        for states in (table.inputs, table.next_inputs)
    )
    rewards, discounts = (part.double().expand_as(value) for part in (table.rewards, table.discounts))
    residual = state_value_residual(rewards, discounts, value, following)
    return u_statistic(residual, _JUDGE.gram(table.inputs.double())).numpy()


class _OffsetNetwork(nn.Module):
    """The layers of a StackedMLP's replica and the offset."""

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([weight for weight, _ in layers])
        self.biases = nn.ParameterList([bias for _, bias in layers])
        self.offset = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """(N, d) -> (N, 1)."""
        *below, (top, bias) = list(zip(self.weights, self.biases, strict=True))
        for weight, shift in below:
            x = torch.relu(x @ weight + shift)
        return x @ top + bias + self.offset / (1.0 - GAMMA)


def offset_networks(hidden: Sequence[int], seeds: Sequence[int]) -> StackedModule:
    """One network V(s) = net(s) + b / (1 − γ) per seed: StackedMLP's first weights, an offset of zero.

    A gradient step then moves the mean of V as fast as its shape, along the direction in which a residual
    changes by only (1 − γ).
    """
    start = StackedMLP.initialise((2, *hidden, 1), seeds)
    layers = start.layers(start.flat)
    modules = [
        _OffsetNetwork([(weight[r].clone(), bias[r].squeeze(0).clone()) for weight, bias in layers])
        for r in range(start.replicas)
    ]
    return StackedModule(modules)
