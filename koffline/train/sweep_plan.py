"""What a sweep trains, a config under every combination of a grid's values, and the metric that ranks it."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from koffline.config import parse_assignments
from koffline.errors import ConfigError
from koffline.train.config import TrainConfig, load_config

_MOST_RUNS = 100_000
_FALLS = ("td_error", "continuous_action_diff", "compare_continuous_action_diff")


@dataclass(frozen=True)
class Setting:
    """One point of the grid. values: the short name of each swept key, and its value in words."""

    values: tuple[tuple[str, str], ...]
    config: TrainConfig


@dataclass(frozen=True)
class SweepPlan:
    """Every setting is trained with every seed and ranked by the metric; maximize: more of it is better."""

    settings: tuple[Setting, ...]
    seeds: tuple[int, ...]
    metric: str
    maximize: bool


def make_plan(
    path: str | Path | Mapping[str, Any],
    grid: Sequence[str] = (),
    seeds: int = 1,
    assignments: Sequence[str] = (),
    data: str | Path | None = None,
    metric: str | None = None,
    maximize: bool | None = None,
) -> SweepPlan:
    """Every combination of the values of ``grid`` (``key=1e-3,3e-4`` each) with ``seeds`` seeds.

    Seeds count up from the config's ``train.seed``. metric: an evaluator's name or type, or a loss; without
    one the return in an environment, else the only evaluator. Errors, losses and distances are better when
    small, unless ``maximize`` says otherwise. All configs are checked here, so that nothing starts where one
    of them is wrong. Raises ConfigError in one line.
    """
    axes = _parse_grid(grid)
    if seeds < 1:
        raise ConfigError(f"seeds is {seeds}; give a positive number")
    runs = seeds * math.prod(len(values) for values in axes.values())
    if runs > _MOST_RUNS:
        raise ConfigError(f"the grid has {runs:,} runs; give fewer values or seeds, at most {_MOST_RUNS:,}")
    lasts = [key.rpartition(".")[2] for key in axes]
    named = {
        key: last if lasts.count(last) == 1 else key.removeprefix("algo.params.")
        for key, last in zip(axes, lasts, strict=True)
    }
    settings = []
    for point in itertools.product(*axes.values()):
        values = dict(zip(axes, point, strict=True))
        laid = [f"{key}={_as_json(value)}" for key, value in values.items()]
        config = load_config(path, (*assignments, *laid), None if "data.source" in axes else data)
        words = tuple((named[key], _in_words(key, value, axes[key])) for key, value in values.items())
        settings.append(Setting(words, config))
    config = settings[0].config
    name, falls = _choose_metric(config, metric)
    chosen = tuple(range(config.train.seed, config.train.seed + seeds))
    return SweepPlan(tuple(settings), chosen, name, not falls if maximize is None else maximize)


def _parse_grid(grid: Sequence[str]) -> dict[str, list[Any]]:
    """``key=a,b,c`` as the items of a YAML list: commas in brackets or quotes do not separate them."""
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
            raise ConfigError(f"--grid names {key} twice; give all of its values at once")
        if key == "train.seed":
            raise ConfigError(f"--grid sweeps {key}; say how many with --seeds, the first is the config's")
        axes[key] = axis
    return axes


def _choose_metric(config: TrainConfig, name: str | None) -> tuple[str, bool]:
    """The metric's name, and whether less of it is better."""
    types = {key: settings.type for key, settings in config.evaluators.items()}
    candidates = [key for key, kind in types.items() if kind == (name or "environment")]
    if name is None:
        candidates = candidates or list(types)
        if len(candidates) != 1:
            known = f"one of {', '.join(candidates)}" if candidates else "a loss, as in --metric loss"
            raise ConfigError(f"the config does not say which metric counts; name it with --metric: {known}")
    if name is None or (name not in types and len(candidates) == 1):
        name = candidates[0]
    return name, types.get(name, name) in _FALLS or name.endswith("loss") or name.startswith("time_")


def _in_words(key: str, value: Any, others: Sequence[Any]) -> str:
    """A value as it is given; a file without folder and ending, where that tells it from the others."""
    if key in ("data.source", "algo.policy") and len({Path(str(other)).stem for other in others}) == len(
        others
    ):
        return Path(str(value)).stem
    return value if isinstance(value, str) else _as_json(value)


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
