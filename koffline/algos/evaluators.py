"""d3rlpy's evaluators by name, over columns of a log, and the return in a Gymnasium environment.

The definitions are d3rlpy's; unlike there, the value of initial states takes one state per episode however
long it is, sums of advantages run over whole episodes, and a log is evaluated in a few forward passes.
None of them disturbs the random numbers of training.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from koffline.algos.model_files import load
from koffline.data.d3rlpy_dump import action_matrix
from koffline.data.transitions import Continuous, Discrete, Transitions
from koffline.envs.make import SpaceTranslator, make_env, playing
from koffline.errors import ConfigError
from koffline.policies.base import describe_actions

_CHUNK_VALUES = 4_000_000  # numbers in the observations of one forward pass
_MOST_ROWS = 8192


class LogEvaluator:
    """A number from an algorithm and the rows of a log; called as d3rlpy calls its evaluators."""

    def __init__(self, measure: Callable[[Any, Transitions], Any], log: Transitions, name: str) -> None:
        self._measure, self._log, self._name = measure, log, name

    def __call__(self, algo: Any, dataset: Any = None) -> float:
        """The measure over the log. Raises ConfigError where the algorithm has no such number."""
        with own_randomness(0):
            try:
                return float(self._measure(algo, self._log))
            except NotImplementedError as error:
                reason = " ".join(str(error).split()) or f"{type(algo).__name__} has no such number"
                raise ConfigError(f"evaluators.{self._name}: {reason}; leave it out") from None

    def try_out(self, algo: Any) -> None:
        """Raise ConfigError before training for what would fail after the first epoch."""
        log = self._log.select(np.arange(min(2, len(self._log))))
        LogEvaluator(self._measure, log, self._name)(algo)


class EnvironmentEvaluator:
    """Mean return of greedy episodes, always from the same starts, played side by side.

    Raises ConfigError for an environment whose spaces are not the log's.
    """

    def __init__(
        self, identifier: str, log: Transitions, episodes: int = 10, seed: int = 0, epsilon: float = 0.0
    ) -> None:
        self._identifier, self._seed, self._epsilon = identifier, seed, epsilon
        self._envs = [make_env(identifier)]
        spaces = SpaceTranslator(identifier, self._envs[0].observation_space, self._envs[0].action_space)
        if spaces.observation_shape != log.observation_shape:
            shapes = f"observations of shape {spaces.observation_shape}, the log {log.observation_shape}"
            raise ConfigError(f"{identifier} has {shapes}; name the environment that the log is from")
        if describe_actions(spaces.action_space) != describe_actions(log.action_space):
            spaces_of_both = f"actions {spaces.action_space}, the log {log.action_space}"
            raise ConfigError(f"{identifier} has {spaces_of_both}; name the log's environment")
        self._spaces = spaces
        self._envs += [make_env(identifier) for _ in range(episodes - 1)]

    def __call__(self, algo: Any, dataset: Any = None) -> float:
        """Mean undiscounted return. Raises ConfigError where the environment fails."""
        generator = np.random.default_rng(self._seed)
        with own_randomness(self._seed), playing(self._identifier, "an episode"):
            return float(np.mean(self._returns(algo, generator)))

    def try_out(self, algo: Any) -> None:
        """The spaces have been compared already."""

    def close(self) -> None:
        """Close the environments."""
        for env in self._envs:
            env.close()

    def _returns(self, algo: Any, generator: np.random.Generator) -> np.ndarray:
        count = len(self._envs)
        observations = [env.reset(seed=self._seed + i)[0] for i, env in enumerate(self._envs)]
        returns, running = np.zeros(count), list(range(count))
        while running:
            greedy = algo.predict(self._spaces.observations([observations[i] for i in running]))
            explores = generator.random(len(running)) < self._epsilon
            for i, action, explore in zip(tuple(running), greedy, explores, strict=True):
                (native,) = self._spaces.native_actions(self._chosen(action, explore, generator)[None])
                observations[i], reward, terminated, truncated, _ = self._envs[i].step(native)
                returns[i] += float(reward)
                if terminated or truncated:
                    running.remove(i)
        return returns

    def _chosen(self, action: Any, explore: bool, generator: np.random.Generator) -> np.ndarray:
        space = self._spaces.action_space
        if isinstance(space, Discrete):
            return np.asarray(generator.integers(space.n) if explore else action)
        if explore:
            return generator.uniform(space.low, space.high)
        return np.clip(action, space.low, space.high)


def make_log_evaluator(
    kind: str, log: Transitions, name: str, return_threshold: float | None = None, base: str | None = None
) -> LogEvaluator:
    """The evaluator of that type over a log. Raises ConfigError where it is for the other kind of actions.

    return_threshold: soft_opc's. base: the .d3 file of the model that a compare_… evaluator looks at.
    """
    for word, space in {"continuous": Continuous, "discrete": Discrete}.items():
        if f"{word}_action" in kind and not isinstance(log.action_space, space):
            raise ConfigError(
                f"evaluators.{name}: {kind} is for {word} actions, the log has {log.action_space}"
            )
    if kind == "soft_opc":
        if not log.has_episodes:
            raise ConfigError(f"evaluators.{name}: soft_opc needs episodes, the log has none; leave it out")
        return LogEvaluator(lambda algo, rows: _soft_opc(algo, rows, return_threshold), log, name)
    if kind in _MEASURES:
        return LogEvaluator(_MEASURES[kind], log, name)
    compare = _COMPARISONS[kind.removeprefix("compare_")]
    if base is None:
        return LogEvaluator(lambda algo, rows: compare(rows.actions, _greedy(algo, rows)), log, name)
    other = load(base)
    shape = tuple(np.atleast_1d(other.observation_shape))
    if shape != log.observation_shape:
        raise ConfigError(
            f"evaluators.{name}: {base} is for observations {shape}, the log has {log.observation_shape}"
        )
    return LogEvaluator(lambda algo, rows: compare(_greedy(algo, rows), _greedy(other, rows)), log, name)


def td_error(algo: Any, log: Transitions) -> float:
    """Mean of (Q(s, a) − r − γ Q(s', π(s')))², rewards as the algorithm scales them."""
    rewards = np.asarray(log.rewards, dtype=np.float32)
    if algo.reward_scaler:
        rewards = algo.reward_scaler.transform_numpy(rewards)
    following = _greedy_values(algo, log.next_observations)
    targets = rewards + algo.gamma * following * (1.0 - log.terminated.astype(np.float32))
    return float(np.mean((_logged_values(algo, log) - targets) ** 2))


def _discounted_sum_of_advantage(algo: Any, log: Transitions) -> float:
    """Mean over rows of Σ_t' γ^(t'−t) (Q(s, a) − Q(s, π(s))), to the end of the row's episode."""
    advantages = _logged_values(algo, log) - _greedy_values(algo, log.observations)
    if not log.has_episodes:
        return float(np.mean(advantages))
    return float(np.mean(log.replace(rewards=advantages).returns_to_go(algo.gamma)))


def _soft_opc(algo: Any, log: Transitions, return_threshold: float | None) -> float:
    """Mean Q(s, a) in episodes with a return of at least the threshold, minus that in all (NaN: none has)."""
    values = _logged_values(algo, log)
    successful = np.repeat(log.returns() >= return_threshold, log.episode_lengths)
    return float(values[successful].mean() - values.mean()) if successful.any() else float("nan")


_COMPARISONS: dict[str, Callable[[np.ndarray, np.ndarray], Any]] = {
    "continuous_action_diff": lambda one, other: np.mean(np.sum((one - other) ** 2, axis=1)),
    "discrete_action_match": lambda one, other: np.mean(one == other),
}
_MEASURES: dict[str, Callable[[Any, Transitions], Any]] = {
    "td_error": td_error,
    "discounted_sum_of_advantage": _discounted_sum_of_advantage,
    "average_value": lambda algo, log: np.mean(_greedy_values(algo, log.observations)),
    # Over the first state of each episode; over all rows where there are none.
    "initial_value": lambda algo, log: np.mean(_greedy_values(algo, log.initial_observations())),
}


@contextlib.contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """Global generators seeded inside, and as they were afterwards."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    ours, theirs = random.getstate(), np.random.get_state()  # noqa: NPY002  (d3rlpy draws from it)
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(ours)
            np.random.set_state(theirs)  # noqa: NPY002


def _in_chunks(call: Callable[..., np.ndarray], observations: np.ndarray, *columns: np.ndarray) -> np.ndarray:
    """The parts of a call, on observations as mini-batches show them, joined."""
    size = max(1, min(_MOST_ROWS, _CHUNK_VALUES // max(1, int(np.prod(observations.shape[1:])))))
    parts = []
    for start in range(0, len(observations), size):
        rows = slice(start, start + size)
        seen = np.ascontiguousarray(observations[rows], dtype=np.float32)
        parts.append(call(seen, *(column[rows] for column in columns)))
    return np.concatenate(parts)


def _greedy(algo: Any, log: Transitions) -> np.ndarray:
    return _in_chunks(algo.predict, log.observations)


def _logged_values(algo: Any, log: Transitions) -> np.ndarray:
    return _in_chunks(algo.predict_value, log.observations, action_matrix(log)).reshape(-1)


def _greedy_values(algo: Any, observations: np.ndarray) -> np.ndarray:
    actions = _in_chunks(algo.predict, observations)
    return _in_chunks(algo.predict_value, observations, actions).reshape(-1)
