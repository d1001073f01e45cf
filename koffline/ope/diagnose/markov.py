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
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy import special
from torch import Tensor

from koffline.data.columns import blocks
from koffline.kernels import Gaussian, median_bandwidth, random_fourier_features
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
# rows; those in memory with all their next actions
_BLOCK = 2048
_AT_ONCE = 256
# more if p is small but not small enough
_MOST_ROWS = 10_000
_MORE_ROWS = 50_000
_LEAST_UNITS = 20
# p-values: one in hundreds of right answers was below 1e-3
_MATTERS = 1e-4
_MATTERS_MORE = 1e-2
_MAY_MATTER = 0.05
_FURTHER = (2, 3, 5)
_WIDE = 200
_MOST_OF_IT = 0.8
_STEP = -1  # used in place of a number of previous rows


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
    limit: float = _MATTERS

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
        return (
            self.p_value < self.limit
            and abs(self.value) > 0.25 * interval.as_measured.width
        )


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
    if len(problem.episode_starts) == problem.n_rows:
        return None
    reward = problem.rewards - problem.rewards.mean()
    reward = np.clip(reward / (reward.std() or 1.0), -_FAR, _FAR)
    rows = _looked_at(problem, most)
    width = problem.kernel_inputs.shape[1]
    steps = problem.steps[rows, None]
    ends = problem.episode_starts + problem.lengths - 1

    def memory_of(rows: np.ndarray) -> np.ndarray:
        return np.column_stack(
            [np.ones(len(rows)), problem.kernel_inputs[rows], reward[rows]]
        )

    def past(lags: range) -> np.ndarray:
        parts = (
            np.where(steps >= lag, memory_of(np.maximum(rows - lag, 0)), 0.0)
            for lag in lags
        )
        return np.concatenate(list(parts), axis=1)

    further = [
        count for count in _FURTHER if count * width <= _WIDE and not problem.history
    ]
    pairs = {
        count: (past(range(1, count + 1)), past(range(count)))
        for count in (1, *further)
    }
    unit = max(float(steps.std()), 1.0)
    pairs[_STEP] = steps / unit, (steps + 1) / unit
    if width <= _WIDE:
        every = memory_of(np.arange(problem.n_rows))
        sums = np.cumsum(every, axis=0)
        sums -= np.repeat(
            (sums - every)[problem.episode_starts], problem.lengths, axis=0
        )
        sums /= np.maximum(sums.std(axis=0), 1e-9)
        pairs[0] = np.where(steps > 0, sums[rows - 1], 0.0), sums[rows]
    found = []
    late = not np.delete(problem.rewards, ends).any()
    for count, (before, after) in pairs.items():
        one = _shift(
            problem,
            values,
            seed,
            rows,
            _Memory(before, after, np.zeros_like(before[:1]), True),
        )
        if one is None:
            return None
        if late and count == 0:
            limit = _MATTERS_MORE
        else:
            limit = _MATTERS
        is_step = count == _STEP
        found.append(
            replace(
                one, rows=max(count, 0), of_step=is_step, tests=len(pairs), limit=limit
            )
        )
    told = [one for one in found if one.p_value < one.limit]
    if told:
        largest = max(abs(one.value) for one in told)
        return next(one for one in told if abs(one.value) >= _MOST_OF_IT * largest)
    if (
        most < min(problem.n_rows, _MORE_ROWS)
        and min(one.p_value for one in found) < _MAY_MATTER
    ):
        return memory_shift(problem, values, seed, _MORE_ROWS)
    return found[0]


def drift_shift(
    problem: EvaluationProblem, values: RowValues, seed: int
) -> Shift | None:
    """Estimate how a linear drift of the world changes J at the end of the log; None
    for few episodes.

    The drift is linear in the episode's number. values: as in `memory_shift`.
    """
    # of variance one
    place = np.linspace(-math.sqrt(3.0), math.sqrt(3.0), len(problem.lengths))[:, None]
    rows = _looked_at(problem)
    known = np.repeat(place, problem.lengths, axis=0)[rows]
    return _shift(
        problem, values, seed, rows, _Memory(known, known, place[-1:], of_both=False)
    )


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
    rows = _looked_at(problem)
    known = np.repeat(members.astype(np.float64), problem.lengths)[rows, None]
    found = _shift(
        problem,
        values,
        seed,
        rows,
        _Memory(known, known, np.ones((1, 1)), of_both=False),
    )
    return found and replace(found, tests=tests, limit=_MATTERS_MORE)


def _looked_at(
    problem: EvaluationProblem, most: int = _MOST_ROWS
) -> Int[np.ndarray, " some"]:
    """Numbers of the rows with weight, thinned to about ``most``."""
    unit = np.repeat(np.arange(len(problem.lengths)), problem.lengths)
    stride = math.ceil(problem.n_rows / most)
    return np.flatnonzero(
        ((problem.steps + unit) % stride == 0) & (problem.row_weights > 0.0)
    )


class _Memory(NamedTuple):
    """Extra state h (…, h): ``before`` each row, ``after`` it (for the next row),
    ``first`` (at the start).

    ``of_both``: η are random features of (x, h); otherwise η = h φ(x), for a single
    number h.
    """

    before: Float[np.ndarray, "some h"]
    after: Float[np.ndarray, "some h"]
    first: Float[np.ndarray, "1 h"]
    of_both: bool


def _shift(
    problem: EvaluationProblem,
    values: RowValues,
    seed: int,
    rows: Int[np.ndarray, " some"],
    memory: _Memory,
) -> Shift | None:
    """Shift by h; None for few episodes."""
    unit = np.searchsorted(problem.episode_starts, rows, side="right") - 1
    kept, place = np.unique(problem.clusters[unit], return_inverse=True)
    units = len(kept)
    if units < _LEAST_UNITS:
        return None
    omega = _weights(problem, rows, memory, torch.Generator().manual_seed(seed))
    rewards = problem.rewards[rows] * problem.reward_scale
    discounts = problem.discounts[rows]
    weights = problem.row_weights[rows]
    residual = rewards + discounts * values.later[rows] - values.now[rows]
    by_unit = np.bincount(place, weights=weights * omega * residual)
    error = math.sqrt(units) * float(by_unit.std(ddof=1)) / float(weights.sum())
    return Shift(float(by_unit.sum() / weights.sum()), error, units)


def _weights(
    problem: EvaluationProblem,
    rows: Int[np.ndarray, " some"],
    memory: _Memory,
    generator: torch.Generator,
) -> Float[np.ndarray, " some"]:
    """ω̃ of rows: the part of LSTD-Q's dual, αᵀ E[f (f − discount f')ᵀ] = E f(x0), that
    depends on (x, h).

    f: φ(x) and η(x, h) side by side. φ are random features of x, x itself and a one.
    """
    inputs = problem.kernel_inputs[rows]
    of_row = _draw_features(inputs, generator)
    if memory.of_both:
        of_both = _draw_features(np.hstack([inputs, memory.before]), generator)
    else:
        of_both = None

    def features(states: Any, known: Any) -> Float[Tensor, "*m feature"]:
        x = torch.as_tensor(states)
        h = torch.as_tensor(known)
        alone = torch.cat((of_row(x), x, torch.ones_like(x[..., :1])), dim=-1)
        if of_both is None:
            more = h * alone
        else:
            more = of_both(torch.cat((x, h), dim=-1))
        return torch.cat((alone, more), dim=-1)

    def expected(
        which: str, block: np.ndarray | slice, known: np.ndarray
    ) -> Float[Tensor, "m feature"]:
        """Mean over the policy's actions; known (M, h), or one of all."""
        acted, shares = _acted(problem, which, block, generator)
        every = torch.as_tensor(known).unsqueeze(1).expand(*acted.shape[:2], -1)
        some = zip(
            *(each.split(_AT_ONCE) for each in (acted, every, shares)), strict=True
        )
        return torch.cat(
            [(features(x, h) * share.unsqueeze(-1)).sum(dim=1) for x, h, share in some]
        )

    second = system = start = torch.zeros(())
    for b in blocks(len(rows), _BLOCK):
        now = features(inputs[b], memory.before[b])
        later = expected("next", rows[b], memory.after[b])
        weighted = now.mT * torch.as_tensor(problem.row_weights[rows[b]])
        second = second + weighted @ now
        system = system + weighted @ (
            now - torch.as_tensor(problem.discounts[rows[b]])[:, None] * later
        )
    for b in blocks(len(problem.start_weights), _BLOCK):
        start = start + torch.as_tensor(problem.start_weights[b]) @ expected(
            "start", b, memory.first
        )
    # features φ
    total = problem.row_weights[rows].sum()
    count = _FEATURES + inputs.shape[1] + 1
    second = second / total
    system = system / total
    start = start / problem.start_weights.sum()

    centred = torch.eye(len(start), dtype=torch.float64)  # f @ centred: φ, η − E[η | x]
    alone = second[:count, :count]
    alone = alone + _CENTRING_RIDGE * alone.diagonal().mean() * torch.eye(count)
    centred[:count, count:] = -torch.linalg.solve(alone, second[:count, count:])
    system = (
        centred.mT @ system @ centred
        + _RIDGE * second.diagonal().clamp_min(1e-12).diag()
    )
    dual = torch.linalg.solve(system.mT, centred.mT @ start)
    dual[:count] = 0.0
    alpha = centred @ dual
    return torch.cat(
        [
            features(inputs[b], memory.before[b]) @ alpha
            for b in blocks(len(rows), _BLOCK)
        ]
    ).numpy()


def _draw_features(
    rows: Float[np.ndarray, "some column"], generator: torch.Generator
) -> Callable[[Tensor], Tensor]:
    """Random features of width √2 times the median distance, scaled to a mean square of
    a half.
    """
    kernel = Gaussian(
        math.sqrt(2.0) * median_bandwidth(torch.as_tensor(rows), 1000, generator)
    )
    features = random_fourier_features(kernel, rows.shape[1], _FEATURES, generator)
    return lambda places: math.sqrt(_FEATURES / 2) * features(places)


def _acted(
    problem: EvaluationProblem,
    which: str,
    block: np.ndarray | slice,
    generator: torch.Generator,
) -> tuple[Float[Tensor, "block draw x"], Float[Tensor, "block draw"]]:
    """Rows (s, a) with the policy's actions a in next or start states, and the
    probability of each action.
    """
    states = torch.as_tensor(
        getattr(problem, f"{which}_inputs")[block][:, :_MOST_DRAWS]
    )
    probabilities = getattr(problem, f"{which}_probabilities")
    if probabilities is None:
        return states, torch.full(
            states.shape[:2], 1.0 / states.shape[1], dtype=torch.float64
        )
    shares = torch.as_tensor(probabilities[block])
    actions = torch.eye(shares.shape[1], dtype=torch.float64).expand(
        len(states), -1, -1
    )
    if actions.shape[1] > _MOST_DRAWS:
        drawn = torch.multinomial(
            shares, _MOST_DRAWS, replacement=True, generator=generator
        )
        actions = actions[0][drawn]
        shares = torch.full(drawn.shape, 1.0 / _MOST_DRAWS, dtype=torch.float64)
    return torch.cat((states.expand(-1, actions.shape[1], -1), actions), dim=2), shares
