"""Replicas of an evaluation: networks of the whole log, and networks of resampled units.

Resampling is a Poisson bootstrap. How often replica r counts unit u (an episode; a row, where there are none)
is a Poisson number of mean one, made from a hash of seed, r and the unit's number in the log: nobody needs to
see the other units, so a log in memory, in shards or on many machines is resampled alike.
(Hanley & MacGibbon 2006; Chamandy, Muralidharan, Najmi & Naidu 2012)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from koffline.data.unit_hash import unit_hash
from koffline.ope.problem import EvaluationProblem

_NETWORKS = 0x6E6574  # streams of random numbers of their own
_UNITS, _STARTS = 1 << 32, 2 << 32
_ATTEMPT = 1 << 16
_MOST = 20  # a Poisson number of mean one is larger once in 10^20 draws
_CUMULATIVE = np.cumsum([math.exp(-1.0) / math.factorial(count) for count in range(_MOST)])


def poisson_counts(seed: int, stream: int, units: Int[np.ndarray, " unit"]) -> Int[np.ndarray, " unit"]:
    """Independent Poisson numbers of mean one (U,), a function of seed, stream and a unit's number alone."""
    uniform = unit_hash(seed, stream, units) * 2.0**-64
    return np.searchsorted(_CUMULATIVE, uniform, side="right").astype(np.int64)


@dataclass(frozen=True, eq=False)
class Ensemble:
    """R replicas: the first F trained on the whole log, the others each on resampled units.

    ``row_counts (R, N)`` say how often a replica's sample holds a row, ones for the first F. ``row_weights
    (R, N)`` and ``start_weights (R, E)`` are such counts of rows and start states times the log's own
    weights. ``seeds (R,)`` decide initial parameters and mini-batches.
    """

    row_counts: Tensor
    row_weights: Tensor
    start_weights: Tensor
    full: int
    seeds: tuple[int, ...]

    @property
    def roles(self) -> tuple[str, ...]:
        """ "full" or "resampled" per replica."""
        return ("full",) * self.full + ("resampled",) * (len(self.seeds) - self.full)


def draw_ensemble(
    problem: EvaluationProblem, full: int, resampled: int, seed: int, stream: int = _NETWORKS
) -> Ensemble:
    """Weights of rows and start states for every replica. stream: of the networks' own seeds."""
    lengths = np.diff(np.append(problem.episode_starts, problem.n_rows))
    rows = [np.ones(problem.n_rows, dtype=np.int64)] * full
    starts = [np.ones(len(problem.start_inputs), dtype=np.int64)] * full
    for replica in range(resampled):
        counts, start_counts = _resample(problem, seed, replica)
        rows.append(np.repeat(counts, lengths))
        starts.append(start_counts)
    seeds = np.random.default_rng([seed, stream]).integers(2**31, size=full + resampled)
    return Ensemble(
        row_counts=torch.as_tensor(np.stack(rows)),
        row_weights=torch.as_tensor(np.stack(rows) * problem.row_weights),
        start_weights=torch.as_tensor(np.stack(starts) * problem.start_weights),
        full=full,
        seeds=tuple(int(seed) for seed in seeds),
    )


def _resample(problem: EvaluationProblem, seed: int, replica: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts of units (U,) and of start states (E,); drawn again where no row or no start has weight left."""
    units = np.arange(len(problem.episode_starts))
    weights = np.add.reduceat(problem.row_weights, problem.episode_starts)
    for attempt in range(_ATTEMPT):
        counts = poisson_counts(seed, _UNITS + _ATTEMPT * attempt + replica, units)
        starts = counts
        if problem.fixed_starts:
            given = np.arange(len(problem.start_inputs))
            starts = poisson_counts(seed, _STARTS + _ATTEMPT * attempt + replica, given)
        if np.any(counts * weights > 0.0) and np.any(starts * problem.start_weights > 0.0):
            return counts, starts
    raise AssertionError("a Poisson number was zero 65,536 times")
