"""Copies of an environment side by side, each reset with its own seed, and full episodes in them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from koffline.data.transitions import ActionSpace, Continuous
from koffline.envs.make import SpaceTranslator, make_env, playing
from koffline.errors import ConfigError

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Outcome:
    """One step of n copies.

    observations: (n, d) to act on next, those of a fresh episode where one ended. final_observations: (n, d)
    the true s'. rewards (n,), terminated, truncated (n,) bool. valid (n,) bool: False for a step that only
    reset its copy and belongs to no episode.
    """

    observations: np.ndarray
    final_observations: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    valid: np.ndarray


class Environments(Protocol):
    """n copies of one environment."""

    action_space: ActionSpace
    observation_dim: int
    n: int

    def reset(self, seeds: Sequence[int]) -> np.ndarray:
        """Start an episode in every copy; observations (n, d)."""
        ...

    def step(self, actions: np.ndarray, next_seeds: Sequence[int]) -> Outcome:
        """Actions (n, k) or (n,) already inside the space; a copy whose episode ends resets with its seed."""
        ...

    @property
    def awaiting(self) -> np.ndarray:
        """(n,) bool, copies whose next step only resets them."""
        ...

    def restore(
        self, seeds: Sequence[int], actions: Sequence[np.ndarray], awaiting: np.ndarray
    ) -> np.ndarray | None:
        """Every copy in its seed's episode after its actions, (n, d); None where there is no way back."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


class LocalEnvironments:
    """Copies in this process, reset by us: no step is lost to a reset and none costs a worker.

    Raises ConfigError for an environment that is unknown, fails, or has spaces the learner cannot take;
    DataError is never its own: what a step gives is checked here and named as ConfigError.
    """

    def __init__(self, name: str, options: Mapping[str, Any], n: int) -> None:
        self.n, self._name = n, name
        options = {"disable_env_checker": True, **options}
        self._copies = [make_env(name, **options) for _ in range(n)]
        first = self._copies[0]
        self._spaces = SpaceTranslator(name, first.observation_space, first.action_space)
        self.action_space: ActionSpace = self._spaces.action_space
        self.observation_dim = int(np.prod(self._spaces.observation_shape))
        self._is_box = isinstance(self.action_space, Continuous) and first.action_space.shape == (
            self.action_space.k,
        )

    def reset(self, seeds: Sequence[int]) -> np.ndarray:
        """Start an episode in every copy, (n, d)."""
        return np.stack([self.reset_copy(index, seed) for index, seed in enumerate(seeds)])

    def reset_copy(self, index: int, seed: int) -> np.ndarray:
        """Start an episode in one copy, (d,)."""
        with playing(self._name, "reset"):
            observation, _ = self._copies[index].reset(seed=int(seed))
        return self._vector(observation)

    def step(self, actions: np.ndarray, next_seeds: Sequence[int]) -> Outcome:
        """One step of every copy."""
        n, d = self.n, self.observation_dim
        final = np.empty((n, d))
        rewards, terminated, truncated = np.empty(n), np.zeros(n, dtype=bool), np.zeros(n, dtype=bool)
        native = self._native(actions)
        with playing(self._name, "step"):
            for index, environment in enumerate(self._copies):
                observation, rewards[index], terminated[index], truncated[index], _ = environment.step(
                    native[index]
                )
                final[index] = observation if self._is_vector(observation) else self._vector(observation)
        check_numbers(self._name, final, rewards)
        observations = final
        ended = np.flatnonzero(terminated | truncated)
        if len(ended):
            observations = final.copy()
            for index in ended.tolist():
                observations[index] = self.reset_copy(index, next_seeds[index])
        return Outcome(observations, final, rewards, terminated, truncated, np.ones(n, dtype=bool))

    def step_copy(self, index: int, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool]:
        """One step of one copy: true next observation (d,), reward, terminated, truncated; no reset."""
        with playing(self._name, "step"):
            observation, reward, terminated, truncated, _ = self._copies[index].step(
                self._native(np.asarray(action)[None])[0]
            )
        vector = self._vector(observation)
        check_numbers(self._name, vector[None], np.asarray([reward], dtype=float))
        return vector, float(reward), bool(terminated), bool(truncated)

    @property
    def awaiting(self) -> np.ndarray:
        """(n,), none: an episode is begun in the step that ends the one before."""
        return np.zeros(self.n, dtype=bool)

    def restore(
        self, seeds: Sequence[int], actions: Sequence[np.ndarray], awaiting: np.ndarray
    ) -> np.ndarray | None:
        """Every copy in its seed's episode after its actions; None where one ended earlier this time."""
        found = self.reset(seeds)
        for index, taken in enumerate(actions):
            for action in taken:
                found[index], _, terminated, truncated = self.step_copy(index, action)
                if terminated or truncated:
                    return None
        return found

    def close(self) -> None:
        """Close every copy."""
        for environment in self._copies:
            environment.close()

    def _native(self, actions: np.ndarray) -> Any:
        if self._is_box:
            return actions.astype(self._spaces.action_dtype, copy=False)
        return self._spaces.native_actions(actions)

    def _is_vector(self, observation: Any) -> bool:
        return isinstance(observation, np.ndarray) and observation.shape == (self.observation_dim,)

    def _vector(self, observation: Any) -> np.ndarray:
        if self._is_vector(observation) and observation.dtype.kind == "f":  # the usual case, ten times faster
            check_numbers(self._name, observation, np.zeros(1))
            return observation.astype(float)
        with playing(self._name, "an observation"):
            vector = self._spaces.observations([observation]).reshape(-1).astype(float)
            if vector.shape != (self.observation_dim,):
                raise ValueError(f"shape {np.shape(observation)}, declared {self._spaces.observation_shape}")
        check_numbers(self._name, vector[None], np.zeros(1))
        return vector


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
    runs = environments.n
    observations = environments.reset([seed] * runs)
    found = np.zeros((2, runs))
    active = list(range(runs))
    for _ in range(limit):
        actions = act(observations[:, None])[:, 0]
        still = []
        for run in active:
            observations[run], reward, terminated, truncated = environments.step_copy(run, actions[run])
            found[:, run] += reward, 1.0
            if not (terminated or truncated):
                still.append(run)
        active = still
        if not active:
            return found
    _LOG.warning(
        "an episode of an evaluation was cut after %d steps; "
        "give the environment a time limit or change evaluation_limit",
        limit,
    )
    return found


def check_numbers(name: str, observations: np.ndarray, rewards: np.ndarray) -> None:
    """Raise ConfigError for the first number that is not finite."""
    # One sum tells whether any is not finite, ten times faster than looking at each.
    if np.isfinite(observations.sum() + rewards.sum()):
        return
    for what, values in (("observation", observations), ("reward", rewards)):
        if not np.all(np.isfinite(values)):
            raise ConfigError(
                f"{name} gave an {what} that is not a finite number".replace("an reward", "a reward")
                + "; mend the environment, or end the episode before it breaks"
            )


def clip_actions(actions: np.ndarray, space: ActionSpace) -> np.ndarray:
    """What the environment gets: continuous actions cut to the space's box, discrete ones as they are."""
    if not isinstance(space, Continuous):
        return actions
    return np.clip(actions, np.asarray(space.low), np.asarray(space.high))
