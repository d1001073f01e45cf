"""Values of every row by a model that has not seen the row's episode: no data is lost to a test set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from koffline.data.transitions import ActionSpace, Transitions
from koffline.data.units import without_late_ends
from koffline.errors import ConfigError, DataError
from koffline.ope.provenance import Provenance, row_fingerprints
from koffline.ope.value_functions import ValueFunction, as_value_function
from koffline.policies import Policy


@dataclass(frozen=True, eq=False)
class CrossFitted:
    """K value functions, and the one that applies to each row of the log they were fitted to.

    ``parts[k]`` was fitted to the rows with ``folds != k`` and applies to those with ``folds == k``.
    ``fingerprints (N,)``: of the rows it is for, in their order.
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
        """Sentences about the values, each once."""
        return tuple(dict.fromkeys(note for part in self.parts for note in part.notes))

    def over(self, transitions: Transitions) -> Iterator[tuple[np.ndarray, ValueFunction]]:
        """Yield row numbers and the model for them, fold by fold. Raises DataError for another log."""
        if not np.array_equal(row_fingerprints(transitions), self.fingerprints):
            raise DataError(
                f"{self.name} speaks for the {len(self.fingerprints)} rows it was made from, in their order; "
                f"received other rows ({len(transitions)}): give the same log"
            )
        for number, part in enumerate(self.parts):
            yield np.flatnonzero(self.folds == number), part


def cross_fit(
    transitions: Transitions, fit: Callable[[Transitions], Any], folds: int = 2, seed: int = 0
) -> CrossFitted:
    """Fit one value function per fold, each to the rows of all other folds.

    fit: from a log to anything `as_value_function` reads. Folds are whole episodes (rows where there are
    none), drawn with ``seed``, of equal numbers of them; rows of weight zero are not fitted but get values.
    Raises ConfigError for fewer episodes than folds.
    """
    transitions = without_late_ends(transitions)
    assigned, parts = assign_folds(transitions, folds, seed), []
    spaces = transitions.action_space, transitions.observation_shape
    for number in range(folds):
        training = transitions.select(np.flatnonzero(assigned != number))
        seen = Provenance.of(training)
        parts.append(as_value_function(fit(training), *spaces, trained_on=seen))
    return CrossFitted(tuple(parts), assigned, row_fingerprints(transitions))


def assign_folds(transitions: Transitions, folds: int, seed: int) -> Int[np.ndarray, " row"]:
    """Fold of every row (N,), 0 … folds − 1; an episode lies in one fold. Raises ConfigError."""
    units = transitions.n_episodes if transitions.has_episodes else len(transitions)
    what = "episodes" if transitions.has_episodes else "rows"
    if not 2 <= folds <= units:
        raise ConfigError(
            f"folds is {folds} for a log of {units} {what}; give at least 2 and at most so many"
        )
    order = np.random.default_rng(seed).permutation(units)
    fold_of_unit = np.empty(units, dtype=np.int64)
    fold_of_unit[order] = np.arange(units) % folds
    return np.repeat(fold_of_unit, transitions.episode_lengths if transitions.has_episodes else 1)


def row_parts(
    q: ValueFunction | CrossFitted, transitions: Transitions
) -> Iterator[tuple[np.ndarray, ValueFunction]]:
    """Row numbers and the value function for them: all rows at once, or fold by fold."""
    if isinstance(q, CrossFitted):
        yield from q.over(transitions)
    else:
        yield np.arange(len(transitions)), q


def row_values(q: ValueFunction | CrossFitted, transitions: Transitions) -> Float[np.ndarray, " row"]:
    """Q(s, a) of every logged row, (N,)."""
    values = np.empty(len(transitions))
    for rows, part in row_parts(q, transitions):
        values[rows] = part.values(transitions.observations[rows], transitions.actions[rows])
    return values


def next_row_values(
    q: ValueFunction | CrossFitted,
    transitions: Transitions,
    policy: Policy,
    draws: int = 8,
    generator: np.random.Generator | None = None,
) -> Float[np.ndarray, " row"]:
    """E_{a'~π} Q(s', a') of every row, (N,), not discounted, whatever ``terminated`` says."""
    generator = np.random.default_rng(0) if generator is None else generator
    values = np.empty(len(transitions))
    for rows, part in row_parts(q, transitions):
        values[rows] = part.expected(transitions.next_observations[rows], policy, draws, generator)
    return values


def read_value_function(
    q: Any, action_space: ActionSpace, observation_shape: tuple[int, ...], **options: Any
) -> ValueFunction | CrossFitted:
    """`as_value_function` for any q that is not already `CrossFitted`."""
    if isinstance(q, CrossFitted):
        return q
    return as_value_function(q, action_space, observation_shape, **options)
