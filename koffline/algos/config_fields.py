"""d3rlpy's config dataclasses as a tree of plain values: defaults filled in, names and values checked.

d3rlpy itself ignores unknown keys, and fails without a word where a nested factory is left out.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from d3rlpy import serializable_config
from d3rlpy.serializable_config import CONFIG_STORAGE, ConfigMetadata
from pydantic import TypeAdapter, ValidationError

from koffline.errors import ConfigError, nearest_name

_ACTIVATIONS = ("relu", "gelu", "tanh", "swish", "none", "geglu")
_NONE = {"type": "none", "params": {}}  # how d3rlpy writes a factory that is left out


class Slot(NamedTuple):
    """A field of a config: a plain value, numbers of an array, or a factory out of a registry.

    default: a plain value, dataclasses.MISSING where the field must be given.
    """

    default: Any
    hint: Any
    registry: ConfigMetadata | None
    is_array: bool


@functools.cache
def slots_of(config_class: type) -> dict[str, Slot]:
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
            slots[field.name] = Slot(default, hints[field.name], registry, is_array)
    return slots


def fill_in(
    config_class: type, given: Mapping[str, Any], where: str, base: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """All fields of a config as plain values, `given` laid over `base` or over the defaults.

    where: the path of the config in the user's file, for messages. Raises ConfigError for an unknown key or
    type at any depth (with the nearest valid one), a missing field and a value of the wrong kind.
    """
    slots, filled = slots_of(config_class), {}
    for key in given:
        if key not in slots:
            raise ConfigError(f"{where}.{key} is unknown; {nearest_name(str(key), slots)}")
    for name, slot in slots.items():
        place, default = f"{where}.{name}", slot.default if base is None else base[name]
        if slot.registry is not None:
            filled[name] = _factory(slot.registry, given.get(name, {}), default, slot.default == _NONE, place)
            continue
        value = given.get(name, default)
        if value is dataclasses.MISSING:
            raise ConfigError(f"{place} is missing; it has no default, give a value")
        filled[name] = _numbers(value, place) if slot.is_array else _checked(slot, value, name, place)
    return filled


def build(config_class: Any, values: Mapping[str, Any]) -> Any:
    """The config object of values that `fill_in` made. Raises ConfigError where d3rlpy refuses them."""
    try:
        return config_class.deserialize_from_dict(dict(values))
    except (AssertionError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{config_class.__name__} refuses its values: {reason}") from None


def _factory(
    registry: ConfigMetadata, value: Any, default: dict[str, Any], may_be_none: bool, where: str
) -> dict[str, Any]:
    if value is None or isinstance(value, str):
        value = {"type": value or "none"}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} is {value!r}; write it as {{type: …, params: {{…}}}}")
    for key in value:
        if key not in ("type", "params"):
            raise ConfigError(f"{where}.{key} is unknown; it has 'type' and 'params', options go into params")
    kind, params = value.get("type", default["type"]), value.get("params") or {}
    kind = "none" if kind is None else kind
    if not isinstance(params, Mapping):
        raise ConfigError(f"{where}.params is {params!r}; write it as lines of 'key: value'")
    if kind == "none" and may_be_none:
        if params:
            raise ConfigError(f"{where}.params is given without a type; name the type as well")
        return {"type": "none", "params": {}}
    if kind == "tuple":
        raise ConfigError(f"{where}.type is 'tuple'; logs have one array of observations; join the parts")
    known = {name: each for name, each in registry.config_list.items() if name != "tuple"}
    if not isinstance(kind, str) or kind not in known:
        names = [*known, "none"] if may_be_none else known
        raise ConfigError(f"{where}.type is {kind!r}; {nearest_name(str(kind), names)}")
    for key in params:
        owners = sorted(name for name, each in registry.config_list.items() if key in slots_of(each))
        if owners and kind not in owners:
            raise ConfigError(
                f"{where}.params.{key} is no option of the type '{kind}' but of {', '.join(owners)}; "
                f"set {where}.type as well"
            )
    laid_over = default["params"] if kind == default["type"] else None
    return {"type": kind, "params": fill_in(known[kind], params, f"{where}.params", laid_over)}


def _checked(slot: Slot, value: Any, name: str, where: str) -> Any:
    """The value, as YAML holds it, in the type that the field declares. Raises ConfigError."""
    if slot.hint is Any:
        try:  # YAML takes 1e-3 for text
            return float(value) if isinstance(value, str) else value
        except ValueError:
            return value
    if isinstance(value, bool) and "bool" not in str(slot.hint):
        raise ConfigError(f"{where} is {str(value).lower()}; a yes or no is no value here")
    try:
        checked = TypeAdapter(slot.hint).validate_python(value)
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise ConfigError(f"{where} is {value!r}: {reason[0].lower()}{reason[1:]}") from None
    if isinstance(checked, float) and not math.isfinite(checked):
        raise ConfigError(f"{where} is {checked}; give a finite number")
    if name == "activation" and checked not in _ACTIVATIONS:
        raise ConfigError(f"{where} is {checked!r}; {nearest_name(checked, _ACTIVATIONS)}")
    return list(checked) if isinstance(checked, (list, tuple)) else checked


def _numbers(value: Any, where: str) -> Any:
    if value is None:
        return None
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        array = np.full(1, np.nan)
    if not np.isfinite(array).all():
        raise ConfigError(f"{where} is {value!r}; give a list of numbers")
    return array.tolist()
