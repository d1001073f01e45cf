"""Train the networks by fitted Q evaluation, in rounds, until the estimate settles;
then solve last layers.

After each round the last layer is solved for the kernel loss, and training continues
from there. By training alone, values of a long horizon would take many times as many
steps.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import numpy as np
import torch

from koffline.batches import rows_by_weight
from koffline.config import EvaluationSettings
from koffline.data.transitions import Transitions
from koffline.errors import ConfigError
from koffline.fitting import FitRecord, FitSettings, Progress, fit, threads
from koffline.kernels import FourierFeatures
from koffline.objectives import fitted_q
from koffline.ope.log.problem import EvaluationProblem, prepare_problem
from koffline.ope.names import AVERAGED
from koffline.ope.networks import last_layer as layers
from koffline.ope.networks.fitted_values import FittedValues, Fold
from koffline.ope.networks.resampling import (
    Resampling,
    cut_shares,
    make_table,
    read_rows,
    row_blocks,
)
from koffline.ope.networks.systems import (
    LinearSystems,
    accumulate_systems,
    systems_of_part,
)
from koffline.ope.value_functions import ValueFunction
from koffline.policies import Policy
from koffline.replicas import ReplicaPlan, StackedMLP

# least in a round, most in total: 8000 more hardly change an error
SHORTEST = 1000
MOST_STEPS = 8000
_EPOCHS = 40  # epochs before training may stop
# features still improve if the held-out loss falls below this share of the one before
_BETTER = 0.9
_SHARP = (
    0.2  # width, in rms returns, below which better features would not help an interval
)
_SOLVED_ROWS = 4096  # rows of the last layers between rounds
_LEAST = 0.01  # least difference, in rms returns
_RECORDS = 40  # of the objective in a round


def rounds_of(steps: int | None, rows: int = 0, batch_size: int = 256) -> list[int]:
    """Steps of every round, each as long as all before it; the first two see every row
    at least 40 times.
    """
    rounds = [MOST_STEPS if steps is None else steps]
    while rounds[0] / 2 >= max(SHORTEST, _EPOCHS * rows / batch_size / 2):
        rounds[:1] = [rounds[0] - rounds[0] // 2, rounds[0] // 2][::-1]
    return rounds


class Training:
    """Rounds of training; between them, last layers solved on some rows tell when to
    stop.

    Training continues if the mean estimate has moved, relative to the interval's width,
    since half as many steps. It also continues if the interval is wide and the kernel
    loss on rows that resampled networks have not seen still falls. It stops if that
    loss rises. Moves below a hundredth of the rms return do not count; diverged
    replicas are ignored. If the settings give ``steps``, all of them are taken.
    """

    def __init__(
        self,
        problem: EvaluationProblem,
        resampling: Resampling,
        settings: EvaluationSettings,
        instruments: FourierFeatures,
        progress: Progress | None,
    ) -> None:
        table = self._whole = make_table(problem, settings.device)
        self._problem = problem
        self._resampling = resampling
        self._settings = settings
        self._progress = progress
        weights = resampling.row_weights(problem)
        self._instruments = instruments
        generator = torch.Generator().manual_seed(resampling.seeds[0])
        distinct = torch.cat([weights[:1], weights[resampling.full :]])
        # 1 + R − F
        self._row_sets = tuple(rows_by_weight(own, generator) for own in distinct)
        rows = torch.arange(0, len(table), math.ceil(len(table) / _SOLVED_ROWS))
        self._table = table.select(rows.to(table.inputs.device))
        self._weights = weights[:, rows].to(table.inputs.device)
        # weight > 0
        self._unseen = ((weights == 0.0) & (weights[0] > 0.0))[:, rows].to(
            self._weights
        )
        self._before: tuple[np.ndarray, float] | None = None

    def run(self) -> FitRecord:
        """Train all replicas, starting from the best constant value."""
        settings = self._settings
        problem = self._problem
        sizes = (
            problem.inputs.shape[1],
            *settings.hidden_units,
            problem.n_actions or 1,
        )
        network = StackedMLP.initialise(
            sizes, self._resampling.seeds, device=self._whole.inputs.device
        )
        level = float(np.clip(layers.best_level(problem), *problem.value_bounds))
        network.layers(network.flat)[-1][1].add_(level)  # a view of the flat parameters
        if settings.steps is not None:
            rows = 0
        else:
            rows = int(np.count_nonzero(problem.row_weights))
        first, *others = rounds_of(settings.steps, rows, settings.batch_size)
        record = self.fit(network, first)
        for steps in others:
            network, has_settled = self.solve(record.network)
            if settings.steps is None and has_settled:
                break
            record = _joined(
                record,
                self.fit(network.with_flat(network.flat.float()), steps, record.steps),
            )
        return record

    def fit(self, network: StackedMLP, steps: int, done: int = 0) -> FitRecord:
        """Train for ``steps`` steps, after ``done`` earlier ones; learning rates decay
        to 0 by a cosine.
        """
        settings = self._settings
        seeds = self._resampling.seeds
        full = self._resampling.full
        rates = (settings.learning_rate,) * len(seeds)
        batch_seeds = tuple(seed + done for seed in seeds)
        row_set_of = (0,) * full + tuple(range(1, len(self._row_sets)))
        plan = ReplicaPlan(rates, batch_seeds, self._row_sets, row_set_of)
        batch_size = min(settings.batch_size, len(self._whole))
        recorded = max(1, steps // _RECORDS)
        asked = FitSettings(
            steps, batch_size, "cosine", record_every=recorded, threads=settings.threads
        )
        objective = fitted_q(settings.target_rate, self._problem.value_bounds)
        record = fit(
            self._whole, network, objective, plan, asked, progress=self._progress
        )
        if self._progress is not None:
            self._progress(steps, steps, "solving last layers")
        return record

    def solve(self, network: StackedMLP) -> tuple[StackedMLP, bool]:
        """The networks with the last layer of least kernel loss, and whether training
        can stop.
        """
        scale = self._problem.reward_scale
        system = accumulate_systems(
            network, self._table, self._instruments, self._weights
        )
        solved = layers.minimise_kernel_loss(network, system, self._settings.ridge)
        starts = layers.sum_starts(
            network, self._resampling, None, self._problem
        ).means[:, 0]
        now = layers.mean_values(starts, layers.last_layer(solved), scale)[:, 0]
        loss = self._held_out_loss(solved)
        before = self._before
        self._before = (now, loss)
        if before is None:
            return solved, False
        values, old_loss = before
        moves = now - values
        resampled = now[self._resampling.full :]
        kept = moves[np.isfinite(moves)]
        resampled = resampled[np.isfinite(resampled)]
        if len(resampled) > 1:
            width = 4.0 * float(resampled.std(ddof=1))
        else:
            width = 0.0
        tolerance = max(self._settings.agreement * width, _LEAST * scale)
        is_quiet = len(kept) > 0 and abs(float(kept.mean())) <= tolerance
        is_learnt = loss >= _BETTER * old_loss or width <= _SHARP * scale
        return solved, (is_quiet and is_learnt) or _BETTER * loss > max(0.0, old_loss)

    def _held_out_loss(self, network: StackedMLP) -> float:
        """Σ over resampled networks of ‖ψᵀδ‖² − ‖δ‖², δ of unseen rows; 0 in
        expectation for the true Q.
        """
        table = self._table
        compared = self._table.compared
        projected = self._weights.new_zeros(network.replicas, 1)
        squares = self._weights.new_zeros(())
        for rows in row_blocks(network, len(table), table.draws):
            residual = (
                read_rows(network, table, rows)[2] * self._unseen[:, rows]
            ).nan_to_num()
            projected = projected + residual @ self._instruments(
                compared[rows].double()
            )
            squares = squares + residual.square().sum()
        return float(projected.square().sum() - squares)


def _joined(first: FitRecord, second: FitRecord) -> FitRecord:
    """The second round's record, with the steps of both and the first divergence of
    each replica.
    """
    steps = first.steps
    diverged = zip(first.diverged_at, second.diverged_at, strict=True)
    later = [
        one if one is not None or other is None else steps + other
        for one, other in diverged
    ]
    return dataclasses.replace(
        second, diverged_at=tuple(later), steps=steps + second.steps
    )


def fit_value_functions(
    problem: EvaluationProblem,
    resampling: Resampling,
    settings: EvaluationSettings,
    progress: Progress | None = None,
    fold: Fold | None = None,
    effective_units: float | None = None,
    is_cut: bool = False,
) -> FittedValues:
    """Train all replicas in rounds, then give each its last layers: of least kernel
    loss, and as trained.

    fold: sums over the log of which the problem is a sample, so that last layers and
    start values use the whole log; None if the problem is the whole log.
    effective_units: of that log, by default the problem's number of units. is_cut:
    whether any episode is cut.
    """
    width = (problem.inputs.shape[1], *settings.hidden_units)[-1]
    asked = (
        settings.bandwidth,
        settings.instruments,
        (width + 1) * (problem.n_actions or 1),
        settings.seed,
    )
    instruments, bandwidth = layers.draw_instruments(problem, *asked)
    record = Training(problem, resampling, settings, instruments, progress).run()
    network = record.network

    reach: Fold = fold or (lambda summarise: summarise(problem))
    if is_cut and not problem.fixed_starts:
        stops = cut_shares(problem)
    else:
        stops = None
    of_part = partial(
        systems_of_part, network, instruments, resampling, settings.gamma, stops
    )
    sums: LinearSystems = reach(of_part)
    solved = layers.minimise_kernel_loss(network, sums.system, settings.ridge)
    trained = network.flat.double()
    # of the last layers; the others are the same
    mean = network.with_flat(0.5 * (solved.flat + trained))
    heads = {AVERAGED: mean, "kloss": solved, "fqe": network.with_flat(trained)}
    if problem.fixed_starts:  # start states of a part are meaningless then
        sums = dataclasses.replace(
            sums, starts=layers.sum_starts(network, resampling, None, problem)
        )
    units = effective_units or float(len(problem.episode_starts))
    found = (
        problem,
        resampling,
        settings,
        heads,
        sums,
        stops,
        bandwidth,
        instruments,
        record,
    )
    return FittedValues(*found, fold=reach, units=units)


def fit_value_function(
    transitions: Transitions,
    policy: Policy,
    settings: EvaluationSettings,
    progress: Progress | None = None,
) -> ValueFunction:
    """Q^π by the estimator of the settings, kloss or fqe, from the whole log, without
    resampled replicas.
    """
    if settings.history:
        raise ConfigError(
            "diagnose and value functions are of the logged state; leave history out"
        )
    with torch.no_grad(), threads(settings.threads):
        generator = np.random.default_rng(settings.seed)
        problem = prepare_problem(
            transitions, policy, settings.gamma, settings.action_draws, generator
        )
        resampling = Resampling.draw(problem, settings.full_replicas, 0, settings.seed)
        return fit_value_functions(
            problem, resampling, settings, progress
        ).value_function(transitions)
