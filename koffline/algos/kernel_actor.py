"""Actors over a kernel-loss critic, and the temperature of an entropy-regularised one."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from koffline.algos.kernel_impl import KernelCriticImpl, KernelCriticModules
from koffline.data.d3rlpy_import import import_d3rlpy

import_d3rlpy()

from d3rlpy.algos.qlearning.torch.utility import ContinuousQFunctionMixin  # noqa: E402
from d3rlpy.dataclass_utils import asdict_as_float  # noqa: E402
from d3rlpy.models.builders import create_parameter  # noqa: E402
from d3rlpy.models.torch import Parameter, Policy, get_parameter  # noqa: E402
from d3rlpy.optimizers import OptimizerWrapper  # noqa: E402
from d3rlpy.torch_utility import TorchMiniBatch  # noqa: E402


@dataclasses.dataclass(frozen=True)
class KernelActorModules(KernelCriticModules):
    """A critic's modules and an actor's."""

    policy: Policy
    actor_optim: OptimizerWrapper


@dataclasses.dataclass(frozen=True)
class EntropyModules(KernelActorModules):
    """With the logarithm of a temperature; no optimiser where it stays as it is."""

    log_temp: Parameter
    temp_optim: Optional[OptimizerWrapper]  # noqa: UP045


class KernelActorImpl(KernelCriticImpl):
    """A critic step, then an actor step; a child says what the residual and the actor's loss are."""

    def __init__(self, q_func_forwarder: Any, **common: Any) -> None:
        super().__init__(**common)
        self._q_func_forwarder = q_func_forwarder
        self._compute_actor_grad = self.captured(self.compute_actor_grad, common["compiled"])

    def compute_actor_loss(self, batch: TorchMiniBatch) -> Any:
        """A dataclass of scalars, the first of which, `actor_loss`, is minimised."""
        raise NotImplementedError

    def compute_actor_grad(self, batch: TorchMiniBatch) -> Any:
        """Gradients into the actor's parameters; nothing steps."""
        self._modules.actor_optim.zero_grad()
        loss = self.compute_actor_loss(batch)
        loss.actor_loss.backward()
        return loss

    def update_actor(self, batch: TorchMiniBatch) -> dict[str, float]:
        """One optimiser step of the actor; the critics are in inference mode, as d3rlpy has it."""
        self._modules.q_funcs.eval()
        loss = self._compute_actor_grad(batch)
        self._modules.actor_optim.step()
        return asdict_as_float(loss)

    def inner_update(self, batch: TorchMiniBatch, grad_step: int) -> dict[str, float]:
        """Critic, then actor."""
        return {**self.update_critic(batch), **self.update_actor(batch)}

    @property
    def policy(self) -> Any:
        """The actor."""
        return self._modules.policy

    @property
    def policy_optim(self) -> torch.optim.Optimizer:
        """The actor's optimiser."""
        return self._modules.actor_optim.optim


class ContinuousActorImpl(ContinuousQFunctionMixin, KernelActorImpl):
    """An actor whose greedy action is the squashed mean."""

    def inner_predict_best_action(self, x: Tensor) -> Tensor:
        """(N, k) in [−1, 1]."""
        return self._modules.policy(x).squashed_mu


def make_temperature(algo: Any, initial: float, factory: Any, learning_rate: float) -> tuple[Parameter, Any]:
    """The logarithm of a temperature as a (1, 1) parameter, and its optimiser or None at learning rate 0."""
    log_temp = create_parameter((1, 1), math.log(initial), algo._device, algo._enable_ddp)
    optim = algo.make_optimizer(factory, log_temp, learning_rate) if learning_rate > 0.0 else None
    return log_temp, optim


def temperature_of(log_temp: Parameter) -> Tensor:
    """(1, 1)."""
    return get_parameter(log_temp).exp()


def update_temperature(log_temp: Parameter, optim: OptimizerWrapper, excess: Tensor) -> Tensor:
    """One step of the temperature; excess (N, 1): log-probability above its target, taken as constant."""
    optim.zero_grad()
    loss = -(temperature_of(log_temp) * excess.detach()).mean()
    loss.backward()
    if isinstance(log_temp, DistributedDataParallel):  # used without its forward, which would do this
        gradient = get_parameter(log_temp).grad
        torch.distributed.all_reduce(gradient)
        gradient /= torch.distributed.get_world_size()
    optim.step()
    return loss
