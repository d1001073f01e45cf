"""Monitoring of a run: d3rlpy's loggers (files, TensorBoard, W&B) and evaluators, returns in environments.

Loggers serve a run that is trained epoch by epoch; no evaluator disturbs the random numbers of training.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import random
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from d3rlpy import logging as d3rlpy_logging
from d3rlpy import metrics
from d3rlpy.logging.file_adapter import default_json_encoder

from koffline.algos.model_files import load
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
    "compare_continuous_action_diff": metrics.CompareContinuousActionDiffEvaluator,
    "compare_discrete_action_match": metrics.CompareDiscreteActionMatchEvaluator,
}


class LogEvaluator:
    """One of d3rlpy's evaluators, by its type in a config, over a log of its own.

    options: `return_threshold` of soft_opc; `base`, the .d3 file of the model that a compare_… evaluator
    looks at. Raises ConfigError where it is for other logs.
    """

    def __init__(self, kind: str, log: Transitions, name: str, **options: Any) -> None:
        self._name, base = f"evaluators.{name}", load(options["base"]) if "base" in options else None
        other = Discrete if "continuous_action" in kind else Continuous if "discrete_action" in kind else ()
        shape = log.observation_shape if base is None else tuple(np.atleast_1d(base.observation_shape))
        wrong = {
            f"{kind} is for other actions than {log.action_space}": isinstance(log.action_space, other),
            "soft_opc needs episodes, the log has none": kind == "soft_opc" and not log.has_episodes,
            f"the base model is for observations {shape}, not the log's": shape != log.observation_shape,
        }
        wrong = {f"{self._name}: {what}; leave it out": is_so for what, is_so in wrong.items()}
        refuse(wrong, kind=ConfigError)
        self._evaluator = _EVALUATORS[kind](**options if base is None else {"base_algo": base})
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


class FileLogger(d3rlpy_logging.FileAdapter):
    """Logger of d3rlpy's params.json and one CSV per metric, in a folder that a resumed run appends to."""

    def __init__(self, algo: Any, folder: Path, gradients: bool) -> None:
        super().__init__(algo, str(folder))
        self._gradients = gradients

    def write_params(self, params: dict[str, Any]) -> None:
        """Write params.json, whole or not at all."""
        text = json.dumps(params, default=default_json_encoder, indent=2)
        write_text(Path(self.logdir, "params.json"), text)

    def watch_model(self, epoch: int, step: int) -> None:
        """Log the size of every gradient; existing files keep their header."""
        if self._gradients:
            self._is_model_watched = any(Path(self.logdir).glob("*_grad.csv"))
            super().watch_model(epoch, step)


class RunLogger(d3rlpy_logging.CombineAdapter, d3rlpy_logging.LoggerAdapterFactory):
    """Logger of a run that calls `fit` once per epoch; epochs and steps are counted over the whole run."""

    def __init__(self, folder: Path, gradients: bool, others: Sequence[Any]) -> None:
        self._adapters: Sequence[Any] = []
        self._folder, self._gradients, self._others = folder, gradients, others
        self._before, self._has_params = (0, 0), False

    def create(self, algo: Any, experiment_name: str, n_steps_per_epoch: int) -> RunLogger:
        """Return this logger; the first call creates the loggers it writes to."""
        if not self._adapters:
            made = [other.create(algo, experiment_name, n_steps_per_epoch) for other in self._others]
            self._adapters = [FileLogger(algo, self._folder, self._gradients), *made]
        return self

    def start_epoch(self, epochs: int, steps: int) -> None:
        """Set the numbers of epochs and steps before the epoch that begins."""
        self._before = (epochs, steps)

    def write_params(self, params: dict[str, Any]) -> None:
        """Write the parameters, once in a run."""
        if not self._has_params:
            super().write_params(params)
        self._has_params = True

    def before_write_metric(self, epoch: int, step: int) -> None:
        """Announce a metric to all loggers."""
        super().before_write_metric(*self._counted(epoch, step))

    def write_metric(self, epoch: int, step: int, name: str, value: float) -> None:
        """Write a metric to all loggers."""
        super().write_metric(*self._counted(epoch, step), name, float(value))

    def after_write_metric(self, epoch: int, step: int) -> None:
        """Tell all loggers that the metric is written."""
        super().after_write_metric(*self._counted(epoch, step))

    def watch_model(self, epoch: int, step: int) -> None:
        """Log the model's gradients in all loggers."""
        super().watch_model(*self._counted(epoch, step))

    def close(self) -> None:
        """Do nothing at the end of an epoch; `finish` closes the loggers."""

    def finish(self) -> None:
        """Close all loggers at the end of the run."""
        super().close()

    def _counted(self, epoch: int, step: int) -> tuple[int, int]:
        return self._before[0] + epoch, self._before[1] + step


def make_logger(
    folder: Path,
    gradients: bool = True,
    tensorboard: bool = False,
    wandb: bool = False,
    wandb_project: str | None = None,
) -> RunLogger:
    """Logger of a run with the requested backends. Raises ConfigError if an optional package is missing."""
    wanted = {"tensorboard": "tensorboardX"} if tensorboard else {}
    wanted |= {"wandb": "wandb"} if wandb else {}
    for name, package in wanted.items():
        if importlib.util.find_spec(package) is None:
            needs = f"logger.{name} needs the package {package}"
            raise ConfigError(f"{needs}; install it with pip install 'koffline[{name}]'")
    others: list[Any] = []
    if tensorboard:
        others.append(d3rlpy_logging.TensorboardAdapterFactory(root_dir=str(folder / "tensorboard")))
    if wandb:
        others.append(d3rlpy_logging.WanDBAdapterFactory(project=wandb_project))
    return RunLogger(folder, gradients, others)
