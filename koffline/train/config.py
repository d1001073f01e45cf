"""Training configs and plans of sweeps: YAML and ``key=value`` strings become frozen
records.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from koffline.config import (
    Section,
    network_bytes,
    parse_assignments,
    read_layers,
    read_section,
)
from koffline.errors import ConfigError, nearest_name
from koffline.json_types import JsonObject
from koffline.untrusted.limits import check_fits

_EVALUATOR_NAME = re.compile(r"(?!time_)[A-Za-z0-9](?!.*_loss$)[A-Za-z0-9_.-]*")
FILES = ("data.source", "algo.policy")
Part = Literal["train", "held_out"]
_MOST_RUNS = 100_000
_MODULE_BYTES = 10_000  # of a network in Python, besides its numbers
# of a row of a mini-batch at least: seven float32 and its place in the log
_ROW_BYTES = 36
_FALLS = ("td_error", "continuous_action_diff")


def _without_none(value: object) -> object:
    """A section of a file without a line below it is empty."""
    if value is None:
        return {}
    return value


_Params = Annotated[dict[str, Any], BeforeValidator(_without_none)]


class SplitSettings(Section):
    """Held-out episodes, which training does not see; rows if the log has no episodes.

    held_out: their share. seed: of the draw.
    """

    held_out: float = Field(0.0, ge=0.0, lt=1.0)
    seed: int = Field(0, ge=0, lt=2**31)


class DataSettings(Section):
    """The log to learn from.

    source: a file, a folder or minari:<id>; in a config file relative to its folder.
    split: episodes held out from training. discrete: declares that number of discrete
    actions. continuous: declares continuous actions within these two bounds. lazy:
    leaves the rows on disk and draws from shuffled blocks; by default only for a folder
    of shards that needs more than ``memory``. memory: limit for the rows in memory, by
    default 2GB.
    """

    source: str = Field(min_length=1)
    split: SplitSettings = Field({}, validate_default=True)
    discrete: int | None = Field(None, ge=1)
    continuous: tuple[float, float] | None = None
    lazy: bool | None = None
    memory: str | int | None = None


class AlgoSettings(Section):
    """The algorithm, in d3rlpy's own form.

    type: its name, d3rlpy's or koffline's. params: what differs from the defaults of
    that type; a factory inside is {type, params} too, or its type only. policy: the .d3
    file that fqe and kloss_fqe evaluate.
    """

    type: Any = None
    params: _Params = Field(default_factory=dict)
    policy: str | None = None


class TrainSettings(Section):
    """How long to train.

    n_steps: gradient steps; the last epoch may be shorter. n_steps_per_epoch: steps
    between two evaluations. seed: of networks and mini-batches. save_interval: epochs
    between two model files; the last model is always saved. threads: of this process.
    """

    n_steps: int = Field(10_000, ge=1)
    n_steps_per_epoch: int = Field(1_000, ge=1)
    seed: int = Field(0, ge=0, lt=2**31)
    save_interval: int = Field(1, ge=1)
    threads: int = Field(1, ge=1, le=1024)


class LogEvaluatorSettings(Section):
    """An average over logged rows.

    type: what is averaged, by d3rlpy's names. part: train or held_out; by default
    held_out if there is one.
    """

    type: Literal[
        "td_error",
        "discounted_sum_of_advantage",
        "average_value",
        "initial_value",
        "continuous_action_diff",
        "discrete_action_match",
    ]
    part: Part


class SoftOPCSettings(Section):
    """Mean Q(s, a) in episodes of high return, minus the mean in all episodes.

    type: soft_opc. part: train or held_out; by default held_out if there is one.
    return_threshold: smallest return that counts as high.
    """

    type: Literal["soft_opc"]
    part: Part
    return_threshold: float


class EnvironmentSettings(Section):
    """Mean return of episodes played in a Gymnasium environment, always from the same
    starts.

    type: environment. env: its Gymnasium name. episodes: how many. seed: of the starts.
    """

    type: Literal["environment"]
    env: str
    episodes: int = Field(10, ge=1, le=10_000)
    seed: int = Field(0, ge=0, lt=2**31)


EvaluatorSettings = LogEvaluatorSettings | SoftOPCSettings | EnvironmentSettings
_EVALUATORS: dict[str, type[EvaluatorSettings]] = {
    name: settings
    for settings in get_args(EvaluatorSettings)
    for name in get_args(settings.model_fields["type"].annotation)
}


class LoggerSettings(Section):
    """What is logged besides the metrics."""

    gradients: bool = Field(
        True, description="also write the size of gradients, as d3rlpy does"
    )


class TrainConfig(Section):
    """Everything that determines a run, besides the rows of the log and the device."""

    data: DataSettings
    algo: AlgoSettings
    train: TrainSettings = Field({}, validate_default=True)
    evaluators: dict[str, EvaluatorSettings] = Field(default_factory=dict)
    logger: LoggerSettings = Field({}, validate_default=True)

    def files(self) -> list[str]:
        """Names of the log and the policy that a run reads."""
        return [
            name for name in (self.data.source, self.algo.policy) if name is not None
        ]


def load_config(
    path: str | Path | Mapping[str, Any],
    assignments: Iterable[str] = (),
    data: str | Path | None = None,
) -> TrainConfig:
    """The config of a YAML file (or mapping, or the name of a bundled config such as
    ``kloss_dqn``), overridden by assignments such as ``algo.params.gamma=0.98``.

    data: replaces ``data.source``. Paths in a file are relative to the file's folder,
    others to the current folder. Raises ConfigError in one line, with the nearest name
    for an unknown key or type at any depth.
    """
    overrides = parse_assignments(assignments)
    if data is not None:
        overrides["data.source"] = str(data)
    content = {
        name: part
        for name, part in read_layers(path, overrides, FILES).items()
        if part is not None
    }
    sections = content.pop("evaluators", {})
    config = read_section(TrainConfig, {"data": {}, "algo": {}, **content})
    evaluators = _read_evaluators(sections, config.data.split.held_out > 0.0, overrides)
    from koffline.algos.options import algorithm_types, resolve_params

    if config.algo.type is None:
        raise ConfigError(
            f"algo.type is missing; known are {', '.join(algorithm_types())}"
        )
    algo = config.algo.model_copy(
        update={"params": resolve_params(config.algo.type, config.algo.params)}
    )
    _check_params_fit(algo.params)
    return config.model_copy(update={"algo": algo, "evaluators": evaluators})


def _check_params_fit(params: JsonObject) -> None:
    """Raise ConfigError if the networks or a mini-batch of an algorithm take more
    memory than there is.
    """
    batch_rows = int(params.get("batch_size") or 0)
    networks = max(int(params.get("n_critics") or 1), 1)
    widest: tuple[int, ...] = ()
    for units in _values_of(params, "hidden_units"):
        sizes = tuple(int(size) for size in units or ())
        if sum(sizes) > sum(widest):
            widest = sizes
    samples = 1
    for name, value in params.items():
        if name.startswith("n_action") and isinstance(value, int):
            samples = max(samples, value)
    of_network = network_bytes(1, (1, *widest, 1), batch_rows * samples)
    needed = networks * (_MODULE_BYTES + of_network) + batch_rows * _ROW_BYTES
    settings = (
        f"algo.params: batch_size is {batch_rows}, {networks} critics of hidden units"
        f" {list(widest)}"
    )
    if samples > 1:
        settings += f", {samples} actions of each state"
    check_fits(needed, settings, "lower what is large among them")


def _values_of(params: object, name: str) -> Iterator[Any]:
    """All values of a name, at any depth."""
    if isinstance(params, Mapping):
        for key, value in params.items():
            if key == name:
                yield value
            else:
                yield from _values_of(value, name)


def _read_evaluators(
    sections: Any, held_out: bool, overrides: JsonObject
) -> dict[str, EvaluatorSettings]:
    """Evaluator settings by name; without a type, the name is the type.

    sections: what the file holds under ``evaluators``. held_out: whether rows are held
    out. overrides: settings by dotted name; None for ``evaluators.name`` leaves that
    one out. Raises ConfigError.
    """
    is_mapping = isinstance(sections, Mapping)
    if not is_mapping or not all(
        isinstance(section, Mapping | None) for section in sections.values()
    ):
        raise ConfigError(
            f"evaluators is {sections!r}; write it as lines of 'key: value'"
        )
    evaluators = {}
    for name, settings in sections.items():
        where = f"evaluators.{name}"
        if where in overrides and overrides[where] is None:
            continue
        settings = {"type": name, **(settings or {})}
        kind = str(settings["type"])
        if kind not in _EVALUATORS:
            raise ConfigError(
                f"{where}: the type {kind!r} is unknown;"
                f" {nearest_name(kind, _EVALUATORS)}"
            )
        if not _EVALUATOR_NAME.fullmatch(name):
            raise ConfigError(
                f"{where} cannot name a metric; use letters, digits, _ . - and no"
                " *_loss"
            )
        if "part" in _EVALUATORS[kind].model_fields and "part" not in settings:
            settings["part"] = "train"
            if held_out:
                settings["part"] = "held_out"
        if settings.get("part") == "held_out" and not held_out:
            raise ConfigError(
                f"{where}.part is held_out, but nothing is held out; set"
                " data.split.held_out"
            )
        evaluators[name] = read_section(_EVALUATORS[kind], settings, where)
    return evaluators


@dataclass(frozen=True)
class Setting:
    """One point of the grid. values: the value of each swept key as text, by the key's
    short name.
    """

    values: Mapping[str, str]
    config: TrainConfig

    @property
    def label(self) -> str:
        """All values in one line."""
        return (
            ", ".join(f"{name}={value}" for name, value in self.values.items())
            or "the config"
        )


@dataclass(frozen=True)
class SweepPlan:
    """Settings and seeds of a sweep, and the metric for ranking. maximize: larger
    values are better.
    """

    settings: tuple[Setting, ...]
    seeds: tuple[int, ...]
    metric: str
    maximize: bool

    @property
    def inputs(self) -> list[str]:
        """All logs and policies in the settings."""
        return [name for setting in self.settings for name in setting.config.files()]


def make_plan(
    path: str | Path | Mapping[str, Any],
    grid: Sequence[str] = (),
    seeds: int = 1,
    assignments: Sequence[str] = (),
    data: str | Path | None = None,
    metric: str | None = None,
    maximize: bool | None = None,
) -> SweepPlan:
    """Combine all values of ``grid`` (``key=1e-3,3e-4`` each) with ``seeds`` seeds.

    Seeds count up from the config's ``train.seed``. metric: an evaluator's name, or a
    loss; by default the return in an environment, else the only evaluator. Errors,
    losses and distances are minimised, unless ``maximize`` says otherwise. Raises
    ConfigError in one line if one of the configs is wrong.
    """
    axes = _parse_grid(grid)
    if seeds < 1:
        raise ConfigError(f"seeds is {seeds}; give a positive number")
    runs = seeds * math.prod(len(values) for values in axes.values())
    if runs > _MOST_RUNS:
        raise ConfigError(
            f"the grid has {runs:,} runs; give fewer values or seeds, at most"
            f" {_MOST_RUNS:,}"
        )
    named = {key: key.rpartition(".")[2] for key in axes}
    if len(set(named.values())) < len(named):
        named = {key: key.removeprefix("algo.params.") for key in axes}
    settings = []
    for point in itertools.product(*axes.values()):
        values = dict(zip(axes, point, strict=True))
        overrides = [f"{key}={_as_json(value)}" for key, value in values.items()]
        source = data
        if "data.source" in axes:
            source = None
        config = load_config(path, (*assignments, *overrides), source)
        texts = {}
        for key, value in values.items():
            if not isinstance(value, str):
                value = _as_json(value)
            texts[named[key]] = value
        settings.append(Setting(texts, config))
    config = settings[0].config
    name, falls = _choose_metric(config, metric)
    if maximize is None:
        maximize = not falls
    return SweepPlan(
        settings=tuple(settings),
        seeds=tuple(range(config.train.seed, config.train.seed + seeds)),
        metric=name,
        maximize=maximize,
    )


def _parse_grid(grid: Sequence[str]) -> dict[str, list[Any]]:
    """``key=a,b,c`` as a YAML list; commas in brackets or quotes do not separate
    values.
    """
    axes: dict[str, list[Any]] = {}
    for text in grid:
        key, _, values = text.partition("=")
        try:
            ((key, axis),) = parse_assignments([f"{key}=[{values}]"]).items()
        except ConfigError:
            axis = []
        if not axis:
            raise ConfigError(f"--grid received '{text}'; write it as key=value,value")
        if key in axes:
            raise ConfigError(
                f"--grid names {key} twice; give all of its values at once"
            )
        if key == "train.seed":
            raise ConfigError(
                f"--grid sweeps {key}; say how many with --seeds, the first is the"
                " config's"
            )
        axes[key] = axis
    return axes


def _choose_metric(config: TrainConfig, name: str | None) -> tuple[str, bool]:
    """The metric's name, and whether smaller values are better."""
    types = {key: settings.type for key, settings in config.evaluators.items()}
    if name is None:
        played = [key for key, kind in types.items() if kind == "environment"] or list(
            types
        )
        if len(played) != 1:
            known = ", ".join([*played, "a loss"])
            raise ConfigError(
                "the config does not say which metric counts; name it with --metric:"
                f" {known}"
            )
        name = played[0]
    elif name not in types and not name.endswith("loss"):
        known = ", ".join([*types, "a loss"])
        raise ConfigError(f"the config measures no '{name}'; --metric takes {known}")
    return name, types.get(name, name) in _FALLS or name.endswith("loss")


def _as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
