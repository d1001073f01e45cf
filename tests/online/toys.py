"""Tiny environments for tests of online training: `tests.online.toys:Toy-v0` registers what it names."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Sequence

STEPS = 3


class Toy(gymnasium.Env[Any, Any]):
    """Three steps; observations are (seed, steps taken). Even seeds end by termination, odd ones are cut.

    The reward is the steps taken plus a tenth of the sum of the action. fault: what goes wrong, from the
    second step of the first episode with an odd seed on. shape: of observations. actions: box or discrete.
    """

    def __init__(self, fault: str = "", shape: tuple[int, ...] = (2,), actions: str = "box") -> None:
        self._fault, self._shape = fault, tuple(shape)
        self.observation_space: Any = Box(-np.inf, np.inf, self._shape, np.float64)
        self.action_space: Any = {
            "box": Box(np.array([-1.0, 0.0], np.float32), np.array([1.0, 2.0], np.float32)),
            "matrix": Box(-1.0, 1.0, (2, 2), np.float32),
            "discrete": Discrete(3, start=5),
            "multi": MultiDiscrete([2, 3]),
        }[actions]
        if fault == "sequence":
            self.observation_space = Sequence(Box(-1.0, 1.0))
        if fault == "dict":
            self.observation_space = Dict({"a": Box(-np.inf, np.inf, (1,), np.float64), "b": Discrete(4)})
        self._seed, self._taken = 0, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        assert seed is not None, "every episode has a seed of its own"
        self._seed, self._taken = seed, 0
        if self._fault == "reset" and seed % 2:
            raise RuntimeError("100% broken\nin reset")
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self._taken += 1
        assert self._taken <= STEPS, "nobody steps an episode that is over"
        is_over = self._taken == STEPS
        reward = self._taken + 0.1 * float(np.sum(action))
        if self._seed % 2 and self._taken == 2:
            if self._fault == "raise":
                raise RuntimeError("100% broken\nin step")
            if self._fault == "reward":
                reward = np.inf
        even = self._seed % 2 == 0
        return self._observation(), reward, is_over and even, is_over and not even, {}

    def _observation(self) -> Any:
        if self._fault == "dict":
            return {"a": np.array([float(self._seed)]), "b": self._taken}
        values = np.zeros(int(np.prod(self._shape)))
        values[:2] = self._seed, self._taken
        if self._seed % 2 and self._taken == 2:
            if self._fault == "nan":
                values[1] = np.nan
            if self._fault == "shape":
                return values[:1]
        return values.reshape(self._shape)


gymnasium.register("Toy-v0", entry_point=Toy, disable_env_checker=True, order_enforce=False)
NAME = "tests.online.toys:Toy-v0"
