"""How well a log covers a policy's actions, and checks of the marginal importance weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from koffline.data.transitions import Transitions
from koffline.ope.problem import EvaluationProblem
from koffline.ope.results import Reason
from koffline.policies import DiscretePolicy, Policy

NO_COVERAGE = 0.5  # below it the log does not answer
_MUCH_UNLOGGED = 0.1  # above it the log does not answer
_FEW_ROWS, _OVERUSED = 30, 3.0  # limits below which the log says too little about an action
_REFERENCE_ROWS, _QUERY_ROWS = 20_000, 2_000
_NEAR_QUANTILE = 0.95
_SAME = 1e-6  # relative difference of actions that are the same
FEW_WEIGHTED, _MASS_OFF, _NEGATIVE = 10.0, 0.2, 0.25  # limits for diagnostics of weights


@dataclass(frozen=True, eq=False)
class Coverage:
    """``fraction``: share of the policy's state-actions that lie as near to the log as its own rows do.

    If the policy wrote the log, the fraction is about 0.95 by construction. ``ratios (M,)``:
    nearest-neighbour distances divided by the 95 % quantile of the log's own; ``weights (M,)``: the policy's
    weight of each. ``known (n,)``: mask of the discrete actions whose values the log can tell; None if all
    are known.
    """

    fraction: float
    ratios: np.ndarray
    weights: np.ndarray
    known: np.ndarray | None = None

    @property
    def reasons(self) -> list[str]:
        """Clause for a verdict if the log covers too little of the policy; else empty."""
        if self.unlogged > _MUCH_UNLOGGED:
            return [self.told]
        few = f"only {self.fraction:.0%} of the policy's actions lie near logged ones"
        return [few] if self.fraction < NO_COVERAGE else []

    @property
    def told(self) -> str:
        """Clause on how often the policy takes actions that the log never or hardly takes."""
        share = f"{100.0 * self.unlogged:.3g}%"
        return f"{share} of the policy's actions are ones that the log never or hardly takes"

    @property
    def unlogged(self) -> float:
        """Share of the policy's weight on unknown actions, and on those that the log holds only once."""
        return float(self.weights[np.isinf(self.ratios)].sum() / max(self.weights.sum(), 1e-300))


def known_actions(policy: Policy, log: Transitions) -> np.ndarray | None:
    """Mask (n,) of the actions whose values the log can tell; None if all are, or if actions are continuous.

    An action is unknown if the log never takes it. In logs of more than one step it is also unknown if it
    occurs in fewer than 30 rows and less than a third as often as the policy takes it. Nothing bounds the
    values of unknown actions, and the kernel loss would use them to explain residuals of other rows.
    """
    if not isinstance(policy, DiscretePolicy):
        return None
    counts = np.bincount(log.actions[log.row_weights > 0.0], minlength=policy.n)
    if counts.min() >= _FEW_ROWS:
        return None
    used = policy.probabilities(log.observations).mean(axis=0) * (not log.terminated.all())
    known = (counts >= _FEW_ROWS) | ((counts > 0) & (counts >= used * counts.sum() / _OVERUSED))
    return None if known.all() else known


def among(policy: Policy, known: np.ndarray) -> DiscretePolicy:
    """Restrict the policy to the known actions and renormalise its probabilities.

    States where the policy takes no known action get equal probabilities of all known actions.
    """
    return DiscretePolicy(len(known), partial(_among, policy, known), policy.name, policy.observation_shape)


def _among(policy: Any, known: np.ndarray, observations: np.ndarray) -> np.ndarray:
    """Probabilities (N, n) restricted to known actions; equal ones where the policy takes none of them."""
    kept = policy.probabilities(observations) * known + 1e-12 * known
    return kept / kept.sum(axis=1, keepdims=True)


def measure_coverage(
    problem: EvaluationProblem, generator: np.random.Generator, known: np.ndarray | None = None
) -> Coverage:
    """Nearest-neighbour coverage of (s', a' ~ π) by the logged (s, a), in standardised coordinates.

    Only next states that do not end an episode count; if every row ends its episode, start states take their
    place. Discrete actions are compared with rows of the same action only. Three kinds of actions count as
    infinitely far: those that the log holds less than twice, those outside ``known (n,)``, and continuous
    actions that differ in a dimension in which all logged actions are equal. A small Bellman error says
    nothing about what lies outside the log (Fujimoto et al. 2022).
    """
    own = len(problem.input_scale) - (problem.history > 0)  # inputs without the previous rows
    rows = _choice(np.flatnonzero(problem.row_weights), _REFERENCE_ROWS, generator)
    inputs, probabilities = problem.next_inputs, problem.next_probabilities
    weights = problem.row_weights * (problem.discounts > 0.0)
    if not weights.any():
        inputs, probabilities = problem.start_inputs, problem.start_probabilities
        weights = problem.start_weights
    some = _choice(np.flatnonzero(weights), _QUERY_ROWS, generator)
    inputs, shares, logged = inputs[some, :, :own], weights[some, None], problem.inputs[rows, :own]
    if problem.n_actions is None or probabilities is None:
        acted = inputs[:, generator.integers(inputs.shape[1])]
        last = slice(own - math.prod(problem.actions.shape[1:]), own)  # columns of actions
        low, high = logged[:, last].min(axis=0), logged[:, last].max(axis=0)
        slack = _SAME * np.abs(problem.input_location[last])
        is_left = (acted[:, last] < low - slack) | (acted[:, last] > high + slack)
        other = (is_left & (high - low <= slack)).any(axis=1)[:, None]
        cares = np.concatenate([shares * ~other, shares * other], axis=1)
        return _summarise([logged, logged[:0]], acted, cares, generator)
    every = np.ones(problem.n_actions, dtype=bool) if known is None else known
    same = [logged[(problem.actions[rows] == action) & every[action]] for action in range(problem.n_actions)]
    found = _summarise(same, inputs[:, 0], probabilities[some] * shares, generator)
    return replace(found, known=known)


def _summarise(
    references: list[np.ndarray], queries: np.ndarray, cares: np.ndarray, generator: np.random.Generator
) -> Coverage:
    """Distances of queries to the nearest reference row of each group, divided by one common spacing.

    cares (query, group): the policy's weight of a query in each group. The spacing is the 95 % quantile of
    the rows' distances to their nearest neighbours in the same group. With one spacing per group, a rare
    action would seem to cover everything between its few rows.
    """
    from scipy.spatial import cKDTree

    own, ratios, total = [], [], sum(map(len, references))
    # Balanced trees split just above the smallest number. Above 0.0 that is a denormal number, which counts
    # as 0 here (`koffline.fitting.threads`), so that the recursion would never end.
    trees = [cKDTree(rows, balanced_tree=False) if len(rows) > 1 else None for rows in references]
    for rows, tree in zip(references, trees, strict=True):
        some = _choice(np.arange(len(rows)), math.ceil(_QUERY_ROWS * len(rows) / total), generator)
        own.append(np.full(len(rows), np.inf) if tree is None else tree.query(rows[some], k=2)[0][:, 1])
    # In small state spaces rows repeat and the spacing is zero; then distances up to rounding are near.
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


def describe_coverage(fraction: float) -> str:
    """Text on the share of the policy's actions near logged ones, with the share expected on-policy."""
    return f"{fraction:.0%} of the policy's actions lie near logged ones (95 % if it had written the log)"


def doubts_of_weights(weights: dict[str, Any]) -> Iterator[Reason]:
    """Yield reasons to doubt marginal importance weights, from their diagnostics."""
    units, mass, negative = (weights[name] for name in ("effective_units", "mass", "negative_share"))
    if units < FEW_WEIGHTED:
        few = f"only {units:.1f} episodes or rows (effective number)"
        yield Reason("support", f"{few} carry the policy's visits")
    if abs(mass - 1.0) > _MASS_OFF:
        yield Reason("support", f"the log's weights for the policy's visits average {mass:.2f}, not 1")
    if negative > _NEGATIVE:
        yield Reason("support", f"{negative:.0%} of the log's weights for the policy's visits are negative")
