"""Tests of two assumptions of all estimators: the logged state is Markov, and the world
is stationary.

Each is measured by its effect on the value. Let x = (s, a), h what else may matter for
a row (the row before it, or its place in the log), and δ the residual of Q. If h does
not matter given x, E[δ | x, h] = 0 for the true Q, and for any Q

    shift = n⁻¹ Σ w ω̃ δ,    ω̃ = ω(x, h) − E[ω(x, h) | x],    ω = d^π/μ over (x, h),

is zero in expectation: errors of Q depend on x alone, and ω̃ averages to zero at every
x. If h matters, the doubly robust value with ω(x), plus shift, is the doubly robust
value with h as part of the state. ω is the dual of LSTD-Q in features φ(x) and η(x, h),
the latter centred given x by a ridge regression. If both the centring and Q are
slightly wrong, the bias is only the product of their errors. (Shah & Peters 2020,
generalised covariance measure; Kallus & Uehara 2020)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy import special
from torch import Tensor

from koffline.data.columns import blocks
from koffline.jobs.cores import each_on_cores
from koffline.kernels import Gaussian, median_bandwidth, random_fourier_features
from koffline.ope import thresholds
from koffline.ope.log.problem import EvaluationProblem
from koffline.ope.log.row_values import RowValues
from koffline.ope.results import Interval

_FEATURES = 200  # random features of x, and of (x, h)
# Relative to the features' mean squares before centring. What centring leaves of a
# memory that the state already determines is regression error, and must not count.
_RIDGE = 1e-2
_CENTRING_RIDGE = 1e-6
# actions of the policy in a state; fewer discrete ones are all taken, with
# probabilities
_MOST_DRAWS = 8
_FAR = 5.0  # standard deviations of a reward
_BLOCK = 2048  # rows
_AT_ONCE = 256  # rows with all their next actions
_MOST_ROWS = 10_000
_MORE_ROWS = 50_000  # if a p-value is small but not small enough
_MAY_MATTER = 0.05  # such a p-value
_LEAST_UNITS = 20
_FURTHER = (2, 3, 5)  # numbers of previous rows that are tested after one
_ROW_SECONDS = 2e-5  # rough time of a test for each row
_WIDE = 200  # columns of memory that are tested at most
_MOST_OF_IT = 0.8  # of the largest change, which the smallest extension must show


@dataclass(frozen=True)
class Shift:
    """Change of J if something else were part of the state, in units of the return,
    with its standard error.

    ``units``: number of episodes behind the standard error. ``rows``: how many previous
    rows were tested; 0 for sums over all of them or, with ``of_step``, their number.
    ``tests``: number of tests made; ``limit``: for the p-value.
    """

    value: float
    standard_error: float
    units: int
    rows: int = 1
    of_step: bool = False
    tests: int = 1
    limit: float = thresholds.SHIFT_P_VALUE

    @property
    def p_value(self) -> float:
        """Two-sided p-value for no change, by Student's t over units, times the number
        of tests.
        """
        if self.standard_error == 0.0:
            return 1.0
        tail = special.stdtr(self.units - 1, -abs(self.value) / self.standard_error)
        return min(1.0, 2.0 * self.tests * float(tail))

    def matters(self, interval: Interval) -> bool:
        """Whether it is significant and moves the value by more than half of the
        interval's half width.

        The width is that before the interval was cut at bounds, as the shift is not cut
        either.
        """
        least = thresholds.SHIFT_OF_WIDTH * interval.as_measured.width
        return self.p_value < self.limit and abs(self.value) > least


@dataclass(frozen=True, eq=False)
class _ExtraState:
    """Extra state h of m rows: ``before`` (m, h) each row, ``after`` (m, h) it (for the
    next row), ``first`` (1, h) at the start.

    ``of_both``: η are random features of (x, h); otherwise η = h φ(x), for a single
    number h.
    """

    before: Float[np.ndarray, "row h"]
    after: Float[np.ndarray, "row h"]
    first: Float[np.ndarray, "1 h"]
    of_both: bool


@dataclass(frozen=True, eq=False)
class _Candidate:
    """An extension of the state that is tested at m rows with the numbers ``tested``.

    ``rows``, ``of_step``, ``limit``: as in `Shift`.
    """

    tested: Int[np.ndarray, " row"]
    memory: _ExtraState
    rows: int = 0
    of_step: bool = False
    limit: float = thresholds.SHIFT_P_VALUE


def memory_shift(
    problem: EvaluationProblem, values: RowValues, seed: int, most: int = _MOST_ROWS
) -> Shift | None:
    """Estimate the effect of earlier rows on J; None without episodes of several rows,
    or with few of them.

    Tests the previous row, the number of earlier rows (the step) and, for inputs of
    moderate width, the 2, 3 and 5 previous rows and sums over all earlier rows. Returns
    the smallest extension that is significant (p < 1e-4) and shows most of the change.
    If only last rows have rewards, p < 0.01 is enough for the sums, because few rows
    inform about them. values: at the rows, by networks that did not see their episode,
    in units of the return. Of more than ``most`` rows every second, third, … is used;
    again of more than 50,000 if p-values are below 0.05 and none is small enough.
    """
    candidates = _memories(problem, most)
    shifts = _shifts_by(candidates, problem, values, seed)
    return _smallest_that_matters(shifts, problem, values, seed, most)


def memory_and_drift_shifts(
    problem: EvaluationProblem, values: RowValues, seed: int
) -> tuple[Shift | None, Shift | None]:
    """`memory_shift` and `drift_shift`, whose tests run side by side on the cores."""
    # the cheapest beside those that cost most, because cores take neighbours
    candidates = [_drift(problem), *_memories(problem)]
    of_drift, *of_memory = _shifts_by(candidates, problem, values, seed)
    return _smallest_that_matters(of_memory, problem, values, seed), of_drift


def _shifts_by(
    candidates: list[_Candidate],
    problem: EvaluationProblem,
    values: RowValues,
    seed: int,
) -> list[Shift | None]:
    """The shift by each candidate; None for few clusters."""
    rows = sum(len(candidate.tested) for candidate in candidates)
    return each_on_cores(
        partial(_shift, problem, values, seed),
        items=candidates,
        seconds=rows * _ROW_SECONDS,
    )


def _smallest_that_matters(
    shifts: list[Shift | None],
    problem: EvaluationProblem,
    values: RowValues,
    seed: int,
    most: int = _MOST_ROWS,
) -> Shift | None:
    """Of the shifts by memories the one that `memory_shift` returns."""
    measured = [
        replace(shift, tests=len(shifts)) for shift in shifts if shift is not None
    ]
    if not shifts or len(measured) < len(shifts):
        return None
    significant = [shift for shift in measured if shift.p_value < shift.limit]
    if significant:
        largest = max(abs(shift.value) for shift in significant)
        enough = _MOST_OF_IT * largest
        return next(shift for shift in significant if abs(shift.value) >= enough)
    has_more_rows = most < min(problem.n_rows, _MORE_ROWS)
    if has_more_rows and min(shift.p_value for shift in measured) < _MAY_MATTER:
        return memory_shift(problem, values, seed, _MORE_ROWS)
    return measured[0]


def _memories(problem: EvaluationProblem, most: int = _MOST_ROWS) -> list[_Candidate]:
    """The extensions by earlier rows that are tested, the smallest first; none without
    episodes of several rows.
    """
    if len(problem.episode_starts) == problem.n_rows:
        return []
    rows = _tested_rows(problem, most)
    width = problem.kernel_inputs.shape[1]
    counts = [1]
    if not problem.history:
        counts += [count for count in _FURTHER if count * width <= _WIDE]
    rewards = problem.rewards - problem.rewards.mean()
    rewards = np.clip(rewards / (rewards.std() or 1.0), -_FAR, _FAR)
    candidates = []
    for count in counts:
        before = _previous_rows(problem, rewards, rows, range(1, count + 1))
        after = _previous_rows(problem, rewards, rows, range(count))
        candidates.append(_Candidate(rows, _remembered(before, after), rows=count))
    steps = problem.steps[rows, None]
    unit = max(float(steps.std()), 1.0)
    of_step = _remembered(steps / unit, (steps + 1) / unit)
    candidates.append(_Candidate(rows, of_step, of_step=True))
    if width <= _WIDE:
        sums = _sums_so_far(problem, rewards)
        before = np.where(steps > 0, sums[rows - 1], 0.0)
        limit = thresholds.SHIFT_P_VALUE
        if _pays_only_at_ends(problem):
            limit = thresholds.SHIFT_P_VALUE_MILD
        of_sums = _remembered(before, sums[rows])
        candidates.append(_Candidate(rows, of_sums, limit=limit))
    return candidates


def _remembered(before: np.ndarray, after: np.ndarray) -> _ExtraState:
    """A memory that is zero at the start of an episode."""
    return _ExtraState(before, after, first=np.zeros_like(before[:1]), of_both=True)


def _rows_to_remember(
    problem: EvaluationProblem,
    rewards: Float[np.ndarray, " all"],
    rows: Int[np.ndarray, " row"],
) -> Float[np.ndarray, "row column"]:
    """Rows as a memory holds them: a one, state and action, and the reward.

    rewards: of all rows, in standard deviations.
    """
    return np.column_stack(
        [np.ones(len(rows)), problem.kernel_inputs[rows], rewards[rows]]
    )


def _previous_rows(
    problem: EvaluationProblem,
    rewards: Float[np.ndarray, " all"],
    rows: Int[np.ndarray, " row"],
    lags: range,
) -> Float[np.ndarray, "row column"]:
    """The rows at these lags before each row, side by side; zeros before the episode.

    rewards: as in `_rows_to_remember`.
    """
    steps = problem.steps[rows, None]
    parts = []
    for lag in lags:
        earlier = _rows_to_remember(problem, rewards, np.maximum(rows - lag, 0))
        parts.append(np.where(steps >= lag, earlier, 0.0))
    return np.concatenate(parts, axis=1)


def _sums_so_far(
    problem: EvaluationProblem, rewards: Float[np.ndarray, " row"]
) -> Float[np.ndarray, "row column"]:
    """Sums over the rows of an episode up to each row, in standard deviations.

    rewards: as in `_rows_to_remember`.
    """
    of_rows = _rows_to_remember(problem, rewards, np.arange(problem.n_rows))
    sums = np.cumsum(of_rows, axis=0)
    before_episode = (sums - of_rows)[problem.episode_starts]
    sums -= np.repeat(before_episode, problem.lengths, axis=0)
    sums /= np.maximum(sums.std(axis=0), 1e-9)
    return sums


def _pays_only_at_ends(problem: EvaluationProblem) -> bool:
    """Whether rewards are zero in all rows but the last of each episode."""
    ends = problem.episode_starts + problem.lengths - 1
    return not np.delete(problem.rewards, ends).any()


def drift_shift(
    problem: EvaluationProblem, values: RowValues, seed: int
) -> Shift | None:
    """Estimate how a linear drift of the world changes J at the end of the log; None
    for few episodes.

    The drift is linear in the episode's number. values: as in `memory_shift`.
    """
    return _shift(problem, values, seed, _drift(problem))


def _drift(problem: EvaluationProblem) -> _Candidate:
    """The drift of the world as a part of the state."""
    # The drift at each episode: from the first to the last one a line of mean zero and
    # variance one.
    drift = np.linspace(-math.sqrt(3.0), math.sqrt(3.0), len(problem.lengths))
    rows = _tested_rows(problem)
    drift_of_rows = np.repeat(drift, problem.lengths)[rows, None]
    # The next row belongs to the same episode, and the value is that of an episode
    # begun where the log ends.
    memory = _ExtraState(
        before=drift_of_rows,
        after=drift_of_rows,
        first=drift[-1:, None],
        of_both=False,
    )
    return _Candidate(rows, memory)


def group_shift(
    problem: EvaluationProblem,
    values: RowValues,
    seed: int,
    members: np.ndarray,
    tests: int,
) -> Shift | None:
    """Estimate how J changes for a unit that is one of the ``members`` (U,); None for
    few units.

    values, seed: as in `memory_shift`. tests: number of groups tested. Significant
    below a p-value of 0.01: refusing a group that does not matter costs less than a
    wrong value for one that does.
    """
    rows = _tested_rows(problem)
    is_member = np.repeat(members.astype(np.float64), problem.lengths)[rows, None]
    memory = _ExtraState(
        before=is_member, after=is_member, first=np.ones((1, 1)), of_both=False
    )
    shift = _shift(problem, values, seed, _Candidate(rows, memory))
    if shift is None:
        return None
    return replace(shift, tests=tests, limit=thresholds.SHIFT_P_VALUE_MILD)


def _tested_rows(
    problem: EvaluationProblem, most: int = _MOST_ROWS
) -> Int[np.ndarray, " row"]:
    """Numbers of the rows with weight, thinned to about ``most``."""
    unit = np.repeat(np.arange(len(problem.lengths)), problem.lengths)
    stride = math.ceil(problem.n_rows / most)
    return np.flatnonzero(
        ((problem.steps + unit) % stride == 0) & (problem.row_weights > 0.0)
    )


def _shift(
    problem: EvaluationProblem,
    values: RowValues,
    seed: int,
    candidate: _Candidate,
) -> Shift | None:
    """Shift by a candidate's extra state; None for few clusters.

    values, seed: as in `memory_shift`.
    """
    rows = candidate.tested
    unit = np.searchsorted(problem.episode_starts, rows, side="right") - 1
    clusters, cluster_of_row = np.unique(problem.clusters[unit], return_inverse=True)
    n_clusters = len(clusters)
    if n_clusters < _LEAST_UNITS:
        return None
    generator = torch.Generator().manual_seed(seed)
    omega = _centred_ratios(problem, rows, candidate.memory, generator)
    rewards = problem.rewards[rows] * problem.reward_scale
    discounts = problem.discounts[rows]
    weights = problem.row_weights[rows]
    residual = rewards + discounts * values.later[rows] - values.now[rows]
    sums = np.bincount(cluster_of_row, weights=weights * omega * residual)
    total_weight = weights.sum()
    error = math.sqrt(n_clusters) * float(sums.std(ddof=1)) / float(total_weight)
    return Shift(
        value=float(sums.sum() / total_weight),
        standard_error=error,
        units=n_clusters,
        rows=candidate.rows,
        of_step=candidate.of_step,
        limit=candidate.limit,
    )


def _centred_ratios(
    problem: EvaluationProblem,
    rows: Int[np.ndarray, " row"],
    memory: _ExtraState,
    generator: torch.Generator,
) -> Float[np.ndarray, " row"]:
    """ω̃ of rows: the part of LSTD-Q's dual αᵀf(x, h) that depends on h given x.

    α solves αᵀ E[f (f − discount f')ᵀ] = E f(x0), f' being the mean over the policy's
    actions in the next state.
    """
    features = _draw_features_of_rows(problem.kernel_inputs[rows], memory, generator)
    second, system = _sums_over_rows(problem, rows, memory, features, generator)
    start = torch.zeros(())
    for b in blocks(len(problem.start_weights), _BLOCK):
        chosen = _policy_rows(
            problem.start_inputs, problem.start_probabilities, b, generator
        )
        weights = torch.as_tensor(problem.start_weights[b])
        start = start + weights @ features.expected(chosen, memory.first)
    total = problem.row_weights[rows].sum()
    alpha = _dual_beyond_x(
        second=second / total,
        system=system / total,
        start=start / problem.start_weights.sum(),
        n_phi=features.n_phi,
    )
    inputs = problem.kernel_inputs[rows]
    ratios = [
        features.at(inputs[b], memory.before[b]) @ alpha
        for b in blocks(len(rows), _BLOCK)
    ]
    return torch.cat(ratios).numpy()


def _sums_over_rows(
    problem: EvaluationProblem,
    rows: Int[np.ndarray, " row"],
    memory: _ExtraState,
    features: _DualFeatures,
    generator: torch.Generator,
) -> tuple[Float[Tensor, "feature feature"], Float[Tensor, "feature feature"]]:
    """Σ w f fᵀ and Σ w f (f − discount f')ᵀ over rows, with their weights w."""
    inputs = problem.kernel_inputs[rows]
    second = torch.zeros(())
    system = torch.zeros(())
    for b in blocks(len(rows), _BLOCK):
        now = features.at(inputs[b], memory.before[b])
        chosen = _policy_rows(
            problem.next_inputs, problem.next_probabilities, rows[b], generator
        )
        later = features.expected(chosen, memory.after[b])
        weighted = now.mT * torch.as_tensor(problem.row_weights[rows[b]])
        discounts = torch.as_tensor(problem.discounts[rows[b]])
        second = second + weighted @ now
        system = system + weighted @ (now - discounts[:, None] * later)
    return second, system


def _dual_beyond_x(
    second: Float[Tensor, "feature feature"],
    system: Float[Tensor, "feature feature"],
    start: Float[Tensor, " feature"],
    n_phi: int,
) -> Float[Tensor, " feature"]:
    """Coefficients α of ω̃ in the features f: the dual's part in η − E[η | x].

    second: E f fᵀ. system: E f (f − discount f')ᵀ. start: E f(x0). n_phi: number of the
    features φ(x), which come first.
    """
    # f @ centred: φ, and η less its ridge regression on φ
    centred = torch.eye(len(start), dtype=torch.float64)
    of_phi = second[:n_phi, :n_phi]
    ridge = _CENTRING_RIDGE * of_phi.diagonal().mean() * torch.eye(n_phi)
    centred[:n_phi, n_phi:] = -torch.linalg.solve(
        of_phi + ridge, second[:n_phi, n_phi:]
    )
    system = centred.mT @ system @ centred
    system = system + _RIDGE * second.diagonal().clamp_min(1e-12).diag()
    dual = torch.linalg.solve(system.mT, centred.mT @ start)
    # What depends on x alone is left out.
    dual[:n_phi] = 0.0
    return centred @ dual


@dataclass(frozen=True, eq=False)
class _PolicyRows:
    """``rows`` (b, m, x): (s, a) with m of the policy's actions a in each of b states;
    ``probabilities`` (b, m): of each, with sum one.
    """

    rows: Float[Tensor, "block draw x"]
    probabilities: Float[Tensor, "block draw"]


def _policy_rows(
    inputs: np.ndarray,
    probabilities: np.ndarray | None,
    block: np.ndarray | slice,
    generator: torch.Generator,
) -> _PolicyRows:
    """The policy's actions in a block of the N next or start states.

    inputs: (N, m, x) states beside m draws of continuous actions, of which 8 at most
    are used; (N, 1, s) states alone if actions are discrete. probabilities (N, n): of
    the n discrete actions, None for continuous ones. Of more than 8 discrete actions, 8
    are drawn.
    """
    states = torch.as_tensor(inputs[block][:, :_MOST_DRAWS])
    if probabilities is None:
        draws = states.shape[1]
        equal = torch.full(states.shape[:2], 1.0 / draws, dtype=torch.float64)
        return _PolicyRows(states, equal)
    shares = torch.as_tensor(probabilities[block])
    n = shares.shape[1]
    one_hot = torch.eye(n, dtype=torch.float64)
    if n <= _MOST_DRAWS:
        actions = one_hot.expand(len(states), -1, -1)
    else:
        drawn = torch.multinomial(
            shares, _MOST_DRAWS, replacement=True, generator=generator
        )
        actions = one_hot[drawn]
        shares = torch.full(drawn.shape, 1.0 / _MOST_DRAWS, dtype=torch.float64)
    states_of_actions = states.expand(-1, actions.shape[1], -1)
    return _PolicyRows(torch.cat((states_of_actions, actions), dim=2), shares)


@dataclass(frozen=True, eq=False)
class _DualFeatures:
    """Features f(x, h) = (φ(x), η(x, h)), side by side.

    φ are random features of x (``of_x``), x itself and a one: ``n_phi`` numbers. η are
    random features of (x, h) (``of_x_and_h``), or h φ(x) where that is None.
    """

    of_x: Callable[[Tensor], Tensor]
    of_x_and_h: Callable[[Tensor], Tensor] | None
    n_phi: int

    def at(self, places: Any, memories: Any) -> Float[Tensor, "*m feature"]:
        """f(x, h) at places x (..., d) with memories h (..., k)."""
        x = torch.as_tensor(places)
        h = torch.as_tensor(memories)
        phi = torch.cat((self.of_x(x), x, torch.ones_like(x[..., :1])), dim=-1)
        if self.of_x_and_h is None:
            eta = h * phi
        else:
            eta = self.of_x_and_h(torch.cat((x, h), dim=-1))
        return torch.cat((phi, eta), dim=-1)

    def expected(
        self, chosen: _PolicyRows, memories: np.ndarray
    ) -> Float[Tensor, "state feature"]:
        """Mean of f over the policy's actions in M states; memories (M, h), or one for
        all (1, h).
        """
        count, draws = chosen.probabilities.shape
        h = torch.as_tensor(memories).unsqueeze(1).expand(count, draws, -1)
        parts = []
        for b in blocks(count, _AT_ONCE):
            of_draws = self.at(chosen.rows[b], h[b])
            probabilities = chosen.probabilities[b].unsqueeze(-1)
            parts.append((of_draws * probabilities).sum(dim=1))
        return torch.cat(parts)


def _draw_features_of_rows(
    inputs: Float[np.ndarray, "row d"], memory: _ExtraState, generator: torch.Generator
) -> _DualFeatures:
    """Draw the features for rows x and the memory at them."""
    of_x = _draw_features(inputs, generator)
    of_x_and_h = None
    if memory.of_both:
        both = np.hstack([inputs, memory.before])
        of_x_and_h = _draw_features(both, generator)
    return _DualFeatures(of_x, of_x_and_h, n_phi=_FEATURES + inputs.shape[1] + 1)


def _draw_features(
    rows: Float[np.ndarray, "row column"], generator: torch.Generator
) -> Callable[[Tensor], Tensor]:
    """Random features of width √2 times the median distance, scaled to a mean square of
    a half.
    """
    distance = median_bandwidth(torch.as_tensor(rows), 1000, generator)
    kernel = Gaussian(math.sqrt(2.0) * distance)
    features = random_fourier_features(kernel, rows.shape[1], _FEATURES, generator)
    return lambda places: math.sqrt(_FEATURES / 2) * features(places)
