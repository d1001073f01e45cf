"""One environment inside a Gymnasium vector environment: its resets seeded, its faults told in words."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np

from koffline.envs.make import make_env
from koffline.errors import KofflineError

FAULT = "koffline_fault"  # the key of a step's info that tells what went wrong


@dataclass(frozen=True)
class CopyMaker:
    """Makes one copy, in this process or in a worker's. process: the number of the process that asked."""

    name: str
    options: Mapping[str, Any]
    index: int
    process: int = field(default_factory=os.getpid)

    def __call__(self) -> SeededCopy:
        """The environment. Raises ConfigError."""
        if os.getpid() != self.process:  # Ctrl-C is the maker's to hear, which ends its workers in good order
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        return SeededCopy(make_env(self.name, **{"disable_env_checker": True, **self.options}), self.index)


class SeededCopy(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment that resets with the seed it was given last, also when its vector environment resets it.

    What it raises, and observations of another shape than its space's (which shared memory would broadcast),
    become a text in the info: a worker that has raised is of no further use, and its report may be lost.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], index: int) -> None:
        super().__init__(env)
        self._index = index
        self._next_seed: int | None = None
        self._is_over = (
            False  # the next step is only to reset, though the vector environment knows nothing of it
        )

    def prepare(self, seeds: Sequence[int]) -> None:
        """The seeds of every copy's next reset."""
        self._next_seed = int(seeds[self._index])

    def play_again(
        self, seeds: Sequence[int], actions: Sequence[Sequence[Any]], is_over: Sequence[bool]
    ) -> tuple[Any, str]:
        """Reset with this copy's seed and take its actions; the last observation and what went wrong.

        is_over: the next step is only to reset, with the seed given here.
        """
        seed = int(seeds[self._index])
        observation, info = self.reset(seed=seed)
        for action in actions[self._index]:
            observation, _, terminated, truncated, info = self.step(action)
            if FAULT in info or terminated or truncated:  # then it is not the same episode again
                break
        self._is_over, self._next_seed = bool(is_over[self._index]), seed
        return observation, str(info.get(FAULT, ""))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode with the seed given here or by ``prepare``."""
        self._is_over = False
        seed, self._next_seed = (self._next_seed if seed is None else seed), None
        try:
            observation, info = self.env.reset(seed=seed, options=options)
            self._check_shape(observation)
        except Exception as error:
            return self.observation_space.sample(), {FAULT: described("reset", error)}
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """One step, or the reset that is due."""
        if self._is_over:
            observation, info = self.reset()
            return observation, 0.0, False, False, info
        try:
            observation, reward, terminated, truncated, info = self.env.step(action)
            self._check_shape(observation)
            return observation, float(reward), bool(terminated), bool(truncated), info
        except Exception as error:
            fault = {FAULT: described("step", error)}
            return self.observation_space.sample(), 0.0, False, False, fault

    def _check_shape(self, observation: Any) -> None:
        space = self.observation_space
        if isinstance(space, gymnasium.spaces.Box) and np.shape(observation) != space.shape:
            raise ValueError(f"observation of shape {np.shape(observation)}, declared {space.shape}")


def described(method: str, error: Exception) -> str:
    """An exception of an environment in one line."""
    if isinstance(error, KofflineError):
        return str(error)
    return f"failed in {method} ({' '.join(f'{type(error).__name__}: {error}'.split())})"
