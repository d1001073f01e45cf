"""All that a test is about, put together once: residuals, units of random signs, the kernel's place."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from scipy import sparse
from torch import Tensor

from koffline.data.transitions import Transitions
from koffline.errors import DataError
from koffline.ope.bellman_test.kernel_space import KernelSpace, fit_kernel_space
from koffline.ope.bellman_test.residual_columns import ResidualColumns, one_step_residuals
from koffline.ope.bellman_test.settings import STEP, WILD, BellmanSettings
from koffline.ope.bellman_test.windows import action_ratios, block_numbers, score_matrix, window_matrix
from koffline.ope.bellman_test.witness import Witness
from koffline.ope.cross_fit import CrossFitted, row_parts
from koffline.ope.problem import EvaluationProblem, prepare_problem
from koffline.ope.value_functions import ACTION, STATE
from koffline.policies import Policy

_FEW_UNITS = 30
_KERNEL_SAMPLE = 500


@dataclass(frozen=True, eq=False)
class BellmanCase:
    """A value function, a log and a policy, ready for the statistic.

    ``windows (N, N)`` and ``scores (G, N)``: see `koffline.ope.bellman_test.windows`. ``inputs (N, k)``:
    rows in the kernel's space. ``warnings``: sentences for a person. ``folds``: rows of each of several
    value functions, whose residuals must not be multiplied with each other's.
    """

    transitions: Transitions
    policy: Policy
    settings: BellmanSettings
    seed: int
    problem: EvaluationProblem
    columns: ResidualColumns
    windows: sparse.csr_matrix
    scores: sparse.csr_matrix
    space: KernelSpace
    inputs: Float[Tensor, "row k"]
    warnings: tuple[str, ...]
    folds: tuple[np.ndarray, ...]

    @property
    def pairs(self) -> float:
        """Σ_{i≠j} w_i w_j over pairs of rows that share a value function: n(n − 1) without weights."""
        parts = [self.problem.row_weights[rows] for rows in self.folds]
        return sum(float(part.sum() ** 2 - np.square(part).sum()) for part in parts)

    @property
    def n(self) -> int:
        """Rows of positive weight."""
        return int(np.count_nonzero(self.problem.row_weights))

    @property
    def units(self) -> int:
        """Random signs that change the statistic."""
        return int(np.count_nonzero(np.diff(self.scores.indptr)))

    @property
    def smallest_p_value(self) -> float:
        """That random signs can give: all equal, or all opposite."""
        return 2.0 ** (1 - self.units)

    @property
    def window_residuals(self) -> Float[np.ndarray, " row"]:
        """Residuals over the window, (N,)."""
        return np.asarray(self.windows.T @ self.columns.residuals)

    @property
    def shift_scores(self) -> sparse.csr_matrix:
        """What one unit of the alternative adds to the scores, (G, N)."""
        weights = self.problem.row_weights
        return score_matrix(self.transitions, self.windows, self.columns.shift, weights, self.settings)

    def witness(self) -> Witness:
        """Of the residuals over the window."""
        counts = self.problem.row_weights > 0.0
        units = np.zeros(len(counts), dtype=np.int64)  # numbered as if rows of weight zero were not there
        units[counts] = np.unique(
            block_numbers(self.transitions, self.settings)[counts], return_inverse=True
        )[1]
        return Witness(
            space=self.space,
            inputs=self.inputs.numpy(),
            residuals=self.window_residuals,
            weights=self.problem.row_weights,
            units=units,
            observations=self.transitions.observations,
            actions=self.transitions.actions,
            level=self.settings.level,
            seed=self.seed,
        )


def make_case(
    q: Any, transitions: Transitions, policy: Policy, gamma: float, settings: BellmanSettings, seed: int
) -> BellmanCase:
    """Check and compute. q: as `read_rows` takes it. Raises KofflineError in one line."""
    generator = np.random.default_rng(seed)
    is_state = getattr(q, "kind", ACTION) == STATE
    problem = prepare_problem(transitions, policy, gamma, 1, np.random.default_rng(seed))
    if np.count_nonzero(problem.row_weights) < 2:
        raise DataError("fewer than 2 rows count; a test needs at least 2, a useful one hundreds")
    problem = _with_weights_of_counted_rows(problem)
    columns = one_step_residuals(q, transitions, policy, problem, settings, generator)
    ratios, sentence = action_ratios(transitions, policy, settings, is_state)
    windows = window_matrix(transitions, problem.discounts, ratios, settings.window, is_state)
    scores = score_matrix(transitions, windows, columns.residuals, problem.row_weights, settings)
    space = fit_kernel_space(transitions, problem.row_weights, not is_state, settings)
    case = BellmanCase(
        transitions=transitions,
        policy=policy,
        settings=settings,
        seed=seed,
        problem=problem,
        columns=columns,
        windows=windows,
        scores=scores,
        space=space,
        inputs=space.place(transitions.observations, transitions.actions),
        warnings=(),
        folds=tuple(rows for rows, _ in row_parts(q, transitions))
        if isinstance(q, CrossFitted)
        else (np.arange(len(transitions)),),
    )
    return dataclasses.replace(case, warnings=(*([sentence] if sentence else []), *_doubts(case)))


def _with_weights_of_counted_rows(problem: EvaluationProblem) -> EvaluationProblem:
    """Weights of mean one over the n rows of positive weight: their sum is n, as T = n·V̂ has it."""
    weights = problem.row_weights
    return dataclasses.replace(problem, row_weights=weights / weights[weights > 0.0].mean())


def _doubts(case: BellmanCase) -> list[str]:
    """Why the result may say little."""
    found = []
    units, level = case.units, case.settings.level
    what = "rows" if case.settings.window == 1 or case.settings.multipliers == STEP else "blocks of windows"
    if units == 0:
        how = "zero up to rounding" if case.columns.rounded else "exactly zero"
        found.append(f"Every residual is {how}: there is nothing to test.")
    elif case.settings.method == WILD and case.smallest_p_value > level:
        found.append(
            f"{units} {what} with a residual are too few for level {level:g}: random signs cannot give a "
            f"p-value below {case.smallest_p_value:.2g}, so that nothing can be rejected; use more rows."
        )
    elif units < _FEW_UNITS:
        found.append(f"Only {units} {what} have a residual: the level is only roughly kept.")
    window = case.settings.window
    if window > 1 and window > int(case.transitions.episode_lengths.max()):
        longest = int(case.transitions.episode_lengths.max())
        found.append(f"The longest episode has {longest} steps: no window is as long as {window}.")
    near = _mean_kernel(case)
    if near < 1.0 / case.n:
        found.append(
            f"The kernel sees every row almost alone (mean value between rows {near:.1e}): errors that rows "
            "share go unseen; give a larger bandwidth."
        )
    return found


def _mean_kernel(case: BellmanCase) -> float:
    """Mean of |k| over pairs of different rows, from at most 500 of them."""
    rows = np.flatnonzero(case.problem.row_weights)
    rows = rows[np.linspace(0, len(rows) - 1, min(len(rows), _KERNEL_SAMPLE)).astype(np.int64)]
    gram = case.space.kernel.gram(case.inputs[torch.as_tensor(rows)]).abs()
    count = len(rows)
    return float((gram.sum() - gram.diagonal().sum()) / (count * (count - 1)))
