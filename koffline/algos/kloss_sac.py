"""KLossSAC: soft actor-critic whose critic minimises the kernel loss, continuous actions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from koffline.algos.kernel_actor import (
    ContinuousActorImpl,
    EntropyModules,
    make_temperature,
    temperature_of,
    update_temperature,
)
from koffline.algos.kernel_algo import KernelCriticAlgo
from koffline.algos.kernel_impl import ConservativeLoss, CriticLoss, continuous_values
from koffline.algos.kernel_options import KernelCriticConfig
from koffline.bellman import state_value_residual
from koffline.data.d3rlpy_import import import_d3rlpy
from koffline.errors import ConfigError

import_d3rlpy()

from d3rlpy.base import register_learnable  # noqa: E402
from d3rlpy.constants import ActionSpace  # noqa: E402
from d3rlpy.models.builders import create_normal_policy  # noqa: E402
from d3rlpy.models.encoders import EncoderFactory, make_encoder_field  # noqa: E402
from d3rlpy.models.q_functions import QFunctionFactory, make_q_func_field  # noqa: E402
from d3rlpy.models.torch import build_squashed_gaussian_distribution  # noqa: E402
from d3rlpy.optimizers.optimizers import OptimizerFactory, make_optimizer_field  # noqa: E402
from d3rlpy.torch_utility import TorchMiniBatch  # noqa: E402


@dataclasses.dataclass(frozen=True)
class SACActorLoss:
    """The actor's loss; the temperature and its loss."""

    actor_loss: Tensor
    temp_loss: Tensor
    temp: Tensor


class KLossSACImpl(ContinuousActorImpl):
    """δ = r + discount · [Q(s', a') − α log π(a'|s')] − Q(s, a), a' drawn from the actor.

    conservative_weight adds weight · mean[Q(s, a ~ π) − Q(s, a_logged)] to the loss.
    """

    def __init__(self, conservative_weight: float, **common: Any) -> None:
        super().__init__(**common)
        self._conservative_weight = conservative_weight

    def compute_critic_loss(self, batch: TorchMiniBatch) -> CriticLoss:
        """Kernel loss and conservative loss from one pass through each critic."""
        if self._conservative_weight == 0.0:
            return super().compute_critic_loss(batch)
        rows = len(batch.observations)
        both = torch.cat((batch.observations, batch.next_observations))
        actions, entropy = self._drawn(both)
        everything = torch.cat((batch.observations, both))
        acted = torch.cat((batch.actions, actions))
        values = torch.stack([q(everything, acted).q_value.squeeze(1) for q in self._modules.q_funcs])
        value, drawn_value, next_value = values.split(rows, dim=1)
        residual = self._residual(batch, value, next_value, entropy[rows:])
        loss, error = self.kernel_loss_of(residual, batch)
        conservative = self._conservative_weight * (drawn_value - value).mean(dim=1).sum()
        return ConservativeLoss(loss + conservative, error, conservative.detach())

    def compute_residual(self, batch: TorchMiniBatch) -> Float[Tensor, "critic row"]:
        """Gradient through Q(s, a) and Q(s', a'), none through the actor.

        (Feng et al. 2019, equ:bvsopt)
        """
        next_actions, entropy = self._drawn(batch.next_observations)
        value, next_value = continuous_values(
            self._modules.q_funcs, batch.observations, batch.actions, batch.next_observations, next_actions
        )
        return self._residual(batch, value, next_value, entropy)

    def _drawn(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Actions of the actor and α log π of them, without gradient."""
        with torch.no_grad():
            policy = build_squashed_gaussian_distribution(self._modules.policy(observations))
            actions, log_probability = policy.sample_with_log_prob()
            return actions, (temperature_of(self._modules.log_temp) * log_probability).squeeze(1)

    def _residual(
        self, batch: TorchMiniBatch, value: Tensor, next_value: Tensor, entropy: Tensor
    ) -> Float[Tensor, "critic row"]:
        next_value = (self.backed_up(next_value) - entropy).expand_as(value)
        return state_value_residual(batch.rewards.squeeze(1), self.discount(batch), value, next_value)

    def compute_actor_loss(self, batch: TorchMiniBatch) -> Any:
        """α log π(a|s) − min_i Q_i(s, a), a drawn with gradient; the temperature steps on the way."""
        modules = self._modules
        policy = build_squashed_gaussian_distribution(modules.policy(batch.observations))
        actions, log_probability = policy.sample_with_log_prob()
        temp_loss = torch.zeros((), device=actions.device)
        if modules.temp_optim is not None:
            excess = log_probability - self._action_size
            temp_loss = update_temperature(modules.log_temp, modules.temp_optim, excess)
        temperature = temperature_of(modules.log_temp)
        value = self._q_func_forwarder.compute_expected_q(batch.observations, actions, "min")
        loss = (temperature.detach() * log_probability - value).mean()
        return SACActorLoss(loss, temp_loss, temperature[0][0])

    def inner_sample_action(self, x: Tensor) -> Tensor:
        """(N, k) drawn from the actor."""
        return build_squashed_gaussian_distribution(self._modules.policy(x)).sample()


@dataclasses.dataclass()
class KLossSACConfig(KernelCriticConfig):
    """Config of KLossSAC; fields as in d3rlpy's SACConfig without the target network's `tau`.

    The kernel's options are in KernelCriticConfig. temp_learning_rate 0 keeps the initial temperature.
    conservative_weight: weight of Q(s, a ~ π) − Q(s, a_logged). With the gradient through Q(s', a') a critic
    can make its equation true by believing in whatever the actor does where the log has no such action; this
    holds it back. 0 is plain SAC, right where actions are tried out (online).
    """

    actor_learning_rate: float = 3e-4
    critic_learning_rate: float = 3e-3
    temp_learning_rate: float = 3e-4
    actor_optim_factory: OptimizerFactory = make_optimizer_field()
    critic_optim_factory: OptimizerFactory = make_optimizer_field()
    temp_optim_factory: OptimizerFactory = make_optimizer_field()
    actor_encoder_factory: EncoderFactory = make_encoder_field()
    critic_encoder_factory: EncoderFactory = make_encoder_field()
    q_func_factory: QFunctionFactory = make_q_func_field()
    n_critics: int = 2
    initial_temperature: float = 1.0
    conservative_weight: float = 0.1

    def create(self, device: Any = False, enable_ddp: bool = False) -> KLossSAC:
        """The algorithm."""
        return KLossSAC(self, device, enable_ddp)

    @staticmethod
    def get_type() -> str:
        """Name in files."""
        return "kloss_sac"


class KLossSAC(KernelCriticAlgo[Any, Any]):
    """Soft actor-critic with a kernel-loss critic, continuous (Haarnoja et al. 2018; Feng et al. 2019)."""

    def __init__(self, config: Any, device: Any = False, enable_ddp: bool = False, impl: Any = None) -> None:
        if not config.initial_temperature > 0.0:
            raise ConfigError(
                f"initial_temperature is {config.initial_temperature!r}; give a positive number"
            )
        if not config.conservative_weight >= 0.0:
            raise ConfigError(
                f"conservative_weight is {config.conservative_weight!r}; give 0 or a positive number"
            )
        super().__init__(config, device, enable_ddp, impl)

    def inner_create_impl(self, observation_shape: Sequence[int], action_size: int) -> None:
        """Networks, optimisers and kernel."""
        modules, forwarder = self.make_modules(observation_shape, action_size)
        self._impl = self.make_impl(
            modules,
            q_func_forwarder=forwarder,
            conservative_weight=self._config.conservative_weight,
            **self.impl_options(observation_shape, action_size),
        )

    def make_impl(self, modules: EntropyModules, **options: Any) -> KLossSACImpl:
        """The implementation over these modules."""
        return KLossSACImpl(modules=modules, **options)

    def make_modules(self, observation_shape: Sequence[int], action_size: int) -> tuple[EntropyModules, Any]:
        """Everything that is saved, and d3rlpy's forwarder over the critics."""
        config = self._config
        policy = create_normal_policy(
            observation_shape,
            action_size,
            config.actor_encoder_factory,
            device=self._device,
            enable_ddp=self._enable_ddp,
        )
        q_funcs, forwarder, critic_optim = self.make_continuous_critic(
            observation_shape,
            action_size,
            config.critic_encoder_factory,
            config.critic_optim_factory,
            config.critic_learning_rate,
        )
        log_temp, temp_optim = make_temperature(
            self, config.initial_temperature, config.temp_optim_factory, config.temp_learning_rate
        )
        modules = EntropyModules(
            q_funcs=q_funcs,
            critic_optim=critic_optim,
            kernel=self.make_kernel(observation_shape, action_size),
            policy=policy,
            actor_optim=self.make_optimizer(config.actor_optim_factory, policy, config.actor_learning_rate),
            log_temp=log_temp,
            temp_optim=temp_optim,
        )
        return modules, forwarder

    def get_action_type(self) -> ActionSpace:
        """Continuous."""
        return ActionSpace.CONTINUOUS


register_learnable(KLossSACConfig)
