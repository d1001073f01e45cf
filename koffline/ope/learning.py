"""Fitted Q evaluation of all replicas at once: the features, and the `fqe` estimate itself."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from koffline.batches import ReplicaPlan, Table
from koffline.config import EvaluationSettings
from koffline.fitting import FitRecord, FitSettings, Progress, fit
from koffline.objectives import fitted_q
from koffline.ope.ensemble import Ensemble
from koffline.ope.problem import EvaluationProblem
from koffline.replicas import StackedMLP
from koffline.solvers.features import FeatureMap

_MOST_ROWS = 4096
_MOST_NUMBERS = 1 << 23  # in one array of a block: 64 MB in float64


def row_blocks(network: StackedMLP, rows: int, draws: int = 1) -> Iterator[slice]:
    """Slices that cover ``rows``, narrow enough for hidden layers and last-layer features of all replicas.

    ``draws``: how many inputs each row has.
    """
    *widths, outputs = network.sizes
    per_row = network.replicas * max(draws * max(widths), (widths[-1] + 1) * outputs)
    size = max(1, min(_MOST_ROWS, _MOST_NUMBERS // per_row))
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


_PROBES = 40
_FINENESS = 16  # how many rows of a mini-batch sample stand for one row of mean weight
_MOST_COPIES = 2_000_000  # rows in such a sample


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
    network = _untrained(table, problem, ensemble, settings)
    if before is not None:
        network = network.with_flat(before.network.flat)
    done = 0 if before is None else before.steps
    generator = torch.Generator().manual_seed(ensemble.seeds[0])
    row_sets = tuple(_rows_by_weight(weights, generator) for weights in _distinct(ensemble))
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


def _untrained(
    table: Table, problem: EvaluationProblem, ensemble: Ensemble, settings: EvaluationSettings
) -> StackedMLP:
    outputs = 1 if problem.readout is None else problem.readout.shape[1]
    sizes = (table.inputs.shape[1], *settings.hidden_units, outputs)
    network = StackedMLP.initialise(sizes, ensemble.seeds, device=table.inputs.device)
    output_bias = network.layers(network.flat)[-1][1]  # a view of the flat parameters
    output_bias += _best_constant(problem)
    return network


def _joined(first: FitRecord, second: FitRecord) -> FitRecord:
    """The history of two rounds."""
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


def start_values(
    network: StackedMLP, problem: EvaluationProblem, dtype: torch.dtype | None = None
) -> Float[Tensor, "replica start"]:
    """E_{a~π} Q(s0, a) per start state, within the bounds of any discounted return; reward units."""
    dtype = dtype or network.flat.dtype
    device = network.flat.device
    inputs = torch.as_tensor(problem.start_inputs, dtype=dtype, device=device)
    probabilities = (
        None
        if problem.start_probabilities is None
        else torch.as_tensor(problem.start_probabilities, dtype=dtype, device=device)
    )
    parts = []
    for rows in row_blocks(network, len(inputs), inputs.shape[1]):
        block = inputs[rows]
        outputs = network.forward(block.flatten(0, 1)).unflatten(1, (len(block), -1))  # (R, B, m, n)
        if probabilities is None:
            values = outputs.squeeze(-1).mean(dim=-1)
        else:
            values = (outputs.squeeze(2) * probabilities[rows]).sum(dim=-1)
        parts.append(values)
    values = torch.cat(parts, dim=1)
    low, high = problem.value_bounds
    within = values.clamp(low, high) * problem.reward_scale
    return torch.where(values.isfinite(), within, math.nan)  # an infinite value is no value at the bound


def _distinct(ensemble: Ensemble) -> Tensor:
    """Row weights of the whole log and of each resampled replica, (1 + R − F, N)."""
    return torch.cat([ensemble.row_weights[:1], ensemble.row_weights[ensemble.full :]])


def _rows_by_weight(weights: Float[Tensor, " row"], generator: torch.Generator) -> Tensor:
    """Row indices for mini-batches, each as often as its weight says.

    Whole numbers are kept exactly. Others are scaled up, so that small weights are told apart, and rounded
    up or down by chance: right on average, and blind to any pattern in the order of the rows.
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


@dataclass(frozen=True, eq=False)
class NetworkFeatures:
    """What the last layer of one network reads, (N, H); in float64, where sums do not depend on blocks."""

    network: StackedMLP

    def __call__(self, inputs: Tensor) -> Tensor:
        """Features (N, H)."""
        return self.network.features(inputs.to(self.network.flat))[0]


def network_features(network: StackedMLP) -> FeatureMap:
    """What the last layer of the first replica reads."""
    one = network.select([0])
    return NetworkFeatures(one.with_flat(one.flat.double()))
