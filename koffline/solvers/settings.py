"""Settings of the exact solvers: one frozen record, checked once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

from koffline.errors import ConfigError, nearest_name
from koffline.kernel_loss import check_diag_weight
from koffline.solvers.quadratic import check_ridge
from koffline.solvers.selection import RULES

SOLVERS = ("closed-form", "variable-projection")


@dataclass(frozen=True)
class SolverSettings:
    """What the solvers need to know; lengths are in units of the kernel inputs (the unit box, for a log).

    Both: bandwidth of the Gaussian kernel, relative ridge, diag_weight (None: the V-statistic),
    kernel_features (None: the exact kernel up to 10,000 rows, 2000 random features above; 500 for networks),
    seed.
    Closed form: feature_width and feature_count of random Fourier features. Bandwidth, ridge and
    feature_width left None are chosen by `rule` over `folds` folds.
    Networks: bandwidth None is a fifth of the median distance, ridge None 1e-4; hidden_units, steps,
    batch_size, learning_rate, replicas (seeds from `seed` up).
    """

    bandwidth: float | None = None
    ridge: float | None = None
    diag_weight: float | None = None
    kernel_features: int | None = None
    seed: int = 0
    feature_width: float | None = None
    feature_count: int = 400
    rule: str = "lstd-tournament"
    folds: int = 5
    hidden_units: tuple[int, ...] = (80,)
    steps: int = 500
    batch_size: int = 1000
    learning_rate: float = 0.01
    replicas: int = 1

    def __post_init__(self) -> None:
        for name in ("bandwidth", "feature_width", "learning_rate"):
            number = getattr(self, name)
            if number is not None or name == "learning_rate":
                _check_number(name, number)
        for name, least in (("seed", 0), ("folds", 2), ("batch_size", 2), ("steps", 1), ("replicas", 1)):
            _check_count(name, getattr(self, name), least)
        _check_count("feature_count", self.feature_count, 2, even=True)
        if self.kernel_features is not None:
            _check_count("kernel_features", self.kernel_features, 2, even=True)
        if not isinstance(self.hidden_units, tuple) or not self.hidden_units:
            raise ConfigError(f"hidden_units is {self.hidden_units!r}; give a tuple, one number per layer")
        for units in self.hidden_units:
            _check_count("hidden_units", units, 1)
        if self.ridge is not None:
            if not _is_number(self.ridge):
                raise ConfigError(f"ridge is {self.ridge!r}; give a number that is not negative")
            check_ridge(self.ridge)
        if self.diag_weight is not None:
            if not _is_number(self.diag_weight):
                raise ConfigError(f"diag_weight is {self.diag_weight!r}; give a number in [0, 1]")
            check_diag_weight(self.diag_weight)
        if self.rule not in RULES:
            raise ConfigError(f"rule is '{self.rule}'; use one of {', '.join(RULES)}")


def make_solver_settings(solver: str, given: Mapping[str, Any]) -> SolverSettings:
    """The record; ConfigError for an unknown solver or setting, with the nearest name."""
    if solver not in SOLVERS:
        raise ConfigError(f"there is no solver '{solver}'; {nearest_name(str(solver), SOLVERS)}")
    known = [item.name for item in fields(SolverSettings)]
    for name in given:
        if name not in known:
            raise ConfigError(f"there is no setting '{name}'; {nearest_name(name, known)}")
    return SolverSettings(**given)


def _check_number(name: str, number: Any) -> None:
    if not _is_number(number) or not (math.isfinite(number) and number > 0.0):
        raise ConfigError(f"{name} is {number!r}; give a positive number")


def _check_count(name: str, number: Any, least: int, even: bool = False) -> None:
    if not _is_number(number) or not isinstance(number, Integral) or number < least or (even and number % 2):
        raise ConfigError(
            f"{name} is {number!r}; give {'an even' if even else 'a whole'} number, at least {least}"
        )


def _is_number(number: Any) -> bool:
    """A finite number, and no yes or no."""
    return isinstance(number, Real) and not isinstance(number, bool) and math.isfinite(number)
