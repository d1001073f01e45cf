"""The options that every algorithm with a kernel-loss critic shares, checked once."""

from __future__ import annotations

import dataclasses
import math
import re
from difflib import get_close_matches
from typing import Any, Optional

from koffline.data.d3rlpy_import import import_d3rlpy
from koffline.errors import ConfigError
from koffline.kernels import Gaussian, InverseMultiquadric, Kernel, Laplacian, Linear

import_d3rlpy()

from d3rlpy.base import LearnableConfig  # noqa: E402

KERNELS: dict[str, Kernel] = {
    "gaussian": Gaussian(1.0),
    "laplacian": Laplacian(1.0),
    "inverse_multiquadric": InverseMultiquadric(1.0),
    "linear": Linear(),
}
ACTION_KERNELS = ("joint", "indicator", "none")
BACKUPS = ("own", "min", "mean")
_MEDIAN_RULE = re.compile(r"(?:(?P<factor>[0-9.]+(?:[eE][+-]?[0-9]+)?)\s*\*?\s*)?median")


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

    kernel: str = "laplacian"
    bandwidth: Any = "0.5 median"
    diag_weight: Optional[float] = None  # noqa: UP045  (d3rlpy reads the annotations)
    action_kernel: str = "joint"
    standardise: bool = True
    normalise: bool = True
    initial_value: Any = "mean"
    backup: str = "own"


def check_kernel_options(config: KernelCriticConfig, is_discrete: bool) -> None:
    """Raise ConfigError for the first option that is not one of its values."""
    check_choice("kernel", config.kernel, tuple(KERNELS))
    check_choice("action_kernel", config.action_kernel, ACTION_KERNELS)
    check_choice("backup", config.backup, BACKUPS)
    if config.action_kernel == "indicator" and not is_discrete:
        raise ConfigError(
            "action_kernel is 'indicator', which is for discrete actions; use 'joint' or 'none'"
        )
    for name in ("standardise", "normalise"):
        if not isinstance(getattr(config, name), bool):
            raise ConfigError(f"{name} is {getattr(config, name)!r}; give true or false")
    median_factor(config.bandwidth)
    start = config.initial_value
    if start != "mean" and not (_is_number(start) and math.isfinite(start)):
        raise ConfigError(f"initial_value is {start!r}; give a number or 'mean'")
    weight = config.diag_weight
    if weight is not None and not (_is_number(weight) and 0.0 <= weight <= 1.0):
        raise ConfigError(f"diag_weight is {weight!r}; give a number in [0, 1], or null for 1/batch_size")
    _check_numbers(config)
    for field in dataclasses.fields(config):
        if field.name.endswith("q_func_factory"):
            _check_q_function(getattr(config, field.name))


def median_factor(bandwidth: Any) -> float | None:
    """The multiple of the median that a rule names; None for a plain number. Raises ConfigError."""
    if _is_number(bandwidth) and math.isfinite(bandwidth) and bandwidth > 0.0:
        return None
    rule = _MEDIAN_RULE.fullmatch(bandwidth.strip()) if isinstance(bandwidth, str) else None
    if rule is not None:
        try:
            factor = float(rule["factor"] or 1.0)
        except ValueError:
            factor = 0.0
        if factor > 0.0:
            return factor
    raise ConfigError(
        f"bandwidth is {bandwidth!r}; give a positive number or a multiple of the median distance, "
        "such as '0.5 median'"
    )


def _check_numbers(config: KernelCriticConfig) -> None:
    if not (_is_number(config.gamma) and 0.0 <= config.gamma <= 1.0):
        raise ConfigError(f"gamma is {config.gamma!r}; give a discount factor in [0, 1]")
    if not (_is_whole(config.batch_size) and config.batch_size >= 2):
        raise ConfigError(
            f"batch_size is {config.batch_size!r}; the kernel loss compares rows, give at least 2"
        )
    critics = getattr(config, "n_critics", 1)
    if not (_is_whole(critics) and critics >= 1):
        raise ConfigError(f"n_critics is {critics!r}; give a positive number")
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name.endswith("learning_rate") and not (_is_number(value) and value >= 0.0):
            raise ConfigError(f"{field.name} is {value!r}; give a number that is not negative")


def _check_q_function(factory: Any) -> None:
    kind = factory.get_type()
    if kind != "mean":
        raise ConfigError(
            f"q_func_factory is '{kind}', a distribution of returns; the kernel loss needs the mean: "
            "use MeanQFunctionFactory (type 'mean')"
        )


def check_choice(name: str, value: Any, known: tuple[str, ...]) -> None:
    """Raise ConfigError, naming the nearest value, unless `value` is one of the known ones."""
    if value not in known:
        near = get_close_matches(str(value), known, 1)
        hint = f"did you mean '{near[0]}'?" if near else f"known are {', '.join(known)}"
        raise ConfigError(f"{name} is {value!r}; {hint}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
