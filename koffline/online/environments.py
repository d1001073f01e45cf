"""Copies of an environment side by side, in this process or each in its own, and full episodes in them.

An episode that ends is followed by the next one, with a seed of its own, within the same step.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import signal
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from koffline.data.transitions import ActionSpace, Continuous
from koffline.envs.make import SpaceTranslator, make_env, playing
from koffline.errors import ConfigError

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Outcome:
    """One step of n copies; zeros for those that did not take part.

    observations: (n, d) to act on next, those of a fresh episode where one ended. final_observations: (n, d)
    the true s'. rewards (n,), terminated, truncated (n,) bool.
    """

    observations: np.ndarray
    final_observations: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray


class LocalEnvironments:
    """Copies in this process.

    Raises ConfigError for an environment that is unknown, fails, or has spaces the learner cannot take.
    """

    def __init__(self, name: str, options: Mapping[str, Any], n: int) -> None:
        self.n, self._name = n, name
        self._copies = [make_env(name, **{"disable_env_checker": True, **options}) for _ in range(n)]
        first = self._copies[0]
        self._spaces = SpaceTranslator(name, first.observation_space, first.action_space)
        self.action_space: ActionSpace = self._spaces.action_space
        self.observation_dim = int(np.prod(self._spaces.observation_shape))

    def reset(self, seeds: Sequence[int]) -> np.ndarray:
        """Start an episode in every copy; observations (n, d)."""
        return np.stack([self._begin(index, seed) for index, seed in enumerate(seeds)]).astype(float)

    def step(
        self, actions: np.ndarray, next_seeds: Sequence[int] | None, active: Sequence[int] | None = None
    ) -> Outcome:
        """Actions (n, k) or (n,) inside the space, of all copies or the active ones.

        A copy whose episode ends resets with its seed; without seeds it stays there.
        """
        final = np.zeros((self.n, self.observation_dim))
        rewards, terminated, truncated = np.zeros(self.n), np.zeros(self.n, bool), np.zeros(self.n, bool)
        native = self._spaces.native_actions(actions)
        with playing(self._name, "step"):
            for index in range(self.n) if active is None else active:
                observation, rewards[index], terminated[index], truncated[index], _ = self._copies[
                    index
                ].step(native[index])
                final[index] = self._vector(observation)
        self._check(final, rewards)
        observations = final
        ended = np.flatnonzero(terminated | truncated)
        if next_seeds is not None and len(ended):
            observations = final.copy()
            for index in ended.tolist():
                observations[index] = self._begin(index, next_seeds[index])
        return Outcome(observations, final, rewards, terminated, truncated)

    def close(self) -> None:
        """Close every copy."""
        for environment in self._copies:
            environment.close()

    def _begin(self, index: int, seed: int) -> np.ndarray:
        with playing(self._name, "reset"):
            vector = self._vector(self._copies[index].reset(seed=int(seed))[0])
        self._check(vector, np.zeros(1))
        return vector

    def _vector(self, observation: Any) -> np.ndarray:
        if isinstance(observation, np.ndarray) and observation.shape == (self.observation_dim,):
            return observation  # the usual case, ten times faster
        vector = self._spaces.observations([observation]).reshape(-1)
        if vector.shape != (self.observation_dim,):
            raise ValueError(f"shape {np.shape(observation)}, declared {self._spaces.observation_shape}")
        return vector

    def _check(self, observations: np.ndarray, rewards: np.ndarray) -> None:
        # One sum tells whether any is not finite, ten times faster than looking at each.
        if np.isfinite(observations.sum() + rewards.sum()):
            return
        for what, values in (("an observation", observations), ("a reward", rewards)):
            if not np.all(np.isfinite(values)):
                raise ConfigError(
                    f"{self._name} gave {what} that is not a finite number; mend the environment, or end the "
                    "episode before it breaks"
                )


class WorkerEnvironments:
    """The same copies, each in a process of its own, which ends with this one."""

    def __init__(self, name: str, options: Mapping[str, Any], n: int) -> None:
        with contextlib.closing(LocalEnvironments(name, options, 1)) as first:  # says what is wrong
            self.action_space, self.observation_dim = first.action_space, first.observation_dim
        self.n, self._name = n, name
        self.workers: list[multiprocessing.Process] = []
        self._pipes: list[Connection] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # on forks beside threads: none is used there
            for _ in range(n):
                here, there = multiprocessing.Pipe()
                worker = multiprocessing.Process(
                    target=_serve, args=(there, here, name, dict(options)), daemon=True
                )
                worker.start()
                there.close()
                self.workers.append(worker)
                self._pipes.append(here)

    def reset(self, seeds: Sequence[int]) -> np.ndarray:
        """Start an episode in every copy; observations (n, d)."""
        return np.concatenate(self._ask("reset", range(self.n), [([seed],) for seed in seeds]))

    def step(
        self, actions: np.ndarray, next_seeds: Sequence[int] | None, active: Sequence[int] | None = None
    ) -> Outcome:
        """As of copies in this process."""
        asked = range(self.n) if active is None else active
        calls = [(actions[i : i + 1], None if next_seeds is None else [next_seeds[i]]) for i in asked]
        answers = self._ask("step", asked, calls)
        found = {}
        for part in vars(answers[0]):
            values = np.concatenate([getattr(answer, part) for answer in answers])
            found[part] = np.zeros((self.n, *values.shape[1:]), dtype=values.dtype)
            found[part][list(asked)] = values
        return Outcome(**found)

    def close(self) -> None:
        """End the processes, also busy ones."""
        for worker in self.workers:
            worker.terminate()
            worker.join()
        for pipe in self._pipes:
            pipe.close()

    def _ask(self, method: str, asked: Sequence[int], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        try:
            for index, arguments in zip(asked, calls, strict=True):
                self._pipes[index].send((method, arguments))
            answers = [self._pipes[index].recv() for index in asked]
        except (EOFError, OSError) as error:
            for worker in self.workers:
                worker.join(0.1)
            codes = [f"{i}: {w.exitcode}" for i, w in enumerate(self.workers) if w.exitcode is not None]
            self.close()
            raise ConfigError(
                f"a worker process of {self._name} died in {method} (exit code of copy {', '.join(codes)}); "
                "its message may be above: mend the environment or set vectorization to local, and resume "
                "the run"
            ) from error
        for answer in answers:
            if isinstance(answer, ConfigError):
                self.close()
                raise answer
        return answers


def _serve(pipe: Connection, other_end: Connection, name: str, options: Mapping[str, Any]) -> None:
    """One copy's process, until the pipe closes; Ctrl-C is its maker's to hear."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    other_end.close()
    with contextlib.suppress(EOFError), contextlib.closing(LocalEnvironments(name, options, 1)) as copy:
        while True:
            method, arguments = pipe.recv()
            try:
                answer = getattr(copy, method)(*arguments)
            except ConfigError as error:
                answer = error
            pipe.send(answer)


Environments = LocalEnvironments | WorkerEnvironments


@dataclass(frozen=True)
class Evaluation:
    """After ``step`` environment steps: mean return and length of full episodes of the mean action.

    sampled_return: of the training episodes that ended since the last evaluation (of the latest one where
    none did; NaN before the first), which the sampled policy played.
    """

    step: int
    mean_return: float
    length: float
    sampled_return: float


def play_episodes(
    environments: LocalEnvironments, act: Callable[[np.ndarray], np.ndarray], seed: int, limit: int
) -> np.ndarray:
    """One episode of every run by act, (K, 1, d) to actions (K, 1, …): returns and lengths, (2, K)."""
    observations = environments.reset([seed] * environments.n)
    found = np.zeros((2, environments.n))
    active = np.arange(environments.n)
    for _ in range(limit):
        outcome = environments.step(act(observations[:, None])[:, 0], None, active.tolist())
        observations[active] = outcome.observations[active]
        found[:, active] += outcome.rewards[active], np.ones(len(active))
        active = active[~(outcome.terminated | outcome.truncated)[active]]
        if not len(active):
            return found
    _LOG.warning(
        "an episode of an evaluation was cut after %d steps; "
        "give the environment a time limit or change evaluation_limit",
        limit,
    )
    return found


def clip_actions(actions: np.ndarray, space: ActionSpace) -> np.ndarray:
    """What the environment gets: continuous actions cut to the space's box, discrete ones as they are."""
    if not isinstance(space, Continuous):
        return actions
    return np.clip(actions, np.asarray(space.low), np.asarray(space.high))
