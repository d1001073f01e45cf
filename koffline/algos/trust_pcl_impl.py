"""The implementation of TrustPCL: residuals of paths, and the step of values and policy."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from koffline.algos.kernel_impl import CriticLoss, KernelCriticImpl, KernelCriticModules
from koffline.algos.linear_gaussian import LinearGaussianPolicy
from koffline.algos.path_batch import TorchPathBatch
from koffline.data.d3rlpy_import import import_d3rlpy

import_d3rlpy()

from d3rlpy.models.torch import build_gaussian_distribution  # noqa: E402
from d3rlpy.optimizers import OptimizerWrapper  # noqa: E402
from d3rlpy.torch_utility import hard_sync, soft_sync, unwrap_ddp_model  # noqa: E402


@dataclasses.dataclass(frozen=True)
class TrustPCLModules(KernelCriticModules):
    """q_funcs are state values here; both they and the policy have a slow copy."""

    targ_q_funcs: nn.ModuleList
    policy: nn.Module
    targ_policy: nn.Module
    actor_optim: OptimizerWrapper


@dataclasses.dataclass(frozen=True)
class PathConsistencyLoss(CriticLoss):
    """The critic's loss and the policy's surrogate."""

    actor_loss: Tensor


@dataclasses.dataclass(frozen=True)
class Coefficients:
    """Of entropy (the paper's λ), of the divergence from the slow policy (its τ), the clip, the decay."""

    entropy_coef: float
    kl_coef: float
    clip_adv: float
    target_decay: float


class TrustPCLImpl(KernelCriticImpl):
    """R = −V(s_0) + γ^d V(s_d) + Σ_t γ^t [r_t − (λ + τ) log π(a_t|s_t) + τ log π̃(a_t|s_t)].

    (Feng et al. 2019, alg:kloss_pcl; Nachum et al. 2018)
    """

    def __init__(self, critic: str, coefficients: Coefficients, **common: Any) -> None:
        super().__init__(**common)
        self._critic = critic
        self._coefficients = coefficients
        hard_sync(self._modules.targ_q_funcs, self._modules.q_funcs)
        hard_sync(self._modules.targ_policy, self._modules.policy)

    def inner_update(self, batch: Any, grad_step: int) -> dict[str, float]:
        """The slow copies move, then one step of critic and policy."""
        rate = 1.0 - self._coefficients.target_decay
        soft_sync(self._modules.targ_q_funcs, self._modules.q_funcs, rate)
        soft_sync(self._modules.targ_policy, self._modules.policy, rate)
        self._modules.actor_optim.zero_grad()
        metrics = self.update_critic(batch)
        self._modules.actor_optim.step()
        return metrics

    def compute_critic_loss(self, batch: Any) -> PathConsistencyLoss:
        """Critic's loss plus policy's surrogate; their gradients reach different networks."""
        paths = TorchPathBatch.of(batch)
        log_probability = self.log_probabilities(self._modules.policy, paths)
        residual = self._residual(paths, log_probability.detach())
        critic_loss = self._critic_loss(residual, paths)
        advantage = residual.detach().mean(dim=0)
        if self._coefficients.clip_adv > 0.0:
            advantage = advantage.clamp(-self._coefficients.clip_adv, self._coefficients.clip_adv)
        actor_loss = -(advantage * (self._discounts(paths) * log_probability).sum(dim=1)).mean()
        return PathConsistencyLoss(critic_loss, residual.detach().square().mean(), actor_loss)

    def compute_critic_grad(self, batch: Any) -> PathConsistencyLoss:
        """Gradients into values and policy from one pass; nothing steps."""
        self._modules.critic_optim.zero_grad()
        loss = self.compute_critic_loss(batch)
        (loss.critic_loss + loss.actor_loss).backward()
        return loss

    def compute_residual(self, batch: Any) -> Float[Tensor, "critic row"]:
        """R of every path, with gradient through the values the critic's kind lets through."""
        paths = TorchPathBatch.of(batch)
        return self._residual(paths, self.log_probabilities(self._modules.policy, paths).detach())

    def log_probabilities(self, policy: Any, paths: TorchPathBatch) -> Float[Tensor, "row step"]:
        """log π of the logged actions; zero past a path's end."""
        log_probability = self.log_density(policy, paths.path_observations, paths.path_actions)
        return log_probability.view(paths.mask.shape) * paths.mask

    def log_density(self, policy: Any, observations: Tensor, actions: Tensor) -> Float[Tensor, " row"]:
        """log π(a|s)."""
        policy_here = build_gaussian_distribution(policy(observations))
        return policy_here.log_prob(actions).squeeze(1)

    def inner_predict_best_action(self, x: Tensor) -> Tensor:
        """(N, k), the mean, within reach."""
        return self._within_reach(self._modules.policy(x).squashed_mu)

    def inner_sample_action(self, x: Tensor) -> Tensor:
        """(N, k), drawn and cut to [−1, 1], or to the policy's own limits."""
        output = self._modules.policy(x)
        return self._within_reach(output.squashed_mu + output.logstd.exp() * torch.randn_like(output.mu))

    def inner_predict_value(self, x: Tensor, action: Tensor) -> Tensor:
        """Q(s, a) that path consistency implies: V(s) + (λ + τ) log π(a|s) − τ log π̃(a|s)."""
        c = self._coefficients
        value = self._values(self._modules.q_funcs, x).mean(dim=0)
        here = self.log_density(self._modules.policy, x, action)
        slow = self.log_density(self._modules.targ_policy, x, action)
        return value + (c.entropy_coef + c.kl_coef) * here - c.kl_coef * slow

    @property
    def policy(self) -> Any:
        """The policy."""
        return self._modules.policy

    @property
    def policy_optim(self) -> torch.optim.Optimizer:
        """The policy's optimiser."""
        return self._modules.actor_optim.optim

    def _within_reach(self, actions: Tensor) -> Tensor:
        """Cut to the policy's limits: its own where it has some, else [−1, 1]."""
        policy = unwrap_ddp_model(self._modules.policy)
        if isinstance(policy, LinearGaussianPolicy):
            return policy.cut(actions)
        return actions.clamp(-1.0, 1.0)

    def _residual(self, paths: TorchPathBatch, log_probability: Tensor) -> Float[Tensor, "critic row"]:
        c = self._coefficients
        with torch.no_grad():
            slow = self.log_probabilities(self._modules.targ_policy, paths)
        reward = paths.path_rewards - (c.entropy_coef + c.kl_coef) * log_probability + c.kl_coef * slow
        gained = (self._discounts(paths) * reward).sum(dim=1)
        value, next_value = self._both_values(paths)
        return gained + self.discount(paths) * self.backed_up(next_value) - value

    def _both_values(self, paths: TorchPathBatch) -> tuple[Tensor, Tensor]:
        """V(s_0) and V(s_d), the latter as the critic's kind has it."""
        if self._critic == "fvi":
            with torch.no_grad():
                next_value = self._values(self._modules.targ_q_funcs, paths.next_observations)
            return self._values(self._modules.q_funcs, paths.observations), next_value
        both = torch.cat((paths.observations, paths.next_observations))
        value, next_value = self._values(self._modules.q_funcs, both).chunk(2, dim=1)
        return value, next_value.detach() if self._critic == "td0" else next_value

    def _critic_loss(self, residual: Tensor, paths: TorchPathBatch) -> Tensor:
        if self._critic == "kloss":
            return self._modules.kernel(residual, paths.observations, paths.actions).sum()
        return residual.square().mean(dim=1).sum()

    def _discounts(self, paths: TorchPathBatch) -> Float[Tensor, "row step"]:
        """γ^t, zero past a path's end."""
        steps = torch.arange(paths.mask.shape[1], device=paths.mask.device)
        return self._gamma**steps * paths.mask

    @staticmethod
    def _values(functions: nn.ModuleList, observations: Tensor) -> Float[Tensor, "critic row"]:
        return torch.stack([function(observations).squeeze(1) for function in functions])


class DiscreteTrustPCLImpl(TrustPCLImpl):
    """The same for a categorical policy."""

    def log_density(self, policy: Any, observations: Tensor, actions: Tensor) -> Float[Tensor, " row"]:
        """log π(a|s)."""
        return policy(observations).log_prob(actions.reshape(-1))

    def action_probabilities(self, x: Tensor) -> Float[Tensor, "row action"]:
        """The policy's."""
        return self._modules.policy(x).probs

    def inner_predict_best_action(self, x: Tensor) -> Tensor:
        """(N,) most probable actions."""
        return self._modules.policy(x).probs.argmax(dim=1)

    def inner_sample_action(self, x: Tensor) -> Tensor:
        """(N,) drawn from the policy."""
        return self._modules.policy(x).sample()
