"""The networks of all replicas: which rows each is trained on, and their training by fitted Q evaluation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from koffline.batches import ReplicaPlan, Table
from koffline.config import EvaluationSettings
from koffline.data.units import unit_hash
from koffline.fitting import FitRecord, FitSettings, Progress, fit
from koffline.objectives import fitted_q
from koffline.ope.problem import EvaluationProblem
from koffline.replicas import StackedMLP

_MOST_ROWS = 4096
_MOST_NUMBERS = 1 << 20  # numbers in one array of a block: 8 MB in float64; a pass holds several such arrays
_PROBES = 40
_FINENESS = 16  # copies of a row of mean weight in the sample that mini-batches draw from
_MOST_COPIES = 2_000_000  # most rows in that sample
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


def fit_features(
    table: Table,
    problem: EvaluationProblem,
    ensemble: Ensemble,
    settings: EvaluationSettings,
    steps: int,
    probe: Callable[[int, StackedMLP], Tensor] | None = None,
    progress: Progress | None = None,
    before: FitRecord | None = None,
) -> FitRecord:
    """Train every replica by fitted Q evaluation for so many steps, whose rates fall to zero by a cosine.

    The output starts at the best constant value; ``before``: an earlier round, from which this one goes on.
    """
    outputs = 1 if problem.readout is None else problem.readout.shape[1]
    sizes = (table.inputs.shape[1], *settings.hidden_units, outputs)
    network = StackedMLP.initialise(sizes, ensemble.seeds, device=table.inputs.device)
    if before is None:
        network.layers(network.flat)[-1][1].add_(_best_constant(problem))  # a view of the flat parameters
    else:
        network = network.with_flat(before.network.flat)
    done = 0 if before is None else before.steps
    generator = torch.Generator().manual_seed(ensemble.seeds[0])
    distinct = torch.cat([ensemble.row_weights[:1], ensemble.row_weights[ensemble.full :]])  # (1 + R − F, N)
    row_sets = tuple(_rows_by_weight(weights, generator) for weights in distinct)
    plan = ReplicaPlan(
        learning_rates=(settings.learning_rate,) * len(ensemble.seeds),
        batch_seeds=tuple(seed + done for seed in ensemble.seeds),
        row_sets=row_sets,
        row_set_of=(0,) * ensemble.full + tuple(range(1, len(row_sets))),
    )
    record: FitRecord = fit(
        table,
        network,
        fitted_q(settings.target_rate, problem.value_bounds),
        plan,
        FitSettings(
            steps=steps,
            batch_size=min(settings.batch_size, len(table)),
            schedule="cosine",
            record_every=max(1, steps // _PROBES),
            threads=settings.threads,
        ),
        probe=probe,
        probe_every=max(1, steps // _PROBES),
        progress=progress,
    )
    return record if before is None else _joined(before, record)


def _joined(first: FitRecord, second: FitRecord) -> FitRecord:
    """Join the history of two rounds."""
    steps = first.steps
    diverged = zip(first.diverged_at, second.diverged_at, strict=True)
    return dataclasses.replace(
        second,
        losses=torch.cat([first.losses, second.losses]),
        loss_steps=first.loss_steps + tuple(steps + step for step in second.loss_steps),
        probes=first.probes + second.probes,
        probe_steps=first.probe_steps + tuple(steps + step for step in second.probe_steps),
        diverged_at=tuple(
            one if one is not None or other is None else steps + other for one, other in diverged
        ),
        steps=steps + second.steps,
        seconds=first.seconds + second.seconds,
    )


def start_values(network: StackedMLP, problem: EvaluationProblem) -> Float[Tensor, "replica start"]:
    """E_{a~π} Q(s0, a) per start state, within the bounds of any discounted return; reward units."""
    inputs, probabilities = (
        torch.as_tensor(problem.start_inputs).to(network.flat),
        problem.start_probabilities,
    )
    parts = []
    for rows in row_blocks(network, len(inputs), inputs.shape[1]):
        block = inputs[rows]
        outputs = network.forward(block.flatten(0, 1)).unflatten(1, (len(block), -1))  # (R, B, m, n)
        if probabilities is None:
            parts.append(outputs.squeeze(-1).mean(dim=-1))
        else:
            chosen = torch.as_tensor(probabilities[rows]).to(inputs)
            parts.append((outputs.squeeze(2) * chosen).sum(dim=-1))
    values = torch.cat(parts, dim=1)
    low, high = problem.value_bounds
    within = values.clamp(low, high) * problem.reward_scale
    return torch.where(values.isfinite(), within, math.nan)  # do not clip infinite values to the bound


def _rows_by_weight(weights: Float[Tensor, " row"], generator: torch.Generator) -> Tensor:
    """Row indices for mini-batches, each as often as its weight says.

    Integer weights are kept exactly. Others are scaled up, so that small weights stay distinct, and rounded
    at random, which is unbiased and independent of the order of the rows.
    """
    repeats = weights.round()
    if not torch.equal(repeats, weights):
        copies = min(_FINENESS, max(1, _MOST_COPIES // len(weights)))
        scaled = weights * (copies / weights.mean())
        repeats = (scaled + torch.rand(len(weights), generator=generator, dtype=scaled.dtype)).floor()
    return torch.repeat_interleave(torch.arange(len(weights)), repeats.long())


def _best_constant(problem: EvaluationProblem) -> float:
    """The constant that solves the Bellman equation on average: mean r / mean (1 − discount)."""
    weights = problem.row_weights
    constant = float((weights @ problem.rewards) / (weights @ (1.0 - problem.discounts)))
    low, high = problem.value_bounds
    return min(max(constant, low), high)
