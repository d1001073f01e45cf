"""What the runs of a stack share, and what each has of its own: settings, environments, random streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from koffline.errors import ConfigError
from koffline.online.config import OnlineConfig
from koffline.online.environments import Environments, LocalEnvironments

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


def make_environments(config: OnlineConfig, copies: int) -> Environments:
    """The environments a config asks for."""
    if config.vectorization == "local":
        return LocalEnvironments(config.environment, config.environment_options, copies)
    from koffline.online.vector_environments import make_vector_environments

    return make_vector_environments(
        config.environment, config.environment_options, copies, config.vectorization
    )


@dataclass(frozen=True)
class Streams:
    """A run's seeds and generators, all from its one seed."""

    policy_seed: int
    value_seed: int
    other_policy_seed: int
    other_value_seed: int
    replay: np.random.Generator
    play: np.random.Generator

    @classmethod
    def of(cls, seed: int) -> Streams:
        """All of a run's randomness from its seed."""
        networks, replay, play = np.random.SeedSequence(seed).spawn(3)
        first, second, third, fourth = (int(number) for number in networks.generate_state(4))
        generators = np.random.default_rng(replay), np.random.default_rng(play)
        return cls(first, second, third, fourth, *generators)
