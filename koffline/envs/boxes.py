"""Worlds whose state is a point of a box, as the paper's policy-evaluation problems are, and their names."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Shaped

from koffline.envs.mountain_car import NoisyMountainCar
from koffline.envs.pole import NoisyPole
from koffline.envs.puddle_world import PuddleWorld
from koffline.envs.registration import GYMNASIUM_IDS
from koffline.envs.world import Flags, States, World
from koffline.errors import ConfigError


@runtime_checkable
class BoxWorld(World, Protocol):
    """A world whose states (n, d) fill a box; observations are the states themselves, in native units."""

    @property
    def low(self) -> tuple[float, ...]:
        """Lower corner of the box, (d,)."""

    @property
    def high(self) -> tuple[float, ...]:
        """Upper corner of the box, (d,)."""

    @property
    def grid(self) -> tuple[int, int]:
        """Cells per axis of the grid on which the paper computes true values."""

    @property
    def reward_scale(self) -> float:
        """Rewards are divided by it for training, so that values are of order one."""

    def is_terminal(self, state: States) -> Flags:
        """Whether episodes end in these states."""


WORLDS: dict[str, type[BoxWorld]] = {
    "puddle_world": PuddleWorld,
    "cart_pole": NoisyPole,
    "mountain_car": NoisyMountainCar,
}


def make_world(name: str) -> BoxWorld:
    """The world of a name or a Gymnasium id, with its default noise. Raises ConfigError."""
    return WORLDS[world_name(name)]()


def world_name(name: str) -> str:
    """The name of a world from itself or its Gymnasium id. Raises ConfigError."""
    key = {identifier: key for key, identifier in GYMNASIUM_IDS.items()}.get(name, name)
    if key not in WORLDS:
        known = [*WORLDS, *GYMNASIUM_IDS.values()]
        near = get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
        raise ConfigError(f"there is no world '{name}'; {hint}")
    return key


def uniform_states(world: BoxWorld, n: int, generator: np.random.Generator) -> Float[np.ndarray, "copy d"]:
    """n states uniform over the part of the box where episodes go on."""
    if n < 1:
        raise ConfigError(f"n is {n}; give a positive number of states")
    parts: list[np.ndarray] = []
    missing = n
    while missing:
        drawn = generator.uniform(world.low, world.high, size=(max(2 * missing, 16), len(world.low)))
        kept = drawn[~world.is_terminal(drawn)][:missing]
        parts.append(kept)
        missing -= len(kept)
    return np.concatenate(parts)


def to_unit_square(world: BoxWorld, states: Shaped[np.ndarray, "row d"]) -> Float[np.ndarray, "row d"]:
    """States in native units as points of [0, 1]^d."""
    low, high = np.asarray(world.low), np.asarray(world.high)
    return (np.asarray(states, dtype=np.float64) - low) / (high - low)
