"""Cross-fitting, and checks that tested rows were held out from training.

Rows are recognised by fingerprints. Where states recur (small state spaces), equal rows
prove nothing. Therefore the share of tested rows seen in training is compared with the
share of training rows that have a twin among the training rows, which is the share
expected of fresh rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int

from koffline.data.disk.log import LazyTransitions
from koffline.data.independence import independent_units
from koffline.data.late_ends import without_late_ends
from koffline.data.sources import LogMapping, LogSource, open_transitions
from koffline.data.spaces import SpaceRequest
from koffline.data.transitions import Transitions, check_in_memory
from koffline.errors import ConfigError, DataError, counted
from koffline.ope.value_functions import (
    ValueFunction,
    ValueSource,
    as_value_function,
    counted_rows,
    row_fingerprints,
)

_DEVIATIONS = 4.0
_REPEATS = 0.5  # share of rows with an equal row above which equality is no evidence


@dataclass(frozen=True, eq=False)
class CrossFitted:
    """K value functions, and which of them applies to each row of the log they were
    fitted to.

    ``parts[k]`` was fitted to the rows with ``folds != k`` and applies to the rows with
    ``folds == k``. ``fingerprints (N,)``: fingerprints of the log's rows, in order.
    """

    parts: tuple[ValueFunction, ...]
    folds: Int[np.ndarray, " row"] = field(repr=False)
    fingerprints: np.ndarray = field(repr=False)

    @property
    def name(self) -> str:
        """Common name of the models."""
        return f"{self.parts[0].name} (cross-fitted, {len(self.parts)} folds)"

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes of all value functions, each once."""
        return tuple(dict.fromkeys(note for part in self.parts for note in part.notes))

    def check_rows(self, transitions: Transitions) -> None:
        """Raise DataError for another log than that of the models."""
        if not np.array_equal(row_fingerprints(transitions), self.fingerprints):
            raise DataError(
                f"{self.name} speaks for the {len(self.fingerprints)} rows it was made"
                f" from, in their order; received other rows ({len(transitions)}): give"
                " the same log"
            )

    def of_rows(self, rows: Int[np.ndarray, " kept"]) -> CrossFitted:
        """The same models for some of the rows, by their numbers."""
        return CrossFitted(self.parts, self.folds[rows], self.fingerprints[rows])

    def over(
        self, transitions: Transitions
    ) -> Iterator[tuple[np.ndarray, ValueFunction]]:
        """Yield each fold's row numbers and the model for them.

        Raises DataError for another log.
        """
        self.check_rows(transitions)
        for number, part in enumerate(self.parts):
            yield np.flatnonzero(self.folds == number), part


def cross_fit(
    transitions: LogSource,
    fit: Callable[[Transitions], ValueSource],
    folds: int = 2,
    seed: int = 0,
    *,
    mapping: LogMapping = None,
    action_space: SpaceRequest | None = None,
) -> CrossFitted:
    """Fit one value function per fold of ``transitions``, each to the rows of all other
    folds.

    Returns a `CrossFitted`: every row is valued by the model that was not fitted to its
    fold. transitions, mapping, action_space: as in `koffline.evaluate`. fit: from a log
    to anything `as_value_function` reads. Folds consist of whole clusters, episodes or
    rows, are equally large and drawn with ``seed``. Rows of weight zero are not fitted
    but get values. The log must be in memory, else DataError. Raises ConfigError if
    there are fewer clusters, episodes or rows than folds.
    """
    if not isinstance(transitions, LazyTransitions):
        transitions = open_transitions(transitions, action_space, mapping=mapping)
    check_in_memory(transitions)
    transitions = without_late_ends(transitions)
    assigned = assign_folds(transitions, folds, seed)
    parts = []
    for number in range(folds):
        training = transitions.select(np.flatnonzero(assigned != number))
        part = as_value_function(
            fit(training),
            transitions.action_space,
            transitions.observation_shape,
            trained_on=counted_rows(training),
        )
        parts.append(part)
    return CrossFitted(tuple(parts), assigned, row_fingerprints(transitions))


def assign_folds(
    transitions: Transitions, folds: int, seed: int
) -> Int[np.ndarray, " row"]:
    """Fold of every row (N,), 0 … folds − 1; clusters and episodes stay whole, and
    copies together.

    Raises ConfigError.
    """
    units = independent_units(transitions)
    if not 2 <= folds <= units.count:
        remedy = "a test on unseen rows needs at least 2"
        if units.count > 1:
            remedy = f"give 2 to {units.count} (--cross-fit)"
        raise ConfigError(
            f"folds is {folds} for a log of {counted(units.count, units.kind)};"
            f" {remedy}"
        )
    places = np.argsort(np.random.default_rng(seed).permutation(units.count))
    return np.asarray(places % folds)[units.of_row]


def measure_freshness(
    value_function: ValueFunction,
    transitions: Transitions,
    trained_on: Transitions | None = None,
    allow: bool = False,
) -> tuple[bool | None, tuple[str, ...]]:
    """Whether the rows were held out from training (None: unknown), and sentences about
    it.

    trained_on: the training rows; replaces what the value function itself knows of
    them. Raises ConfigError if tested rows are among the training rows, unless
    ``allow``.
    """
    name = value_function.name
    trained = value_function.trained_on
    if trained_on is not None:
        trained = counted_rows(trained_on)
    if trained is None:
        trained = np.zeros(0, np.uint64)
    seen, twins, is_clear = share_seen(trained, transitions)
    if math.isnan(seen):
        return None, (
            f"It is not known which rows {name} was fitted to; if these are among"
            " them, the test says nothing.",
        )
    if is_clear:
        share = f"{100.0 * seen:.3g}%"
        if not allow:
            raise ConfigError(
                f"{name} was fitted to {share} of these rows, on which a test says"
                " nothing; test other rows, fit by koffline.cross_fit (or test the"
                " models kloss and fqe of koffline diagnose), or allow it with"
                " allow_training_rows=True (--allow-training-rows)"
            )
        return False, (
            f"{share} of the rows were used to fit {name}: non-rejection on them says"
            " nothing.",
        )
    if twins > _REPEATS:
        return None, (
            f"Rows repeat themselves ({twins:.0%} have a twin): whether {name} was"
            " fitted to the tested ones cannot be seen; make sure that they are"
            " fresh.",
        )
    equal = round(seen * len(transitions))
    if twins > 0.0 or not equal:
        return True, ()
    return True, (f"{equal} of the rows equal rows that {name} was fitted to.",)


def share_seen(
    trained: np.ndarray, transitions: Transitions
) -> tuple[float, float, bool]:
    """Share of the rows seen in training, share of training rows with a twin, and
    whether the first is more.

    trained (M,): fingerprints of the rows that a model was fitted to: all of them, or
    the smallest. The shares are NaN if no row can be compared. The comparison allows
    for chance.
    """
    tested = counted_rows(transitions)
    values, counts = np.unique(trained, return_counts=True)
    if len(values):
        tested = tested[tested <= values[-1]]
    else:
        tested = values
    if not len(tested):
        return math.nan, math.nan, False
    seen = float(np.isin(tested, values).mean())
    # share expected for fresh rows
    twins = float(counts[counts > 1].sum() / len(trained))
    # allows for a few equal rows even if none was found
    fewer = 1.0 / min(len(trained), len(tested))
    if fewer < 0.5:
        chance = min(max(twins, fewer), 1.0 - fewer)
    else:
        chance = 0.5
    margin = _DEVIATIONS * math.sqrt(
        chance * (1.0 - chance) * (1.0 / len(tested) + 2.0 / len(trained))
    )
    return seen, twins, twins <= _REPEATS and seen > twins + margin
