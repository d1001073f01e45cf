"""KLossIQL: in-sample batch control; the action value minimises the kernel loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Optional

import torch
from d3rlpy.models.builders import create_normal_policy, create_value_function
from d3rlpy.models.encoders import EncoderFactory, make_encoder_field
from d3rlpy.models.torch import ValueFunction, build_gaussian_distribution
from d3rlpy.torch_utility import TorchMiniBatch, hard_sync, soft_sync
from jaxtyping import Float
from torch import Tensor, nn

from koffline.algos.kernel_algo import KernelCriticAlgo
from koffline.algos.kernel_critic import ActorModules, KernelImpl, Losses
from koffline.algos.options import ActorCriticConfig, registered


@dataclasses.dataclass(frozen=True)
class KLossIQLModules(ActorModules):
    """With the state value, which one optimiser trains together with the critics, and their slow copy."""

    value_func: ValueFunction
    slow_q_funcs: nn.ModuleList


class KLossIQLImpl(KernelImpl):
    """δ = r + discount · V(s') − Q(s, a), V an upper expectile of Q over the logged actions.

    V and the actor look at a slowly moving copy of Q: the two fixed-point problems are coupled, and with Q
    itself both the original and this one learn far worse. The kernel loss has no part in it.
    """

    def compute_critic_loss(self, batch: TorchMiniBatch) -> Losses:
        """The kernel loss of the critics plus the expectile loss of V, one pass through each network.

        Gradient through Q(s, a); V is defined by its own loss, so none flows into V(s').
        """
        expectile = self._config.expectile
        values = self.q_values(batch.observations, batch.actions)
        both = torch.cat((batch.observations, batch.next_observations))
        value, next_value = self._modules.value_func(both).squeeze(1).chunk(2)
        losses = self.kernel_losses(batch, self.residual(batch, values, next_value.detach()))
        difference = self._slow_values(batch) - value
        weight = torch.where(difference < 0.0, 1.0 - expectile, expectile)
        q_loss, v_loss = losses["critic_loss"], (weight * difference.square()).mean()
        parts = {"q_loss": q_loss.detach(), "v_loss": v_loss.detach()}
        return {**losses, "critic_loss": q_loss + v_loss, **parts}

    def compute_actor_loss(self, batch: TorchMiniBatch) -> Losses:
        """−exp(β (Q − V)) log π(a|s), the weight capped (Kostrikov et al. 2022)."""
        with torch.no_grad():
            value = self._modules.value_func(batch.observations).squeeze(1)
            advantage = self._slow_values(batch) - value
            weight = (self._config.weight_temp * advantage).exp().clamp(max=self._config.max_weight)
        policy = build_gaussian_distribution(self._modules.policy(batch.observations))
        return {"actor_loss": -(weight * policy.log_prob(batch.actions).squeeze(1)).mean()}

    def inner_predict_best_action(self, x: Tensor) -> Tensor:
        """(N, k) in [−1, 1], the squashed mean."""
        return self._modules.policy(x).squashed_mu

    def inner_sample_action(self, x: Tensor) -> Tensor:
        """(N, k) drawn from the actor."""
        return build_gaussian_distribution(self._modules.policy(x)).sample()

    def inner_update(self, batch: TorchMiniBatch, grad_step: int) -> dict[str, float]:
        """Critic and value, actor, then the slow copy."""
        metrics = super().inner_update(batch, grad_step)
        soft_sync(self._modules.slow_q_funcs, self._modules.q_funcs, self._config.tau)
        return metrics

    def _slow_values(self, batch: TorchMiniBatch) -> Float[Tensor, " row"]:
        """min over critics of the slow copy's Q(s, a), without gradient."""
        with torch.no_grad():
            slow = self._modules.slow_q_funcs
            return self.q_values(batch.observations, batch.actions, slow).amin(dim=0)


@dataclasses.dataclass()
class KLossIQLConfig(ActorCriticConfig):
    """Config of KLossIQL; fields as in d3rlpy's IQLConfig.

    tau: rate of the slow copy of the critics that the state value and the actor look at.
    """

    diag_weight: Optional[float] = 0.1  # noqa: UP045
    value_encoder_factory: EncoderFactory = make_encoder_field()
    tau: float = 0.005
    expectile: float = 0.7
    weight_temp: float = 3.0
    max_weight: float = 100.0


@registered("kloss_iql", KLossIQLConfig)
class KLossIQL(KernelCriticAlgo):
    """Implicit Q-learning with a kernel-loss critic (Kostrikov et al. 2022; Feng et al. 2019)."""

    impl_class = KLossIQLImpl

    def make_modules(self, observation_shape: Sequence[int], action_size: int) -> KLossIQLModules:
        """Networks, optimisers and kernel."""
        where = {"device": self._device, "enable_ddp": self._enable_ddp}
        bounds = {"min_logstd": -5.0, "max_logstd": 2.0, "use_std_parameter": True}
        actor = self.actor_parts(create_normal_policy, observation_shape, action_size, **bounds)
        encoder = self._config.value_encoder_factory
        value_func = create_value_function(observation_shape, encoder, **where)
        q_funcs, slow_q_funcs = (self.make_q_funcs(observation_shape, action_size) for _ in range(2))
        hard_sync(slow_q_funcs, q_funcs)
        return KLossIQLModules(
            **actor,
            q_funcs=q_funcs,
            critic_optim=self.make_optimizer("critic_", q_funcs, value_func),
            kernel=self.make_kernel(observation_shape, action_size),
            value_func=value_func,
            slow_q_funcs=slow_q_funcs,
        )
