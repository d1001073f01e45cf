"""A log seen by a value function: residuals, and what an alternative adds to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from koffline.data.transitions import Transitions
from koffline.errors import DataError
from koffline.ope.bellman_test.settings import BellmanSettings
from koffline.ope.cross_fit import next_row_values, row_values
from koffline.ope.problem import EvaluationProblem
from koffline.ope.value_functions import ACTION, STATE
from koffline.ope.value_sources import as_value_function
from koffline.policies import Policy

_LARGEST = 1e50  # fourth powers of anything below stay finite
_ULPS = 4.0  # a residual within as many roundings of its terms is zero


@dataclass(frozen=True, eq=False)
class ResidualColumns:
    """(N,) each: ``residuals`` δ of one step, ``values`` Q(s, a) or V(s), ``shift``: what one unit of the
    alternative adds to δ. ``rounded``: number of residuals that were nothing but rounding, now zero.
    """

    residuals: np.ndarray
    values: np.ndarray
    shift: np.ndarray
    rounded: int


def one_step_residuals(
    q: Any,
    transitions: Transitions,
    policy: Policy,
    problem: EvaluationProblem,
    settings: BellmanSettings,
    generator: np.random.Generator,
) -> ResidualColumns:
    """δ = r + discount · E_{a'~π} Q(s', a') − Q(s, a) of every row.

    q: a `ValueFunction`, a `CrossFitted`, or anything with values ``now`` and ``later`` (N,) of these rows.
    A continuous random policy is asked for ``action_draws`` actions per row, drawn for that row alone: under
    H0 the residual keeps its mean of zero and only its noise grows, whatever the number of draws, and random
    signs carry that noise too. So the test needs no second, independent set of draws.
    Raises DataError for numbers whose powers overflow.
    """
    largest = float(np.abs(transitions.rewards).max())
    if largest >= _LARGEST:
        raise DataError(f"rewards reach {largest:.3g}; rescale rewards and values below {_LARGEST:g}")
    values, later = _now_and_later(q, transitions, policy, settings, generator)
    rewards = problem.rewards * problem.reward_scale
    with np.errstate(over="ignore", invalid="ignore"):
        residuals = rewards + problem.discounts * later - values
    too_large = ~((np.abs(residuals) < _LARGEST) & (np.abs(values) < _LARGEST))
    if too_large.any():
        row = int(np.argmax(too_large))
        raise DataError(
            f"the residual of row {row} is {residuals[row]:.3g} (value {values[row]:.3g}); the values are "
            "far from any return of this log: check the model's units"
        )
    exact = np.abs(residuals) <= _rounding(transitions, values, problem, later)
    return ResidualColumns(
        np.where(exact, 0.0, residuals),
        values,
        _shift(q, transitions, policy, problem, settings, generator),
        int(np.count_nonzero(residuals[exact & (problem.row_weights > 0.0)])),
    )


def _rounding(
    transitions: Transitions, values: np.ndarray, problem: EvaluationProblem, later: np.ndarray
) -> np.ndarray:
    """What rounding may leave of each residual, (N,): a few ulps of its terms and of their size over the log.

    Random signs see equal residuals of 1e-16 as clearly as any others. Values that float32 holds exactly are
    taken for float32 ones.
    """
    single = float(np.finfo(np.float32).eps)
    precision = single if np.array_equal(values, values.astype(np.float32)) else np.finfo(np.float64).eps
    reward_precision = np.finfo(transitions.rewards.dtype).eps
    rewards = np.abs(problem.rewards * problem.reward_scale)
    sizes = precision * (np.abs(values) + np.abs(problem.discounts * later)) + reward_precision * rewards
    usual = np.sqrt(np.average(np.square(sizes), weights=problem.row_weights))
    return _ULPS * np.maximum(sizes, usual)


def _now_and_later(
    q: Any,
    transitions: Transitions,
    policy: Policy,
    settings: BellmanSettings,
    generator: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Q(s, a) and E Q(s', a') (N,) each."""
    if not (hasattr(q, "now") and hasattr(q, "later")):
        later = next_row_values(q, transitions, policy, settings.action_draws, generator)
        return row_values(q, transitions), later
    values, later = np.asarray(q.now, dtype=np.float64), np.asarray(q.later, dtype=np.float64)
    if values.shape != (len(transitions),) or later.shape != values.shape:
        raise DataError(
            f"row values have shapes {values.shape} and {later.shape}, the log {len(transitions)} rows; "
            "compute them for this log"
        )
    return values, later


def _shift(
    q: Any,
    transitions: Transitions,
    policy: Policy,
    problem: EvaluationProblem,
    settings: BellmanSettings,
    generator: np.random.Generator,
) -> np.ndarray:
    """Of a constant error c: c·(discount − 1); of an error h(s, a): discount · E h(s', a') − h(s, a)."""
    if not callable(settings.alternative):
        return problem.discounts - 1.0
    error = as_value_function(
        settings.alternative,
        transitions.action_space,
        transitions.observation_shape,
        kind=STATE if getattr(q, "kind", ACTION) == STATE else None,
        name="the alternative",
    )
    values, later = _now_and_later(error, transitions, policy, settings, generator)
    return problem.discounts * later - values
