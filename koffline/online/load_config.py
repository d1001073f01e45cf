"""YAML and ``key=value`` strings become one `OnlineConfig`, and back; files state only differences."""

from __future__ import annotations

import dataclasses
import functools
import os
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from koffline.config import parse_assignments, read_yaml
from koffline.errors import ConfigError, nearest_name
from koffline.online.config import OnlineConfig

_OPTIONS, _LOG = "environment_options", "initial_log"


def load_config(path: str | Path | Mapping[str, Any], assignments: Iterable[str] = ()) -> OnlineConfig:
    """The config of a YAML file (or of a mapping), with ``gamma=0.98`` laid over it.

    One option of the environment is ``environment_options.NAME=VALUE``. A relative ``initial_log`` in a file
    lies beside the file, any other in the current folder. Raises ConfigError in one line; for an unknown key
    it names the nearest.
    """
    content = dict(path) if isinstance(path, Mapping) else read_yaml(path)
    _make_log_absolute(content, Path.cwd() if isinstance(path, Mapping) else Path(path).resolve().parent)
    for key, value in parse_assignments(assignments).items():
        _assign(content, key, value)
    _make_log_absolute(content, Path.cwd())
    hints = _hints()
    for key in content:
        if key not in hints:
            raise ConfigError(f"{key} is unknown; {nearest_name(key, sorted(hints))}")
    if not content.get("environment"):
        raise ConfigError(
            "environment is missing; give a Gymnasium id, as in environment: InvertedPendulum-v5"
        )
    return OnlineConfig(**{key: _typed(key, value, hints[key]) for key, value in content.items()})


def resolved(config: OnlineConfig) -> dict[str, Any]:
    """The same as plain values, every default filled in; `load_config` reads it again."""
    return {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


@functools.cache
def _hints() -> dict[str, Any]:
    return typing.get_type_hints(OnlineConfig)


def _assign(content: dict[str, Any], key: str, value: Any) -> None:
    parent, dot, name = key.partition(".")
    if not dot:
        content[key] = value
        return
    if parent != _OPTIONS:
        raise ConfigError(f"{key} is unknown; only {_OPTIONS} has parts, as in {_OPTIONS}.NAME=VALUE")
    below = content.get(parent) or {}
    if not isinstance(below, Mapping):
        raise ConfigError(f"{parent} is {below!r}; write it as lines of 'key: value'")
    content[parent] = {**below, name: value}


def _typed(name: str, value: Any, hint: Any) -> Any:
    """The value as the field's type; YAML takes 1e-3 for text. Raises ConfigError."""
    allowed = {hint, *typing.get_args(hint)}
    if name == _OPTIONS and value is None:
        return {}
    if isinstance(value, bool) and bool not in allowed and name != _OPTIONS:
        raise ConfigError(f"{name} is {str(value).lower()}; a yes or no is no value here")
    if isinstance(value, str) and allowed & {int, float}:
        value = _number(value)
    try:
        return TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise ConfigError(f"{name} is {value!r}: {reason[0].lower()}{reason[1:]}") from None


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, (list, tuple)) else value


def _make_log_absolute(content: dict[str, Any], folder: Path) -> None:
    log = content.get(_LOG)
    if isinstance(log, str) and log and not log.startswith("minari:"):
        content[_LOG] = str((folder / Path(os.path.expanduser(log))).resolve())
