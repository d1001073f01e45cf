"""Random numbers that belong to a row's unit and not to the order in which rows are read."""

from __future__ import annotations

from typing import Any

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def unit_hash(seed: int, shard: int, units: Any) -> np.ndarray:
    """(B,) uint64, uniform and independent between units: a function of seed, shard and unit alone.

    units: (B,) ordinals within the shard (``RowBlock.units``). The same numbers come out whatever the size
    of blocks, their order or the machine. Divide by 2**64 for uniform numbers in [0, 1), take ``% n`` for
    one of n groups. (Steele, Lea and Flood 2014, SplitMix64: its output function, applied three times)
    """
    with np.errstate(over="ignore"):  # words of 64 bits wrap around
        key = _mix(_mix(np.uint64(seed & _MASK) + _GAMMA) ^ np.uint64(shard & _MASK))
        counted = np.asarray(units).astype(np.uint64) * _GAMMA
        return _mix(_mix(counted + key) ^ key)


def _mix(state: Any) -> Any:
    """SplitMix64's output function: a bijection of 64-bit words."""
    with np.errstate(over="ignore"):
        state = (state ^ (state >> np.uint64(30))) * _FIRST
        state = (state ^ (state >> np.uint64(27))) * _SECOND
        return state ^ (state >> np.uint64(31))
