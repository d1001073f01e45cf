"""What a row of the log is to the test: a place for the kernel, a window of steps, and its random sign.

The d-step residual of row t is Σ_{j<d} c_tj δ_{t+j} with c_tj = Π_{l<j} discount_{t+l} · Π_{l≤j} ρ_{t+l}: it
has the mean of Σ γ^j r + γ^d E Q − Q and less noise. ρ are importance ratios of the actions after the first
(for V(s): of the first too); windows end with their episode.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy import sparse
from torch import Tensor

from koffline.data.transitions import Transitions
from koffline.errors import ConfigError, DataError
from koffline.kernels import Gaussian, Kernel, median_bandwidth
from koffline.ope.importance.ratios import action_log_probabilities
from koffline.ope.problem import EvaluationProblem
from koffline.policies import DiscretePolicy, Policy

_FAR = 10.0  # as in `koffline.ope.problem`: one outlier must not hide all else
_MEDIAN_ROWS = 1500  # evenly spaced; the median of as many is right to a percent
_BLOCK_WINDOWS = 8  # length of a block: one pair of neighbours in sixteen is dependent across its ends


@dataclass(frozen=True, eq=False)
class KernelSpace:
    """Coordinates and kernel of the test; the same coordinates as `EvaluationProblem.kernel_inputs`.

    ``location``, ``scale (k,)``: of states and, for Q(s, a), continuous actions. ``n_actions``: discrete
    actions stand beside the state as one-hot columns; None otherwise. ``with_actions``: False for V(s).
    """

    kernel: Kernel
    location: np.ndarray
    scale: np.ndarray
    n_actions: int | None
    with_actions: bool

    @property
    def bandwidth(self) -> float | None:
        """The kernel's bandwidth in standardised coordinates, None where it has none."""
        return getattr(self.kernel, "bandwidth", None)

    def place(self, observations: np.ndarray, actions: np.ndarray | None = None) -> Float[Tensor, "row k"]:
        """Kernel inputs (N, k) float64 of observations (N, …) and actions (N,) or (N, a)."""
        columns = np.asarray(observations, dtype=np.float64).reshape(len(observations), -1)
        if self.with_actions and self.n_actions is None:
            columns = np.concatenate([columns, np.asarray(actions, dtype=np.float64)], axis=1)
        placed = np.clip((columns - self.location) / self.scale, -_FAR, _FAR)
        if self.with_actions and self.n_actions is not None:
            placed = np.concatenate([placed, np.eye(self.n_actions)[np.asarray(actions)]], axis=1)
        return torch.as_tensor(placed)


def make_space(
    problem: EvaluationProblem, n_states: int, with_actions: bool, kernel: Kernel | None, bandwidth: float
) -> tuple[KernelSpace, Float[Tensor, "row k"]]:
    """The kernel's space and the rows in it; a Gaussian's bandwidth is from rows of positive weight.

    n_states: how many numbers a state has. kernel: None for a Gaussian of ``bandwidth`` median distances.
    """
    width = len(problem.input_location) if with_actions else n_states
    inputs = torch.as_tensor(problem.kernel_inputs if with_actions else problem.inputs[:, :n_states])
    if kernel is None:
        some = evenly_spaced(np.flatnonzero(problem.row_weights), _MEDIAN_ROWS)
        kernel = Gaussian(bandwidth * median_bandwidth(inputs[some]))
    location, scale = problem.input_location[:width], problem.input_scale[:width]
    return KernelSpace(kernel, location, scale, problem.n_actions, with_actions), inputs


def evenly_spaced(rows: np.ndarray, most: int) -> Tensor:
    """At most so many of the row numbers."""
    return torch.as_tensor(rows[np.linspace(0, len(rows) - 1, min(len(rows), most)).astype(np.int64)])


def action_ratios(
    transitions: Transitions, policy: Policy, window: int, on_policy: bool | None, of_state: bool
) -> tuple[np.ndarray, tuple[str, ...]]:
    """ρ = π(a|s)/b(a|s) (N,) of logged actions and a sentence about them; ones where none are needed.

    Raises ConfigError where they are needed and unknown, DataError where b is zero.
    """
    ones, behavior = np.ones(len(transitions)), transitions.behavior_log_probabilities
    if window == 1 and not of_state:
        return ones, ()
    what = "V(s)" if of_state else f"a window of {window} steps"
    if on_policy:
        return ones, (
            f"{what}: right only if the log's actions are the policy's own (on_policy=True, --on-policy)",
        )
    remedy = "give on_policy=True (--on-policy) if it wrote the log, or test Q(s, a) with window=1"
    if behavior is None:
        raise ConfigError(
            f"{what} follows the log's actions, and the log has no behaviour probabilities; "
            f"{remedy}, or add behavior_log_probabilities"
        )
    if not isinstance(policy, DiscretePolicy) and not policy.has_density:
        raise ConfigError(f"{policy.name}: importance ratios are unknown, {policy.why_no_density}; {remedy}")
    with np.errstate(over="ignore"):
        ratios = np.exp(
            action_log_probabilities(transitions, policy) - np.asarray(behavior, dtype=np.float64)
        )
    row = int(np.argmin(np.isfinite(ratios)))
    if not np.isfinite(ratios[row]):
        raise DataError(
            f"the behaviour probability of row {row} is exp({behavior[row]:.3g}) although its action was "
            "taken; correct the log or remove the row"
        )
    return ratios, (
        f"{what}: reweighted by importance ratios of the log's actions, at most {ratios.max():.3g}",
    )


def window_matrix(
    transitions: Transitions,
    discounts: Float[np.ndarray, " row"],
    ratios: Float[np.ndarray, " row"],
    window: int,
    of_state: bool,
) -> sparse.csr_matrix:
    """A (N, N) with A[t + j, t] = c_tj: the d-step residuals are Aᵀδ. Raises DataError without episodes."""
    rows = np.arange(len(transitions))
    factor = ratios if of_state else np.ones(len(rows))
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


def block_numbers(transitions: Transitions, window: int) -> Int[np.ndarray, " row"]:
    """Number of the block of each row (N,), 0, 1, …: the row itself for windows of one step."""
    if window == 1 or transitions.steps is None:
        return np.arange(len(transitions))
    starts_block = np.asarray(transitions.steps) % (_BLOCK_WINDOWS * window) == 0
    return np.cumsum(starts_block) - 1  # every episode begins with step 0
