"""What is tested and how: the settings, and residuals, scores and the kernel's places, put together once."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from pydantic import Field
from scipy import sparse
from torch import Tensor

from koffline.config import Section, read_section
from koffline.data.transitions import Transitions
from koffline.errors import ConfigError, DataError
from koffline.ope.bellman_test.rows import (
    KernelSpace,
    action_ratios,
    block_numbers,
    evenly_spaced,
    make_space,
    window_matrix,
)
from koffline.ope.cross_fit import CrossFitted, next_row_values, row_parts, row_values
from koffline.ope.problem import EvaluationProblem, prepare_problem
from koffline.ope.value_functions import STATE, ValueFunction
from koffline.policies import Policy

_KERNEL_SAMPLE = 500
_FEW_SIGNS = 30
_LARGEST = 1e50  # fourth powers of anything below stay finite
_ULPS = 4.0  # a residual within as many roundings of its terms is zero


class BellmanSettings(Section):
    """Options of `koffline.bellman_test`.

    level: the test rejects where p ≤ level. draws: of random signs.
    window: steps d over which residuals are summed, within episodes; each step has one random sign for all
    windows it is in, as one-step residuals are martingale differences.
    on_policy: the log's actions are the policy's own, so that no importance ratios are needed (for windows
    and for state functions); None: use the log's behaviour probabilities.
    alternative: the departure whose power is reported: values off everywhere by this multiple of the root
    mean square return.
    kernel: over ``kernel_inputs``; None: Gaussian. bandwidth: a multiple of the median distance between rows.
    features: random Fourier features in place of the Gram matrix; 0: the exact one; None: exact up to 3,000
    rows, 1,000 features above. action_draws: actions drawn per next state from a continuous policy.
    """

    gamma: float = Field(gt=0.0, lt=1.0)
    seed: int = Field(0, ge=0)
    level: float = Field(0.05, gt=0.0, lt=1.0)
    draws: int = Field(999, ge=1)
    window: int = Field(1, ge=1)
    on_policy: bool | None = None
    alternative: float = Field(0.1, gt=0.0)
    kernel: Any = None
    bandwidth: float = Field(0.6, gt=0.0)
    features: int | None = Field(None, ge=0, multiple_of=2)
    action_draws: int = Field(8, ge=1)


def make_settings(**options: Any) -> BellmanSettings:
    """Options that are None say nothing. Raises ConfigError in one line."""
    given = {name: value for name, value in options.items() if value is not None}
    made = read_section(BellmanSettings, given)
    least = math.ceil(1.0 / made.level - 1e-9) - 1  # B draws give no p-value below 1/(B + 1)
    if made.draws < least:
        raise ConfigError(
            f"draws is {made.draws}, too few for level {made.level}: the smallest p-value is "
            f"{1.0 / (made.draws + 1):.3g}; give draws={least} or more, or a higher level (--level)"
        )
    return made


@dataclass(frozen=True, eq=False)
class BellmanCase:
    """A value function, a log and a policy, ready for the statistic; (N,) arrays in the user's units.

    ``residuals``: of one step, ``window_residuals`` of d; ``values``: Q(s, a) or V(s); ``weights``: the log's
    own, of mean one over the rows where they are positive. ``scores (N, N)``: row s, δ_s times its trace
    Σ_j w_{s−j} c_{s−j, j} ψ(x_{s−j}), gets the s-th random sign: the trace is known before δ_s is drawn, so
    scores are martingale differences whatever the overlap. ``shift_scores``: what one unit of the alternative
    adds to them. ``units (N,)``: number of a row's block, as if rows of weight zero were not there.
    ``inputs (N, k)``: rows in the kernel's ``space``. ``folds``: rows of each of several value functions,
    whose residuals must not be multiplied with each other's. ``warnings``: sentences for a person.
    """

    transitions: Transitions
    settings: BellmanSettings
    reward_scale: float
    weights: Float[np.ndarray, " row"]
    residuals: Float[np.ndarray, " row"]
    values: Float[np.ndarray, " row"]
    window_residuals: Float[np.ndarray, " row"]
    scores: sparse.csr_matrix
    shift_scores: sparse.csr_matrix
    units: Int[np.ndarray, " row"]
    space: KernelSpace
    inputs: Float[Tensor, "row k"]
    folds: tuple[np.ndarray, ...]
    warnings: tuple[str, ...] = ()

    @property
    def pairs(self) -> float:
        """Σ_{i≠j} w_i w_j over pairs of rows that share a value function: n(n − 1) without weights."""
        parts = [self.weights[rows] for rows in self.folds]
        return sum(float(part.sum() ** 2 - np.square(part).sum()) for part in parts)

    @property
    def own_products(self) -> float:
        """Σ_i w_i² δ_i² k(x_i, x_i)."""
        diagonal = self.space.kernel.diagonal(self.inputs).numpy()
        return float(np.square(self.weights * self.window_residuals) @ diagonal)

    @property
    def n(self) -> int:
        """Rows of positive weight."""
        return int(np.count_nonzero(self.weights))

    @property
    def signs(self) -> int:
        """Random signs that change the statistic."""
        return int(np.count_nonzero(np.diff(self.scores.indptr)))

    @property
    def is_hopeless(self) -> bool:
        """Even signs that are all equal, or all opposite, give no p-value as small as the level."""
        return 2.0 ** (1 - self.signs) > self.settings.level


def make_case(
    q: ValueFunction | CrossFitted, transitions: Transitions, policy: Policy, settings: BellmanSettings
) -> BellmanCase:
    """Check and compute δ = r + discount · E_{a'~π} Q(s', a') − Q(s, a) and all that hangs on it.

    A continuous random policy is asked for ``action_draws`` actions per row, drawn for that row alone: under
    H0 the residual keeps its mean of zero and only its noise grows, whatever the number of draws, and random
    signs carry that noise too. So the test needs no second, independent set of draws.
    Raises KofflineError in one line.
    """
    generator, of_state = np.random.default_rng(settings.seed), q.kind == STATE
    problem = prepare_problem(transitions, policy, settings.gamma, 1, np.random.default_rng(settings.seed))
    counted = problem.row_weights > 0.0
    if counted.sum() < 2:
        raise DataError("fewer than 2 rows count; a test needs at least 2, a useful one hundreds")
    weights = problem.row_weights / problem.row_weights[counted].mean()  # their sum is n, as T = n·V̂ has it
    later = next_row_values(q, transitions, policy, settings.action_draws, generator)
    values, later = row_values(q, transitions), problem.discounts * later
    residuals = _residuals(transitions, problem, values, later, weights)
    window = settings.window
    ratios, about_ratios = action_ratios(transitions, policy, window, settings.on_policy, of_state)
    windows = window_matrix(transitions, problem.discounts, ratios, window, of_state)
    traces, shift = windows @ sparse.diags(weights), problem.discounts - 1.0  # of an error of one everywhere
    units = np.zeros(len(weights), dtype=np.int64)
    units[counted] = np.unique(block_numbers(transitions, window)[counted], return_inverse=True)[1]
    n_states = math.prod(transitions.observation_shape)
    space, inputs = make_space(problem, n_states, not of_state, settings.kernel, settings.bandwidth)
    case = BellmanCase(
        transitions=transitions,
        settings=settings,
        reward_scale=problem.reward_scale,
        weights=weights,
        residuals=residuals,
        values=values,
        window_residuals=np.asarray(windows.T @ residuals),
        scores=sparse.csr_matrix(sparse.diags(residuals) @ traces),
        shift_scores=sparse.csr_matrix(sparse.diags(shift) @ traces),
        units=units,
        space=space,
        inputs=inputs,
        folds=tuple(rows for rows, _ in row_parts(q, transitions)),
    )
    return dataclasses.replace(case, warnings=(*about_ratios, *_doubts(case)))


def _residuals(
    transitions: Transitions,
    problem: EvaluationProblem,
    values: np.ndarray,
    later: np.ndarray,
    weights: np.ndarray,
) -> np.ndarray:
    """δ (N,), what is nothing but rounding made zero.

    Random signs see equal residuals of 1e-16 as clearly as any others: within a few ulps of its terms, and of
    their size over the log, a residual is zero. Values that float32 holds exactly are taken for float32 ones.
    """
    rewards = problem.rewards * problem.reward_scale
    with np.errstate(over="ignore", invalid="ignore"):
        residuals = rewards + later - values
    for what, numbers in (("reward", rewards), ("value", values), ("residual", residuals)):
        row = int(np.argmin(np.abs(numbers) < _LARGEST))
        if not abs(numbers[row]) < _LARGEST:
            raise DataError(
                f"the {what} of row {row} is {numbers[row]:.3g}, far from any return of a log; check the "
                f"model's units, and rescale rewards and values below {_LARGEST:g}"
            )
    single = np.array_equal(values, values.astype(np.float32))
    precision = float(np.finfo(np.float32 if single else np.float64).eps)
    sizes = precision * (np.abs(values) + np.abs(later))
    sizes = sizes + np.finfo(transitions.rewards.dtype).eps * np.abs(rewards)
    usual = np.sqrt(np.average(np.square(sizes), weights=weights))
    return np.where(np.abs(residuals) <= _ULPS * np.maximum(sizes, usual), 0.0, residuals)


def _doubts(case: BellmanCase) -> list[str]:
    """Why the result may say little."""
    found, signs, window = [], case.signs, case.settings.window
    if signs == 0:
        found.append("Every residual is zero up to rounding: there is nothing to test.")
    elif case.is_hopeless:
        found.append(
            f"{signs} rows with a residual are too few for level {case.settings.level:g}: random signs "
            f"give no p-value below {2.0 ** (1 - signs):.2g}, so that nothing can be rejected; use more rows."
        )
    elif signs < _FEW_SIGNS:
        found.append(f"Only {signs} rows have a residual: the level is only roughly kept.")
    if window > 1 and window > (longest := int(case.transitions.episode_lengths.max())):
        found.append(f"The longest episode has {longest} steps: no window is as long as {window}.")
    rows = evenly_spaced(np.flatnonzero(case.weights), _KERNEL_SAMPLE)
    gram = case.space.kernel.gram(case.inputs[rows]).abs()
    near = float((gram.sum() - gram.diagonal().sum()) / (len(rows) * (len(rows) - 1)))
    if near < 1.0 / case.n:
        found.append(
            f"The kernel sees every row almost alone (mean value between rows {near:.1e}): errors that rows "
            "share go unseen; give a larger bandwidth."
        )
    return found
