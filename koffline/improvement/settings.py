"""Settings of `koffline.improve`; every default stands here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from koffline.config import Section, read_section
from koffline.errors import ConfigError

_BUDGET = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(s|sec|m|min|h|d)?\s*")
_SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


class ImproveSettings(Section):
    """What determines the search for a better policy, besides log, gamma, level and
    seed.
    """

    candidates: tuple[Annotated[str, Field(min_length=1)], ...] | None = Field(
        None,
        min_length=1,
        description="names, or beginnings of names, of the candidates; all by default",
    )
    shares: tuple[Annotated[float, Field(gt=0.0, le=1.0)], ...] = Field(
        (0.25, 0.5, 0.75, 1.0),
        min_length=1,
        description="shares of a candidate in its mixtures with the clone",
    )
    finalists: int = Field(
        2, ge=1, le=20, description="policies that the certify part is asked about"
    )
    folds: int | None = Field(
        None,
        ge=1,
        le=20,
        description="folds of a one-step log, each of which certifies a policy that the"
        " others have taught; 1: three parts; by default 5 folds of few units, else 1",
    )
    training_steps: int | None = Field(
        None, ge=1, le=10**7, description="gradient steps of a candidate; by the rows"
    )
    training_rows: int = Field(
        100_000, ge=10, description="rows that candidates learn from at most"
    )
    choosing_steps: int = Field(
        1000, ge=1, le=10**7, description="steps of the networks that choose"
    )
    certifying_steps: int | None = Field(
        None,
        ge=1,
        le=10**8,
        description="steps of the networks that certify; until values settle",
    )
    full_replicas: int = Field(
        3, ge=1, le=1000, description="networks on the whole certify part"
    )
    resampled_replicas: int = Field(
        20, ge=2, le=1000, description="networks on resampled episodes"
    )

    @field_validator("candidates", mode="before")
    @classmethod
    def _one_name(cls, value: object) -> object:
        if isinstance(value, str):
            return (value,)
        return value

    @field_validator("shares")
    @classmethod
    def _different(cls, shares: tuple[float, ...]) -> tuple[float, ...]:
        """Refuse shares whose mixtures would have the same name."""
        names = {share_name(share) for share in shares}
        if len(names) < len(shares):
            raise PydanticCustomError(
                "alike", "two of them are equal in six digits; give different shares"
            )
        return shares


def share_name(share: float) -> str:
    """The share in the name of a mixture."""
    return f"{share:g}"


def make_improve_settings(
    settings: ImproveSettings | Mapping[str, Any] | None,
) -> ImproveSettings:
    """Settings from a record or a mapping; None: the defaults. Raises ConfigError."""
    if isinstance(settings, ImproveSettings):
        return settings
    if settings is None:
        settings = {}
    if not isinstance(settings, Mapping):
        raise ConfigError(
            f"settings is {str(settings)[:40]!r}; give a mapping such as"
            " {'finalists': 2}, or an ImproveSettings"
        )
    return read_section(ImproveSettings, dict(settings))


def seconds_of(budget: str | int | float | None) -> float | None:
    """Seconds of a budget such as "10m", "1h" or a number of seconds.

    Raises ConfigError.
    """
    if budget is None:
        return None
    seconds = 0.0
    if isinstance(budget, str):
        match = _BUDGET.fullmatch(budget)
        if match is not None:
            seconds = float(match[1]) * _SECONDS[match[2] or "s"]
    elif isinstance(budget, (int, float)) and not isinstance(budget, bool):
        seconds = float(budget)
    if not 1.0 <= seconds < float("inf"):
        raise ConfigError(
            f"budget is {budget!r}; give a time such as 10m or 1h, at least a second"
        )
    return seconds
