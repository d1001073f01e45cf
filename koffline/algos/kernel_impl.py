"""What all implementations with a kernel-loss critic share: values of s and s' in one pass, the update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import torch
from jaxtyping import Float
from torch import Tensor, nn

from koffline.algos.kernel_bellman_loss import KernelBellmanLoss
from koffline.data.d3rlpy_import import import_d3rlpy

import_d3rlpy()

from d3rlpy.algos.qlearning.base import QLearningAlgoImplBase  # noqa: E402
from d3rlpy.dataclass_utils import asdict_as_float  # noqa: E402
from d3rlpy.optimizers import OptimizerWrapper  # noqa: E402
from d3rlpy.torch_utility import (  # noqa: E402
    CudaGraphWrapper,
    Modules,
    TorchMiniBatch,
    unwrap_ddp_model,
)


@dataclasses.dataclass(frozen=True)
class KernelCriticModules(Modules):
    """What is saved: Q functions, their optimiser, and the kernel with what it learned from the log."""

    q_funcs: nn.ModuleList
    critic_optim: OptimizerWrapper
    kernel: KernelBellmanLoss


@dataclasses.dataclass(frozen=True)
class CriticLoss:
    """The loss that is minimised and, to be read, the mean squared residual."""

    critic_loss: Tensor
    bellman_error: Tensor


@dataclasses.dataclass(frozen=True)
class ConservativeLoss(CriticLoss):
    """The loss that is minimised holds a conservative part, which is also given alone."""

    conservative_loss: Tensor


class KernelCriticImpl(QLearningAlgoImplBase):
    """One gradient step on the kernel loss; a child says what the residual is.

    gamma: discount factor per step. backup: see KernelCriticConfig.
    """

    _modules: Any

    def __init__(
        self,
        observation_shape: Sequence[int],
        action_size: int,
        modules: Any,
        gamma: float,
        backup: str,
        compiled: bool,
        device: str,
    ) -> None:
        super().__init__(observation_shape, action_size, modules, device)
        self._gamma = gamma
        self._backup = backup
        self.grad_step = 0
        self.kernel_is_fixed = False
        self._compute_critic_grad = self.captured(self.compute_critic_grad, compiled)

    @staticmethod
    def captured(compute: Callable[[TorchMiniBatch], Any], compiled: bool) -> Callable[[TorchMiniBatch], Any]:
        """The function itself, or replayed from a CUDA graph."""
        return CudaGraphWrapper(compute) if compiled else compute

    def compute_residual(self, batch: TorchMiniBatch) -> Float[Tensor, "critic row"]:
        """δ of every critic, with gradient through the values of both s and s'."""
        raise NotImplementedError

    def compute_critic_loss(self, batch: TorchMiniBatch) -> CriticLoss:
        """The kernel loss, summed over critics."""
        return CriticLoss(*self.kernel_loss_of(self.compute_residual(batch), batch))

    def kernel_loss_of(self, residual: Tensor, batch: TorchMiniBatch) -> tuple[Tensor, Tensor]:
        """The kernel loss, summed over critics, and the mean squared residual."""
        loss = self._modules.kernel(residual, batch.observations, batch.actions).sum()
        return loss, residual.detach().square().mean()

    def compute_critic_grad(self, batch: TorchMiniBatch) -> CriticLoss:
        """Gradients into the critics' parameters; nothing steps."""
        self._modules.critic_optim.zero_grad()
        loss = self.compute_critic_loss(batch)
        loss.critic_loss.backward()
        return loss

    def update_critic(self, batch: TorchMiniBatch) -> dict[str, float]:
        """One optimiser step of the critics."""
        loss = self._compute_critic_grad(batch)
        self._modules.critic_optim.step()
        return asdict_as_float(loss)

    def inner_update(self, batch: TorchMiniBatch, grad_step: int) -> dict[str, float]:
        """One critic step."""
        return self.update_critic(batch)

    def discount(self, batch: TorchMiniBatch) -> Float[Tensor, " row"]:
        """gamma ** interval, zero after a termination."""
        return (self._gamma**batch.intervals * (1.0 - batch.terminals)).squeeze(1)

    def backed_up(self, values: Float[Tensor, "critic row *rest"]) -> Float[Tensor, "critics row *rest"]:
        """The ensemble's value of what follows: (1, …) when the critics share it."""
        if self._backup == "own" or len(values) == 1:
            return values
        return (values.amin(dim=0) if self._backup == "min" else values.mean(dim=0)).unsqueeze(0)

    def fix_kernel(self, observations: Tensor, actions: Tensor, batch_size: int) -> None:
        """Set bandwidth and scales from (scaled) rows of the log."""
        self._modules.kernel.fix(observations, actions, batch_size)
        self.kernel_is_fixed = True

    def start_at(self, value: float) -> None:
        """Add a constant to the outputs of all value functions and of their copies."""
        for name in ("q_funcs", "targ_q_funcs", "slow_q_funcs", "value_func"):
            functions = getattr(self._modules, name, nn.ModuleList())
            for function in functions if isinstance(functions, nn.ModuleList) else [functions]:
                unwrap_ddp_model(function)._fc.bias.data.add_(value)

    def save_model(self, f: BinaryIO) -> None:
        """With the count of gradient steps, which d3rlpy forgets."""
        self._modules.kernel.step.fill_(self.grad_step)
        super().save_model(f)

    def load_model(self, f: BinaryIO) -> None:
        """With the count of gradient steps."""
        super().load_model(f)
        self.grad_step = int(self._modules.kernel.step)
        self.kernel_is_fixed = self._modules.kernel.is_fixed()

    @property
    def q_function(self) -> nn.ModuleList:
        """The critics."""
        return self._modules.q_funcs

    @property
    def q_function_optim(self) -> torch.optim.Optimizer:
        """The critics' optimiser."""
        return self._modules.critic_optim.optim


def discrete_values(
    q_funcs: nn.ModuleList, observations: Tensor, next_observations: Tensor
) -> tuple[Float[Tensor, "critic row action"], Float[Tensor, "critic row action"]]:
    """Q(s, ·) and Q(s', ·), from one pass through each network over both."""
    both = torch.cat((observations, next_observations))
    values = torch.stack([q(both).q_value for q in q_funcs])
    here, there = values.chunk(2, dim=1)
    return here, there


def continuous_values(
    q_funcs: nn.ModuleList,
    observations: Tensor,
    actions: Tensor,
    next_observations: Tensor,
    next_actions: Tensor,
) -> tuple[Float[Tensor, "critic row"], Float[Tensor, "critic row"]]:
    """Q(s, a) and Q(s', a'), from one pass through each network over both."""
    both, acted = torch.cat((observations, next_observations)), torch.cat((actions, next_actions))
    values = torch.stack([q(both, acted).q_value.squeeze(1) for q in q_funcs])
    here, there = values.chunk(2, dim=1)
    return here, there


def taken(values: Float[Tensor, "critic row action"], actions: Tensor) -> Float[Tensor, "critic row"]:
    """Q(s_i, a_i); actions (N, 1) hold indices."""
    index = actions.reshape(1, -1, 1).long().expand(len(values), -1, 1)
    return values.gather(2, index).squeeze(2)
