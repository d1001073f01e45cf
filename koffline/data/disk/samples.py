"""Random rows, start states and episodes of a log on disk, the same whatever the machine or the block size.

What is drawn are the units with the smallest hashes: a function of the seed, the shard and the unit's number
alone. A smaller sample with the same seed is the beginning of a larger one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from koffline.data.remote import is_url
from koffline.data.row_block import ROW_COLUMNS, RowBlock
from koffline.data.transitions import Transitions
from koffline.data.unit_hash import unit_hash
from koffline.errors import DataError

if TYPE_CHECKING:
    from koffline.data.disk.log import LazyTransitions
    from koffline.jobs.mapping import PassSettings

# Rows and episodes are drawn by numbers of their own, independent of those that group them elsewhere.
_ROWS, _STARTS, _EPISODES, _HELD_OUT = 0x726F7773, 0x73746172, 0x65706973, 0x68656C64
_HASHED_AT_ONCE = 2**20
# Unwanted rows between two wanted ones that are read rather than skipped.
_GAP = 4096
_SPAN_ROWS = 2**16
_NOTHING = "no shard of the log can be read; mend its files"


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
class _Chosen:
    """Units in the order of their hashes: shards (M,) and numbers within them (M,)."""

    shards: np.ndarray
    numbers: np.ndarray

    def by_shard(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Each shard that has any: its number, its units in order, their places in the sample."""
        order = np.lexsort((self.numbers, self.shards))
        for places in np.split(order, np.flatnonzero(np.diff(self.shards[order])) + 1):
            if places.size:
                yield int(self.shards[places[0]]), self.numbers[places], places


def sample_transitions(
    log: LazyTransitions, rows: int, seed: int, *, settings: PassSettings | None = None
) -> Transitions:
    """``rows`` rows drawn uniformly without replacement (all, where there are fewer), without episodes.

    Their order is random and fixed by the seed. Weights and log-probabilities come along. The log is read in
    parts, where that is less than all of it. settings: where the passes run; rows of shards that are left out
    are missing from the sample. Raises DataError.
    """
    _check_count("rows", rows)
    chosen = _smallest([shard.rows for shard in log.shards], rows, seed ^ _ROWS)
    found = _gather(log, chosen, _rows_of_shard, settings)
    return Transitions(**found, action_space=log.action_space, metadata=log.metadata)


def sample_starts(
    log: LazyTransitions, count: int, seed: int, *, settings: PassSettings | None = None
) -> np.ndarray:
    """(M, ...) first observations of ``count`` episodes drawn uniformly without replacement, or of all.

    A log without episodes gives observations of rows. Raises DataError.
    """
    _check_count("count", count)
    if not log.has_episodes:
        chosen = _smallest([shard.rows for shard in log.shards], count, seed ^ _STARTS)
        return _gather(log, chosen, _observations_of_shard, settings)["observations"]
    chosen = _smallest([shard.episodes for shard in log.shards], count, seed ^ _STARTS)
    return _gather(log, chosen, _starts_of_shard, settings)["observations"]


def sample_episodes(
    log: LazyTransitions,
    rows: int,
    seed: int,
    part: Part | None = None,
    *,
    settings: PassSettings | None = None,
) -> Transitions:
    """Whole episodes drawn uniformly without replacement, about ``rows`` rows together and at least one.

    They keep the order of the log and are numbered from 0. Without episodes it is a sample of rows. part:
    draws from that side of a split alone. Raises DataError where it is empty.
    """
    _check_count("rows", rows)
    counts = [shard.episodes if log.has_episodes else shard.rows for shard in log.shards]
    wanted = max(1, round(rows * sum(counts) / len(log)))
    chosen = _smallest(counts, wanted, seed ^ _EPISODES, part)
    if not chosen.shards.size:
        raise DataError("no episode is left in that part of the log; hold out another share of it")
    ordered = np.lexsort((chosen.numbers, chosen.shards))
    chosen = _Chosen(chosen.shards[ordered], chosen.numbers[ordered])
    if not log.has_episodes:
        found = _gather(log, chosen, _rows_of_shard, settings)
        return Transitions(**found, action_space=log.action_space, metadata=log.metadata)
    pieces = [piece for _, piece in _mapped(log, chosen, _episodes_of_shard, settings)]
    if not pieces:
        raise DataError(_NOTHING)
    joined = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
    return Transitions(**joined, action_space=log.action_space, metadata=log.metadata)


def _smallest(sizes: Sequence[int], count: int, seed: int, part: Part | None = None) -> _Chosen:
    """The ``count`` units with the smallest hashes among shards of these sizes, within a part if given."""
    total = sum(sizes)
    share = min(1.0, (count + 6 * count**0.5 + 16) / max(1, total))
    while True:
        below = _below(sizes, share, seed, part)
        if len(below) >= count or share == 1.0:
            break
        share = min(1.0, 2.0 * share)  # bad luck, or a part that is small
    order = np.argsort(below["hash"], kind="stable")[:count]
    return _Chosen(below["shard"][order], below["number"][order])


def _below(sizes: Sequence[int], share: float, seed: int, part: Part | None) -> np.ndarray:
    """Units whose hash is among the ``share`` smallest, with their hashes."""
    record = np.dtype([("hash", np.uint64), ("shard", np.int64), ("number", np.int64)])
    limit = np.uint64(min(int(share * 2.0**64), 2**64 - 1))
    found = [np.zeros(0, dtype=record)]
    for shard, size in enumerate(sizes):
        for start in range(0, size, _HASHED_AT_ONCE):
            numbers = np.arange(start, min(start + _HASHED_AT_ONCE, size))
            hashes = unit_hash(seed, shard, numbers)
            kept = hashes <= limit
            if part is not None:
                kept &= part.holds(shard, numbers)
            piece = np.zeros(int(kept.sum()), dtype=record)
            piece["hash"], piece["shard"], piece["number"] = hashes[kept], shard, numbers[kept]
            found.append(piece)
    return np.concatenate(found)


def _mapped(
    log: LazyTransitions, chosen: _Chosen, call: Any, settings: PassSettings | None
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """What ``call`` finds in each shard, with the places it has in the sample."""
    from koffline.jobs.mapping import PassSettings

    items = list(chosen.by_shard())
    asked = [(shard, numbers) for shard, numbers, _ in items]
    mapped = (settings or PassSettings()).map(call, asked, log, lambda item: log.shards[item[0]].name)
    for (_, _, places), result in zip(items, mapped, strict=True):
        if result.failure is None:
            yield places, result.value


def _gather(
    log: LazyTransitions, chosen: _Chosen, call: Any, settings: PassSettings | None
) -> dict[str, np.ndarray]:
    """Columns of the chosen units, in the order of the sample."""
    columns: dict[str, np.ndarray] = {}
    found = np.zeros(len(chosen.shards), dtype=np.bool_)
    for places, piece in _mapped(log, chosen, call, settings):
        for name, values in piece.items():
            if name not in columns:
                columns[name] = np.empty((len(chosen.shards), *values.shape[1:]), dtype=values.dtype)
            columns[name][places] = values
        found[places] = True
    if not found.any():
        raise DataError(_NOTHING)
    return columns if found.all() else {name: column[found] for name, column in columns.items()}


def _rows_of_shard(log: LazyTransitions, item: tuple[int, np.ndarray]) -> dict[str, np.ndarray]:
    return _picked(log, *item, names=ROW_COLUMNS)


def _observations_of_shard(log: LazyTransitions, item: tuple[int, np.ndarray]) -> dict[str, np.ndarray]:
    return _picked(log, *item, names=("observations",))


def _picked(
    log: LazyTransitions, shard: int, rows: np.ndarray, names: Sequence[str]
) -> dict[str, np.ndarray]:
    """Columns of the given rows of a shard, which are in order."""
    pieces: list[dict[str, np.ndarray]] = []
    for block in _blocks_with(log, shard, rows):
        within = rows[np.searchsorted(rows, block.start) : np.searchsorted(rows, block.start + len(block))]
        pieces.append(_columns(block, within - block.start, names))
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def _blocks_with(log: LazyTransitions, shard: int, rows: np.ndarray) -> Iterator[RowBlock]:
    """Blocks that hold the given rows: the whole shard, or spans of it where that reads less."""
    info = log.shards[shard]
    if is_url(info.name) or len(rows) * _GAP >= info.rows:
        yield from log.shard_blocks(shard)
        return
    for near in np.split(rows, np.flatnonzero(np.diff(rows) > _GAP) + 1):
        for start in range(int(near[0]), int(near[-1]) + 1, _SPAN_ROWS):
            yield log.read_rows(shard, start, min(start + _SPAN_ROWS, int(near[-1]) + 1))


def _columns(block: RowBlock, rows: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
    present = {name: getattr(block, name) for name in names}
    return {name: column[rows] for name, column in present.items() if column is not None}


def _starts_of_shard(log: LazyTransitions, item: tuple[int, np.ndarray]) -> dict[str, np.ndarray]:
    """First observations of the given episodes of a shard."""
    shard, episodes = item
    pieces = []
    for block in log.shard_blocks(shard):
        assert block.steps is not None, "called for logs with episodes"
        first = np.flatnonzero((block.steps == 0) & _among(block.units, episodes))
        pieces.append(block.observations[first])
    return {"observations": np.concatenate(pieces)}


def _episodes_of_shard(log: LazyTransitions, item: tuple[int, np.ndarray]) -> dict[str, np.ndarray]:
    """All rows of the given episodes of a shard."""
    shard, episodes = item
    pieces = []
    for block in log.shard_blocks(shard):
        rows = np.flatnonzero(_among(block.units, episodes))
        pieces.append(_columns(block, rows, (*ROW_COLUMNS, "steps")))
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def _among(values: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    """(B,) whether values are among the given ones, which are in order."""
    places = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    return np.asarray(ordered[places] == values)


def _check_count(name: str, value: int) -> None:
    if value < 1:
        raise DataError(f"a sample of {name}={value}; give a positive number")
