"""Sub-episodes as replay: what a path-consistency learner stores and draws, for K runs side by side.

A sub-episode (path) of at most T steps keeps T + 1 observations, so that the true final one is never lost.
All arrays have a leading run axis; a run's paths and draws do not depend on the other runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Shaped

from koffline.errors import DataError

_FIRST_CAPACITY = 1024  # of a replay that grows


@dataclass(frozen=True, eq=False)
class Paths:
    """Paths with any leading axes (…): rows past a path's length are filler.

    observations (…, T + 1, d) float; actions (…, T, k) float or (…, T) int64, as drawn from the policy;
    rewards (…, T); lengths, environments, episodes (numbers of an environment's episodes), first_steps (of
    the path within its episode) (…,) int64; terminated, truncated (…,) of the last step: both False where
    the episode goes on.
    """

    observations: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    lengths: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    environments: np.ndarray
    episodes: np.ndarray
    first_steps: np.ndarray

    def flat_rows(self, index: np.ndarray, leading: int) -> Paths:
        """Rows of the ``leading`` first axes taken as one, in the shape of ``index``."""
        flat = {name: array.reshape(-1, *array.shape[leading:]) for name, array in self.columns().items()}
        return Paths(**{name: array.take(index, axis=0) for name, array in flat.items()})

    def columns(self) -> dict[str, np.ndarray]:
        """Arrays by name."""
        return dict(vars(self))


class PathReplay:
    """Replays of K runs: bounded (the oldest path is overwritten) or growing (``capacity`` None).

    action_dim: k of continuous actions, None for discrete ones.
    """

    def __init__(
        self,
        runs: int,
        capacity: int | None,
        path_length: int,
        observation_dim: int,
        action_dim: int | None,
        dtype: Any = np.float32,
    ) -> None:
        self.runs, self.capacity, self.path_length = runs, capacity, path_length
        self._inserted = np.zeros(runs, dtype=np.int64)
        size, steps = capacity or _FIRST_CAPACITY, path_length
        row_shape = () if action_dim is None else (action_dim,)
        shapes: dict[str, tuple[tuple[int, ...], Any]] = {
            "observations": ((steps + 1, observation_dim), dtype),
            "actions": ((steps, *row_shape), np.int64 if action_dim is None else dtype),
            "rewards": ((steps,), dtype),
            **dict.fromkeys(("terminated", "truncated"), ((), bool)),
            **dict.fromkeys(("lengths", "environments", "episodes", "first_steps"), ((), np.int64)),
        }
        empty = {name: np.zeros((runs, size, *row), kind) for name, (row, kind) in shapes.items()}
        self._paths = Paths(**empty)

    @property
    def inserted(self) -> Shaped[np.ndarray, " run"]:
        """How many paths each run has ever inserted."""
        return self._inserted.copy()

    @property
    def sizes(self) -> Shaped[np.ndarray, " run"]:
        """How many paths each run holds."""
        return np.minimum(self._inserted, self._room)

    def append(self, runs: Shaped[np.ndarray, " path"], paths: Paths) -> None:
        """Insert paths (S, …), each into the run named beside it, in their order within a run."""
        if not len(runs):
            return
        counts = np.bincount(runs, minlength=self.runs)
        self._grow_to(int((self._inserted + counts).max()))
        order = np.argsort(runs, kind="stable")
        rank = np.arange(len(runs)) - np.repeat(np.cumsum(counts) - counts, counts)
        slots = (self._inserted[runs[order]] + rank) % self._room
        # Of paths that overwrite each other within one call the last must stay: numpy keeps the last.
        for name, array in paths.columns().items():
            getattr(self._paths, name)[runs[order], slots] = array[order]
        self._inserted += counts

    def sample(
        self, generators: Sequence[np.random.Generator], batch_size: int, recency: Sequence[float]
    ) -> Paths:
        """(K, B, …) paths, a run's drawn by its own generator without replacement, p ∝ exp(−recency · age).

        Raises DataError where a run holds fewer than B.
        """
        if self.sizes.min() < batch_size:
            raise DataError(
                f"a run's replay holds {self.sizes.min()} paths; {batch_size} are drawn: collect more first"
            )
        ages = draw_ages(generators, self.sizes, batch_size, recency)
        slots = (self._inserted[:, None] - 1 - ages) % self._room
        return self._paths.flat_rows(np.arange(self.runs)[:, None] * self._room + slots, leading=2)

    def held(self, run: int) -> Paths:
        """All paths of a run, oldest first."""
        first = max(self._inserted[run] - self._room, 0)
        slots = np.arange(first, self._inserted[run]) % self._room
        return self._paths.flat_rows(run * self._room + slots, leading=2)

    def state_dict(self) -> dict[str, Any]:
        """What ``load_state_dict`` needs: filled slots only."""
        filled = int(self.sizes.max())
        columns = {name: array[:, :filled].copy() for name, array in self._paths.columns().items()}
        return {"inserted": self._inserted.copy(), "columns": columns}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` gave."""
        self._inserted[:] = state["inserted"]
        filled = state["columns"]["lengths"].shape[1]
        self._grow_to(filled)
        for name, array in state["columns"].items():
            getattr(self._paths, name)[:, :filled] = array

    @property
    def _room(self) -> int:
        return int(self._paths.lengths.shape[1])

    def _grow_to(self, needed: int) -> None:
        if self.capacity is not None or needed <= self._room:
            return
        size = self._room
        while size < needed:
            size *= 2
        grown = {}
        for name, array in self._paths.columns().items():
            grown[name] = np.zeros((self.runs, size, *array.shape[2:]), dtype=array.dtype)
            grown[name][:, : self._room] = array
        self._paths = Paths(**grown)


def draw_ages(
    generators: Sequence[np.random.Generator],
    sizes: Shaped[np.ndarray, " run"],
    count: int,
    recency: Sequence[float],
) -> Shaped[np.ndarray, "run draw"]:
    """(K, B) distinct ages in [0, size): successive draws with p ∝ exp(−recency · age), no replacement.

    Where the weight is spread over many ages, draws by inversion are repeated until B differ, which is
    the same law; elsewhere the B largest of log p + Gumbel noise.
    """
    ages = np.empty((len(sizes), count), dtype=np.int64)
    rates = np.asarray(recency, dtype=float)
    spread = np.where(rates > 0.0, -np.expm1(-rates * sizes) / np.maximum(rates, 1e-300), sizes)
    by_inversion = np.flatnonzero(spread >= 3.0 * count)
    if len(by_inversion):
        chosen = [generators[int(run)] for run in by_inversion]
        ages[by_inversion] = _invert(chosen, sizes[by_inversion], count, rates[by_inversion])
    for run in map(int, np.flatnonzero(spread < 3.0 * count)):
        keys = generators[run].gumbel(size=sizes[run]) - rates[run] * np.arange(sizes[run])
        ages[run] = np.argsort(-keys, kind="stable")[:count]
    return ages


def _invert(
    generators: Sequence[np.random.Generator], sizes: np.ndarray, count: int, rates: np.ndarray
) -> np.ndarray:
    uniform = np.stack([generator.random(2 * count) for generator in generators])
    while True:
        drawn = _inverse(uniform, sizes, rates)
        order = np.argsort(drawn, axis=1, kind="stable")
        ordered = np.take_along_axis(drawn, order, axis=1)
        new = np.ones_like(drawn, dtype=bool)
        np.put_along_axis(new, order[:, 1:], ordered[:, 1:] != ordered[:, :-1], axis=1)
        rank = np.cumsum(new, axis=1)
        if rank[:, -1].min() >= count:
            return drawn[new & (rank <= count)].reshape(len(sizes), count)
        # A run that needs more draws takes them from its own generator; the others must not.
        more = np.tile(uniform[:, :1], (1, count))  # repeats change nothing
        for row in map(int, np.flatnonzero(rank[:, -1] < count)):
            more[row] = generators[row].random(count)
        uniform = np.concatenate((uniform, more), axis=1)


def _inverse(uniform: np.ndarray, sizes: np.ndarray, rates: np.ndarray) -> np.ndarray:
    """Ages of uniforms by the inverse distribution function of the cut geometric law."""
    whole, rate = sizes[:, None], rates[:, None]
    cut = -np.expm1(-rate * whole)
    with np.errstate(divide="ignore", invalid="ignore"):
        geometric = np.log1p(-uniform * cut) / -rate
    ages = np.where(rate > 0.0, geometric, uniform * whole).astype(np.int64)
    return np.minimum(ages, whole - 1)
