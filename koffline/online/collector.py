"""Playing K runs in their environments: iterations of equal length, cut into sub-episodes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from koffline.data.paths import Paths
from koffline.online.environments import Environments, clip_actions
from koffline.online.networks import Shape
from koffline.online.trust_region import WINDOW, Finished

# (observations (K, E, d), noise (K, E, k) or (K, E)) -> actions as drawn
Act = Callable[[np.ndarray, np.ndarray], np.ndarray]
_FIRST_LENGTH = 64


@dataclass(frozen=True, eq=False)
class Collected:
    """One iteration: paths with the run of each, and every observation acted on (K, n, d), valid (K, n)."""

    runs: np.ndarray
    paths: Paths
    observations: np.ndarray
    valid: np.ndarray


class Collector:
    """K · E copies, run by run; seeds of episodes and noise come from each run's own generators."""

    def __init__(
        self,
        environments: Environments,
        shape: Shape,
        generators: Sequence[np.random.Generator],
        steps: int,
        path_length: int,
    ) -> None:
        n = environments.n
        self._environments, self._shape = environments, shape
        self._generators, self._steps, self._path_length = generators, steps, path_length
        self._each = n // len(generators)
        self._run_of = np.arange(n) // self._each
        self.recent: list[deque[Finished]] = [deque(maxlen=WINDOW) for _ in generators]
        self.since: list[list[Finished]] = [[] for _ in generators]  # since the last evaluation
        self.seconds = {"environment": 0.0, "acting": 0.0}
        self._seeds = self._draw_seeds()
        self._pending = self._draw_seeds()
        self._observations = environments.reset(self._seeds)
        self._totals = np.zeros(n)
        self._lengths = np.zeros(n, dtype=np.int64)
        self._episodes = np.zeros(n, dtype=np.int64)
        self._taken = self._empty_actions(_FIRST_LENGTH)  # of the running episodes, (n, ·): to resume from
        self._changed = np.zeros(len(generators), dtype=bool)

    def collect(self, act: Act) -> Collected:
        """``steps`` steps of every copy."""
        n, d = self._observations.shape
        track = _Track(n, self._steps, d, self._shape)
        noise = self._noise()
        for step in range(self._steps):
            started = time.perf_counter()
            drawn = act(self._observations.reshape(-1, self._each, d), noise[:, step])
            actions = drawn.reshape(n, *drawn.shape[2:])
            executed = clip_actions(actions, self._shape.action_space)
            between = time.perf_counter()
            outcome = self._environments.step(executed, self._pending)
            ended = time.perf_counter()
            self.seconds["acting"] += between - started
            self.seconds["environment"] += ended - between
            track.record(step, self._observations, actions, outcome, self._episodes, self._lengths)
            self._remember(executed, outcome.valid)
            self._totals += outcome.rewards * outcome.valid
            self._lengths += outcome.valid
            self._observations = outcome.observations
            done = (outcome.terminated | outcome.truncated) & outcome.valid
            if done.any():
                self._finish(np.flatnonzero(done))
        return track.cut(self._run_of, self._each, self._path_length)

    def take_changed(self) -> np.ndarray:
        """Which runs (K,) finished an episode since the last call."""
        changed, self._changed = self._changed, np.zeros_like(self._changed)
        return changed

    def state_dict(self) -> dict[str, Any]:
        """Running episodes as their seeds and actions; returns of finished ones."""
        longest = int(self._lengths.max())
        return {
            "seeds": np.array(self._seeds),
            "pending": np.array(self._pending),
            "taken": self._taken[:, :longest].copy(),
            "observations": self._observations.copy(),
            "awaiting": self._environments.awaiting,
            "totals": self._totals.copy(),
            "lengths": self._lengths.copy(),
            "episodes": self._episodes.copy(),
            "recent": [[(e.total, e.length) for e in run] for run in self.recent],
            "since": [[(e.total, e.length) for e in run] for run in self.since],
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Go on; running episodes are played again from their seeds. False where new ones had to begin."""
        self._pending = [int(seed) for seed in state["pending"]]
        self.recent = [deque((Finished(*e) for e in run), maxlen=WINDOW) for run in state["recent"]]
        self.since = [[Finished(*e) for e in run] for run in state["since"]]
        self._episodes[:] = state["episodes"]
        exact = self._replay(state)
        if not exact:
            self._episodes += 1
            self._seeds = [int(seed) for seed in state["seeds"]]
            self._observations = self._environments.reset(self._seeds)
            self._totals[:], self._lengths[:] = 0.0, 0
        return exact

    def _replay(self, state: dict[str, Any]) -> bool:
        """Whether the running episodes stand again where they stood."""
        self._seeds = [int(seed) for seed in state["seeds"]]
        lengths, taken, awaiting = state["lengths"], state["taken"], state["awaiting"]
        self._taken = self._empty_actions(max(_FIRST_LENGTH, taken.shape[1]))
        self._taken[:, : taken.shape[1]] = taken
        stories = [actions[:length] for actions, length in zip(taken, lengths, strict=True)]
        found = self._environments.restore(self._seeds, stories, awaiting)
        if found is None or not np.array_equal(found[~awaiting], state["observations"][~awaiting]):
            return False
        self._observations = state["observations"].copy()
        self._totals[:], self._lengths[:] = state["totals"], lengths
        return True

    def _noise(self) -> np.ndarray:
        """(K, steps, E, k) normal, or (K, steps, E) uniform."""
        if self._shape.continuous:
            size = (self._steps, self._each, self._shape.outputs)
            return np.stack([generator.standard_normal(size) for generator in self._generators])
        return np.stack([generator.random((self._steps, self._each)) for generator in self._generators])

    def _draw_seeds(self) -> list[int]:
        each = [generator.integers(2**31, size=self._each) for generator in self._generators]
        return [int(seed) for seed in np.concatenate(each)]

    def _finish(self, copies: np.ndarray) -> None:
        for copy in copies:
            run = int(self._run_of[copy])
            finished = Finished(float(self._totals[copy]), int(self._lengths[copy]))
            self.recent[run].append(finished)
            self.since[run].append(finished)
            self._seeds[copy] = self._pending[copy]
            self._pending[copy] = int(self._generators[run].integers(2**31))
            self._changed[run] = True
        self._totals[copies] = 0.0
        self._lengths[copies] = 0
        self._episodes[copies] += 1

    def _empty_actions(self, length: int) -> np.ndarray:
        n = self._environments.n
        if self._shape.continuous:
            return np.zeros((n, length, self._shape.outputs))
        return np.zeros((n, length), dtype=np.int64)

    def _remember(self, actions: np.ndarray, valid: np.ndarray) -> None:
        if self._lengths.max() >= self._taken.shape[1]:
            self._taken = np.concatenate((self._taken, np.zeros_like(self._taken)), axis=1)
        self._taken[np.arange(len(valid)), self._lengths] = actions


class _Track:
    """What one iteration of n copies gave, (n, steps, …), and its cut into paths."""

    def __init__(self, n: int, steps: int, d: int, shape: Shape) -> None:
        self.observations, self.final = np.empty((n, steps, d)), np.empty((n, steps, d))
        self.actions = np.empty((n, steps, shape.outputs)) if shape.continuous else np.empty((n, steps), int)
        self.rewards = np.empty((n, steps))
        self.terminated, self.truncated, self.valid = (np.zeros((n, steps), dtype=bool) for _ in range(3))
        self.episodes, self.at = np.empty((n, steps), dtype=np.int64), np.empty((n, steps), dtype=np.int64)

    def record(
        self,
        step: int,
        observations: np.ndarray,
        actions: np.ndarray,
        outcome: Any,
        episodes: np.ndarray,
        at: np.ndarray,
    ) -> None:
        """One step of every copy."""
        self.observations[:, step], self.final[:, step] = observations, outcome.final_observations
        self.actions[:, step], self.rewards[:, step] = actions, outcome.rewards
        self.terminated[:, step], self.truncated[:, step] = outcome.terminated, outcome.truncated
        self.valid[:, step], self.episodes[:, step], self.at[:, step] = outcome.valid, episodes, at

    def cut(self, run_of: np.ndarray, each: int, path_length: int) -> Collected:
        """Paths end with their episode, with the iteration, or at ``path_length``."""
        pieces = np.array(list(self._pieces(path_length)), dtype=np.int64).reshape(-1, 3)
        copies, starts, stops = pieces.T
        last = stops - 1
        index = np.minimum(starts[:, None] + np.arange(path_length), last[:, None])  # (S, T)
        observations = self.observations[copies[:, None], index]
        lengths = stops - starts
        final = self.final[copies, last]
        observations = np.concatenate((observations, final[:, None]), axis=1)
        filler = np.arange(path_length + 1) >= lengths[:, None]
        observations = np.where(filler[..., None], final[:, None], observations)
        paths = Paths(
            observations=observations,
            actions=self.actions[copies[:, None], index],
            rewards=np.where(filler[:, :-1], 0.0, self.rewards[copies[:, None], index]),
            lengths=lengths,
            terminated=self.terminated[copies, last],
            truncated=self.truncated[copies, last] & ~self.terminated[copies, last],
            environments=copies % each,
            episodes=self.episodes[copies, starts],
            first_steps=self.at[copies, starts],
        )
        runs = len(self.observations) // each
        d = self.observations.shape[2]
        return Collected(
            run_of[copies], paths, self.observations.reshape(runs, -1, d), self.valid.reshape(runs, -1)
        )

    def _pieces(self, path_length: int) -> Any:
        """(copy, start, stop), copy by copy in time."""
        n, steps = self.valid.shape
        breaks = self.terminated | self.truncated | ~self.valid
        plain: np.ndarray = np.zeros(n, dtype=bool)
        if steps <= path_length:
            plain = np.logical_not(breaks.any(axis=1))
        for copy in range(n):
            if plain[copy]:
                yield copy, 0, steps
                continue
            start = 0
            for step in range(steps):
                if not self.valid[copy, step]:
                    if step > start:
                        yield copy, start, step
                    start = step + 1
                elif breaks[copy, step] or step + 1 == steps or step + 1 - start == path_length:
                    yield copy, start, step + 1
                    start = step + 1
