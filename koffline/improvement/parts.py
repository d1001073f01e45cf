"""Three parts of a log: one to learn from, one to choose on, one to certify on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from koffline.data.copies import without_copies
from koffline.data.disk.log import AnyLog
from koffline.data.hashing import unit_hash
from koffline.data.late_ends import without_late_ends
from koffline.data.transitions import Transitions
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
_STREAM = 0x696D7072  # key of the hashes that split units


@dataclass(frozen=True, eq=False)
class LogParts:
    """The parts, which share no episode (no cluster, or no row that stands alone).

    ``train`` is without last rows that recording made too frequent; the others hold
    their rows as logged. ``part_of (U,)``: of every episode of the log (every row
    without episodes), 0, 1 or 2 in this order, or −1 for a copy of another. ``notes``:
    what was done to the log.
    """

    train: Transitions
    choose: Transitions
    certify: AnyLog
    part_of: Int[np.ndarray, " unit"]
    notes: tuple[str, ...] = ()

    def of_certified(self, by_unit: np.ndarray) -> np.ndarray:
        """Entries of the certify part, of an array with one of every episode (row)."""
        return np.asarray(by_unit)[self.part_of == 2]


def split_in_three(log: Transitions, seed: int) -> LogParts:
    """Split whole units by hashes of their numbers: 60 % to learn from, 20 % to choose
    on, 20 % to certify on; of fewer than 150 units 40, 20 and 40 %.

    Copies of units are merged into weights first, so that no part holds a copy of what
    another has seen. Raises DataError for fewer units than `FEWEST_UNITS`.
    """
    distinct = without_copies(log)
    merged = distinct.transitions.with_metadata(log.metadata)
    unit_of = _independent_units(merged)
    units = int(unit_of.max()) + 1
    if units < FEWEST_UNITS:
        raise DataError(
            f"the log has {counted(units, 'independent unit')} (episodes, clusters, or"
            f" rows that stand alone); to learn, choose and certify on different ones"
            f" takes at least {FEWEST_UNITS}: log more episodes"
        )
    part_of_unit = assign_parts(units, seed)
    part_of_row = part_of_unit[unit_of]
    part_of = np.full(distinct.units, -1)
    part_of[distinct.kept] = part_of_row[merged.unit_starts]
    return LogParts(
        train=without_late_ends(merged.select(part_of_row == 0)),
        choose=merged.select(part_of_row == 1),
        certify=merged.select(part_of_row == 2),
        part_of=part_of,
        notes=tuple(distinct.notes),
    )


def assign_parts(units: int, seed: int) -> Int[np.ndarray, " unit"]:
    """The part (U,) of each unit: 0 to learn from, 1 to choose on, 2 to certify on."""
    certified = CERTIFY_SHARE
    if units < FEW_UNITS:
        certified = CERTIFY_SHARE_OF_FEW
    order = np.argsort(unit_hash(seed ^ _STREAM, 0, np.arange(units)), kind="stable")
    n_certify = max(1, round(certified * units))
    n_choose = max(1, round(CHOOSE_SHARE * units))
    parts = np.zeros(units, dtype=np.int64)
    parts[order[:n_certify]] = 2
    parts[order[n_certify : n_certify + n_choose]] = 1
    return parts


def _independent_units(log: Transitions) -> Int[np.ndarray, " row"]:
    """The number (N,) of each row's cluster, episode, or of the row itself."""
    if log.clusters is not None:
        return np.unique(log.clusters, return_inverse=True)[1]
    return log.units


def n_units(log: AnyLog) -> int:
    """Number of independent units: clusters, episodes, or rows that stand alone; of a
    log on disk, of episodes or rows.
    """
    if not isinstance(log, Transitions):
        return log.n_episodes or len(log)
    return int(_independent_units(log).max()) + 1
