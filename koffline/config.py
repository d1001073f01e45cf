"""Settings: YAML and ``key=value`` strings become one frozen record; all defaults are
here.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_serializer,
    field_validator,
)
from pydantic_core import PydanticCustomError

from koffline.bundled import config_file, path_in_bundled
from koffline.errors import ConfigError, nearest_name
from koffline.jobs import AUTOMATIC
from koffline.json_types import JsonObject
from koffline.untrusted.limits import Refused, check_fits, parse_yaml, read_yaml_file

MOST_CORES = 1024
ANY_GAMMA = 0.5  # where a gamma has to be given and makes no difference
# More is a typing error: settings beyond these sizes are
# refused before anything is allocated.
MOST_UNITS = 65_536
MOST_LAYERS = 64
MOST_DRAWS = 100_000
# per parameter: weight, target, gradient, Adam's two averages and its scratch
_KEPT_NUMBERS = 6
_FLOAT = 4  # bytes
_OBJECT = re.compile(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*(\.\w+)*")


class Section(BaseModel):
    """Frozen settings. Refuses booleans where numbers are meant, and converts numeric
    strings.

    YAML reads 1e4 as text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _plain(cls, value: object, info: ValidationInfo) -> object:
        kind = str(cls.model_fields[str(info.field_name)].annotation)
        if isinstance(value, bool) and "bool" not in kind:
            raise PydanticCustomError("no_yes_or_no", "a yes or no is no value here")
        if isinstance(value, str) and "int" in kind:
            with contextlib.suppress(ValueError):
                return float(value)
        return value

    def resolved(self) -> JsonObject:
        """All values, including defaults, as plain values that can be read back."""
        return self.model_dump(mode="json")


class EvaluationSettings(Section):
    """Everything that determines an estimate, besides the log, the policy and the
    initial states.

    Unknown names are refused, with the nearest valid name. Units: ``bandwidth`` is a
    multiple of the median distance between rows, ``learning_rate`` is Adam's, ``steps``
    are gradient steps of every replica.
    """

    gamma: float = Field(
        gt=0.0,
        lt=1.0,
        description="discount factor, inside (0, 1), as in --gamma 0.99"
        " (gamma=0.99 in Python)",
    )
    estimator: str = Field(
        "auto", description="estimator; auto: kloss+fqe, or dr for logged bandits"
    )
    interval: str = Field(
        "default", description="kind of the interval; 'default': the estimator's own"
    )
    level: float = Field(0.95, gt=0.0, lt=1.0, description="level of the interval")
    seed: int = Field(0, ge=0, lt=2**31, description="seed of everything random")

    hidden_units: tuple[Annotated[int, Field(ge=1, le=MOST_UNITS)], ...] = Field(
        (64, 64), max_length=MOST_LAYERS, description="units of hidden layers"
    )
    steps: int | None = Field(
        None,
        ge=1,
        le=10**8,
        description=(
            "gradient steps of a replica; by default until the estimate settles"
        ),
    )
    agreement: float = Field(
        0.1, gt=0.0, description="change of a settled estimate, in interval widths"
    )
    batch_size: int = Field(256, ge=2, le=10**9, description="rows in a mini-batch")
    learning_rate: float = Field(
        3e-3, gt=0.0, description="learning rate of Adam, cosine decay to zero"
    )
    target_rate: float = Field(
        0.1, gt=0.0, le=1.0, description="rate at which the target network follows"
    )
    full_replicas: int = Field(
        3, ge=1, le=10_000, description="networks trained on the whole log"
    )
    resampled_replicas: int = Field(
        12, ge=2, le=10_000, description="networks trained on resampled episodes"
    )
    sample_rows: int = Field(
        200_000, ge=2, description="approximate number of rows that train networks"
    )
    history: int | None = Field(
        None,
        ge=0,
        le=10,
        description="previous rows added to the state; by default `auto` finds out",
    )
    action_draws: int = Field(
        8,
        ge=1,
        le=MOST_DRAWS,
        description="actions drawn per state from a continuous policy",
    )

    bandwidth: float = Field(
        0.6, gt=0.0, le=1e6, description="kernel bandwidth, times the median distance"
    )
    instruments: int | None = Field(
        None,
        ge=2,
        le=10_000,
        multiple_of=2,
        description="kernel's random features, by default 300 to 1000",
    )
    ridge: float = Field(
        1e-5, gt=0.0, description="relative ridge toward the trained last layer"
    )

    feature_source: Literal["learned", "random"] = Field(
        "learned",
        description=(
            "features of kernel intervals: a trained network's (learned) or random"
        ),
    )
    features: int = Field(
        100, ge=2, le=10_000, multiple_of=2, description="random features of intervals"
    )
    feature_width: float = Field(
        1.0, gt=0.0, description="width of random features, times the median"
    )
    norm_bound: float | None = Field(
        None, gt=0.0, le=1e100, description="largest norm of Q in intervals"
    )
    reward_bounds: tuple[float, float] | None = Field(
        None, description="known bounds of rewards [low, high]"
    )
    weight_clip: float | None = Field(
        None, gt=0.0, description="cap of importance weights, none by default"
    )
    behavior: Literal["auto", "log", "estimate"] = Field(
        "auto",
        description="behaviour probabilities: the log's (log), estimated, or auto",
    )
    behavior_model: Any = Field(
        None,
        description=(
            "classifier that estimates behavior probabilities of discrete actions, as"
            " in sklearn.linear_model:LogisticRegression; our own by default"
        ),
    )
    device: str = Field(
        "cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="device: cpu, cuda or cuda:N"
    )
    cores: int | None = Field(
        None,
        ge=1,
        le=MOST_CORES,
        description=(
            "cores of this machine that compute networks; by default (auto) those that"
            " are free. They change no digit"
        ),
    )
    threads: int = Field(
        1, ge=1, le=MOST_CORES, description="older name of cores, if above 1"
    )

    @field_validator("cores", mode="before")
    @classmethod
    def _automatic(cls, value: object) -> object:
        if value == AUTOMATIC:
            return None
        return value

    @field_validator("behavior_model")
    @classmethod
    def _classifier(cls, value: object) -> object:
        """Refuse what names no classifier and is none; what a name stands for is seen
        when it is imported.
        """
        is_classifier = callable(value) or hasattr(value, "predict_proba")
        if isinstance(value, str):
            is_classifier = _OBJECT.fullmatch(value) is not None
        if value is not None and not is_classifier:
            raise PydanticCustomError(
                "no_classifier", "write it as package.module:name"
            )
        return value

    @field_serializer("behavior_model", when_used="json")
    def _name_of_classifier(self, value: object) -> str | None:
        return self.behavior_model_name

    @property
    def behavior_model_name(self) -> str | None:
        """The classifier in one line, with its own settings; None without one."""
        if self.behavior_model is None or isinstance(self.behavior_model, str):
            return self.behavior_model
        return " ".join(repr(self.behavior_model).split())

    @property
    def estimates_behavior(self) -> bool:
        """Whether behavior probabilities are estimated though the log may have them."""
        is_left_open = self.behavior == "auto"
        return self.behavior == "estimate" or (
            is_left_open and self.behavior_model is not None
        )

    @property
    def chosen_cores(self) -> int | None:
        """Number of cores by either name; 1 where a GPU computes; None: free ones."""
        if self.device != "cpu":
            return 1
        if self.cores is None and self.threads > 1:
            return self.threads
        return self.cores


class BellmanSettings(Section):
    """Options of `koffline.bellman_test`.

    gamma: the discount factor. seed: of everything random. level: the test rejects if p
    ≤ level. draws: how often the random signs are drawn. alternative: the error whose
    power is reported: all values are off by this multiple of the root mean square
    return. bandwidth: of the Gaussian kernel, a multiple of the median distance between
    rows. bandwidths: several such multiples; the test then is of the largest
    studentised statistic over them, at one level, and ``bandwidth`` remains that of the
    statistic, the kernel loss and the witness that are reported. features: number of
    random Fourier features in place of the exact Gram matrix; 0: exact; None: exact up
    to 3,000 rows, 1,000 features above. action_draws: actions drawn per next state from
    a continuous policy.
    """

    gamma: float = Field(gt=0.0, lt=1.0)
    seed: int = Field(0, ge=0)
    level: float = Field(0.05, gt=0.0, lt=1.0)
    draws: int = Field(999, ge=1, le=10**8)
    alternative: float = Field(0.1, gt=0.0)
    bandwidth: float = Field(0.6, gt=0.0)
    bandwidths: tuple[Annotated[float, Field(gt=0.0)], ...] = Field((), max_length=20)
    features: int | None = Field(None, ge=0, le=10**6, multiple_of=2)
    action_draws: int = Field(8, ge=1, le=MOST_DRAWS)


def make_settings(*layers: Mapping[str, Any]) -> EvaluationSettings:
    """Merge layers into settings: later layers win, and keys whose value is None are
    ignored.

    Raises ConfigError in one line for an unknown key (with the nearest valid one) or a
    value out of range.
    """
    merged = {
        key: value
        for layer in layers
        for key, value in layer.items()
        if value is not None
    }
    settings = read_section(EvaluationSettings, merged)
    if settings.behavior == "log" and settings.behavior_model is not None:
        raise ConfigError(
            "behavior is log, so that nothing is estimated, and behavior_model says by"
            " what; leave one of them out"
        )
    check_networks_fit(settings)
    if settings.device != "cpu":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError(
                f"device is '{settings.device}', but torch sees no CUDA device here;"
                " use cpu"
            )
    return settings


def make_bellman_settings(**options: Any) -> BellmanSettings:
    """Settings from options; None values are ignored.

    Raises ConfigError in one line.
    """
    values = {name: value for name, value in options.items() if value is not None}
    settings = read_section(BellmanSettings, values)
    draws = settings.draws
    check_fits(
        8.0 * draws * (settings.features or 2),
        f"draws is {draws}, features {settings.features}",
        "lower draws or features",
    )
    # B draws give no p-value below 1/(B + 1)
    least = math.ceil(1.0 / settings.level - 1e-9) - 1
    if draws < least:
        raise ConfigError(
            f"draws is {draws}, too few for level {settings.level}: the smallest"
            f" p-value is {1.0 / (draws + 1):.3g}; give draws={least} or more, or a"
            " higher level (--level)"
        )
    return settings


def network_bytes(replicas: int, sizes: Iterable[int], batch_rows: int = 0) -> float:
    """Bytes that training a stack of networks takes at least.

    sizes: (inputs, hidden…, outputs). batch_rows: rows of a mini-batch, whose hidden
    values are kept.
    """
    widths = list(sizes)
    parameters = sum((fan_in + 1) * fan_out for fan_in, fan_out in pairwise(widths))
    values = batch_rows * sum(widths[1:-1])
    return float(_FLOAT * replicas * (_KEPT_NUMBERS * parameters + values))


def check_networks_fit(
    settings: EvaluationSettings,
    inputs: int = 1,
    outputs: int = 1,
    rows: int = 0,
    units: int = 0,
) -> None:
    """Raise ConfigError if training by these settings takes more memory than there is.

    inputs, outputs: of the networks; rows, units: of the log. By default the least that
    any log has, so that the settings can be judged before it is read.
    """
    replicas = settings.full_replicas + settings.resampled_replicas
    sizes = (inputs, *settings.hidden_units, outputs)
    needed = network_bytes(replicas, sizes, min(settings.batch_size, rows))
    # how often each sample holds a unit and a row; row weights
    needed += 8.0 * replicas * (units + 2 * rows)
    # the loss of every step of the longest round
    needed += _FLOAT * replicas * (settings.steps or 0) / 2
    large = (
        f"full_replicas is {settings.full_replicas}, resampled_replicas"
        f" {settings.resampled_replicas}, hidden_units"
        f" {_shortened(settings.hidden_units)}, batch_size {settings.batch_size}"
    )
    if settings.steps is not None:
        large += f", steps {settings.steps}"
    check_fits(needed, large, "lower what is large among them")


def _shortened(sizes: Iterable[int]) -> str:
    shown = str(list(sizes))
    if len(shown) <= 40:
        return shown
    return f"{shown[:40]}…"


def read_yaml(path: str | Path) -> JsonObject:
    """The top-level mapping of a YAML file.

    Raises ConfigError if it is missing, unreadable or no mapping.
    """
    content = read_yaml_file(Path(path), f"config file {path}", ConfigError)
    return {str(key): value for key, value in content.items()}


def parse_assignments(assignments: Iterable[str]) -> JsonObject:
    """``("steps=2000", …)`` as a mapping, with values read as YAML.

    Raises ConfigError without "=".
    """
    parsed: JsonObject = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set received '{assignment}'; write it as key=value")
        try:
            parsed[key.strip()] = parse_yaml(value)
        except (yaml.YAMLError, Refused):
            raise ConfigError(
                f"--set {key.strip()} received '{value}'; write a number or a word"
            ) from None
    return parsed


AnySection = TypeVar("AnySection", bound=Section)


def read_section(
    model: type[AnySection], values: object, where: str = ""
) -> AnySection:
    """Validate values as a section.

    model: the section's class. values: a mapping, or what stands in its place. where:
    the section's dotted name, for the message.

    Raises ConfigError for an unknown, missing or wrong value.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise describe_error(model, error, where) from None


def describe_error(
    model: type[BaseModel], error: ValidationError, where: str = ""
) -> ConfigError:
    """ConfigError for the first error; unknown names come before wrong values.

    model: the class that refused the values. where: its dotted name, may be empty.
    """
    errors = error.errors()
    unknown = [refusal for refusal in errors if refusal["type"] == "extra_forbidden"]
    first = (unknown or errors)[0]
    parts = [str(part) for part in first["loc"]]  # of the name, below ``where``
    if not parts or where:
        parts.insert(0, where)
    name = ".".join(parts)
    last = parts[-1]
    if unknown:
        for parent in first["loc"][:-1]:
            model = model.model_fields[str(parent)].annotation  # type: ignore[assignment]
        homes = _sections_with(model, last)
        if homes:
            return ConfigError(f"{name} is unknown; did you mean '{homes[0]}'?")
        return ConfigError(
            f"{name} is unknown; {nearest_name(last, sorted(model.model_fields))}"
        )
    # descriptions are known for the settings of this section, not of nested ones
    description = None
    field = model.model_fields.get(last)
    if field is not None and len(first["loc"]) <= 1:
        description = field.description
    value = first["input"]
    if first["type"] == "missing" or value is None:
        remedy = "a value"
        if description:
            remedy = f"the {description}"
        return ConfigError(f"{name} is missing; give {remedy}")
    shown = repr(value)
    if isinstance(value, bool):
        shown = shown.lower()
    if first["type"] in ("model_type", "dict_type"):
        return ConfigError(f"{name} is {shown}; write it as lines of 'key: value'")
    reason = first["msg"][0].lower() + first["msg"][1:]
    if description:
        reason += f"; it is the {description}"
    return ConfigError(f"{name} is {shown}: {reason}")


def _sections_with(model: type[BaseModel], key: str) -> list[str]:
    """Dotted names of a setting of this name in the sections of a model."""
    homes = []
    for section, field in model.model_fields.items():
        kind = field.annotation
        if not isinstance(kind, type) or not issubclass(kind, BaseModel):
            continue
        if key in kind.model_fields:
            homes.append(f"{section}.{key}")
    return homes


def read_layers(
    source: str | Path | Mapping[str, Any],
    assignments: Mapping[str, Any],
    files: Iterable[str],
    bundled_folder: str = "",
) -> JsonObject:
    """Read a YAML file, a bundled config or a mapping, and override values by their
    dotted names.

    files: names ``section.key`` of settings that are paths. Paths in a file are
    relative to its folder (`koffline.bundled.path_in_bundled` for a bundled one),
    others to the current folder. bundled_folder: where bundled configs are looked for,
    as in `koffline.bundled.bundled_configs`. Raises ConfigError.
    """
    if isinstance(source, Mapping):
        content = copy.deepcopy(dict(source))
    else:
        file, is_bundled = config_file(source, bundled_folder)
        content = read_yaml(file)
        if is_bundled:
            _change_paths(content, files, lambda path: path_in_bundled(path, file))
        else:
            folder = file.resolve().parent
            _change_paths(content, files, lambda path: folder / path)
    for name, value in assignments.items():
        _assign(content, name, value)
    _change_paths(content, files, Path)
    return content


def _assign(content: JsonObject, path: str, value: object) -> None:
    """Set a value by its dotted name; sections that are missing are made."""
    *parents, last = path.split(".")
    place = content
    for depth, name in enumerate(parents):
        below = place.get(name)
        if isinstance(below, str) and name != "source":
            below = {"type": below}  # a factory given by its type only
        if not isinstance(below, dict | None):
            raise ConfigError(
                f"--set {path}: {'.'.join(parents[: depth + 1])} is {below!r}, it has"
                " no parts"
            )
        if below is None:
            below = {}
        place[name] = below
        place = below
    place[last] = value


def _change_paths(
    content: JsonObject, files: Iterable[str], place: Callable[[str], Path]
) -> None:
    """Make the paths among settings absolute, in place.

    content: settings by section. files: as in `read_layers`. place: where a path leads.
    """
    for name in files:
        section, key = name.split(".")
        settings = content.get(section)
        if not isinstance(settings, dict):
            continue
        value = settings.get(key)
        if not isinstance(value, str) or not value:
            continue
        is_remote = value.startswith("minari:") or "://" in value
        if not is_remote:
            path = place(os.path.expanduser(value))
            settings[key] = str(path.resolve())
