"""Any d3rlpy Q-learning algorithm, stock or ours, from its type and options, made for a log.

d3rlpy's config dataclasses are taken as a tree of plain values: defaults filled in, names and values checked.
d3rlpy itself ignores unknown keys, and fails without a word where a nested factory is left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from d3rlpy import serializable_config
from d3rlpy.algos.utility import build_scalers_with_transition_picker
from d3rlpy.base import LearnableConfig
from d3rlpy.constants import ActionSpace
from d3rlpy.ope import FQE, DiscreteFQE
from d3rlpy.serializable_config import CONFIG_STORAGE, ConfigMetadata

from koffline.algos.fqe import DiscreteKLossFQE, KLossFQE
from koffline.algos.model_files import device_name, load
from koffline.algos.options import checked
from koffline.algos.paths import PathReplayBuffer
from koffline.algos.trust_pcl import TrustPCL
from koffline.data.replay import ColumnarReplayBuffer, LazyReplayBuffer
from koffline.data.statistics import ColumnStatistics
from koffline.data.transitions import Discrete, Transitions
from koffline.errors import ConfigError, KofflineError, nearest_name
from koffline.policies.base import refuse
from koffline.policies.files import HISTORIES, RANDOM

_NOT_TRAINED = {
    **dict.fromkeys(HISTORIES, "it acts on histories; choose one whose policy takes an observation"),
    **dict.fromkeys(RANDOM, "it has nothing to train"),
}
EVALUATORS = ("fqe", "kloss_fqe")  # types that evaluate a given policy
_SUCH_AS = {True: "discrete_cql or kloss_discrete_cql", False: "cql, iql or kloss_sac"}  # key: is discrete
_NONE = {"type": "none", "params": {}}  # an omitted factory, as d3rlpy writes it
_EXTENTS = {
    "standard": {"mean": "mean", "std": "deviation"},
    "min_max": {"minimum": "minimum", "maximum": "maximum"},
}
_ROWS_CHECKED = 1000


def algorithm_types() -> tuple[str, ...]:
    """Types that can be trained on a log, in alphabetical order."""
    return tuple(sorted(set(CONFIG_STORAGE[LearnableConfig].config_list) - set(_NOT_TRAINED)))


def resolve_params(kind: Any, params: Mapping[str, Any]) -> dict[str, Any]:
    """All options of an algorithm as plain values. Raises ConfigError naming the nearest valid name."""
    known = algorithm_types()
    wrong = {
        f"algo.type is '{kind}': {_NOT_TRAINED.get(str(kind))}": str(kind) in _NOT_TRAINED,
        f"algo.type is {kind!r}; {nearest_name(str(kind), known)}": kind not in known,
    }
    refuse(wrong, kind=ConfigError)
    return _filled(CONFIG_STORAGE[LearnableConfig].config_list[kind], params, "algo.params")


class _Slot(NamedTuple):
    """A field of a config: a plain value, an array of numbers, or a factory from a registry.

    default: a plain value, dataclasses.MISSING where the field must be given.
    """

    default: Any
    hint: Any
    registry: ConfigMetadata | None
    is_array: bool


@functools.cache
def _slots_of(config_class: type) -> dict[str, _Slot]:
    """The fields of a config class that a file may set, by name."""
    hints = typing.get_type_hints(config_class)
    registries = {id(metadata.encoder): metadata for metadata in CONFIG_STORAGE.values()}
    slots = {}
    for field in dataclasses.fields(config_class):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        encoder = field.metadata.get("dataclasses_json", {}).get("encoder")
        registry, is_array = registries.get(id(encoder)), encoder is serializable_config._numpy_encoder
        if registry is not None:
            default = encoder(default)
        if encoder is None or is_array or registry is not None:
            slots[field.name] = _Slot(default, hints[field.name], registry, is_array)
    return slots


def _filled(
    config_class: type, given: Mapping[str, Any], where: str, base: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """All fields of a config as plain values; `given` overrides `base`, or the defaults without a `base`.

    where: the path of the config in the user's file, for messages. Raises ConfigError for an unknown key or
    type at any depth (with the nearest valid one), a missing field and a value of the wrong kind.
    """
    slots, filled = _slots_of(config_class), {}
    for key in given:
        if key not in slots:
            raise ConfigError(f"{where}.{key} is unknown; {nearest_name(str(key), slots)}")
    for name, slot in slots.items():
        place, value = f"{where}.{name}", slot.default if base is None else base[name]
        if slot.registry is not None:
            filled[name] = _factory(slot.registry, given.get(name, {}), value, slot.default == _NONE, place)
            continue
        value = given.get(name, value)
        if value is dataclasses.MISSING:
            raise ConfigError(f"{place} is missing; it has no default, give a value")
        filled[name] = _numbers(value, place) if slot.is_array else checked(name, value, place, slot.hint)
    return filled


def _factory(
    registry: ConfigMetadata, value: Any, default: dict[str, Any], may_be_none: bool, where: str
) -> dict[str, Any]:
    value = {"type": value or "none"} if value is None or isinstance(value, str) else value
    if not isinstance(value, Mapping) or not isinstance(value.get("params") or {}, Mapping):
        raise ConfigError(f"{where} is {value!r}; write it as {{type: …, params: {{…}}}}")
    if other := value.keys() - {"type", "params"}:
        raise ConfigError(
            f"{where}.{min(other)} is unknown; it has 'type' and 'params', options go into params"
        )
    kind, params = value.get("type", default["type"]), value.get("params") or {}
    known = {name: each for name, each in registry.config_list.items() if name != "tuple"}
    if may_be_none and kind in (None, "none") and not params:
        return {**_NONE, "params": {}}
    if not isinstance(kind, str) or kind not in known:
        names = [*known, "none"] if may_be_none else known
        raise ConfigError(f"{where}.type is {kind!r}; {nearest_name(str(kind), names)}")
    laid_over = default["params"] if kind == default["type"] else None
    return {"type": kind, "params": _filled(known[kind], params, f"{where}.params", laid_over)}


def _numbers(value: Any, where: str) -> Any:
    with contextlib.suppress(TypeError, ValueError):
        if value is None or np.isfinite(array := np.asarray(value, dtype=np.float64)).all():
            return None if value is None else array.tolist()
    raise ConfigError(f"{where} is {value!r}; give a list of numbers")


def make_algorithm(
    kind: str, params: Mapping[str, Any], device: str = "cpu", policy: str | Path | None = None
) -> Any:
    """Make an algorithm from resolved options; its networks are not built yet.

    device: cpu, cuda or cuda:N. policy: file of the algorithm that fqe and kloss_fqe evaluate.
    Raises ConfigError.
    """
    device = device_name(device)
    wrong = {
        f"algo.policy is for {' and '.join(EVALUATORS)}, not for {kind}; leave it out": (
            kind not in EVALUATORS and policy is not None
        ),
        f"{kind} evaluates a policy and none is given; name its .d3 file as algo.policy": (
            kind in EVALUATORS and policy is None
        ),
    }
    refuse(wrong, kind=ConfigError)
    target = None if policy is None else load(policy, device=device)
    with _making(kind):
        config = CONFIG_STORAGE[LearnableConfig].config_list[kind].deserialize_from_dict(dict(params))
        if target is None:
            return config.create(device=device)
        is_discrete = target.get_action_type() == ActionSpace.DISCRETE
        if kind == "kloss_fqe":
            return (DiscreteKLossFQE if is_discrete else KLossFQE)(target, config, device=device)
        return (DiscreteFQE if is_discrete else FQE)(target, _with_scalers_of(target, config), device=device)


def _with_scalers_of(target: Any, config: Any) -> Any:
    """The config of d3rlpy's FQE with the scalers of its policy, to which it passes scaled observations.

    Raises ConfigError if the config sets scalers of its own.
    """
    names = ("observation_scaler", "action_scaler")
    what = "is set, but fqe scales as its policy does; leave it out or use kloss_fqe"
    wrong = {f"algo.params.{name} {what}": getattr(config, name) is not None for name in names}
    refuse(wrong, kind=ConfigError)
    return dataclasses.replace(config, **{name: getattr(target.config, name) for name in names})


def check_actions(algo: Any, log: Transitions, kind: str) -> None:
    """Raise ConfigError where the algorithm is for the other kind of actions."""
    is_discrete, wanted = isinstance(log.action_space, Discrete), algo.get_action_type()
    if wanted not in (ActionSpace.DISCRETE if is_discrete else ActionSpace.CONTINUOUS, ActionSpace.BOTH):
        what = f"{kind} is for {wanted.name.lower()} actions, the log has {log.action_space}"
        raise ConfigError(f"{what}; choose an algorithm such as {_SUCH_AS[is_discrete]}")


def build_networks(algo: Any, buffer: ColumnarReplayBuffer, kind: str) -> None:
    """Fit the scalers on the log and create the networks. Raises ConfigError if they do not fit it."""
    shape = buffer.transitions.observation_shape
    with _making(kind, f" for observations of shape {shape}"):
        fit_scalers(algo, buffer)
        algo.create_impl(shape, buffer.dataset_info.action_size)


def fit_scalers(algo: Any, buffer: ColumnarReplayBuffer) -> None:
    """Fit the unfitted scalers of an algorithm on the log, in place.

    The result equals d3rlpy's. Raises ConfigError if a scaler would divide by zero or needs episodes that
    the log does not have.
    """
    log = buffer.transitions
    columns = {"observation": log.observations, "action": log.actions, "reward": log.rewards}
    lazy = buffer.statistics if isinstance(buffer, LazyReplayBuffer) else None
    for name, column in columns.items():
        scaler = getattr(algo, f"{name}_scaler")
        if scaler is not None and not scaler.built:
            statistics = ColumnStatistics.of(column) if lazy is None else getattr(lazy, f"{name}s")
            for own, theirs in _EXTENTS.get(scaler.get_type(), {}).items():
                value = getattr(statistics, theirs)
                setattr(scaler, own, value if np.ndim(value) else float(value))
            if scaler.get_type() == "return":
                what = "algo.params.reward_scaler 'return' needs episodes, the log has none"
                refuse({f"{what}; choose another": not log.has_episodes}, kind=ConfigError)
                extremes = (lazy and lazy.returns) or (float(log.returns().min()), float(log.returns().max()))
                scaler.return_min, scaler.return_max = extremes
    build_scalers_with_transition_picker(algo, buffer)  # scalers of other kinds
    for name, column in columns.items():
        if (scaler := getattr(algo, f"{name}_scaler")) is None:
            continue
        with np.errstate(all="ignore"), contextlib.suppress(ZeroDivisionError):
            if np.isfinite(
                scaler.transform_numpy(np.asarray(column[:_ROWS_CHECKED], dtype=np.float32))
            ).all():
                continue
        what = f"algo.params.{name}_scaler '{scaler.get_type()}' gives {name}s that are not finite"
        raise ConfigError(f"{what} (does a column never change?); leave it out or choose another")


def make_buffer(algo: Any, log: Transitions, generator: np.random.Generator) -> ColumnarReplayBuffer:
    """The log as the algorithm draws from it: rows, or paths for Trust-PCL. Raises DataError."""
    if isinstance(algo, TrustPCL) and algo.config.path_length > 1:
        return PathReplayBuffer(log, algo.config.path_length, generator)
    return ColumnarReplayBuffer(log, generator)


def check_single_rows(algo: Any, kind: str) -> None:
    """Raise ConfigError if the algorithm needs more than single rows, all that a log on disk provides."""
    has_paths = isinstance(algo, TrustPCL) and algo.config.path_length > 1
    if has_paths or algo.need_returns_to_go:
        needed = "paths (path_length above 1)" if has_paths else "returns to the end of an episode"
        raise ConfigError(f"{kind} learns from {needed}, this log stays on disk; load it (data.lazy: false)")


def actions_out_of_reach(algo: Any, buffer: ColumnarReplayBuffer) -> bool:
    """Whether unscaled continuous actions leave [−1, 1], the range of d3rlpy's policies."""
    log = buffer.transitions
    if isinstance(log.action_space, Discrete) or algo.action_scaler is not None:
        return False
    extremes = log.actions.min(), log.actions.max()
    if isinstance(buffer, LazyReplayBuffer):
        extremes = buffer.statistics.actions.minimum, buffer.statistics.actions.maximum
    return bool(np.abs(extremes).max() > 1.0 + 1e-6)


@contextlib.contextmanager
def _making(kind: str, purpose: str = "") -> Iterator[None]:
    """Turn any error of a foreign constructor into a ConfigError of one line."""
    try:
        yield
    except KofflineError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or "an encoder or a scaler is for other observations or actions"
        raise ConfigError(f"{kind} cannot be made{purpose}: {reason}; check algo.params") from error
