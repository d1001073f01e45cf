"""Copies of an environment, played side by side: any Gymnasium environment, and our worlds at once.

Gymnasium's own vector environments reset a copy by themselves, one step after its end, and give rows that
belong to no episode; here a copy that ended just rests, and the last observation of an episode is at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import koffline.envs  # noqa: F401  (makes our worlds known to Gymnasium)
from koffline.data.transitions import ActionSpace, Discrete
from koffline.envs.boxes import GYMNASIUM_IDS, TIME_LIMITS, WORLDS, make_world, world_name
from koffline.envs.make import SpaceTranslator, make_env, playing

BLOCK = 64  # numbers drawn from each stream at once
_LARGEST_SEED = 2**31 - 1  # environments that keep their seed as a C int take no more


def environment_seed(seed: int, episode: int) -> int:
    """What the environment of an episode is reset with: an episode depends on the seed and its number alone.

    So rows do not depend on how many copies are played side by side, nor on how many episodes are asked for.
    """
    sequence = np.random.SeedSequence(seed, spawn_key=(episode, 0))
    return int(sequence.generate_state(1)[0]) & _LARGEST_SEED


class CopiesStep(NamedTuple):
    """One step of n copies: observations (n, …), rewards (n,), whether they ended, whether time ran out."""

    observations: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray


class Copies:
    """Copies of any Gymnasium environment, made when they are first needed; nothing is reset by itself.

    ``name`` is the full Gymnasium id, ``action_dtype`` the precision in which actions are received,
    ``time_limit`` the steps after which episodes are cut (None: the environment says when),
    ``usual_number`` how many copies are a good choice, ``notes`` what was changed about observations.
    """

    usual_number = 16

    def __init__(self, identifier: str, time_limit: int | None) -> None:
        self._identifier = identifier
        self._options = {} if time_limit is None else {"max_episode_steps": time_limit}
        first = make_env(identifier, **self._options)
        self._envs = [first]
        self.name = identifier if first.spec is None else first.spec.id
        self.time_limit = time_limit if first.spec is None else first.spec.max_episode_steps
        self._spaces = spaces = SpaceTranslator(self.name, first.observation_space, first.action_space)
        self.action_space, self.action_dtype = spaces.action_space, spaces.action_dtype
        self.observation_shape, self.notes = spaces.observation_shape, spaces.notes

    def reset(self, seeds: Sequence[int]) -> np.ndarray:
        """Start one copy per seed; observations (n, …)."""
        while len(self._envs) < len(seeds):  # the first copy was checked by Gymnasium, the others are like it
            self._envs.append(make_env(self._identifier, disable_env_checker=True, **self._options))
        with playing(self.name, "reset"):
            first = [env.reset(seed=seed)[0] for env, seed in zip(self._envs, seeds, strict=False)]
            return self._spaces.observations(first)

    def step(self, running: Sequence[int], actions: np.ndarray) -> CopiesStep:
        """One step of the copies that still run; actions (n,) or (n, k) of the action space."""
        native = self._spaces.native_actions(actions)
        with playing(self.name, "step"):
            steps = [self._envs[copy].step(action) for copy, action in zip(running, native, strict=True)]
            observations, rewards, ended, cut, _ = zip(*steps, strict=True)
            terminated = np.asarray(ended, dtype=bool)
            truncated = np.asarray(cut, dtype=bool) & ~terminated
            numbers = np.asarray(rewards, dtype=np.float64)
            return CopiesStep(self._spaces.observations(observations), numbers, terminated, truncated)

    def close(self) -> None:
        """Close every environment."""
        for env in self._envs:
            env.close()


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

    def reset(self, seeds: Sequence[int]) -> np.ndarray:
        """Start one copy per seed."""
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


def make_copies(identifier: str, time_limit: int | None) -> Copies:
    """Copies of an environment; ours, by id or name, are played as one array. Raises ConfigError."""
    if identifier in WORLDS or identifier in GYMNASIUM_IDS.values():
        return WorldCopies(world_name(identifier), time_limit)
    return Copies(identifier, time_limit)


def closed_copies(identifier: str) -> Copies:
    """Copies that are not to be played: what an environment's spaces, time limit and notes are."""
    copies = make_copies(identifier, None)
    copies.close()
    return copies
