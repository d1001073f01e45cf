"""All that a test is about, put together once: residuals, units of random signs, the kernel's place."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy import sparse
from torch import Tensor

from koffline.data.transitions import Transitions
from koffline.errors import DataError
from koffline.kernels import Gaussian, Kernel, median_bandwidth
from koffline.ope.bellman_test.settings import WILD, BellmanSettings
from koffline.ope.bellman_test.windows import action_ratios, block_numbers, score_matrix, window_matrix
from koffline.ope.cross_fit import CrossFitted, next_row_values, row_values
from koffline.ope.problem import EvaluationProblem, prepare_problem
from koffline.ope.value_functions import ACTION, STATE
from koffline.ope.value_sources import as_value_function
from koffline.policies import Policy

_FAR = 10.0  # as in `koffline.ope.problem`: one outlier must not hide all else
_MEDIAN_ROWS = 1500  # evenly spaced; the median of as many is right to a percent
_KERNEL_SAMPLE = 500
_FEW_UNITS = 30
_LARGEST = 1e50  # fourth powers of anything below stay finite
_ULPS = 4.0  # a residual within as many roundings of its terms is zero


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
    problem: EvaluationProblem, n_states: int, with_actions: bool, settings: BellmanSettings
) -> tuple[KernelSpace, Float[Tensor, "row k"]]:
    """The kernel's space and the rows in it; the bandwidth is from rows of positive weight.

    n_states: how many numbers a state has.
    """
    width = len(problem.input_location) if with_actions else n_states
    inputs = torch.as_tensor(problem.kernel_inputs if with_actions else problem.inputs[:, :n_states])
    kernel = settings.kernel
    if kernel is None:
        some = _evenly_spaced(np.flatnonzero(problem.row_weights), _MEDIAN_ROWS)
        kernel = Gaussian(settings.bandwidth * median_bandwidth(inputs[some]))
    location, scale = problem.input_location[:width], problem.input_scale[:width]
    return KernelSpace(kernel, location, scale, problem.n_actions, with_actions), inputs


@dataclass(frozen=True, eq=False)
class BellmanCase:
    """A value function, a log and a policy, ready for the statistic; (N,) arrays in the user's units.

    ``residuals``: of one step, ``window_residuals`` of d; ``values``: Q(s, a) or V(s); ``weights``: the log's
    own, of mean one over the rows where they are positive. ``scores (G, N)``: see `score_matrix`;
    ``shift_scores``: what one unit of the alternative adds to them. ``units (N,)``: number of the random sign
    of a row's block, as if rows of weight zero were not there. ``inputs (N, k)``: rows in the kernel's
    ``space``. ``folds``: rows of each of several value functions, whose residuals must not be multiplied with
    each other's. ``warnings``: sentences for a person.
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
        return self.settings.method == WILD and 2.0 ** (1 - self.signs) > self.settings.level


def make_case(q: Any, transitions: Transitions, policy: Policy, settings: BellmanSettings) -> BellmanCase:
    """Check and compute.

    q: a `ValueFunction`, a `CrossFitted`, or anything with values ``now`` and ``later`` (N,) of these rows.
    A continuous random policy is asked for ``action_draws`` actions per row, drawn for that row alone: under
    H0 the residual keeps its mean of zero and only its noise grows, whatever the number of draws, and random
    signs carry that noise too. So the test needs no second, independent set of draws.
    Raises KofflineError in one line.
    """
    generator, of_state = np.random.default_rng(settings.seed), getattr(q, "kind", ACTION) == STATE
    problem = prepare_problem(transitions, policy, settings.gamma, 1, np.random.default_rng(settings.seed))
    counted = problem.row_weights > 0.0
    if counted.sum() < 2:
        raise DataError("fewer than 2 rows count; a test needs at least 2, a useful one hundreds")
    weights = problem.row_weights / problem.row_weights[counted].mean()  # their sum is n, as T = n·V̂ has it
    values, residuals = _residuals(q, transitions, policy, problem, weights, settings, generator)
    shift = _shift(of_state, transitions, policy, problem, settings, generator)
    ratios, about_ratios = action_ratios(transitions, policy, settings, of_state)
    windows = window_matrix(transitions, problem.discounts, ratios, settings.window, of_state)
    blocks = block_numbers(transitions, settings.window)
    shared = None if settings.signs_per_step else blocks
    units = np.zeros(len(weights), dtype=np.int64)
    units[counted] = np.unique(blocks[counted], return_inverse=True)[1]
    space, inputs = make_space(problem, math.prod(transitions.observation_shape), not of_state, settings)
    folds: tuple[np.ndarray, ...] = (np.arange(len(weights)),)
    if isinstance(q, CrossFitted):
        folds = tuple(rows for rows, _ in q.over(transitions))
    case = BellmanCase(
        transitions=transitions,
        settings=settings,
        reward_scale=problem.reward_scale,
        weights=weights,
        residuals=residuals,
        values=values,
        window_residuals=np.asarray(windows.T @ residuals),
        scores=score_matrix(windows, residuals, weights, shared),
        shift_scores=score_matrix(windows, shift, weights, shared),
        units=units,
        space=space,
        inputs=inputs,
        folds=folds,
    )
    return dataclasses.replace(case, warnings=(*about_ratios, *_doubts(case)))


def _residuals(
    q: Any,
    transitions: Transitions,
    policy: Policy,
    problem: EvaluationProblem,
    weights: np.ndarray,
    settings: BellmanSettings,
    generator: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Values and δ = r + discount · E_{a'~π} Q(s', a') − Q(s, a), what is nothing but rounding made zero.

    Random signs see equal residuals of 1e-16 as clearly as any others: within a few ulps of its terms, and of
    their size over the log, a residual is zero. Values that float32 holds exactly are taken for float32 ones.
    """
    largest = float(np.abs(transitions.rewards).max())
    if largest >= _LARGEST:
        raise DataError(f"rewards reach {largest:.3g}; rescale rewards and values below {_LARGEST:g}")
    values, later = _now_and_later(q, transitions, policy, settings, generator)
    rewards = problem.rewards * problem.reward_scale
    with np.errstate(over="ignore", invalid="ignore"):
        residuals = rewards + problem.discounts * later - values
    too_large = ~((np.abs(residuals) < _LARGEST) & (np.abs(values) < _LARGEST))
    if too_large.any():
        row = int(np.argmax(too_large))
        raise DataError(
            f"the residual of row {row} is {residuals[row]:.3g} (value {values[row]:.3g}); the values are "
            "far from any return of this log: check the model's units"
        )
    single = np.array_equal(values, values.astype(np.float32))
    precision = float(np.finfo(np.float32 if single else np.float64).eps)
    sizes = precision * (np.abs(values) + np.abs(problem.discounts * later))
    sizes = sizes + np.finfo(transitions.rewards.dtype).eps * np.abs(rewards)
    usual = np.sqrt(np.average(np.square(sizes), weights=weights))
    return values, np.where(np.abs(residuals) <= _ULPS * np.maximum(sizes, usual), 0.0, residuals)


def _now_and_later(
    q: Any,
    transitions: Transitions,
    policy: Policy,
    settings: BellmanSettings,
    generator: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Q(s, a) and E Q(s', a') (N,) each."""
    if not hasattr(q, "now"):
        later = next_row_values(q, transitions, policy, settings.action_draws, generator)
        return row_values(q, transitions), later
    values, later = np.asarray(q.now, dtype=np.float64), np.asarray(q.later, dtype=np.float64)
    if not values.shape == later.shape == (len(transitions),):
        raise DataError(
            f"row values have shapes {values.shape} and {later.shape}, the log {len(transitions)} rows; "
            "compute them for this log"
        )
    return values, later


def _shift(
    of_state: bool,
    transitions: Transitions,
    policy: Policy,
    problem: EvaluationProblem,
    settings: BellmanSettings,
    generator: np.random.Generator,
) -> np.ndarray:
    """Of a constant error c: c·(discount − 1); of an error h(s, a): discount · E h(s', a') − h(s, a)."""
    given = settings.alternative
    if not callable(given):
        return problem.discounts - 1.0
    kind, name = (STATE if of_state else None), "the alternative"
    space, shape = transitions.action_space, transitions.observation_shape
    error = as_value_function(given, space, shape, kind=kind, name=name)
    values, later = _now_and_later(error, transitions, policy, settings, generator)
    return problem.discounts * later - values


def _doubts(case: BellmanCase) -> list[str]:
    """Why the result may say little."""
    found = []
    signs, settings = case.signs, case.settings
    what = "rows" if settings.signs_per_step else "blocks of windows"
    if signs == 0:
        found.append("Every residual is zero up to rounding: there is nothing to test.")
    elif case.is_hopeless:
        found.append(
            f"{signs} {what} with a residual are too few for level {settings.level:g}: random signs cannot "
            f"give a p-value below {2.0 ** (1 - signs):.2g}, so that nothing can be rejected; use more rows."
        )
    elif signs < _FEW_UNITS:
        found.append(f"Only {signs} {what} have a residual: the level is only roughly kept.")
    if settings.window > 1 and settings.window > (longest := int(case.transitions.episode_lengths.max())):
        found.append(f"The longest episode has {longest} steps: no window is as long as {settings.window}.")
    near = _mean_kernel(case)
    if near < 1.0 / case.n:
        found.append(
            f"The kernel sees every row almost alone (mean value between rows {near:.1e}): errors that rows "
            "share go unseen; give a larger bandwidth."
        )
    return found


def _mean_kernel(case: BellmanCase) -> float:
    """Mean of |k| over pairs of different rows, from at most 500 of them."""
    rows = _evenly_spaced(np.flatnonzero(case.weights), _KERNEL_SAMPLE)
    gram = case.space.kernel.gram(case.inputs[rows]).abs()
    return float((gram.sum() - gram.diagonal().sum()) / (len(rows) * (len(rows) - 1)))


def _evenly_spaced(rows: np.ndarray, most: int) -> Tensor:
    return torch.as_tensor(rows[np.linspace(0, len(rows) - 1, min(len(rows), most)).astype(np.int64)])
