"""All settings of online Trust-PCL, with defaults, in one flat record, read from YAML
and ``key=value``.

Names: ``entropy_coef`` is the paper's λ, ``kl_coef`` its τ (which a trust region sets
from ``max_divergence``), ``diag_weight`` the mixture of U and V, ``target_decay`` the
smoothing of the slow copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationError

from koffline.bundled import ONLINE
from koffline.config import (
    MOST_LAYERS,
    MOST_UNITS,
    Section,
    describe_error,
    network_bytes,
    parse_assignments,
    read_layers,
    read_section,
)
from koffline.errors import ConfigError
from koffline.untrusted.limits import check_fits

Critic = Literal["kloss", "fvi", "td0", "rg", "memory", "kloss_slow"]
CRITICS: tuple[Critic, ...] = get_args(Critic)
WINDOW = 20  # number of episodes that the trust region uses
Count = Annotated[int, Field(ge=1)]
# a typing error must not exhaust the memory
Size = Annotated[int, Field(ge=1, le=100_000)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Amount = Annotated[float, Field(ge=0.0, le=1e12)]
Scale = Annotated[float, Field(ge=1e-12, le=1e12)]


class OnlineConfig(Section):
    """One run's settings. Raises ConfigError for a value out of range.

    env: its Gymnasium name, the only required setting. env_options: further arguments
    of ``gymnasium.make``. num_envs: copies of the environment per run. steps:
    environment steps of a run. critic: kloss, fvi, td0, rg; kloss_slow, the kernel loss
    whose windows end in a slow copy of the value, as fvi's do; or memory, the kernel
    loss with one factor averaged over earlier mini-batches. memory: the share of this
    average that a step keeps. gamma: the discount factor. window_length: d,
    the steps of the window of a residual; it lies within one path. path_length: longest
    sub-episode of the replay, in steps. steps_per_iteration: environment steps between
    two gradient steps. batch_size: paths of a mini-batch. windows_per_path: windows
    drawn uniformly from each sampled path; 0 takes all. streaming: each gradient step
    learns from the steps just played, and nothing is kept; batch_size, windows_per_path
    (all windows), capacity, recency and learning_starts then have no effect. capacity:
    sub-episodes that are kept. recency: sub-episodes are drawn with probability ∝
    exp(−recency · age in insertions). learning_starts: sub-episodes before the first
    gradient step. learning_rate: Adam's. adam_epsilon: Adam's. max_grad_norm: gradients
    are clipped to this norm. target_decay: of the slow copies of policy and value, per
    gradient step. entropy_coef: the paper's λ at the start. entropy_decay: the factor
    of entropy_coef per 2500 iterations; unset keeps it. kl_coef: the paper's τ.
    max_divergence: a trust region: τ is at least kl_coef and so large that the last 20
    episodes, weighted by exp(return / τ), diverge from equal weights by this many nats;
    unset, τ is constant. divergence_per: episode, or step, which multiplies it by the
    mean length of the episodes, as in the released Trust-PCL. kl_coef_initial: τ of a
    trust region until enough episodes have ended. clip_adv: the residual is clipped to
    ± this in the policy's gradient; 0 never. diag_weight: of the kernel loss, unset is
    1/m (the paper mixes U and V in a share that it does not state). bandwidth_scale:
    times the mini-batch's median distance; with the critic memory, times the root mean
    squared distance. kernel_inputs: state, or state_action as in the paper.
    standardise: inputs by each run's running mean and deviation. exploration: bonus on
    the scaled reward, times the kernel's uncertainty (1 to 0) about the state that a
    step reaches. reward_scale: multiplies rewards in learning, not in reports. hidden:
    units of the hidden layers. evaluation_interval: environment steps between two
    evaluations. evaluation_episodes: episodes of the mean action in each.
    evaluation_seed: of their starts. evaluation_limit: steps after which an episode of
    an evaluation is cut, for environments without a time limit. checkpoint_interval:
    environment steps between two checkpoints. keep_checkpoints: how many are kept.
    """

    env: str = Field(min_length=1)
    env_options: dict[str, Any] = Field(default_factory=dict)
    num_envs: Annotated[int, Field(ge=1, le=10_000)] = 1
    steps: Count = 200_000
    critic: Critic = "kloss"
    gamma: Share = 0.995
    window_length: Size = 10
    path_length: Size = 10
    steps_per_iteration: Annotated[int, Field(ge=1, le=1_000_000)] = 10
    batch_size: Size = 64
    windows_per_path: Annotated[int, Field(ge=0, le=10**12)] = 1
    streaming: bool = False
    capacity: Annotated[int, Field(ge=1, le=10**9)] = 5000
    recency: Share = 0.001
    learning_starts: Count = 64
    learning_rate: Share = 3e-3
    adam_epsilon: Annotated[float, Field(ge=1e-16, le=1.0)] = 1e-8
    max_grad_norm: Scale = 40.0
    target_decay: Share = 0.99
    entropy_coef: Amount = 0.0
    entropy_decay: Share | None = None
    kl_coef: Amount = 1.0
    max_divergence: Scale | None = None
    divergence_per: Literal["episode", "step"] = "episode"
    kl_coef_initial: Amount = 500.0
    clip_adv: Amount = 1.0
    diag_weight: Share | None = None
    memory: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.97
    bandwidth_scale: Scale = 1.0
    kernel_inputs: Literal["state", "state_action"] = "state"
    standardise: bool = True
    exploration: Amount = 0.0
    reward_scale: Scale = 1.0
    hidden: Annotated[
        tuple[Annotated[int, Field(ge=1, le=MOST_UNITS)], ...],
        Field(min_length=1, max_length=MOST_LAYERS),
    ] = (64, 64)
    evaluation_interval: Count = 10_000
    evaluation_episodes: Annotated[int, Field(ge=1, le=10_000)] = 3
    evaluation_seed: Annotated[int, Field(ge=0)] = 10_000
    evaluation_limit: Count = 10_000
    checkpoint_interval: Count = 50_000
    keep_checkpoints: Count = 2

    def __init__(self, env: str | None = None, **settings: Any) -> None:
        if env is not None:
            settings["env"] = env
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise describe_error(OnlineConfig, error) from None
        if self.steps_per_iteration % self.num_envs:
            raise ConfigError(
                f"steps_per_iteration {self.steps_per_iteration} is no multiple of"
                f" num_envs {self.num_envs}; each environment takes the same number of"
                " steps"
            )
        if self.streaming:
            rows = "steps_per_iteration"
        else:
            rows = "batch_size"
        if self.critic == "kloss" and getattr(self, rows) < 2:
            raise ConfigError(
                f"{rows} is 1; the kernel loss compares pairs: give at least 2"
            )
        if self.critic == "memory" and not self.standardise:
            raise ConfigError(
                "critic is memory, standardise is false; its kernel needs standardised"
                " inputs"
            )
        least = max(self.learning_starts, self.batch_size)
        if self.capacity < least:
            raise ConfigError(
                f"capacity is {self.capacity}; give at least {least}, from which it"
                " learns"
            )
        self.check_fits(seeds=1)

    def check_fits(self, seeds: int) -> None:
        """Raise ConfigError if a stack of so many seeds takes more memory than there
        is.
        """
        needed = 2 * network_bytes(seeds, (1, *self.hidden, 1))
        if not self.streaming:
            # of a step: observation, action, reward and flags, as float32
            needed += 12.0 * seeds * self.capacity * (self.path_length + 1)
            windows = min(self.windows_per_path or self.path_length, self.path_length)
            needed += 4.0 * seeds * self.batch_size * windows * (1 + sum(self.hidden))
        check_fits(
            needed,
            f"seeds {seeds}, hidden {list(self.hidden)[:8]}, capacity {self.capacity},"
            f" path_length {self.path_length}, batch_size {self.batch_size}",
            "lower what is large among them",
        )

    def with_changes(self, **changes: object) -> OnlineConfig:
        """A copy with other values. Raises ConfigError for an unknown name."""
        return OnlineConfig(**{**vars(self), **changes})


@dataclass(frozen=True)
class OnlineRun:
    """One run of a stack: its settings and its seed."""

    config: OnlineConfig
    seed: int


def load_config(
    path: str | Path | Mapping[str, Any], assignments: Iterable[str] = ()
) -> OnlineConfig:
    """The config of a YAML file (or mapping, or the name of a bundled config),
    overridden by assignments such as ``gamma=0.98``.

    One option of the environment is ``env_options.NAME=VALUE``. Raises ConfigError in
    one line, with the nearest name for an unknown key.
    """
    overrides = parse_assignments(assignments)
    layers = read_layers(path, overrides, files=[], bundled_folder=ONLINE)
    return read_section(OnlineConfig, layers)


def check_equal(configs: Sequence[OnlineConfig]) -> OnlineConfig:
    """The common settings.

    Raises ConfigError if the runs of a stack differ in one that they must share.
    """
    first = configs[0]
    differ = [
        n
        for n in _EQUAL
        if any(getattr(config, n) != getattr(first, n) for config in configs)
    ]
    if differ:
        raise ConfigError(
            f"runs of one stack differ in {', '.join(differ)}; put them in separate"
            " stacks"
        )
    return first


# Settings that all runs of a stack share.
_EQUAL = (
    "env",
    "env_options",
    "num_envs",
    "path_length",
    "steps_per_iteration",
    "batch_size",
    "windows_per_path",
    "streaming",
    "capacity",
    "learning_starts",
    "hidden",
    "evaluation_episodes",
    "evaluation_seed",
    "evaluation_limit",
)
