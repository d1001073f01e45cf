"""What stands beside the number: diagnostics, and sentences for a person who is about to act on it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from koffline.data.columns import counted
from koffline.data.transitions import Transitions
from koffline.kernels import Gaussian
from koffline.ope.interval import Interval
from koffline.ope.limits import NOTABLE, Limits
from koffline.ope.workspace import Workspace
from koffline.policies import ContinuousPolicy, DiscretePolicy

_GRAM_ROWS = 1000
_LOW_COVERAGE = 0.8
_FEW_EPISODES = 20
_LARGE_RESIDUAL = 3.0  # times the rms return; a value function that is zero everywhere stays below one
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


def fitted_diagnostics(workspace: Workspace) -> dict[str, Any]:
    """Numbers about the trained networks, all finite or None."""
    fitted, residuals, problem = workspace.fitted, workspace.residuals, workspace.problem
    heads = fitted.estimate_by_head()
    values, kept = fitted.replica_values[fitted.head], fitted.alive.copy()
    kept[: fitted.ensemble.full] = False
    found: dict[str, Any] = {
        "held_out_kernel_loss": residuals.held_out_kernel_loss,
        "held_out_kernel_ratio": residuals.held_out_ratio,
        "effective_bandwidth": fitted.bandwidth,
        "mean_off_diagonal_kernel": mean_off_diagonal(
            problem.kernel_inputs[problem.row_weights > 0.0], fitted.bandwidth
        ),
        "estimates_by_head": heads,
        "head_disagreement": max(heads.values()) - min(heads.values()),
        "replica_standard_deviation": float(values[kept].std(ddof=1)),
        "residual_rms": residuals.rms,
        "residual_mean": residuals.mean,
        "training_steps": fitted.record.steps,
    }
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in found.items()
    }


def common_warnings(workspace: Workspace, diagnostics: dict[str, Any]) -> list[str]:
    """Reasons to distrust any estimate from this log."""
    log, merged = workspace.transitions, workspace.log.merged
    found = coverage_warnings(diagnostics["coverage"])
    if log.has_episodes:
        different = workspace.log.is_whole and merged.merged
        found += few_episodes_warnings(workspace.facts.episodes, "different " if different else "")
        found += horizon_warnings(workspace.limits)
    found += merged.notes if workspace.log.is_whole else []
    found += [f"Reader: {note}" for note in log.metadata.notes]
    return [*found, *(f"Left out: {reason}" for reason in workspace.log.skipped)]


def coverage_warnings(fraction: float) -> list[str]:
    """Of a policy that acts as the log does not."""
    if fraction >= _LOW_COVERAGE:
        return []
    return [
        f"Only {fraction:.0%} of the policy's actions lie near logged ones "
        "(95 % on-policy); the rest of the estimate is extrapolation."
    ]


def few_episodes_warnings(episodes: int, kind: str = "") -> list[str]:
    """Of a log with too few independent parts."""
    if episodes >= _FEW_EPISODES:
        return []
    return [f"The log has {counted(episodes, f'{kind}episode')}; resampling so few says little about spread."]


def fitted_warnings(workspace: Workspace, diagnostics: dict[str, Any], interval: Interval) -> list[str]:
    """Reasons to distrust the trained networks."""
    fitted = workspace.fitted
    diverged = None if fitted.alive.all() else fitted.describe_diverged()
    return head_warnings(diagnostics, interval.width, len(workspace.transitions), diverged)


def head_warnings(diagnostics: dict[str, Any], width: float, rows: int, diverged: str | None) -> list[str]:
    """The same from `fitted_diagnostics` and ``reward_scale``. width: of the interval."""
    found = []
    if diagnostics["head_disagreement"] > max(0.5 * width, NOTABLE * diagnostics["reward_scale"]):
        heads = ", ".join(f"{name} {value:.4g}" for name, value in diagnostics["estimates_by_head"].items())
        found.append(f"Estimators that should agree do not ({heads}); train longer or collect more data.")
    off_diagonal = diagnostics["mean_off_diagonal_kernel"]
    if off_diagonal is not None and off_diagonal < 1.0 / rows:
        found.append("The kernel sees every row as alone; raise the bandwidth.")
    if diverged is not None:
        found.append(f"{diverged}, and were left out; lower learning_rate.")
    rms, scale = diagnostics["residual_rms"], diagnostics["reward_scale"]
    if rms is None or rms > _LARGE_RESIDUAL * scale:
        found.append(
            f"Bellman residuals (rms {math.inf if rms is None else rms:.3g}) are larger than the logged "
            f"returns themselves (rms {scale:.3g}): nothing was learnt; lower learning_rate."
        )
    return found


def horizon_warnings(limits: Limits) -> list[str]:
    """Of a log whose every episode is cut early: it says nothing directly about the far future."""
    if limits.unseen < _MOST_UNSEEN:
        return []
    return [
        f"The longest episode has {limits.longest} steps: with γ = {limits.gamma:.10g}, {limits.unseen:.0%} "
        "of a constant reward's value lies beyond what any episode shows."
    ]


def mean_off_diagonal(kernel_inputs: np.ndarray, bandwidth: float) -> float:
    """Mean kernel value of two different rows, over an even sample."""
    rows = np.unique(np.linspace(0, len(kernel_inputs) - 1, min(len(kernel_inputs), _GRAM_ROWS)).astype(int))
    if len(rows) < 2:
        return math.nan
    gram = Gaussian(bandwidth).gram(torch.as_tensor(kernel_inputs[rows]))
    count = len(rows)
    return float((gram.sum() - gram.diagonal().sum()) / (count * (count - 1)))


def logged_action_overlap(
    transitions: Transitions, policy: DiscretePolicy | ContinuousPolicy
) -> dict[str, Any]:
    """Discrete actions: how probable the logged actions are to the policy, and the effective sample size."""
    if not isinstance(policy, DiscretePolicy):
        return {}
    rows = np.arange(len(transitions))
    taken = policy.probabilities(transitions.observations)[rows, transitions.actions]
    overlap = {"mean_probability_of_logged_actions": float(taken.mean())}
    if transitions.behavior_log_probabilities is not None:
        overlap["effective_sample_size"] = _effective_size(taken, transitions.behavior_log_probabilities)
    return overlap


def _effective_size(taken: np.ndarray, log_behavior: np.ndarray) -> float:
    """(Σ ρ)² / Σ ρ² of the ratios ρ = π(a|s) / exp(log_behavior), (N,) each; 0 when all ratios are."""
    possible = taken > 0.0
    if not possible.any():
        return 0.0
    logarithms = np.log(taken[possible]) - np.asarray(log_behavior, dtype=np.float64)[possible]
    ratios = np.exp(logarithms - logarithms.max())  # their common factor cancels
    return float(ratios.sum() ** 2 / np.square(ratios).sum())
