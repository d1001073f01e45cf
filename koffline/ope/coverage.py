"""How far the policy's actions are from the logged ones: without support no estimate can be trusted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from koffline.ope.problem import EvaluationProblem

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

    Discrete actions are compared only with rows of the same action; an action that the log never holds
    counts as infinitely far. Follows the caution of Fujimoto et al. (2022): a small Bellman error says
    nothing about state-actions outside the log.
    """
    rows = _choice(len(problem.rewards), _REFERENCE_ROWS, generator)
    queries = _choice(len(problem.rewards), _QUERY_ROWS, generator)
    if problem.n_actions is None:
        draw = generator.integers(problem.next_inputs.shape[1])
        ratios = _distance_ratios(problem.inputs[rows], problem.next_inputs[queries, draw])
        return _summarise(ratios, np.ones(len(queries)))
    parts, weights = [], []
    logged_actions = problem.actions[rows]
    for action in range(problem.n_actions):
        assert problem.next_probabilities is not None  # discrete actions come with probabilities
        care = problem.next_probabilities[queries, action]
        if not care.any():
            continue
        same = rows[logged_actions == action]
        if len(same) < 2:
            parts.append(np.full(len(queries), np.inf))
        else:
            parts.append(_distance_ratios(problem.inputs[same], problem.next_inputs[queries, 0]))
        weights.append(care)
    return _summarise(np.concatenate(parts), np.concatenate(weights))


def _distance_ratios(reference: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Distance to the nearest reference row over the references' own 95 % leave-one-out quantile."""
    from scipy.spatial import cKDTree

    tree = cKDTree(reference)
    own = tree.query(reference[:_QUERY_ROWS], k=2)[0][:, 1]
    # Repeated rows make the own distance zero (small state spaces): anything as near as rounding is near.
    scale = max(float(np.quantile(own, _NEAR_QUANTILE)), 1e-6)
    return np.asarray(tree.query(queries, k=1)[0] / scale)


def _summarise(ratios: np.ndarray, weights: np.ndarray) -> Coverage:
    fraction = float(np.average(ratios <= 1.0, weights=weights)) if weights.sum() > 0 else 0.0
    return Coverage(fraction, ratios, weights)


def _choice(n: int, size: int, generator: np.random.Generator) -> np.ndarray:
    """At most ``size`` of n row numbers."""
    return np.arange(n) if n <= size else generator.choice(n, size, replace=False)
