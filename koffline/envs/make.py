"""Any Gymnasium environment: its errors in one line, its spaces as ours (arrays,
indices, flat vectors).

Gymnasium's own vector environments reset a copy automatically one step after its end,
which gives rows that belong to no episode. In `Copies` an ended copy stops, and its
last observation is available.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import gymnasium
import numpy as np
from gymnasium import spaces

from koffline.data.transitions import ActionSpace, Continuous, Discrete
from koffline.envs.boxes import WORLDS
from koffline.errors import ConfigError
from koffline.untrusted.user_code import current_folder, user_code, user_modules

# of any observations and actions
Env: TypeAlias = gymnasium.Env[Any, Any]
Space: TypeAlias = spaces.Space[Any]
_log = logging.getLogger(__name__)
_EXACT_IN_FLOAT32 = 2**24  # largest whole number that float32 holds exactly
_playing = partial(
    user_code, remedy="try it alone with gymnasium.make", kind=ConfigError
)


def make_env(identifier: str, **options: Any) -> Env:
    """gymnasium.make, with errors in one line. Raises ConfigError."""
    spec = gymnasium.registry.get(identifier)
    if spec is not None and "mujoco" in str(spec.entry_point):
        with contextlib.suppress(ImportError):
            import mujoco

            # Its warnings go to the log instead of stderr and
            # a file in the current folder.
            if mujoco.get_mju_user_warning() is None:  # type: ignore[attr-defined, unused-ignore]
                mujoco.set_mju_user_warning(_log.debug)  # type: ignore[attr-defined, unused-ignore]
    here = current_folder()  # ours: user code may have moved to another one
    name = f"the environment '{identifier}'"
    remedy = "check its name and what it needs"
    with (
        user_code(name, "it cannot be made", remedy, ConfigError),
        warnings.catch_warnings(),
    ):
        # "CartPole" is the newest of its versions, as was meant
        warnings.filterwarnings("ignore", ".*Using the latest versioned environment")
        try:
            with _modules_of(identifier, here):
                return gymnasium.make(identifier, **options)
        except gymnasium.error.NameNotFound:
            known = {name.lower(): name for name in (*WORLDS, *gymnasium.registry)}
            near = [
                known[name]
                for name in get_close_matches(f"{identifier.lower()}-v", known, 1)
            ]
            if near:
                hint = f"did you mean {near[0]}?"
            else:
                hint = "check it, or write package:name to import it"
            raise ConfigError(f"there is none of this name; {hint}") from None


@contextlib.contextmanager
def _modules_of(identifier: str, folder: str | None) -> Iterator[None]:
    """Context in which modules of a folder are found: that of ``module:name``, and that
    of its class.
    """
    module, colon, name = identifier.partition(":")
    if not colon:
        yield
        return
    importlib.invalidate_caches()  # the module may have been written a moment ago
    with user_modules.named(module, folder=folder):
        importlib.import_module(module)  # registers the environment
        modules = []
        spec = gymnasium.registry.get(name)
        if spec is not None and isinstance(spec.entry_point, str):
            modules.append(spec.entry_point)
        with user_modules.named(*tuple(modules), folder=folder):
            yield


class CopiesStep(NamedTuple):
    """One step of n copies: observations (n, …), rewards (n,), terminated flags,
    truncated flags.
    """

    observations: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray


class Copies:
    """Copies of any Gymnasium environment, made when first needed; nothing is reset
    automatically.

    Observations of boxes keep their shape and type (uint8 or float); others are
    flattened as in Gymnasium (discrete ones become one-hot). ``name``: the full
    Gymnasium id; ``action_dtype``: precision of received actions; ``time_limit``: steps
    after which episodes are truncated (None: decided by the environment);
    ``notes``: changes of observations. Raises ConfigError if the environment is
    unknown, fails, returns numbers that are not finite, or has unsupported spaces.
    """

    usual_number = 16  # default number of copies

    def __init__(self, identifier: str, **options: Any) -> None:
        self._identifier = identifier
        self._options = {"disable_env_checker": True, **options}
        first = make_env(identifier, **self._options)
        self._envs = [first]
        self.name = identifier
        self.time_limit: int | None = None
        if first.spec is not None:
            self.name = first.spec.id
            self.time_limit = first.spec.max_episode_steps
        observation = first.observation_space
        action = first.action_space
        self._spaces = (observation, action)
        self.notes: tuple[str, ...] = ()
        box = observation
        if not isinstance(box, spaces.Box):
            box = _flattened(self.name, observation)
            self.notes = (
                (
                    f"observations of {observation} were flattened; discrete parts are"
                    " one-hot"
                ),
            )
        self.observation_shape = box.shape or (1,)
        self._dtype = _number_type(box)
        self.action_space = _action_space(self.name, action)
        self.action_dtype = np.dtype(action.dtype)
        if isinstance(action, spaces.Discrete):
            self.action_dtype = np.dtype(np.int64)

    def reset(
        self, seeds: Sequence[int], copies: Sequence[int] | None = None
    ) -> np.ndarray:
        """Start an episode in the given copies (default: the first), one per seed;
        observations (n, …).
        """
        places: Sequence[int] = range(len(seeds))
        if copies is not None:
            places = copies
        while len(self._envs) <= max(places):
            self._envs.append(make_env(self._identifier, **self._options))
        with _playing(self.name, "failed in reset"):
            pairs = zip(places, seeds, strict=True)
            first = self._translated(
                [self._envs[copy].reset(seed=seed)[0] for copy, seed in pairs]
            )
        return self._finite("an observation", first)

    def step(self, running: Sequence[int], actions: np.ndarray) -> CopiesStep:
        """One step of the running copies; actions (n,) or (n, k) of the action
        space.
        """
        native = self._native(actions)
        with _playing(self.name, "failed in step"):
            steps = [
                self._envs[copy].step(action)
                for copy, action in zip(running, native, strict=True)
            ]
            observations, rewards, ended, cut, _ = zip(*steps, strict=True)
            terminated = np.asarray(ended, dtype=bool)
            truncated = np.asarray(cut, dtype=bool) & ~terminated
            numbers = np.asarray(rewards, dtype=np.float64)
            following = self._translated(observations)
        self._finite("an observation", following)
        return CopiesStep(
            following, self._finite("a reward", numbers), terminated, truncated
        )

    def close(self) -> None:
        """Close every environment.

        One that fails costs a warning, because the work is done.
        """
        for env in self._envs:
            try:
                with _playing(self.name, "failed in close"):
                    env.close()
            except ConfigError as error:
                _log.warning("%s", error)

    def _translated(self, values: Sequence[object]) -> np.ndarray:
        """Copy observations to (n, …) as uint8, float32 or float64.

        Raises TypeError for other types.
        """
        if not isinstance(self._spaces[0], spaces.Box):
            values = [spaces.flatten(self._spaces[0], value) for value in values]
        stacked = np.stack([np.asarray(value) for value in values])
        return stacked.reshape(len(values), *self.observation_shape).astype(
            self._dtype, casting="same_kind"
        )

    def _native(self, actions: np.ndarray) -> list[int] | list[np.ndarray]:
        """Actions in the form of the environment's `step`, one per row."""
        space = self._spaces[1]
        if isinstance(space, spaces.Discrete):
            return [int(action) + int(space.start) for action in actions]
        assert isinstance(space, spaces.Box)
        return list(actions.astype(space.dtype).reshape(-1, *space.shape))

    def _finite(self, noun: str, numbers: np.ndarray) -> np.ndarray:
        """The numbers, if all are finite; ConfigError calls them ``noun``."""
        # One sum tells whether any is not finite, ten
        # times faster than looking at each.
        if not np.isfinite(numbers.sum()) and not np.isfinite(numbers).all():
            raise ConfigError(
                f"{self.name} gave {noun} that is not a finite number; mend the"
                " environment, or end the episode before it breaks"
            )
        return numbers


def _flattened(name: str, space: Space) -> spaces.Box:
    flat: Space | None = None
    with contextlib.suppress(NotImplementedError, ValueError):
        flat = spaces.flatten_space(space)
    if not isinstance(flat, spaces.Box) or not math.prod(flat.shape):
        raise ConfigError(
            f"{name} has observations of {space}; wrap it so that they are arrays of"
            " numbers"
        )
    return flat


def _action_space(name: str, space: Space) -> ActionSpace:
    if isinstance(space, spaces.Discrete):
        return Discrete(int(space.n))
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        low = tuple(float(x) for x in space.low.reshape(-1))
        high = tuple(float(x) for x in space.high.reshape(-1))
        return Continuous(len(low), low, high)
    raise ConfigError(
        f"{name} has actions of {space}; koffline takes Discrete and Box actions"
    )


def _number_type(box: spaces.Box) -> np.dtype:
    """The type of a log's observations that represents all numbers of a box exactly."""
    if box.dtype in (np.uint8, np.float32, np.float64):
        return np.dtype(box.dtype)
    if np.issubdtype(box.dtype, np.floating):
        is_exact = np.dtype(box.dtype).itemsize <= 2
    else:
        corners = np.abs([box.low.astype(float), box.high.astype(float)])
        is_exact = corners.max() <= _EXACT_IN_FLOAT32
    if is_exact:
        return np.dtype(np.float32)
    return np.dtype(np.float64)
