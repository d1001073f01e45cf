"""Continuous actor-critics with the kernel loss.

KLossIQL, KLossAWAC, KLossReBRAC, KLossCalQL and KLossBCQ are d3rlpy's own algorithms,
with the kernel loss in place of the critics' squared error; s' is valued by a slow
copy, or in KLossIQL by a state value of its own.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Optional

import torch
from d3rlpy.algos import qlearning
from d3rlpy.models.builders import create_deterministic_policy, create_normal_policy
from d3rlpy.models.torch import (
    SquashedGaussianDistribution,
    build_squashed_gaussian_distribution,
)
from d3rlpy.torch_utility import TorchMiniBatch
from jaxtyping import Float
from torch import Tensor

from koffline.algos.kernel_algo import ComposedAlgo, ComposedConfig, KernelCriticAlgo
from koffline.algos.kernel_bellman_loss import ActorCriticConfig, registered
from koffline.algos.kernel_critic import KernelImpl, Losses


class KLossSACImpl(KernelImpl):
    """δ = r + discount · [Q(s', a') − α log π(a'|s')] − Q(s, a), a' drawn from the
    actor.

    conservative_weight adds weight · mean[Q(s, a ~ π) − Q(s, a_logged)] to the loss.
    """

    @property
    def values_drawn_actions(self) -> bool:
        """Whether `conservative_loss` needs the values of actions drawn at s."""
        return self._config.conservative_weight > 0.0

    def compute_critic_loss(self, batch: TorchMiniBatch) -> Losses:
        """Gradient through Q(s, a) and Q(s', a'), none through the actor.

        (Feng et al. 2019, equ:bvsopt)
        """
        rows = len(batch.rewards)
        observations = batch.next_observations
        if self.values_drawn_actions:
            observations = torch.cat((batch.observations, batch.next_observations))
        with torch.no_grad():
            actor = self.distribution(observations)
            actions, log_probability = actor.sample_with_log_prob()
            entropy = (self.temperature * log_probability).squeeze(1)
        drawn = None
        if self.values_drawn_actions:
            drawn = actions[:rows]
        values, next_value = self.values_of_both(batch, actions[-rows:], drawn)
        next_value = self.backed_up(next_value) - entropy[-rows:]
        residual = self.residual(batch, values[:, :rows], next_value)
        return self.kernel_losses(
            batch, residual, self.conservative_loss(batch, values)
        )

    def conservative_loss(
        self, batch: TorchMiniBatch, values: Float[Tensor, "critic rows"]
    ) -> Tensor | None:
        """weight · mean[Q(s, a ~ π) − Q(s, a_logged)], summed over critics.

        values: of the logged actions, then of the drawn ones. None for a weight of 0.
        """
        if not self.values_drawn_actions:
            return None
        rows = len(batch.rewards)
        gap = (values[:, rows:] - values[:, :rows]).mean(dim=1).sum()
        return self._config.conservative_weight * gap

    def compute_actor_loss(self, batch: TorchMiniBatch) -> Losses:
        """α log π(a|s) − min_i Q_i(s, a), a drawn with gradient; also takes a step of
        the temperature.
        """
        policy = self.distribution(batch.observations)
        actions, log_probability = policy.sample_with_log_prob()
        temp_loss = self.update_temperature(log_probability - self._action_size)
        temperature = self.temperature
        value = self.q_values(batch.observations, actions).amin(dim=0).unsqueeze(1)
        loss = (temperature.detach() * log_probability - value).mean()
        return {"actor_loss": loss, "temp_loss": temp_loss, "temp": temperature[0][0]}

    def distribution(self, x: Tensor) -> SquashedGaussianDistribution:
        """The actor's squashed Gaussian."""
        return build_squashed_gaussian_distribution(self._modules.policy(x))


class KLossCQLImpl(KLossSACImpl):
    """As KLossSACImpl; the conservative loss is weight · (log Σ_a exp Q(s, a) −
    Q(s, a_logged)), the sum by importance sampling.
    """

    values_drawn_actions = False  # it draws its own

    def conservative_loss(
        self, batch: TorchMiniBatch, values: Float[Tensor, "critic rows"]
    ) -> Tensor:
        """weight · (log Σ_a exp Q(s, a) − Q(s, a_logged)), summed over critics.

        The sum has n_action_samples draws each of the actor at s, the actor at s' and
        the uniform distribution (Kumar et al. 2020, CQL(H)). values: not used, because
        all actions at s are valued together.
        """
        rows = len(batch.observations)
        draws = self._config.n_action_samples
        count = 3 * draws
        with torch.no_grad():
            here = self.distribution(batch.observations)
            there = self.distribution(batch.next_observations)
            uniform = (
                torch.rand(rows, draws, self._action_size).to(batch.actions) * 2.0 - 1.0
            )
            drawn, log_here = here.sample_n_with_log_prob(draws)
            drawn_there, log_there = there.sample_n_with_log_prob(draws)
            log_uniform = torch.full_like(log_here, -self._action_size * math.log(2.0))
            actions = torch.cat((drawn, drawn_there, uniform), dim=1)
            log_density = torch.cat((log_here, log_there, log_uniform), dim=1)
            log_density = log_density.squeeze(2)
        observations = torch.cat(
            (batch.observations.repeat_interleave(count, dim=0), batch.observations)
        )
        both = torch.cat((actions.reshape(rows * count, -1), batch.actions))
        values = self.q_values(observations, both)  # (critic, rows · count + rows)
        drawn_values = values[:, : rows * count].view(-1, rows, count)
        soft_maximum = torch.logsumexp(drawn_values - log_density, dim=2)
        soft_maximum = soft_maximum - math.log(count)
        gap = (soft_maximum - values[:, rows * count :]).mean(dim=1).sum()
        return self._config.conservative_weight * gap


@dataclasses.dataclass()
class KLossSACConfig(ActorCriticConfig, qlearning.SACConfig):
    """Config of KLossSAC; fields as in d3rlpy's SACConfig.

    conservative_weight: weight of Q(s, a ~ π) − Q(s, a_logged). Because the gradient
    flows through Q(s', a'), a critic can solve its equation by overrating the actor's
    actions where the log has none; this term prevents it. 0 is plain SAC, which is
    right if actions can be tried out (online).
    """

    diag_weight: Optional[float] = None  # noqa: UP045  (d3rlpy reads the annotations)
    conservative_weight: float = 0.1


@dataclasses.dataclass()
class KLossCQLConfig(KLossSACConfig):
    """Config of KLossCQL: as KLossSACConfig, but `conservative_weight` is the weight of
    CQL's own loss.

    n_action_samples: draws of each of three proposals (the actor at s, at s', uniform).
    """

    n_action_samples: int = 10


@registered("kloss_sac", KLossSACConfig)
class KLossSAC(KernelCriticAlgo):
    """Soft actor-critic with a kernel-loss critic, continuous (Haarnoja et al. 2018;
    Feng et al. 2019).
    """

    impl_class = KLossSACImpl
    create_policy = staticmethod(create_normal_policy)


@registered("kloss_cql", KLossCQLConfig)
class KLossCQL(KLossSAC):
    """Conservative Q-learning with a kernel-loss critic, continuous (Kumar et al. 2020;
    Feng et al. 2019).
    """

    impl_class = KLossCQLImpl


class KLossTD3PlusBCImpl(KernelImpl):
    """δ = r + discount · Q(s', π(s') + clipped noise) − Q(s, a), with the current
    actor.
    """

    def compute_critic_loss(self, batch: TorchMiniBatch) -> Losses:
        """Gradient through Q(s, a) and Q(s', a'), none through the actor."""
        sigma = self._config.target_smoothing_sigma
        limit = self._config.target_smoothing_clip
        with torch.no_grad():
            greedy = self._modules.policy(batch.next_observations).squashed_mu
            noise = (sigma * torch.randn_like(greedy)).clamp(-limit, limit)
            next_actions = (greedy + noise).clamp(-1.0, 1.0)
        value, next_value = self.values_of_both(batch, next_actions)
        return self.kernel_losses(
            batch, self.residual(batch, value, self.backed_up(next_value))
        )

    def compute_actor_loss(self, batch: TorchMiniBatch) -> Losses:
        """−λ Q(s, π(s)) + (a − π(s))², λ = alpha / mean |Q|, Q by the first critic
        (Fujimoto & Gu 2021).
        """
        actions = self._modules.policy(batch.observations).squashed_mu
        value = self.q_values(batch.observations, actions)[0]
        weight = self._config.alpha / value.abs().mean().detach()
        bc_loss = (batch.actions - actions).square().mean()
        return {"actor_loss": bc_loss - weight * value.mean(), "bc_loss": bc_loss}

    inner_sample_action = KernelImpl.inner_predict_best_action


@dataclasses.dataclass()
class KLossTD3PlusBCConfig(ActorCriticConfig, qlearning.TD3PlusBCConfig):
    """Config of KLossTD3PlusBC; fields as in d3rlpy's TD3PlusBCConfig.

    tau: rate of the slow copy that values s'; with 0, Pendulum's expert was learned two
    thirds as well. backup: the minimum over critics, as in the original.
    """

    tau: float = 0.02
    backup: str = "min"


@registered("kloss_td3_plus_bc", KLossTD3PlusBCConfig)
class KLossTD3PlusBC(KernelCriticAlgo):
    """TD3+BC with a kernel-loss critic (Fujimoto & Gu 2021; Feng et al. 2019)."""

    impl_class = KLossTD3PlusBCImpl
    create_policy = staticmethod(create_deterministic_policy)


@dataclasses.dataclass()
class KLossIQLConfig(ComposedConfig, qlearning.IQLConfig):
    """Config of KLossIQL; fields as in d3rlpy's IQLConfig.

    tau: rate of the slow copy of the critics, which the state value and the actor use;
    with the critics themselves, the original and this variant learn much worse.
    """

    tau: float = 0.005


@registered("kloss_iql", KLossIQLConfig)
class KLossIQL(ComposedAlgo, qlearning.IQL):
    """Implicit Q-learning with a kernel-loss critic (Kostrikov et al. 2022; Feng et al.
    2019).
    """


@dataclasses.dataclass()
class KLossAWACConfig(ComposedConfig, qlearning.AWACConfig):
    """Config of KLossAWAC; fields as in d3rlpy's AWACConfig."""


@registered("kloss_awac", KLossAWACConfig)
class KLossAWAC(ComposedAlgo, qlearning.AWAC):
    """Advantage-weighted actor-critic with a kernel-loss critic (Nair et al. 2020; Feng
    et al. 2019).
    """


@dataclasses.dataclass()
class KLossReBRACConfig(ComposedConfig, qlearning.ReBRACConfig):
    """Config of KLossReBRAC; fields as in d3rlpy's ReBRACConfig.

    actor_beta: d3rlpy's 0.001 is too small to keep the actor near a log that one policy
    wrote (Pendulum, one seed).
    """

    actor_beta: float = 0.1


@registered("kloss_rebrac", KLossReBRACConfig)
class KLossReBRAC(ComposedAlgo, qlearning.ReBRAC):
    """ReBRAC with a kernel-loss critic (Tarasov et al. 2023; Feng et al. 2019)."""


@dataclasses.dataclass()
class KLossCalQLConfig(ComposedConfig, qlearning.CalQLConfig):
    """Config of KLossCalQL; fields as in d3rlpy's CalQLConfig."""


@registered("kloss_cal_ql", KLossCalQLConfig)
class KLossCalQL(ComposedAlgo, qlearning.CalQL):
    """Calibrated Q-learning with a kernel-loss critic (Nakamoto et al. 2023; Feng et
    al. 2019).
    """


@dataclasses.dataclass()
class KLossBCQConfig(ComposedConfig, qlearning.BCQConfig):
    """Config of KLossBCQ; fields as in d3rlpy's BCQConfig."""


@registered("kloss_bcq", KLossBCQConfig)
class KLossBCQ(ComposedAlgo, qlearning.BCQ):
    """Batch-constrained Q-learning with a kernel-loss critic (Fujimoto et al. 2019;
    Feng et al. 2019).
    """
