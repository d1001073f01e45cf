"""Random numbers of single episodes: an episode depends on the seed and its own number alone.

So rows do not depend on how many copies are played side by side, nor on how many episodes are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_BLOCK = 64  # numbers drawn from each stream at once
_LARGEST_SEED = 2**31 - 1  # environments that keep their seed as a C int take no more


def environment_seed(seed: int, episode: int) -> int:
    """What the environment of an episode is reset with."""
    sequence = np.random.SeedSequence(seed, spawn_key=(episode, 0))
    return int(sequence.generate_state(1)[0]) & _LARGEST_SEED


def action_generator(seed: int, episode: int) -> np.random.Generator:
    """The stream of an episode's policy: one number chooses it from a mixture, then one per action."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(episode, 1)))


class UniformNumbers:
    """One number in [0, 1) of each stream and step; streams are read in blocks, steps in order."""

    def __init__(self, generators: Sequence[np.random.Generator]) -> None:
        self._generators = generators

    def at(self, step: int, rows: np.ndarray) -> np.ndarray:
        """The numbers (n,) of a step for some of the streams."""
        if step % _BLOCK == 0:
            self._block = np.stack([generator.random(_BLOCK) for generator in self._generators])
        return self._block[rows, step % _BLOCK]


class RowGenerators(np.random.Generator):
    """A generator of which row i comes from the i-th of several: worlds step as one array, rows stay apart.

    It serves worlds that make one draw a step, always the same one: ``uniform`` with scalar bounds or
    ``standard_normal``, with one row per copy. Streams are read in blocks, which gives the same numbers.
    """

    def __init__(self, generators: Sequence[np.random.Generator]) -> None:
        super().__init__(np.random.PCG64(0))  # never drawn from
        self._generators, self._step = generators, -1
        self._kind: tuple[Any, ...] | None = None
        self._drawn = False

    def next_step(self, rows: Sequence[int]) -> RowGenerators:
        """Ready for the next step of these copies."""
        self._rows, self._step, self._drawn = rows, self._step + 1, False
        return self

    def uniform(self, low: Any = 0.0, high: Any = 1.0, size: Any = None) -> Any:
        """As numpy's, rows apart."""
        return self._draw("uniform", (low, high), size)

    def standard_normal(self, size: Any = None, dtype: Any = np.float64, out: Any = None) -> Any:
        """As numpy's, rows apart."""
        return self._draw("standard_normal", (), size)

    def _draw(self, method: str, arguments: tuple[Any, ...], size: Any) -> np.ndarray:
        rows, *shape = (size,) if isinstance(size, int) else size
        kind = (method, arguments, tuple(shape))
        assert rows == len(self._rows)
        # a second or another draw would not be the stream's next number
        assert not self._drawn
        assert self._kind in (None, kind)
        self._drawn, self._kind = True, kind
        place = self._step % _BLOCK
        if place == 0:
            draws = [getattr(generator, method) for generator in self._generators]
            self._block = np.stack([draw(*arguments, (_BLOCK, *shape)) for draw in draws])
        block: np.ndarray = self._block[self._rows, place]
        return block
