"""Three parts of a log: one to learn from, one to choose on, one to certify on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from koffline.data.copies import without_copies
from koffline.data.late_ends import without_late_ends
from koffline.data.splitting import split_transitions
from koffline.data.transitions import Transitions
from koffline.errors import DataError, counted

CHOOSE = 0.2
CERTIFY = 0.2
# In a log of few units the noise of the last step costs most: it gets more of them.
_FEW_UNITS = 150
CERTIFY_OF_FEW = 0.4
FEWEST_UNITS = 6
_SECOND_SPLIT = 0x63686F6F


@dataclass(frozen=True, eq=False)
class LogParts:
    """The parts, which share no episode (no cluster, or no row that stands alone).

    ``train`` and ``choose`` are in memory, without last rows that recording made too
    frequent; ``certify`` holds its rows as logged. ``notes``: what was done to the log.
    """

    train: Transitions
    choose: Transitions
    certify: Transitions
    notes: tuple[str, ...] = ()


def split_in_three(log: Transitions, seed: int) -> LogParts:
    """Split whole units by hashes of their numbers: 60 % to learn from, 20 % to choose
    on, 20 % to certify on; of fewer than 150 units 40, 20 and 40 %.

    Copies of units are merged into weights first, so that no part holds a copy of what
    another has seen. Raises DataError for fewer units than `FEWEST_UNITS`.
    """
    distinct = without_copies(log)
    log = distinct.transitions.with_metadata(log.metadata)
    units = n_units(log)
    if units < FEWEST_UNITS:
        raise DataError(
            f"the log has {counted(units, 'independent unit')} (episodes, clusters, or"
            f" rows that stand alone); to learn, choose and certify on different ones"
            f" takes at least {FEWEST_UNITS}: log more episodes"
        )
    certified = CERTIFY
    if units < _FEW_UNITS:
        certified = CERTIFY_OF_FEW
    rest, certify = split_transitions(log, certified, seed)
    train, choose = split_transitions(
        rest, CHOOSE / (1.0 - certified), seed ^ _SECOND_SPLIT
    )
    return LogParts(
        train=without_late_ends(train),
        choose=choose,
        certify=certify,
        notes=tuple(distinct.notes),
    )


def n_units(log: Transitions) -> int:
    """Number of independent units: clusters, episodes, or rows that stand alone."""
    if log.clusters is not None:
        return len(np.unique(log.clusters))
    return int(log.units.max()) + 1
