"""Settings: YAML and ``key=value`` strings become one frozen record; every default lives here, once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from koffline.errors import ConfigError, nearest_name
from koffline.untrusted.limits import Refused
from koffline.untrusted.yaml_files import DuplicateKeyError, parse_yaml, read_yaml_file


class EvaluationSettings(BaseModel):
    """Everything that decides an estimate, besides the log, the policy and the initial states.

    Unknown names are refused with the nearest valid one. Units: ``bandwidth`` is a multiple of the median
    distance between rows, ``learning_rate`` is Adam's, ``steps`` are gradient steps of every replica.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    gamma: float = Field(gt=0.0, lt=1.0, description="discount factor, inside (0, 1)")
    estimator: str = Field("kloss", description="estimator, kloss by default")
    interval: str = Field("default", description="kind of the interval; 'default': the estimator's own")
    level: float = Field(0.95, gt=0.0, lt=1.0, description="level of the interval")
    seed: int = Field(0, ge=0, lt=2**31, description="seed of everything random")

    hidden_units: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (64, 64), description="units of the hidden layers"
    )
    steps: int | None = Field(
        None, ge=1, description="gradient steps of every replica; by default rounds until the heads agree"
    )
    agreement: float = Field(
        0.1, gt=0.0, description="share of the interval's width by which the heads of a network may differ"
    )
    batch_size: int = Field(256, ge=2, description="rows in a mini-batch")
    learning_rate: float = Field(3e-3, gt=0.0, description="Adam's, decayed to zero by a cosine")
    target_rate: float = Field(0.1, gt=0.0, le=1.0, description="rate at which the target network follows")
    full_replicas: int = Field(3, ge=1, description="networks trained on the whole log; their mean counts")
    resampled_replicas: int = Field(12, ge=2, description="networks trained on resampled episodes")
    sample_rows: int = Field(
        200_000,
        ge=2,
        description="about so many rows of a larger log, whole episodes, train networks",
    )
    action_draws: int = Field(8, ge=1, description="actions drawn per state from a continuous policy")

    bandwidth: float = Field(0.6, gt=0.0, description="kernel bandwidth as a multiple of the median distance")
    instruments: int = Field(
        1000, ge=2, le=100_000, multiple_of=2, description="random Fourier features of the kernel"
    )
    ridge: float = Field(1e-3, gt=0.0, description="relative ridge toward the trained last layer")

    feature_source: Literal["learned", "random"] = Field(
        "learned", description="features of the closed forms: a trained network's (learned) or random"
    )
    features: int = Field(100, ge=2, le=10_000, multiple_of=2, description="random features of closed forms")
    feature_width: float = Field(
        1.0, gt=0.0, description="width of the random features, a multiple of the median"
    )
    norm_bound: float | None = Field(
        None, gt=0.0, le=1e100, description="largest norm of Q in kernel intervals (rho)"
    )
    reward_bounds: tuple[float, float] | None = Field(
        None, description="known bounds [low, high] of every reward, for certified intervals"
    )
    weight_clip: float | None = Field(None, gt=0.0, description="cap of importance weights, none by default")
    behavior: Literal["auto", "log", "estimate"] = Field(
        "auto", description="behaviour probabilities: the log's (log), estimated, or auto"
    )
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="device: cpu, cuda or cuda:N")
    threads: int = Field(1, ge=1, description="number of threads of this process")

    @field_validator("*", mode="before")
    @classmethod
    def _plain_numbers(cls, value: Any) -> Any:
        """No yes/no where a number belongs; 1e4, which YAML takes for text, is a number."""
        if isinstance(value, bool):
            raise PydanticCustomError("no_yes_or_no", "a yes or no is no value here")
        if isinstance(value, str):
            try:
                number = float(value)
            except ValueError:
                return value
            return int(number) if number.is_integer() else number
        return value


def make_settings(*layers: Mapping[str, Any]) -> EvaluationSettings:
    """Later layers win over earlier ones, keys whose value is None say nothing.

    Raises ConfigError in one line: an unknown key (with the nearest valid one) or a value out of range.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        merged.update({key: value for key, value in layer.items() if value is not None})
    known = EvaluationSettings.model_fields
    for key in merged:
        if key not in known:
            raise ConfigError(f"unknown option '{key}'; {nearest_name(key, sorted(known))}")
    if "gamma" not in merged:
        raise ConfigError("gamma is missing; give the discount factor, as in --gamma 0.99")
    try:
        return EvaluationSettings(**merged)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        message = first["msg"][0].lower() + first["msg"][1:]
        raise ConfigError(
            f"option '{name}' is {merged[name]!r}: {message}; it is the {known[name].description}"
        ) from None


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The top-level mapping of a YAML file; ConfigError when it is missing, unreadable or no mapping."""
    read = read_yaml_file(Path(path), f"config file {path}", ConfigError)
    return {str(key): value for key, value in read.items()}


def parse_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """``("steps=2000", …)`` as a mapping, the values read as YAML; ConfigError without an equals sign."""
    parsed: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set received '{assignment}'; write it as key=value")
        try:
            parsed[key.strip()] = parse_yaml(value)
        except (yaml.YAMLError, Refused, DuplicateKeyError):
            raise ConfigError(f"--set {key.strip()} received '{value}'; write a number or a word") from None
    return parsed
