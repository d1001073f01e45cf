"""Monitoring of a run: d3rlpy's files and evaluators, and returns in environments.

No evaluator disturbs the random numbers of training.
"""

from __future__ import annotations

import contextlib
import json
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from d3rlpy import metrics
from d3rlpy.logging.file_adapter import FileAdapter, default_json_encoder

from koffline.data.replay import ColumnarReplayBuffer
from koffline.data.transitions import Continuous, Discrete, Transitions
from koffline.envs.make import Copies
from koffline.errors import ConfigError
from koffline.policies.base import describe_actions, refuse
from koffline.store.files import write_text

_EVALUATORS: dict[str, Any] = {
    "td_error": metrics.TDErrorEvaluator,
    "discounted_sum_of_advantage": metrics.DiscountedSumOfAdvantageEvaluator,
    "average_value": metrics.AverageValueEstimationEvaluator,
    "initial_value": metrics.AverageValueEstimationEvaluator,  # evaluated on the first row of each episode
    "soft_opc": metrics.SoftOPCEvaluator,
    "continuous_action_diff": metrics.ContinuousActionDiffEvaluator,
    "discrete_action_match": metrics.DiscreteActionMatchEvaluator,
}


class LogEvaluator:
    """One of d3rlpy's evaluators, by its type in a config, over a log of its own.

    options: `return_threshold` of soft_opc. Raises ConfigError where it is for other logs.
    """

    def __init__(self, kind: str, log: Transitions, name: str, **options: Any) -> None:
        self._name = f"evaluators.{name}"
        other = Discrete if "continuous_action" in kind else Continuous if "discrete_action" in kind else ()
        wrong = {
            f"{kind} is for other actions than {log.action_space}": isinstance(log.action_space, other),
            "soft_opc needs episodes, the log has none": kind == "soft_opc" and not log.has_episodes,
        }
        wrong = {f"{self._name}: {what}; leave it out": is_so for what, is_so in wrong.items()}
        refuse(wrong, kind=ConfigError)
        self._evaluator = _EVALUATORS[kind](**options)
        is_of_starts = kind == "initial_value" and log.has_episodes
        self._log = log.select(log.episode_starts) if is_of_starts else log

    def __call__(self, algo: Any, dataset: Any = None) -> float:
        """Compute the metric. Raises ConfigError if the algorithm does not define it."""
        return self._measure(algo, self._log)

    def try_out(self, algo: Any) -> None:
        """Evaluate once before training: raise ConfigError now instead of after the first epoch."""
        self._measure(algo, self._log.select(np.arange(min(2, len(self._log)))))

    def _measure(self, algo: Any, log: Transitions) -> float:
        with own_randomness(0), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the mean of no episode is nan
            try:
                return float(self._evaluator(algo, ColumnarReplayBuffer(log, 0)))
            except NotImplementedError as error:
                reason = " ".join(str(error).split()) or f"{type(algo).__name__} has no such number"
                raise ConfigError(f"{self._name}: {reason}; leave it out") from None


class EnvironmentEvaluator:
    """Mean return of greedy episodes, always from the same starts, played side by side.

    Raises ConfigError for an environment whose spaces are not the log's.
    """

    def __init__(
        self, identifier: str, log: Transitions, episodes: int = 10, seed: int = 0, epsilon: float = 0.0
    ) -> None:
        self._copies, self._seeds, self._epsilon = Copies(identifier), range(seed, seed + episodes), epsilon
        shape, space = self._copies.observation_shape, self._copies.action_space
        wrong = {
            f"observations of shape {shape}, the log {log.observation_shape}": shape != log.observation_shape,
            f"actions {space}, the log {log.action_space}": (
                describe_actions(space) != describe_actions(log.action_space)
            ),
        }
        remedy = "name the environment that the log is from"
        wrong = {f"{identifier} has {what}; {remedy}": is_so for what, is_so in wrong.items()}
        refuse(wrong, kind=ConfigError)

    def __call__(self, algo: Any, dataset: Any = None) -> float:
        """Mean undiscounted return. Raises ConfigError where the environment fails."""
        with own_randomness(self._seeds.start):
            return float(np.mean(self._returns(algo)))

    def try_out(self, algo: Any) -> None:
        """Do nothing: the constructor has compared the spaces."""

    def close(self) -> None:
        """Close the environments."""
        self._copies.close()

    def _returns(self, algo: Any) -> np.ndarray:
        returns, running = np.zeros(len(self._seeds)), np.arange(len(self._seeds))
        observations, generator = self._copies.reset(self._seeds), np.random.default_rng(self._seeds.start)
        while len(running):
            actions = self._noisy(np.array(algo.predict(observations)), generator)
            step = self._copies.step(running.tolist(), actions)
            returns[running] += step.rewards
            goes_on = ~(step.terminated | step.truncated)
            running, observations = running[goes_on], step.observations[goes_on]
        return returns

    def _noisy(self, actions: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Replace a share of the actions by uniform ones inside the action space."""
        space, explores = self._copies.action_space, generator.random(len(actions)) < self._epsilon
        if isinstance(space, Discrete):
            return np.where(explores, generator.integers(space.n, size=len(actions)), actions)
        low, high = np.asarray(space.low), np.asarray(space.high)
        if explores.any():  # an unbounded box has no uniform actions
            actions[explores] = generator.uniform(low, high, actions[explores].shape)
        return np.clip(actions, low, high)


@contextlib.contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """Seed the global random generators inside the context and restore them afterwards."""
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


class RunLogger(FileAdapter):
    """Logger of params.json and a CSV per metric, for a run that calls `fit` once per epoch.

    Epochs and steps are counted from those `before` this call; a resumed run appends to its files. gradients:
    the size of every gradient is logged too.
    """

    def __init__(self, algo: Any, folder: Path, gradients: bool, before: tuple[int, int]) -> None:
        super().__init__(algo, str(folder))
        self._gradients, (self._epochs, self._steps) = gradients, before

    def create(self, algo: Any, experiment_name: str, n_steps_per_epoch: int) -> RunLogger:
        """Return this logger: to `fit` it is its own factory."""
        return self

    def write_params(self, params: dict[str, Any]) -> None:
        """Write params.json, whole or not at all."""
        text = json.dumps(params, default=default_json_encoder, indent=2)
        write_text(Path(self.logdir, "params.json"), text)

    def write_metric(self, epoch: int, step: int, name: str, value: float) -> None:
        """Append a line to the metric's file."""
        super().write_metric(self._epochs + epoch, self._steps + step, name, float(value))

    def watch_model(self, epoch: int, step: int) -> None:
        """Log the size of every gradient; existing files keep their header."""
        if self._gradients:
            self._is_model_watched = any(Path(self.logdir).glob("*_grad.csv"))
            super().watch_model(self._epochs + epoch, self._steps + step)
