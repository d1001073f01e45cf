"""Coverage: distances of the policy's actions from the logged ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from koffline.ope.problem import EvaluationProblem

LOW_COVERAGE, NO_COVERAGE = 0.8, 0.5  # below the second the log does not answer
_REFERENCE_ROWS = 20_000
_QUERY_ROWS = 2_000
_NEAR_QUANTILE = 0.95


@dataclass(frozen=True, eq=False)
class Coverage:
    """``fraction`` of the policy's state-actions that lie as near to the log as its own rows do.

    On-policy the fraction is about 0.95 by construction; ``ratios (M,)`` are nearest-neighbour distances
    divided by the log's own 95 % quantile, ``weights (M,)`` the policy's weight of each.
    """

    fraction: float
    ratios: np.ndarray
    weights: np.ndarray

    @property
    def reasons(self) -> list[str]:
        """Clause for a verdict if the log covers too little of the policy; else empty."""
        if self.fraction >= NO_COVERAGE:
            return []
        return [f"only {self.fraction:.0%} of the policy's actions lie near logged ones"]


def measure_coverage(problem: EvaluationProblem, generator: np.random.Generator) -> Coverage:
    """Nearest-neighbour coverage of (s', a' ~ π) by the logged (s, a), standardised coordinates.

    Next states count where the episode went on, since after its end the policy does nothing; where no row
    goes on, start states stand in. Discrete actions are compared only with rows of the same action; an
    action that the log holds less than twice counts as infinitely far. Follows the caution of Fujimoto et
    al. (2022): a small Bellman error says nothing about state-actions outside the log.
    """
    rows = _choice(np.flatnonzero(problem.row_weights), _REFERENCE_ROWS, generator)
    inputs, probabilities, shares = _policy_rows(problem, generator)
    if problem.n_actions is None or probabilities is None:
        queries, cares = inputs[:, generator.integers(inputs.shape[1])], shares[:, None]
        return _summarise([problem.inputs[rows]], queries, cares, generator)
    taken, cares = problem.actions[rows], probabilities * shares[:, None]
    same = [problem.inputs[rows[taken == action]] for action in range(problem.n_actions)]
    return _summarise(same, inputs[:, 0], cares, generator)


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


def _summarise(
    references: list[np.ndarray], queries: np.ndarray, cares: np.ndarray, generator: np.random.Generator
) -> Coverage:
    """Distances of queries to the nearest reference row of a group, divided by one common spacing.

    cares (query, group): the policy's weight of a query in each group.
    The spacing is the 95 % quantile of the rows' distances to their nearest neighbours in the same group.
    With a spacing per group, a rare action would cover everything between its few rows.
    """
    from scipy.spatial import cKDTree

    own, ratios, total = [], [], sum(map(len, references))
    trees = [cKDTree(rows) if len(rows) > 1 else None for rows in references]
    for rows, tree in zip(references, trees, strict=True):
        some = _choice(np.arange(len(rows)), math.ceil(_QUERY_ROWS * len(rows) / total), generator)
        own.append(np.full(len(rows), np.inf) if tree is None else tree.query(rows[some], k=2)[0][:, 1])
    # Repeated rows make the own distance zero (small state spaces): anything as near as rounding is near.
    spacing = np.quantile(np.concatenate(own), _NEAR_QUANTILE, method="lower")
    scale = max(float(spacing), 1e-6)
    for tree, care in zip(trees, cares.T, strict=True):
        nearest = None if tree is None or not care.any() else tree.query(queries, k=1)[0]
        ratios.append(np.full(len(queries), np.inf) if nearest is None else nearest / scale)
    distances, weights = np.concatenate(ratios), cares.T.ravel()
    fraction = float(np.average(distances <= 1.0, weights=weights)) if weights.sum() > 0 else 0.0
    return Coverage(fraction, distances, weights)


def _choice(rows: np.ndarray, size: int, generator: np.random.Generator) -> np.ndarray:
    """At most ``size`` of the row numbers, drawn at random."""
    return rows if len(rows) <= size else generator.choice(rows, size, replace=False)
