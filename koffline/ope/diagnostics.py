"""What stands beside the number: diagnostics, and sentences for a person who is about to act on it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from koffline.data.columns import counted
from koffline.data.transitions import Transitions
from koffline.ope.workspace import Workspace
from koffline.policies import ContinuousPolicy, DiscretePolicy

_LOW_COVERAGE = 0.8
_FEW_EPISODES = 20
_MOST_UNSEEN = 0.2  # share of the discounted horizon after the longest episode


def common_diagnostics(workspace: Workspace) -> dict[str, Any]:
    """Numbers about the log and the policy, whatever the estimator; units of the reward or the return."""
    facts, problem, log = workspace.facts, workspace.problem, workspace.transitions
    overlap = logged_action_overlap(log, workspace.policy)
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
    if coverage < _LOW_COVERAGE:
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


def logged_action_overlap(
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
