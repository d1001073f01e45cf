"""Hashes of units and rows: random numbers that depend on a seed and a number alone,
not on reading order, shards or machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np
from jaxtyping import Int

from koffline.data.transitions import Transitions

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1
# Distribution of a Poisson number of mean one, which is larger than 19 once in 10^19
# draws.
_POISSON = np.cumsum([math.exp(-1.0) / math.factorial(count) for count in range(20)])
Words = TypeVar("Words", np.uint64, np.ndarray)  # one, or an array (B,)
ROW_NUMBERS = ("observations", "actions", "rewards", "next_observations")


def unit_hash(seed: int, shard: int, units: Sequence[int] | np.ndarray) -> np.ndarray:
    """Hash (B,) uint64 of units: uniform, independent between units, and a function of
    its arguments alone.

    units: (B,) numbers within the shard (``units`` of a block). The result does not
    depend on block size, order or machine. Divide by 2**64 for uniform numbers in [0,
    1), or take ``% n`` for one of n groups. (Steele, Lea and Flood 2014, SplitMix64:
    its output function, applied three times)
    """
    with np.errstate(over="ignore"):  # words of 64 bits wrap around
        key = _mix(_mix(np.uint64(seed & _MASK) + _GAMMA) ^ np.uint64(shard & _MASK))
        counted = np.asarray(units).astype(np.uint64) * _GAMMA
        return _mix(_mix(counted + key) ^ key)


def _mix(state: Words) -> Words:
    """SplitMix64's output function: a bijection of 64-bit words."""
    with np.errstate(over="ignore"):
        state = (state ^ (state >> np.uint64(30))) * _FIRST
        state = (state ^ (state >> np.uint64(27))) * _SECOND
        return state ^ (state >> np.uint64(31))


def poisson_counts(
    seed: int, streams: Iterable[int], units: Sequence[int] | np.ndarray
) -> Int[np.ndarray, "stream unit"]:
    """How often each resampled log counts each unit: independent Poisson numbers of
    mean one.

    Each depends only on the seed, the stream (the number of a resampled log) and the
    unit's number, so a log is resampled in the same way wherever it is stored.
    (Hanley & MacGibbon 2006; Chamandy, Muralidharan, Najmi & Naidu 2012)
    """
    uniform = [unit_hash(seed, stream, units) * 2.0**-64 for stream in streams]
    shaped = np.reshape(uniform, (len(uniform), len(units)))
    # the smallest count whose distribution function exceeds the uniform number
    counts = np.searchsorted(_POISSON, shaped, side="right")
    return counts.astype(np.int64)


def hash_rows(
    block: Transitions,
    names: tuple[str, ...] = ROW_NUMBERS,
    precision: type = np.float64,
) -> np.ndarray:
    """Hash (B,) uint64 of each row's rounded numbers in the named columns, from two
    random sums.

    Equal rows have equal hashes; different rows almost never do.
    """
    generator = np.random.default_rng(0)
    sums = np.zeros((len(block), 2))
    for name in names:
        column = getattr(block, name)
        weights = generator.standard_normal((max(1, int(np.prod(column.shape[1:]))), 2))
        part = np.asarray(column, dtype=precision).astype(np.float64, copy=False)
        # einsum, because the rounding of a matrix product depends on the number of rows
        sums += np.einsum("nd,dk->nk", part.reshape(len(part), -1), weights)
    bits = (sums + 0.0).view(np.uint64)  # 0.0 and −0.0 are equal
    return np.asarray(unit_hash(0, 0, bits[:, 0]) ^ unit_hash(0, 1, bits[:, 1]))
