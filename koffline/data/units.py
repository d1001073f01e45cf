"""Units of a log (episodes, or rows without episodes): hashes, samples and splits.

A sample consists of the units with the smallest hashes. It therefore does not depend on
reading order, shards or machine, and a smaller sample with the same seed is part of a
larger one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from jaxtyping import Int

from koffline.data.disk.log import AnyLog, LazyTransitions, joined
from koffline.data.transitions import Transitions
from koffline.errors import ConfigError, counted
from koffline.jobs import PassSettings

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1
# Keys of the hashes that sample and split units; they are independent of other random
# numbers.
_UNITS = 0x65706973
_HELD_OUT = 0x68656C64
_ENDS = 0x656E6473
_HASHED_AT_ONCE = 2**20
# Distribution of a Poisson number of mean one, which is larger than 19 once in 10^19
# draws.
_POISSON = np.cumsum([math.exp(-1.0) / math.factorial(count) for count in range(20)])
_WHOLE = " (in the whole log)"
ROW_NUMBERS = ("observations", "actions", "rewards", "next_observations")


def unit_hash(seed: int, shard: int, units: Any) -> np.ndarray:
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


def _mix(state: Any) -> Any:
    """SplitMix64's output function: a bijection of 64-bit words."""
    with np.errstate(over="ignore"):
        state = (state ^ (state >> np.uint64(30))) * _FIRST
        state = (state ^ (state >> np.uint64(27))) * _SECOND
        return state ^ (state >> np.uint64(31))


def poisson_counts(
    seed: int, streams: Iterable[int], units: Any
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


def cluster_sums(clusters: Any, values: Any) -> np.ndarray:
    """Sums (C, …) of unit values (U, …) by cluster number (U,), in the order of the
    numbers.
    """
    _, place = np.unique(clusters, return_inverse=True)
    sums = np.zeros((int(place.max(initial=-1)) + 1, *values.shape[1:]))
    np.add.at(sums, place, values)
    return sums


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
        hashes = unit_hash(self.seed ^ _UNITS, 0, units + self.firsts[shard])
        is_out = hashes <= np.uint64(self.largest)
        if self.held_out:
            return is_out
        return ~is_out


def stop_shares(log: Transitions) -> np.ndarray | None:
    """Share (T,) of episodes that lost their row at each step, among those whose world
    went on there.

    None unless the reader left out such rows.
    """
    if not (log.has_episodes and log.metadata.lost_last_rows):
        return None
    ends = log.episode_ends
    lengths = np.asarray(log.episode_lengths)
    weights = log.row_weights[ends]
    ended = np.asarray(log.terminated)[ends]
    size = int(lengths.max()) + 1
    lost = np.bincount(lengths[~ended], weights[~ended], minlength=size)
    # by number of rows that went on
    went_on = np.bincount(lengths - ended, weights, minlength=size)
    kept = went_on.sum() - np.cumsum(went_on)
    at_risk = lost + kept
    return np.asarray(lost / np.where(at_risk > 0.0, at_risk, 1.0))


def without_late_ends(
    log: Transitions, units: Any = None, stops: Any = None
) -> Transitions:
    """Remove some last rows of terminated episodes, which would be too frequent; the
    row before is then cut.

    If recording stops and the world goes on, the last row is left out; had the world
    ended, it would be there. To balance this, each terminal row is removed with the
    probability that recording stopped there (``stops`` (T,), else `stop_shares`),
    decided by the hash of its unit's number (``units`` (U,), else all units).
    """
    if stops is None:
        stops = stop_shares(log)
    if stops is None:
        return log
    ends = log.episode_ends
    if units is None:
        units = np.arange(len(ends))
    lengths = np.asarray(log.episode_lengths)
    uniform = unit_hash(_ENDS, 0, units).astype(np.float64) / 2.0**64
    share = np.append(stops, 0.0)[np.minimum(lengths - 1, len(stops))]
    ended = np.asarray(log.terminated)[ends]
    gone = ends[ended & (lengths > 1) & (uniform < share)]
    cut = np.array(log.truncated)
    cut[gone - 1] = True
    left = np.delete(np.arange(len(log)), gone)
    columns = {**log.columns, "truncated": cut}
    columns = {name: column[left] for name, column in columns.items()}
    metadata = dataclasses.replace(log.metadata, lost_last_rows=False)
    if len(gone):
        rows = counted(len(gone), "last row", "was", "were")
        metadata = metadata.with_notes(
            f"{rows} left out of episodes that terminated: where recording stops they"
            " would be too frequent"
        )
    return Transitions.of_checked(columns, log.action_space, metadata=metadata)


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
        units = _smallest([total], wanted, seed)
        if log.has_episodes:
            chosen = log.select_episodes(units)
        else:
            chosen = log.select(units)
        return UnitSample(chosen, units, is_all=False)
    sizes = _units_of_shards(log)
    units = _smallest(sizes, wanted, seed, part)
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


def _units_of_shards(log: LazyTransitions) -> list[int]:
    """Numbers of units (episodes, or rows without episodes) of the shards."""
    if log.has_episodes:
        return [shard.episodes for shard in log.shards]
    return [shard.rows for shard in log.shards]


def _smallest(
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
            hashes = np.append(hashes, unit_hash(seed ^ _UNITS, 0, within + first))
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


def split_transitions(
    log: Transitions, held_out: float = 0.3, seed: int = 0
) -> tuple[Transitions, Transitions]:
    """Split a log in two; the second part has the share ``held_out`` of its clusters,
    episodes or rows.

    Clusters and episodes stay whole; those with the smallest hashes for the seed are
    held out. Notes with numbers then say that they are about the whole log. Raises
    ConfigError.
    """
    is_share = isinstance(held_out, Real) and 0.0 < held_out < 1.0
    if not isinstance(log, Transitions) or not is_share:
        raise ConfigError(
            f"to split is a {type(log).__name__} and a share of {held_out!r}; give a"
            " log in memory and a share between 0 and 1"
        )
    notes = tuple(map(_of_whole_log, log.metadata.notes))
    log = log.with_metadata(dataclasses.replace(log.metadata, notes=notes))
    if log.clusters is None:
        unit_of = log.units
    else:
        unit_of = np.unique(log.clusters, return_inverse=True)[1]
    return _divide(log, unit_of, held_out, seed)


def _of_whole_log(note: str) -> str:
    """A note that says, if it holds numbers, that they are those of the whole log."""
    note = note.removesuffix(_WHOLE)
    if any(map(str.isdigit, note)):
        return note + _WHOLE
    return note


def _divide(
    log: Transitions, unit_of: np.ndarray, share: float, seed: int
) -> tuple[Transitions, Transitions]:
    """The rows that stay, and those of the units that are held out. unit_of: (N,) the
    number of each row's unit.
    """
    is_out = np.isin(unit_of, _held_out_units(int(unit_of.max()) + 1, share, seed))
    return log.select(~is_out), log.select(is_out)


def split_log(
    log: Transitions, held_out: float, seed: int
) -> tuple[Transitions, Transitions | None]:
    """Training and held-out part, without late ends, one episode (row) or more each.

    Raises ConfigError.
    """
    log = without_late_ends(log)
    if held_out == 0.0:
        return (log, None)
    return _divide(log, log.units, held_out, seed)


def split_shards(
    log: LazyTransitions, held_out: float, seed: int
) -> tuple[Part | None, Part | None]:
    """The same split for a log on disk, without removing late ends.

    Raises ConfigError.
    """
    if held_out == 0.0:
        return None, None
    sizes = _units_of_shards(log)
    chosen = _held_out_units(sum(sizes), held_out, seed)
    part_seed = seed ^ _HELD_OUT
    held_out_part = Part(
        seed=part_seed,
        largest=int(unit_hash(part_seed ^ _UNITS, 0, chosen).max()),
        firsts=tuple(np.cumsum([0, *sizes[:-1]]).tolist()),
        held_out=True,
    )
    return dataclasses.replace(held_out_part, held_out=False), held_out_part


def _held_out_units(count: int, share: float, seed: int) -> Int[np.ndarray, " unit"]:
    """Numbers of the units with the smallest hashes, of ``count`` in the log; at least
    one is held out, and one stays.

    Raises ConfigError for a log of one unit.
    """
    if count < 2:
        raise ConfigError(
            f"held_out is {share:g}, the log has one episode or cluster; give more to"
            " split it"
        )
    size = min(max(1, round(share * count)), count - 1)
    return _smallest([count], size, seed ^ _HELD_OUT)
