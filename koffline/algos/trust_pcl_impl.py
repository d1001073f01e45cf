"""The implementation of TrustPCL: residuals of paths, the step of values and policy; online runs' policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from d3rlpy.models.torch import ActionOutput, build_gaussian_distribution, compute_output_size
from d3rlpy.torch_utility import soft_sync, unwrap_ddp_model, wrap_model_by_ddp
from jaxtyping import Float
from torch import Tensor, nn

from koffline.algos.kernel_critic import ActorModules, KernelImpl, Losses
from koffline.algos.paths import TorchPathBatch


@dataclasses.dataclass(frozen=True)
class TrustPCLModules(ActorModules):
    """q_funcs are state values here; both they and the policy have a slow copy."""

    targ_q_funcs: nn.ModuleList
    targ_policy: nn.Module


class LinearGaussianPolicy(nn.Module):
    """N(mean(s), exp(log_std)²) per action number; log_std (1, k) does not depend on the state.

    Density and gradients are those of the unlimited Gaussian; `low` and `high` (1, k) are what `cut` keeps
    actions within, in the policy's units, and are saved with the weights. (Nachum et al. 2018)
    """

    low: Tensor
    high: Tensor

    def __init__(self, encoder: nn.Module, hidden_size: int, action_size: int) -> None:
        super().__init__()
        self._encoder = encoder
        self._mu = nn.Linear(hidden_size, action_size)
        self._logstd = nn.Parameter(torch.zeros(1, action_size))
        self.register_buffer("low", torch.full((1, action_size), -1.0))
        self.register_buffer("high", torch.ones(1, action_size))

    def forward(self, x: Any) -> ActionOutput:
        """Mean, once more in the place where other policies have theirs squashed, and log-deviation."""
        mean = self._mu(self._encoder(x))
        return ActionOutput(mean, mean, self._logstd.expand_as(mean))

    def cut(self, actions: Tensor) -> Tensor:
        """(N, k) within the limits."""
        return torch.minimum(torch.maximum(actions, self.low), self.high)


def create_linear_gaussian_policy(
    observation_shape: Sequence[int], action_size: int, encoder_factory: Any, device: str, enable_ddp: bool
) -> Any:
    """The policy with a fresh encoder, on the device."""
    encoder = encoder_factory.create(observation_shape)
    hidden_size = compute_output_size([observation_shape], encoder)
    policy: nn.Module = LinearGaussianPolicy(encoder, hidden_size, action_size).to(device)
    return wrap_model_by_ddp(policy) if enable_ddp else policy


class TrustPCLImpl(KernelImpl):
    """R = −V(s_0) + γ^d V(s_d) + Σ_t γ^t [r_t − (λ + τ) log π(a_t|s_t) + τ log π̃(a_t|s_t)].

    (Feng et al. 2019, alg:kloss_pcl; Nachum et al. 2018)
    """

    is_captured = False

    def inner_update(self, batch: Any, grad_step: int) -> dict[str, float]:
        """The slow copies move, then one step of critic and policy."""
        rate = 1.0 - self._config.target_decay
        soft_sync(self._modules.targ_q_funcs, self._modules.q_funcs, rate)
        soft_sync(self._modules.targ_policy, self._modules.policy, rate)
        self._modules.actor_optim.zero_grad()
        metrics = self.update_critic(batch)
        self._modules.actor_optim.step()
        return metrics

    def compute_critic_loss(self, batch: Any) -> Losses:
        """Critic's loss and policy's surrogate; their gradients reach different networks."""
        paths = TorchPathBatch.of(batch)
        log_probability = self.log_probabilities(self._modules.policy, paths)
        residual = self._path_residual(paths, log_probability.detach())
        if self._config.critic == "kloss":
            critic_loss = self._modules.kernel(residual, paths.observations, paths.actions).sum()
        else:
            critic_loss = residual.square().mean(dim=1).sum()
        advantage, limit = residual.detach().mean(dim=0), self._config.clip_adv
        if limit > 0.0:
            advantage = advantage.clamp(-limit, limit)
        actor_loss = -(advantage * (self._discounts(paths) * log_probability).sum(dim=1)).mean()
        error = residual.detach().square().mean()
        return {"critic_loss": critic_loss, "bellman_error": error, "actor_loss": actor_loss}

    def compute_critic_grad(self, batch: Any) -> Losses:
        """Gradients into values and policy from one pass; nothing steps."""
        self._modules.critic_optim.zero_grad()
        losses = self.compute_critic_loss(batch)
        (losses["critic_loss"] + losses["actor_loss"]).backward()
        return losses

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
        c = self._config
        value = self._values(self._modules.q_funcs, x).mean(dim=0)
        here = self.log_density(self._modules.policy, x, action)
        slow = self.log_density(self._modules.targ_policy, x, action)
        return value + (c.entropy_coef + c.kl_coef) * here - c.kl_coef * slow

    def _within_reach(self, actions: Tensor) -> Tensor:
        """Cut to the policy's limits: its own where it has some, else [−1, 1]."""
        policy = unwrap_ddp_model(self._modules.policy)
        if isinstance(policy, LinearGaussianPolicy):
            return policy.cut(actions)
        return actions.clamp(-1.0, 1.0)

    def _path_residual(self, paths: TorchPathBatch, log_probability: Tensor) -> Float[Tensor, "critic row"]:
        c = self._config
        with torch.no_grad():
            slow = self.log_probabilities(self._modules.targ_policy, paths)
        reward = paths.path_rewards - (c.entropy_coef + c.kl_coef) * log_probability + c.kl_coef * slow
        gained = (self._discounts(paths) * reward).sum(dim=1)
        value, next_value = self._both_values(paths)
        return gained + self.discount(paths) * self.backed_up(next_value) - value

    def _both_values(self, paths: TorchPathBatch) -> tuple[Tensor, Tensor]:
        """V(s_0) and V(s_d), the latter as the critic's kind has it."""
        if self._config.critic == "fvi":
            with torch.no_grad():
                next_value = self._values(self._modules.targ_q_funcs, paths.next_observations)
            return self._values(self._modules.q_funcs, paths.observations), next_value
        both = torch.cat((paths.observations, paths.next_observations))
        value, next_value = self._values(self._modules.q_funcs, both).chunk(2, dim=1)
        return value, next_value.detach() if self._config.critic == "td0" else next_value

    def _discounts(self, paths: TorchPathBatch) -> Float[Tensor, "row step"]:
        """γ^t, zero past a path's end."""
        steps = torch.arange(paths.mask.shape[1], device=paths.mask.device)
        return self._config.gamma**steps * paths.mask

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
