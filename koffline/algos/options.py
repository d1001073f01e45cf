"""Options of d3rlpy's and our config classes: all values checked, all defaults filled
in.

d3rlpy itself ignores unknown keys, and fails without a message if a nested factory is
left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import numpy as np
from d3rlpy import serializable_config
from d3rlpy.base import LearnableConfig
from d3rlpy.serializable_config import CONFIG_STORAGE, ConfigMetadata
from pydantic import AfterValidator, Field, ValidationError, create_model
from pydantic_core import PydanticCustomError

from koffline.config import Section, describe_error, read_section
from koffline.errors import ConfigError, listed, nearest_name
from koffline.kernels import KERNELS

Params = Mapping[str, Any]
_HISTORIES = ("decision_transformer", "discrete_decision_transformer", "tacr")
_NOT_TRAINED = {
    **dict.fromkeys(
        _HISTORIES, "it acts on histories; choose one whose policy takes an observation"
    ),
    **dict.fromkeys(
        ("random_policy", "discrete_random_policy"), "it has nothing to train"
    ),
}
_NONE = {"type": "none", "params": {}}  # an omitted factory, as d3rlpy writes it
_MEDIAN_RULE = re.compile(
    r"(?:(?P<factor>[0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*\*?\s*)?median"
)


def _number_or(
    is_word: Callable[[object], object], is_fit: Callable[[float], bool], remedy: str
) -> Any:
    """Type of a number, or of a word instead of it.

    is_word, is_fit: which words and which numbers are valid. remedy: what to give.
    """

    def check(value: Any) -> object:
        with contextlib.suppress(ValueError, TypeError):
            value = float(value)  # YAML reads 1e-3 as text
        if not is_word(value) and not (isinstance(value, float) and is_fit(value)):
            raise PydanticCustomError("number_or_word", remedy)
        return value

    return Annotated[Any, AfterValidator(check)]


def median_factor(bandwidth: object) -> float | None:
    """Multiple of the median in a rule such as "0.5 median"; None for anything else."""
    if not isinstance(bandwidth, str):
        return None
    rule = _MEDIAN_RULE.fullmatch(bandwidth.strip())
    if rule is None:
        return None
    return float(rule["factor"] or 1.0)


def _numbers(value: object) -> object:
    """A list of finite numbers, or None, as an option of a scaler."""
    if value is None:
        return None
    with contextlib.suppress(TypeError, ValueError):
        array = np.asarray(value, dtype=np.float64)
        if np.isfinite(array).all():
            return array.tolist()
    raise PydanticCustomError("numbers", "give a list of numbers")


def _kernel(name: str) -> str:
    if name not in KERNELS:
        remedy = (
            f"known are {listed(KERNELS)}; add one of your own to"
            " koffline.kernels.KERNELS"
        )
        raise PydanticCustomError("kernel", remedy)
    return name


_SHARE = Annotated[float, Field(ge=0.0, le=1.0)]
_NOT_NEGATIVE = Annotated[float, Field(ge=0.0)]
_COUNT = Annotated[int, Field(ge=1)]
_WHOLE = (
    "batch_size",
    "n_critics",
    "n_action_samples",
    "path_length",
    "update_actor_interval",
    "target_update_interval",
)
_NOT_NEGATIVE_ENDS = ("learning_rate", "_coef", "clip_adv")
_RULES: dict[str, Any] = {
    **dict.fromkeys(("gamma", "tau", "target_decay"), _SHARE),
    **dict.fromkeys(("temperature", "alpha", "conservative_weight"), _NOT_NEGATIVE),
    **dict.fromkeys(_WHOLE, _COUNT),
    "hidden_units": Annotated[list[_COUNT], Field(min_length=1)],
    "activation": Literal["relu", "gelu", "tanh", "swish", "none", "geglu"],
    "initial_temperature": Annotated[float, Field(gt=0.0)],
    "expectile": Annotated[float, Field(gt=0.0, lt=1.0)],
    "kernel": Annotated[str, AfterValidator(_kernel)],
    "bandwidth": _number_or(
        median_factor,
        lambda number: 0.0 < number < math.inf,
        "give a positive number or a multiple of the median distance, such as '0.5"
        " median'",
    ),
    "initial_value": _number_or(
        lambda word: word == "mean", math.isfinite, "give a number or 'mean'"
    ),
    "diag_weight": _SHARE | None,
    "memory": Annotated[float, Field(ge=0.0, lt=1.0)],
    "action_kernel": Literal["joint", "indicator", "none"],
    "backup": Literal["own", "min", "mean"],
    "critic": Literal["kloss", "fvi", "td0", "rg", "kloss_slow"],
}


def algorithm_types() -> tuple[str, ...]:
    """Types that can be trained on a log, in alphabetical order."""
    return tuple(
        sorted(set(CONFIG_STORAGE[LearnableConfig].config_list) - set(_NOT_TRAINED))
    )


def resolve_params(kind: object, params: Params) -> dict[str, Any]:
    """All options of an algorithm as plain values.

    Raises ConfigError naming the nearest valid name.
    """
    known = algorithm_types()
    if str(kind) in _NOT_TRAINED:
        raise ConfigError(f"algo.type is '{kind}': {_NOT_TRAINED.get(str(kind))}")
    if kind not in known:
        raise ConfigError(f"algo.type is {kind!r}; {nearest_name(str(kind), known)}")
    return _filled(
        CONFIG_STORAGE[LearnableConfig].config_list[kind], params, "algo.params"
    )


def check_values(config: LearnableConfig) -> None:
    """Raise ConfigError for the first invalid option of a config made in Python."""
    section, _ = _section_of(config.__class__)
    try:
        section.model_validate(
            {name: getattr(config, name) for name in section.model_fields}, strict=True
        )
    except ValidationError as error:
        raise describe_error(section, error) from None


@functools.cache
def _section_of(config_class: Any) -> tuple[type[Section], dict[str, ConfigMetadata]]:
    """The options of a config class that a file may set, and the registries of those
    that are factories.
    """
    hints = typing.get_type_hints(config_class)
    registries = {
        id(metadata.encoder): metadata for metadata in CONFIG_STORAGE.values()
    }
    options: dict[str, Any] = {}
    factories: dict[str, ConfigMetadata] = {}
    for field in dataclasses.fields(config_class):
        name = field.name
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        rule = hints[name]
        if name.endswith(_NOT_NEGATIVE_ENDS):
            rule = _NOT_NEGATIVE
        rule = _RULES.get(name, rule)
        encoder = field.metadata.get("dataclasses_json", {}).get("encoder")
        if id(encoder) in registries:
            factories[name] = registries[id(encoder)]
            rule = Any
            default = encoder(default)
        elif encoder is serializable_config._numpy_encoder:
            rule = Annotated[Any, AfterValidator(_numbers)]
        elif encoder is not None:
            continue
        if default is dataclasses.MISSING:
            default = ...
        options[name] = (rule, default)
    return create_model(config_class.__name__, __base__=Section, **options), factories


def _filled(
    config_class: Any,
    params: Params,
    where: str,
    base: Params | None = None,
) -> dict[str, Any]:
    """All fields of a config as plain values; `params` override `base`, or the defaults
    without a `base`.

    where: the path of the config in the user's file, for messages. Raises ConfigError
    for an unknown key or type at any depth (with the nearest valid one), a missing
    field and a value of the wrong kind.
    """
    section, factories = _section_of(config_class)
    values = {**(base or {}), **params}
    for name, registry in factories.items():
        default = section.model_fields[name].default
        may_be_none = default == _NONE
        if base is not None:
            default = base[name]
        values[name] = _factory(
            registry, params.get(name, {}), default, may_be_none, f"{where}.{name}"
        )
    return read_section(section, values, where).resolved()


def _factory(
    registry: ConfigMetadata,
    value: object,
    default: dict[str, Any],
    may_be_none: bool,
    where: str,
) -> dict[str, Any]:
    """A factory as its type and all its params; `value` overrides `default`.

    registry: the kinds that there are. value: what the user's file holds, a type alone
    or a mapping. where: as in `_filled`. Raises ConfigError.
    """
    if value is None or isinstance(value, str):
        value = {"type": value or "none"}
    if not isinstance(value, Mapping) or not isinstance(
        value.get("params") or {}, Mapping
    ):
        raise ConfigError(
            f"{where} is {value!r}; write it as {{type: …, params: {{…}}}}"
        )
    other = value.keys() - {"type", "params"}
    if other:
        raise ConfigError(
            f"{where}.{min(other)} is unknown; it has type and params, options go into"
            " params"
        )
    kind = value.get("type", default["type"])
    params = value.get("params") or {}
    known = dict(registry.config_list)
    known.pop("tuple", None)
    if may_be_none and kind in (None, "none") and not params:
        return {**_NONE, "params": {}}
    if not isinstance(kind, str) or kind not in known:
        names = list(known)
        if may_be_none:
            names.append("none")
        raise ConfigError(f"{where}.type is {kind!r}; {nearest_name(str(kind), names)}")
    base = None
    if kind == default["type"]:
        base = default["params"]
    filled = _filled(known[kind], params, f"{where}.params", base)
    if kind == "clip" and filled["low"] is filled["high"] is None:
        raise ConfigError(
            f"{where} clips at no bound; give params.low, params.high or both"
        )
    return {"type": kind, "params": filled}
