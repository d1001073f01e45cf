"""KLossCQL and KLossDiscreteCQL: conservative critics that minimise the kernel loss."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from koffline.algos.kernel_actor import EntropyModules
from koffline.algos.kernel_impl import ConservativeLoss, KernelCriticModules, discrete_values, taken
from koffline.algos.kloss_dqn import KLossDQN, KLossDQNConfig, KLossDQNImpl
from koffline.algos.kloss_sac import KLossSAC, KLossSACConfig, KLossSACImpl
from koffline.data.d3rlpy_import import import_d3rlpy
from koffline.errors import ConfigError

import_d3rlpy()

from d3rlpy.base import register_learnable  # noqa: E402
from d3rlpy.models.torch import build_squashed_gaussian_distribution  # noqa: E402
from d3rlpy.torch_utility import TorchMiniBatch  # noqa: E402


class KLossCQLImpl(KLossSACImpl):
    """Kernel loss + weight · (log Σ_a exp Q(s, a) − Q(s, a_logged)), the sum by importance sampling."""

    def __init__(self, n_action_samples: int, **common: Any) -> None:
        super().__init__(**common)
        self._n_action_samples = n_action_samples

    def compute_critic_loss(self, batch: TorchMiniBatch) -> ConservativeLoss:
        """Both losses, summed over critics."""
        loss, error = self.kernel_loss_of(self.compute_residual(batch), batch)
        conservative = self._conservative_weight * self.compute_conservative_loss(batch)
        return ConservativeLoss(loss + conservative, error, conservative.detach())

    def compute_conservative_loss(self, batch: TorchMiniBatch) -> Tensor:
        """How far the values of drawn actions lie above those of logged ones (Kumar et al. 2020, CQL(H))."""
        draws, rows = self._n_action_samples, len(batch.observations)
        with torch.no_grad():
            here = build_squashed_gaussian_distribution(self._modules.policy(batch.observations))
            there = build_squashed_gaussian_distribution(self._modules.policy(batch.next_observations))
            uniform = torch.rand(rows, draws, self._action_size).to(batch.actions) * 2.0 - 1.0
            drawn, log_here = here.sample_n_with_log_prob(draws)
            drawn_there, log_there = there.sample_n_with_log_prob(draws)
            log_uniform = torch.full_like(log_here, -self._action_size * math.log(2.0))
            actions = torch.cat((drawn, drawn_there, uniform), dim=1)
            log_density = torch.cat((log_here, log_there, log_uniform), dim=1).squeeze(2)
        count = 3 * draws
        observations = batch.observations.repeat_interleave(count, dim=0)
        everything = torch.cat((observations, batch.observations))
        acted = torch.cat((actions.reshape(rows * count, -1), batch.actions))
        loss = torch.zeros((), dtype=batch.rewards.dtype, device=batch.rewards.device)
        for q_func in self._modules.q_funcs:
            values = q_func(everything, acted).q_value.squeeze(1)
            drawn_values = values[: rows * count].view(rows, count)
            soft_maximum = torch.logsumexp(drawn_values - log_density, dim=1) - math.log(count)
            loss = loss + (soft_maximum - values[rows * count :]).mean()
        return loss


@dataclasses.dataclass()
class KLossCQLConfig(KLossSACConfig):
    """Config of KLossCQL: KLossSACConfig, whose `conservative_weight` weighs CQL's own loss here.

    n_action_samples: draws of each of three proposals (the actor at s, at s', uniform).
    """

    n_action_samples: int = 10

    def create(self, device: Any = False, enable_ddp: bool = False) -> KLossCQL:
        """The algorithm."""
        return KLossCQL(self, device, enable_ddp)

    @staticmethod
    def get_type() -> str:
        """Name in files."""
        return "kloss_cql"


class KLossCQL(KLossSAC):
    """Conservative Q-learning with a kernel-loss critic, continuous (Kumar et al. 2020; Feng et al. 2019)."""

    def make_impl(self, modules: EntropyModules, **options: Any) -> KLossCQLImpl:
        """The implementation over these modules."""
        return KLossCQLImpl(n_action_samples=self._config.n_action_samples, modules=modules, **options)


class KLossDiscreteCQLImpl(KLossDQNImpl):
    """Kernel loss + alpha · (log Σ_a exp Q(s, a) − Q(s, a_logged)), the sum over actions exact."""

    def __init__(self, alpha: float, **common: Any) -> None:
        super().__init__(**common)
        self._alpha = alpha

    def compute_critic_loss(self, batch: TorchMiniBatch) -> ConservativeLoss:
        """Both losses, summed over critics."""
        values, next_values = discrete_values(
            self._modules.q_funcs, batch.observations, batch.next_observations
        )
        loss, error = self.kernel_loss_of(self.residual_of(batch, values, next_values), batch)
        gap = torch.logsumexp(values, dim=2) - taken(values, batch.actions)
        conservative = self._alpha * gap.mean(dim=1).sum()
        return ConservativeLoss(loss + conservative, error, conservative.detach())


@dataclasses.dataclass()
class KLossDiscreteCQLConfig(KLossDQNConfig):
    """Config of KLossDiscreteCQL: KLossDQNConfig and `alpha`, the weight of the conservative loss."""

    alpha: float = 1.0

    def create(self, device: Any = False, enable_ddp: bool = False) -> KLossDiscreteCQL:
        """The algorithm."""
        return KLossDiscreteCQL(self, device, enable_ddp)

    @staticmethod
    def get_type() -> str:
        """Name in files."""
        return "kloss_discrete_cql"


class KLossDiscreteCQL(KLossDQN):
    """Conservative Q-learning with a kernel-loss critic, discrete (Kumar et al. 2020; Feng et al. 2019)."""

    def __init__(self, config: Any, device: Any = False, enable_ddp: bool = False, impl: Any = None) -> None:
        if not config.alpha >= 0.0:
            raise ConfigError(f"alpha is {config.alpha!r}; give 0 or a positive number")
        super().__init__(config, device, enable_ddp, impl)

    def make_impl(self, modules: KernelCriticModules, **options: Any) -> KLossDiscreteCQLImpl:
        """The implementation over these modules."""
        return KLossDiscreteCQLImpl(alpha=self._config.alpha, modules=modules, **options)


register_learnable(KLossCQLConfig)
register_learnable(KLossDiscreteCQLConfig)
