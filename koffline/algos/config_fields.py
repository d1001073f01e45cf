"""d3rlpy's config dataclasses as a tree of plain values: defaults filled in, names and values checked.

d3rlpy itself ignores unknown keys, and fails without a word where a nested factory is left out.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from d3rlpy import serializable_config
from d3rlpy.serializable_config import CONFIG_STORAGE, ConfigMetadata
from pydantic import TypeAdapter, ValidationError

from koffline.errors import ConfigError, nearest_name

_ACTIVATIONS = ("relu", "gelu", "tanh", "swish", "none", "geglu")
_NOT_HERE = {"tuple": "logs have one array of observations; join the parts into one"}


@dataclasses.dataclass(frozen=True)
class Slot:
    """A field of a config: a plain value, numbers of an array, or a factory out of a registry.

    default: dataclasses.MISSING where the field must be given.
    """

    name: str
    default: Any
    hint: Any
    registry: ConfigMetadata | None
    is_array: bool

    @property
    def may_be_none(self) -> bool:
        """Whether the factory may be left out ("none")."""
        return self.registry is not None and self.default is None


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
        registry = registries.get(id(encoder))
        is_array = encoder is serializable_config._numpy_encoder
        if encoder is None or is_array or registry is not None:
            slots[field.name] = Slot(field.name, default, hints[field.name], registry, is_array)
    return slots


def fill_in(
    config_class: type, given: Mapping[str, Any], where: str, base: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """All fields of a config as plain values, `given` laid over `base` or over the defaults.

    where: the path of the config in the user's file, for messages. Raises ConfigError for an unknown key or
    type at any depth (with the nearest valid one), a missing field and a value of the wrong kind.
    """
    slots = slots_of(config_class)
    for key in given:
        if key not in slots:
            raise ConfigError(f"{where}.{key} is unknown; {nearest_name(str(key), slots)}")
    return {
        name: _filled(slot, given.get(name, _Default), f"{where}.{name}", base)
        for name, slot in slots.items()
    }


def build(config_class: Any, values: Mapping[str, Any]) -> Any:
    """The config object of values that `fill_in` made. Raises ConfigError where d3rlpy refuses them."""
    slots = slots_of(config_class)
    try:
        return config_class(**{name: _built(slots[name], value) for name, value in values.items()})
    except (AssertionError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{config_class.__name__} refuses its values: {reason}") from None


class _Default:
    """Stands for a value that was not given."""


def _filled(slot: Slot, value: Any, where: str, base: Mapping[str, Any] | None) -> Any:
    if slot.registry is not None:
        return _filled_factory(slot, value, where, base)
    if value is _Default:
        if base is not None:
            return base[slot.name]
        if slot.default is dataclasses.MISSING:
            raise ConfigError(f"{where} is missing; it has no default, give a value")
        return _plain_default(slot, slot.default)
    if slot.is_array:
        return None if value is None else _numbers(value, where)
    return _plain(_checked(slot, value, where))


def _filled_factory(slot: Slot, value: Any, where: str, base: Mapping[str, Any] | None) -> dict[str, Any]:
    assert slot.registry is not None
    default = base[slot.name] if base is not None else _described(slot.default)
    if value is _Default:
        return default
    if value is None or isinstance(value, str):
        value = {"type": value or "none"}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} is {value!r}; write it as {{type: …, params: {{…}}}}")
    for key in value:
        if key not in ("type", "params"):
            raise ConfigError(f"{where}.{key} is unknown; it has 'type' and 'params', options go into params")
    kind = "none" if value.get("type", "") is None else value.get("type", default["type"])
    params = value.get("params") or {}
    if not isinstance(params, Mapping):
        raise ConfigError(f"{where}.params is {params!r}; write it as lines of 'key: value'")
    if kind == "none" and slot.may_be_none:
        if params:
            raise ConfigError(f"{where}.params is given without a type; name the type as well")
        return {"type": "none", "params": {}}
    chosen = _factory_class(slot, kind, where)
    _refuse_options_of_another_type(slot, kind, params, where)
    laid_over = default["params"] if kind == default["type"] else None
    return {"type": kind, "params": fill_in(chosen, params, f"{where}.params", laid_over)}


def _refuse_options_of_another_type(slot: Slot, kind: str, params: Mapping[str, Any], where: str) -> None:
    assert slot.registry is not None
    classes = slot.registry.config_list
    for key in params:
        owners = sorted(name for name, each in classes.items() if key in slots_of(each))
        if owners and kind not in owners:
            raise ConfigError(
                f"{where}.params.{key} is no option of the type '{kind}' but of {', '.join(owners)}; "
                f"set {where}.type as well"
            )


def _factory_class(slot: Slot, kind: Any, where: str) -> type:
    assert slot.registry is not None
    known = {name: each for name, each in slot.registry.config_list.items() if name not in _NOT_HERE}
    if kind in _NOT_HERE:
        raise ConfigError(f"{where}.type is '{kind}'; {_NOT_HERE[kind]}")
    if not isinstance(kind, str) or kind not in known:
        names = [*known, "none"] if slot.may_be_none else known
        raise ConfigError(f"{where}.type is {kind!r}; {nearest_name(str(kind), names)}")
    return known[kind]


def _described(factory: Any) -> dict[str, Any]:
    """A factory object as {type, params}."""
    if factory is None:
        return {"type": "none", "params": {}}
    params = {}
    for name, slot in slots_of(factory.__class__).items():
        value = getattr(factory, name)
        params[name] = _described(value) if slot.registry is not None else _plain_default(slot, value)
    return {"type": factory.get_type(), "params": params}


def _checked(slot: Slot, value: Any, where: str) -> Any:
    """The value in the type that the field declares. Raises ConfigError."""
    if slot.hint is Any:
        return _number_if_it_reads_as_one(value)
    if isinstance(value, bool) and "bool" not in str(slot.hint):
        raise ConfigError(f"{where} is {str(value).lower()}; a yes or no is no value here")
    try:
        checked = TypeAdapter(slot.hint).validate_python(value)
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        reason = reason[0].lower() + reason[1:]
        default = "" if slot.default is dataclasses.MISSING else f"; the default is {_plain(slot.default)}"
        raise ConfigError(f"{where} is {value!r}: {reason}{default}") from None
    if isinstance(checked, float) and not math.isfinite(checked):
        raise ConfigError(f"{where} is {checked}; give a finite number")
    if slot.name == "activation" and checked not in _ACTIVATIONS:
        raise ConfigError(f"{where} is {checked!r}; {nearest_name(checked, _ACTIVATIONS)}")
    return checked


def _number_if_it_reads_as_one(value: Any) -> Any:
    """YAML takes 1e-3 for text."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _numbers(value: Any, where: str) -> Any:
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        array = np.full(1, np.nan)
    if not np.isfinite(array).all():
        raise ConfigError(f"{where} is {value!r}; give a list of numbers")
    return array.tolist()


def _plain(value: Any) -> Any:
    """As YAML and JSON hold it."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


def _plain_default(slot: Slot, value: Any) -> Any:
    """As if it were given: 0 for a float is 0.0, so that a resolved config resolves to itself."""
    return float(value) if slot.hint is float and type(value) is int else _plain(value)


def _built(slot: Slot, value: Any) -> Any:
    if slot.registry is not None:
        if value["type"] == "none" and slot.may_be_none:
            return None
        return build(slot.registry.config_list[value["type"]], value["params"])
    if slot.is_array:
        return None if value is None else np.asarray(value)
    return value if slot.hint is Any else TypeAdapter(slot.hint).validate_python(value)
