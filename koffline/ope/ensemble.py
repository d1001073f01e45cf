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

from koffline.data.units import unit_hash
from koffline.ope.problem import EvaluationProblem

_NETWORKS = 0x6E6574  # streams of random numbers of their own
_STARTS = 1 << 32
_ATTEMPTS = 1 << 12
_MOST = 20  # a Poisson number of mean one is larger once in 10^20 draws
_CUMULATIVE = np.cumsum([math.exp(-1.0) / math.factorial(count) for count in range(_MOST)])


def poisson_counts(seed: int, stream: int, units: Int[np.ndarray, " unit"]) -> Int[np.ndarray, " unit"]:
    """Independent Poisson numbers of mean one (U,), a function of seed, stream and a unit's number alone."""
    uniform = unit_hash(seed, stream, units) * 2.0**-64
    return np.searchsorted(_CUMULATIVE, uniform, side="right").astype(np.int64)


@dataclass(frozen=True)
class Resampling:
    """How often each of R replicas counts a unit: ``full`` of them once, others by ``streams`` (R',)."""

    seed: int
    full: int
    streams: tuple[int, ...]

    def counts(self, units: Int[np.ndarray, " unit"]) -> Int[np.ndarray, "replica unit"]:
        """(R, U) of units by their numbers in the log."""
        whole = [np.ones(len(units), dtype=np.int64)] * self.full
        return np.stack([*whole, *(poisson_counts(self.seed, stream, units) for stream in self.streams)])

    def row_counts(
        self, problem: EvaluationProblem, units: Int[np.ndarray, " unit"]
    ) -> Int[np.ndarray, "replica row"]:
        """(R, N) of the rows of a problem, whose units these are."""
        lengths = np.diff(np.append(problem.episode_starts, problem.n_rows))
        return np.repeat(self.counts(units), lengths, axis=1)

    def start_counts(
        self, problem: EvaluationProblem, units: Int[np.ndarray, " unit"]
    ) -> Int[np.ndarray, "replica start"]:
        """(R, E) of its start states: their units', or counts of their own for given ones."""
        if not problem.fixed_starts:
            return self.counts(units)
        streams = tuple(stream + _STARTS for stream in self.streams)
        own = Resampling(self.seed, self.full, streams)
        return own.counts(np.arange(len(problem.start_inputs)))


@dataclass(frozen=True, eq=False)
class Ensemble:
    """R replicas: the first F trained on the whole log, the others each on resampled units.

    ``row_counts (R, N)`` say how often a replica's sample holds a row, ones for the first F. ``row_weights
    (R, N)`` and ``start_weights (R, E)`` are such counts of rows and start states times the log's own
    weights. ``seeds (R,)`` decide initial parameters and mini-batches. ``units``: numbers of the units.
    """

    resampling: Resampling
    units: Int[np.ndarray, " unit"]
    row_counts: Tensor
    row_weights: Tensor
    start_weights: Tensor
    seeds: tuple[int, ...]

    @property
    def full(self) -> int:
        """F."""
        return self.resampling.full

    @property
    def roles(self) -> tuple[str, ...]:
        """ "full" or "resampled" per replica."""
        return ("full",) * self.full + ("resampled",) * (len(self.seeds) - self.full)


def draw_ensemble(
    problem: EvaluationProblem,
    full: int,
    resampled: int,
    seed: int,
    units: Int[np.ndarray, " unit"] | None = None,
    stream: int = _NETWORKS,
) -> Ensemble:
    """Weights of rows and start states for every replica.

    units: numbers of the problem's units in the log, by default 0, 1, 2, … stream: of the networks' seeds.
    """
    units = np.arange(len(problem.episode_starts)) if units is None else units
    streams = tuple(_stream(problem, units, seed, replica) for replica in range(resampled))
    resampling = Resampling(seed, full, streams)
    rows, starts = resampling.row_counts(problem, units), resampling.start_counts(problem, units)
    seeds = np.random.default_rng([seed, stream]).integers(2**31, size=full + resampled)
    return Ensemble(
        resampling=resampling,
        units=units,
        row_counts=torch.as_tensor(rows),
        row_weights=torch.as_tensor(rows * problem.row_weights),
        start_weights=torch.as_tensor(starts * problem.start_weights),
        seeds=tuple(int(seed) for seed in seeds),
    )


def _stream(problem: EvaluationProblem, units: np.ndarray, seed: int, replica: int) -> int:
    """The first stream of a replica that leaves rows and start states with weight."""
    for attempt in range(_ATTEMPTS):
        stream = (attempt << 16) + replica
        one = Resampling(seed, 0, (stream,))
        rows, starts = one.row_counts(problem, units), one.start_counts(problem, units)
        if np.any(rows * problem.row_weights > 0.0) and np.any(starts * problem.start_weights > 0.0):
            return stream
    raise AssertionError(f"Poisson numbers were zero {_ATTEMPTS} times")
