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
from koffline.ope.bellman_test.settings import BellmanSettings
from koffline.policies import DiscretePolicy, Policy

_BLOCK_WINDOWS = 8  # length of a block: one pair of neighbours in sixteen is dependent across its ends


def action_ratios(
    transitions: Transitions, policy: Policy, settings: BellmanSettings, is_state_function: bool
) -> tuple[np.ndarray, tuple[str, ...]]:
    """ρ = π(a|s)/b(a|s) (N,) of logged actions and a sentence about them; ones where none are needed.

    Raises ConfigError where they are needed and unknown, DataError where b is zero.
    """
    ones = np.ones(len(transitions))
    if settings.window == 1 and not is_state_function:
        return ones, ()
    what = "V(s)" if is_state_function else f"a window of {settings.window} steps"
    if settings.on_policy:
        sentence = (
            f"{what}: right only if the log's actions are the policy's own (on_policy=True, --on-policy)"
        )
        return ones, (sentence,)
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
    sentence = f"{what}: reweighted by importance ratios of the log's actions, at most {ratios.max():.3g}"
    return ratios, (sentence,)


def _log_probabilities(transitions: Transitions, policy: Policy) -> np.ndarray:
    """log π(a|s) (N,) of the logged actions."""
    if isinstance(policy, DiscretePolicy):
        rows = np.arange(len(transitions))
        with np.errstate(divide="ignore"):
            return np.log(policy.probabilities(transitions.observations)[rows, transitions.actions])
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
    factor = ratios if is_state_function else np.ones(len(rows))
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
    windows: sparse.csr_matrix,
    residuals: Float[np.ndarray, " row"],
    weights: Float[np.ndarray, " row"],
    blocks: Int[np.ndarray, " row"] | None,
) -> sparse.csr_matrix:
    """S (G, N): row g is what gets the g-th random sign; its columns sum to weight · d-step residual.

    blocks: of consecutive windows of one episode (see `block_numbers`). None: a sign per step; row s is δ_s
    times its trace Σ_j c_{s−j, j} ψ(x_{s−j}), known before δ_s is drawn: a martingale difference, whatever
    the overlap.
    """
    scaled = windows @ sparse.diags(weights)
    if blocks is None:
        return sparse.csr_matrix(sparse.diags(residuals) @ scaled)
    totals, rows = np.asarray(scaled.T @ residuals), np.arange(len(blocks))
    return sparse.csr_matrix((totals, (blocks, rows)), shape=(int(blocks[-1]) + 1, len(rows)))


def block_numbers(transitions: Transitions, window: int) -> Int[np.ndarray, " row"]:
    """Number of the block of each row (N,), 0, 1, …: the row itself for windows of one step."""
    if window == 1 or transitions.steps is None:
        return np.arange(len(transitions))
    starts_block = np.asarray(transitions.steps) % (_BLOCK_WINDOWS * window) == 0
    return np.cumsum(starts_block) - 1  # every episode begins with step 0
