"""d3rlpy's parts of a training run: an algorithm made for a log, evaluators, a logger,
random numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from d3rlpy import metrics
from d3rlpy.algos.qlearning.base import QLearningAlgoBase
from d3rlpy.base import LearnableConfig
from d3rlpy.constants import ActionSpace
from d3rlpy.dataset import ReplayBufferBase
from d3rlpy.logging.file_adapter import FileAdapter, default_json_encoder
from d3rlpy.ope import FQE, DiscreteFQE
from d3rlpy.preprocessing.base import Scaler
from d3rlpy.serializable_config import CONFIG_STORAGE

from koffline.algos.model_files import device_name, load
from koffline.algos.policies import KLossFQE
from koffline.data.replay import ColumnarReplayBuffer, LazyReplayBuffer
from koffline.data.statistics import ColumnStatistics
from koffline.data.transitions import Continuous, Discrete, Transitions
from koffline.errors import ConfigError
from koffline.store.files import write_text
from koffline.untrusted.limits import one_line_errors

Algorithm: TypeAlias = QLearningAlgoBase[Any, Any]  # d3rlpy's or ours

EVALUATORS = ("fqe", "kloss_fqe")  # types that evaluate a given policy
# key: is discrete
_SUCH_AS = {
    True: "discrete_cql or kloss_discrete_cql",
    False: "cql, iql or kloss_sac",
}
_EXTENTS = {
    "standard": {"mean": "mean", "std": "deviation"},
    "min_max": {"minimum": "minimum", "maximum": "maximum"},
}
_ROWS_CHECKED = 1000
# d3rlpy says little where an encoder or a scaler is for other observations or actions.
_making = partial(
    one_line_errors,
    remedy="check algo.params, encoders and scalers too",
    kind=ConfigError,
)
_EVALUATORS: dict[str, type[metrics.EvaluatorProtocol]] = {
    "td_error": metrics.TDErrorEvaluator,
    "discounted_sum_of_advantage": metrics.DiscountedSumOfAdvantageEvaluator,
    "average_value": metrics.AverageValueEstimationEvaluator,
    # evaluated on the first row of each episode
    "initial_value": metrics.AverageValueEstimationEvaluator,
    "soft_opc": metrics.SoftOPCEvaluator,
    "continuous_action_diff": metrics.ContinuousActionDiffEvaluator,
    "discrete_action_match": metrics.DiscreteActionMatchEvaluator,
}


def make_algorithm(
    kind: str,
    params: Mapping[str, Any],
    device: str = "cpu",
    policy: str | Path | None = None,
) -> QLearningAlgoBase:
    """Make an algorithm from resolved options; its networks are not built yet.

    device: cpu, cuda or cuda:N. policy: file of the algorithm that fqe and kloss_fqe
    evaluate. Raises ConfigError.
    """
    device = device_name(device)
    evaluates = kind in EVALUATORS
    if evaluates and not policy:
        raise ConfigError(
            f"{kind} evaluates a policy and none is given; name its .d3 file as"
            " algo.policy"
        )
    if policy and not evaluates:
        raise ConfigError(
            f"algo.policy is for {' and '.join(EVALUATORS)}, not for {kind}; leave it"
            " out"
        )
    if policy and not Path(policy).exists():
        raise ConfigError(
            f"algo.policy is {policy}, which does not exist; train the policy first, or"
            " name its .d3 file"
        )
    if policy is None:
        target = None
    else:
        target = load(policy, device=device)
    with _making(kind, "cannot be made"):
        config = (
            CONFIG_STORAGE[LearnableConfig]
            .config_list[kind]
            .deserialize_from_dict(dict(params))
        )
        if target is None:
            return config.create(device=device)
        if kind == "kloss_fqe":
            return KLossFQE(target, config, device)
        # d3rlpy's FQE passes scaled observations to its
        # policy, whose scalers it must share.
        scalers = {
            name: getattr(target.config, name)
            for name in ("observation_scaler", "action_scaler")
        }
        for name in scalers:
            if getattr(config, name) is not None:
                raise ConfigError(
                    f"algo.params.{name} is set, but fqe scales as its policy does;"
                    " leave it out or use kloss_fqe"
                )
        if target.get_action_type() == ActionSpace.DISCRETE:
            fqe = DiscreteFQE
        else:
            fqe = FQE
        return fqe(target, dataclasses.replace(config, **scalers), device=device)


def build_networks(
    algo: QLearningAlgoBase, buffer: ColumnarReplayBuffer, kind: str
) -> None:
    """Fit the scalers to the log and create the networks.

    buffer: the log. kind: the algorithm's name, for messages. Raises ConfigError if the
    algorithm or its scalers do not fit the log.
    """
    log = buffer.transitions
    wanted = algo.get_action_type()
    shape = log.observation_shape
    is_discrete = isinstance(log.action_space, Discrete)
    logged = ActionSpace.CONTINUOUS
    if is_discrete:
        logged = ActionSpace.DISCRETE
    if wanted not in (logged, ActionSpace.BOTH):
        raise ConfigError(
            f"{kind} is for {wanted.name.lower()} actions, the log has"
            f" {log.action_space}; choose an algorithm such as {_SUCH_AS[is_discrete]}"
        )
    with _making(kind, f"cannot be made for observations of shape {shape}"):
        fit_scalers(algo, buffer)
        algo.create_impl(shape, buffer.dataset_info.action_size)


def fit_scalers(algo: QLearningAlgoBase, buffer: ColumnarReplayBuffer) -> None:
    """Fit an algorithm's unfitted scalers to the log, in place.

    The result equals d3rlpy's. Raises ConfigError if a scaler would divide by zero, or
    needs episodes and the log has none.
    """
    log = buffer.transitions
    columns = {
        "observation": log.observations,
        "action": log.actions,
        "reward": log.rewards,
    }
    for name, column in columns.items():
        scaler = getattr(algo, f"{name}_scaler")
        if scaler is None:
            continue
        if not scaler.built:
            _fit_scaler(scaler, buffer, name, column)
        _check_scaler(scaler, name, column)


def _fit_scaler(
    scaler: Scaler, buffer: ColumnarReplayBuffer, name: str, column: np.ndarray
) -> None:
    """Fit a scaler to a column of the log: observations, actions or rewards.

    name: "observation", "action" or "reward". Raises ConfigError if the scaler needs
    episodes and the log has none.
    """
    log = buffer.transitions
    statistics = None
    if isinstance(buffer, LazyReplayBuffer):
        statistics = buffer.statistics
    kind = scaler.get_type()
    if kind in _EXTENTS:
        if statistics is None:
            of_column = ColumnStatistics.of(column)
        else:
            of_column = getattr(statistics, f"{name}s")
        for attribute, statistic in _EXTENTS[kind].items():
            value = getattr(of_column, statistic)
            if not np.ndim(value):
                value = float(value)
            setattr(scaler, attribute, value)
    elif kind == "return":
        if not log.has_episodes:
            raise ConfigError(
                "algo.params.reward_scaler 'return' needs episodes, the log has none;"
                " choose another"
            )
        extremes = statistics and statistics.returns
        if not extremes:
            extremes = (float(log.returns().min()), float(log.returns().max()))
        scaler.return_min, scaler.return_max = extremes
    else:
        scaler.fit_with_transition_picker(buffer.episodes, buffer.transition_picker)


def _check_scaler(scaler: Scaler, name: str, column: np.ndarray) -> None:
    """Raise ConfigError if a scaler is for other columns, or divides by zero."""
    kind = scaler.get_type()
    option = f"algo.params.{name}_scaler"
    first = np.asarray(column[:_ROWS_CHECKED], dtype=np.float32)
    with np.errstate(all="ignore"), contextlib.suppress(ZeroDivisionError):
        try:
            if np.isfinite(scaler.transform_numpy(first)).all():
                return
        except (AssertionError, ValueError):
            raise ConfigError(
                f"{option} '{kind}' is for other {name}s than the log's, of shape"
                f" {first.shape[1:]}; --set {option}={kind} fits it to the log"
            ) from None
    raise ConfigError(
        f"{option} '{kind}' gives {name}s that are not finite (does a column never"
        " change?); leave it out or choose another"
    )


def actions_out_of_reach(algo: QLearningAlgoBase, buffer: ColumnarReplayBuffer) -> bool:
    """Whether unscaled continuous actions leave [−1, 1], the range of d3rlpy's
    policies.
    """
    log = buffer.transitions
    if isinstance(log.action_space, Discrete) or algo.action_scaler is not None:
        return False
    extremes = log.actions.min(), log.actions.max()
    if isinstance(buffer, LazyReplayBuffer):
        extremes = buffer.statistics.actions.minimum, buffer.statistics.actions.maximum
    return bool(np.abs(extremes).max() > 1.0 + 1e-6)


class LogEvaluator:
    """One of d3rlpy's evaluators, by its type in a config, on its own log.

    options: `return_threshold` of soft_opc. Raises ConfigError if it does not apply to
    the log.
    """

    def __init__(
        self, kind: str, log: Transitions, name: str, **options: float
    ) -> None:
        self._name = f"evaluators.{name}"
        other: type | tuple[()] = ()
        if "continuous_action" in kind:
            other = Discrete
        elif "discrete_action" in kind:
            other = Continuous
        if isinstance(log.action_space, other):
            raise ConfigError(
                f"{self._name}: {kind} is for other actions than {log.action_space};"
                " leave it out"
            )
        if kind == "soft_opc" and not log.has_episodes:
            raise ConfigError(
                f"{self._name}: soft_opc needs episodes, the log has none; leave it out"
            )
        self._evaluator = _EVALUATORS[kind](**options)
        is_of_starts = kind == "initial_value" and log.has_episodes
        if is_of_starts:
            self._log = log.select(log.episode_starts)
        else:
            self._log = log

    def __call__(
        self, algo: QLearningAlgoBase, dataset: ReplayBufferBase | None = None
    ) -> float:
        """Compute the metric on the evaluator's log; ``dataset``, which d3rlpy gives, is
        not used.

        Raises ConfigError if the algorithm does not define it.
        """
        return self._measure(algo, self._log)

    def try_out(self, algo: QLearningAlgoBase) -> None:
        """Evaluate once before training, to raise a ConfigError now and not after the
        first epoch.
        """
        self._measure(algo, self._log.select(np.arange(min(2, len(self._log)))))

    def _measure(self, algo: QLearningAlgoBase, log: Transitions) -> float:
        with own_randomness(0), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the mean of no episode is nan
            try:
                return float(self._evaluator(algo, ColumnarReplayBuffer(log, 0)))
            except NotImplementedError as error:
                reason = (
                    " ".join(str(error).split())
                    or f"{type(algo).__name__} has no such number"
                )
                raise ConfigError(f"{self._name}: {reason}; leave it out") from None


def random_state() -> dict[str, Any]:
    """States of the global random generators, for a checkpoint."""
    cuda = []
    if torch.cuda.is_initialized():
        cuda = torch.cuda.get_rng_state_all()
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "numpy": json.dumps(np.random.get_state(), default=np.ndarray.tolist),  # noqa: NPY002  (d3rlpy's)
        "python": json.dumps(random.getstate()),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set the global random generators to states of `random_state`."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    np.random.set_state(json.loads(state["numpy"]))  # noqa: NPY002
    version, internal, gauss = json.loads(state["python"])
    random.setstate((version, tuple(internal), gauss))


@contextlib.contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """Seed the global random generators inside the context and restore them
    afterwards.
    """
    before = random_state()
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    try:
        yield
    finally:
        set_random_state(before)


class RunLogger(FileAdapter):
    """Logger of params.json and a CSV per metric, for a run that calls `fit` once per
    epoch.

    Epochs and steps continue those ``before`` this call; a resumed run appends to its
    files. gradients: also log the norm of every gradient.
    """

    def __init__(
        self,
        algo: QLearningAlgoBase,
        folder: Path,
        gradients: bool,
        before: tuple[int, int],
    ) -> None:
        super().__init__(algo, str(folder))
        self._gradients = gradients
        self._epochs, self._steps = before

    def create(
        self, algo: QLearningAlgoBase, experiment_name: str, n_steps_per_epoch: int
    ) -> RunLogger:
        """Return this logger: `fit` expects a factory, whose arguments are not
        needed."""
        return self

    def write_params(self, params: dict[str, Any]) -> None:
        """Write params.json atomically."""
        text = json.dumps(params, default=default_json_encoder, indent=2)
        write_text(Path(self.logdir, "params.json"), text)

    def write_metric(self, epoch: int, step: int, name: str, value: float) -> None:
        """Append a line to the metric's file; ``epoch`` and ``step`` count from the
        beginning of this call of `fit`.
        """
        super().write_metric(
            self._epochs + epoch, self._steps + step, name, float(value)
        )

    def watch_model(self, epoch: int, step: int) -> None:
        """Log the norm of every gradient; existing files keep their header."""
        if self._gradients:
            self._is_model_watched = any(Path(self.logdir).glob("*_grad.csv"))
            super().watch_model(self._epochs + epoch, self._steps + step)
