"""Equal units of a log that stays on disk: they belong to one part of it, and count as
weight and not as evidence, as in memory (`koffline.data.copies`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int, UInt64

from koffline.data.copies import RecurrenceCount, hash_units, join_clusters
from koffline.data.disk.log import LazyTransitions, in_whole_units
from koffline.data.hashing import hash_rows, unit_hash
from koffline.data.independence import COUNTED_VALUES, notes_on_clusters
from koffline.data.transitions import Transitions
from koffline.improvement.parts import (
    CERTIFY_SHARE,
    CHOOSE_SHARE,
    FEW_UNITS,
    assign_parts,
)

_PART_STREAM = 0x70617274


@dataclass(frozen=True, eq=False)
class EqualUnits:
    """What a pass over all rows says of equal units.

    ``by_chance``: units may be equal by chance, so that none is taken for a copy.
    ``contents (K,)``, ``weights (K,)``: hashes of the contents that occur more than
    once in the part to certify on (or in any part), in order, and the summed weights of
    the units with them. ``clusters (C,)``, ``joined (C,)``: numbers of clusters in
    order, and of those they belong to; empty without clusters. ``few``: numbers of the
    units in order, if they are few; else None.
    """

    by_chance: bool
    contents: UInt64[np.ndarray, " content"]
    weights: Float[np.ndarray, " content"]
    clusters: Int[np.ndarray, " cluster"]
    joined: Int[np.ndarray, " cluster"]
    few: np.ndarray | None
    seed: int

    def notes(self, is_merged: bool) -> list[str]:
        """Notes for the user on clusters that were joined, and on units, if any
        ``is_merged``.
        """
        notes = notes_on_clusters(self.clusters, self.joined)
        if is_merged:
            notes.append(
                "Some units of the log are copies of others: they count as weight and"
                " not as evidence."
            )
        return notes

    def with_joined_clusters(self, block: Transitions) -> Transitions:
        """The block with the numbers of joined clusters."""
        if block.clusters is None:
            return block
        columns = dict(block.columns)
        place = np.searchsorted(self.clusters, np.asarray(block.clusters))
        columns["clusters"] = self.joined[place]
        columns.pop("episode_ids", None)
        return Transitions.of_checked(columns, block.action_space)

    def numbers(
        self, block: Transitions, first_unit: int
    ) -> Int[np.ndarray, " row"] | UInt64[np.ndarray, " row"]:
        """Numbers (N,) of the rows' units, which decide the parts they belong to: of
        the cluster; of the contents; or, where units may be equal by chance, of the
        unit in the log.

        first_unit: number of the block's first unit in the log.
        """
        if block.clusters is not None:
            return np.asarray(block.clusters)
        if self.by_chance:
            return block.units + first_unit
        return hash_units(block)[block.units]

    def parts(self, numbers: np.ndarray) -> Int[np.ndarray, " row"]:
        """The part (N,) of rows by the numbers of their units."""
        if self.few is None:
            return parts_by_hash(numbers, self.seed)
        return assign_parts(len(self.few), self.seed)[
            np.searchsorted(self.few, numbers)
        ]


def find_copies(log: LazyTransitions, seed: int) -> EqualUnits:
    """Find equal units in one pass over a log on disk. seed: of the parts.

    It holds 8 bytes for each unit of the part to certify on (for every unit, if there
    are clusters).
    """
    count = RecurrenceCount(share=min(1.0, COUNTED_VALUES / len(log)))
    has_clusters = "clusters" in log.columns
    units = log.n_episodes or len(log)
    blocks = []
    for block in whole_blocks(log):
        contents = hash_units(block)
        count.add(hash_rows(block, ("observations",)), contents[block.units])
        is_held = np.ones(len(contents), dtype=bool)
        if not has_clusters and units >= FEW_UNITS:
            is_held = parts_by_hash(contents, seed) == 2
        blocks.append(_UnitsOfBlock.of(block, contents, is_held))
    contents = np.concatenate([block.contents for block in blocks])
    weights = np.concatenate([block.weights for block in blocks])
    cluster_of = np.concatenate([block.clusters for block in blocks])
    by_chance = count.allows_chance
    joined_of = cluster_of
    if has_clusters and not by_chance:
        joined_of = join_clusters(cluster_of, contents)
    clusters, firsts = np.unique(cluster_of, return_index=True)
    joined = joined_of[firsts]
    kinds, kind_of, sizes = np.unique(contents, return_inverse=True, return_counts=True)
    totals = np.bincount(kind_of.reshape(-1), weights=weights, minlength=len(kinds))
    is_copied = sizes > 1
    if by_chance:
        is_copied[:] = False
    few = None
    if has_clusters:
        few = _if_few(np.unique(joined))
    elif units < FEW_UNITS and by_chance:
        few = np.arange(units)
    elif units < FEW_UNITS:
        few = kinds
    return EqualUnits(
        by_chance=by_chance,
        contents=kinds[is_copied],
        weights=totals[is_copied],
        clusters=clusters,
        joined=joined,
        few=few,
        seed=seed,
    )


@dataclass(frozen=True, eq=False)
class _UnitsOfBlock:
    """Units of a block: hashes of their contents, mean weights of their rows, and
    numbers of their clusters, if there are any.
    """

    contents: UInt64[np.ndarray, " unit"]
    weights: Float[np.ndarray, " unit"]
    clusters: Int[np.ndarray, " clustered"]

    @classmethod
    def of(
        cls,
        block: Transitions,
        contents: UInt64[np.ndarray, " unit"],
        is_held: Bool[np.ndarray, " unit"],
    ) -> _UnitsOfBlock:
        """The units of a block that are held. contents: of all of them."""
        clusters = np.zeros(0, dtype=np.int64)
        if block.clusters is not None:
            clusters = np.asarray(block.clusters)[block.unit_starts][is_held]
        means = _mean_weights(block)[is_held]
        return cls(contents=contents[is_held], weights=means, clusters=clusters)


def _mean_weights(block: Transitions) -> Float[np.ndarray, " unit"]:
    """The mean weight of each unit's rows."""
    sums = np.bincount(block.units, weights=block.row_weights)
    return sums / np.bincount(block.units)


def _if_few(numbers: np.ndarray) -> np.ndarray | None:
    """Numbers of units if they are few; else None."""
    if len(numbers) < FEW_UNITS:
        return numbers
    return None


class CopyMerger:
    """Merges copies, block by block: the first of equal units is kept, with the weight
    of all.
    """

    def __init__(self, copies: EqualUnits) -> None:
        self._copies = copies
        self._is_written = np.zeros(len(copies.contents), dtype=bool)

    def merge(self, block: Transitions) -> Transitions | None:
        """The whole units of a block that are kept; None if none is."""
        known = self._copies.contents
        if not len(known):
            return block
        contents = hash_units(block)
        place = np.minimum(np.searchsorted(known, contents), len(known) - 1)
        is_copied = known[place] == contents
        is_kept = ~is_copied
        copied = np.flatnonzero(is_copied)
        _, firsts = np.unique(place[copied], return_index=True)
        new = copied[firsts]
        new = new[~self._is_written[place[new]]]
        is_kept[new] = True
        self._is_written[place[new]] = True
        weights = np.array(block.row_weights)
        rows_of = np.bincount(block.units)
        means = np.bincount(block.units, weights=weights) / rows_of
        gains = np.ones(len(contents))
        has_weight = is_copied & (means > 0.0)
        gains[has_weight] = self._copies.weights[place[has_weight]] / means[has_weight]
        weights *= gains[block.units]
        is_light = is_copied & (means == 0.0)
        lifted = is_light[block.units]
        weights[lifted] = self._copies.weights[place[block.units[lifted]]]
        return rows_of_units(block, is_kept, weights)


def rows_of_units(
    block: Transitions, is_kept: Bool[np.ndarray, " unit"], weights: np.ndarray
) -> Transitions | None:
    """The units of a block that are kept, with weights (N,) of its rows; None if none
    is.
    """
    rows = is_kept[block.units]
    if not rows.any():
        return None
    columns = {name: column[rows] for name, column in block.columns.items()}
    columns.pop("episode_ids", None)
    columns["weights"] = weights[rows]
    return Transitions.of_checked(columns, block.action_space)


def whole_blocks(log: LazyTransitions) -> Iterator[Transitions]:
    """The rows of a log in blocks of whole units, each numbered from 0."""
    for shard in range(len(log.shards)):
        for block in in_whole_units(log.shard_blocks(shard)):
            columns = dict(block.columns)
            columns.pop("episode_ids", None)
            yield Transitions.of_checked(columns, block.action_space)


def parts_by_hash(numbers: np.ndarray, seed: int) -> Int[np.ndarray, " row"]:
    """The part (N,) of rows by the numbers of their units, of a log of many units."""
    uniform = unit_hash(seed ^ _PART_STREAM, 0, numbers) * 2.0**-64
    parts = np.zeros(len(numbers), dtype=np.int64)
    parts[uniform < CERTIFY_SHARE + CHOOSE_SHARE] = 1
    parts[uniform < CERTIFY_SHARE] = 2
    return parts
