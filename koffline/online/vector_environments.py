"""Gymnasium's vector environments as copies to play in: true final observations, whatever resets when."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from koffline.data.transitions import ActionSpace
from koffline.envs.make import SpaceTranslator, make_env, playing
from koffline.errors import ConfigError, KofflineError
from koffline.online.environments import Outcome, check_numbers

FAULT = "koffline_fault"  # the key of a step's info that tells what went wrong
_LOST = (EOFError, BrokenPipeError, ConnectionError)  # what a pipe to a dead process raises


def make_vector_environments(
    name: str, options: Mapping[str, Any], n: int, vectorization: str
) -> VectorEnvironments:
    """n seeded copies: "sync" in this process, "async" each in a process of its own. Raises ConfigError."""
    makers = [functools.partial(make_copy, name, options, index, os.getpid()) for index in range(n)]
    with contextlib.closing(makers[0]()) as first:  # tells what is wrong better than Gymnasium would
        SpaceTranslator(name, first.observation_space, first.action_space)
    with _understood(name, "being made"), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # on forks beside threads: nothing runs in them
        made = (AsyncVectorEnv if vectorization == "async" else SyncVectorEnv)(makers)
    return VectorEnvironments(made, name, is_seeded=True)


class VectorEnvironments:
    """The copies of a VectorEnv that resets by itself, in the next step or in the same one.

    NEXT_STEP: the step after an episode's last resets the copy and is not ``valid``; until then
    ``observations`` holds the old episode's last one. SAME_STEP: ``observations`` begins the new episode, the
    true last observation is taken from the info. is_seeded: the copies are SeededCopy, so that every episode
    has the seed given for it; otherwise only the first ones have. Raises ConfigError for spaces the learner
    cannot take, for another way of resetting, and for whatever goes wrong, a dead worker too.
    """

    def __init__(self, vector: VectorEnv[Any, Any, Any], name: str, is_seeded: bool = False) -> None:
        self._vector: Any = vector  # Gymnasium declares fewer seeds and methods than it takes
        self._name, self._is_seeded = name, is_seeded
        self.n = int(vector.num_envs)
        self._is_same_step = _resets_in_the_same_step(vector, name)
        space = vector.single_observation_space
        self._spaces = SpaceTranslator(name, space, vector.single_action_space)
        self._is_box = isinstance(space, gymnasium.spaces.Box)
        self.action_space: ActionSpace = self._spaces.action_space
        self.observation_dim = int(np.prod(self._spaces.observation_shape))
        self._awaiting = np.zeros(self.n, dtype=bool)  # copies whose next step only resets
        self._due_seeds = np.zeros(self.n, dtype=np.int64)
        self._sent_seeds: list[int] | None = None

    def reset(self, seeds: Sequence[int]) -> np.ndarray:
        """Start an episode in every copy; observations (n, d)."""
        with _understood(self._name, "reset", self._vector):
            observations, infos = self._vector.reset(seed=[int(seed) for seed in seeds])
            self._check_faults(infos)
            found = self._rows(observations)
        check_numbers(self._name, found, np.zeros(1))
        self._awaiting[:] = False
        self._sent_seeds = None
        return found

    def step(self, actions: np.ndarray, next_seeds: Sequence[int]) -> Outcome:
        """Actions (n, k) or (n,) already inside the space; a copy whose episode ends resets with its seed."""
        valid = ~self._awaiting
        seeds = np.where(valid, np.asarray(next_seeds, dtype=np.int64), self._due_seeds).tolist()
        if self._is_seeded and seeds != self._sent_seeds:
            self._sent_seeds = seeds
            with _understood(self._name, "reset", self._vector):
                self._vector.call("prepare", seeds)
        with _understood(self._name, "step", self._vector):
            batch = np.stack([np.asarray(action) for action in self._spaces.native_actions(actions)])
            observed, rewards, terminated, truncated, infos = self._vector.step(batch)
            self._check_faults(infos)
            observations = self._rows(observed)
            rewards = self._column("rewards", rewards, float)
            terminated = self._column("terminations", terminated, bool) & valid
            truncated = self._column("truncations", truncated, bool) & valid
        ended = terminated | truncated
        final = observations
        if self._is_same_step and ended.any():
            final = observations.copy()
            final[ended] = self._true_last(infos, ended)
        check_numbers(self._name, observations, rewards)
        check_numbers(self._name, final, rewards)
        if not self._is_same_step:
            self._awaiting = ended
            self._due_seeds[ended] = np.asarray(next_seeds, dtype=np.int64)[ended]
        return Outcome(observations, final, np.where(valid, rewards, 0.0), terminated, truncated, valid)

    @property
    def awaiting(self) -> np.ndarray:
        """(n,) bool, copies whose next step only resets them."""
        return self._awaiting.copy()

    def restore(
        self, seeds: Sequence[int], actions: Sequence[np.ndarray], awaiting: np.ndarray
    ) -> np.ndarray | None:
        """Every copy in its seed's episode after its actions (steps, k) or (steps,); observations (n, d).

        The next step of an awaiting copy resets it with its seed here; its observation means nothing. None
        where copies are not seeded, so that there is no way back.
        """
        if not self._is_seeded:
            return None
        self.reset(seeds)
        native = [self._spaces.native_actions(np.asarray(part)) if len(part) else [] for part in actions]
        with _understood(self._name, "step", self._vector):
            story = ([int(seed) for seed in seeds], native, [bool(is_over) for is_over in awaiting])
            answers = self._vector.call("play_again", *story)
            self._check_faults({FAULT: [fault for _, fault in answers]})
            found = self._spaces.observations([observation for observation, _ in answers])
        self._awaiting[:], self._due_seeds[:] = awaiting, seeds
        return found.reshape(self.n, -1).astype(float)

    def close(self) -> None:
        """Free everything; workers that are dead or busy are ended."""
        with contextlib.suppress(Exception):
            if isinstance(self._vector.unwrapped, AsyncVectorEnv):
                _end_workers(self._vector.unwrapped)
            self._vector.close()

    def _rows(self, observations: Any) -> np.ndarray:
        """(n, d), a copy: some vector environments write into one array again and again."""
        if not self._is_box:
            parts = list(gymnasium.vector.utils.iterate(self._vector.observation_space, observations))
            return self._spaces.observations(parts).reshape(self.n, -1).astype(float)
        wanted = (self.n, *(self._vector.single_observation_space.shape or ()))
        if np.shape(observations) != wanted:
            raise ValueError(f"observations of shape {np.shape(observations)}, expected {wanted}")
        return np.array(observations, dtype=float).reshape(self.n, -1)

    def _column(self, name: str, values: Any, dtype: Any) -> np.ndarray:
        column = np.array(values, dtype=dtype)
        if column.shape != (self.n,):
            raise ValueError(f"{name} of shape {column.shape}, expected {(self.n,)}")
        return column

    def _true_last(self, infos: Mapping[str, Any], ended: np.ndarray) -> np.ndarray:
        """(ended, d) observations that SAME_STEP keeps in the info."""
        there = infos.get("_final_obs", ended if "final_obs" in infos else ~ended)
        if not np.asarray(there, dtype=bool)[ended].all():
            raise ConfigError(
                f"{self._name} resets in the same step and leaves out info['final_obs'], the episode's last "
                "observation; mend it, or set vectorization to local"
            )
        with _understood(self._name, "step", self._vector):
            last = [infos["final_obs"][index] for index in np.flatnonzero(ended)]
            return self._spaces.observations(last).reshape(len(last), self.observation_dim).astype(float)

    def _check_faults(self, infos: Mapping[str, Any]) -> None:
        for index, fault in enumerate(infos.get(FAULT, ())):
            if fault:
                raise ConfigError(f"{self._name} {fault}, copy {index}; try it alone with gymnasium.make")


def _resets_in_the_same_step(vector: VectorEnv[Any, Any, Any], name: str) -> bool:
    """False: in the next one. Raises ConfigError for anything else."""
    given = vector.metadata.get("autoreset_mode")
    if given is None and isinstance(vector.unwrapped, (SyncVectorEnv, AsyncVectorEnv)):
        return False  # Gymnasium 1.0 knows no other and does not say so
    mode = str(getattr(given, "value", given)).lower().replace("_", "")
    if mode not in ("nextstep", "samestep"):
        raise ConfigError(
            f"{name} has autoreset_mode {str(given)!r} in its metadata; use NEXT_STEP or SAME_STEP, or set "
            "vectorization to local"
        )
    return mode == "samestep"


@contextlib.contextmanager
def _understood(name: str, method: str, vector: Any = None) -> Iterator[None]:
    """Errors as one ConfigError line, those of dead workers too."""
    try:
        with playing(name, method), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*ERROR: ")  # what Gymnasium says before it raises
            try:
                yield
            except _LOST as error:
                raise ConfigError(
                    f"a worker process of {name} died in {method}{_exit_codes(vector)}; its message may be "
                    "above: mend the environment or set vectorization to local, and resume the run"
                ) from error
    except ConfigError:
        if isinstance(getattr(vector, "unwrapped", None), AsyncVectorEnv):
            _end_workers(vector.unwrapped)
        raise


def _exit_codes(vector: Any) -> str:
    """The dead workers' exit codes, if any are known."""
    processes = list(getattr(getattr(vector, "unwrapped", None), "processes", ()))
    for process in processes:
        process.join(0.1)
    codes = [f"{index}: {p.exitcode}" for index, p in enumerate(processes) if p.exitcode is not None]
    return f" (exit code of copy {', '.join(codes)})" if codes else ""


def _end_workers(vector: AsyncVectorEnv) -> None:
    """End the processes without a word through their pipes, which may be broken or full."""
    if vector.closed:
        return
    for process in vector.processes:
        if process.is_alive():
            process.terminate()
    for process in vector.processes:
        process.join()
    for pipe in vector.parent_pipes:
        if pipe is not None:
            pipe.close()
    vector.closed = True


def make_copy(name: str, options: Mapping[str, Any], index: int, maker: int | None = None) -> SeededCopy:
    """One copy, here or in a worker's process. maker: the process that asked, if any. Raises ConfigError."""
    if maker is not None and maker != os.getpid():  # Ctrl-C is the maker's to hear; it ends its workers
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return SeededCopy(make_env(name, **{"disable_env_checker": True, **options}), index)


class SeededCopy(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment that resets with the seed it was given last, also when its vector environment resets it.

    What it raises, and observations of another shape than its space's (which shared memory would broadcast),
    become a text in the info: a worker that has raised is of no further use, and its report may be lost.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], index: int) -> None:
        super().__init__(env)
        self._index = index
        self._next_seed: int | None = None
        self._is_over = False  # the next step is to reset, though the vector environment does not know it

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
            return self.observation_space.sample(), {FAULT: _described("reset", error)}
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
            return self.observation_space.sample(), 0.0, False, False, {FAULT: _described("step", error)}

    def _check_shape(self, observation: Any) -> None:
        space = self.observation_space
        if isinstance(space, gymnasium.spaces.Box) and np.shape(observation) != space.shape:
            raise ValueError(f"observation of shape {np.shape(observation)}, declared {space.shape}")


def _described(method: str, error: Exception) -> str:
    """An exception of an environment in one line."""
    if isinstance(error, KofflineError):
        return str(error)
    return f"failed in {method} ({' '.join(f'{type(error).__name__}: {error}'.split())})"
