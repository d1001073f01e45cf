"""Three parts of a log: one to learn from, one to choose on, one to certify on; or
folds, each of which certifies what the others have taught.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from koffline.data.copies import (
    DistinctLog,
    with_joined_clusters,
    without_copies,
)
from koffline.data.disk.log import AnyLog, in_whole_units
from koffline.data.hashing import unit_hash
from koffline.data.independence import notes_on_clusters
from koffline.data.late_ends import without_late_ends
from koffline.data.transitions import Transitions
from koffline.data.units import cluster_sums
from koffline.errors import DataError, counted

TRAIN = "train"
CHOOSE = "choose"
CERTIFY = "certify"
CHOOSE_SHARE = 0.2
CERTIFY_SHARE = 0.2
# In a log of few units the noise of the last step costs most: it gets more of them.
FEW_UNITS = 150
CERTIFY_SHARE_OF_FEW = 0.4
FEWEST_UNITS = 6
# Effective units to certify on, below which nothing is recommended. Measured by
# `scripts.bench.improve.few_units`: a policy that loses in every seventh unit has 5 to
# 6 % false lower ends on 20 units, 15 % on 12 and 30 % on 8, where 2.5 % are promised.
UNITS_TO_CERTIFY = 20
# A log of at least so many units keeps `UNITS_TO_CERTIFY` of them for that.
UNITS_TO_ANSWER = 2 * UNITS_TO_CERTIFY
# Of the units outside a fold, one in so many chooses, and the others teach.
ONE_CHOOSES_OF = 4
FEWEST_IN_FOLD = 2  # units
_STREAM = 0x696D7072  # key of the hashes that split units


@dataclass(frozen=True, eq=False)
class LogParts:
    """The parts, which share no episode (no cluster, or no row that stands alone).

    ``train`` is without last rows that recording made too frequent; the others hold
    their rows as logged. ``part_of (U,)``: of every episode of the log (every row
    without episodes), 0, 1 or 2 in this order, or −1 for a copy of another. ``row_of
    (N,)``: of every row of the log the one that stands for it, as in
    `koffline.data.copies.DistinctLog`. Both are empty for a log on disk. ``notes``:
    what was done to the log.
    """

    train: Transitions
    choose: Transitions
    certify: AnyLog
    part_of: Int[np.ndarray, " unit"]
    row_of: Int[np.ndarray, " row"]
    notes: tuple[str, ...] = ()

    def of_certified(self, by_unit: np.ndarray) -> np.ndarray:
        """Entries of the certify part, of an array with one of every episode (row)."""
        return np.asarray(by_unit)[self.part_of == 2]


@dataclass(frozen=True, eq=False)
class IndependentRows:
    """A log whose copies are merged, and what its rows' independent units are.

    ``rows``: N' rows, with the weight of their copies. ``unit_of (N',)``: the number of
    each row's cluster, episode, or of the row itself. ``distinct``: which units of the
    log they are. ``notes``: what was done to the log.
    """

    rows: Transitions
    unit_of: Int[np.ndarray, " row"]
    distinct: DistinctLog
    notes: tuple[str, ...]

    @classmethod
    def of(cls, log: Transitions) -> IndependentRows:
        """Merge copies of units into weights, and join clusters that share one, so that
        no two units hold the same.
        """
        joined = with_joined_clusters(log)
        distinct = without_copies(joined)
        rows = distinct.transitions.with_metadata(log.metadata)
        return cls(
            rows=rows,
            unit_of=_independent_units(rows),
            distinct=distinct,
            notes=(
                *distinct.notes,
                *notes_on_clusters(log.clusters, joined.clusters),
            ),
        )

    @property
    def units(self) -> int:
        """Number of independent units."""
        return int(self.unit_of.max()) + 1

    def parts(self, part_of_unit: Int[np.ndarray, " unit"]) -> LogParts:
        """The parts by the part of each unit: 0 to learn from, 1 to choose on, 2 to
        certify on.
        """
        part_of_row = part_of_unit[self.unit_of]
        part_of = np.full(self.distinct.units, -1)
        part_of[self.distinct.kept] = part_of_row[self.rows.unit_starts]
        return LogParts(
            train=without_late_ends(self.rows.select(part_of_row == 0)),
            choose=self.rows.select(part_of_row == 1),
            certify=self.rows.select(part_of_row == 2),
            part_of=part_of,
            row_of=self.distinct.row_of,
            notes=self.notes,
        )


def split_in_three(log: Transitions, seed: int) -> LogParts:
    """Split whole units by hashes of their numbers: 60 % to learn from, 20 % to choose
    on, 20 % to certify on; of fewer than 150 units 40, 20 and 40 %.

    Copies of units are merged into weights first, and clusters that share one are
    joined, so that no part holds a copy of what another has seen. Raises DataError for
    fewer units than `FEWEST_UNITS`.
    """
    independent = IndependentRows.of(log)
    units = independent.units
    if units < FEWEST_UNITS:
        raise DataError(
            f"the log has {counted(units, 'independent unit')} (episodes, clusters, or"
            f" rows that stand alone); to learn, choose and certify on different ones"
            f" takes at least {FEWEST_UNITS}: log more episodes"
        )
    return independent.parts(assign_parts(units, seed))


@dataclass(frozen=True, eq=False)
class FoldedLog:
    """A log in folds of whole independent units.

    ``folds``: for each fold the parts in which the fold certifies what the other folds
    have taught and chosen. ``rows``: all rows, each of which certifies once. ``shares
    (F,)``: each fold's share of the weight.
    """

    folds: tuple[LogParts, ...]
    rows: Transitions
    shares: tuple[float, ...]


def split_in_folds(log: Transitions, seed: int, folds: int) -> FoldedLog:
    """Divide whole units into folds by the hashes of `split_in_three`, with copies
    merged and clusters joined as there. For each fold, three quarters of the other
    units teach and one quarter chooses.

    Raises DataError for fewer than `FEWEST_IN_FOLD` units in a fold.
    """
    independent = IndependentRows.of(log)
    units = independent.units
    if units < FEWEST_IN_FOLD * folds:
        raise DataError(
            f"the log has {counted(units, 'independent unit')}, too few for"
            f" {folds} folds of {FEWEST_IN_FOLD}; log more, or set folds=1, which"
            " splits it in three parts"
        )
    parts = []
    shares = []
    for fold in range(folds):
        of_fold = independent.parts(assign_fold(units, seed, folds, fold))
        assert isinstance(of_fold.certify, Transitions)
        parts.append(of_fold)
        shares.append(float(of_fold.certify.row_weights.sum()))
    total = sum(shares)
    return FoldedLog(
        folds=tuple(parts),
        rows=independent.rows,
        shares=tuple(share / total for share in shares),
    )


def assign_parts(units: int, seed: int) -> Int[np.ndarray, " unit"]:
    """The part (U,) of each unit: 0 to learn from, 1 to choose on, 2 to certify on."""
    order = _order_of_units(units, seed)
    certified = CERTIFY_SHARE
    if units < FEW_UNITS:
        certified = CERTIFY_SHARE_OF_FEW
    n_certify = max(1, round(certified * units))
    if units >= UNITS_TO_ANSWER:
        n_certify = max(n_certify, UNITS_TO_CERTIFY)
    n_choose = max(1, round(CHOOSE_SHARE * units))
    parts = np.zeros(units, dtype=np.int64)
    parts[order[:n_certify]] = 2
    parts[order[n_certify : n_certify + n_choose]] = 1
    return parts


def assign_fold(
    units: int, seed: int, folds: int, fold: int
) -> Int[np.ndarray, " unit"]:
    """The part (U,) of each unit where this fold certifies, numbered as by
    `assign_parts`. Folds are numbered from 0; every unit is in one of them.
    """
    order = _order_of_units(units, seed)
    is_of_fold = np.arange(units) % folds == fold
    outside = order[~is_of_fold]
    # in each fold other units choose
    chooses = (np.arange(len(outside)) + fold) % ONE_CHOOSES_OF == 0
    parts = np.zeros(units, dtype=np.int64)
    parts[order[is_of_fold]] = 2
    parts[outside[chooses]] = 1
    return parts


def _order_of_units(units: int, seed: int) -> Int[np.ndarray, " unit"]:
    """The units (U,) in the order of the hashes of their numbers."""
    return np.argsort(unit_hash(seed ^ _STREAM, 0, np.arange(units)), kind="stable")


def units_for(certified: float) -> int:
    """How many units a log needs so that at least ``certified`` of them certify."""
    if certified <= UNITS_TO_CERTIFY:
        return UNITS_TO_ANSWER
    units = math.ceil(certified / CERTIFY_SHARE_OF_FEW)
    if units < FEW_UNITS:
        return units
    return math.ceil(certified / CERTIFY_SHARE)


def _independent_units(log: Transitions) -> Int[np.ndarray, " row"]:
    """The number (N,) of each row's cluster, episode, or of the row itself."""
    if log.clusters is not None:
        return np.unique(log.clusters, return_inverse=True)[1]
    return log.units


def sizes_of(
    train: AnyLog, choose: AnyLog, certify: AnyLog
) -> dict[str, dict[str, int]]:
    """Rows and independent units of each part, by its name."""
    named = {TRAIN: train, CHOOSE: choose, CERTIFY: certify}
    return {
        name: {"rows": len(part), "units": count_units(part).number}
        for name, part in named.items()
    }


@dataclass(frozen=True)
class UnitCount:
    """The independent units of a log: clusters, episodes, or rows that stand alone.

    ``effective``: how many of equal weight would tell as much. ``kind``: what one is.
    """

    number: int
    effective: float
    kind: str


def count_units(log: AnyLog) -> UnitCount:
    """Count the independent units of a log, in memory or on disk."""
    names = log.columns.keys()
    kind = "row"
    if log.has_episodes:
        kind = "episode"
    if "clusters" in names:
        kind = "cluster"
    if "weights" not in names and "clusters" not in names:
        number = log.n_episodes or len(log)
        return UnitCount(number, float(number), kind)
    # a unit weighs as much as its rows on average, and a cluster as its units together
    weights = []
    clusters = []
    for shard in range(len(log.shard_names)):
        for block in in_whole_units(log.shard_blocks(shard)):
            unit_of = block.units - int(block.units[0])
            sums = np.bincount(unit_of, weights=block.row_weights)
            weights.append(sums / np.bincount(unit_of))
            if block.clusters is not None:
                firsts = np.flatnonzero(np.diff(unit_of, prepend=-1))
                clusters.append(np.asarray(block.clusters)[firsts])
    by_unit = np.concatenate(weights)
    if clusters:
        by_unit = cluster_sums(np.concatenate(clusters), by_unit)
    effective = float(by_unit.sum() ** 2 / np.square(by_unit).sum())
    return UnitCount(len(by_unit), effective, kind)
