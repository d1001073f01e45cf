"""What a sweep runs: a training config, axes of values laid over it, and seeds."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from koffline.errors import ConfigError
from koffline.train.config import TrainConfig, load_config

_BRACKETS = {"[": "]", "{": "}", "(": ")"}
_MOST_RUNS = 100_000
_SEED = "train.seed"
_FILES = ("data.source", "algo.policy")


@dataclass(frozen=True)
class Axis:
    """One setting and the texts of its values, as they follow ``--set key=``."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Setting:
    """One point of the grid. values: (short name of the key, value in words) per axis, in the axes' order."""

    values: tuple[tuple[str, str], ...]
    config: TrainConfig

    @property
    def label(self) -> str:
        """All values in one line; the whole config where there is no axis."""
        return ", ".join(f"{name}={value}" for name, value in self.values) or "the config"


@dataclass(frozen=True)
class SweepRun:
    """One training run: a setting and a seed. name: of its folder, unique and the same in every process."""

    name: str
    setting: Setting
    config: TrainConfig
    seed: int


@dataclass(frozen=True)
class SweepPlan:
    """Every setting with every seed. base: the config below the grid."""

    base: TrainConfig
    axes: tuple[Axis, ...]
    settings: tuple[Setting, ...]
    seeds: tuple[int, ...]
    runs: tuple[SweepRun, ...]


def make_plan(
    path: str | Path | Mapping[str, Any],
    grid: Sequence[str] = (),
    seeds: int = 1,
    assignments: Sequence[str] = (),
    data: str | Path | None = None,
) -> SweepPlan:
    """Every combination of the values of ``grid`` (``key=1e-3,3e-4`` each) with ``seeds`` seeds.

    Seeds count up from the config's ``train.seed``. All configs are checked here, so that nothing starts
    where one of them is wrong. Raises ConfigError in one line.
    """
    axes = tuple(parse_axis(text) for text in grid)
    _check(axes, seeds)
    base = load_config(path, assignments, data)
    names = _short_names([axis.key for axis in axes])
    settings = []
    for values in itertools.product(*(axis.values for axis in axes)):
        laid = [f"{axis.key}={value}" for axis, value in zip(axes, values, strict=True)]
        swept = any(axis.key == "data.source" for axis in axes)
        config = load_config(path, (*assignments, *laid), None if swept else data)
        shown = tuple(
            (name, _in_words(config, axis, value))
            for name, axis, value in zip(names, axes, values, strict=True)
        )
        settings.append(Setting(shown, config))
    files = [axis.key for axis in axes if axis.key in _FILES]
    _refuse_twins(settings, files)
    chosen = tuple(range(base.train.seed, base.train.seed + seeds))
    runs = tuple(_make_run(setting, seed, files) for setting in settings for seed in chosen)
    return SweepPlan(base, axes, tuple(settings), chosen, runs)


def parse_axis(text: str) -> Axis:
    """``key=a,b,c`` as an axis; commas inside brackets or quotes do not separate. Raises ConfigError."""
    key, equals, values = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--grid received '{text}'; write it as key=value,value")
    parts = tuple(part.strip() for part in _split(values))
    if not all(parts):
        raise ConfigError(
            f"--grid {key.strip()} has an empty value in '{values}'; write it as key=value,value"
        )
    return Axis(key.strip(), parts)


def deciding(config: TrainConfig) -> dict[str, Any]:
    """The settings that decide the numbers of a run, flat: not where files lie, who is told, or the seed."""
    content = config.resolved()
    del content["logger"], content["data"]["source"], content["train"]["seed"]
    content["algo"].pop("policy", None)
    return _flat(content, "")


def _check(axes: Sequence[Axis], seeds: int) -> None:
    keys = [axis.key for axis in axes]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"--grid names {key} twice; give all of its values at once")
    if _SEED in keys:
        raise ConfigError(f"--grid sweeps {_SEED}; say how many with --seeds, the first is the config's")
    if seeds < 1:
        raise ConfigError(f"seeds is {seeds}; give a positive number")
    runs = seeds
    for axis in axes:
        runs *= len(axis.values)
    if runs > _MOST_RUNS:
        raise ConfigError(f"the grid has {runs:,} runs; give fewer values or seeds, at most {_MOST_RUNS:,}")


def _split(values: str) -> list[str]:
    parts, closing, quote = [""], [], ""
    for letter in values:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in _BRACKETS:
            closing.append(_BRACKETS[letter])
        elif closing and letter == closing[-1]:
            closing.pop()
        elif letter == "," and not closing:
            parts.append("")
            continue
        parts[-1] += letter
    if closing or quote:
        raise ConfigError(f"--grid received '{values}'; close its {quote or closing[-1]}")
    return parts


def _short_names(keys: Sequence[str]) -> list[str]:
    """The last parts of each key, as many as tell it from the others."""
    names = []
    for key in keys:
        parts = key.split(".")
        for start in range(len(parts) - 1, -1, -1):
            name = ".".join(parts[start:])
            if sum(f".{other}".endswith(f".{name}") for other in keys) == 1:
                break
        names.append(name)
    return names


def _in_words(config: TrainConfig, axis: Axis, text: str) -> str:
    """The value as the config holds it, so that 1e-3 and 0.001 are one name; files by their own name."""
    key, texts = axis.key, axis.values
    value: Any = config.resolved()
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return text
        value = value[part]
    if isinstance(value, Mapping) or value is None:
        return text
    if key in _FILES:
        return _file_word(text, texts)
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)


def _file_word(text: str, texts: Sequence[str]) -> str:
    """A file by its name alone, where that tells it from the others."""
    stems = [Path(other).stem for other in texts]
    stem = Path(text).stem
    return stem if stems.count(stem) == 1 and not text.startswith("minari:") else text


def _make_run(setting: Setting, seed: int, files: Sequence[str]) -> SweepRun:
    train = setting.config.train.model_copy(update={"seed": seed})
    config = setting.config.model_copy(update={"train": train})
    parts: Iterable[str] = (*(f"{name}={value}" for name, value in setting.values), f"seed{seed}")
    readable = re.sub(r"[^A-Za-z0-9_.=+-]+", "_", "-".join(parts)).lstrip(".-")[-80:].lstrip(".-_")
    return SweepRun(f"{readable}-{_digest(config, files)}", setting, config, seed)


def _digest(config: TrainConfig, files: Sequence[str]) -> str:
    """Of all that decides a run; of ``files`` (keys) where they lie: others may be moved."""
    content = {**deciding(config), "seed": config.train.seed}
    content |= {"data.source": config.data.source} if "data.source" in files else {}
    content |= {"algo.policy": config.algo.policy} if "algo.policy" in files else {}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10]


def _refuse_twins(settings: Sequence[Setting], files: Sequence[str]) -> None:
    seen: dict[str, str] = {}
    for setting in settings:
        digest = _digest(setting.config, files)
        if digest in seen:
            raise ConfigError(
                f"--grid gives the same run twice ({seen[digest]} and {setting.label}); leave one out"
            )
        seen[digest] = setting.label


def _flat(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value:
        return {path: value}
    flat: dict[str, Any] = {}
    for name, part in value.items():
        flat.update(_flat(part, f"{path}.{name}".lstrip(".")))
    return flat
