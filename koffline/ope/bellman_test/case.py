"""Input of the test: settings, residuals and scores, and the kernel's coordinates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from koffline.config import BellmanSettings
from koffline.data.columns import rows_if_given
from koffline.data.late_ends import without_late_ends
from koffline.data.transitions import Transitions
from koffline.errors import DataError
from koffline.kernels import Gaussian, median_bandwidth
from koffline.ope.cross_fit import CrossFitted
from koffline.ope.log.problem import EvaluationProblem, prepare_problem
from koffline.ope.value_functions import ValueFunction
from koffline.policies import Policy

# rows for the median distance, evenly spaced: enough for an error of 1 %
_MEDIAN_ROWS = 1500
_FEW_SIGNS = 30
_LARGEST = 1e50  # largest residual whose fourth power is finite
_ULPS = 4.0  # residuals smaller than this many rounding errors of their terms are zero


@dataclass(frozen=True, eq=False)
class BellmanCase:
    """A value function, a log and a policy, ready for the statistic; (N,) arrays in the
    user's units.

    ``residuals``: δ; ``values``: Q(s, a); ``weights``: the log's own, scaled to mean
    one over rows of positive weight. ``folds``: rows of each value function; products
    of residuals are only taken within a fold.
    """

    transitions: Transitions
    settings: BellmanSettings
    problem: EvaluationProblem
    kernel: Gaussian
    weights: Float[np.ndarray, " row"]
    residuals: Float[np.ndarray, " row"]
    values: Float[np.ndarray, " row"]
    folds: tuple[np.ndarray, ...]

    @property
    def inputs(self) -> Float[Tensor, "row k"]:
        """Inputs of the kernel for all rows."""
        return torch.as_tensor(self.problem.kernel_inputs)

    def place(
        self, observations: np.ndarray, actions: np.ndarray
    ) -> Float[Tensor, "row k"]:
        """Inputs of the kernel for other observations (Q, …) and actions (Q,) or (Q,
        a).
        """
        placed = self.problem.standardise(observations, actions)
        if self.problem.n_actions is not None:
            placed = np.concatenate(
                [placed, np.eye(self.problem.n_actions)[np.asarray(actions)]], axis=1
            )
        return torch.as_tensor(placed)

    @property
    def pairs(self) -> float:
        """Σ_{i≠j} w_i w_j over pairs of rows that share a value function: n(n − 1)
        without weights.
        """
        parts = [self.weights[rows] for rows in self.folds]
        return sum(float(part.sum() ** 2 - np.square(part).sum()) for part in parts)

    @property
    def own_products(self) -> float:
        """Σ_i w_i² δ_i² k(x_i, x_i)."""
        diagonal = self.kernel.diagonal(self.inputs).numpy()
        return float(np.square(self.weights * self.residuals) @ diagonal)

    @property
    def n(self) -> int:
        """Number of rows with positive weight."""
        return int(np.count_nonzero(self.weights))

    @property
    def signs(self) -> int:
        """Number of random signs that change the statistic."""
        return int(np.count_nonzero(self.weights * self.residuals))

    @property
    def is_hopeless(self) -> bool:
        """Whether there are too few signs for a p-value as small as the level."""
        return 2.0 ** (1 - self.signs) > self.settings.level

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences on why the result may be uninformative."""
        signs = self.signs
        level = self.settings.level
        if signs == 0:
            return ("Every residual is zero up to rounding: there is nothing to test.",)
        if self.is_hopeless:
            return (
                f"{signs} rows with a residual are too few to reject anything at level"
                f" {level:g}: random signs give no p-value below"
                f" {2.0 ** (1 - signs):.2g}; use more rows.",
            )
        if signs < _FEW_SIGNS:
            return (
                f"Only {signs} rows have a residual: the level is only roughly kept.",
            )
        return ()


def make_case(
    q: ValueFunction | CrossFitted,
    transitions: Transitions,
    policy: Policy,
    settings: BellmanSettings,
) -> BellmanCase:
    """Check the inputs and compute δ = r + discount · E_{a'~π} Q(s', a') − Q(s, a) and
    derived arrays.

    With a continuous random policy, ``action_draws`` actions are drawn per row,
    separately for each row. Under H0 the residual then keeps its mean of zero for any
    number of draws; only its noise grows, which the random signs include. So the test
    needs no second, independent set of draws. Raises KofflineError in one line.
    """
    generator = np.random.default_rng(settings.seed)
    transitions = without_late_ends(transitions)
    problem = prepare_problem(
        transitions, policy, settings.gamma, 1, np.random.default_rng(settings.seed)
    )
    counted = np.flatnonzero(problem.row_weights)
    if len(counted) < 2:
        raise DataError(
            "fewer than 2 rows count; a test needs at least 2, a useful one hundreds"
        )
    # their sum is n, as in T = n·V̂
    weights = problem.row_weights / problem.row_weights[counted].mean()
    folds = []
    values = np.empty(len(transitions))
    later = np.empty(len(transitions))
    for rows, part in q.over(transitions):
        folds.append(rows)
        values[rows] = part.values(
            transitions.observations[rows], transitions.actions[rows]
        )
        next_values = part.expected(
            transitions.next_observations[rows],
            policy,
            settings.action_draws,
            generator,
            rows_if_given(transitions.next_action_mask, rows),
        )
        later[rows] = problem.discounts[rows] * next_values
    inputs = torch.as_tensor(problem.kernel_inputs)
    spaced = np.linspace(0, len(counted) - 1, min(len(counted), _MEDIAN_ROWS))
    median_rows = torch.as_tensor(counted[spaced.astype(np.int64)])
    kernel = Gaussian(settings.bandwidth * median_bandwidth(inputs[median_rows]))
    return BellmanCase(
        transitions=transitions,
        settings=settings,
        problem=problem,
        kernel=kernel,
        weights=weights,
        residuals=_residuals(transitions, problem, values, later, weights),
        values=values,
        folds=tuple(folds),
    )


def _residuals(
    log: Transitions,
    problem: EvaluationProblem,
    values: np.ndarray,
    later: np.ndarray,
    weights: np.ndarray,
) -> np.ndarray:
    """Residuals δ (N,); pure rounding errors are set to zero.

    Random signs would detect equal residuals of 1e-16 like any others. Therefore a
    residual counts as zero if it is within a few rounding errors of its terms, or of
    their typical size over the log. Values that float32 represents exactly are assumed
    to be computed in float32.
    """
    rewards = problem.rewards * problem.reward_scale
    with np.errstate(over="ignore", invalid="ignore"):
        residuals = rewards + later - values
    is_far = ~(np.abs(residuals) < _LARGEST)
    if is_far.any():
        row = int(is_far.argmax())
        raise DataError(
            f"the reward of row {row} is {rewards[row]:.3g}, its value"
            f" {values[row]:.3g}, far from any return of a log; check the model's"
            " units, and rescale rewards and values"
        )
    precision = float(np.finfo(np.float64).eps)
    if np.array_equal(values, values.astype(np.float32)):
        precision = float(np.finfo(np.float32).eps)
    sizes = precision * (np.abs(values) + np.abs(later))
    sizes = sizes + np.finfo(log.rewards.dtype).eps * np.abs(rewards)
    usual = np.sqrt(np.average(np.square(sizes), weights=weights))
    is_rounding = np.abs(residuals) <= _ULPS * np.maximum(sizes, usual)
    return np.where(is_rounding, 0.0, residuals)
