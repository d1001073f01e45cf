"""Residuals over several steps as sums of one-step residuals, and who gets a random sign of its own.

The d-step residual of row t is Σ_{j<d} c_tj δ_{t+j} with c_tj = Π_{l<j} discount_{t+l} · Π_{l≤j} ρ_{t+l}: it
has the mean of Σ γ^j r + γ^d E Q − Q and less noise. ρ are importance ratios of the actions after the first
(for V(s): of the first too); windows end with their episode.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int
from scipy import sparse

from koffline.data.transitions import Transitions
from koffline.errors import ConfigError, DataError
from koffline.ope.bellman_test.settings import STEP, BellmanSettings
from koffline.policies import DiscretePolicy, Policy

_BLOCK_WINDOWS = (
    8  # a block of as many windows: one pair of neighbours in sixteen is dependent across its ends
)


def needs_ratios(window: int, is_state_function: bool) -> bool:
    """Whether the residual follows logged actions: the first of V(s), those after the first of a window."""
    return window > 1 or is_state_function


def action_ratios(
    transitions: Transitions, policy: Policy, settings: BellmanSettings, is_state_function: bool
) -> tuple[np.ndarray, str]:
    """ρ = π(a|s)/b(a|s) (N,) of logged actions and a sentence about them; ones where none are needed.

    Raises ConfigError where they are needed and unknown, DataError where b is zero.
    """
    ones = np.ones(len(transitions))
    if not needs_ratios(settings.window, is_state_function):
        return ones, ""
    what = "V(s)" if is_state_function else f"a window of {settings.window} steps"
    if settings.on_policy:
        return (
            ones,
            f"{what}: right only if the log's actions are the policy's own (on_policy=True, --on-policy)",
        )
    behavior = transitions.behavior_log_probabilities
    if behavior is None:
        raise ConfigError(
            f"{what} follows the log's actions, and the log has no behaviour probabilities; give "
            "on_policy=True (--on-policy) if the policy wrote the log, or add behavior_log_probabilities, or "
            "test Q(s, a) with window=1"
        )
    with np.errstate(over="ignore"):
        ratios = np.exp(_log_probabilities(transitions, policy) - np.asarray(behavior, dtype=np.float64))
    if not np.isfinite(ratios).all():
        row = int(np.argmin(np.isfinite(ratios)))
        raise DataError(
            f"the behaviour probability of row {row} is exp({behavior[row]:.3g}) although its action was "
            "taken; correct the log or remove the row"
        )
    return ratios, f"{what}: reweighted by importance ratios of the log's actions, at most {ratios.max():.3g}"


def _log_probabilities(transitions: Transitions, policy: Policy) -> np.ndarray:
    """log π(a|s) (N,) of the logged actions."""
    if isinstance(policy, DiscretePolicy):
        rows = np.arange(len(transitions))
        chances = policy.probabilities(transitions.observations)[rows, np.asarray(transitions.actions)]
        with np.errstate(divide="ignore"):
            return np.log(chances)
    if not policy.has_density:
        raise ConfigError(
            f"{policy.name}: importance ratios are unknown, {policy.why_no_density}; give on_policy=True "
            "(--on-policy) if it wrote the log, or test Q(s, a) with window=1"
        )
    return policy.log_density(transitions.observations, np.asarray(transitions.actions, dtype=np.float64))


def window_matrix(
    transitions: Transitions,
    discounts: Float[np.ndarray, " row"],
    ratios: Float[np.ndarray, " row"],
    window: int,
    is_state_function: bool,
) -> sparse.csr_matrix:
    """A (N, N) with A[t + j, t] = c_tj: the d-step residuals are Aᵀδ. Raises DataError without episodes."""
    rows = np.arange(len(transitions))
    factor = ratios.copy() if is_state_function else np.ones(len(rows))
    if window == 1:
        return sparse.csr_matrix(sparse.diags(factor))
    if not transitions.has_episodes:
        raise DataError(
            f"window is {window}, but the log has no episodes; add episode_ids or test with window=1"
        )
    lengths = transitions.episode_lengths
    rows_left = np.repeat(transitions.episode_ends, lengths) - rows
    parts = [(rows, rows, factor)]
    for step in range(1, min(window, int(lengths.max()))):
        inside = np.flatnonzero(rows_left >= step)
        factor = factor.copy()
        factor[inside] *= discounts[inside + step - 1] * ratios[inside + step]
        parts.append((inside + step, inside, factor[inside]))
    at, begins, values = (np.concatenate(column) for column in zip(*parts, strict=True))
    return sparse.csr_matrix((values, (at, begins)), shape=(len(rows), len(rows)))


def score_matrix(
    transitions: Transitions,
    windows: sparse.csr_matrix,
    residuals: Float[np.ndarray, " row"],
    weights: Float[np.ndarray, " row"],
    settings: BellmanSettings,
) -> sparse.csr_matrix:
    """S (G, N): row g is what gets the g-th random sign; its columns sum to weight · d-step residual.

    Blocks are runs of consecutive windows of one episode. With ``"step"`` row s is δ_s times its trace
    Σ_j c_{s−j, j} ψ(x_{s−j}), known before δ_s is drawn: a martingale difference, whatever the overlap.
    """
    scaled = windows @ sparse.diags(weights)
    if settings.window == 1 or settings.multipliers == STEP:
        return sparse.csr_matrix(sparse.diags(residuals) @ scaled)
    group = block_numbers(transitions, settings)
    totals = np.asarray(scaled.T @ residuals)
    rows = np.arange(len(group))
    return sparse.csr_matrix((totals, (group, rows)), shape=(int(group[-1]) + 1, len(rows)))


def block_numbers(transitions: Transitions, settings: BellmanSettings) -> Int[np.ndarray, " row"]:
    """Number of the block of each row (N,), 0, 1, …: the row itself for windows of one step."""
    if settings.window == 1 or transitions.steps is None:
        return np.arange(len(transitions))
    length = settings.block_length or _BLOCK_WINDOWS * settings.window
    return np.cumsum(np.asarray(transitions.steps) % length == 0) - 1  # every episode begins with step 0
