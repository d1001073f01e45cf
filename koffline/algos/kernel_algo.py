"""What all algorithms with a kernel-loss critic share: checks, the bandwidth before training, saving."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from d3rlpy.algos.qlearning.base import QLearningAlgoBase
from d3rlpy.constants import ActionSpace
from d3rlpy.dataset import ReplayBufferBase, TransitionMiniBatch
from d3rlpy.models.builders import create_continuous_q_function, create_discrete_q_function, create_parameter
from d3rlpy.optimizers import OptimizerWrapper
from d3rlpy.torch_utility import convert_to_torch
from torch import nn

from koffline.algos.kernel_bellman_loss import KernelBellmanLoss
from koffline.algos.kernel_critic import ActorModules, EntropyModules, KernelCriticModules, KernelImpl
from koffline.algos.options import check_options
from koffline.errors import ConfigError
from koffline.store.files import atomic_file

_KERNEL_ROWS = 1024
_LONGEST_HORIZON = 10_000.0  # steps; with gamma near 1 and no termination in the rows


class KernelCriticAlgo(QLearningAlgoBase[Any, Any]):
    """A d3rlpy algorithm whose critic minimises the kernel Bellman loss.

    Everything d3rlpy offers works as on its own algorithms. The kernel's bandwidth and scales are taken
    from rows of the log before the first gradient step (with ``fit_online``, from the first mini-batch), are
    saved with the model and never change after that. The count of gradient steps is saved too. With DDP every
    process pairs the rows of its own mini-batch, and all use the first one's kernel.
    Raises ConfigError for options that make no sense.

    A child says its action type, its implementation, d3rlpy's function that creates its actor where it has
    one, and what other modules it has (`make_modules`).
    """

    action_type = ActionSpace.CONTINUOUS
    impl_class: type[KernelImpl]
    create_policy: Any = None  # a static method

    def __init__(self, config: Any, device: Any = False, enable_ddp: bool = False, impl: Any = None) -> None:
        check_options(config, self.is_discrete)
        self._kernel_rows: TransitionMiniBatch | None = None
        super().__init__(config, device, enable_ddp, impl)

    @property
    def is_discrete(self) -> bool:
        """Whether actions are indices."""
        return self.get_action_type() == ActionSpace.DISCRETE

    def get_action_type(self) -> ActionSpace:
        """The kind of actions it is for."""
        return self.action_type

    @property
    def _grad_step(self) -> int:
        return 0 if self._impl is None else int(self._impl.modules.kernel.step)

    @_grad_step.setter
    def _grad_step(self, value: int) -> None:
        if self._impl is not None:
            self._impl.modules.kernel.step.fill_(value)

    def create_impl(self, observation_shape: Any, action_size: int) -> None:
        """Build the networks. Raises ConfigError where the kernel would have no meaning."""
        shape = tuple(np.atleast_1d(np.asarray(observation_shape, dtype=object)))
        if len(shape) != 1 or not isinstance(shape[0], (int, np.integer)):
            kind = "images" if len(shape) == 3 else "arrays"
            raise ConfigError(
                f"observations of shape {observation_shape} are {kind}, for which distances between rows "
                "mean little; give the log's embedding of them, one vector per observation"
            )
        super().create_impl((int(shape[0]),), action_size)

    def fitter(
        self, dataset: ReplayBufferBase, n_steps: int, n_steps_per_epoch: int = 10000, **options: Any
    ) -> Generator[tuple[int, dict[str, float]], None, None]:
        """As d3rlpy's; raises ConfigError for the other kind of actions and for fewer steps than an epoch."""
        wanted, found = self.get_action_type(), dataset.dataset_info.action_space
        if wanted != found:
            raise ConfigError(
                f"{type(self).__name__} is for {wanted.name.lower()} actions, the log's are "
                f"{found.name.lower()}; choose an algorithm for {found.name.lower()} actions"
            )
        if n_steps < n_steps_per_epoch:
            raise ConfigError(
                f"n_steps is {n_steps}, n_steps_per_epoch {n_steps_per_epoch}: not one epoch would be "
                "trained; lower n_steps_per_epoch"
            )
        self._kernel_rows = dataset.sample_transition_batch(_KERNEL_ROWS)
        yield from super().fitter(dataset, n_steps, n_steps_per_epoch, **options)

    def update(self, batch: TransitionMiniBatch) -> dict[str, float]:
        """One gradient step; the first one fixes the kernel."""
        self.fix_kernel_before(batch)
        return super().update(batch)

    def fix_kernel_before(self, batch: TransitionMiniBatch) -> None:
        """Fix the kernel from rows of the log, or from this mini-batch, unless that has been done."""
        if self._impl is not None and not self._impl.modules.kernel.is_fixed():
            self._fix_kernel(batch if self._kernel_rows is None else self._kernel_rows)
            self._kernel_rows = None

    def save(self, fname: str) -> None:
        """Save everything; the file appears whole or not at all."""
        with atomic_file(Path(fname), force=True) as temporary:
            super().save(str(temporary))

    def save_policy(self, fname: str) -> None:
        """Save the greedy policy as TorchScript (.pt) or ONNX (.onnx), scalers included."""
        from koffline.algos.export import export_policy

        export_policy(self, fname)

    def make_modules(self, observation_shape: Sequence[int], action_size: int) -> KernelCriticModules:
        """Networks, optimisers, kernel and, where there is an option for it, a temperature."""
        if self.create_policy is None:
            return KernelCriticModules(**self.critic_parts(observation_shape, action_size, prefix=""))
        parts = self.actor_parts(self.create_policy, observation_shape, action_size)
        parts |= self.critic_parts(observation_shape, action_size)
        config = self._config
        if not hasattr(config, "initial_temperature"):
            return ActorModules(**parts)
        log_temp = create_parameter(
            (1, 1), math.log(config.initial_temperature), self._device, self._enable_ddp
        )
        optim = self.make_optimizer("temp_", log_temp) if config.temp_learning_rate > 0.0 else None
        return EntropyModules(**parts, log_temp=log_temp, temp_optim=optim)

    def inner_create_impl(self, observation_shape: Sequence[int], action_size: int) -> None:
        """The implementation over fresh networks."""
        modules = self.make_modules(observation_shape, action_size)
        self._impl = self.impl_class(self._config, observation_shape, action_size, modules, self._device)

    def critic_parts(
        self, observation_shape: Sequence[int], action_size: int, prefix: str = "critic_"
    ) -> dict[str, Any]:
        """Q networks, their optimiser and the kernel. prefix: of the options' names."""
        q_funcs = self.make_q_funcs(observation_shape, action_size, prefix)
        return {
            "q_funcs": q_funcs,
            "critic_optim": self.make_optimizer(prefix, q_funcs),
            "kernel": self.make_kernel(observation_shape, action_size),
        }

    def actor_parts(
        self, create: Any, observation_shape: Sequence[int], action_size: int, **options: Any
    ) -> dict[str, Any]:
        """A policy out of d3rlpy's function that creates it, and its optimiser."""
        policy = self.make_policy(create, observation_shape, action_size, **options)
        return {"policy": policy, "actor_optim": self.make_optimizer("actor_", policy)}

    def make_q_funcs(
        self, observation_shape: Sequence[int], action_size: int, prefix: str = "critic_"
    ) -> nn.ModuleList:
        """Q(s, ·) or Q(s, a) of every critic."""
        config = self._config
        create = create_discrete_q_function if self.is_discrete else create_continuous_q_function
        return create(
            observation_shape,
            action_size,
            getattr(config, f"{prefix}encoder_factory"),
            config.q_func_factory,
            n_ensembles=config.n_critics,
            device=self._device,
            enable_ddp=self._enable_ddp,
        )[0]

    def make_policy(
        self, create: Any, observation_shape: Sequence[int], action_size: int, **options: Any
    ) -> Any:
        """A policy on the algorithm's device."""
        where = {"device": self._device, "enable_ddp": self._enable_ddp}
        return create(observation_shape, action_size, self._config.actor_encoder_factory, **where, **options)

    def make_optimizer(self, prefix: str, *modules: nn.Module) -> OptimizerWrapper:
        """An optimiser by the options whose names begin so; it is saved with the model."""
        named = [pair for module in modules for pair in module.named_modules()]
        rate = getattr(self._config, f"{prefix}learning_rate")
        return getattr(self._config, f"{prefix}optim_factory").create(named, lr=rate, compiled=self.compiled)

    def make_kernel(self, observation_shape: Sequence[int], action_size: int) -> KernelBellmanLoss:
        """The loss for these rows, on the algorithm's device."""
        n_actions = action_size if self.is_discrete else 0
        kernel = KernelBellmanLoss(self._config, int(observation_shape[0]), action_size, n_actions)
        return kernel.to(self._device)

    def _fix_kernel(self, batch: TransitionMiniBatch) -> None:
        assert self._impl is not None
        kernel = self._impl.modules.kernel
        with torch.no_grad():
            observations = self._scaled("observation", np.asarray(batch.observations))
            kernel.fix(observations, self._scaled("action", batch.actions), self._config.batch_size)
            start = self._initial_value(batch)
            if self._enable_ddp:  # every process drew rows of its own; the first one's count
                for tensor in (start, *kernel.buffers()):
                    torch.distributed.broadcast(tensor, 0)
            self._impl.start_at(float(start))

    def _scaled(self, name: str, array: Any) -> torch.Tensor:
        tensor, scaler = convert_to_torch(array, self._device), getattr(self._config, f"{name}_scaler")
        return tensor if scaler is None else scaler.transform(tensor)

    def _initial_value(self, batch: TransitionMiniBatch) -> torch.Tensor:
        """The constant that all values start from, as the critic sees rewards."""
        if self._config.initial_value != "mean":
            return torch.tensor(float(self._config.initial_value), device=self._device)
        lost = 1.0 - float(np.mean(self._config.gamma**batch.intervals * (1.0 - batch.terminals)))
        if lost <= 0.0:  # nothing ends and nothing is discounted: no value is finite
            return torch.tensor(0.0, device=self._device)
        return self._scaled("reward", batch.rewards).mean() / max(lost, 1.0 / _LONGEST_HORIZON)
