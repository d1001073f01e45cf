"""Any d3rlpy Q-learning algorithm, stock or ours, from its type and options, made for a log."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from d3rlpy.algos.utility import build_scalers_with_transition_picker
from d3rlpy.base import LearnableConfig
from d3rlpy.constants import ActionSpace
from d3rlpy.ope import FQE, DiscreteFQE
from d3rlpy.preprocessing import (
    MinMaxActionScaler,
    MinMaxObservationScaler,
    MinMaxRewardScaler,
    ReturnBasedRewardScaler,
    StandardObservationScaler,
    StandardRewardScaler,
)
from d3rlpy.serializable_config import CONFIG_STORAGE

from koffline.algos.config_fields import build, fill_in
from koffline.algos.fqe import DiscreteKLossFQE, KLossFQE
from koffline.algos.loading import device_name, load
from koffline.algos.options import AT_LEAST_1, Rule, rule_of
from koffline.algos.paths import PathReplayBuffer
from koffline.algos.trust_pcl import TrustPCL
from koffline.data.replay import ColumnarReplayBuffer, LazyReplayBuffer
from koffline.data.statistics import ColumnStatistics
from koffline.data.transitions import Discrete, Transitions
from koffline.errors import ConfigError, KofflineError, nearest_name

_SEQUENCES = "it acts on histories; choose an algorithm whose policy is a function of the observation"
_NOT_TRAINED = {
    "decision_transformer": _SEQUENCES,
    "discrete_decision_transformer": _SEQUENCES,
    "tacr": _SEQUENCES,
    "random_policy": "it has nothing to train",
    "discrete_random_policy": "it has nothing to train",
}
# Where d3rlpy's own algorithms allow more than ours, or have options that ours have not.
_OF_STOCK = {
    "batch_size": AT_LEAST_1,
    "target_update_interval": AT_LEAST_1,
    "tau": Rule(lambda x: 0.0 <= x <= 1.0, "give a rate in [0, 1]"),
}
EVALUATORS = ("fqe", "kloss_fqe")  # of a policy that is given
_ROWS_CHECKED = 1000


def algorithm_types() -> tuple[str, ...]:
    """Types that can be trained on a log, in alphabetical order."""
    return tuple(sorted(set(CONFIG_STORAGE[LearnableConfig].config_list) - set(_NOT_TRAINED)))


def resolve_params(kind: Any, params: Mapping[str, Any], where: str = "algo") -> dict[str, Any]:
    """All options of an algorithm as plain values. Raises ConfigError naming the nearest valid name."""
    if kind in _NOT_TRAINED:
        raise ConfigError(f"{where}.type is '{kind}': {_NOT_TRAINED[kind]}")
    known = algorithm_types()
    if not isinstance(kind, str) or kind not in known:
        raise ConfigError(f"{where}.type is {kind!r}; {nearest_name(str(kind), known)}")
    if kind in EVALUATORS and "policy" in params:
        raise ConfigError(f"{where}.params.policy is unknown; name the policy's file as {where}.policy")
    filled = fill_in(CONFIG_STORAGE[LearnableConfig].config_list[kind], params, f"{where}.params")
    _check_ranges(filled, f"{where}.params")
    return filled


def make_algorithm(
    kind: str, params: Mapping[str, Any], device: str = "cpu", policy: str | Path | None = None
) -> Any:
    """The algorithm of resolved options, without networks yet.

    device: cpu, cuda or cuda:N. policy: file of the algorithm that fqe and kloss_fqe evaluate.
    Raises ConfigError.
    """
    device = device_name(device)
    config = build(CONFIG_STORAGE[LearnableConfig].config_list[kind], copy.deepcopy(dict(params)))
    if kind not in EVALUATORS:
        if policy is not None:
            raise ConfigError(f"algo.policy is for {' and '.join(EVALUATORS)}, not for {kind}; leave it out")
        return _created(lambda: config.create(device=device), kind)
    if policy is None:
        raise ConfigError(f"{kind} evaluates a policy and none is given; name its .d3 file as algo.policy")
    target = load(policy, device=device)
    is_discrete = target.get_action_type() == ActionSpace.DISCRETE
    if kind == "kloss_fqe":
        made = DiscreteKLossFQE if is_discrete else KLossFQE
    else:
        config = _with_scalers_of(target, config)
        made = DiscreteFQE if is_discrete else FQE
    return _created(lambda: made(target, config, device=device), kind)


def check_actions(algo: Any, log: Transitions, kind: str) -> None:
    """Raise ConfigError where the algorithm is for the other kind of actions."""
    found = ActionSpace.DISCRETE if isinstance(log.action_space, Discrete) else ActionSpace.CONTINUOUS
    wanted = algo.get_action_type()
    if wanted in (found, ActionSpace.BOTH):
        return
    other = _counterpart(kind)
    example = f", such as {other}" if other else ""
    raise ConfigError(
        f"{kind} is for {wanted.name.lower()} actions, the log has {log.action_space}; "
        f"choose an algorithm for {found.name.lower()} actions{example}"
    )


def build_networks(algo: Any, buffer: ColumnarReplayBuffer, kind: str) -> None:
    """Fit the scalers on the log, create the networks. Raises ConfigError where they do not fit it."""
    log = buffer.transitions
    size = buffer.dataset_info.action_size
    _created(lambda: fit_scalers(algo, buffer), kind, log)
    _created(lambda: algo.create_impl(log.observation_shape, size), kind, log)


def fit_scalers(algo: Any, buffer: ColumnarReplayBuffer) -> None:
    """Fit the scalers of an algorithm that have not been, on the log, in place.

    The numbers are those of d3rlpy's own way. Raises ConfigError where a scaler divides by nothing or needs
    episodes that the log does not have.
    """
    log = buffer.transitions
    columns = {"observation": log.observations, "action": log.actions, "reward": log.rewards}
    for name, column in columns.items():
        scaler = getattr(algo, f"{name}_scaler")
        if scaler is not None and not scaler.built:
            lazy = buffer.statistics if isinstance(buffer, LazyReplayBuffer) else None
            statistics = ColumnStatistics.of(column) if lazy is None else getattr(lazy, f"{name}s")
            _fit(scaler, statistics, log, None if lazy is None else lazy.returns)
    build_scalers_with_transition_picker(algo, buffer)  # scalers of other kinds
    for name, column in columns.items():
        _check(getattr(algo, f"{name}_scaler"), name, column)


def _fit(
    scaler: Any, column: ColumnStatistics, log: Transitions, returns: tuple[float, float] | None
) -> None:
    """The kinds that are known here. returns: the extremes of a log on disk."""
    kind = type(scaler)
    if kind is StandardObservationScaler:
        scaler.mean, scaler.std = column.mean, column.deviation
    elif kind is StandardRewardScaler:
        scaler.mean, scaler.std = float(column.mean), float(column.deviation)
    elif kind in (MinMaxObservationScaler, MinMaxActionScaler):
        scaler.minimum, scaler.maximum = column.minimum, column.maximum
    elif kind is MinMaxRewardScaler:
        scaler.minimum, scaler.maximum = float(column.minimum), float(column.maximum)
    elif kind is ReturnBasedRewardScaler:
        if not log.has_episodes:
            raise ConfigError(
                "algo.params.reward_scaler 'return' needs episodes, the log has none; choose another"
            )
        if returns is None:
            found = log.returns()
            returns = float(found.min()), float(found.max())
        scaler.return_min, scaler.return_max = returns


def _check(scaler: Any, name: str, column: np.ndarray) -> None:
    """Columns that never change have no extent to divide by."""
    if scaler is None:
        return
    with np.errstate(all="ignore"):
        try:
            scaled = scaler.transform_numpy(np.asarray(column[:_ROWS_CHECKED], dtype=np.float32))
        except ZeroDivisionError:
            scaled = np.full(1, np.nan)
    if not np.isfinite(scaled).all():
        raise ConfigError(
            f"algo.params.{name}_scaler '{scaler.get_type()}' gives {name}s that are not finite (does a "
            "column never change?); leave it out or choose another"
        )


def make_buffer(algo: Any, log: Transitions, generator: np.random.Generator) -> ColumnarReplayBuffer:
    """The log as the algorithm draws from it: rows, or paths for Trust-PCL. Raises DataError."""
    if isinstance(algo, TrustPCL) and algo.config.path_length > 1:
        return PathReplayBuffer(log, algo.config.path_length, generator)
    return ColumnarReplayBuffer(log, generator)


def check_single_rows(algo: Any, kind: str) -> None:
    """Raise ConfigError where the algorithm learns from more than single rows, which a log on disk gives."""
    lacking = None
    if isinstance(algo, TrustPCL) and algo.config.path_length > 1:
        lacking = "paths of several steps (algo.params.path_length is above 1)"
    elif algo.need_returns_to_go:
        lacking = "returns to the end of an episode"
    if lacking is not None:
        raise ConfigError(f"{kind} learns from {lacking}, this log stays on disk; load it (data.lazy: false)")


def actions_out_of_reach(algo: Any, buffer: ColumnarReplayBuffer) -> bool:
    """Whether continuous actions leave [−1, 1], where d3rlpy's policies act, and no scaler brings them in."""
    log = buffer.transitions
    if isinstance(log.action_space, Discrete) or algo.action_scaler is not None:
        return False
    if isinstance(buffer, LazyReplayBuffer):
        found = buffer.statistics.actions
        return bool(np.maximum(-found.minimum, found.maximum).max() > 1.0 + 1e-6)
    return bool(np.abs(log.actions).max() > 1.0 + 1e-6)


def _created(make: Any, kind: str, log: Transitions | None = None) -> Any:
    """Errors of other people's constructors in one line."""
    try:
        return make()
    except KofflineError:
        raise
    except (
        AssertionError,
        ImportError,
        IndexError,
        NotImplementedError,
        RuntimeError,
        StopIteration,
        TypeError,
        ValueError,
    ) as error:
        reason = " ".join(str(error).split()) or "an encoder or a scaler is for other observations or actions"
        shape = "" if log is None else f" for observations of shape {log.observation_shape}"
        raise ConfigError(f"{kind} cannot be made{shape}: {reason}; check algo.params") from error


def _check_ranges(params: Mapping[str, Any], where: str) -> None:
    for name, value in params.items():
        rule = _OF_STOCK.get(name) or rule_of(name)
        if isinstance(value, Mapping):
            _check_ranges(value.get("params") or {}, f"{where}.{name}.params")
        elif name == "hidden_units" and not (value and all(units >= 1 for units in value)):
            raise ConfigError(f"{where}.{name} is {value!r}; give one positive number per layer")
        elif rule is not None and isinstance(value, (int, float)) and not rule.holds(value):
            raise ConfigError(f"{where}.{name} is {value!r}; {rule.remedy}")


def _with_scalers_of(target: Any, config: Any) -> Any:
    """d3rlpy's FQE hands what it has scaled to the policy, so that it must scale as the policy does."""
    names = ("observation_scaler", "action_scaler")
    for name in names:
        if getattr(config, name) is not None:
            raise ConfigError(
                f"algo.params.{name} is set, but fqe scales as its policy does; leave it out or use kloss_fqe"
            )
    return dataclasses.replace(config, **{name: getattr(target.config, name) for name in names})


def _counterpart(kind: str) -> str | None:
    pairs = {
        "dqn": "sac",
        "double_dqn": "td3",
        "nfq": "ddpg",
        "kloss_dqn": "kloss_sac",
        "kloss_td3_plus_bc": "kloss_discrete_cql",
        "kloss_iql": "kloss_discrete_cql",
        "td3_plus_bc": "discrete_cql",
        "iql": "discrete_cql",
        "td3": "double_dqn",
        "ddpg": "dqn",
    }
    known = algorithm_types()
    inserted = kind.replace("kloss_", "kloss_discrete_") if kind.startswith("kloss_") else f"discrete_{kind}"
    for other in (kind.replace("discrete_", ""), inserted, pairs.get(kind, "")):
        if other != kind and other in known:
            return other
    return None
