"""Copies of an environment, played side by side: any Gymnasium environment, and our worlds at once."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple, Protocol, runtime_checkable

import gymnasium
import numpy as np

import koffline.envs  # noqa: F401  (makes our worlds known to Gymnasium)
from koffline.data.transitions import ActionSpace, Continuous, Discrete
from koffline.envs.boxes import BoxWorld, make_world, world_name
from koffline.envs.registration import GYMNASIUM_IDS, TIME_LIMITS
from koffline.errors import ConfigError


class CopiesStep(NamedTuple):
    """One step of n copies: observations (n, …), rewards (n,), whether they ended, whether time ran out."""

    observations: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray


@runtime_checkable
class Copies(Protocol):
    """See the module's docstring. Nothing is reset by itself."""

    action_space: ActionSpace
    observation_shape: tuple[int, ...]

    def reset(self, seeds: Sequence[int]) -> np.ndarray:
        """Start one copy per seed; observations (n, …)."""
        ...

    def step(self, running: Sequence[int], actions: np.ndarray) -> CopiesStep:
        """One step of the copies that still run."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


def make_copies(identifier: str, time_limit: int | None) -> Copies:
    """Copies of an environment; ours are played as one array. Raises ConfigError."""
    if identifier in GYMNASIUM_IDS.values():
        name = world_name(identifier)
        return WorldCopies(make_world(name), time_limit or TIME_LIMITS[name])
    return GymnasiumCopies(identifier, time_limit)


class WorldCopies:
    """Copies of one of our worlds, stepped together."""

    def __init__(self, world: BoxWorld, time_limit: int) -> None:
        assert world.n_actions is not None
        self._world, self._limit = world, time_limit
        self.action_space: ActionSpace = Discrete(world.n_actions)
        self.observation_shape: tuple[int, ...] = (len(world.low),)

    def reset(self, seeds: Sequence[int]) -> np.ndarray:
        """Start one copy per seed."""
        self._generator = np.random.default_rng(list(seeds))
        self._states = self._world.reset(len(seeds), self._generator)
        self._steps = 0
        return self._world.observe(self._states)

    def step(self, running: Sequence[int], actions: np.ndarray) -> CopiesStep:
        """One step of the copies that still run."""
        self._steps += 1
        outcome = self._world.step(self._states[running], actions, self._generator)
        self._states[running] = outcome.state
        cut = ~outcome.terminated & (self._steps >= self._limit)
        return CopiesStep(self._world.observe(outcome.state), outcome.reward, outcome.terminated, cut)

    def close(self) -> None:
        """Nothing is held."""


class GymnasiumCopies:
    """Copies of any Gymnasium environment, made when they are first needed."""

    def __init__(self, identifier: str, time_limit: int | None) -> None:
        self._identifier = identifier
        self._options = {} if time_limit is None else {"max_episode_steps": time_limit}
        self._envs = [make_env(identifier, **self._options)]
        self.action_space, self.observation_shape = _spaces_of(identifier, self._envs[0])

    def reset(self, seeds: Sequence[int]) -> np.ndarray:
        """Start one copy per seed."""
        while len(self._envs) < len(seeds):
            self._envs.append(make_env(self._identifier, **self._options))
        pairs = zip(self._envs, seeds, strict=False)
        return np.stack([env.reset(seed=int(seed))[0] for env, seed in pairs])

    def step(self, running: Sequence[int], actions: np.ndarray) -> CopiesStep:
        """One step of the copies that still run."""
        steps = [
            self._envs[copy].step(self._native(action)) for copy, action in zip(running, actions, strict=True)
        ]
        observations, rewards, ended, cut, _ = zip(*steps, strict=True)
        terminated = np.asarray(ended, dtype=bool)
        truncated = np.asarray(cut, dtype=bool) & ~terminated
        return CopiesStep(np.stack(observations), np.asarray(rewards, np.float64), terminated, truncated)

    def close(self) -> None:
        """Close every environment."""
        for env in self._envs:
            env.close()

    def _native(self, action: Any) -> Any:
        space = self._envs[0].action_space
        if isinstance(space, gymnasium.spaces.Discrete):
            return int(action) + int(space.start)
        return np.asarray(action, dtype=space.dtype)


def make_env(identifier: str, **options: Any) -> gymnasium.Env[Any, Any]:
    """gymnasium.make with its errors in one line. Raises ConfigError."""
    try:
        return gymnasium.make(identifier, **options)
    except gymnasium.error.NameNotFound:
        near = get_close_matches(identifier, list(gymnasium.registry), 1)
        hint = f"did you mean {near[0]}?" if near else "check its name, or import the package that has it"
        raise ConfigError(f"there is no environment '{identifier}'; {hint}") from None
    except (gymnasium.error.Error, ImportError, AttributeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"the environment '{identifier}' cannot be made: {reason}") from None


def _spaces_of(name: str, env: gymnasium.Env[Any, Any]) -> tuple[ActionSpace, tuple[int, ...]]:
    """The action space as koffline has it, and the shape of an observation. Raises ConfigError."""
    seen, acts = env.observation_space, env.action_space
    if not isinstance(seen, gymnasium.spaces.Box):
        raise ConfigError(
            f"{name} has observations of {seen}; wrap it so that they are arrays (FlattenObservation)"
        )
    if isinstance(acts, gymnasium.spaces.Discrete):
        return Discrete(int(acts.n)), seen.shape
    if isinstance(acts, gymnasium.spaces.Box) and len(acts.shape) == 1:
        low, high = (tuple(float(x) for x in corner) for corner in (acts.low, acts.high))
        return Continuous(acts.shape[0], low, high), seen.shape
    raise ConfigError(f"{name} has actions of {acts}; koffline takes Discrete and flat Box actions")
