"""Any d3rlpy Q-learning algorithm, stock or ours, from its type and options, made for a log."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from d3rlpy.algos.utility import build_scalers_with_transition_picker
from d3rlpy.base import LearnableConfig
from d3rlpy.constants import ActionSpace
from d3rlpy.ope import FQE, DiscreteFQE
from d3rlpy.serializable_config import CONFIG_STORAGE

from koffline.algos.config_fields import build, fill_in
from koffline.algos.fqe import DiscreteKLossFQE, KLossFQE
from koffline.algos.loading import device_name, load
from koffline.algos.options import rule_of
from koffline.algos.paths import PathReplayBuffer
from koffline.algos.trust_pcl import TrustPCL
from koffline.data.replay import ColumnarReplayBuffer, LazyReplayBuffer
from koffline.data.statistics import ColumnStatistics
from koffline.data.transitions import Discrete, Transitions
from koffline.errors import ConfigError, KofflineError, nearest_name

_HISTORIES = "it acts on histories; choose an algorithm whose policy is a function of the observation"
_NOTHING = "it has nothing to train"
_NOT_TRAINED = {
    **dict.fromkeys(("decision_transformer", "discrete_decision_transformer", "tacr"), _HISTORIES),
    **dict.fromkeys(("random_policy", "discrete_random_policy"), _NOTHING),
}
EVALUATORS = ("fqe", "kloss_fqe")  # of a policy that is given
_SUCH_AS = {
    ActionSpace.DISCRETE: "discrete_cql or kloss_discrete_cql",
    ActionSpace.CONTINUOUS: "cql, iql or kloss_sac",
}
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
    config = build(CONFIG_STORAGE[LearnableConfig].config_list[kind], params)
    if kind not in EVALUATORS:
        if policy is not None:
            raise ConfigError(f"algo.policy is for {' and '.join(EVALUATORS)}, not for {kind}; leave it out")
        with _making(kind):
            return config.create(device=device)
    if policy is None:
        raise ConfigError(f"{kind} evaluates a policy and none is given; name its .d3 file as algo.policy")
    target = load(policy, device=device)
    is_discrete = target.get_action_type() == ActionSpace.DISCRETE
    if kind == "kloss_fqe":
        made = DiscreteKLossFQE if is_discrete else KLossFQE
    else:
        config = _with_scalers_of(target, config)
        made = DiscreteFQE if is_discrete else FQE
    with _making(kind):
        return made(target, config, device=device)


def check_actions(algo: Any, log: Transitions, kind: str) -> None:
    """Raise ConfigError where the algorithm is for the other kind of actions."""
    found = ActionSpace.DISCRETE if isinstance(log.action_space, Discrete) else ActionSpace.CONTINUOUS
    wanted = algo.get_action_type()
    if wanted in (found, ActionSpace.BOTH):
        return
    raise ConfigError(
        f"{kind} is for {wanted.name.lower()} actions, the log has {log.action_space}; "
        f"choose an algorithm for {found.name.lower()} actions, such as {_SUCH_AS[found]}"
    )


def build_networks(algo: Any, buffer: ColumnarReplayBuffer, kind: str) -> None:
    """Fit the scalers on the log, create the networks. Raises ConfigError where they do not fit it."""
    shape = buffer.transitions.observation_shape
    with _making(kind, f" for observations of shape {shape}"):
        fit_scalers(algo, buffer)
        algo.create_impl(shape, buffer.dataset_info.action_size)


def fit_scalers(algo: Any, buffer: ColumnarReplayBuffer) -> None:
    """Fit the scalers of an algorithm that have not been, on the log, in place.

    The numbers are those of d3rlpy's own way. Raises ConfigError where a scaler divides by nothing or needs
    episodes that the log does not have.
    """
    log = buffer.transitions
    columns = {"observation": log.observations, "action": log.actions, "reward": log.rewards}
    lazy = buffer.statistics if isinstance(buffer, LazyReplayBuffer) else None
    for name, column in columns.items():
        scaler = getattr(algo, f"{name}_scaler")
        if scaler is not None and not scaler.built:
            statistics = ColumnStatistics.of(column) if lazy is None else getattr(lazy, f"{name}s")
            _fit(scaler, statistics, log, None if lazy is None else lazy.returns)
    build_scalers_with_transition_picker(algo, buffer)  # scalers of other kinds
    for name, column in columns.items():
        _check(getattr(algo, f"{name}_scaler"), name, column)


def _fit(
    scaler: Any, column: ColumnStatistics, log: Transitions, returns: tuple[float, float] | None
) -> None:
    """The kinds that are known here. returns: the extremes of a log on disk."""
    kind = scaler.get_type()
    numbers = {"standard": ("mean", "std"), "min_max": ("minimum", "maximum")}.get(kind, ())
    for name in numbers:
        value = getattr(column, {"std": "deviation"}.get(name, name))
        setattr(scaler, name, value if np.ndim(value) else float(value))
    if kind == "return":
        if not log.has_episodes:
            raise ConfigError(
                "algo.params.reward_scaler 'return' needs episodes, the log has none; choose another"
            )
        if returns is None:
            returns = float(log.returns().min()), float(log.returns().max())
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
    extremes = log.actions.min(), log.actions.max()
    if isinstance(buffer, LazyReplayBuffer):
        extremes = buffer.statistics.actions.minimum, buffer.statistics.actions.maximum
    return bool(np.abs(extremes).max() > 1.0 + 1e-6)


@contextlib.contextmanager
def _making(kind: str, purpose: str = "") -> Iterator[None]:
    """Errors of other people's constructors in one line."""
    try:
        yield
    except KofflineError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or "an encoder or a scaler is for other observations or actions"
        raise ConfigError(f"{kind} cannot be made{purpose}: {reason}; check algo.params") from error


def _check_ranges(params: Mapping[str, Any], where: str) -> None:
    for name, value in params.items():
        rule = rule_of(name, is_stock=True)
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
