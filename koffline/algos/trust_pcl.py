"""TrustPCL and DiscreteTrustPCL: path consistency on logged data with four interchangeable critics."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from typing import Any

from torch import nn

from koffline.algos.kernel_algo import KernelCriticAlgo
from koffline.algos.kernel_options import KernelCriticConfig, check_choice
from koffline.algos.linear_gaussian import create_linear_gaussian_policy
from koffline.algos.path_batch import TorchPathBatch
from koffline.algos.path_buffer import PathMiniBatch, PathReplayBuffer
from koffline.algos.trust_pcl_impl import Coefficients, DiscreteTrustPCLImpl, TrustPCLImpl, TrustPCLModules
from koffline.data.d3rlpy_import import import_d3rlpy
from koffline.data.replay import from_d3rlpy
from koffline.errors import ConfigError

import_d3rlpy()

from d3rlpy.base import register_learnable  # noqa: E402
from d3rlpy.constants import ActionSpace  # noqa: E402
from d3rlpy.models.builders import (  # noqa: E402
    create_categorical_policy,
    create_normal_policy,
    create_value_function,
)
from d3rlpy.models.encoders import EncoderFactory, make_encoder_field  # noqa: E402
from d3rlpy.optimizers.optimizers import OptimizerFactory, make_optimizer_field  # noqa: E402

CRITICS = ("kloss", "fvi", "td0", "rg")


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

    def create(self, device: Any = False, enable_ddp: bool = False) -> TrustPCL:
        """The algorithm."""
        return TrustPCL(self, device, enable_ddp)

    @staticmethod
    def get_type() -> str:
        """Name in files."""
        return "trust_pcl"


@dataclasses.dataclass()
class DiscreteTrustPCLConfig(TrustPCLConfig):
    """Config of DiscreteTrustPCL; fields as TrustPCLConfig's."""

    def create(self, device: Any = False, enable_ddp: bool = False) -> DiscreteTrustPCL:
        """The algorithm."""
        return DiscreteTrustPCL(self, device, enable_ddp)

    @staticmethod
    def get_type() -> str:
        """Name in files."""
        return "discrete_trust_pcl"


class TrustPCL(KernelCriticAlgo[Any, Any]):
    """Trust-PCL on logged data, continuous actions (Nachum et al. 2018; Feng et al. 2019).

    With paths longer than one step, `fit` draws paths from the log's episodes; ordinary mini-batches, as
    `update` and `fit_online` give them, are paths of one step.
    """

    def __init__(self, config: Any, device: Any = False, enable_ddp: bool = False, impl: Any = None) -> None:
        _check_options(config)
        super().__init__(config, device, enable_ddp, impl)

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

    def inner_create_impl(self, observation_shape: Sequence[int], action_size: int) -> None:
        """Networks, optimisers and kernel."""
        config = self._config
        q_funcs, targ_q_funcs = (self._make_values(observation_shape) for _ in range(2))
        policy, targ_policy = (self._make_policy(observation_shape, action_size) for _ in range(2))
        modules = TrustPCLModules(
            q_funcs=q_funcs,
            critic_optim=self.make_optimizer(
                config.critic_optim_factory, q_funcs, config.critic_learning_rate
            ),
            kernel=self.make_kernel(observation_shape, action_size),
            targ_q_funcs=targ_q_funcs,
            policy=policy,
            targ_policy=targ_policy,
            actor_optim=self.make_optimizer(config.actor_optim_factory, policy, config.actor_learning_rate),
        )
        coefficients = Coefficients(config.entropy_coef, config.kl_coef, config.clip_adv, config.target_decay)
        is_discrete = self.get_action_type() == ActionSpace.DISCRETE
        impl_class: Any = DiscreteTrustPCLImpl if is_discrete else TrustPCLImpl
        options = {**self.impl_options(observation_shape, action_size), "compiled": False}
        self._impl = impl_class(critic=config.critic, coefficients=coefficients, modules=modules, **options)

    def get_action_type(self) -> ActionSpace:
        """Continuous."""
        return ActionSpace.CONTINUOUS

    def _make_values(self, observation_shape: Sequence[int]) -> nn.ModuleList:
        config = self._config
        make = [config.critic_encoder_factory] * config.n_critics
        return nn.ModuleList(
            create_value_function(observation_shape, encoder, self._device, self._enable_ddp)
            for encoder in make
        )

    def _make_policy(self, observation_shape: Sequence[int], action_size: int) -> Any:
        encoder = self._config.actor_encoder_factory
        if self.get_action_type() == ActionSpace.DISCRETE:
            return create_categorical_policy(
                observation_shape, action_size, encoder, self._device, self._enable_ddp
            )
        if not self._config.squash:
            return create_linear_gaussian_policy(
                observation_shape, action_size, encoder, self._device, self._enable_ddp
            )
        return create_normal_policy(
            observation_shape,
            action_size,
            encoder,
            self._device,
            self._enable_ddp,
            min_logstd=-4.0,
            max_logstd=2.0,
            use_std_parameter=True,
        )


class DiscreteTrustPCL(TrustPCL):
    """Trust-PCL on logged data, discrete actions (Nachum et al. 2018; Feng et al. 2019)."""

    def get_action_type(self) -> ActionSpace:
        """Discrete."""
        return ActionSpace.DISCRETE


def _check_options(config: Any) -> None:
    """Raise ConfigError for the first option out of range."""
    check_choice("critic", config.critic, CRITICS)
    if not (isinstance(config.path_length, int) and config.path_length >= 1):
        raise ConfigError(f"path_length is {config.path_length!r}; give a positive number of steps")
    for name in ("entropy_coef", "kl_coef", "clip_adv"):
        if not getattr(config, name) >= 0.0:
            raise ConfigError(f"{name} is {getattr(config, name)!r}; give a number that is not negative")
    if config.entropy_coef + config.kl_coef <= 0.0:
        raise ConfigError(
            "entropy_coef and kl_coef are both 0, which defines no policy; give one a positive value"
        )
    if not isinstance(config.squash, bool):
        raise ConfigError(f"squash is {config.squash!r}; give true or false")
    if not 0.0 <= config.target_decay <= 1.0:
        raise ConfigError(f"target_decay is {config.target_decay!r}; give a number in [0, 1]")


register_learnable(TrustPCLConfig)
register_learnable(DiscreteTrustPCLConfig)
