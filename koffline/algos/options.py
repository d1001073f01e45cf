"""The options that every algorithm with a kernel-loss critic shares, checked once, and its name in files."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Optional, TypeVar

from d3rlpy.base import LearnableConfig, register_learnable
from d3rlpy.models.encoders import EncoderFactory, make_encoder_field
from d3rlpy.models.q_functions import QFunctionFactory, make_q_func_field
from d3rlpy.optimizers.optimizers import OptimizerFactory, make_optimizer_field

from koffline.errors import ConfigError, nearest_name
from koffline.kernels import Gaussian, InverseMultiquadric, Kernel, Laplacian, Linear

KERNELS: dict[str, Kernel] = {
    "gaussian": Gaussian(1.0),
    "laplacian": Laplacian(1.0),
    "inverse_multiquadric": InverseMultiquadric(1.0),
    "linear": Linear(),
}
_MEDIAN_RULE = re.compile(r"(?:(?P<factor>[0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*\*?\s*)?median")
_Algo = TypeVar("_Algo", bound=type)


@dataclasses.dataclass()
class KernelCriticConfig(LearnableConfig):
    """Options of a critic that minimises the kernel Bellman loss; there is no target network.

    kernel: gaussian, laplacian, inverse_multiquadric or linear, over the rows (s, a).
    bandwidth: a number, or a rule such as "0.5 median": that multiple of the median distance of the log's
        rows (the sum of absolute differences for the Laplacian, Euclidean for the others). It is fixed
        before the first gradient step and saved with the model.
    diag_weight: w in (1 − w) U + w mean(k_ii δ_i²), in [0, 1]; None is 1/batch_size, the V-statistic.
    action_kernel: joint (actions are columns of the row, one-hot where discrete), indicator (rows with
        different discrete actions do not meet), or none (a kernel of the state alone).
    standardise: the kernel sees columns with mean 0 and deviation 1.
    normalise: the loss is divided by the mean kernel value, so that a constant residual c costs c².
    initial_value: constant added to all values before the first step: a number, or "mean", the mean reward
        over the mean of 1 − discount, about what the log's own policy is worth. Shifts of all values are what
        gradient descent on residuals learns last (their curvature is (1 − gamma)²), and a critic that starts
        far above its rewards flatters its actor meanwhile.
    backup: what an ensemble backs up: the minimum over critics, their mean, or each critic its own value.
    """

    algorithm: ClassVar[Any]
    kind: ClassVar[str]

    kernel: str = "laplacian"
    bandwidth: Any = "0.5 median"
    diag_weight: Optional[float] = None  # noqa: UP045  (d3rlpy reads the annotations)
    action_kernel: str = "joint"
    standardise: bool = True
    normalise: bool = True
    initial_value: Any = "mean"
    backup: str = "own"

    def create(self, device: Any = False, enable_ddp: bool = False) -> Any:
        """The algorithm."""
        return self.algorithm(self, device, enable_ddp)

    @classmethod
    def get_type(cls) -> str:
        """Name in files."""
        return cls.kind


@dataclasses.dataclass()
class ActorCriticConfig(KernelCriticConfig):
    """Options of a critic with an actor, named as d3rlpy's; the kernel's are in KernelCriticConfig."""

    actor_learning_rate: float = 3e-4
    critic_learning_rate: float = 3e-3
    actor_optim_factory: OptimizerFactory = make_optimizer_field()
    critic_optim_factory: OptimizerFactory = make_optimizer_field()
    actor_encoder_factory: EncoderFactory = make_encoder_field()
    critic_encoder_factory: EncoderFactory = make_encoder_field()
    q_func_factory: QFunctionFactory = make_q_func_field()
    n_critics: int = 2


def registered(kind: str, config_class: type[KernelCriticConfig]) -> Callable[[_Algo], _Algo]:
    """A decorator of an algorithm: the config makes it, and files know the config by `kind`."""

    def register(algorithm: _Algo) -> _Algo:
        config_class.kind, config_class.algorithm = kind, algorithm
        register_learnable(config_class)
        return algorithm

    return register


_CHOICES = {
    "kernel": tuple(KERNELS),
    "action_kernel": ("joint", "indicator", "none"),
    "backup": ("own", "min", "mean"),
    "critic": ("kloss", "fvi", "td0", "rg"),
}
_WHOLE = ("batch_size", "n_critics", "n_action_samples", "path_length", "update_actor_interval")


class Rule(NamedTuple):
    """What a number must satisfy, and what to say where it does not."""

    holds: Callable[[float], bool]
    remedy: str


_POSITIVE = Rule(lambda x: x > 0, "give a positive number")
_NOT_NEGATIVE = Rule(lambda x: x >= 0, "give a number that is not negative")
_RULES = {
    "gamma": Rule(lambda x: 0.0 <= x <= 1.0, "give a discount factor in [0, 1]"),
    "batch_size": Rule(lambda x: x >= 2, "the kernel loss compares rows, give at least 2"),
    "expectile": Rule(lambda x: 0.0 < x < 1.0, "give a number inside (0, 1)"),
    "tau": Rule(lambda x: 0.0 < x <= 1.0, "give a number in (0, 1]"),
    "target_decay": Rule(lambda x: 0.0 <= x <= 1.0, "give a number in [0, 1]"),
    **dict.fromkeys(("initial_temperature", *_WHOLE[1:]), _POSITIVE),
    **dict.fromkeys(("temperature", "alpha", "conservative_weight"), _NOT_NEGATIVE),
}
# Where d3rlpy's own algorithms allow more than ours, or have options that ours have not.
_OF_STOCK = {
    **dict.fromkeys(("batch_size", "target_update_interval"), _POSITIVE),
    "tau": Rule(lambda x: 0.0 <= x <= 1.0, "give a rate in [0, 1]"),
}


def rule_of(name: str, is_stock: bool = False) -> Rule | None:
    """The rule for options of that name, whichever algorithm has them."""
    if name.endswith(("learning_rate", "_coef", "clip_adv")):
        return _NOT_NEGATIVE
    return (is_stock and _OF_STOCK.get(name)) or _RULES.get(name)


def check_options(config: KernelCriticConfig, is_discrete: bool) -> None:
    """Raise ConfigError for the first option that is not one of its values."""
    for field in dataclasses.fields(config):
        name, value, rule = field.name, getattr(config, field.name), rule_of(field.name)
        if name in _CHOICES and value not in _CHOICES[name]:
            raise ConfigError(f"{name} is {value!r}; {nearest_name(str(value), _CHOICES[name])}")
        if field.type == "bool" and not isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r}; give true or false")
        is_number = _is_number(value) and (name not in _WHOLE or isinstance(value, int))
        if rule is not None and not (is_number and rule.holds(value)):
            raise ConfigError(f"{name} is {value!r}; {rule.remedy}")
    median_factor(config.bandwidth)
    start, weight = config.initial_value, config.diag_weight
    q_function = config.q_func_factory.get_type() if hasattr(config, "q_func_factory") else "mean"
    coefficients = getattr(config, "entropy_coef", 1.0) + getattr(config, "kl_coef", 0.0)
    wrong = {
        f"q_func_factory is '{q_function}', a distribution of returns; the kernel loss needs the mean: use "
        "MeanQFunctionFactory (type 'mean')": q_function != "mean",
        f"initial_value is {start!r}; give a number or 'mean'": (
            start != "mean" and not (_is_number(start) and math.isfinite(start))
        ),
        f"diag_weight is {weight!r}; give a number in [0, 1], or null for 1/batch_size": (
            weight is not None and not (_is_number(weight) and 0.0 <= weight <= 1.0)
        ),
        "action_kernel is 'indicator', which is for discrete actions; use 'joint' or 'none'": (
            config.action_kernel == "indicator" and not is_discrete
        ),
        "action_scaler is set, but the actions are discrete; leave it out": (
            is_discrete and config.action_scaler is not None
        ),
        "entropy_coef and kl_coef are both 0, which defines no policy; give one a positive value": (
            coefficients <= 0.0
        ),
    }
    for reason, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigError(reason)


def median_factor(bandwidth: Any) -> float | None:
    """The multiple of the median that a rule names; None for a plain number. Raises ConfigError."""
    if _is_number(bandwidth) and math.isfinite(bandwidth) and bandwidth > 0.0:
        return None
    rule = _MEDIAN_RULE.fullmatch(bandwidth.strip()) if isinstance(bandwidth, str) else None
    factor = float(rule["factor"] or 1.0) if rule else 0.0
    if factor > 0.0:
        return factor
    raise ConfigError(
        f"bandwidth is {bandwidth!r}; give a positive number or a multiple of the median distance, "
        "such as '0.5 median'"
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
