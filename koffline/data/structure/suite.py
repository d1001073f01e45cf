"""All tests of a log's structure in one list, and how their results add up over parts
of a log.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from koffline.data.disk.log import AnyLog
from koffline.data.structure.alignment import alignment_symptoms
from koffline.data.structure.boundaries import (
    boundary_symptoms,
    rows_that_go_on,
    rows_with_both_flags,
    unlinked_rows,
)
from koffline.data.structure.first_rewards import first_reward_symptoms
from koffline.data.structure.jumps import jump_symptoms
from koffline.data.structure.label_columns import label_symptoms
from koffline.data.structure.logged_rows import LoggedRows
from koffline.data.structure.sentinels import sentinel_symptoms
from koffline.data.structure.symptom import Symptom
from koffline.data.transitions import Transitions

_ROWS_TOGETHER = 65_536
# of a log's rows: parts with a symptom that make up less are not reported
_LEAST_SHARE = 0.005


@dataclass(frozen=True)
class Structure:
    """Symptoms of the parts of a log; ``+`` joins parts.

    parts: number of rows of each part, and its symptoms.
    """

    parts: tuple[tuple[int, tuple[Symptom, ...]], ...] = ()

    @classmethod
    def of(
        cls, log: Transitions, units: Int[np.ndarray, " episode"] | None = None
    ) -> Structure:
        """Run all tests on whole episodes of a log (or on rows that stand alone) in
        memory.

        units: numbers (E,) of the episodes in the log; without them the episodes follow
        each other.
        """
        if not len(log):
            return cls()
        return cls(parts=((len(log), symptoms_of(log=log, units=units)),))

    def __add__(self, other: Structure) -> Structure:
        """The parts of both."""
        return Structure(parts=(*self.parts, *other.parts))

    @property
    def symptoms(self) -> tuple[Symptom, ...]:
        """One symptom per test, with the counts of all parts, if they make up half a
        percent; of a log in one part, all that its tests say.
        """
        is_whole = len(self.parts) == 1
        rows_in_all = sum(rows for rows, _ in self.parts)
        joined: dict[tuple[str, str], Symptom] = {}
        shares: dict[tuple[str, str], float] = {}
        for rows, symptoms in self.parts:
            for symptom in symptoms:
                key = (symptom.test, "")
                if is_whole:
                    key = (symptom.test, symptom.statement)
                share = symptom.share * rows / rows_in_all
                shares[key] = shares.get(key, 0.0) + share
                joined[key] = _larger(joined.get(key), symptom)
        return tuple(
            symptom
            for key, symptom in joined.items()
            if is_whole or symptom.rows == 1 or shares[key] >= _LEAST_SHARE
        )


def _larger(first: Symptom | None, second: Symptom) -> Symptom:
    """The symptom that more rows show, with the smaller of both p-values."""
    if first is None:
        return second
    larger = first if first.rows >= second.rows else second
    return dataclasses.replace(larger, p_value=min(first.p_value, second.p_value))


def symptoms_of(
    log: Transitions, units: Int[np.ndarray, " episode"] | None = None
) -> tuple[Symptom, ...]:
    """Run all tests on rows in memory and return what they found.

    log: whole episodes, or rows that stand alone. units: numbers (E,) of the episodes
    in a larger log of which these rows are a part; without them the episodes follow
    each other in the log.
    """
    if not log.has_episodes:
        return (
            *rows_that_go_on(log),
            *rows_with_both_flags(log),
            *label_symptoms(log),
            *sentinel_symptoms(log),
        )
    rows = LoggedRows.of(log=log, units=units)
    boundaries = tuple(boundary_symptoms(rows))
    alignment = tuple(alignment_symptoms(rows))
    first_rewards: tuple[Symptom, ...] = ()
    # rewards that are late with the actions, and rows of resets, are reported already
    has_reset_rows = any(symptom.kind == "starts" for symptom in boundaries)
    if not alignment and not has_reset_rows:
        first_rewards = tuple(first_reward_symptoms(rows))
    return (
        *unlinked_rows(log),
        *rows_with_both_flags(log),
        *boundaries,
        *jump_symptoms(rows),
        *alignment,
        *first_rewards,
        *label_symptoms(log),
        *sentinel_symptoms(log),
    )


def is_small(log: AnyLog) -> bool:
    """Whether all rows of a log are looked at together, wherever they are stored."""
    return len(log) <= _ROWS_TOGETHER


def symptoms_of_log(log: AnyLog, parts: Iterable[Structure]) -> tuple[Symptom, ...]:
    """The symptoms of a log: of a small one from all rows together, so that its shards
    do not matter.

    parts: the structure of the parts of a larger log, in order.
    """
    if is_small(log):
        if not isinstance(log, Transitions):
            log = log.load()
        return symptoms_of(log)
    total = Structure()
    for part in parts:
        total = total + part
    return total.symptoms
