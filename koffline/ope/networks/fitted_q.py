"""Train the networks by fitted Q evaluation, in rounds, until the estimate settles;
then solve last layers.

After each round the last layer is solved for the kernel loss, and training continues
from there. By training alone, values of a long horizon would take many times as many
steps.

Where what happens: `Training.train` runs one round of fitted Q evaluation. Its
regression targets and its target network are those of
`koffline.objectives.FittedIteration`, whose `FollowTarget.update` moves the target
network after every step of `koffline.fitting.fit`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from koffline.batches import rows_by_weight
from koffline.config import EvaluationSettings
from koffline.data.transitions import Transitions
from koffline.errors import ConfigError
from koffline.fitting import FitRecord, FitSettings, Progress, fit_on_cores, threads
from koffline.jobs.cores import cores
from koffline.kernels import FourierFeatures
from koffline.objectives import Objective, RewardRegression, fitted_q
from koffline.ope.log.problem import EvaluationProblem, prepare_problem
from koffline.ope.log.working_log import S
from koffline.ope.names import AVERAGED
from koffline.ope.networks import last_layer as layers
from koffline.ope.networks.equations import accumulate_systems
from koffline.ope.networks.fitted_values import FittedValues, Fold, Summarise
from koffline.ope.networks.resampling import (
    Resampling,
    cut_shares,
    make_table,
    read_rows,
    row_blocks,
)
from koffline.ope.networks.systems import (
    NOTHING_FURTHER,
    Further,
    LinearSystems,
    systems_of_part,
)
from koffline.ope.value_functions import ValueFunction
from koffline.policies import Policy
from koffline.replicas import ReplicaPlan, StackedMLP

SHORTEST = 1000  # steps of a round at least
MOST_STEPS = 8000  # steps of all rounds: 8000 more hardly change an error
_EPOCHS = 40  # epochs before training may stop
# features still improve if the held-out loss falls below this share of the one before
_BETTER = 0.9
# width, in rms returns, below which better features would not help an interval
_SHARP = 0.2
_SOLVED_ROWS = 4096  # rows of the last layers between rounds
_LEAST = 0.01  # least difference, in rms returns
_RECORDS = 40  # of the objective in a round


def rounds_of(steps: int | None, rows: int = 0, batch_size: int = 256) -> list[int]:
    """Steps of every round, each as long as all before it; the first two see every row
    at least 40 times.

    steps: of all rounds; None for the most that are useful. rows: of the log.
    """
    first = MOST_STEPS if steps is None else steps
    shortest = max(SHORTEST, _EPOCHS * rows / batch_size / 2)
    later: list[int] = []
    while first / 2 >= shortest:
        half = first // 2
        later.insert(0, first - half)
        first = half
    return [first, *later]


class SharedRounds:
    """Rounds of training on a one-step log, which are the same for every policy.

    Q is the mean reward there, so that a policy decides only how many rounds there are.
    """

    def __init__(self) -> None:
        self._rounds: dict[tuple[int, int], tuple[Tensor, FitRecord]] = {}

    def find(self, network: StackedMLP, steps: int, done: int) -> FitRecord | None:
        """The record of a round that began with the same parameters; None if there was
        none.

        steps: of the round. done: steps before it.
        """
        kept = self._rounds.get((steps, done))
        if kept is None:
            return None
        parameters, record = kept
        if not torch.equal(parameters, network.flat):
            return None
        return record

    def keep(
        self, network: StackedMLP, steps: int, done: int, record: FitRecord
    ) -> None:
        """Keep the record of a round that began with this network."""
        self._rounds[steps, done] = (network.flat.clone(), record)


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
        shared_rounds: SharedRounds | None = None,
    ) -> None:
        self._shared_rounds = None
        if problem.is_one_step:
            self._shared_rounds = shared_rounds
        self._problem = problem
        self._resampling = resampling
        self._settings = settings
        self._instruments = instruments
        self._progress = progress
        self._table = make_table(problem, settings.device)
        weights = resampling.row_weights(problem)
        generator = torch.Generator().manual_seed(resampling.seeds[0])
        # full replicas share the rows of the first: 1 + R − F sets
        distinct = torch.cat([weights[:1], weights[resampling.full :]])
        self._row_sets = tuple(
            rows_by_weight(of_replica, generator) for of_replica in distinct
        )
        # the rows on which last layers are solved between rounds
        device = self._table.inputs.device
        stride = math.ceil(len(self._table) / _SOLVED_ROWS)
        rows = torch.arange(0, len(self._table), stride)
        self._solved_table = self._table.select(rows.to(device))
        self._solved_weights = weights[:, rows].to(device)
        # counted in the log, and not drawn by the replica
        is_unseen = (weights == 0.0) & (weights[0] > 0.0)
        self._unseen = is_unseen[:, rows].to(self._solved_weights)
        # start values (R,) and held-out loss after the round before
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
            sizes, self._resampling.seeds, device=self._table.inputs.device
        )
        level = float(np.clip(layers.best_level(problem), *problem.value_bounds))
        _, output_biases = network.layers(network.flat)[-1]
        output_biases.add_(level)  # a view of the flat parameters
        if settings.steps is not None:
            rows = 0
        else:
            rows = int(np.count_nonzero(problem.row_weights))
        first, *later = rounds_of(settings.steps, rows, settings.batch_size)
        record = self.train(network, first)
        for steps in later:
            network, has_settled = self.solve(record.network)
            if settings.steps is None and has_settled:
                break
            network = network.with_flat(network.flat.float())
            record = _joined(record, self.train(network, steps, record.steps))
        return record

    def train(self, network: StackedMLP, steps: int, done: int = 0) -> FitRecord:
        """One round of fitted Q evaluation: ``steps`` steps, after ``done`` earlier
        ones; learning rates decay to 0 by a cosine.

        `fit` updates the target network after every step, by the rule of the objective:
        target += target_rate · (network − target). (Le, Voloshin & Yue 2019)
        """
        shared_rounds = self._shared_rounds
        if shared_rounds is not None:
            known_record = shared_rounds.find(network, steps, done)
            if known_record is not None:
                return known_record
        settings = self._settings
        seeds = self._resampling.seeds
        of_full = (0,) * self._resampling.full
        plan = ReplicaPlan(
            learning_rates=(settings.learning_rate,) * len(seeds),
            batch_seeds=tuple(seed + done for seed in seeds),
            row_sets=self._row_sets,
            row_set_of=of_full + tuple(range(1, len(self._row_sets))),
        )
        objective: Objective
        if self._problem.is_one_step:
            objective = RewardRegression()  # nothing to value after a row
        else:
            objective = fitted_q(settings.target_rate, self._problem.value_bounds)
        record = fit_on_cores(
            table=self._table,
            network=network,
            objective=objective,
            plan=plan,
            settings=FitSettings(
                steps=steps,
                batch_size=min(settings.batch_size, len(self._table)),
                schedule="cosine",
                record_every=max(1, steps // _RECORDS),
            ),
            progress=self._progress,
        )
        if shared_rounds is not None:
            shared_rounds.keep(network, steps, done, record)
        if self._progress is not None:
            self._progress(steps, steps, "solving last layers")
        return record

    def solve(self, network: StackedMLP) -> tuple[StackedMLP, bool]:
        """The networks with the last layer of least kernel loss, and whether training
        can stop.
        """
        system = accumulate_systems(
            network,
            self._solved_table,
            self._instruments,
            self._solved_weights,
            is_one_step=self._problem.is_one_step,
        )
        solved = layers.minimise_kernel_loss(network, system, self._settings.ridge)
        starts = layers.sum_starts(network, self._resampling, None, self._problem)
        values = layers.mean_values(
            starts.means[:, 0], layers.last_layer(solved), self._problem.reward_scale
        )[:, 0]
        loss = self._held_out_loss(solved)
        before = self._before
        self._before = (values, loss)
        if before is None:
            return solved, False
        old_values, old_loss = before
        has_settled = self._has_settled(values, old_values, loss, old_loss)
        return solved, has_settled

    def _has_settled(
        self,
        values: Float[np.ndarray, " replica"],
        old_values: Float[np.ndarray, " replica"],
        loss: float,
        old_loss: float,
    ) -> bool:
        """Whether training can stop, by start values in units of the return and
        held-out losses, now and after the round before.
        """
        scale = self._problem.reward_scale
        moves = values - old_values
        moves = moves[np.isfinite(moves)]
        resampled = values[self._resampling.full :]
        resampled = resampled[np.isfinite(resampled)]
        width = 0.0
        if len(resampled) > 1:
            width = 4.0 * float(resampled.std(ddof=1))
        tolerance = max(self._settings.agreement * width, _LEAST * scale)
        is_quiet = len(moves) > 0 and abs(float(moves.mean())) <= tolerance
        is_learnt = loss >= _BETTER * old_loss or width <= _SHARP * scale
        is_worse = _BETTER * loss > max(0.0, old_loss)
        return (is_quiet and is_learnt) or is_worse

    def _held_out_loss(self, network: StackedMLP) -> float:
        """Σ over resampled networks of ‖ψᵀδ‖² − ‖δ‖², δ of unseen rows; 0 in
        expectation for the true Q.
        """
        table = self._solved_table
        compared = table.compared
        projected = self._solved_weights.new_zeros(network.replicas, 1)
        squares = self._solved_weights.new_zeros(())
        for rows in row_blocks(network, len(table), table.draws):
            _, _, residual = read_rows(network, table, rows)
            unseen = (residual * self._unseen[:, rows]).nan_to_num()
            projected = projected + unseen @ self._instruments(compared[rows].double())
            squares = squares + unseen.square().sum()
        return float(projected.square().sum() - squares)


def _joined(first: FitRecord, second: FitRecord) -> FitRecord:
    """The second round's record, with the steps of both and the first divergence of
    each replica.
    """
    diverged_at = list(first.diverged_at)
    for replica, step in enumerate(second.diverged_at):
        if diverged_at[replica] is None and step is not None:
            diverged_at[replica] = first.steps + step
    return dataclasses.replace(
        second, diverged_at=tuple(diverged_at), steps=first.steps + second.steps
    )


@dataclass(frozen=True)
class WholeLog:
    """The log of which a problem is a sample.

    ``fold``: sums over all its rows. ``effective_units``: their number. ``is_cut``:
    whether any episode is cut. ``further``: sums beside the systems, in the same pass.
    """

    fold: Fold
    effective_units: float
    is_cut: bool = False
    further: Further = NOTHING_FURTHER


def fit_value_functions(
    problem: EvaluationProblem,
    resampling: Resampling,
    settings: EvaluationSettings,
    progress: Progress | None = None,
    log: WholeLog | None = None,
    shared_rounds: SharedRounds | None = None,
) -> FittedValues:
    """Train all replicas in rounds, then give each its last layers: of least kernel
    loss, and as trained.

    problem: rows that networks train on. resampling: how often each network counts a
    unit. log: the log of which the problem is a sample, so that last layers and start
    values use all of it; None if the problem is the whole log, without cuts.
    shared_rounds: of evaluations of other policies by the same settings; read and
    filled where the log is one-step.
    """
    width = (problem.inputs.shape[1], *settings.hidden_units)[-1]
    instruments, bandwidth = layers.draw_instruments(
        problem,
        bandwidth=settings.bandwidth,
        count=settings.instruments,
        parameters=(width + 1) * (problem.n_actions or 1),
        seed=settings.seed,
    )
    rounds = Training(
        problem, resampling, settings, instruments, progress, shared_rounds
    )
    record = rounds.run()
    network = record.network

    if log is None:
        log = WholeLog(
            fold=partial(_apply, problem),
            effective_units=float(len(problem.episode_starts)),
        )
    cuts_by_step = None
    if log.is_cut and not problem.fixed_starts:
        cuts_by_step = cut_shares(problem)
    of_part = partial(
        systems_of_part,
        network,
        instruments,
        resampling,
        settings.gamma,
        cuts_by_step,
        further=log.further,
    )
    systems: LinearSystems = log.fold(of_part)
    if problem.fixed_starts:  # start states of a part are meaningless then
        starts = layers.sum_starts(network, resampling, None, problem)
        systems = dataclasses.replace(systems, starts=starts)
    return FittedValues(
        problem=problem,
        resampling=resampling,
        settings=settings,
        heads=_heads(network, systems, settings.ridge),
        systems=systems,
        cuts_by_step=cuts_by_step,
        bandwidth=bandwidth,
        instruments=instruments,
        record=record,
        fold=log.fold,
        units=log.effective_units,
    )


def _apply(problem: EvaluationProblem, summarise: Summarise[S]) -> S:
    """The sum over a log that is one part."""
    return summarise(problem)


def _heads(
    network: StackedMLP, systems: LinearSystems, ridge: float
) -> dict[str, StackedMLP]:
    """The networks by head: with the last layer of least kernel loss (``kloss``), as
    fitted Q evaluation left it (``fqe``), and with the mean of both.

    Only last layers differ, so that the mean of all parameters is that of them.
    """
    solved = layers.minimise_kernel_loss(network, systems.system, ridge)
    trained = network.with_flat(network.flat.double())
    mean = network.with_flat(0.5 * (solved.flat + trained.flat))
    return {AVERAGED: mean, "kloss": solved, "fqe": trained}


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
    with torch.no_grad(), threads(1), cores(settings.chosen_cores):
        generator = np.random.default_rng(settings.seed)
        problem = prepare_problem(
            transitions, policy, settings.gamma, settings.action_draws, generator
        )
        resampling = Resampling.draw(problem, settings.full_replicas, 0, settings.seed)
        fitted = fit_value_functions(problem, resampling, settings, progress)
        return fitted.value_function(transitions)
