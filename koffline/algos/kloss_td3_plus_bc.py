"""KLossTD3PlusBC: batch control with behaviour regularisation and a kernel-loss critic."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Optional

import torch
from jaxtyping import Float
from torch import Tensor

from koffline.algos.kernel_actor import ContinuousActorImpl, KernelActorModules
from koffline.algos.kernel_algo import KernelCriticAlgo
from koffline.algos.kernel_impl import continuous_values
from koffline.algos.kernel_options import KernelCriticConfig
from koffline.bellman import state_value_residual
from koffline.data.d3rlpy_import import import_d3rlpy
from koffline.errors import ConfigError

import_d3rlpy()

from d3rlpy.base import register_learnable  # noqa: E402
from d3rlpy.constants import ActionSpace  # noqa: E402
from d3rlpy.models.builders import create_deterministic_policy  # noqa: E402
from d3rlpy.models.encoders import EncoderFactory, make_encoder_field  # noqa: E402
from d3rlpy.models.q_functions import QFunctionFactory, make_q_func_field  # noqa: E402
from d3rlpy.optimizers.optimizers import OptimizerFactory, make_optimizer_field  # noqa: E402
from d3rlpy.torch_utility import TorchMiniBatch  # noqa: E402


@dataclasses.dataclass(frozen=True)
class TD3PlusBCActorLoss:
    """The actor's loss, and its behaviour-cloning part."""

    actor_loss: Tensor
    bc_loss: Tensor


class KLossTD3PlusBCImpl(ContinuousActorImpl):
    """δ = r + discount · Q(s', π(s') + clipped noise) − Q(s, a), the actor as it is now."""

    def __init__(
        self, smoothing: tuple[float, float], alpha: float, actor_interval: int, **common: Any
    ) -> None:
        super().__init__(**common)
        self._smoothing_sigma, self._smoothing_clip = smoothing
        self._alpha = alpha
        self._actor_interval = actor_interval

    def compute_residual(self, batch: TorchMiniBatch) -> Float[Tensor, "critic row"]:
        """Gradient through Q(s, a) and Q(s', a'), none through the actor."""
        with torch.no_grad():
            greedy = self._modules.policy(batch.next_observations).squashed_mu
            noise = self._smoothing_sigma * torch.randn_like(greedy)
            noise = noise.clamp(-self._smoothing_clip, self._smoothing_clip)
            next_actions = (greedy + noise).clamp(-1.0, 1.0)
        value, next_value = continuous_values(
            self._modules.q_funcs, batch.observations, batch.actions, batch.next_observations, next_actions
        )
        next_value = self.backed_up(next_value).expand_as(value)
        return state_value_residual(batch.rewards.squeeze(1), self.discount(batch), value, next_value)

    def compute_actor_loss(self, batch: TorchMiniBatch) -> Any:
        """−λ Q(s, π(s)) + (a − π(s))², λ = alpha / mean |Q|, the first critic's (Fujimoto & Gu 2021)."""
        actions = self._modules.policy(batch.observations).squashed_mu
        value = self._q_func_forwarder.compute_expected_q(batch.observations, actions, "none")[0]
        weight = self._alpha / value.abs().mean().detach()
        bc_loss = (batch.actions - actions).square().mean()
        return TD3PlusBCActorLoss(bc_loss - weight * value.mean(), bc_loss)

    def inner_update(self, batch: TorchMiniBatch, grad_step: int) -> dict[str, float]:
        """The critic at each step, the actor at every `update_actor_interval`-th."""
        metrics = self.update_critic(batch)
        if grad_step % self._actor_interval == 0:
            metrics.update(self.update_actor(batch))
        return metrics

    def inner_sample_action(self, x: Tensor) -> Tensor:
        """(N, k), the greedy actions."""
        return self.inner_predict_best_action(x)


@dataclasses.dataclass()
class KLossTD3PlusBCConfig(KernelCriticConfig):
    """Config of KLossTD3PlusBC; fields as in d3rlpy's TD3PlusBCConfig without the target network's `tau`.

    The kernel's options are in KernelCriticConfig.
    """

    actor_learning_rate: float = 3e-4
    critic_learning_rate: float = 3e-3
    diag_weight: Optional[float] = 0.1  # noqa: UP045
    actor_optim_factory: OptimizerFactory = make_optimizer_field()
    critic_optim_factory: OptimizerFactory = make_optimizer_field()
    actor_encoder_factory: EncoderFactory = make_encoder_field()
    critic_encoder_factory: EncoderFactory = make_encoder_field()
    q_func_factory: QFunctionFactory = make_q_func_field()
    n_critics: int = 2
    target_smoothing_sigma: float = 0.2
    target_smoothing_clip: float = 0.5
    alpha: float = 2.5
    update_actor_interval: int = 2

    def create(self, device: Any = False, enable_ddp: bool = False) -> KLossTD3PlusBC:
        """The algorithm."""
        return KLossTD3PlusBC(self, device, enable_ddp)

    @staticmethod
    def get_type() -> str:
        """Name in files."""
        return "kloss_td3_plus_bc"


class KLossTD3PlusBC(KernelCriticAlgo[Any, Any]):
    """TD3+BC with a kernel-loss critic (Fujimoto & Gu 2021; Feng et al. 2019)."""

    is_deterministic = True

    def __init__(self, config: Any, device: Any = False, enable_ddp: bool = False, impl: Any = None) -> None:
        if config.update_actor_interval < 1:
            raise ConfigError(
                f"update_actor_interval is {config.update_actor_interval!r}; give a positive number"
            )
        super().__init__(config, device, enable_ddp, impl)

    def inner_create_impl(self, observation_shape: Sequence[int], action_size: int) -> None:
        """Networks, optimisers and kernel."""
        config = self._config
        policy = create_deterministic_policy(
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
        modules = KernelActorModules(
            q_funcs=q_funcs,
            critic_optim=critic_optim,
            kernel=self.make_kernel(observation_shape, action_size),
            policy=policy,
            actor_optim=self.make_optimizer(config.actor_optim_factory, policy, config.actor_learning_rate),
        )
        self._impl = KLossTD3PlusBCImpl(
            smoothing=(config.target_smoothing_sigma, config.target_smoothing_clip),
            alpha=config.alpha,
            actor_interval=config.update_actor_interval,
            q_func_forwarder=forwarder,
            modules=modules,
            **self.impl_options(observation_shape, action_size),
        )

    def get_action_type(self) -> ActionSpace:
        """Continuous."""
        return ActionSpace.CONTINUOUS


register_learnable(KLossTD3PlusBCConfig)
