"""TrustPCL and DiscreteTrustPCL: path consistency on logged data with four interchangeable critics."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from typing import Any

from d3rlpy.constants import ActionSpace
from d3rlpy.models.builders import create_categorical_policy, create_normal_policy, create_value_function
from d3rlpy.models.encoders import EncoderFactory, make_encoder_field
from d3rlpy.optimizers.optimizers import OptimizerFactory, make_optimizer_field
from d3rlpy.torch_utility import hard_sync
from torch import nn

from koffline.algos.kernel_algo import KernelCriticAlgo
from koffline.algos.options import KernelCriticConfig, registered
from koffline.algos.paths import PathMiniBatch, PathReplayBuffer, TorchPathBatch
from koffline.algos.trust_pcl_impl import (
    DiscreteTrustPCLImpl,
    TrustPCLImpl,
    TrustPCLModules,
    create_linear_gaussian_policy,
)
from koffline.data.replay import from_d3rlpy


@dataclasses.dataclass()
class TrustPCLConfig(KernelCriticConfig):
    """Config of TrustPCL: off-policy path consistency on logged episodes (batch mode).

    critic: kloss (gradient through V of both ends, no target network), fvi (bootstrap from a slow copy),
        td0 (from the network itself, detached) or rg (mean squared residual, gradient through both ends).
    path_length: steps of a path; shorter where an episode ends. entropy_coef, kl_coef: see the equation of
        TrustPCLImpl; their sum must be positive. clip_adv: the residual is clipped to ± this in the policy's
        step only, 0 never. target_decay: of the slow copies, per step.
    squash: the mean of a continuous policy goes through tanh; false is the policy of online training, whose
        mean is the network's output, cut to the box only where an action is taken.
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


@dataclasses.dataclass()
class DiscreteTrustPCLConfig(TrustPCLConfig):
    """Config of DiscreteTrustPCL; fields as TrustPCLConfig's."""


@registered("trust_pcl", TrustPCLConfig)
class TrustPCL(KernelCriticAlgo):
    """Trust-PCL on logged data, continuous actions (Nachum et al. 2018; Feng et al. 2019).

    With paths longer than one step, `fit` draws paths from the log's episodes; ordinary mini-batches, as
    `update` and `fit_online` give them, are paths of one step.
    """

    impl_class = TrustPCLImpl

    def fitter(
        self, dataset: Any, n_steps: int, n_steps_per_epoch: int = 10000, **options: Any
    ) -> Generator[tuple[int, dict[str, float]], None, None]:
        """As d3rlpy's, over paths of the dataset. Raises DataError for a log without episodes."""
        if self._config.path_length > 1 and not isinstance(dataset, PathReplayBuffer):
            generator = getattr(dataset, "generator", None)
            dataset = PathReplayBuffer(from_d3rlpy(dataset), self._config.path_length, generator)
        yield from super().fitter(dataset, n_steps, n_steps_per_epoch, **options)

    def update(self, batch: Any) -> dict[str, float]:
        """One gradient step on paths or, from an ordinary mini-batch, on single steps."""
        assert self._impl is not None
        paths = PathMiniBatch.of_single_steps(batch)
        self.fix_kernel_before(paths)
        torch_batch = TorchPathBatch.from_paths(paths, self._config, self._device)
        loss = self._impl.update(torch_batch, self._grad_step)
        self._grad_step += 1
        return loss

    def make_modules(self, observation_shape: Sequence[int], action_size: int) -> TrustPCLModules:
        """Values, policy, their slow copies, optimisers and kernel."""
        q_funcs, targ_q_funcs = (self._make_values(observation_shape) for _ in range(2))
        policy, targ_policy = (self._make_policy(observation_shape, action_size) for _ in range(2))
        hard_sync(targ_q_funcs, q_funcs)
        hard_sync(targ_policy, policy)
        return TrustPCLModules(
            q_funcs=q_funcs,
            critic_optim=self.make_optimizer("critic_", q_funcs),
            kernel=self.make_kernel(observation_shape, action_size),
            policy=policy,
            actor_optim=self.make_optimizer("actor_", policy),
            targ_q_funcs=targ_q_funcs,
            targ_policy=targ_policy,
        )

    def _make_values(self, observation_shape: Sequence[int]) -> nn.ModuleList:
        encoder, where = self._config.critic_encoder_factory, (self._device, self._enable_ddp)
        count = self._config.n_critics
        return nn.ModuleList(create_value_function(observation_shape, encoder, *where) for _ in range(count))

    def _make_policy(self, observation_shape: Sequence[int], action_size: int) -> Any:
        if self.is_discrete:
            return self.make_policy(create_categorical_policy, observation_shape, action_size)
        if not self._config.squash:
            return self.make_policy(create_linear_gaussian_policy, observation_shape, action_size)
        bounds = {"min_logstd": -4.0, "max_logstd": 2.0, "use_std_parameter": True}
        return self.make_policy(create_normal_policy, observation_shape, action_size, **bounds)


@registered("discrete_trust_pcl", DiscreteTrustPCLConfig)
class DiscreteTrustPCL(TrustPCL):
    """Trust-PCL on logged data, discrete actions (Nachum et al. 2018; Feng et al. 2019)."""

    action_type = ActionSpace.DISCRETE
    impl_class = DiscreteTrustPCLImpl
