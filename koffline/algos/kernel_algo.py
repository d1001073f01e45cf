"""Base of algorithms with a kernel-loss critic: checks, the bandwidth before training,
saving.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Generator, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from d3rlpy.algos.qlearning.base import QLearningAlgoBase
from d3rlpy.base import DeviceArg
from d3rlpy.constants import ActionSpace
from d3rlpy.dataclass_utils import asdict_without_copy
from d3rlpy.dataset import ReplayBufferBase, TransitionMiniBatch
from d3rlpy.models.builders import (
    create_continuous_q_function,
    create_discrete_q_function,
    create_parameter,
)
from d3rlpy.models.torch import Policy
from d3rlpy.models.torch.q_functions.ensemble_q_function import (
    ContinuousEnsembleQFunctionForwarder,
)
from d3rlpy.optimizers import OptimizerWrapper
from d3rlpy.torch_utility import convert_to_torch, hard_sync
from d3rlpy.types import Shape
from torch import Tensor, nn

from koffline.algos.kernel_bellman_loss import (
    NO_SLOW_COPY,
    ActorCriticConfig,
    KernelBellmanLoss,
    KernelCriticConfig,
)
from koffline.algos.kernel_critic import (
    KernelImpl,
    ModuleParts,
    modules_of,
    shift_values,
)
from koffline.algos.model_files import export_policy
from koffline.algos.options import check_values
from koffline.algos.paths import first_steps
from koffline.data.replay import ColumnarReplayBuffer
from koffline.errors import ConfigError, DataError
from koffline.kernel_loss import state_value_residual
from koffline.store.files import atomic_file

_KERNEL_ROWS = 1024
_NO_REWARD = 1e-30  # smaller ones are zero in float32
# in steps; applies when gamma is near 1 and no row is terminal
_LONGEST_HORIZON = 10_000.0


class KernelCriticAlgo(QLearningAlgoBase[KernelImpl, KernelCriticConfig]):
    """A d3rlpy algorithm whose critic minimises the kernel Bellman loss.

    All of d3rlpy's features work as for its own algorithms. The kernel's bandwidth and
    scales and the mean absolute reward are computed from the log before the first
    gradient step (with ``fit_online``, from the first mini-batch), saved with the
    model, and never change afterwards. The number of gradient steps is saved, too.
    Raises ConfigError for contradictory options.

    A subclass defines its action type, its implementation, d3rlpy's function that
    creates its actor (if it has one), and its other modules (`make_parts`).
    """

    action_type = ActionSpace.CONTINUOUS
    impl_class: type[KernelImpl]
    # d3rlpy's function, as a static method; None: an algorithm without an actor
    create_policy: ClassVar[Callable[..., Policy] | None] = None

    def __init__(
        self,
        config: KernelCriticConfig,
        device: DeviceArg = False,
        enable_ddp: bool = False,
        impl: KernelImpl | None = None,
    ) -> None:
        check_values(config)
        config.check_options(self.is_discrete)
        self._kernel_rows: TransitionMiniBatch | None = None
        self._rewards: np.ndarray | None = None
        self._is_copied = False
        super().__init__(config, device, enable_ddp, impl)

    @property
    def is_discrete(self) -> bool:
        """Whether actions are indices."""
        return self.action_type == ActionSpace.DISCRETE

    def get_action_type(self) -> ActionSpace:
        """Kind of actions that the algorithm supports."""
        return self.action_type

    @property
    def _grad_step(self) -> int:
        if self._impl is None:
            return 0
        return int(self._impl.modules.kernel.step)

    @_grad_step.setter
    def _grad_step(self, value: int) -> None:
        if self._impl is not None:
            self._impl.modules.kernel.step.fill_(value)

    def create_impl(self, observation_shape: Shape, action_size: int) -> None:
        """Build the networks.

        Raises ConfigError if a kernel of the observations would be meaningless.
        """
        shape = tuple(np.atleast_1d(np.asarray(observation_shape, dtype=object)))
        if len(shape) != 1 or not isinstance(shape[0], (int, np.integer)):
            raise ConfigError(
                f"distances between observations of shape {observation_shape} mean"
                " little; give the log's embedding of them, one vector per observation"
            )
        super().create_impl((int(shape[0]),), action_size)

    def fitter(
        self,
        dataset: ReplayBufferBase,
        n_steps: int,
        n_steps_per_epoch: int = 10000,
        **options: Any,
    ) -> Generator[tuple[int, dict[str, float]], None, None]:
        """d3rlpy's `fitter`: yields the epoch and its metrics.

        dataset: a replay buffer. n_steps, n_steps_per_epoch: gradient steps in all, and
        in an epoch.

        Raises ConfigError for another object than a buffer, for numbers that are not
        whole, and for less than one epoch, which d3rlpy would skip.
        """
        received = f"n_steps is {n_steps!r}, n_steps_per_epoch {n_steps_per_epoch!r}"
        if not isinstance(dataset, ReplayBufferBase):
            raise ConfigError(
                f"fit takes a replay buffer, received a {type(dataset).__name__};"
                " koffline.ColumnarReplayBuffer(log) makes one"
            )
        if not (_is_whole(n_steps) and _is_whole(n_steps_per_epoch)):
            raise ConfigError(f"{received}; give whole numbers")
        if n_steps < n_steps_per_epoch:
            raise ConfigError(
                f"{received}: not one epoch is trained; lower n_steps_per_epoch"
            )
        dataset = self.rows_of(dataset)
        self._kernel_rows = dataset.sample_transition_batch(_KERNEL_ROWS)
        self._rewards = _rewards_of(dataset)
        yield from super().fitter(
            dataset, int(n_steps), int(n_steps_per_epoch), **options
        )

    def rows_of(self, dataset: ReplayBufferBase) -> ReplayBufferBase:
        """The buffer that mini-batches are drawn from."""
        return dataset

    def copy_q_function_from(self, algo: QLearningAlgoBase) -> None:
        """d3rlpy's `copy_q_function_from`; fixing the kernel then leaves the values as
        they are.
        """
        super().copy_q_function_from(algo)
        self._is_copied = True

    def update(self, batch: TransitionMiniBatch) -> dict[str, float]:
        """Take one gradient step; the first one fixes the kernel."""
        self.fix_kernel_before(batch)
        return super().update(batch)

    def fix_kernel_before(self, batch: TransitionMiniBatch) -> None:
        """Fix the kernel and the size of rewards once, from the log or else from this
        mini-batch.
        """
        if self._impl is None:
            return
        kernel = self._impl.modules.kernel
        whole = self._kernel_rows or batch
        self._kernel_rows = None
        rewards = self._rewards
        self._rewards = None
        if kernel.reward_size.isnan():  # also as long as all rewards were zero
            if rewards is None:
                rewards = batch.rewards / batch.intervals  # of a step
            size = float(self._scaled("reward", rewards).abs().mean())
            if not math.isfinite(size):
                raise DataError("rewards are not all finite; check the log")
            if size > _NO_REWARD:
                kernel.reward_size.fill_(size)
        if not kernel.bandwidth.isnan():
            return
        rows = first_steps(whole)
        with torch.no_grad():
            observations = self._scaled("observation", np.asarray(rows.observations))
            actions = self._scaled("action", rows.actions)
            kernel.fix(observations, actions, self._config.batch_size)
            if not self._is_copied:
                shift_values(self._impl.modules, self._initial_value(whole))

    def save(self, fname: str) -> None:
        """Save everything atomically."""
        with atomic_file(Path(fname), force=True) as temporary:
            super().save(str(temporary))

    def save_policy(self, fname: str) -> None:
        """Save the greedy policy as TorchScript (.pt) or ONNX (.onnx), scalers
        included.
        """
        export_policy(self, fname)

    def make_parts(self, shape: Sequence[int], size: int) -> ModuleParts:
        """Networks, optimisers, kernel and, if there is an option for it, a
        temperature.
        """
        if self.create_policy is None:
            return self.critic_parts(shape, size, prefix="")
        parts = self.actor_parts(shape, size) | self.critic_parts(shape, size)
        config = self._config
        if not hasattr(config, "initial_temperature"):
            return parts
        log_temp = create_parameter(
            (1, 1), math.log(config.initial_temperature), self._device, False
        )
        optim = None
        if config.temp_learning_rate > 0.0:
            optim = self.make_optimizer("temp_", log_temp)
        return {**parts, "log_temp": log_temp, "temp_optim": optim}

    def inner_create_impl(self, shape: Sequence[int], size: int) -> None:
        """Create the implementation with new networks."""
        modules = modules_of(self.make_parts(shape, size))
        self._impl = self.impl_class(self._config, shape, size, modules, self._device)

    def critic_parts(
        self, shape: Sequence[int], size: int, prefix: str = "critic_"
    ) -> ModuleParts:
        """Q networks, their slow copy, optimiser and the kernel. prefix: start of the
        option names.
        """
        config = self._config
        if self.is_discrete:
            create = create_discrete_q_function
        else:
            create = create_continuous_q_function

        def create_critics() -> nn.ModuleList:
            return create(
                shape,
                size,
                getattr(config, f"{prefix}encoder_factory"),
                config.q_func_factory,
                n_ensembles=config.n_critics,
                device=self._device,
                enable_ddp=False,
            )[0]

        q_funcs = create_critics()
        slow = None
        if config.tau > 0.0:
            slow = create_critics()
            hard_sync(slow, q_funcs)
        optim = self.make_optimizer(prefix, q_funcs)
        kernel = self.make_kernel(shape, size)
        return {
            "q_funcs": q_funcs,
            "slow_q_funcs": slow,
            "critic_optim": optim,
            "kernel": kernel,
        }

    def actor_parts(self, shape: Sequence[int], size: int) -> ModuleParts:
        """The actor and its optimiser."""
        policy = self.make_policy(shape, size)
        return {"policy": policy, "actor_optim": self.make_optimizer("actor_", policy)}

    def make_policy(self, shape: Sequence[int], size: int) -> Policy:
        """An actor on the algorithm's device."""
        encoder = self._config.actor_encoder_factory
        create = self.create_policy
        assert create is not None, "only for an algorithm with an actor"
        return create(shape, size, encoder, device=self._device, enable_ddp=False)

    def make_optimizer(self, prefix: str, module: nn.Module) -> OptimizerWrapper:
        """Optimiser from the options whose names begin with `prefix`; it is saved with
        the model.
        """
        named = module.named_modules()
        rate = getattr(self._config, f"{prefix}learning_rate")
        return getattr(self._config, f"{prefix}optim_factory").create(
            named, lr=rate, compiled=self.compiled
        )

    def make_kernel(self, shape: Sequence[int], size: int) -> KernelBellmanLoss:
        """Kernel loss for rows of these shapes, on the algorithm's device."""
        n_actions = 0
        if self.is_discrete:
            n_actions = size
        kernel = KernelBellmanLoss(self._config, int(shape[0]), size, n_actions)
        return kernel.to(self._device)

    def _scaled(self, name: str, array: np.ndarray) -> torch.Tensor:
        tensor = convert_to_torch(array, self._device)
        scaler = getattr(self._config, f"{name}_scaler")
        if scaler is None:
            return tensor
        return scaler.transform(tensor)

    def _initial_value(self, batch: TransitionMiniBatch) -> float:
        """Constant added to all initial values, in the units of scaled rewards."""
        if self._config.initial_value != "mean":
            return float(self._config.initial_value)
        gamma = self._config.gamma
        lost = 1.0 - float(np.mean(gamma**batch.intervals * (1.0 - batch.terminals)))
        if lost <= 0.0:  # without termination and discount no value is finite
            return 0.0
        rewards = self._scaled("reward", batch.rewards)
        steps = np.arange(batch.rewards.shape[1])
        discounts = np.where(steps < batch.intervals, gamma**steps, 0.0)  # (N, steps)
        per_row = (convert_to_torch(discounts, self._device) * rewards).sum(dim=1)
        return float(per_row.mean() / max(lost, 1.0 / _LONGEST_HORIZON))


def _is_whole(number: object) -> bool:
    """Whether a number is whole; 1e4 is."""
    return isinstance(number, Real) and int(cast(float, number)) == number


def _rewards_of(dataset: ReplayBufferBase) -> np.ndarray:
    """All rewards of a log as a column."""
    if isinstance(dataset, ColumnarReplayBuffer):
        return dataset.transitions.rewards.reshape(-1, 1)
    return np.concatenate(
        [np.asarray(episode.rewards).reshape(-1, 1) for episode in dataset.episodes]
    )


class KernelForwarder:
    """d3rlpy's ensemble of critics, with the kernel loss as its error."""

    def __init__(
        self,
        forwarder: ContinuousEnsembleQFunctionForwarder,
        kernel: KernelBellmanLoss,
    ) -> None:
        self._forwarder = forwarder
        self._kernel = kernel

    def __getattr__(self, name: str) -> Any:
        # none yet while it is being copied
        return getattr(self.__dict__.get("_forwarder"), name)

    def compute_error(
        self,
        observations: Tensor,
        actions: Tensor,
        rewards: Tensor,
        target: Tensor,
        terminals: Tensor,
        gamma: float | Tensor,
    ) -> Tensor:
        """Kernel loss of δ = r + discount · target − Q(s, a), summed over critics;
        targets (N, 1).

        (Feng et al. 2019, equ:ourloss)
        """
        values = self._forwarder.compute_expected_q(
            observations, actions, "none"
        ).squeeze(2)
        discounts = (gamma * (1.0 - terminals)).squeeze(1)
        later = target.squeeze(1).expand_as(values)
        residual = state_value_residual(rewards.squeeze(1), discounts, values, later)
        return self._kernel(residual, observations, actions).sum()


@dataclasses.dataclass()
class ComposedConfig(ActorCriticConfig):
    """Options of the kernel loss in one of d3rlpy's algorithms, beside that algorithm's
    own options.

    tau: rate of d3rlpy's target networks; it must be positive. memory and backup do not
    apply.
    """

    tau: float = 0.02

    def check_options(self, is_discrete: bool) -> None:
        """Check the kernel's options, and that d3rlpy's algorithm can use all of them.

        is_discrete: whether the actions are. Raises ConfigError.
        """
        super().check_options(is_discrete)
        if self.tau == 0.0:
            raise ConfigError(NO_SLOW_COPY)
        if self.memory > 0.0:
            raise ConfigError(
                f"memory is set, which {self.kind} does not have; leave it out"
            )
        if self.backup != "own":
            raise ConfigError(
                f"backup is '{self.backup}', {self.kind} backs up as d3rlpy's; drop it"
            )


class ComposedAlgo(KernelCriticAlgo):
    """One of d3rlpy's algorithms (the next base class), whose critics minimise the
    kernel Bellman loss.
    """

    def inner_create_impl(self, shape: Sequence[int], size: int) -> None:
        """d3rlpy's implementation; its modules include the kernel, which is saved with
        them.
        """
        super(KernelCriticAlgo, self).inner_create_impl(shape, size)
        impl: Any = self._impl
        kernel = self.make_kernel(shape, size)
        impl._modules = modules_of(
            {**asdict_without_copy(impl.modules), "kernel": kernel}
        )
        impl._checkpointer = impl.modules.create_checkpointer(self._device)
        impl._q_func_forwarder = KernelForwarder(impl._q_func_forwarder, kernel)
