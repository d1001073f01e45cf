"""A test of the Markov property, sized by what it does to the value: does the row before matter?

Let x = (s, a), h the row before (its state, action and reward; zeros in a first row), and δ the residual of
Q at a row. If the logged state is a state, E[δ | x, h] = 0 for the true Q, and for any Q

    shift = n⁻¹ Σ w ω̃ δ,    ω̃ = ω(x, h) − E[ω(x, h) | x],    ω = d^π/μ over (x, h),

is zero in expectation: errors of Q depend on x alone, and ω̃ averages to zero at every x. If the row before
matters, J + shift is the doubly robust value in which it is part of the state. ω is the dual of LSTD-Q in
random features of x and of (x, h), the latter centred given x by a ridge regression. That the centring
and Q may both be a little wrong costs only the product of their errors.
(Shah & Peters 2020, generalised covariance measure; Kallus & Uehara 2020)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from koffline.kernels import FourierFeatures, Gaussian, median_bandwidth, random_fourier_features
from koffline.ope.importance.problem import RowValues
from koffline.ope.problem import EvaluationProblem, memories
from koffline.ope.results import Interval

_FEATURES = 200  # random features of x, and as many of (x, h)
_RIDGE, _CENTRING_RIDGE = 1e-2, 1e-6  # relative to the features' mean squares
_MOST_DRAWS = 8  # actions of the policy in a state; fewer discrete ones are all taken, with probabilities
_FAR = 5.0  # standard deviations of a reward
_BLOCK, _MOST_ROWS = 2048, 10_000
_LEAST_UNITS = 20
_MATTERS = 1e-3  # p-value


@dataclass(frozen=True)
class MemoryShift:
    """Change of J where the row before is part of the state, in units of the return, and its standard error.

    ``units``: episodes that the standard error is taken over.
    """

    value: float
    standard_error: float
    units: int

    @property
    def p_value(self) -> float:
        """Two-sided p-value of no change, by Student's t over units."""
        from scipy import stats

        if self.standard_error == 0.0:
            return 1.0
        return float(2.0 * stats.t.sf(abs(self.value) / self.standard_error, df=self.units - 1))

    def matters(self, interval: Interval) -> bool:
        """Whether it is significant and moves the value by more than half of the interval's half width."""
        return self.p_value < _MATTERS and abs(self.value) > 0.25 * interval.width

    def doubts(self, value: float, interval: Interval, rows: int) -> list[str]:
        """Reason for care if ``rows`` rows before matter."""
        if not self.matters(interval):
            return []
        before = "the row before" if rows == 1 else f"{rows} rows before"
        told = f"state: what happened earlier matters beyond the logged state; with {before} as part of it"
        return [f"{told} the value would be about {value + self.value:.4g}: try --set history={rows}"]


@dataclass(frozen=True, eq=False)
class _Features:
    """φ(x) and η(x, h) side by side, the first ``of_rows`` of x alone."""

    row_map: FourierFeatures
    map_of_both: FourierFeatures

    @property
    def of_rows(self) -> int:
        """Number of features φ: random ones, x itself and a constant."""
        return _FEATURES + len(self.row_map.frequencies) + 1

    def __call__(self, rows: Any, memory: Any) -> Float[Tensor, "*m feature"]:
        """Features of rows (…, x) and memories (…, h)."""
        x, h = torch.as_tensor(rows), torch.as_tensor(memory)
        size = math.sqrt(0.5 * _FEATURES)  # so that each has a mean square of one half
        both = size * self.map_of_both(torch.cat((x, h), dim=-1))
        return torch.cat((size * self.row_map(x), x, torch.ones_like(x[..., :1]), both), dim=-1)

    def expected(
        self, rows: Float[Tensor, "m draw x"], shares: Float[Tensor, "m draw"], memory: np.ndarray
    ) -> Float[Tensor, "m feature"]:
        """Mean over the policy's actions; memory (M, h)."""
        every = torch.as_tensor(memory).unsqueeze(1).expand(-1, rows.shape[1], -1)
        return (self(rows, every) * shares.unsqueeze(-1)).sum(dim=1)


def memory_shift(problem: EvaluationProblem, values: RowValues, seed: int) -> MemoryShift | None:
    """Estimate what the row before changes; None without episodes of several rows, or with few of them.

    values: at the rows, by networks that did not see their episode, in units of the return. Of more than
    10,000 rows every second, third, … episode is looked at.
    """
    starts, n_rows = problem.episode_starts, problem.n_rows
    unit = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, n_rows)))
    stride = math.ceil(n_rows / _MOST_ROWS)
    rows = np.flatnonzero(unit % stride == 0)
    units = len(np.unique(unit[rows]))
    if units < _LEAST_UNITS or units == len(rows):
        return None
    generator = torch.Generator().manual_seed(seed)
    reward = problem.rewards - problem.rewards.mean()
    reward = np.clip(reward / (reward.std() or 1.0), -_FAR, _FAR)[:, None]
    before, after = memories(problem.kernel_inputs, reward, starts, count=1)
    features = _draw_features(problem.kernel_inputs[rows], before[rows], generator)
    omega = _weights(problem, features, rows, before, after, generator)
    residual = problem.rewards * problem.reward_scale + problem.discounts * values.later - values.now
    weights = problem.row_weights[rows]
    by_unit = np.bincount(unit[rows] // stride, weights=weights * omega * residual[rows])
    error = math.sqrt(units) * float(by_unit.std(ddof=1)) / float(weights.sum())
    return MemoryShift(float(by_unit.sum() / weights.sum()), error, units)


def _weights(
    problem: EvaluationProblem,
    features: _Features,
    rows: Int[np.ndarray, " some"],
    before: Float[np.ndarray, "row memory"],
    after: Float[np.ndarray, "row memory"],
    generator: torch.Generator,
) -> Float[np.ndarray, " some"]:
    """ω̃ of rows: the part of the dual of LSTD-Q, αᵀ E[f (f − discount f')ᵀ] = E f(x0), that reads (x, h)."""
    second = system = start = torch.zeros(())
    for block in _blocks(rows):
        now = features(problem.kernel_inputs[block], before[block])
        later = features.expected(*_acted(problem, "next", block, generator), after[block])
        weighted = now.mT * torch.as_tensor(problem.row_weights[block])
        second = second + weighted @ now
        system = system + weighted @ (now - torch.as_tensor(problem.discounts[block])[:, None] * later)
    for block in _blocks(np.arange(len(problem.start_weights))):
        first = features.expected(
            *_acted(problem, "start", block, generator), np.zeros((len(block), before.shape[1]))
        )
        start = start + torch.as_tensor(problem.start_weights[block]) @ first
    total, count = problem.row_weights[rows].sum(), features.of_rows
    second, system, start = second / total, system / total, start / problem.start_weights.sum()

    centred = torch.eye(len(start), dtype=torch.float64)  # features @ centred: φ, η − E[η | x]
    alone = second[:count, :count]
    alone = alone + _CENTRING_RIDGE * alone.diagonal().mean() * torch.eye(count)
    centred[:count, count:] = -torch.linalg.solve(alone, second[:count, count:])
    squares = (centred.mT @ second @ centred).diagonal().clamp_min(1e-12)
    system = centred.mT @ system @ centred + _RIDGE * squares.diag()
    dual = torch.linalg.solve(system.mT, centred.mT @ start)
    dual[:count] = 0.0
    alpha = centred @ dual
    return np.concatenate(
        [(features(problem.kernel_inputs[b], before[b]) @ alpha).numpy() for b in _blocks(rows)]
    )


def _draw_features(
    rows: Float[np.ndarray, "some x"], memory: Float[np.ndarray, "some h"], generator: torch.Generator
) -> _Features:
    """Random features, their widths √2 times the median distances."""
    maps = []
    for part in (torch.as_tensor(rows), torch.as_tensor(np.concatenate([rows, memory], axis=1))):
        kernel = Gaussian(math.sqrt(2.0) * median_bandwidth(part, generator=generator))
        maps.append(random_fourier_features(kernel, part.shape[1], _FEATURES, generator))
    return _Features(*maps)


def _blocks(rows: Int[np.ndarray, " some"]) -> Iterator[Int[np.ndarray, " block"]]:
    return (rows[first : first + _BLOCK] for first in range(0, len(rows), _BLOCK))


def _acted(
    problem: EvaluationProblem, which: str, block: np.ndarray, generator: torch.Generator
) -> tuple[Float[Tensor, "block draw x"], Float[Tensor, "block draw"]]:
    """Rows (s, a) with the policy's actions a in next or start states, and the share of each action."""
    states = torch.as_tensor(getattr(problem, f"{which}_inputs")[block][:, :_MOST_DRAWS])
    probabilities = getattr(problem, f"{which}_probabilities")
    if probabilities is None:
        return states, torch.full(states.shape[:2], 1.0 / states.shape[1], dtype=torch.float64)
    shares = torch.as_tensor(probabilities[block])
    actions = torch.eye(shares.shape[1], dtype=torch.float64).expand(len(states), -1, -1)
    if actions.shape[1] > _MOST_DRAWS:
        drawn = torch.multinomial(shares, _MOST_DRAWS, replacement=True, generator=generator)
        actions, shares = actions[0][drawn], torch.full(drawn.shape, 1.0 / _MOST_DRAWS, dtype=torch.float64)
    return torch.cat((states.expand(-1, actions.shape[1], -1), actions), dim=2), shares
