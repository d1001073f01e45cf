"""Any Gymnasium environment: its errors in one line, its spaces as ours (arrays, indices, flat vectors)."""

from __future__ import annotations

import contextlib
import logging
import math
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from koffline.data.transitions import ActionSpace, Continuous, Discrete
from koffline.envs.boxes import WORLDS
from koffline.errors import ConfigError, KofflineError
from koffline.untrusted.limits import check_environment_allowed

_log = logging.getLogger(__name__)
_EXACT_IN_FLOAT32 = 2**24  # whole numbers up to this size


def make_env(identifier: str, **options: Any) -> gymnasium.Env[Any, Any]:
    """gymnasium.make with its errors in one line. Raises ConfigError."""
    check_environment_allowed(identifier, options)
    _hush_mujoco(identifier)
    try:
        return gymnasium.make(identifier, **options)
    except gymnasium.error.NameNotFound:
        near = get_close_matches(identifier, [*gymnasium.registry, *WORLDS], 1)
        hint = f"did you mean {near[0]}?" if near else "check its name, or write package:name to import it"
        raise ConfigError(f"there is no environment '{identifier}'; {hint}") from None
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        missing = isinstance(error, ImportError | gymnasium.error.DependencyNotInstalled)
        if missing and re.search("mujoco|imageio", reason.lower()):
            raise ConfigError(
                f"the environment '{identifier}' needs MuJoCo, which is not installed; "
                "pip install mujoco imageio"
            ) from error
        raise ConfigError(
            f"the environment '{identifier}' cannot be made: {reason}; check its name and what it needs"
        ) from error


def _hush_mujoco(identifier: str) -> None:
    """MuJoCo's remarks on Gymnasium's models go to the log, not to stderr and to a file in this folder."""
    spec = gymnasium.registry.get(identifier)
    if spec is None or "mujoco" not in str(spec.entry_point):
        return
    with contextlib.suppress(ImportError):
        import mujoco

        if mujoco.get_mju_user_warning() is None:  # type: ignore[attr-defined, unused-ignore]
            mujoco.set_mju_user_warning(_log.debug)  # type: ignore[attr-defined, unused-ignore]


@contextlib.contextmanager
def playing(name: str, method: str) -> Iterator[None]:
    """Errors of an environment's method as a ConfigError; our own pass as they are."""
    try:
        yield
    except KofflineError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"{name} failed in {method} ({reason}); try it alone with gymnasium.make"
        ) from error


class SpaceTranslator:
    """Observations out of an environment, actions into it.

    Boxes keep their shape and their bytes or floats; other observations are flattened as Gymnasium does
    (discrete ones become one-hot), which ``notes`` says. Raises ConfigError for spaces without such a form.
    """

    def __init__(self, name: str, observation: spaces.Space[Any], action: spaces.Space[Any]) -> None:
        self._observation, self._action = observation, action
        self.notes: tuple[str, ...] = ()
        box = observation
        if not isinstance(box, spaces.Box):
            box = _flattened(name, observation)
            self.notes = (f"observations of {observation} were flattened; discrete parts are one-hot",)
        self.observation_shape: tuple[int, ...] = box.shape or (1,)
        self._dtype = _number_type(box)
        self.action_space = _action_space(name, action)
        self.action_dtype = np.dtype(np.int64 if isinstance(action, spaces.Discrete) else action.dtype)

    def observations(self, values: Sequence[Any]) -> np.ndarray:
        """(n, …), a copy; uint8, float32 or float64 as the space says. Raises TypeError for other numbers."""
        if not isinstance(self._observation, spaces.Box):
            values = [spaces.flatten(self._observation, value) for value in values]
        stacked = np.stack([np.asarray(value) for value in values])
        return stacked.reshape(-1, *self.observation_shape).astype(self._dtype, casting="same_kind")

    def native_actions(self, actions: np.ndarray) -> Sequence[Any]:
        """What the environment's step takes, one per row."""
        space = self._action
        if isinstance(space, spaces.Discrete):
            return [int(action) + int(space.start) for action in actions]
        assert isinstance(space, spaces.Box)
        return list(actions.astype(space.dtype).reshape(-1, *space.shape))


def _flattened(name: str, space: spaces.Space[Any]) -> spaces.Box:
    try:
        flat: spaces.Space[Any] = spaces.flatten_space(space)
    except (NotImplementedError, ValueError):
        flat = space
    if not isinstance(flat, spaces.Box) or not math.prod(flat.shape):
        raise ConfigError(f"{name} has observations of {space}; wrap it so that they are arrays of numbers")
    return flat


def _action_space(name: str, space: spaces.Space[Any]) -> ActionSpace:
    if isinstance(space, spaces.Discrete):
        return Discrete(int(space.n))
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        low, high = (tuple(float(x) for x in corner.reshape(-1)) for corner in (space.low, space.high))
        return Continuous(len(low), low, high)
    raise ConfigError(f"{name} has actions of {space}; koffline takes Discrete and Box actions")


def _number_type(box: spaces.Box) -> np.dtype[Any]:
    """The type of a log's observations that holds all numbers of a box exactly."""
    if box.dtype in (np.uint8, np.float32, np.float64):
        return np.dtype(box.dtype)
    if np.issubdtype(box.dtype, np.floating):
        return np.dtype(np.float32 if np.dtype(box.dtype).itemsize <= 2 else np.float64)
    small = np.abs([box.low.astype(float), box.high.astype(float)]).max() <= _EXACT_IN_FLOAT32
    return np.dtype(np.float32 if small else np.float64)
