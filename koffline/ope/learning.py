"""Replicas of a log: how often each counts a unit, their rows as the networks read them, start values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from koffline.batches import Table
from koffline.data.units import unit_hash
from koffline.ope.problem import EvaluationProblem
from koffline.replicas import StackedMLP

_MOST_ROWS = 4096
_MOST_NUMBERS = 1 << 20  # numbers in one array of a block: 8 MB in float64; a pass holds several such arrays
_NETWORKS = 0x6E6574  # separate random streams
_STARTS = 1 << 32
_MOST = 20  # a Poisson number of mean one is larger once in 10^20 draws
_CUMULATIVE = np.cumsum([math.exp(-1.0) / math.factorial(count) for count in range(_MOST)])


def poisson_counts(seed: int, stream: int, units: Int[np.ndarray, " unit"]) -> Int[np.ndarray, " unit"]:
    """Independent Poisson numbers of mean one (U,), a function of seed, stream and a unit's number alone."""
    uniform = unit_hash(seed, stream, units) * 2.0**-64
    return np.searchsorted(_CUMULATIVE, uniform, side="right").astype(np.int64)


@dataclass(frozen=True)
class Resampling:
    """Counts of units in R replicas: ``full`` replicas count each once, others by ``streams`` (R',).

    A Poisson bootstrap: how often replica r counts unit u (an episode; a row, where there are none) is a
    Poisson number of mean one, from a hash of seed, r and the unit's number in the log. It does not depend on
    other units, so a log in memory, in shards or on many machines is resampled alike.
    (Hanley & MacGibbon 2006; Chamandy, Muralidharan, Najmi & Naidu 2012)
    """

    seed: int
    full: int
    streams: tuple[int, ...]

    def counts(self, units: Int[np.ndarray, " unit"]) -> Int[np.ndarray, "replica unit"]:
        """Counts (R, U) of units by their numbers in the log."""
        whole = [np.ones(len(units), dtype=np.int64)] * self.full
        return np.stack([*whole, *(poisson_counts(self.seed, stream, units) for stream in self.streams)])

    def row_counts(
        self, problem: EvaluationProblem, units: Int[np.ndarray, " unit"]
    ) -> Int[np.ndarray, "replica row"]:
        """Counts (R, N) of the rows of a problem with these units."""
        lengths = np.diff(np.append(problem.episode_starts, problem.n_rows))
        return np.repeat(self.counts(units), lengths, axis=1)

    def start_weights(
        self, problem: EvaluationProblem, units: Int[np.ndarray, " unit"]
    ) -> Float[Tensor, "replica 2 start"]:
        """Weights (R, 2, E) of start states: in each replica's sample, and in the log.

        Given start states are resampled independently.
        """
        if problem.fixed_starts:
            own = tuple(stream + _STARTS for stream in self.streams)
            counts = Resampling(self.seed, self.full, own).counts(np.arange(len(problem.start_inputs)))
        else:
            counts = self.counts(units)
        both = np.stack([counts, np.ones_like(counts)], axis=1)
        return torch.as_tensor(both * problem.start_weights)


@dataclass(frozen=True, eq=False)
class Ensemble:
    """R replicas: the first F trained on the whole log, the others each on resampled units.

    ``row_counts (R, N)`` say how often a replica's sample holds a row, ones for the first F. ``row_weights
    (R, N)`` are such counts times the log's own weights, ``start_weights (R, 2, E)`` those of start states
    and the log's own. ``seeds (R,)`` decide initial parameters and mini-batches. ``units``: their numbers.
    """

    resampling: Resampling
    units: Int[np.ndarray, " unit"]
    row_counts: Tensor
    row_weights: Tensor
    start_weights: Tensor
    seeds: tuple[int, ...]

    @property
    def full(self) -> int:
        """Number F of replicas of the whole log."""
        return self.resampling.full

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of the replicas: "full" or "resampled"."""
        return ("full",) * self.full + ("resampled",) * (len(self.seeds) - self.full)


def draw_ensemble(
    problem: EvaluationProblem,
    full: int,
    resampled: int,
    seed: int,
    units: Int[np.ndarray, " unit"] | None = None,
) -> Ensemble:
    """Weights of rows and start states for every replica.

    units: numbers of the problem's units in the log, by default 0, 1, 2, …
    """
    units = np.arange(len(problem.episode_starts)) if units is None else units
    streams = tuple(_stream(problem, units, seed, replica) for replica in range(resampled))
    resampling = Resampling(seed, full, streams)
    rows = resampling.row_counts(problem, units)
    seeds = np.random.default_rng([seed, _NETWORKS]).integers(2**31, size=full + resampled)
    return Ensemble(
        resampling=resampling,
        units=units,
        row_counts=torch.as_tensor(rows),
        row_weights=torch.as_tensor(rows * problem.row_weights),
        start_weights=resampling.start_weights(problem, units),
        seeds=tuple(int(seed) for seed in seeds),
    )


def _stream(problem: EvaluationProblem, units: np.ndarray, seed: int, replica: int) -> int:
    """First stream of a replica whose sample has rows and start states with positive weight."""
    stream = replica
    while True:
        one = Resampling(seed, 0, (stream,))
        has_rows = np.any(one.row_counts(problem, units) * problem.row_weights > 0.0)
        if has_rows and bool((one.start_weights(problem, units)[:, 0] > 0.0).any()):
            return stream
        stream += 1 << 16


def row_blocks(network: StackedMLP, rows: int, draws: int = 1) -> Iterator[slice]:
    """Slices that cover ``rows``, narrow enough for hidden layers and last-layer features of all replicas.

    ``draws``: how many inputs each row has.
    """
    *widths, outputs = network.sizes
    per_row = network.replicas * max(draws * max(widths), (widths[-1] + 1) * outputs)
    size = max(1, min(_MOST_ROWS, _MOST_NUMBERS // per_row))
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def make_table(problem: EvaluationProblem, device: str) -> Table:
    """The problem's rows in float32 on a device, as the replica engine reads them."""

    def column(values: np.ndarray) -> Tensor:
        return torch.as_tensor(values, dtype=torch.float32, device=device)

    return Table(
        inputs=column(problem.inputs),
        next_inputs=column(problem.next_inputs),
        rewards=column(problem.rewards),
        discounts=column(problem.discounts),
        readout=None if problem.readout is None else column(problem.readout),
        next_readout=None if problem.next_probabilities is None else column(problem.next_probabilities),
        kernel_inputs=column(problem.kernel_inputs),
    )


def read_values(network: StackedMLP, inputs: Tensor, readout: Tensor | None) -> Float[Tensor, "replica row"]:
    """Outputs at inputs (B, d) or (B, m, d), averaged over draws and read out; in the network's precision."""
    flat = inputs.to(network.flat.dtype).reshape(-1, inputs.shape[-1])
    outputs = network.forward(flat).unflatten(1, (len(inputs), -1)).mean(dim=2)
    return outputs.squeeze(-1) if readout is None else (outputs * readout.to(outputs)).sum(dim=-1)


def start_values(network: StackedMLP, problem: EvaluationProblem) -> Float[Tensor, "replica start"]:
    """E_{a~π} Q(s0, a) per start state, within the bounds of any discounted return; reward units."""
    inputs, chances = torch.as_tensor(problem.start_inputs).to(network.flat), problem.start_probabilities
    readout = None if chances is None else torch.as_tensor(chances).to(network.flat)
    blocks = row_blocks(network, len(inputs), inputs.shape[1])
    parts = (read_values(network, inputs[b], None if readout is None else readout[b]) for b in blocks)
    values, (low, high) = torch.cat(list(parts), dim=1), problem.value_bounds
    within = values.clamp(low, high) * problem.reward_scale
    return torch.where(values.isfinite(), within, math.nan)  # do not clip infinite values to the bound
