"""How far the policy's actions are from the logged ones, and what else to know of a log and a policy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from koffline.data.columns import counted
from koffline.data.transitions import Transitions
from koffline.ope.problem import EvaluationProblem
from koffline.policies import ContinuousPolicy, DiscretePolicy

if TYPE_CHECKING:
    from koffline.ope.workspace import Workspace

LOW_COVERAGE = 0.8
_FEW_EPISODES = 20
_MOST_UNSEEN = 0.2  # share of the discounted horizon after the longest episode
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


def common_diagnostics(workspace: Workspace) -> dict[str, Any]:
    """Numbers about the log and the policy, whatever the estimator; units of the reward or the return."""
    facts, problem, log = workspace.facts, workspace.problem, workspace.transitions
    overlap = _logged_action_overlap(log, workspace.policy)
    if "effective_sample_size" in overlap:
        overlap["effective_sample_size"] *= facts.rows / len(log)  # of the whole log
    return {
        "coverage": workspace.coverage.fraction,
        "n_terminated": facts.terminated,
        "n_truncated": facts.truncated,
        "n_initial_states": len(problem.start_weights) if problem.fixed_starts else facts.starts,
        "reward_scale": problem.reward_scale,
        "behavior_return": facts.returns.mean if facts.episodes else None,
        "behavior_return_se": facts.returns.standard_error,
        **({} if workspace.log.is_whole else {"sample_rows": len(log)}),
        **overlap,
    }


def common_warnings(workspace: Workspace, diagnostics: dict[str, Any]) -> list[str]:
    """Reasons to distrust any estimate from this log."""
    log, merged, limits = workspace.transitions, workspace.log.merged, workspace.limits
    coverage, episodes, found = diagnostics["coverage"], workspace.facts.episodes, []
    if coverage < LOW_COVERAGE:
        found.append(
            f"Only {coverage:.0%} of the policy's actions lie near logged ones "
            "(95 % on-policy); the rest of the estimate is extrapolation."
        )
    if log.has_episodes and episodes < _FEW_EPISODES:
        kind = "different episode" if workspace.log.is_whole and merged.merged else "episode"
        found.append(f"The log has {counted(episodes, kind)}; resampling so few says little about spread.")
    if limits.unseen >= _MOST_UNSEEN:  # every episode is cut early
        found.append(
            f"The longest episode has {limits.longest} steps: with γ = {limits.gamma:.10g}, "
            f"{limits.unseen:.0%} of a constant reward's value lies beyond what any episode shows."
        )
    found += merged.notes if workspace.log.is_whole else []
    found += [f"Reader: {note}" for note in log.metadata.notes]
    return [*found, *(f"Left out: {reason}" for reason in workspace.log.skipped)]


def _logged_action_overlap(
    transitions: Transitions, policy: DiscretePolicy | ContinuousPolicy
) -> dict[str, Any]:
    """Discrete actions: how probable the logged actions are to the policy, and the effective sample size.

    That is (Σ ρ)² / Σ ρ² of the ratios ρ = π(a|s) / β(a|s) of rows; 0 when all ratios are.
    """
    if not isinstance(policy, DiscretePolicy):
        return {}
    taken = policy.probabilities(transitions.observations)[np.arange(len(transitions)), transitions.actions]
    overlap = {"mean_probability_of_logged_actions": float(taken.mean())}
    if transitions.behavior_log_probabilities is not None:
        possible = taken > 0.0
        behavior = np.asarray(transitions.behavior_log_probabilities, dtype=np.float64)[possible]
        logarithms = np.log(taken[possible]) - behavior
        ratios = np.exp(logarithms - logarithms.max(initial=-math.inf))  # their common factor cancels
        size = float(ratios.sum() ** 2 / np.square(ratios).sum()) if len(ratios) else 0.0
        overlap["effective_sample_size"] = size
    return overlap
