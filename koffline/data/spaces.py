"""Action spaces, declared by whoever made the log and never inferred from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from koffline.errors import DataError

# Largest discrete space: larger ones in a file would exhaust the memory, as policies return (N, n).
LARGEST_SPACE = 2**20


@dataclass(frozen=True, init=False)
class Discrete:
    """Actions are the integers 0 … n − 1. Raises DataError unless n is an integer from 1 to 1,048,576."""

    n: int

    def __init__(self, n: Any) -> None:
        object.__setattr__(self, "n", _positive_int("Discrete(n)", n))

    def __str__(self) -> str:
        return f"Discrete({self.n})"


@dataclass(frozen=True, init=False)
class Continuous:
    """Actions are vectors of k numbers within [low, high], one bound per number; infinite by default.

    ``low`` and ``high`` are given as a number or as k numbers, and kept as tuples of k floats.
    Raises DataError unless k ≥ 1, the bounds have k numbers each and low ≤ high.
    """

    k: int
    low: tuple[float, ...]
    high: tuple[float, ...]

    def __init__(self, k: Any, low: Any = -math.inf, high: Any = math.inf) -> None:
        object.__setattr__(self, "k", _positive_int("Continuous(k)", k))
        object.__setattr__(self, "low", _bounds("low", low, self.k))
        object.__setattr__(self, "high", _bounds("high", high, self.k))
        for i, (lower, upper) in enumerate(zip(self.low, self.high, strict=True)):
            if lower > upper:
                raise DataError(f"action bound {i} has low {lower:g} above high {upper:g}; swap them")

    def __str__(self) -> str:
        bounds = [f"{low:g} … {high:g}" for low, high in zip(self.low, self.high, strict=True)]
        return f"Continuous({self.k}, {', '.join(bounds if len(set(bounds)) > 1 else bounds[:1])})"


@dataclass(frozen=True)
class Bounds:
    """A request for continuous actions within [low, high]; the log says how many numbers an action has."""

    low: float | int
    high: float | int


ActionSpace = Discrete | Continuous
# Action space that a caller may request from a reader.
SpaceRequest = Discrete | Continuous | Bounds


def _positive_int(name: str, value: object) -> int:
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_integer or not 1 <= value <= LARGEST_SPACE:  # type: ignore[operator]
        shown = f"{value!r}"[:40]
        raise DataError(f"{name} is {shown}; give an integer from 1 to {LARGEST_SPACE}, actions without gaps")
    return int(value)  # type: ignore[call-overload]


def _bounds(name: str, value: object, k: int) -> tuple[float, ...]:
    try:
        given = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        given = np.array(np.nan)
    if given.shape not in ((), (1,), (k,)) or np.isnan(given).any():
        raise DataError(f"Continuous({name}=…) is {value!r}; give a number or {k} numbers, none of them NaN")
    return tuple(np.broadcast_to(given, (k,)).tolist())
