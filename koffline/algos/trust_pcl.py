"""TrustPCL and DiscreteTrustPCL: path consistency on logged data with interchangeable
critics.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import torch
from d3rlpy.constants import ActionSpace
from d3rlpy.dataset import ReplayBufferBase, TransitionMiniBatch
from d3rlpy.models.builders import (
    create_categorical_policy,
    create_normal_policy,
    create_value_function,
)
from d3rlpy.models.encoders import EncoderFactory, make_encoder_field
from d3rlpy.models.torch import (
    ActionOutput,
    Policy,
    build_gaussian_distribution,
    compute_output_size,
)
from d3rlpy.optimizers.optimizers import OptimizerFactory, make_optimizer_field
from d3rlpy.torch_utility import TorchMiniBatch, hard_sync, soft_sync
from jaxtyping import Float
from torch import Tensor, nn

from koffline.algos.kernel_algo import KernelCriticAlgo
from koffline.algos.kernel_bellman_loss import KernelCriticConfig, registered
from koffline.algos.kernel_critic import KernelImpl, Losses, ModuleParts
from koffline.algos.paths import PathReplayBuffer, as_paths
from koffline.data.replay import from_d3rlpy
from koffline.errors import ConfigError


class LinearGaussianPolicy(nn.Module):
    """N(mean(s), exp(log_std)²) per action dimension; log_std (1, k) does not depend on
    the state.

    Density and gradients are those of the unlimited Gaussian. `low` and `high` (1, k)
    are the limits to which actions are clipped, in the policy's units; they are saved
    with the weights. (Nachum et al. 2018)
    """

    low: Tensor
    high: Tensor

    def __init__(
        self, shape: Sequence[int], action_size: int, factory: EncoderFactory
    ) -> None:
        super().__init__()
        self._encoder = factory.create(shape)
        self._mu = nn.Linear(compute_output_size([shape], self._encoder), action_size)
        self._logstd = nn.Parameter(torch.zeros(1, action_size))
        self.register_buffer("low", torch.full((1, action_size), -1.0))
        self.register_buffer("high", torch.ones(1, action_size))

    def forward(self, x: Tensor) -> ActionOutput:
        """Mean (as plain and as squashed mean) and logarithm of the standard
        deviation.
        """
        mean = self._mu(self._encoder(x))
        return ActionOutput(mean, mean, self._logstd.expand_as(mean))


class TrustPCLImpl(KernelImpl):
    """R = −V(s_0) + γ^d V(s_d) + Σ_t γ^t [r_t − (λ + τ) log π(a_t|s_t) + τ log
    π̃(a_t|s_t)].

    (Feng et al. 2019, alg:kloss_pcl)
    (Nachum et al. 2018)
    """

    is_captured = False

    def inner_update(self, batch: TorchMiniBatch, grad_step: int) -> dict[str, float]:
        """Update the slow copies, then take one step of critic and policy."""
        rate = 1.0 - self._config.target_decay
        soft_sync(self._modules.targ_q_funcs, self._modules.q_funcs, rate)
        soft_sync(self._modules.targ_policy, self._modules.policy, rate)
        self._modules.actor_optim.zero_grad()
        metrics = self.update_critic(batch)
        self._modules.actor_optim.step()
        return metrics

    def compute_critic_loss(self, paths: TorchMiniBatch) -> Losses:
        """Loss of the critic and surrogate loss of the policy; their gradients go to
        different networks.
        """
        log_probability = self._log_probabilities(self._modules.policy, paths)
        residual = self._path_residual(paths, log_probability.detach())
        if self._config.critic.startswith("kloss"):
            critic_loss = self._modules.kernel(
                residual, paths.observations[:, 0], paths.actions[:, 0]
            ).sum()
        else:
            critic_loss = residual.square().mean(dim=1).sum()
        advantage = residual.detach().mean(dim=0)
        limit = self._config.clip_adv
        if limit > 0.0:
            advantage = advantage.clamp(-limit, limit)
        actor_loss = -(
            advantage * (self._discounts(paths) * log_probability).sum(dim=1)
        ).mean()
        error = residual.detach().square().mean()
        return {
            "critic_loss": critic_loss,
            "bellman_error": error,
            "actor_loss": actor_loss,
        }

    def compute_critic_grad(self, batch: TorchMiniBatch) -> Losses:
        """Compute the gradients of values and policy in one pass; no optimiser
        steps.
        """
        self._modules.critic_optim.zero_grad()
        losses = self.compute_critic_loss(batch)
        (losses["critic_loss"] + losses["actor_loss"]).backward()
        return losses

    def _log_probabilities(
        self, policy: Policy, paths: TorchMiniBatch
    ) -> Float[Tensor, "row step"]:
        """Log-probabilities of the logged actions."""
        observations = paths.observations.flatten(0, 1)  # (N · steps, d)
        actions = paths.actions.flatten(0, 1)
        densities = self.log_density(policy, observations, actions)
        return densities.view(paths.rewards.shape)

    def log_density(
        self, policy: Policy, observations: Tensor, actions: Tensor
    ) -> Float[Tensor, " row"]:
        """log π(a|s) for scaled observations (N, d) and actions (N, k), or indices (N,
        1).
        """
        if self._modules.kernel.n_actions:
            return policy(observations).log_prob(actions.reshape(-1))
        return (
            build_gaussian_distribution(policy(observations))
            .log_prob(actions)
            .squeeze(1)
        )

    def inner_predict_best_action(self, x: Tensor) -> Tensor:
        """Most probable actions (N,), or means (N, k) clipped to the limits."""
        best = super().inner_predict_best_action(x)
        if self._modules.kernel.n_actions:
            return best
        return self._within_reach(best)

    def inner_sample_action(self, x: Tensor) -> Tensor:
        """Drawn actions (N,), or (N, k) clipped to [−1, 1] or to the policy's own
        limits.
        """
        if self._modules.kernel.n_actions:
            return super().inner_sample_action(x)
        output = self._modules.policy(x)
        return self._within_reach(
            output.squashed_mu + output.logstd.exp() * torch.randn_like(output.mu)
        )

    def inner_predict_value(self, x: Tensor, action: Tensor) -> Tensor:
        """Q(s, a) implied by path consistency: V(s) + (λ + τ) log π(a|s) − τ log
        π̃(a|s).
        """
        c = self._config
        value = self._values(self._modules.q_funcs, x).mean(dim=0)
        here = self.log_density(self._modules.policy, x, action)
        slow = self.log_density(self._modules.targ_policy, x, action)
        return value + (c.entropy_coef + c.kl_coef) * here - c.kl_coef * slow

    def _within_reach(self, actions: Tensor) -> Tensor:
        """Clip actions to the policy's own limits if it has some, else to [−1, 1]."""
        policy = self._modules.policy
        if hasattr(policy, "low"):
            return actions.clamp(policy.low, policy.high)
        return actions.clamp(-1.0, 1.0)

    def _path_residual(
        self, paths: TorchMiniBatch, log_probability: Tensor
    ) -> Float[Tensor, "critic row"]:
        c = self._config
        with torch.no_grad():
            slow = self._log_probabilities(self._modules.targ_policy, paths)
        reward = (
            paths.rewards
            - (c.entropy_coef + c.kl_coef) * log_probability
            + c.kl_coef * slow
        )
        gained = (self._discounts(paths) * reward).sum(dim=1)
        value, next_value = self._both_values(paths)
        return gained + self.discount(paths) * self.backed_up(next_value) - value

    def _both_values(self, paths: TorchMiniBatch) -> tuple[Tensor, Tensor]:
        """V(s_0) and V(s_d); the option `critic` determines the network for the
        latter.
        """
        modules = self._modules
        kind = self._config.critic
        if kind in ("fvi", "kloss_slow"):
            with torch.no_grad():
                next_value = self._values(modules.targ_q_funcs, paths.next_observations)
            return self._values(modules.q_funcs, paths.observations[:, 0]), next_value
        both = torch.cat((paths.observations[:, 0], paths.next_observations))
        value, next_value = self._values(modules.q_funcs, both).chunk(2, dim=1)
        if kind == "td0":
            next_value = next_value.detach()
        return value, next_value

    def _discounts(self, paths: TorchMiniBatch) -> Float[Tensor, "row step"]:
        """Discounts γ^t of the steps, zero after a path's end."""
        steps = torch.arange(paths.rewards.shape[1], device=paths.rewards.device)
        is_inside = steps < paths.intervals  # (N, steps)
        return self._config.gamma**steps * is_inside

    @staticmethod
    def _values(
        functions: nn.ModuleList, observations: Tensor
    ) -> Float[Tensor, "critic row"]:
        return torch.stack(
            [function(observations).squeeze(1) for function in functions]
        )


@dataclasses.dataclass()
class TrustPCLConfig(KernelCriticConfig):
    """Config of TrustPCL: off-policy path consistency on logged episodes (batch mode).

    critic: kloss (gradient through V at both ends, no target network), kloss_slow and
        fvi (bootstrap from a slow copy), td0 (from the network itself, detached) or rg
        (mean squared residual, gradient through both ends).
    path_length: steps of a path; shorter if the episode ends. entropy_coef: λ in the
        equation of TrustPCLImpl, the weight of entropy. kl_coef: its τ, the weight of
        the divergence from a slow copy of the policy; λ + τ must be positive. clip_adv:
        the residual is clipped to ± this in the policy's step only, 0 never.
        target_decay: of the slow copies, per step.
    squash: the mean of a continuous policy goes through tanh; false gives the policy of
        online training, whose mean is the network's output; its actions are clipped to
        the bounds only when taken.
    """

    actor_learning_rate: float = 1e-3
    critic_learning_rate: float = 1e-3
    actor_optim_factory: OptimizerFactory = make_optimizer_field()
    critic_optim_factory: OptimizerFactory = make_optimizer_field()
    actor_encoder_factory: EncoderFactory = make_encoder_field()
    critic_encoder_factory: EncoderFactory = make_encoder_field()
    n_critics: int = 1
    critic: str = "kloss"
    path_length: int = 10
    entropy_coef: float = 0.01
    kl_coef: float = 0.1
    clip_adv: float = 1.0
    target_decay: float = 0.99
    squash: bool = True

    def check_options(self, is_discrete: bool) -> None:
        """Check the kernel's options, and those of path consistency.

        is_discrete: whether the actions are. Raises ConfigError.
        """
        super().check_options(is_discrete)
        if self.tau > 0.0:
            raise ConfigError(
                "tau is set; for slow copies use critic 'fvi' and target_decay"
            )
        if self.entropy_coef + self.kl_coef <= 0.0:
            raise ConfigError("entropy_coef and kl_coef are both 0; raise one")


@dataclasses.dataclass()
class DiscreteTrustPCLConfig(TrustPCLConfig):
    """Config of DiscreteTrustPCL; fields as in TrustPCLConfig."""


@registered("trust_pcl", TrustPCLConfig)
class TrustPCL(KernelCriticAlgo):
    """Trust-PCL on logged data, continuous actions (Nachum et al. 2018; Feng et al.
    2019).

    For paths longer than one step, `fit` draws paths from the log's episodes; the
    ordinary mini-batches of `update` and `fit_online` are paths of one step.
    """

    impl_class = TrustPCLImpl
    create_policy = staticmethod(
        partial(
            create_normal_policy,
            min_logstd=-4.0,
            max_logstd=2.0,
            use_std_parameter=True,
        )
    )

    def rows_of(self, dataset: ReplayBufferBase) -> ReplayBufferBase:
        """The dataset as paths. Raises DataError for a log without episodes."""
        if self._config.path_length == 1 or isinstance(dataset, PathReplayBuffer):
            return dataset
        return PathReplayBuffer(from_d3rlpy(dataset), self._config.path_length)

    def update(self, batch: TransitionMiniBatch) -> dict[str, float]:
        """Take one gradient step on paths or, from an ordinary mini-batch, on single
        steps.
        """
        return super().update(as_paths(batch))

    def make_parts(self, shape: Sequence[int], size: int) -> ModuleParts:
        """Values (`q_funcs`), policy, the slow copies of both, optimisers and
        kernel.
        """
        q_funcs = self._make_values(shape)
        targ_q_funcs = self._make_values(shape)
        policy = self.make_policy(shape, size)
        targ_policy = self.make_policy(shape, size)
        hard_sync(targ_q_funcs, q_funcs)
        hard_sync(targ_policy, policy)
        return {
            "q_funcs": q_funcs,
            "policy": policy,
            "targ_q_funcs": targ_q_funcs,
            "targ_policy": targ_policy,
            "critic_optim": self.make_optimizer("critic_", q_funcs),
            "actor_optim": self.make_optimizer("actor_", policy),
            "kernel": self.make_kernel(shape, size),
        }

    def _make_values(self, shape: Sequence[int]) -> nn.ModuleList:
        encoder = self._config.critic_encoder_factory
        count = self._config.n_critics
        return nn.ModuleList(
            create_value_function(shape, encoder, self._device, False)
            for _ in range(count)
        )

    def make_policy(self, shape: Sequence[int], size: int) -> Policy:
        """d3rlpy's actor or, without `squash`, the policy of online training."""
        if self._config.squash or self.is_discrete:
            return super().make_policy(shape, size)
        return LinearGaussianPolicy(shape, size, self._config.actor_encoder_factory).to(
            self._device
        )


@registered("discrete_trust_pcl", DiscreteTrustPCLConfig)
class DiscreteTrustPCL(TrustPCL):
    """Trust-PCL on logged data, discrete actions (Nachum et al. 2018; Feng et al.
    2019).
    """

    action_type = ActionSpace.DISCRETE
    create_policy = staticmethod(create_categorical_policy)
