"""Acting and data collection for K runs, in iterations of equal length, cut into
paths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from koffline.envs.make import Copies
from koffline.online.config import WINDOW, OnlineConfig
from koffline.online.networks import AgentStack, Shape
from koffline.online.paths import Generators, Paths
from koffline.online.trust_region import Episodes

# (observations (K, E, d), noise (K, E, k) or (K, E)) -> actions as drawn
Act = Callable[[np.ndarray, np.ndarray], np.ndarray]
_FIRST_LENGTH = 64


@dataclass(frozen=True, eq=False)
class Collected:
    """One iteration: paths, the run of each (in order of runs), and all observations
    acted on (K, n, d).

    changed (K,): the runs in which an episode ended.
    """

    runs: np.ndarray
    paths: Paths
    observations: np.ndarray
    changed: np.ndarray

    def by_run(self, count: int) -> Paths:
        """Paths (K, B, …), B the largest number of a run; other runs are padded with
        paths of no steps.
        """
        counts = np.bincount(self.runs, minlength=count)
        place = np.arange(counts.max())
        ends = np.cumsum(counts)[:, None]
        rows = np.minimum(ends - counts[:, None] + place, ends - 1)
        padded = self.paths.flat_rows(rows, leading=1)
        lengths = np.where(place < counts[:, None], padded.lengths, 0)
        return replace(padded, lengths=lengths)


class Actor:
    """The policies in numpy, on the stack's own memory: a step of all runs takes some
    microseconds.
    """

    def __init__(self, stack: AgentStack) -> None:
        self._continuous = stack.shape.continuous
        self._layers = [
            (w.numpy(), b.numpy()) for w, b in stack.policy.layers(stack.policy.flat)
        ]
        self._log_std = stack.log_std.numpy()

    def outputs(self, inputs: np.ndarray) -> np.ndarray:
        """Means (K, E, k) or logits (K, E, n) from standardised observations (K, E,
        d).
        """
        hidden = inputs
        *below, (top, top_bias) = self._layers
        for weight, bias in below:
            hidden = np.matmul(hidden, weight)
            hidden += bias
            np.tanh(hidden, out=hidden)
        return np.matmul(hidden, top) + top_bias

    def sample(self, inputs: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Actions (K, E, k) from normal noise of this shape, or (K, E) from uniform
        noise of this shape.
        """
        outputs = self.outputs(inputs)
        if self._continuous:
            return outputs + np.exp(self._log_std)[:, None] * noise
        weights = np.exp(outputs - outputs.max(axis=-1, keepdims=True))
        cumulative = np.cumsum(weights, axis=-1)
        return (cumulative[..., :-1] <= noise[..., None] * cumulative[..., -1:]).sum(
            axis=-1
        )

    def best(self, inputs: np.ndarray) -> np.ndarray:
        """Mean actions (K, E, k), or the most probable ones (K, E)."""
        outputs = self.outputs(inputs)
        if self._continuous:
            return outputs
        return outputs.argmax(axis=-1)


class Collector:
    """K · E copies of an environment, E per run; each run's own generator draws its
    seeds and noise.

    When an episode ends, the next one begins within the same step, with a seed of its
    own. recent: each run's last episodes; since: returns of the episodes that ended
    since the last evaluation.
    """

    kept = (
        "recent",
        "since",
        "_seeds",
        "_pending",
        "_observations",
        "_totals",
        "_lengths",
        "_episodes",
        "_taken",
    )

    def __init__(
        self, copies: Copies, shape: Shape, generators: Generators, config: OnlineConfig
    ) -> None:
        self._copies = copies
        self._shape = shape
        self._generators = generators
        self._each = config.num_envs
        self._path_length = config.path_length
        self._steps = config.steps_per_iteration // self._each
        n = self._n = self._each * len(generators)
        self.recent: list[Episodes] = [[] for _ in generators]
        self.since: list[list[float]] = [[] for _ in generators]
        self._seeds = self._draw_seeds()
        self._pending = self._draw_seeds()
        self._observations = vectors(copies.reset(self._seeds))
        self._totals = np.zeros(n)
        self._lengths = np.zeros(n, int)
        self._episodes = np.zeros(n, int)
        # Of the running episodes, (n, ·): to resume from.
        if shape.continuous:
            self._taken = np.zeros((n, _FIRST_LENGTH, shape.outputs))
        else:
            self._taken = np.zeros((n, _FIRST_LENGTH), dtype=np.int64)

    def collect(self, act: Act) -> Collected:
        """Play ``steps_per_iteration`` / E steps in every copy."""
        n, d = self._observations.shape
        noise = self._noise()
        rows = []
        for step in range(self._steps):
            drawn = act(self._observations.reshape(-1, self._each, d), noise[:, step])
            actions = drawn.reshape(n, *drawn.shape[2:])
            before = (
                self._observations,
                actions,
                self._episodes.copy(),
                self._lengths.copy(),
            )
            rows.append((*before, *self._play(self._shape.action_space.clip(actions))))
        return self._cut(
            [np.stack(column, axis=1) for column in zip(*rows, strict=True)]
        )

    def resume(self) -> bool:
        """Replay the running episodes of a restored state from their seeds; return
        whether they agree.

        If they do not agree, new episodes begin.
        """
        replayed = vectors(self._copies.reset(self._seeds))
        for step in range(int(self._lengths.max())):
            active = np.flatnonzero(self._lengths > step)
            here = self._copies.step(active.tolist(), self._taken[active, step])
            replayed[active] = vectors(here.observations)
            if (here.terminated | here.truncated).any():  # earlier than before
                replayed.fill(np.nan)
                break
        if np.array_equal(replayed, self._observations):
            return True
        self._episodes += 1
        self._observations = vectors(self._copies.reset(self._seeds))
        self._totals[:] = 0.0
        self._lengths[:] = 0
        return False

    def _noise(self) -> np.ndarray:
        """Normal noise (K, steps, E, k), or uniform noise (K, steps, E) for discrete
        actions.
        """
        size = (self._steps, self._each)
        if self._shape.continuous:
            return np.stack(
                [
                    g.standard_normal((*size, self._shape.outputs))
                    for g in self._generators
                ]
            )
        return np.stack([generator.random(size) for generator in self._generators])

    def _draw_seeds(self) -> list[int]:
        return np.concatenate(
            [g.integers(2**31, size=self._each) for g in self._generators]
        ).tolist()

    def _play(
        self, actions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Step all copies: true s′ (n, d), rewards, ends.

        Copies whose episode ended start the next one.
        """
        if self._lengths.max() >= self._taken.shape[1]:
            self._taken = np.concatenate(
                (self._taken, np.zeros_like(self._taken)), axis=1
            )
        self._taken[np.arange(self._n), self._lengths] = actions
        observations, rewards, terminated, truncated = self._copies.step(
            range(self._n), actions
        )
        final = self._observations = vectors(observations)
        self._totals += rewards
        self._lengths += 1
        ended = np.flatnonzero(terminated | truncated).tolist()
        for copy in ended:
            run = copy // self._each
            total = float(self._totals[copy])
            length = int(self._lengths[copy])
            self.recent[run] = [*self.recent[run], (total, length)][-WINDOW:]
            self.since[run].append(total)
            self._seeds[copy] = self._pending[copy]
            self._pending[copy] = int(self._generators[run].integers(2**31))
        if ended:
            self._observations = final.copy()
            seeds = [self._seeds[copy] for copy in ended]
            self._observations[ended] = vectors(self._copies.reset(seeds, ended))
            self._totals[ended] = 0.0
            self._lengths[ended] = 0
            self._episodes[ended] += 1
        return final, rewards, terminated, truncated

    def _cut(self, columns: list[np.ndarray]) -> Collected:
        """Cut columns (n, steps, …) into paths, at ends of episodes and iterations or
        at ``path_length``.
        """
        (
            observations,
            actions,
            episodes,
            steps,
            final,
            rewards,
            terminated,
            truncated,
        ) = columns
        n, length, d = observations.shape
        pieces = []  # (copy, start, stop), copy by copy in time
        for copy, is_break in enumerate(terminated | truncated):
            start = 0
            for end in (*(np.flatnonzero(is_break) + 1).tolist(), length):
                while start < end:
                    stop = min(start + self._path_length, end)
                    pieces.append((copy, start, stop))
                    start = stop
        copies, starts, stops = np.array(pieces).T
        last = stops - 1
        lengths = stops - starts
        # (S, T)
        index = np.minimum(
            starts[:, None] + np.arange(self._path_length), last[:, None]
        )
        filler = np.arange(self._path_length + 1) >= lengths[:, None]
        ends = final[copies, last][:, None]
        states = np.concatenate((observations[copies[:, None], index], ends), axis=1)
        paths = Paths(
            observations=np.where(filler[..., None], ends, states),
            actions=actions[copies[:, None], index],
            rewards=np.where(filler[:, :-1], 0.0, rewards[copies[:, None], index]),
            lengths=lengths,
            terminated=terminated[copies, last],
            truncated=truncated[copies, last],
            environments=copies % self._each,
            episodes=episodes[copies, starts],
            first_steps=steps[copies, starts],
        )
        seen = observations.reshape(n // self._each, -1, d)
        changed = (terminated | truncated).reshape(len(seen), -1).any(axis=1)
        return Collected(copies // self._each, paths, seen, changed)


def vectors(observations: np.ndarray) -> np.ndarray:
    """Observations of any shape as (n, d) in double precision."""
    return observations.reshape(len(observations), -1).astype(np.float64)
