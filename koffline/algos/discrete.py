"""Discrete control on the kernel loss: KLossDQN, KLossDiscreteCQL and
KLossDiscreteSAC.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Optional

import torch
from d3rlpy.algos.qlearning import SACConfig
from d3rlpy.constants import ActionSpace
from d3rlpy.models.builders import create_categorical_policy
from d3rlpy.torch_utility import TorchMiniBatch
from jaxtyping import Float
from torch import Tensor

from koffline.algos.kernel_algo import KernelCriticAlgo
from koffline.algos.kernel_bellman_loss import (
    ActorCriticConfig,
    CriticConfig,
    registered,
)
from koffline.algos.kernel_critic import KernelImpl, Losses, taken

# target entropy of the temperature, as a share of the largest possible entropy, log n
ENTROPY_SHARE = 0.98


class KLossDQNImpl(KernelImpl):
    """δ = r + discount · max_a' Q(s', a') − Q(s, a), or with the soft maximum if
    temperature > 0.
    """

    logs_loss = True

    def compute_critic_loss(self, batch: TorchMiniBatch) -> Losses:
        """Gradient through Q(s, a) and through the maximum at s'.

        (Feng et al. 2019, sec:background)
        """
        values, next_values = self.values_of_both(batch)
        value = taken(values, batch.actions)
        next_value = self.greatest(self.backed_up(next_values))
        residual = self.residual(batch, value, next_value)
        return self.kernel_losses(
            batch, residual, self.conservative_loss(batch, values)
        )

    def conservative_loss(
        self, batch: TorchMiniBatch, values: Float[Tensor, "critic row action"]
    ) -> Tensor | None:
        """What is added to the kernel loss: nothing in Q-learning."""
        return None

    def greatest(
        self, values: Float[Tensor, "critic row action"]
    ) -> Float[Tensor, "critic row"]:
        """Maximum over actions, or the soft maximum: temperature · log Σ_a exp(Q /
        temperature).
        """
        if self._config.temperature == 0.0:
            return values.amax(dim=2)
        return self.temperature * torch.logsumexp(values / self.temperature, dim=2)

    @property
    def temperature(self) -> Tensor:
        """The option `temperature` in units of scaled reward; while all rewards were
        zero, as it is.
        """
        return self._config.temperature * self._modules.kernel.reward_size.nan_to_num(
            1.0
        )

    def inner_predict_best_action(self, x: Tensor) -> Tensor:
        """Greedy actions (N,)."""
        return self.q_values(x).mean(dim=0).argmax(dim=1)

    def inner_sample_action(self, x: Tensor) -> Tensor:
        """Actions (N,) drawn from softmax(Q / temperature); greedy without a
        temperature.
        """
        if self._config.temperature == 0.0:
            return self.inner_predict_best_action(x)
        return torch.distributions.Categorical(self.action_probabilities(x)).sample()

    def action_probabilities(self, x: Tensor) -> Float[Tensor, "row action"]:
        """Probabilities softmax(Q / temperature); only for a positive temperature."""
        return torch.softmax(self.q_values(x).mean(dim=0) / self.temperature, dim=1)


class KLossDiscreteCQLImpl(KLossDQNImpl):
    """As KLossDQNImpl, with alpha · (log Σ_a exp Q(s, a) − Q(s, a_logged)) added to the
    loss.
    """

    def conservative_loss(
        self, batch: TorchMiniBatch, values: Float[Tensor, "critic row action"]
    ) -> Tensor:
        """alpha · (log Σ_a exp Q(s, a) − Q(s, a_logged)), summed over critics; the sum
        over actions is exact (Kumar et al. 2020).
        """
        gap = torch.logsumexp(values, dim=2) - taken(values, batch.actions)
        return self._config.alpha * gap.mean(dim=1).sum()


@dataclasses.dataclass()
class KLossDQNConfig(CriticConfig):
    """Config of KLossDQN: discrete control.

    temperature: 0 gives the maximum, as in Bellman's equation; above 0 the soft
        (entropy-regularised) maximum. Its entropy coefficient T is this number times
        the mean absolute (scaled) reward of a step in the log, which is measured before
        the first gradient step and saved with the model (`impl.temperature`). The soft
        maximum adds at most T log n / (1 − gamma) to the values of n actions: a share
        temperature · log n of what the mean absolute reward is worth. With a hard
        maximum the gradient at s' reaches one action only, which flattens the
        differences between actions; a small temperature distributes it and makes
        training steadier. The policy that is sampled and evaluated is softmax(Q / T);
        `predict` is greedy.
    Other fields as in d3rlpy's DQNConfig; the kernel's in KernelCriticConfig.
    """

    batch_size: int = 256
    learning_rate: float = 3e-3
    diag_weight: Optional[float] = 0.1  # noqa: UP045
    temperature: float = 0.1


@dataclasses.dataclass()
class KLossDiscreteCQLConfig(KLossDQNConfig):
    """Config of KLossDiscreteCQL: KLossDQNConfig and `alpha`, the weight of the
    conservative loss.
    """

    alpha: float = 1.0


@registered("kloss_dqn", KLossDQNConfig)
class KLossDQN(KernelCriticAlgo):
    """Q-learning whose critic minimises the kernel loss of the optimality residual."""

    action_type = ActionSpace.DISCRETE
    impl_class = KLossDQNImpl


@registered("kloss_discrete_cql", KLossDiscreteCQLConfig)
class KLossDiscreteCQL(KLossDQN):
    """Conservative Q-learning with a kernel-loss critic, discrete (Kumar et al. 2020;
    Feng et al. 2019).
    """

    impl_class = KLossDiscreteCQLImpl


class KLossDiscreteSACImpl(KernelImpl):
    """δ = r + discount · Σ_a' π(a'|s') [Q(s', a') − α log π(a'|s')] − Q(s, a)."""

    def compute_critic_loss(self, batch: TorchMiniBatch) -> Losses:
        """Gradient through Q(s, a) and Q(s', ·), none through the actor.

        (Feng et al. 2019, equ:bvsopt)
        """
        with torch.no_grad():
            policy = self._modules.policy(batch.next_observations)
            cost = self.temperature * policy.logits
        values, next_values = self.values_of_both(batch)
        next_value = (policy.probs * (self.backed_up(next_values) - cost)).sum(dim=2)
        return self.kernel_losses(
            batch, self.residual(batch, taken(values, batch.actions), next_value)
        )

    def compute_actor_loss(self, batch: TorchMiniBatch) -> Losses:
        """Σ_a π(a|s) [α log π(a|s) − min_i Q_i(s, a)]; also takes a step of the
        temperature.
        """
        with torch.no_grad():
            value = self.q_values(batch.observations).amin(dim=0)
        policy = self._modules.policy(batch.observations)
        negative_entropy = (policy.probs * policy.logits).sum(dim=1, keepdim=True)
        excess = negative_entropy + ENTROPY_SHARE * math.log(self._action_size)
        temp_loss = self.update_temperature(excess)
        temperature = self.temperature
        loss = (
            (policy.probs * (temperature.detach() * policy.logits - value))
            .sum(dim=1)
            .mean()
        )
        return {"actor_loss": loss, "temp_loss": temp_loss, "temp": temperature[0][0]}


@dataclasses.dataclass()
class KLossDiscreteSACConfig(ActorCriticConfig, SACConfig):
    """Config of KLossDiscreteSAC; fields as in d3rlpy's SACConfig."""


@registered("kloss_discrete_sac", KLossDiscreteSACConfig)
class KLossDiscreteSAC(KernelCriticAlgo):
    """Soft actor-critic with a kernel-loss critic, discrete (Christodoulou 2019; Feng
    et al. 2019).
    """

    action_type = ActionSpace.DISCRETE
    impl_class = KLossDiscreteSACImpl
    create_policy = staticmethod(create_categorical_policy)
