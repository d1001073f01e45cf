"""Gymnasium spaces of a Minari dataset: reading them, flattening observations, and declaring our own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from koffline.data.columns import as_array
from koffline.data.spaces import ActionSpace, Continuous, Discrete
from koffline.data.transitions import Transitions
from koffline.errors import DataError


@dataclass(frozen=True, eq=False)
class StoredSpaces:
    """Gymnasium spaces of observations and actions, and what was assumed about them."""

    observation: Any
    action: Any
    notes: tuple[str, ...]


def stored_spaces(described_by: dict[str, Any], data: Path, source: str) -> StoredSpaces:
    """The spaces in Minari's metadata. Raises DataError where they are missing or cannot be used."""
    from minari.serialization import deserialize_space

    found = {}
    for name in ("observation_space", "action_space"):
        stored = described_by.get(name)
        if not isinstance(stored, str):
            raise DataError(
                f"{source} stores no {name} (it would need its environment); create it again with Minari "
                ">= 0.5, or convert it to hdf5 where the environment is installed"
            )
        try:
            found[name] = deserialize_space(json.loads(stored))
        except (NotImplementedError, KeyError, TypeError, ValueError, AssertionError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise DataError(f"{source} has an unreadable {name} ({reason}); create it again") from None
    return StoredSpaces(found["observation_space"], found["action_space"], _notes(found["observation_space"]))


def _notes(space: Any) -> tuple[str, ...]:
    from gymnasium import spaces

    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        parts = ", ".join(f"{name} {box.shape}" for name, box in _leaves(space, ""))
        return (f"observations were flattened and joined in this order: {parts}",)
    if isinstance(space, spaces.Discrete):
        return (
            f"observations are the {space.n} states of a discrete space, kept as one number; "
            "one-hot columns usually serve value functions better",
        )
    return ()


def _leaves(space: Any, name: str) -> list[tuple[str, Any]]:
    """The innermost spaces with their paths, in the order in which Gymnasium flattens them."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        parts = list(space.spaces.items())
    elif isinstance(space, spaces.Tuple):
        parts = [(str(i), part) for i, part in enumerate(space.spaces)]
    else:
        return [(name, space)]
    return [leaf for key, part in parts for leaf in _leaves(part, f"{name}/{key}" if name else key)]


def flat_observations(values: Any, space: Any, source: str) -> np.ndarray:
    """(T + 1, ...) of a Box as they are; Dict and Tuple of boxes flattened and joined as Gymnasium does.

    Raises DataError for anything else inside.
    """
    from gymnasium import spaces

    if not isinstance(space, (spaces.Dict, spaces.Tuple)):
        if not isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
            raise DataError(f"{source} has observations of {space}; store them as numbers in one array")
        array = as_array("observations", values)
        return array.reshape(-1, 1) if array.ndim == 1 else array
    parts = []
    for name, leaf in _leaves(space, ""):
        if not isinstance(leaf, (spaces.Box, spaces.MultiBinary)):
            raise DataError(
                f"{source}: observation part {name} is {leaf}, which cannot be joined with numbers; "
                "flatten the observations before recording (gymnasium.wrappers.FlattenObservation)"
            )
        part = values
        for key in name.split("/"):
            part = part[int(key)] if isinstance(part, (tuple, list)) else part[key]
        array = as_array(name, part)
        parts.append(array.reshape(len(array), -1))
    return np.concatenate(parts, axis=1)


def declared_space(space: Any) -> ActionSpace:
    """Our declaration of a Gymnasium action space. Raises DataError for kinds koffline has no policy for."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return Discrete(int(space.n))
    if isinstance(space, spaces.Box):
        low, high = (np.asarray(side, dtype=np.float64).reshape(-1) for side in (space.low, space.high))
        return Continuous(len(low), low, high)
    raise DataError(f"actions of {space} are not supported; record Discrete or Box actions")


def shift_actions(actions: np.ndarray, space: Any, source: str) -> np.ndarray:
    """Discrete actions counted from 0, box actions as (T, k)."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return actions.reshape(-1) - int(space.start) if int(space.start) else actions.reshape(-1)
    if isinstance(space, spaces.Box) and len(actions):
        return actions.reshape(len(actions), -1)
    return actions


def minari_observation_space(log: Transitions) -> Any:
    """An unbounded box for numbers, 0 … 255 for bytes."""
    from gymnasium import spaces

    if log.observations.dtype == np.uint8:
        return spaces.Box(0, 255, log.observation_shape, np.uint8)
    return spaces.Box(-np.inf, np.inf, log.observation_shape, log.observations.dtype.type)


def minari_action_space(log: Transitions) -> Any:
    """The declared space in Gymnasium's words."""
    from gymnasium import spaces

    space = log.action_space
    if isinstance(space, Discrete):
        return spaces.Discrete(space.n)
    dtype = log.actions.dtype.type
    low, high = np.asarray(space.low, dtype=dtype), np.asarray(space.high, dtype=dtype)
    return spaces.Box(low, high, (space.k,), dtype)
