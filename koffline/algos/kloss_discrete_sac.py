"""KLossDiscreteSAC: soft actor-critic whose critic minimises the kernel loss, discrete actions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Optional

import torch
from jaxtyping import Float
from torch import Tensor

from koffline.algos.kernel_actor import (
    EntropyModules,
    KernelActorImpl,
    make_temperature,
    temperature_of,
    update_temperature,
)
from koffline.algos.kernel_algo import KernelCriticAlgo
from koffline.algos.kernel_impl import discrete_values, taken
from koffline.algos.kernel_options import KernelCriticConfig
from koffline.bellman import state_value_residual
from koffline.data.d3rlpy_import import import_d3rlpy
from koffline.errors import ConfigError

import_d3rlpy()

from d3rlpy.algos.qlearning.torch.utility import DiscreteQFunctionMixin  # noqa: E402
from d3rlpy.base import register_learnable  # noqa: E402
from d3rlpy.constants import ActionSpace  # noqa: E402
from d3rlpy.models.builders import create_categorical_policy  # noqa: E402
from d3rlpy.models.encoders import EncoderFactory, make_encoder_field  # noqa: E402
from d3rlpy.models.q_functions import QFunctionFactory, make_q_func_field  # noqa: E402
from d3rlpy.optimizers.optimizers import OptimizerFactory, make_optimizer_field  # noqa: E402
from d3rlpy.torch_utility import TorchMiniBatch  # noqa: E402

ENTROPY_SHARE = 0.98  # of the largest entropy possible, log n: the target of the temperature


@dataclasses.dataclass(frozen=True)
class DiscreteSACActorLoss:
    """The actor's loss; the temperature and its loss."""

    actor_loss: Tensor
    temp_loss: Tensor
    temp: Tensor


class KLossDiscreteSACImpl(DiscreteQFunctionMixin, KernelActorImpl):
    """δ = r + discount · Σ_a' π(a'|s') [Q(s', a') − α log π(a'|s')] − Q(s, a)."""

    def compute_residual(self, batch: TorchMiniBatch) -> Float[Tensor, "critic row"]:
        """Gradient through Q(s, a) and Q(s', ·), none through the actor.

        (Feng et al. 2019, equ:bvsopt)
        """
        with torch.no_grad():
            policy = self._modules.policy(batch.next_observations)
            cost = temperature_of(self._modules.log_temp) * policy.logits
        values, next_values = discrete_values(
            self._modules.q_funcs, batch.observations, batch.next_observations
        )
        value = taken(values, batch.actions)
        next_value = (policy.probs * (self.backed_up(next_values) - cost)).sum(dim=2).expand_as(value)
        return state_value_residual(batch.rewards.squeeze(1), self.discount(batch), value, next_value)

    def compute_actor_loss(self, batch: TorchMiniBatch) -> Any:
        """Σ_a π(a|s) [α log π(a|s) − min_i Q_i(s, a)]; the temperature steps on the way."""
        modules = self._modules
        with torch.no_grad():
            value = self._q_func_forwarder.compute_expected_q(batch.observations, reduction="min")
        policy = modules.policy(batch.observations)
        temp_loss = torch.zeros((), device=value.device)
        if modules.temp_optim is not None:
            negative_entropy = (policy.probs * policy.logits).sum(dim=1, keepdim=True)
            excess = negative_entropy + ENTROPY_SHARE * math.log(self._action_size)
            temp_loss = update_temperature(modules.log_temp, modules.temp_optim, excess)
        temperature = temperature_of(modules.log_temp)
        loss = (policy.probs * (temperature.detach() * policy.logits - value)).sum(dim=1).mean()
        return DiscreteSACActorLoss(loss, temp_loss, temperature[0][0])

    def inner_predict_best_action(self, x: Tensor) -> Tensor:
        """(N,) most probable actions."""
        return self._modules.policy(x).probs.argmax(dim=1)

    def action_probabilities(self, x: Tensor) -> Float[Tensor, "row action"]:
        """The actor's."""
        return self._modules.policy(x).probs

    def inner_sample_action(self, x: Tensor) -> Tensor:
        """(N,) drawn from the actor."""
        return self._modules.policy(x).sample()


@dataclasses.dataclass()
class KLossDiscreteSACConfig(KernelCriticConfig):
    """Config of KLossDiscreteSAC; fields as in d3rlpy's DiscreteSACConfig without the target network's.

    The kernel's options are in KernelCriticConfig. temp_learning_rate 0 keeps the initial temperature.
    """

    actor_learning_rate: float = 3e-4
    critic_learning_rate: float = 3e-3
    diag_weight: Optional[float] = 0.1  # noqa: UP045
    temp_learning_rate: float = 3e-4
    actor_optim_factory: OptimizerFactory = make_optimizer_field()
    critic_optim_factory: OptimizerFactory = make_optimizer_field()
    temp_optim_factory: OptimizerFactory = make_optimizer_field()
    actor_encoder_factory: EncoderFactory = make_encoder_field()
    critic_encoder_factory: EncoderFactory = make_encoder_field()
    q_func_factory: QFunctionFactory = make_q_func_field()
    n_critics: int = 2
    initial_temperature: float = 1.0

    def create(self, device: Any = False, enable_ddp: bool = False) -> KLossDiscreteSAC:
        """The algorithm."""
        return KLossDiscreteSAC(self, device, enable_ddp)

    @staticmethod
    def get_type() -> str:
        """Name in files."""
        return "kloss_discrete_sac"


class KLossDiscreteSAC(KernelCriticAlgo[Any, Any]):
    """Soft actor-critic with a kernel-loss critic, discrete (Christodoulou 2019; Feng et al. 2019)."""

    def __init__(self, config: Any, device: Any = False, enable_ddp: bool = False, impl: Any = None) -> None:
        if not config.initial_temperature > 0.0:
            raise ConfigError(
                f"initial_temperature is {config.initial_temperature!r}; give a positive number"
            )
        super().__init__(config, device, enable_ddp, impl)

    def inner_create_impl(self, observation_shape: Sequence[int], action_size: int) -> None:
        """Networks, optimisers and kernel."""
        config = self._config
        policy = create_categorical_policy(
            observation_shape,
            action_size,
            config.actor_encoder_factory,
            device=self._device,
            enable_ddp=self._enable_ddp,
        )
        q_funcs, forwarder, critic_optim = self.make_discrete_critic(
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
        self._impl = KLossDiscreteSACImpl(
            q_func_forwarder=forwarder, modules=modules, **self.impl_options(observation_shape, action_size)
        )

    def get_action_type(self) -> ActionSpace:
        """Discrete."""
        return ActionSpace.DISCRETE


register_learnable(KLossDiscreteSACConfig)
