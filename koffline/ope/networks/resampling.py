"""Replicas of a log: how often each counts a unit, and the rows and start states that
their networks read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from koffline.batches import Table
from koffline.data.columns import blocks
from koffline.data.hashing import poisson_counts
from koffline.jobs.cores import PRODUCT_SECONDS, each_on_cores
from koffline.ope.log.problem import EvaluationProblem
from koffline.replicas import StackedMLP

_MOST_ROWS = 4096
# numbers in one array of a block: 4 MB in float64; a pass holds several such arrays
_MOST_NUMBERS = 1 << 19
_NETWORKS = 0x6E6574  # separate random streams
_STARTS = 1 << 32


@dataclass(frozen=True)
class Resampling:
    """R replicas: ``full`` ones come first and count each unit once, the others
    resample by ``streams``.

    `poisson_counts` says how often a replica counts a unit (an episode, or a row
    without episodes) or cluster.
    """

    seed: int
    full: int
    streams: tuple[int, ...]

    @classmethod
    def draw(
        cls, problem: EvaluationProblem, full: int, resampled: int, seed: int
    ) -> Resampling:
        """Draw streams; each sample has rows and start states with positive weight."""
        streams = []
        for stream in range(resampled):
            while not cls(seed, 0, (stream,)).has_weight(problem):
                stream += 1 << 16
            streams.append(stream)
        return cls(seed, full, tuple(streams))

    def select(self, replicas: Sequence[int]) -> Resampling:
        """Only some of the replicas; full ones first."""
        streams = tuple(
            self.streams[number - self.full]
            for number in replicas
            if number >= self.full
        )
        return Resampling(self.seed, len(replicas) - len(streams), streams)

    def has_weight(self, problem: EvaluationProblem) -> bool:
        """Whether any row and any start state has weight."""
        return bool(
            self.row_weights(problem).any() and self.start_weights(problem)[:, 0].any()
        )

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds (R,) of initial parameters and mini-batches."""
        drawn = np.random.default_rng([self.seed, _NETWORKS]).integers(
            2**31, size=len(self.roles)
        )
        return tuple(drawn.tolist())

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of the replicas: "full" or "resampled"."""
        return ("full",) * self.full + ("resampled",) * len(self.streams)

    def counts(
        self, units: Int[np.ndarray, " unit"]
    ) -> Int[np.ndarray, "replica unit"]:
        """Counts (R, U) of units, given the numbers by which they are resampled."""
        whole = np.ones((self.full, len(units)), dtype=np.int64)
        return np.concatenate([whole, poisson_counts(self.seed, self.streams, units)])

    def row_counts(self, problem: EvaluationProblem) -> Int[np.ndarray, "replica row"]:
        """How often each replica's sample holds a row."""
        return np.repeat(self.counts(problem.clusters), problem.lengths, axis=1)

    def row_weights(self, problem: EvaluationProblem) -> Float[Tensor, "replica row"]:
        """`row_counts` times the log's own weights."""
        return torch.as_tensor(self.row_counts(problem) * problem.row_weights)

    def start_weights(
        self, problem: EvaluationProblem
    ) -> Float[Tensor, "replica 2 start"]:
        """Weights of start states: in each replica's sample, and in the log.

        Given start states are resampled independently of the log's rows.
        """
        if problem.fixed_starts:
            streams = tuple(stream + _STARTS for stream in self.streams)
            of_starts = Resampling(self.seed, self.full, streams)
            counts = of_starts.counts(problem.start_units)
        else:
            counts = self.counts(problem.clusters)
        both = np.stack([counts, np.ones_like(counts)], axis=1)
        return torch.as_tensor(both * problem.start_weights)


def row_blocks(network: StackedMLP, rows: int, draws: int = 1) -> Iterator[slice]:
    """Slices that cover ``rows``, small enough for the hidden layers of all replicas.

    ``draws``: how many inputs each row has.
    """
    numbers_of_a_row = network.replicas * draws * max(network.sizes)
    size = min(_MOST_ROWS, _MOST_NUMBERS // numbers_of_a_row)
    return blocks(rows, max(1, size))


def make_table(
    problem: EvaluationProblem, device: str, dtype: torch.dtype = torch.float32
) -> Table:
    """The problem's rows on a device, as networks of the given precision read them."""

    def column(values: np.ndarray) -> Tensor:
        return torch.as_tensor(values, dtype=dtype, device=device)

    readout = None
    if problem.readout is not None:
        readout = column(problem.readout)
    next_readout = None
    if problem.next_probabilities is not None:
        next_readout = column(problem.next_probabilities)
    return Table(
        inputs=column(problem.inputs),
        next_inputs=column(problem.next_inputs),
        rewards=column(problem.rewards),
        discounts=column(problem.discounts),
        readout=readout,
        next_readout=next_readout,
        kernel_inputs=column(problem.kernel_inputs),
    )


def read_values(
    network: StackedMLP, inputs: Tensor, readout: Tensor | None, rows: slice
) -> Float[Tensor, "replica row"]:
    """Outputs for these rows of inputs (N, d) or (N, m, d), averaged over draws and
    weighted by readout (N, n).
    """
    block = inputs[rows].to(network.flat)
    outputs_of_draws = network.forward(block.reshape(-1, block.shape[-1]))
    outputs = outputs_of_draws.unflatten(1, (len(block), -1)).mean(dim=2)
    if readout is None:
        return outputs.squeeze(-1)
    return (outputs * readout[rows].to(outputs)).sum(dim=-1)


def read_rows(
    network: StackedMLP, table: Table, rows: slice
) -> tuple[
    Float[Tensor, "replica row"],
    Float[Tensor, "replica row"],
    Float[Tensor, "replica row"],
]:
    """Q(s, a), E Q(s', a'), and the residual, of a block of rows, in the network's
    precision.
    """
    now = read_values(network, table.inputs, table.readout, rows)
    later = read_values(network, table.next_inputs, table.next_readout, rows)
    rewards = table.rewards[rows].to(now)
    discounts = table.discounts[rows].to(now)
    return now, later, rewards + discounts * later - now


def start_inputs(
    network: StackedMLP, problem: EvaluationProblem
) -> tuple[Tensor, Tensor | None]:
    """Inputs (E, m, d) of start states and their readout, as a network reads them."""
    readout = None
    if problem.start_probabilities is not None:
        readout = torch.as_tensor(problem.start_probabilities).to(network.flat)
    return torch.as_tensor(problem.start_inputs).to(network.flat), readout


def start_values(
    network: StackedMLP, problem: EvaluationProblem
) -> Float[Tensor, "replica start"]:
    """E_{a~π} Q(s0, a) per start state, in units of the return; NaN if not finite.

    Not clipped to possible returns: a clipped expectation is not the expectation of any
    Q.
    """
    inputs, readout = start_inputs(network, problem)
    starts, draws = inputs.shape[:2]
    values_of_blocks = each_on_cores(
        partial(read_values, network, inputs, readout),
        items=list(row_blocks(network, starts, draws)),
        seconds=2.0 * starts * draws * network.flat.numel() * PRODUCT_SECONDS,
    )
    values = torch.cat(values_of_blocks, dim=1)
    return torch.where(values.isfinite(), values * problem.reward_scale, math.nan)


def _is_cut(problem: EvaluationProblem) -> Bool[np.ndarray, " row"]:
    """Whether the episode was cut after the row."""
    is_last = problem.steps + 1 == np.repeat(problem.lengths, problem.lengths)
    return is_last & (problem.discounts > 0.0)


def cut_shares(problem: EvaluationProblem) -> Float[np.ndarray, " step"]:
    """Share (T,) of rows at each step, among those that did not terminate, after which
    recording stopped.
    """
    steps = problem.steps
    goes_on = np.where(problem.discounts > 0.0, problem.row_weights, 0.0)
    total = np.bincount(steps, goes_on)
    cut = np.bincount(steps, np.where(_is_cut(problem), goes_on, 0.0))
    return np.asarray(cut / np.where(total > 0.0, total, 1.0))


def stop_probabilities(
    problem: EvaluationProblem, cuts_by_step: np.ndarray
) -> Float[np.ndarray, " row"]:
    """Probability that recording stopped after the row, had the world gone on.

    1 at cuts, 0 at rows that another row follows. After a termination it is not known
    and is taken from ``cuts_by_step`` (T,), as by `cut_shares`, at the row's step: with
    0, terminations would be too frequent among rows before a stop.
    """
    # a part of the log may have longer episodes than the rows that gave the shares
    steps = np.minimum(problem.steps, len(cuts_by_step))
    after_termination = np.append(cuts_by_step, 0.0)[steps]
    return np.where(problem.discounts > 0.0, _is_cut(problem), after_termination)
