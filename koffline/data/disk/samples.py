"""Whole units of a log, drawn at random or divided in two: the same in memory, in shards, on any machine.

What is drawn are the units (episodes; rows, where there are none) with the smallest hashes: a function of the
seed and the unit's number in the log alone. A smaller sample with the same seed is part of a larger one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int

from koffline.data.transitions import Transitions
from koffline.data.unit_hash import unit_hash
from koffline.errors import ConfigError, DataError

if TYPE_CHECKING:
    from koffline.data.disk.log import LazyTransitions
    from koffline.jobs import PassSettings

# Units are drawn by numbers of their own, independent of those that divide or resample them elsewhere.
_UNITS, _HELD_OUT = 0x65706973, 0x68656C64
_HASHED_AT_ONCE = 2**20


@dataclass(frozen=True)
class Part:
    """One side of a split by whole units: those ``held_out`` (a fraction of them), or all others.

    Which side a unit is on depends on the seed, the shard and the unit's number alone.
    """

    fraction: float
    seed: int
    held_out: bool

    def holds(self, shard: int, units: np.ndarray) -> np.ndarray:
        """(B,) whether units of a shard are in this part."""
        out = unit_hash(self.seed ^ _HELD_OUT, shard, units) < np.uint64(int(self.fraction * 2.0**64))
        return out if self.held_out else ~out


@dataclass(frozen=True, eq=False)
class UnitSample:
    """Units of a log in its order. ``units (U,)``: their numbers in the log. ``is_all``: no others were left.
    ``skipped``: why shards with some of them were left out.
    """

    transitions: Transitions
    units: Int[np.ndarray, " unit"]
    is_all: bool
    skipped: tuple[str, ...] = ()


def sample_units(
    log: Transitions | LazyTransitions,
    rows: int,
    seed: int,
    part: Part | None = None,
    *,
    settings: PassSettings | None = None,
) -> UnitSample:
    """Units drawn uniformly without replacement, about ``rows`` rows together and at least one unit; all
    units, where there are no more rows.

    part: draws from that side of a split of a log on disk alone. settings: where the passes over it run, and
    whether shards that cannot be read are left out. Raises DataError.
    """
    if rows < 1:
        raise DataError(f"a sample of rows={rows}; give a positive number")
    total = log.n_episodes if log.has_episodes else len(log)
    wanted = max(1, round(rows * total / len(log)))
    if isinstance(log, Transitions):
        if wanted >= total:
            return UnitSample(log, np.arange(total), is_all=True)
        units = np.sort(_smallest(np.array([total]), wanted, seed))
        chosen = log.select_episodes(units) if log.has_episodes else log.select(units)
        return UnitSample(chosen, units, is_all=False)
    sizes = np.array([shard.episodes if log.has_episodes else shard.rows for shard in log.shards])
    units = np.sort(_smallest(sizes, wanted, seed, part))
    if not units.size:
        raise DataError("no episode is left in that part of the log; hold out another share of it")
    return _read(log, units, sizes, settings)


def _smallest(
    sizes: Int[np.ndarray, " shard"], count: int, seed: int, part: Part | None = None
) -> Int[np.ndarray, " unit"]:
    """Numbers of the ``count`` units with the smallest hashes, within a part if given; sizes: of shards."""
    total = int(sizes.sum())
    share = min(1.0, (count + 6 * count**0.5 + 16) / max(1, total))
    while True:
        numbers, hashes = _below(sizes, share, seed, part)
        if len(numbers) >= count or share == 1.0:
            break
        share = min(1.0, 2.0 * share)  # bad luck, or a part that is small
    return numbers[np.argsort(hashes, kind="stable")[:count]]


def _below(
    sizes: Int[np.ndarray, " shard"], share: float, seed: int, part: Part | None
) -> tuple[np.ndarray, np.ndarray]:
    """Numbers and hashes of the units whose hash is among the ``share`` smallest."""
    limit = np.uint64(min(int(share * 2.0**64), 2**64 - 1))
    numbers, hashes = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.uint64)]
    first = 0
    for shard, size in enumerate(sizes.tolist()):
        for start in range(0, size, _HASHED_AT_ONCE):
            within = np.arange(start, min(start + _HASHED_AT_ONCE, size))
            found = unit_hash(seed ^ _UNITS, 0, within + first)
            kept = found <= limit
            if part is not None:
                kept &= part.holds(shard, within)
            numbers.append(within[kept] + first)
            hashes.append(found[kept])
        first += size
    return np.concatenate(numbers), np.concatenate(hashes)


def _read(
    log: LazyTransitions,
    units: Int[np.ndarray, " unit"],
    sizes: Int[np.ndarray, " shard"],
    settings: PassSettings | None,
) -> UnitSample:
    """The rows of the chosen units, shard by shard."""
    from koffline.jobs import PassSettings

    ends = np.cumsum(sizes)
    shard_of = np.searchsorted(ends, units, side="right")
    items = [(int(i), units[shard_of == i] - int(ends[i] - sizes[i])) for i in np.unique(shard_of)]
    passes, pieces, kept, skipped = settings or PassSettings(), [], [], []
    mapped = passes.map(_units_of_shard, items, log, lambda item: log.shards[item[0]].name)
    for (shard, _), result in zip(items, mapped, strict=True):
        if result.failure is None:
            pieces.append(result.value)
            kept.append(units[shard_of == shard])
        else:
            skipped.append(result.failure.reason)
    if not pieces:
        raise DataError(f"no shard with episodes of the sample can be read: {skipped[0]}")
    joined = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
    found = Transitions(**joined, action_space=log.action_space, metadata=log.metadata)
    return UnitSample(found, np.concatenate(kept), len(units) == int(sizes.sum()), tuple(skipped))


def _units_of_shard(log: LazyTransitions, item: tuple[int, np.ndarray]) -> dict[str, np.ndarray]:
    """All rows of the given units of a shard, which are in order."""
    shard, units = item
    pieces = []
    for block in log.shard_blocks(shard):
        places = np.minimum(np.searchsorted(units, block.units), len(units) - 1)
        pieces.append(block.part(units[places] == block.units).arrays())
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0] if name != "units"}


def split_log(log: Transitions, held_out: float, seed: int) -> tuple[Transitions, Transitions | None]:
    """Training part and held-out part, whole episodes each; rows where there are no episodes.

    At least one episode is on either side. Raises ConfigError where there are too few.
    """
    if held_out == 0.0:
        return log, None
    count = log.n_episodes if log.has_episodes else len(log)
    if count < 2:
        raise ConfigError(f"data.split.held_out is {held_out:g}, but the log has one episode; leave it out")
    kept_out = min(max(1, round(held_out * count)), count - 1)
    chosen = np.zeros(count, dtype=np.bool_)
    chosen[np.random.default_rng(seed).permutation(count)[:kept_out]] = True
    rows = np.repeat(chosen, log.episode_lengths) if log.has_episodes else chosen
    return log.select(np.flatnonzero(~rows)), log.select(np.flatnonzero(rows))
