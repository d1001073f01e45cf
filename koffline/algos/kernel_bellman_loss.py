"""The kernel Bellman loss as a module of a d3rlpy algorithm, and the options of such an
algorithm.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from typing import Any, ClassVar, Optional, TypeVar

import torch
import torch.nn.functional as F
from d3rlpy.base import (
    DeviceArg,
    LearnableBase,
    LearnableConfig,
    register_learnable,
)
from d3rlpy.models.encoders import EncoderFactory, make_encoder_field
from d3rlpy.models.q_functions import QFunctionFactory, make_q_func_field
from d3rlpy.optimizers.optimizers import OptimizerFactory, make_optimizer_field
from jaxtyping import Float
from torch import Tensor, nn

from koffline.algos.options import median_factor
from koffline.errors import ConfigError, DataError
from koffline.kernel_loss import Loss, Residual, kernel_loss, v_statistic
from koffline.kernels import KERNELS
from koffline.objectives import MemoryLoss
from koffline.steps import Memory

# a class of algorithms, or a function that makes one
_Maker = TypeVar("_Maker", bound=Callable[..., LearnableBase])
_MOST_ROWS = 1000  # half a million distances are enough for a median
_SMALLEST = 1e-6
_FEATURES = 500
_REMEMBERED_WEIGHT = 0.003
NO_SLOW_COPY = (
    "tau is 0, but this algorithm needs the slow copy that it moves; raise it"
)
_LOG = logging.getLogger(__name__)


@dataclasses.dataclass()
class KernelCriticConfig(LearnableConfig):
    """Options of a critic that minimises the kernel Bellman loss.

    kernel: gaussian, laplacian, inverse_multiquadric or linear, over the rows (s, a),
        or the name of a kernel of your own in `koffline.kernels.KERNELS`.
    bandwidth: a number, or a rule such as "0.5 median": that multiple of the median
        distance of the log's rows (sum of absolute differences for the Laplacian,
        Euclidean for the others). It is fixed before the first gradient step and saved
        with the model.
    diag_weight: w in (1 − w) U + w mean(k_ii δ_i²), in [0, 1]; None is 1/batch_size,
        the V-statistic, and 0.003 with a memory.
    memory: 0, or the share that a step keeps of the average of E ψδ over earlier
        mini-batches (0.97: about thirty); U is then a product of this average and the
        mini-batch's (`koffline.objectives.MemoryLoss`). For a gaussian or laplacian
        kernel; needs one more pass through the critics. A loaded model starts with an
        empty memory.
    action_kernel: joint (actions are columns of the row, one-hot if discrete),
        indicator (the kernel is zero for different discrete actions), or none (a kernel
        of the state alone).
    standardise: the kernel sees columns with mean 0 and deviation 1.
    normalise: the loss is divided by the mean kernel value, so that a constant residual
    c costs c².
    initial_value: constant added to all values before the first step: a number, or
        "mean", the mean reward divided by the mean of 1 − discount, roughly the value
        of the log's own policy. Gradient descent on residuals learns shifts of all
        values last (their curvature is (1 − gamma)²), and a critic that starts too high
        misleads its actor until then.
    tau: 0, as in the paper: s' is valued by the critics themselves, with gradient.
        Above 0: by a slow copy without gradient, which follows the critics by this
        share per step: the kernel loss of fitted Q iteration.
    backup: the ensemble's value of s': the minimum over critics, their mean, or each
    critic's own.
    """

    algorithm: ClassVar[Callable[..., LearnableBase]]  # from config and device
    kind: ClassVar[str]

    kernel: str = "laplacian"
    bandwidth: Any = "0.5 median"
    diag_weight: Optional[float] = None  # noqa: UP045  (d3rlpy reads the annotations)
    memory: float = 0.0
    action_kernel: str = "joint"
    standardise: bool = True
    normalise: bool = True
    initial_value: Any = "mean"
    tau: float = 0.0
    backup: str = "own"

    def create(
        self, device: DeviceArg = False, enable_ddp: bool = False
    ) -> LearnableBase:
        """Create the algorithm.

        Raises ConfigError for `enable_ddp`, which is not supported.
        """
        if enable_ddp:
            raise ConfigError(
                "enable_ddp is for d3rlpy's own algorithms: the kernel loss compares"
                " all rows"
            )
        return self.algorithm(self, device)

    @classmethod
    def get_type(cls) -> str:
        """Name of the algorithm in files."""
        return cls.kind

    def check_options(self, is_discrete: bool) -> None:
        """Check that options which are valid on their own do not contradict each other.

        is_discrete: whether the actions are. Raises ConfigError.
        """
        if self.batch_size < 2:
            raise ConfigError(
                "batch_size is 1; the kernel loss compares rows, give at least 2"
            )
        factory = getattr(self, "q_func_factory", None)
        if factory is not None and factory.get_type() != "mean":
            raise ConfigError(
                f"q_func_factory is '{factory.get_type()}', a distribution of returns; the"
                " kernel loss needs the mean: use MeanQFunctionFactory (type 'mean')"
            )
        if self.action_kernel == "indicator" and not is_discrete:
            raise ConfigError(
                "action_kernel is 'indicator', which is for discrete actions; use"
                " 'joint' or 'none'"
            )
        if self.memory > 0.0 and self.kernel not in ("gaussian", "laplacian"):
            raise ConfigError(
                f"memory is {self.memory:g} and kernel '{self.kernel}', which has no"
                " random features; use gaussian or laplacian"
            )


@dataclasses.dataclass()
class ActorCriticConfig(KernelCriticConfig):
    """Options of a kernel-loss critic with an actor, in addition to those of a d3rlpy
    config.
    """

    diag_weight: Optional[float] = 0.1  # noqa: UP045
    critic_learning_rate: float = 3e-3


@dataclasses.dataclass()
class CriticConfig(KernelCriticConfig):
    """Options of a critic without an actor, with d3rlpy's names."""

    learning_rate: float = 1e-3
    optim_factory: OptimizerFactory = make_optimizer_field()
    encoder_factory: EncoderFactory = make_encoder_field()
    q_func_factory: QFunctionFactory = make_q_func_field()
    n_critics: int = 1


def registered(
    kind: str, config_class: type[KernelCriticConfig]
) -> Callable[[_Maker], _Maker]:
    """Decorator that registers a maker of an algorithm (from config and device) under
    the config's `kind`.
    """

    def register(algorithm: _Maker) -> _Maker:
        config_class.kind = kind
        config_class.algorithm = staticmethod(algorithm)
        register_learnable(config_class)
        return algorithm

    return register


class KernelBellmanLoss(nn.Module):
    """(1 − w) U + w mean(k_ii δ_i²) of residuals δ under a kernel over rows (s, a).

    Centre and scale of the rows, bandwidth and the factor of the loss are buffers: they
    are fixed once by ``fix``, saved and loaded with the model, and the same for every
    step. No host-side branch depends on them, so that a CUDA graph can contain the
    loss. n_actions: 0 for continuous actions. (Feng et al. 2019, sec:batch_lv)
    """

    mean: Tensor
    inverse_scale: Tensor
    bandwidth: Tensor
    factor: Tensor
    reward_size: Tensor
    step: Tensor

    def __init__(
        self,
        config: KernelCriticConfig,
        observation_size: int,
        action_size: int,
        n_actions: int,
    ):
        super().__init__()
        self._config = config
        self._kernel = KERNELS[config.kernel]
        self.n_actions = n_actions
        self._weight = config.diag_weight
        if config.memory > 0.0 and self._weight is None:
            self._weight = _REMEMBERED_WEIGHT
        columns = observation_size
        if config.action_kernel == "joint":
            columns += action_size
        self.register_buffer("mean", torch.zeros(columns))
        self.register_buffer("inverse_scale", torch.ones(columns))
        # NaN until it is fixed
        self.register_buffer("bandwidth", torch.tensor(math.nan))
        self.register_buffer("factor", torch.tensor(1.0))
        # mean |reward| of a step; NaN: unknown
        self.register_buffer("reward_size", torch.tensor(math.nan))
        self._random_features = MemoryLoss(self._kernel, features=_FEATURES)  # type: ignore[arg-type]
        # whether residuals belong to the previous step's parameters
        self.looks_back = False
        self._memory: Memory | None = None  # not saved with the model
        self._before: Tensor | None = None
        # gradient steps so far, which d3rlpy does not save
        self.register_buffer("step", torch.tensor(0))

    def forward(
        self, residual: Residual, observations: Tensor, actions: Tensor
    ) -> Loss:
        """One loss per critic. observations (N, d); actions (N, k), or (N, 1)
        indices.
        """
        if self._config.memory > 0.0:
            features = self._features(observations, actions)
            return self._remembered(residual, features) * self.factor
        with torch.no_grad():
            gram = self._gram_of(self._rows(observations, actions), actions)
        if self._weight is None:
            return v_statistic(residual, gram) * self.factor
        weight = self._weight
        if residual.shape[-1] == 1:  # one row has no pairs off the diagonal
            weight = 1.0
        return kernel_loss(residual, gram, weight) * self.factor

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Tensor],
        prefix: str,
        local_metadata: dict[str, object],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load buffers; in files of earlier versions the unit of reward was one."""
        state_dict.setdefault(f"{prefix}reward_size", torch.tensor(1.0))
        super()._load_from_state_dict(
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )

    def _remembered(
        self, residual: Residual, psi: Float[Tensor, "row feature"]
    ) -> Loss:
        """(1 − w) mᵀψᵀδ/n + w mean δ², whose gradient is that of (1 − w) ‖E ψδ‖² + w E
        δ².
        """
        now = residual @ psi / residual.shape[-1]
        if self.looks_back:
            self._before = now
            return residual.new_zeros(len(residual))
        if self._memory is None:
            self._memory = Memory(self._config.memory, torch.zeros_like(now))
        remembered = self._memory.take(now.detach(), self._before)
        self._before = None
        product = (remembered * now).sum(dim=1)
        weight: Any = self._weight  # never None with a memory
        off_diagonal = 2.0 * product - product.detach()
        return (1.0 - weight) * off_diagonal + weight * residual.square().mean(dim=1)

    def _features(
        self, observations: Tensor, actions: Tensor
    ) -> Float[Tensor, "row feature"]:
        """Random features ψ of the rows; under an indicator kernel each action has its
        own features.
        """
        with torch.no_grad():
            psi = self._random_features.gram(self._rows(observations, actions))
            if self._config.action_kernel != "indicator":
                return psi
            chosen = F.one_hot(actions.reshape(-1).long(), self.n_actions).to(psi)
            return (psi.unsqueeze(1) * chosen.unsqueeze(2)).flatten(1)

    def _rows(self, observations: Tensor, actions: Tensor) -> Tensor:
        return (self._columns(observations, actions) - self.mean) * self.inverse_scale

    def fix(self, observations: Tensor, actions: Tensor, batch_size: int) -> None:
        """Compute centre, scale, bandwidth and factor from rows of the log. Raises
        DataError.

        Logs a warning if the kernel is so narrow that the loss of a mini-batch is
        practically the residual-gradient loss: mean off-diagonal value below
        1/batch_size.
        """
        config = self._config
        rows = self._columns(observations, actions).double()[:_MOST_ROWS]
        if len(rows) < 2 or not bool(torch.isfinite(rows).all()):
            raise DataError(
                f"the kernel needs at least two finite rows, received {len(rows)};"
                " check the log"
            )
        centre = rows.mean(dim=0)
        deviation = rows.std(dim=0)
        deviation = torch.where(
            deviation > _SMALLEST, deviation, torch.ones_like(deviation)
        )
        if not config.standardise:
            centre = torch.zeros_like(centre)
            deviation = torch.ones_like(deviation)
        scaled = (rows - centre) / deviation
        factor = median_factor(config.bandwidth)
        if factor is None:
            bandwidth = float(config.bandwidth)
        else:
            norm = 2.0
            if config.kernel == "laplacian":
                norm = 1.0
            distances = torch.pdist(scaled, p=norm)
            bandwidth = max(factor * float(distances.median()), _SMALLEST)
        gram = self._gram_of(scaled / bandwidth, actions[:_MOST_ROWS])
        off_diagonal = float(
            (gram.sum() - gram.diagonal().sum()) / (len(gram) * (len(gram) - 1))
        )
        if self._weight is None:
            weight = 1.0 / batch_size
        else:
            weight = self._weight
        mean_value = (1.0 - weight) * off_diagonal + weight
        is_bounded = config.kernel != "linear"
        self.mean.copy_(centre)
        self.inverse_scale.copy_(1.0 / (deviation * bandwidth))
        self.factor.fill_(1.0)
        if config.normalise and is_bounded:
            self.factor.fill_(1.0 / mean_value)
        self.bandwidth.fill_(bandwidth)
        if is_bounded and off_diagonal < 1.0 / batch_size:
            _LOG.warning(
                "kernel values average %.1e, below 1/batch_size: the loss is nearly that"
                " of residual gradient; give a larger bandwidth than %.3g",
                off_diagonal,
                bandwidth,
            )

    def _columns(self, observations: Tensor, actions: Tensor) -> Tensor:
        """Rows (N, columns) as inputs of the kernel, before scaling."""
        rows = observations.flatten(1)
        if self._config.action_kernel != "joint":
            return rows
        if self.n_actions:
            actions = F.one_hot(actions.reshape(-1).long(), self.n_actions).to(rows)
        return torch.cat((rows, actions), dim=1)

    def _gram_of(self, scaled: Tensor, actions: Tensor) -> Tensor:
        gram = self._kernel.gram(scaled)
        if self._config.action_kernel == "indicator":
            index = actions.reshape(-1)
            is_same = index.unsqueeze(0) == index.unsqueeze(1)  # (N, N)
            gram = gram * is_same
        return gram
