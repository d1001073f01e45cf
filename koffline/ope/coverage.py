"""How far the policy's actions are from the logged ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from koffline.ope.problem import EvaluationProblem

LOW_COVERAGE = 0.8
_REFERENCE_ROWS = 20_000
_QUERY_ROWS = 2_000
_NEAR_QUANTILE = 0.95


@dataclass(frozen=True, eq=False)
class Coverage:
    """``fraction`` of the policy's state-actions that lie as near to the log as its own rows do.

    On-policy the fraction is about 0.95 by construction; ``ratios (M,)`` are nearest-neighbour distances
    divided by the log's own 95 % quantile, ``weights (M,)`` how much the policy cares for each.
    """

    fraction: float
    ratios: np.ndarray
    weights: np.ndarray


def measure_coverage(problem: EvaluationProblem, generator: np.random.Generator) -> Coverage:
    """Nearest-neighbour coverage of (s', a' ~ π) by the logged (s, a), standardised coordinates.

    Next states count where the episode went on, since after its end the policy does nothing; where no row
    goes on, start states stand in. Discrete actions are compared only with rows of the same action; an
    action that the log never holds counts as infinitely far. Follows the caution of Fujimoto et al. (2022):
    a small Bellman error says nothing about state-actions outside the log.
    """
    rows = _choice(np.flatnonzero(problem.row_weights), _REFERENCE_ROWS, generator)
    inputs, probabilities, shares = _policy_rows(problem, generator)
    if problem.n_actions is None or probabilities is None:
        draw = generator.integers(inputs.shape[1])
        return _summarise(_distance_ratios(problem.inputs[rows], inputs[:, draw], generator), shares)
    parts, weights = [], []
    logged_actions = problem.actions[rows]
    for action in range(problem.n_actions):
        care = probabilities[:, action] * shares
        if not care.any():
            continue
        same = rows[logged_actions == action]
        if len(same) < 2:
            parts.append(np.full(len(inputs), np.inf))
        else:
            parts.append(_distance_ratios(problem.inputs[same], inputs[:, 0], generator))
        weights.append(care)
    return _summarise(np.concatenate(parts), np.concatenate(weights))


def _policy_rows(
    problem: EvaluationProblem, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """Inputs (M, m, d), probabilities (M, n) or None, and weights (M,) where the policy acts."""
    inputs, probabilities = problem.next_inputs, problem.next_probabilities
    weights = problem.row_weights * (problem.discounts > 0.0)
    if not weights.any():
        inputs, probabilities = problem.start_inputs, problem.start_probabilities
        weights = problem.start_weights
    some = _choice(np.flatnonzero(weights), _QUERY_ROWS, generator)
    return inputs[some], None if probabilities is None else probabilities[some], weights[some]


def _distance_ratios(
    reference: np.ndarray, queries: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """Distance to the nearest reference row over the references' own 95 % leave-one-out quantile."""
    from scipy.spatial import cKDTree

    tree = cKDTree(reference)
    own = tree.query(reference[_choice(np.arange(len(reference)), _QUERY_ROWS, generator)], k=2)[0][:, 1]
    # Repeated rows make the own distance zero (small state spaces): anything as near as rounding is near.
    scale = max(float(np.quantile(own, _NEAR_QUANTILE)), 1e-6)
    return np.asarray(tree.query(queries, k=1)[0] / scale)


def _summarise(ratios: np.ndarray, weights: np.ndarray) -> Coverage:
    fraction = float(np.average(ratios <= 1.0, weights=weights)) if weights.sum() > 0 else 0.0
    return Coverage(fraction, ratios, weights)


def _choice(rows: np.ndarray, size: int, generator: np.random.Generator) -> np.ndarray:
    """At most ``size`` of the row numbers."""
    return rows if len(rows) <= size else generator.choice(rows, size, replace=False)
