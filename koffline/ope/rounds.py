"""Training of the networks by fitted Q evaluation, in rounds, until the estimate settles.

After each round the last layer is solved for the kernel loss, and training goes on from there: values of a
long horizon would take many times as many steps to get there by themselves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from koffline.batches import ReplicaPlan, Table
from koffline.config import EvaluationSettings
from koffline.fitting import FitRecord, FitSettings, Progress, fit
from koffline.kernels import FourierFeatures
from koffline.objectives import fitted_q
from koffline.ope.last_layer import StartSums, accumulate_systems, minimise_kernel_loss, read_rows
from koffline.ope.learning import Ensemble, row_blocks, start_values
from koffline.ope.problem import EvaluationProblem
from koffline.replicas import StackedMLP

SHORTEST, MOST_STEPS = 1000, 16_000  # least in a round, most in total; coverage was tested at two rounds
_EPOCHS = 40  # epochs before training may stop
_BETTER = 0.9  # features still improve if the held-out loss falls below this share of the one before
_SHARP = 0.2  # width, in rms returns, below which better features would not help an interval
_SOLVED_ROWS, _SOLVED_BY = 4096, 300  # rows and instruments of the last layers between rounds
_LEAST = 0.01  # least difference, in rms returns
_PROBES = 40
_PROBE_STARTS, _PROBE_DRAWS = 1000, 8
_FINENESS = 16  # copies of a row of mean weight in the sample that mini-batches draw from
_MOST_COPIES = 2_000_000  # most rows in that sample


def train_in_rounds(
    table: Table,
    problem: EvaluationProblem,
    ensemble: Ensemble,
    settings: EvaluationSettings,
    instruments: FourierFeatures,
    progress: Progress | None = None,
) -> FitRecord:
    """Train all replicas. Unless the settings say how long, stop when the estimate has not moved in a round.

    The output starts at the best constant value.
    """
    sizes = (table.inputs.shape[1], *settings.hidden_units, problem.n_actions or 1)
    network = StackedMLP.initialise(sizes, ensemble.seeds, device=table.inputs.device)
    network.layers(network.flat)[-1][1].add_(_best_constant(problem))  # a view of the flat parameters
    training = Training(table, problem, ensemble, settings, instruments, progress)
    rows = 0 if settings.steps is not None else int(np.count_nonzero(problem.row_weights))
    first, *others = rounds_of(settings.steps, rows, settings.batch_size)
    record = training.fit(network, first)
    for steps in others:
        network, has_settled = training.solve(record.network)
        if settings.steps is None and has_settled:
            break
        record = _joined(record, training.fit(network.with_flat(network.flat.float()), steps, record.steps))
    return record


def rounds_of(steps: int | None, rows: int = 0, batch_size: int = 256) -> list[int]:
    """Steps of every round, each as long as all before it; the first two see every row forty times."""
    rounds = [MOST_STEPS if steps is None else steps]
    while rounds[0] / 2 >= max(SHORTEST, _EPOCHS * rows / batch_size / 2):
        rounds[:1] = [rounds[0] - rounds[0] // 2, rounds[0] // 2][::-1]
    return rounds


class Training:
    """Rounds of training, and between them last layers solved on some rows, which say when to stop.

    Training goes on if the mean estimate has moved since half as many steps, relative to the interval's
    width, or if the interval is wide and the kernel loss of rows that resampled networks have not seen still
    falls; it stops if that loss rises. Moves below a hundredth of the rms return do not count; diverged
    replicas are ignored.
    """

    def __init__(
        self,
        table: Table,
        problem: EvaluationProblem,
        ensemble: Ensemble,
        settings: EvaluationSettings,
        instruments: FourierFeatures,
        progress: Progress | None,
    ) -> None:
        self._whole, self._problem, self._ensemble = table, problem, ensemble
        self._settings, self._progress = settings, progress
        generator = torch.Generator().manual_seed(ensemble.seeds[0])
        distinct = torch.cat([ensemble.row_weights[:1], ensemble.row_weights[ensemble.full :]])
        self._row_sets = tuple(_rows_by_weight(weights, generator) for weights in distinct)  # 1 + R − F
        self._probe = _start_value_probe(problem)
        rows = torch.arange(0, len(table), math.ceil(len(table) / _SOLVED_ROWS))
        self._table = table.select(rows.to(table.inputs.device))
        self._instruments = FourierFeatures(instruments.frequencies[:, : _SOLVED_BY // 2])
        self._weights = ensemble.row_weights[:, rows].to(table.inputs.device)
        unseen = (ensemble.row_counts == 0) & (ensemble.row_weights[0] > 0.0)  # with weight
        self._unseen = unseen[:, rows].to(self._weights)
        self._before: tuple[np.ndarray, float] | None = None

    def fit(self, network: StackedMLP, steps: int, done: int = 0) -> FitRecord:
        """Train for so many steps, after those ``done``; learning rates fall to zero by a cosine."""
        settings, seeds, full = self._settings, self._ensemble.seeds, self._ensemble.full
        record: FitRecord = fit(
            self._whole,
            network,
            fitted_q(settings.target_rate, self._problem.value_bounds),
            ReplicaPlan(
                learning_rates=(settings.learning_rate,) * len(seeds),
                batch_seeds=tuple(seed + done for seed in seeds),
                row_sets=self._row_sets,
                row_set_of=(0,) * full + tuple(range(1, len(self._row_sets))),
            ),
            FitSettings(
                steps=steps,
                batch_size=min(settings.batch_size, len(self._whole)),
                schedule="cosine",
                record_every=max(1, steps // _PROBES),
                threads=settings.threads,
            ),
            probe=self._probe,
            probe_every=max(1, steps // _PROBES),
            progress=self._progress,
        )
        return record

    def solve(self, network: StackedMLP) -> tuple[StackedMLP, bool]:
        """The networks with the last layer of the least kernel loss, and whether training can stop."""
        scale = self._problem.reward_scale
        systems = accumulate_systems(network, self._table, self._instruments, self._weights)
        solved = minimise_kernel_loss(network, systems, self._settings.ridge)
        sums = StartSums.of({"kloss": solved}, self._problem, self._ensemble.start_weights)
        now, loss = sums.means[0, :, 0], self._held_out_loss(solved)
        before, self._before = self._before, (now, loss)
        if before is None:
            return solved, False
        values, old_loss = before
        moves, resampled = now - values, now[self._ensemble.full :]
        kept, resampled = moves[np.isfinite(moves)], resampled[np.isfinite(resampled)]
        width = 4.0 * float(resampled.std(ddof=1)) if len(resampled) > 1 else 0.0
        tolerance = max(self._settings.agreement * width, _LEAST * scale)
        is_quiet = len(kept) > 0 and abs(float(kept.mean())) <= tolerance
        is_learnt = loss >= _BETTER * old_loss or width <= _SHARP * scale
        return solved, (is_quiet and is_learnt) or _BETTER * loss > max(0.0, old_loss)

    def _held_out_loss(self, network: StackedMLP) -> float:
        """Σ over resampled networks of ‖ψᵀδ‖² − ‖δ‖², δ of unseen rows: 0 of a perfect one."""
        table, compared = self._table, self._table.compared
        projected, squares = self._weights.new_zeros(network.replicas, 1), self._weights.new_zeros(())
        for rows in row_blocks(network, len(table), table.draws):
            residual = (read_rows(network, table, rows)[2] * self._unseen[:, rows]).nan_to_num()
            projected = projected + residual @ self._instruments(compared[rows].double())
            squares = squares + residual.square().sum()
        return float(projected.square().sum() - squares)


def _joined(first: FitRecord, second: FitRecord) -> FitRecord:
    """Join the history of two rounds."""
    steps, diverged = first.steps, zip(first.diverged_at, second.diverged_at, strict=True)
    later = [one if one is not None or other is None else steps + other for one, other in diverged]
    return dataclasses.replace(
        second,
        losses=torch.cat([first.losses, second.losses]),
        loss_steps=(*first.loss_steps, *(steps + step for step in second.loss_steps)),
        probes=first.probes + second.probes,
        probe_steps=(*first.probe_steps, *(steps + step for step in second.probe_steps)),
        diverged_at=tuple(later),
        steps=steps + second.steps,
        seconds=first.seconds + second.seconds,
    )


def _start_value_probe(problem: EvaluationProblem) -> Callable[[int, StackedMLP], Tensor]:
    """The mean value over (at most a thousand) start states, for the learning curve of the estimate."""
    counted = np.flatnonzero(problem.start_weights)
    some = counted[np.unique(np.linspace(0, len(counted) - 1, min(len(counted), _PROBE_STARTS)).astype(int))]
    probabilities = problem.start_probabilities
    fewer = dataclasses.replace(
        problem,
        start_inputs=problem.start_inputs[some, :_PROBE_DRAWS],
        start_probabilities=None if probabilities is None else probabilities[some],
    )
    share = torch.as_tensor(problem.start_weights[some] / problem.start_weights[some].sum())
    return lambda step, network: start_values(network, fewer).cpu().double() @ share


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
