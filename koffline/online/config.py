"""Every setting of online Trust-PCL, with its default, in one flat record, read from YAML and ``key=value``.

Names: ``entropy_coef`` is the paper's λ, ``kl_coef`` its τ (set by the trust region from
``max_divergence``), ``diag_weight`` the mixture of U and V, ``target_decay`` the smoothing of the copies.
"""

from __future__ import annotations

import contextlib
import math
import os
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from koffline.config import parse_assignments, read_yaml
from koffline.errors import ConfigError, nearest_name

Critic = Literal["kloss", "fvi", "td0", "rg"]
CRITICS: tuple[Critic, ...] = ("kloss", "fvi", "td0", "rg")
_CHOICES = {
    "critic": CRITICS,
    "vectorization": ("local", "sync", "async"),
    "kernel_inputs": ("state", "state_action"),
}
_OPTIONS, _LOG = "environment_options", "initial_log"


@dataclass(frozen=True)
class OnlineConfig:
    """One run's settings. Raises ConfigError for a number out of range.

    steps: environment steps of a run. n_environments: copies a run plays in. path_length: longest sub-episode
    of the replay, in steps; a window of ``window_length`` (the paper's d) lies within one. windows_per_path:
    drawn uniformly from each sampled path; 0 takes all. capacity: sub-episodes, None grows without bound.
    recency: sub-episodes are drawn with probability ∝ exp(−recency · age in insertions). learning_starts: in
    sub-episodes. reward_scale: multiplies what is learned from, never what is reported. clip_adv: of the
    residual in the policy's gradient, 0 never. diag_weight: of the kernel loss, None for 1/m.
    bandwidth_scale: times the mini-batch's median distance. entropy_coef: at the start; entropy_decay: the
    factor per 2500 iterations, None keeps it. evaluation_interval, checkpoint_interval: in environment steps
    of a run. evaluation_limit: steps after which an episode of an evaluation is cut, for environments without
    a time limit. initial_log: a log to fill the replay with before the first step.
    """

    environment: str
    environment_options: Mapping[str, Any] = field(default_factory=dict)
    n_environments: int = 1
    vectorization: str = "local"
    steps: int = 200_000
    critic: str = "kloss"
    gamma: float = 0.995
    window_length: int = 10
    path_length: int = 10
    steps_per_iteration: int = 10
    batch_size: int = 64
    windows_per_path: int = 1
    capacity: int | None = 5000
    recency: float = 0.001
    learning_starts: int = 64
    learning_rate: float = 3e-3
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 40.0
    target_decay: float = 0.99
    entropy_coef: float = 0.0
    entropy_decay: float | None = None
    max_divergence: float = 0.05
    kl_coef_initial: float = 500.0
    kl_coef_min: float = 1.0
    clip_adv: float = 1.0
    diag_weight: float | None = None
    bandwidth_scale: float = 0.5
    kernel_inputs: str = "state"
    standardise: bool = True
    reward_scale: float = 1.0
    hidden: tuple[int, ...] = (64, 64)
    legacy_timeouts: bool = False
    legacy_discount: bool = False
    legacy_targets: bool = False
    evaluation_interval: int = 10_000
    evaluation_episodes: int = 3
    evaluation_seed: int = 10_000
    evaluation_limit: int = 10_000
    checkpoint_interval: int = 50_000
    keep_checkpoints: int = 2
    initial_log: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", tuple(self.hidden))
        object.__setattr__(self, "environment_options", dict(self.environment_options))
        for name in _COUNTS:
            _check_count(name, getattr(self, name), 1, _MOST.get(name))
        _check_count("windows_per_path", self.windows_per_path, 0)
        _check_count("evaluation_seed", self.evaluation_seed, 0)
        if not self.hidden:
            raise ConfigError("hidden is (); give the size of at least one layer")
        for size in self.hidden:
            _check_count("hidden", size, 1, 65_536)
        if self.capacity is not None:
            _check_count("capacity", self.capacity, max(self.learning_starts, self.batch_size), 10**9)
        for name, (low, high) in _RANGES.items():
            number = getattr(self, name)
            if number is not None and not (_is_number(number) and low <= number <= high):
                raise ConfigError(f"{name} is {number!r}; give a number in [{low:g}, {high:g}]")
        _check_sizes(self)

    def with_changes(self, **changes: Any) -> OnlineConfig:
        """A copy with other values. Raises ConfigError for an unknown name."""
        known = {part.name for part in fields(self)}
        for name in changes:
            if name not in known:
                raise ConfigError(f"there is no setting '{name}'; known are {', '.join(sorted(known))}")
        return replace(self, **changes)


@dataclass(frozen=True)
class OnlineRun:
    """One run of a stack: its settings and its seed."""

    config: OnlineConfig
    seed: int

    def __post_init__(self) -> None:
        _check_count("seed", self.seed, 0)


def load_config(path: str | Path | Mapping[str, Any], assignments: Iterable[str] = ()) -> OnlineConfig:
    """The config of a YAML file (or of a mapping), with ``gamma=0.98`` laid over it.

    One option of the environment is ``environment_options.NAME=VALUE``. A relative ``initial_log`` in a file
    lies beside the file, any other in the current folder. Raises ConfigError in one line; for an unknown key
    it names the nearest.
    """
    content = dict(path) if isinstance(path, Mapping) else read_yaml(path)
    _make_log_absolute(content, Path.cwd() if isinstance(path, Mapping) else Path(path).resolve().parent)
    for key, value in parse_assignments(assignments).items():
        _assign(content, key, value)
    _make_log_absolute(content, Path.cwd())
    hints = typing.get_type_hints(OnlineConfig)
    for key in content:
        if key not in hints:
            raise ConfigError(f"{key} is unknown; {nearest_name(key, sorted(hints))}")
    if not content.get("environment"):
        raise ConfigError(
            "environment is missing; give a Gymnasium id, as in environment: InvertedPendulum-v5"
        )
    return OnlineConfig(**{key: _typed(key, value, hints[key]) for key, value in content.items()})


def resolved(config: OnlineConfig) -> dict[str, Any]:
    """The same as plain values, every default filled in; `load_config` reads it again."""
    return {part.name: _plain(getattr(config, part.name)) for part in fields(config)}


def check_equal(configs: Sequence[OnlineConfig]) -> OnlineConfig:
    """The common settings; raises ConfigError for the first that differs."""
    if not configs:
        raise ConfigError("runs is empty; give at least one")
    first = configs[0]
    for config in configs[1:]:
        for name in _EQUAL:
            here, there = getattr(first, name), getattr(config, name)
            if here != there:
                raise ConfigError(
                    f"{name} is {here!r} in one run and {there!r} in another; put them in separate stacks"
                )
    return first


_EQUAL = (
    "environment",
    "environment_options",
    "n_environments",
    "vectorization",
    "path_length",
    "steps_per_iteration",
    "batch_size",
    "windows_per_path",
    "capacity",
    "learning_starts",
    "hidden",
    "evaluation_episodes",
    "evaluation_seed",
    "evaluation_limit",
    "initial_log",
)  # what the runs of a stack share
_COUNTS = (
    "n_environments",
    "steps",
    "window_length",
    "path_length",
    "steps_per_iteration",
    "batch_size",
    "learning_starts",
    "evaluation_interval",
    "evaluation_episodes",
    "evaluation_limit",
    "checkpoint_interval",
    "keep_checkpoints",
)
# A slip of the hand must not ask for all the memory there is.
_MOST = {
    "n_environments": 10_000,
    "path_length": 100_000,
    "window_length": 100_000,
    "steps_per_iteration": 1_000_000,
    "batch_size": 100_000,
}
_TINY, _HUGE = 1e-12, 1e12
_RANGES: dict[str, tuple[float, float]] = {
    "gamma": (0.0, 1.0),
    "recency": (0.0, 1.0),
    "learning_rate": (0.0, 1.0),
    "adam_epsilon": (1e-16, 1.0),
    "max_grad_norm": (_TINY, _HUGE),
    "target_decay": (0.0, 1.0),
    "entropy_coef": (0.0, _HUGE),
    "entropy_decay": (0.0, 1.0),
    "max_divergence": (_TINY, _HUGE),
    "kl_coef_initial": (0.0, _HUGE),
    "kl_coef_min": (0.0, _HUGE),
    "clip_adv": (0.0, _HUGE),
    "diag_weight": (0.0, 1.0),
    "bandwidth_scale": (_TINY, _HUGE),
    "reward_scale": (_TINY, _HUGE),
}


def _check_sizes(config: OnlineConfig) -> None:
    if not isinstance(config.environment, str) or not config.environment:
        raise ConfigError(f"environment is {config.environment!r}; give a Gymnasium id")
    for name, choices in _CHOICES.items():
        if getattr(config, name) not in choices:
            raise ConfigError(f"{name} is {getattr(config, name)!r}; use one of {', '.join(choices)}")
    if config.steps_per_iteration % config.n_environments:
        raise ConfigError(
            f"steps_per_iteration {config.steps_per_iteration} is no multiple of n_environments "
            f"{config.n_environments}; each environment takes the same number of steps"
        )
    if config.critic == "kloss" and config.batch_size < 2:
        raise ConfigError("batch_size is 1; the kernel loss compares pairs: give at least 2")


def _check_count(name: str, number: Any, least: int, most: int | None = None) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise ConfigError(f"{name} is {number!r}; give a whole number of at least {least}")
    if most is not None and number > most:
        raise ConfigError(f"{name} is {number}; give a whole number of at most {most:,}")


def _is_number(number: Any) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number)


def _assign(content: dict[str, Any], key: str, value: Any) -> None:
    parent, dot, name = key.partition(".")
    if not dot:
        content[key] = value
        return
    if parent != _OPTIONS:
        raise ConfigError(f"{key} is unknown; only {_OPTIONS} has parts, as in {_OPTIONS}.NAME=VALUE")
    below = content.get(parent) or {}
    if not isinstance(below, Mapping):
        raise ConfigError(f"{parent} is {below!r}; write it as lines of 'key: value'")
    content[parent] = {**below, name: value}


def _typed(name: str, value: Any, hint: Any) -> Any:
    """The value as the field's type; YAML takes 1e-3 for text. Raises ConfigError."""
    allowed = {hint, *typing.get_args(hint)}
    if name == _OPTIONS and value is None:
        return {}
    if isinstance(value, bool) and bool not in allowed and name != _OPTIONS:
        raise ConfigError(f"{name} is {str(value).lower()}; a yes or no is no value here")
    if isinstance(value, str) and allowed & {int, float}:
        with contextlib.suppress(ValueError):
            value = float(value)
    try:
        return TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise ConfigError(f"{name} is {value!r}: {reason[0].lower()}{reason[1:]}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, (list, tuple)) else value


def _make_log_absolute(content: dict[str, Any], folder: Path) -> None:
    log = content.get(_LOG)
    if isinstance(log, str) and log and not log.startswith("minari:"):
        content[_LOG] = str((folder / Path(os.path.expanduser(log))).resolve())
