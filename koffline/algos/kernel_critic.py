"""Gradient step of all implementations: the critics with the kernel loss, then the
actor, if there is one.

An algorithm's implementation is a subclass of `KernelImpl`. It defines the
critic's loss (with `values_of_both`, `backed_up`, `residual` and `kernel_losses`), the
actor's loss, and how actions are chosen.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from d3rlpy.algos.qlearning.base import QLearningAlgoImplBase
from d3rlpy.models.torch import (
    ContinuousQFunction,
    DiscreteQFunction,
    Distribution,
    Policy,
    ValueFunction,
    get_parameter,
)
from d3rlpy.optimizers import OptimizerWrapper
from d3rlpy.torch_utility import CudaGraphWrapper, Modules, TorchMiniBatch, soft_sync
from jaxtyping import Float
from torch import Tensor, nn

from koffline.algos.kernel_bellman_loss import KernelCriticConfig
from koffline.kernel_loss import state_value_residual

# scalars by their names in a run's logs; the first one is minimised
Losses = dict[str, Tensor]
# what an algorithm saves, by the names in its file; None: the algorithm is without it
ModuleParts: TypeAlias = dict[str, nn.Module | OptimizerWrapper | None]


def modules_of(parts: ModuleParts) -> Modules:
    """d3rlpy's record of what an algorithm saves: networks, optimisers, and the kernel
    with its buffers, by their names in the file.
    """
    return _modules_class(tuple(parts))(**parts)


@functools.cache
def _modules_class(names: tuple[str, ...]) -> type[Modules]:
    """The class of records with these parts.

    d3rlpy goes through the fields of a dataclass to save, to freeze and to switch
    modes; which parts there are depends on the algorithm, or on the one of d3rlpy's
    that it varies.
    """
    return dataclasses.make_dataclass(
        "KernelModules",
        names,
        bases=(Modules,),
        frozen=True,
        namespace={"__reduce__": _reduced},
    )


def _reduced(
    modules: Modules,
) -> tuple[Callable[[ModuleParts], Modules], tuple[ModuleParts]]:
    """How a record is pickled: its class has no name to import it by."""
    return modules_of, (vars(modules),)


class KernelImpl(QLearningAlgoImplBase):
    """Gradient steps of critics and actor; subclasses define the losses.

    config: the algorithm's own KernelCriticConfig.
    """

    is_captured = True  # with compile_graph on CUDA, losses are replayed from a graph
    # The algorithm of d3rlpy beside which this one stands has no actor, and logs the
    # critics' loss as `loss`.
    logs_loss = False
    _modules: Modules

    def __init__(
        self,
        config: KernelCriticConfig,
        observation_shape: Sequence[int],
        action_size: int,
        modules: Modules,
        device: str,
    ) -> None:
        super().__init__(observation_shape, action_size, modules, device)
        self._config = config
        self._critic_grad: Callable[[TorchMiniBatch], Losses] = self.compute_critic_grad
        self._actor_grad: Callable[[TorchMiniBatch], Losses] = self.compute_actor_grad
        self._before: list[Tensor] = []
        is_wanted = config.compile_graph and not config.memory
        if self.is_captured and is_wanted and "cuda" in device:
            self._critic_grad = CudaGraphWrapper(self.compute_critic_grad)
            self._actor_grad = CudaGraphWrapper(self.compute_actor_grad)

    def compute_critic_loss(self, batch: TorchMiniBatch) -> Losses:
        """`critic_loss`, summed over critics, and further scalars for the logs."""
        raise NotImplementedError

    def compute_actor_loss(self, batch: TorchMiniBatch) -> Losses:
        """`actor_loss` and further scalars for the logs."""
        raise NotImplementedError

    @property
    def temperature(self) -> Tensor:
        """Temperature (1, 1) of the actor's entropy."""
        return get_parameter(self._modules.log_temp).exp()

    def update_temperature(self, excess: Float[Tensor, "row 1"]) -> Tensor:
        """Update the temperature by one step, unless it is fixed, and return its loss.

        excess: log-probability minus its target; no gradient flows into it.
        """
        optim = self._modules.temp_optim
        if optim is None:
            return torch.zeros((), device=excess.device)
        optim.zero_grad()
        loss = -(self.temperature * excess.detach()).mean()
        loss.backward()
        optim.step()
        return loss

    def compute_critic_grad(self, batch: TorchMiniBatch) -> Losses:
        """Compute the gradients of the critics' parameters; no optimiser steps."""
        self._modules.critic_optim.zero_grad()
        losses = self.compute_critic_loss(batch)
        losses["critic_loss"].backward()
        return losses

    def compute_actor_grad(self, batch: TorchMiniBatch) -> Losses:
        """Compute the gradients of the actor's parameters; only the temperature's
        optimiser steps.
        """
        self._modules.actor_optim.zero_grad()
        losses = self.compute_actor_loss(batch)
        losses["actor_loss"].backward()
        return losses

    def update_critic(self, batch: TorchMiniBatch) -> dict[str, float]:
        """One optimiser step of the critics."""
        if self._config.memory:
            self._look_back(batch)
        losses = self._critic_grad(batch)
        self._modules.critic_optim.step()
        return _numbers(losses)

    @torch.no_grad()
    def _look_back(self, batch: TorchMiniBatch) -> None:
        """Give the kernel this mini-batch's residuals at the previous parameters; store
        the current ones.
        """
        kernel = self._modules.kernel
        parameters: list[Tensor] = []
        for functions in _value_functions(self._modules):
            parameters += functions.parameters()
        present = [parameter.detach().clone() for parameter in parameters]
        if self._before:
            devices = []
            if "cuda" in self._device:
                devices = [self._device]
            with torch.random.fork_rng(devices):  # the same actions are drawn again
                _put(parameters, self._before)
                kernel.looks_back = True
                self.compute_critic_loss(batch)
                kernel.looks_back = False
                _put(parameters, present)
        self._before = present

    def update_actor(self, batch: TorchMiniBatch) -> dict[str, float]:
        """Take one optimiser step of the actor, with the critics in inference mode, as
        in d3rlpy.
        """
        self._modules.q_funcs.eval()
        losses = self._actor_grad(batch)
        self._modules.actor_optim.step()
        return _numbers(losses)

    def inner_update(self, batch: TorchMiniBatch, grad_step: int) -> dict[str, float]:
        """Update critics and slow copy; every `update_actor_interval` steps also the
        actor, if any.
        """
        metrics = self.update_critic(batch)
        if self._modules.slow_q_funcs is not None:
            soft_sync(
                self._modules.slow_q_funcs, self._modules.q_funcs, self._config.tau
            )
        interval = getattr(self._config, "update_actor_interval", 1)
        if hasattr(self._modules, "policy") and grad_step % interval == 0:
            metrics.update(self.update_actor(batch))
        return metrics

    def q_values(
        self,
        observations: Tensor,
        actions: Tensor | None = None,
        q_funcs: nn.ModuleList | None = None,
    ) -> Float[Tensor, "critic row *action"]:
        """Q(s, a) of every critic, or Q(s, ·) where ``actions`` is None (discrete).

        observations: (N, d). actions: (N, k). q_funcs: the critics, or a copy of them.
        """
        if q_funcs is None:
            q_funcs = self._modules.q_funcs
        if actions is None:
            return torch.stack([q(observations).q_value for q in q_funcs])
        return torch.stack(
            [q(observations, actions).q_value.squeeze(1) for q in q_funcs]
        )

    def values_of_both(
        self,
        batch: TorchMiniBatch,
        next_actions: Tensor | None = None,
        beside: Tensor | None = None,
    ) -> tuple[
        Float[Tensor, "critic rows *action"], Float[Tensor, "critic row *action"]
    ]:
        """Q(s, a) and Q(s', a'), or Q(s, ·) and Q(s', ·), the latter by the slow copy
        if there is one.

        next_actions: a' (N, k), or None for the values of all discrete actions. beside:
        further actions at s; their values follow those of the logged actions.
        """
        observations = batch.observations
        actions = batch.actions
        if beside is not None:
            observations = torch.cat((observations, observations))
            actions = torch.cat((actions, beside))
        if next_actions is None:
            actions = None
        slow = self._modules.slow_q_funcs
        if slow is not None:
            with torch.no_grad():
                next_values = self.q_values(batch.next_observations, next_actions, slow)
            return self.q_values(observations, actions), next_values
        # one pass of the network, whose gradient reaches both ends of a transition
        both = torch.cat((observations, batch.next_observations))
        if next_actions is not None:
            actions = torch.cat((actions, next_actions))
        values, next_values = self.q_values(both, actions).split(
            [len(observations), len(batch.rewards)], dim=1
        )
        return values, next_values

    def backed_up(
        self, values: Float[Tensor, "critic row *rest"]
    ) -> Float[Tensor, "critics row *rest"]:
        """Next values to bootstrap from, by the option `backup`; (1, …) if the critics
        share them.
        """
        backup = self._config.backup
        if backup == "own" or len(values) == 1:
            return values
        if backup == "min":
            return values.amin(dim=0, keepdim=True)
        return values.mean(dim=0, keepdim=True)

    def discount(self, batch: TorchMiniBatch) -> Float[Tensor, " row"]:
        """gamma ** interval, zero after a termination."""
        discounts = self._config.gamma**batch.intervals * (1.0 - batch.terminals)
        return discounts.squeeze(1)

    def residual(
        self,
        batch: TorchMiniBatch,
        value: Float[Tensor, "critic row"],
        next_value: Tensor,
    ) -> Float[Tensor, "critic row"]:
        """δ = r + discount · next value − value; critics may share the next value."""
        next_value = next_value.expand_as(value)
        return state_value_residual(
            batch.rewards.squeeze(1), self.discount(batch), value, next_value
        )

    def kernel_losses(
        self,
        batch: TorchMiniBatch,
        residual: Tensor,
        conservative: Tensor | None = None,
    ) -> Losses:
        """`critic_loss`: the kernel loss, summed over critics, plus a conservative loss
        if there is one; `bellman_error`: the mean squared residual.

        With a conservative loss this one and the kernel loss alone (`td_loss`) are
        logged, too. `loss` is `critic_loss` by the name that algorithms without an
        actor have for it in d3rlpy. (Feng et al. 2019, equ:ourloss)
        """
        loss = self._modules.kernel(residual, batch.observations, batch.actions).sum()
        error = residual.detach().square().mean()
        losses = {"critic_loss": loss, "bellman_error": error}
        if conservative is not None:
            losses["critic_loss"] = loss + conservative
            losses["conservative_loss"] = conservative.detach()
        if self.logs_loss:
            losses["loss"] = losses["critic_loss"].detach()
            if conservative is not None:
                losses["td_loss"] = loss.detach()
        return losses

    def inner_predict_value(self, x: Tensor, action: Tensor) -> Tensor:
        """Mean of Q(s, a) over critics, (N,)."""
        if self._modules.kernel.n_actions:
            return taken(self.q_values(x), action).mean(dim=0)
        return self.q_values(x, action).mean(dim=0)

    def inner_predict_best_action(self, x: Tensor) -> Tensor:
        """The actor's (N,) most probable actions, or (N, k) squashed means."""
        if self._modules.kernel.n_actions:
            return self.action_probabilities(x).argmax(dim=1)
        return self._modules.policy(x).squashed_mu

    def inner_sample_action(self, x: Tensor) -> Tensor:
        """Actions (N,) or (N, k) drawn from the actor."""
        return self.distribution(x).sample()

    def distribution(self, x: Tensor) -> Distribution | torch.distributions.Categorical:
        """Distribution that actions are drawn from."""
        return self._modules.policy(x)

    def action_probabilities(self, x: Tensor) -> Float[Tensor, "row action"]:
        """Probabilities of the policy, for discrete actions."""
        return self._modules.policy(x).probs

    @property
    def q_function(self) -> nn.ModuleList:
        """The critics."""
        return self._modules.q_funcs

    @property
    def q_function_optim(self) -> torch.optim.Optimizer:
        """The critics' optimiser."""
        return self._modules.critic_optim.optim

    @property
    def policy(self) -> Policy:
        """The actor; without one raises as in d3rlpy."""
        if not hasattr(self._modules, "policy"):
            raise NotImplementedError
        return self._modules.policy

    @property
    def policy_optim(self) -> torch.optim.Optimizer:
        """The actor's optimiser; without an actor raises as in d3rlpy."""
        return self.policy and self._modules.actor_optim.optim


def shift_values(modules: Modules, value: float) -> None:
    """Add a constant to the outputs of all value functions and of their copies."""
    for functions in _value_functions(modules):
        for function in functions:
            _shift_output(function, value)
    if hasattr(modules, "value_func"):
        _shift_output(modules.value_func, value)


def _shift_output(
    function: ContinuousQFunction | DiscreteQFunction | ValueFunction, value: float
) -> None:
    function._fc.bias.data.add_(value)


def _value_functions(modules: Modules) -> list[nn.ModuleList]:
    """The critics and their copies, as far as an algorithm has them."""
    names = ("q_funcs", "slow_q_funcs", "targ_q_funcs")
    functions = [getattr(modules, name, None) for name in names]
    return [part for part in functions if part is not None]


def _numbers(losses: Losses) -> dict[str, float]:
    return {name: float(loss.detach()) for name, loss in losses.items()}


def _put(parameters: list[Tensor], values: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def taken(
    values: Float[Tensor, "critic row action"], actions: Tensor
) -> Float[Tensor, "critic row"]:
    """Q(s_i, a_i); actions (N, 1) or (N,) hold indices."""
    return torch.take_along_dim(
        values, actions.reshape(1, -1, 1).long(), dim=2
    ).squeeze(2)
