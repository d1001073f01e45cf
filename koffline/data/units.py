"""Units of a log (episodes, or rows without episodes): samples and sums.

A sample consists of the units with the smallest hashes. It therefore does not depend on
reading order, shards or machine, and a smaller sample with the same seed is part of a
larger one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from koffline.data.disk.log import AnyLog, LazyTransitions, joined
from koffline.data.hashing import unit_hash
from koffline.data.transitions import Transitions
from koffline.jobs import PassSettings

# Keys of the hashes that sample and split units; they are independent of other random
# numbers.
UNITS_STREAM = 0x65706973
_HASHED_AT_ONCE = 2**20


@dataclass(frozen=True)
class Part:
    """One side of a split of a log on disk by whole units: those ``held_out``, or all
    others.

    Units with hashes up to ``largest`` are held out. firsts: number in the log of each
    shard's first unit.
    """

    seed: int
    largest: int
    firsts: tuple[int, ...]
    held_out: bool

    def holds(self, shard: int, units: np.ndarray) -> np.ndarray:
        """Whether units (B,) of a shard are in this part."""
        hashes = unit_hash(self.seed ^ UNITS_STREAM, 0, units + self.firsts[shard])
        is_out = hashes <= np.uint64(self.largest)
        if self.held_out:
            return is_out
        return ~is_out


def cluster_sums(clusters: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Sums (C, …) of unit values (U, …) by cluster number (U,), in the order of the
    numbers.
    """
    _, place = np.unique(clusters, return_inverse=True)
    sums = np.zeros((int(place.max(initial=-1)) + 1, *values.shape[1:]))
    np.add.at(sums, place, values)
    return sums


@dataclass(frozen=True, eq=False)
class UnitSample:
    """Sampled units of a log, in order.

    ``units (U,)``: their numbers. ``is_all``: it is the whole log.
    """

    transitions: Transitions
    units: Int[np.ndarray, " unit"]
    is_all: bool


def sample_units(
    log: AnyLog,
    rows: int,
    seed: int,
    part: Part | None = None,
    *,
    settings: PassSettings | None = None,
) -> UnitSample:
    """Draw units uniformly without replacement, at least one, with about ``rows`` rows
    in total.

    part: draw only from that side of a split of a log on disk. settings: where the
    passes run. Raises DataError.
    """
    total = log.n_episodes if log.has_episodes else len(log)
    wanted = max(1, round(rows * total / len(log)))
    if isinstance(log, Transitions):
        if wanted >= total:
            return UnitSample(log, np.arange(total), is_all=True)
        units = smallest_units([total], wanted, seed)
        if log.has_episodes:
            chosen = log.select_episodes(units)
        else:
            chosen = log.select(units)
        return UnitSample(chosen, units, is_all=False)
    sizes = units_of_shards(log)
    units = smallest_units(sizes, wanted, seed, part)
    ends = np.cumsum(sizes)
    shard_of = np.searchsorted(ends, units, side="right")
    items = []
    for shard in np.unique(shard_of):
        first = int(ends[shard] - sizes[shard])
        items.append((int(shard), units[shard_of == shard] - first))
    passes = settings or PassSettings()
    pieces = list(
        passes.map(_units_of_shard, items, log, lambda item: log.shards[item[0]].name)
    )
    columns = dict(joined(pieces).columns)
    columns.pop("episode_ids", None)
    sample = Transitions.of_whole_units(columns, log.action_space, log.metadata)
    return UnitSample(sample, units, len(units) == sum(sizes))


def units_of_shards(log: LazyTransitions) -> list[int]:
    """Numbers of units (episodes, or rows without episodes) of the shards."""
    if log.has_episodes:
        return [shard.episodes for shard in log.shards]
    return [shard.rows for shard in log.shards]


def smallest_units(
    sizes: list[int], count: int, seed: int, part: Part | None = None
) -> Int[np.ndarray, " unit"]:
    """Numbers of the ``count`` units with the smallest hashes, in order. sizes: units
    of each shard.
    """
    numbers = np.zeros(0, dtype=np.int64)
    hashes = np.zeros(0, dtype=np.uint64)
    first = 0
    for shard, size in enumerate(sizes):
        for start in range(0, size, _HASHED_AT_ONCE):
            within = np.arange(start, min(start + _HASHED_AT_ONCE, size))
            if part is not None:
                within = within[part.holds(shard, within)]
            numbers = np.append(numbers, within + first)
            hashes = np.append(
                hashes, unit_hash(seed ^ UNITS_STREAM, 0, within + first)
            )
            if len(hashes) > count:
                kept = np.argpartition(hashes, count - 1)[:count]
                numbers = numbers[kept]
                hashes = hashes[kept]
        first += size
    return np.sort(numbers)


def _units_of_shard(log: LazyTransitions, item: tuple[int, np.ndarray]) -> Transitions:
    """All rows of the given units of a shard, in order."""
    shard, units = item
    return joined(
        [block.part(np.isin(block.units, units)) for block in log.shard_blocks(shard)]
    )
