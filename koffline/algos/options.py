"""The options that every algorithm with a kernel-loss critic shares, checked once, and its name in files."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, Optional, TypeVar, get_args

from d3rlpy.base import LearnableConfig, register_learnable
from d3rlpy.models.encoders import EncoderFactory, make_encoder_field
from d3rlpy.models.q_functions import QFunctionFactory, make_q_func_field
from d3rlpy.optimizers.optimizers import OptimizerFactory, make_optimizer_field
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from koffline.errors import ConfigError, nearest_name
from koffline.policies.base import refuse

_MEDIAN_RULE = re.compile(r"(?:(?P<factor>[0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*\*?\s*)?median")
_Algo = TypeVar("_Algo", bound=Callable[..., Any])


@dataclasses.dataclass()
class KernelCriticConfig(LearnableConfig):
    """Options of a critic that minimises the kernel Bellman loss.

    kernel: gaussian, laplacian, inverse_multiquadric or linear, over the rows (s, a).
    bandwidth: a number, or a rule such as "0.5 median": that multiple of the median distance of the log's
        rows (the sum of absolute differences for the Laplacian, Euclidean for the others). It is fixed
        before the first gradient step and saved with the model.
    diag_weight: w in (1 − w) U + w mean(k_ii δ_i²), in [0, 1]; None is 1/batch_size, the V-statistic, and
        0.003 with a memory.
    memory: 0, or the share that a step keeps of what earlier mini-batches say of E ψδ (0.97: of some thirty);
        U is then a product of that and the mini-batch (`koffline.objectives.MemoryLoss`). For a gaussian or
        laplacian kernel; one pass more through the critics. A loaded model remembers anew.
    action_kernel: joint (actions are columns of the row, one-hot where discrete), indicator (rows with
        different discrete actions do not meet), or none (a kernel of the state alone).
    standardise: the kernel sees columns with mean 0 and deviation 1.
    normalise: the loss is divided by the mean kernel value, so that a constant residual c costs c².
    initial_value: constant added to all values before the first step: a number, or "mean", the mean reward
        over the mean of 1 − discount, about what the log's own policy is worth. Shifts of all values are what
        gradient descent on residuals learns last (their curvature is (1 − gamma)²), and a critic that starts
        far above its rewards flatters its actor meanwhile.
    tau: 0, the paper's: s' is valued by the critics themselves, with gradient. Above, by a slow copy that
        follows them by this share per step, without: the kernel loss of fitted Q iteration.
    backup: what an ensemble backs up: the minimum over critics, their mean, or each critic its own value.
    """

    algorithm: ClassVar[Any]
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

    def create(self, device: Any = False, enable_ddp: bool = False) -> Any:
        """Create the algorithm. Raises ConfigError for `enable_ddp`, which is not supported."""
        if enable_ddp:
            raise ConfigError("enable_ddp is for d3rlpy's own algorithms: the kernel loss compares all rows")
        return self.algorithm(self, device)

    @classmethod
    def get_type(cls) -> str:
        """Name of the algorithm in files."""
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


@dataclasses.dataclass()
class EntropyConfig(ActorCriticConfig):
    """Options of an actor whose entropy has a temperature; temp_learning_rate 0 keeps the initial one."""

    temp_learning_rate: float = 3e-4
    temp_optim_factory: OptimizerFactory = make_optimizer_field()
    initial_temperature: float = 1.0


@dataclasses.dataclass()
class ComposedConfig(KernelCriticConfig):
    """Options of the kernel loss in an algorithm of d3rlpy's, whose own options have its names.

    tau: rate of d3rlpy's target networks; it must be positive. memory and backup are not for these.
    """

    diag_weight: Optional[float] = 0.1  # noqa: UP045
    tau: float = 0.02
    critic_learning_rate: float = 3e-3


@dataclasses.dataclass()
class CriticConfig(KernelCriticConfig):
    """Options of a critic without an actor, named as d3rlpy's."""

    learning_rate: float = 1e-3
    optim_factory: OptimizerFactory = make_optimizer_field()
    encoder_factory: EncoderFactory = make_encoder_field()
    q_func_factory: QFunctionFactory = make_q_func_field()
    n_critics: int = 1


def registered(kind: str, config_class: type[KernelCriticConfig]) -> Callable[[_Algo], _Algo]:
    """Decorate what makes an algorithm of a config and a device; files name the config `kind`."""

    def register(algorithm: _Algo) -> _Algo:
        config_class.kind, config_class.algorithm = kind, staticmethod(algorithm)
        register_learnable(config_class)
        return algorithm

    return register


def _bandwidth(value: Any) -> Any:
    with contextlib.suppress(ValueError, TypeError):
        value = float(value)  # YAML reads 1e-3 as text
    if not median_factor(value) and not (isinstance(value, float) and 0.0 < value < math.inf):
        raise ValueError("give a positive number or a multiple of the median distance, such as '0.5 median'")
    return value


def _start(value: Any) -> Any:
    with contextlib.suppress(ValueError, TypeError):
        value = float(value)
    if value != "mean" and not (isinstance(value, float) and math.isfinite(value)):
        raise ValueError("give a number or 'mean'")
    return value


_SHARE = Annotated[float, Field(ge=0.0, le=1.0)]
_NOT_NEGATIVE = Annotated[float, Field(ge=0.0)]
_COUNT = Annotated[int, Field(ge=1)]
_WHOLE = (
    "batch_size", "n_critics", "n_action_samples", "path_length", "update_actor_interval",
    "target_update_interval",
)  # fmt: skip
_RULES: dict[str, Any] = {
    **dict.fromkeys(("gamma", "tau", "target_decay"), _SHARE),
    **dict.fromkeys(("temperature", "alpha", "conservative_weight"), _NOT_NEGATIVE),
    **dict.fromkeys(_WHOLE, _COUNT),
    "hidden_units": Annotated[list[_COUNT], Field(min_length=1)],
    "activation": Literal["relu", "gelu", "tanh", "swish", "none", "geglu"],
    "initial_temperature": Annotated[float, Field(gt=0.0)],
    "expectile": Annotated[float, Field(gt=0.0, lt=1.0)],
    "kernel": Literal["gaussian", "laplacian", "inverse_multiquadric", "linear"],
    "bandwidth": Annotated[Any, AfterValidator(_bandwidth)],
    "initial_value": Annotated[Any, AfterValidator(_start)],
    "diag_weight": _SHARE | None,
    "memory": Annotated[float, Field(ge=0.0, lt=1.0)],
    "action_kernel": Literal["joint", "indicator", "none"],
    "backup": Literal["own", "min", "mean"],
    "critic": Literal["kloss", "fvi", "td0", "rg", "kloss_slow"],
}


def checked(name: str, value: Any, where: str, hint: Any = Any, strict: bool = False) -> Any:
    """Check the value of an option and convert it to the type that its field declares.

    hint: the field's type. strict: accept Python's types only, else also YAML's texts. Raises ConfigError.
    """
    rule = _RULES.get(name, _NOT_NEGATIVE if name.endswith(("learning_rate", "_coef", "clip_adv")) else hint)
    if rule is Any:
        return value
    if isinstance(value, bool) and "bool" not in str(rule):
        raise ConfigError(f"{where} is {str(value).lower()}; a yes or no is no value here")
    try:
        made = TypeAdapter(rule, config=ConfigDict(allow_inf_nan=False)).validate_python(value, strict=strict)
    except ValidationError as error:
        first = error.errors()[0]
        reason = first["msg"].removeprefix("Value error, ")
        remedy = f": {reason[0].lower()}{reason[1:]}"
        if first["type"] == "literal_error":
            remedy = f"; {nearest_name(str(value), get_args(rule))}"
        raise ConfigError(f"{where} is {value!r}{remedy}") from None
    return list(made) if isinstance(made, tuple) else made


def check_options(config: KernelCriticConfig, is_discrete: bool) -> None:
    """Raise ConfigError for the first option with an invalid value."""
    for field in dataclasses.fields(config):
        hint = bool if field.type == "bool" else Any
        checked(field.name, getattr(config, field.name), field.name, hint, strict=True)
    q_function = config.q_func_factory.get_type() if hasattr(config, "q_func_factory") else "mean"
    is_composed = isinstance(config, ComposedConfig)
    coefficients = getattr(config, "entropy_coef", 1.0) + getattr(config, "kl_coef", 0.0)
    wrong = {
        "batch_size is 1; the kernel loss compares rows, give at least 2": config.batch_size < 2,
        f"q_func_factory is '{q_function}', a distribution of returns; the kernel loss needs the mean: use "
        "MeanQFunctionFactory (type 'mean')": q_function != "mean",
        "action_kernel is 'indicator', which is for discrete actions; use 'joint' or 'none'": (
            config.action_kernel == "indicator" and not is_discrete
        ),
        f"memory is {config.memory:g} and kernel '{config.kernel}', which has no random features; use "
        "gaussian or laplacian": config.memory > 0.0 and config.kernel not in ("gaussian", "laplacian"),
        "tau is set, but Trust-PCL has slow copies of its own; use critic 'fvi' and target_decay": (
            config.tau > 0.0 and hasattr(config, "target_decay")
        ),
        "tau is 0, but this algorithm needs the slow copy that it moves; raise it": (
            config.tau == 0.0 and (is_composed or hasattr(config, "expectile"))
        ),
        f"memory is set, which {config.kind} does not have; leave it out": (
            is_composed and config.memory > 0.0
        ),
        f"backup is '{config.backup}', but {config.kind} backs up what d3rlpy's does; leave it out": (
            is_composed and config.backup != "own"
        ),
        "entropy_coef and kl_coef are both 0, which defines no policy; give one a positive value": (
            coefficients <= 0.0
        ),
    }
    refuse(wrong, kind=ConfigError)


def median_factor(bandwidth: Any) -> float | None:
    """Multiple of the median in a rule such as "0.5 median"; None for anything else."""
    rule = _MEDIAN_RULE.fullmatch(bandwidth.strip()) if isinstance(bandwidth, str) else None
    return float(rule["factor"] or 1.0) if rule else None
