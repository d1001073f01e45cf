"""KLossIQL: in-sample batch control; the action value minimises the kernel loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Optional

import torch
from jaxtyping import Float
from torch import Tensor, nn

from koffline.algos.kernel_actor import ContinuousActorImpl, KernelActorModules
from koffline.algos.kernel_algo import KernelCriticAlgo
from koffline.algos.kernel_impl import CriticLoss
from koffline.algos.kernel_options import KernelCriticConfig
from koffline.bellman import state_value_residual
from koffline.data.d3rlpy_import import import_d3rlpy
from koffline.errors import ConfigError

import_d3rlpy()

from d3rlpy.base import register_learnable  # noqa: E402
from d3rlpy.constants import ActionSpace  # noqa: E402
from d3rlpy.models.builders import create_normal_policy, create_value_function  # noqa: E402
from d3rlpy.models.encoders import EncoderFactory, make_encoder_field  # noqa: E402
from d3rlpy.models.q_functions import QFunctionFactory, make_q_func_field  # noqa: E402
from d3rlpy.models.torch import ValueFunction, build_gaussian_distribution  # noqa: E402
from d3rlpy.optimizers.optimizers import OptimizerFactory, make_optimizer_field  # noqa: E402
from d3rlpy.torch_utility import TorchMiniBatch, hard_sync, soft_sync  # noqa: E402


@dataclasses.dataclass(frozen=True)
class KLossIQLModules(KernelActorModules):
    """With the state value, which one optimiser trains together with the critics, and their slow copy."""

    value_func: ValueFunction
    slow_q_funcs: nn.ModuleList


@dataclasses.dataclass(frozen=True)
class IQLCriticLoss(CriticLoss):
    """The kernel loss of the critics plus the expectile loss of the state value."""

    q_loss: Tensor
    v_loss: Tensor


@dataclasses.dataclass(frozen=True)
class IQLActorLoss:
    """Advantage-weighted negative log-likelihood."""

    actor_loss: Tensor


class KLossIQLImpl(ContinuousActorImpl):
    """δ = r + discount · V(s') − Q(s, a), V an upper expectile of Q over the logged actions.

    V and the actor look at a slowly moving copy of Q: the two fixed-point problems are coupled, and with Q
    itself both the original and this one learn far worse. The kernel loss has no part in it.
    """

    def __init__(
        self, expectile: float, weight_temp: float, max_weight: float, tau: float, **common: Any
    ) -> None:
        super().__init__(**common)
        self._tau = tau
        hard_sync(self._modules.slow_q_funcs, self._modules.q_funcs)
        self._expectile = expectile
        self._weight_temp = weight_temp
        self._max_weight = max_weight

    def compute_residual(self, batch: TorchMiniBatch) -> Float[Tensor, "critic row"]:
        """Gradient through Q(s, a); V is defined by its own loss, so none flows into V(s')."""
        next_value = self._modules.value_func(batch.next_observations).squeeze(1).detach()
        return self._residual(batch, self._logged_values(self._modules.q_funcs, batch), next_value)

    def compute_critic_loss(self, batch: TorchMiniBatch) -> IQLCriticLoss:
        """One pass through each network: V of s and s' together, Q once."""
        values = self._logged_values(self._modules.q_funcs, batch)
        both = torch.cat((batch.observations, batch.next_observations))
        value, next_value = self._modules.value_func(both).squeeze(1).chunk(2)
        residual = self._residual(batch, values, next_value.detach())
        q_loss = self._modules.kernel(residual, batch.observations, batch.actions).sum()
        difference = self._slow_values(batch) - value
        weight = torch.where(difference < 0.0, 1.0 - self._expectile, self._expectile)
        v_loss = (weight * difference.square()).mean()
        return IQLCriticLoss(
            q_loss + v_loss, residual.detach().square().mean(), q_loss.detach(), v_loss.detach()
        )

    def compute_actor_loss(self, batch: TorchMiniBatch) -> Any:
        """−exp(β (Q − V)) log π(a|s), the weight capped (Kostrikov et al. 2022)."""
        with torch.no_grad():
            value = self._modules.value_func(batch.observations).squeeze(1)
            advantage = self._slow_values(batch) - value
            weight = (self._weight_temp * advantage).exp().clamp(max=self._max_weight)
        policy = build_gaussian_distribution(self._modules.policy(batch.observations))
        log_probability = policy.log_prob(batch.actions).squeeze(1)
        return IQLActorLoss(-(weight * log_probability).mean())

    def inner_sample_action(self, x: Tensor) -> Tensor:
        """(N, k) drawn from the actor."""
        return build_gaussian_distribution(self._modules.policy(x)).sample()

    def inner_update(self, batch: TorchMiniBatch, grad_step: int) -> dict[str, float]:
        """Critic and value, actor, then the slow copy."""
        metrics = super().inner_update(batch, grad_step)
        soft_sync(self._modules.slow_q_funcs, self._modules.q_funcs, self._tau)
        return metrics

    def _slow_values(self, batch: TorchMiniBatch) -> Float[Tensor, " row"]:
        """min over critics of the slow copy's Q(s, a), without gradient."""
        with torch.no_grad():
            return self._logged_values(self._modules.slow_q_funcs, batch).amin(dim=0)

    @staticmethod
    def _logged_values(q_funcs: nn.ModuleList, batch: TorchMiniBatch) -> Float[Tensor, "critic row"]:
        return torch.stack([q(batch.observations, batch.actions).q_value.squeeze(1) for q in q_funcs])

    def _residual(self, batch: TorchMiniBatch, values: Tensor, next_value: Tensor) -> Tensor:
        return state_value_residual(
            batch.rewards.squeeze(1), self.discount(batch), values, next_value.expand_as(values)
        )


@dataclasses.dataclass()
class KLossIQLConfig(KernelCriticConfig):
    """Config of KLossIQL; fields as in d3rlpy's IQLConfig, the kernel's options in KernelCriticConfig.

    tau: rate of the slow copy of the critics that the state value and the actor look at.
    """

    actor_learning_rate: float = 3e-4
    critic_learning_rate: float = 3e-3
    diag_weight: Optional[float] = 0.1  # noqa: UP045
    actor_optim_factory: OptimizerFactory = make_optimizer_field()
    critic_optim_factory: OptimizerFactory = make_optimizer_field()
    actor_encoder_factory: EncoderFactory = make_encoder_field()
    critic_encoder_factory: EncoderFactory = make_encoder_field()
    value_encoder_factory: EncoderFactory = make_encoder_field()
    q_func_factory: QFunctionFactory = make_q_func_field()
    n_critics: int = 2
    tau: float = 0.005
    expectile: float = 0.7
    weight_temp: float = 3.0
    max_weight: float = 100.0

    def create(self, device: Any = False, enable_ddp: bool = False) -> KLossIQL:
        """The algorithm."""
        return KLossIQL(self, device, enable_ddp)

    @staticmethod
    def get_type() -> str:
        """Name in files."""
        return "kloss_iql"


class KLossIQL(KernelCriticAlgo[Any, Any]):
    """Implicit Q-learning with a kernel-loss critic (Kostrikov et al. 2022; Feng et al. 2019)."""

    def __init__(self, config: Any, device: Any = False, enable_ddp: bool = False, impl: Any = None) -> None:
        if not 0.0 < config.expectile < 1.0:
            raise ConfigError(f"expectile is {config.expectile!r}; give a number inside (0, 1)")
        if not 0.0 < config.tau <= 1.0:
            raise ConfigError(f"tau is {config.tau!r}; give a number in (0, 1]")
        super().__init__(config, device, enable_ddp, impl)

    def inner_create_impl(self, observation_shape: Sequence[int], action_size: int) -> None:
        """Networks, optimisers and kernel."""
        config = self._config
        where = {"device": self._device, "enable_ddp": self._enable_ddp}
        policy = create_normal_policy(
            observation_shape,
            action_size,
            config.actor_encoder_factory,
            min_logstd=-5.0,
            max_logstd=2.0,
            use_std_parameter=True,
            **where,
        )
        value_func = create_value_function(observation_shape, config.value_encoder_factory, **where)
        (q_funcs, forwarder, _), (slow_q_funcs, _, _) = (
            self.make_continuous_critic(
                observation_shape,
                action_size,
                config.critic_encoder_factory,
                config.critic_optim_factory,
                config.critic_learning_rate,
            )
            for _ in range(2)
        )
        critic_optim = config.critic_optim_factory.create(
            [*q_funcs.named_modules(), *value_func.named_modules()],
            lr=config.critic_learning_rate,
            compiled=self.compiled,
        )
        modules = KLossIQLModules(
            q_funcs=q_funcs,
            critic_optim=critic_optim,
            kernel=self.make_kernel(observation_shape, action_size),
            policy=policy,
            actor_optim=self.make_optimizer(config.actor_optim_factory, policy, config.actor_learning_rate),
            value_func=value_func,
            slow_q_funcs=slow_q_funcs,
        )
        self._impl = KLossIQLImpl(
            expectile=config.expectile,
            weight_temp=config.weight_temp,
            max_weight=config.max_weight,
            tau=config.tau,
            q_func_forwarder=forwarder,
            modules=modules,
            **self.impl_options(observation_shape, action_size),
        )

    def get_action_type(self) -> ActionSpace:
        """Continuous."""
        return ActionSpace.CONTINUOUS


register_learnable(KLossIQLConfig)
