"""Copies of an environment, played side by side: any Gymnasium environment, and our worlds as one array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import koffline.envs  # noqa: F401  (makes our worlds known to Gymnasium)
from koffline.data.transitions import ActionSpace, Discrete
from koffline.envs.boxes import GYMNASIUM_IDS, TIME_LIMITS, WORLDS, make_world, world_name
from koffline.envs.make import Copies, CopiesStep

BLOCK = 64  # numbers drawn from each stream at once
_LARGEST_SEED = 2**31 - 1  # environments that keep their seed as a C int take no more


def environment_seed(seed: int, episode: int) -> int:
    """What the environment of an episode is reset with: an episode depends on the seed and its number alone.

    So rows do not depend on how many copies are played side by side, nor on how many episodes are asked for.
    """
    sequence = np.random.SeedSequence(seed, spawn_key=(episode, 0))
    return int(sequence.generate_state(1)[0]) & _LARGEST_SEED


class WorldCopies(Copies):
    """Copies of one of our worlds, stepped together; rows are those of the Gymnasium environment."""

    usual_number = 256

    def __init__(self, name: str, time_limit: int | None) -> None:
        self._world, self._envs = make_world(name), []
        self.name, self.notes = GYMNASIUM_IDS[name], ()
        self.time_limit = time_limit or TIME_LIMITS[name]
        self.action_space: ActionSpace = Discrete(self._world.n_actions)
        self.action_dtype = np.dtype(np.int64)
        self.observation_shape = (len(self._world.low),)

    def reset(self, seeds: Sequence[int], copies: Sequence[int] | None = None) -> np.ndarray:
        """Start one copy per seed, all of them at once."""
        generators = [np.random.default_rng(seed) for seed in seeds]
        self._states = np.concatenate([self._world.reset(1, generator) for generator in generators])
        self._generators, self._steps = _RowGenerators(generators), 0
        return self._world.observe(self._states)

    def step(self, running: Sequence[int], actions: np.ndarray) -> CopiesStep:
        """One step of the copies that still run."""
        assert self.time_limit is not None
        self._generators.rows, self._generators.step = running, self._steps
        self._steps += 1
        state, reward, terminated = self._world.step(self._states[running], actions, self._generators)
        self._states[running] = state
        cut = ~terminated & (self._steps >= self.time_limit)
        return CopiesStep(self._world.observe(state), reward, terminated, cut)


class _RowGenerators(np.random.Generator):
    """A generator of which row i comes from the i-th of several: worlds step as one array, rows stay apart.

    It serves worlds that make one draw a step, always the same one: ``uniform`` with scalar bounds or
    ``standard_normal``, with one row per copy. Streams are read in blocks, which gives the same numbers.
    """

    def __init__(self, generators: Sequence[np.random.Generator]) -> None:
        super().__init__(np.random.PCG64(0))  # never drawn from
        self._generators = generators
        self.rows: Sequence[int] = ()
        self.step = 0

    def uniform(self, low: Any = 0.0, high: Any = 1.0, size: Any = None) -> Any:
        return self._draw("uniform", (low, high), size)

    def standard_normal(self, size: Any = None, dtype: Any = np.float64, out: Any = None) -> Any:
        return self._draw("standard_normal", (), size)

    def _draw(self, method: str, arguments: tuple[Any, ...], size: Any) -> np.ndarray:
        _, *shape = (size,) if isinstance(size, int) else size
        if self.step % BLOCK == 0:
            draws = [getattr(generator, method) for generator in self._generators]
            self._block = np.stack([draw(*arguments, (BLOCK, *shape)) for draw in draws])
        return self._block[self.rows, self.step % BLOCK]


def make_copies(identifier: str, time_limit: int | None = None) -> Copies:
    """Copies of an environment; ours, by id or name, are played as one array. Raises ConfigError."""
    if identifier in WORLDS or identifier in GYMNASIUM_IDS.values():
        return WorldCopies(world_name(identifier), time_limit)
    return Copies(identifier, **({} if time_limit is None else {"max_episode_steps": time_limit}))


def closed_copies(identifier: str) -> Copies:
    """Copies that are not to be played: what an environment's spaces, time limit and notes are."""
    copies = make_copies(identifier)
    copies.close()
    return copies
