"""d3rlpy's evaluators by name, over columns of a log, and the return in a Gymnasium environment.

The definitions are d3rlpy's; unlike there, the value of initial states takes one state per episode however
long it is, sums of advantages run over whole episodes, and a log is evaluated in a few forward passes.
None of them disturbs the random numbers of training.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from koffline.data.replay_views import action_matrix
from koffline.data.transitions import Continuous, Discrete, Transitions
from koffline.envs.make import make_env, playing
from koffline.errors import ConfigError

_CHUNK_VALUES = 4_000_000  # numbers in the observations of one forward pass
_MOST_ROWS = 8192


class LogEvaluator:
    """A number from an algorithm and the rows of a log; called as d3rlpy calls its evaluators."""

    def __init__(
        self, measure: Callable[[Any, Transitions], float], log: Transitions, name: str = "evaluator"
    ) -> None:
        self._measure = measure
        self._log = log
        self._name = name

    def __call__(self, algo: Any, dataset: Any = None) -> float:
        """The measure over the log. Raises ConfigError where the algorithm has no such number."""
        with own_randomness(0):
            try:
                return self._measure(algo, self._log)
            except NotImplementedError as error:
                reason = " ".join(str(error).split()) or f"{type(algo).__name__} has no such number"
                raise ConfigError(f"evaluators.{self._name}: {reason}; leave it out") from None

    def try_out(self, algo: Any) -> None:
        """Raise ConfigError before training for what would fail after the first epoch."""
        log = self._log.select(np.arange(min(2, len(self._log))))
        LogEvaluator(self._measure, log, self._name)(algo)


class EnvironmentEvaluator:
    """Mean return of greedy episodes, always from the same starts, played side by side."""

    def __init__(
        self, identifier: str, log: Transitions, episodes: int = 10, seed: int = 0, epsilon: float = 0.0
    ) -> None:
        self._identifier = identifier
        self._envs = [make_env(identifier)]
        check_spaces(self._envs[0], identifier, log)
        self._envs += [make_env(identifier) for _ in range(episodes - 1)]
        self._seed = seed
        self._epsilon = epsilon

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
            actions = algo.predict(np.stack([observations[i] for i in running]))
            explores = generator.random(len(running)) < self._epsilon
            still = []
            for i, action, explore in zip(running, actions, explores, strict=True):
                env = self._envs[i]
                chosen = (
                    _drawn(env.action_space, generator) if explore else _fitting(env.action_space, action)
                )
                observations[i], reward, terminated, truncated, _ = env.step(chosen)
                returns[i] += float(reward)
                if not (terminated or truncated):
                    still.append(i)
            running = still
        return returns


def make_log_evaluator(
    kind: str, log: Transitions, name: str, return_threshold: float | None = None, base: str | None = None
) -> LogEvaluator:
    """The evaluator of that type over a log. Raises ConfigError where it is for the other kind of actions."""
    needed = {"continuous": Continuous, "discrete": Discrete}
    for word, space in needed.items():
        if f"{word}_action" in kind and not isinstance(log.action_space, space):
            raise ConfigError(
                f"evaluators.{name}: {kind} is for {word} actions, the log has {log.action_space}"
            )
    if kind == "soft_opc":
        assert return_threshold is not None
        if not log.has_episodes:
            raise ConfigError(f"evaluators.{name}: soft_opc needs episodes, the log has none; leave it out")
        return LogEvaluator(lambda algo, rows: soft_opc(algo, rows, return_threshold), log, name)
    if kind.startswith("compare_"):
        assert base is not None
        other = _other_model(base, log, name)
        return LogEvaluator(lambda algo, rows: _MEASURES[kind](algo, rows, other), log, name)
    return LogEvaluator(_MEASURES[kind], log, name)


def td_error(algo: Any, log: Transitions) -> float:
    """Mean of (Q(s, a) − r − γ Q(s', π(s')))², rewards as the algorithm scales them."""
    rewards = np.asarray(log.rewards, dtype=np.float32)
    if algo.reward_scaler:
        rewards = algo.reward_scaler.transform_numpy(rewards)
    values = _values(algo, log.observations, action_matrix(log))
    following = _greedy_values(algo, log.next_observations)
    targets = rewards + algo.gamma * following * (1.0 - log.terminated.astype(np.float32))
    return float(np.mean((values - targets) ** 2))


def discounted_sum_of_advantage(algo: Any, log: Transitions) -> float:
    """Mean over rows of Σ_t' γ^(t'−t) (Q(s, a) − Q(s, π(s))), to the end of the row's episode."""
    advantages = _values(algo, log.observations, action_matrix(log)) - _greedy_values(algo, log.observations)
    if not log.has_episodes:
        return float(np.mean(advantages))
    return float(np.mean(log.replace(rewards=advantages).returns_to_go(algo.gamma)))


def average_value(algo: Any, log: Transitions) -> float:
    """Mean of Q(s, π(s))."""
    return float(np.mean(_greedy_values(algo, log.observations)))


def initial_value(algo: Any, log: Transitions) -> float:
    """Mean of Q(s, π(s)) over the first state of each episode; over all rows where there are none."""
    return float(np.mean(_greedy_values(algo, log.initial_observations())))


def soft_opc(algo: Any, log: Transitions, return_threshold: float) -> float:
    """Mean Q(s, a) in episodes with a return of at least the threshold, minus that in all (NaN: none has)."""
    values = _values(algo, log.observations, action_matrix(log))
    successful = np.repeat(log.returns() >= return_threshold, log.episode_lengths)
    return float(values[successful].mean() - values.mean()) if successful.any() else float("nan")


def continuous_action_diff(algo: Any, log: Transitions) -> float:
    """Mean squared distance from the logged action to the policy's."""
    return float(np.mean(np.sum((log.actions - _greedy(algo, log.observations)) ** 2, axis=1)))


def discrete_action_match(algo: Any, log: Transitions) -> float:
    """How often the policy takes the logged action."""
    return float(np.mean(log.actions == _greedy(algo, log.observations)))


def compare_continuous_action_diff(algo: Any, log: Transitions, other: Any) -> float:
    """Mean squared distance between the actions of two policies."""
    difference = _greedy(algo, log.observations) - _greedy(other, log.observations)
    return float(np.mean(np.sum(difference**2, axis=1)))


def compare_discrete_action_match(algo: Any, log: Transitions, other: Any) -> float:
    """How often two policies act alike."""
    return float(np.mean(_greedy(algo, log.observations) == _greedy(other, log.observations)))


_MEASURES: dict[str, Any] = {
    measure.__name__: measure
    for measure in (
        td_error,
        discounted_sum_of_advantage,
        average_value,
        initial_value,
        continuous_action_diff,
        discrete_action_match,
        compare_continuous_action_diff,
        compare_discrete_action_match,
    )
}


@contextlib.contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """Global generators seeded inside, and as they were afterwards."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    ours, theirs = random.getstate(), np.random.get_state()  # noqa: NPY002  (d3rlpy draws from it)
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(ours)
            np.random.set_state(theirs)  # noqa: NPY002


def check_spaces(env: gymnasium.Env[Any, Any], identifier: str, log: Transitions) -> None:
    """Raise ConfigError where the environment's spaces are not the log's."""
    observed, acts = env.observation_space.shape, env.action_space
    if observed != log.observation_shape:
        raise ConfigError(
            f"{identifier} has observations of shape {observed}, the log {log.observation_shape}; "
            "name the environment that the log is from"
        )
    if isinstance(acts, gymnasium.spaces.Discrete):
        fits = isinstance(log.action_space, Discrete) and int(acts.n) == log.action_space.n
    else:
        fits = isinstance(log.action_space, Continuous) and acts.shape == (log.action_space.k,)
    if not fits:
        raise ConfigError(
            f"{identifier} has actions {acts}, the log {log.action_space}; name the log's environment"
        )


def _other_model(base: str, log: Transitions, name: str) -> Any:
    from koffline.algos.loading import load

    other = load(Path(base))
    shape = tuple(np.atleast_1d(other.observation_shape))
    if shape != log.observation_shape:
        raise ConfigError(
            f"evaluators.{name}: {base} is for observations {shape}, the log has {log.observation_shape}"
        )
    return other


def _chunks(observations: np.ndarray) -> Iterator[slice]:
    rows = max(1, min(_MOST_ROWS, _CHUNK_VALUES // max(1, int(np.prod(observations.shape[1:])))))
    for start in range(0, len(observations), rows):
        yield slice(start, start + rows)


def _greedy(algo: Any, observations: np.ndarray) -> np.ndarray:
    return np.concatenate([algo.predict(_seen(observations[c])) for c in _chunks(observations)])


def _values(algo: Any, observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
    parts = [algo.predict_value(_seen(observations[c]), actions[c]) for c in _chunks(observations)]
    return np.concatenate(parts).reshape(-1)


def _greedy_values(algo: Any, observations: np.ndarray) -> np.ndarray:
    return _values(algo, observations, _greedy(algo, observations))


def _seen(observations: np.ndarray) -> np.ndarray:
    """As mini-batches show them."""
    return np.ascontiguousarray(observations, dtype=np.float32)


def _fitting(space: Any, action: Any) -> Any:
    if isinstance(space, gymnasium.spaces.Discrete):
        return int(action) + int(space.start)
    return np.clip(action, space.low, space.high).astype(space.dtype)


def _drawn(space: Any, generator: np.random.Generator) -> Any:
    if isinstance(space, gymnasium.spaces.Discrete):
        return int(generator.integers(space.n)) + int(space.start)
    return generator.uniform(space.low, space.high).astype(space.dtype)
