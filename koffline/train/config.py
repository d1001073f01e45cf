"""A training config: YAML and ``key=value`` strings become one frozen record with every default filled in."""

from __future__ import annotations

import contextlib
import copy
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from koffline.config import parse_assignments, read_yaml
from koffline.data.remote import is_url
from koffline.errors import ConfigError, nearest_name

_EVALUATOR_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class _Section(BaseModel):
    """Frozen; a yes or no is no number, and 1e4, which YAML takes for text, is one."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _plain(cls, value: Any, info: ValidationInfo) -> Any:
        kind = str(cls.model_fields[str(info.field_name)].annotation)
        if isinstance(value, bool) and "bool" not in kind:
            raise PydanticCustomError("no_yes_or_no", "a yes or no is no value here")
        if isinstance(value, str) and "int" in kind:
            with contextlib.suppress(ValueError):
                return float(value)
        return value


class SplitSettings(_Section):
    """Which episodes are kept from training; rows where the log has no episodes."""

    held_out: float = Field(0.0, ge=0.0, lt=1.0)
    seed: int = Field(0, ge=0, lt=2**31)


class DataSettings(_Section):
    """The log: a file, a folder or minari:<id>; `discrete` or `continuous` declare its actions.

    `lazy` leaves its rows on disk (unset: where a folder of shards would not fit `memory`, 2GB if unset).
    """

    source: str
    split: SplitSettings
    discrete: int | None = Field(None, ge=1)
    continuous: tuple[float, float] | None = None
    lazy: bool | None = None
    memory: str | int | None = None


class AlgoSettings(_Section):
    """d3rlpy's type and all of its params; `policy` is the file that fqe and kloss_fqe evaluate."""

    type: str
    params: dict[str, Any]
    policy: str | None = None


class TrainSettings(_Section):
    """How long and how: `save_interval` in epochs, `seed` of networks and mini-batches."""

    n_steps: int = Field(10_000, ge=1)
    n_steps_per_epoch: int = Field(1_000, ge=1)
    seed: int = Field(0, ge=0, lt=2**31)
    save_interval: int = Field(1, ge=1)
    threads: int = Field(1, ge=1)


class LogEvaluatorSettings(_Section):
    """An average over logged rows; `part` is held_out where there is such a part, unless it is given."""

    type: Literal[
        "td_error",
        "discounted_sum_of_advantage",
        "average_value",
        "initial_value",
        "continuous_action_diff",
        "discrete_action_match",
    ]
    part: Literal["train", "held_out"]


class SoftOPCSettings(_Section):
    """Q(s, a) in episodes with a return of at least `return_threshold`, minus that in all."""

    type: Literal["soft_opc"]
    part: Literal["train", "held_out"]
    return_threshold: float


class CompareSettings(_Section):
    """How far actions are from those of another model, the .d3 file `base`."""

    type: Literal["compare_continuous_action_diff", "compare_discrete_action_match"]
    part: Literal["train", "held_out"]
    base: str


class EnvironmentSettings(_Section):
    """Mean return of `episodes` played in the Gymnasium environment `env`, the same starts every time."""

    type: Literal["environment"]
    env: str
    episodes: int = Field(10, ge=1)
    seed: int = Field(0, ge=0, lt=2**31)
    epsilon: float = Field(0.0, ge=0.0, le=1.0)


EvaluatorSettings = LogEvaluatorSettings | SoftOPCSettings | CompareSettings | EnvironmentSettings
_EVALUATORS: dict[str, type[_Section]] = {
    **dict.fromkeys(LogEvaluatorSettings.model_fields["type"].annotation.__args__, LogEvaluatorSettings),  # type: ignore[union-attr]
    **dict.fromkeys(CompareSettings.model_fields["type"].annotation.__args__, CompareSettings),  # type: ignore[union-attr]
    "soft_opc": SoftOPCSettings,
    "environment": EnvironmentSettings,
}


class LoggerSettings(_Section):
    """Files are always written; `gradients` adds their extent per epoch, as d3rlpy does."""

    gradients: bool = True
    tensorboard: bool = False
    wandb: bool = False
    wandb_project: str | None = None


class TrainConfig(_Section):
    """Everything that decides a run, besides the rows of the log and the device."""

    data: DataSettings
    algo: AlgoSettings
    train: TrainSettings
    evaluators: dict[str, EvaluatorSettings]
    logger: LoggerSettings

    def resolved(self) -> dict[str, Any]:
        """The same as plain values, every default filled in; `load_config` reads it again."""
        return self.model_dump(mode="json", exclude_none=False)


def load_config(
    path: str | Path | Mapping[str, Any], assignments: Iterable[str] = (), data: str | Path | None = None
) -> TrainConfig:
    """The config of a YAML file (or of a mapping), with ``algo.params.gamma=0.98`` laid over it.

    data: replaces ``data.source``. Paths in a file are relative to the file's folder, all others to the
    current one. Raises ConfigError in one line; an unknown key or type at any depth names the nearest.
    """
    if isinstance(path, Mapping):
        content, folder = copy.deepcopy(dict(path)), Path.cwd()
    else:
        content, folder = read_yaml(path), Path(path).resolve().parent
    _make_paths_absolute(content, folder)
    for key, value in parse_assignments(assignments).items():
        _assign(content, key, value)
    if data is not None:
        _assign(content, "data.source", str(data))
    _make_paths_absolute(content, Path.cwd())
    return _checked(content)


def _checked(content: dict[str, Any]) -> TrainConfig:
    for key in content:
        if key not in TrainConfig.model_fields:
            raise ConfigError(f"{key} is unknown; {nearest_name(key, TrainConfig.model_fields)}")
    data = _mapping(content.get("data"), "data")
    if not data.get("source"):
        raise ConfigError("data.source is missing; name the log in the config or with --data")
    algo = _mapping(content.get("algo"), "algo")
    for key in algo:
        if key not in AlgoSettings.model_fields:
            raise ConfigError(f"algo.{key} is unknown; {nearest_name(key, AlgoSettings.model_fields)}")
    if "type" not in algo:
        from koffline.algos.from_config import algorithm_types

        raise ConfigError(f"algo.type is missing; known are {', '.join(algorithm_types())}")
    made_data = {**data, "split": _section(SplitSettings, data.get("split"), "data.split")}
    sections = {
        "data": _section(DataSettings, made_data, "data"),
        "train": _section(TrainSettings, content.get("train"), "train"),
        "evaluators": _evaluators(content.get("evaluators"), made_data["split"].held_out > 0.0),
        "logger": _section(LoggerSettings, content.get("logger"), "logger"),
    }
    # Last: d3rlpy, which knows the algorithms, takes seconds to load.
    from koffline.algos.from_config import resolve_params

    params = resolve_params(algo["type"], _mapping(algo.get("params"), "algo.params"))
    return TrainConfig(algo=_section(AlgoSettings, {**algo, "params": params}, "algo"), **sections)


def _evaluators(given: Any, held_out: bool) -> dict[str, Any]:
    """A list of types, or settings by name; without a type the name is the type."""
    if isinstance(given, list):
        given = {str(name): {} for name in given}
    made = {}
    for name, settings in _mapping(given, "evaluators").items():
        where = f"evaluators.{name}"
        settings = {"type": name, **_mapping(settings, where)}
        kind = settings["type"]
        if kind not in _EVALUATORS:
            raise ConfigError(
                f"{where}: the type {kind!r} is unknown; {nearest_name(str(kind), _EVALUATORS)}"
            )
        if not _EVALUATOR_NAME.fullmatch(name) or name.startswith("time_") or name.endswith("_loss"):
            raise ConfigError(f"{where} cannot name a metric; use letters, digits, _ . - and no *_loss")
        if "part" in _EVALUATORS[kind].model_fields:
            settings.setdefault("part", "held_out" if held_out else "train")
        if settings.get("part") == "held_out" and not held_out:
            raise ConfigError(f"{where}.part is held_out, but nothing is held out; set data.split.held_out")
        made[name] = _section(_EVALUATORS[kind], settings, where)
    return made


def _section(model: type[_Section], given: Any, where: str) -> Any:
    """Raises ConfigError for an unknown, missing or wrong value."""
    if isinstance(given, model):
        return given
    try:
        return model(**_mapping(given, where))
    except ValidationError as error:
        unknown = [each for each in error.errors() if each["type"] == "extra_forbidden"]
        first = (unknown or error.errors())[0]
        name = str(first["loc"][0])
        if unknown:
            raise ConfigError(
                f"{where}.{name} is unknown; {nearest_name(name, model.model_fields)}"
            ) from None
        if first["type"] == "missing":
            raise ConfigError(f"{where}.{name} is missing; give a value") from None
        shown = str(first["input"]).lower() if isinstance(first["input"], bool) else repr(first["input"])
        reason = first["msg"][0].lower() + first["msg"][1:]
        raise ConfigError(f"{where}.{name} is {shown}: {reason}") from None


def _mapping(given: Any, where: str) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} is {given!r}; write it as lines of 'key: value'")
    return {str(key): value for key, value in given.items()}


def _assign(content: dict[str, Any], path: str, value: Any) -> None:
    """Lay ``a.b.c = value`` over nested mappings."""
    *parents, last = path.split(".")
    place = content
    for depth, name in enumerate(parents):
        below = place.get(name)
        if isinstance(below, list) and depth == 0 and name == "evaluators":
            below = {str(each): {} for each in below}
        elif isinstance(below, str) and name != "source":
            below = {"type": below}  # a factory named by its type alone
        elif below is None:
            below = {}
        if not isinstance(below, dict):
            raise ConfigError(f"--set {path}: {'.'.join(parents[: depth + 1])} is {below!r}, it has no parts")
        place[name] = below
        place = below
    place[last] = value


def _make_paths_absolute(content: dict[str, Any], folder: Path) -> None:
    """``data.source``, ``algo.policy`` and ``evaluators.*.base``, where they are relative files."""
    owners: list[tuple[Any, str]] = [(content.get("data"), "source"), (content.get("algo"), "policy")]
    evaluators = content.get("evaluators")
    if isinstance(evaluators, dict):
        owners += [(settings, "base") for settings in evaluators.values()]
    for owner, name in owners:
        value = owner.get(name) if isinstance(owner, dict) else None
        if isinstance(value, str) and value and not value.startswith("minari:") and not is_url(value):
            owner[name] = str((folder / Path(os.path.expanduser(value))).resolve())
