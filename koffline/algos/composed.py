"""The kernel loss composed into d3rlpy's own actor-critics: KLossAWAC, KLossReBRAC, KLossCalQL and KLossBCQ.

All of d3rlpy's algorithm stays: its networks, its actor, its conservative terms, its value of s', which a
slow copy of the critics gives. Only the squared error of its critics becomes the kernel loss of the same
residuals.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Optional

from d3rlpy.algos.qlearning import AWAC, BCQ, AWACConfig, BCQConfig, CalQL, CalQLConfig, ReBRAC, ReBRACConfig
from torch import Tensor

from koffline.algos.kernel_algo import KernelCriticAlgo
from koffline.algos.kernel_bellman_loss import KernelBellmanLoss
from koffline.algos.options import KernelCriticConfig, registered
from koffline.errors import ConfigError
from koffline.kernel_loss import state_value_residual
from koffline.policies.base import refuse


class KernelForwarder:
    """d3rlpy's ensemble of critics, with the kernel loss for its error."""

    def __init__(self, forwarder: Any, kernel: KernelBellmanLoss) -> None:
        self._forwarder, self._kernel = forwarder, kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forwarder, name)

    def compute_error(
        self, observations: Tensor, actions: Tensor, rewards: Tensor, target: Tensor, terminals: Tensor,
        gamma: Any,
    ) -> Tensor:  # fmt: skip
        """Kernel loss of δ = r + discount · target − Q(s, a), summed over critics; targets (N, 1).

        (Feng et al. 2019, equ:ourloss)
        """
        values = self._forwarder.compute_expected_q(observations, actions, "none").squeeze(2)
        discounts, later = (gamma * (1.0 - terminals)).squeeze(1), target.squeeze(1).expand_as(values)
        residual = state_value_residual(rewards.squeeze(1), discounts, values, later)
        return self._kernel(residual, observations, actions).sum()


@dataclasses.dataclass()
class ComposedConfig(KernelCriticConfig):
    """Options of the kernel loss in an algorithm of d3rlpy's, whose own options have its names.

    tau: rate of d3rlpy's target networks; it must be positive. backup is not for these.
    """

    diag_weight: Optional[float] = 0.1  # noqa: UP045
    tau: float = 0.02
    critic_learning_rate: float = 3e-3


class ComposedAlgo(KernelCriticAlgo):
    """An algorithm of d3rlpy's, the next base class, whose critics minimise the kernel Bellman loss."""

    def __init__(self, config: Any, device: Any = False, enable_ddp: bool = False, impl: Any = None) -> None:
        name = type(self).__name__
        wrong = {
            f"tau is 0, but the slow copy that it moves values s' in {name}; raise it": config.tau == 0.0,
            f"backup is '{config.backup}', but {name} backs up what d3rlpy's does; leave it out": (
                config.backup != "own"
            ),
        }
        refuse(wrong, kind=ConfigError)
        super().__init__(config, device, enable_ddp, impl)

    def inner_create_impl(self, shape: Sequence[int], size: int) -> None:
        """d3rlpy's implementation, its modules with the kernel, which is saved with them."""
        super(KernelCriticAlgo, self).inner_create_impl(shape, size)
        impl: Any = self._impl
        modules, kernel = impl.modules, self.make_kernel(shape, size)
        parts = {field.name: getattr(modules, field.name) for field in dataclasses.fields(modules)}
        made = dataclasses.make_dataclass(
            type(modules).__name__, [("kernel", KernelBellmanLoss)], bases=(type(modules),), frozen=True
        )
        impl._modules = made(**parts, kernel=kernel)
        impl._checkpointer = impl.modules.create_checkpointer(self._device)
        impl._q_func_forwarder = KernelForwarder(impl._q_func_forwarder, kernel)


@dataclasses.dataclass()
class KLossAWACConfig(ComposedConfig, AWACConfig):
    """Config of KLossAWAC; fields as in d3rlpy's AWACConfig."""


@registered("kloss_awac", KLossAWACConfig)
class KLossAWAC(ComposedAlgo, AWAC):
    """Advantage-weighted actor-critic with a kernel-loss critic (Nair et al. 2020; Feng et al. 2019)."""


@dataclasses.dataclass()
class KLossReBRACConfig(ComposedConfig, ReBRACConfig):
    """Config of KLossReBRAC; fields as in d3rlpy's ReBRACConfig.

    actor_beta: d3rlpy's 0.001 hardly holds the actor to the log; where one policy wrote it, as the expert's
        and the medium log of Pendulum, either side, kernel loss or not, is better with 0.1 (one seed).
    """

    actor_beta: float = 0.1


@registered("kloss_rebrac", KLossReBRACConfig)
class KLossReBRAC(ComposedAlgo, ReBRAC):
    """ReBRAC with a kernel-loss critic (Tarasov et al. 2023; Feng et al. 2019)."""


@dataclasses.dataclass()
class KLossCalQLConfig(ComposedConfig, CalQLConfig):
    """Config of KLossCalQL; fields as in d3rlpy's CalQLConfig."""


@registered("kloss_cal_ql", KLossCalQLConfig)
class KLossCalQL(ComposedAlgo, CalQL):
    """Calibrated Q-learning with a kernel-loss critic (Nakamoto et al. 2023; Feng et al. 2019)."""


@dataclasses.dataclass()
class KLossBCQConfig(ComposedConfig, BCQConfig):
    """Config of KLossBCQ; fields as in d3rlpy's BCQConfig."""


@registered("kloss_bcq", KLossBCQConfig)
class KLossBCQ(ComposedAlgo, BCQ):
    """Batch-constrained Q-learning with a kernel-loss critic (Fujimoto et al. 2019; Feng et al. 2019)."""
