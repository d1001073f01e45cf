"""choices: what the paper leaves open, varied, to see under which reading its figures
come out.

Open are the target policy's temperature, the transition noise, the scaling of the
inputs, the divisor of the rewards, the poles' velocity box, the truth (both are
measured), and the weight of the diagonal in the K-loss of a mini-batch: 1/n is the
batch's plain V-statistic, 1/5000 the estimate of all rows' V-statistic of Appendix B.1.
Six methods and the second K-loss run in every setting, on five logs with two seeds
each, so that intervals hold the spread over logs.

A cell is one method in one setting, with all logs, seeds and learning rates in one
stack of networks; five stacks of six networks take 2 to 3 times the time of one stack
of thirty. The whole factorial takes days, and so the most telling settings come first,
a killed run goes on, and the page shows whatever is finished. (Feng et al. 2019,
sec:exp_eval)
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from koffline.batches import Table
from koffline.builders.uniform import TEMPERATURES
from koffline.envs.boxes import make_world
from koffline.experiments import STAGES, WORLDS
from koffline.experiments.benchmark import (
    FORMAT,
    GAMMA,
    Metrics,
    Overrides,
    Problem,
    Scaling,
    SoftmaxProblem,
    as_table,
    scaling_of,
)
from koffline.experiments.cells import (
    CellResult,
    Run,
    Scale,
    TrainingSettings,
    curves_of,
    diverged_steps,
)
from koffline.experiments.choices_traits import (
    TraitsCell,
    TraitsResult,
    leading_share,
    write_traits,
)
from koffline.experiments.exact_losses import ExactCell
from koffline.experiments.figure_methods import OBJECTIVES
from koffline.experiments.result_files import (
    digest_of,
    is_result,
    read_result,
    write_result,
)
from koffline.fitting import FitSettings, fit
from koffline.kernel_loss import mixture_diag_weight
from koffline.kernels import Gaussian
from koffline.objectives import CopyTarget, FittedIteration, KernelLoss, Objective
from koffline.replicas import ReplicaPlan, StackedMLP

# two networks, of different seeds, on each log
LOGS = 5
SEEDS = 2
_QUICK_LOGS = 3
_QUICK_SEEDS = 1
_TRUTH_REPEATS = 50  # rollouts per state; their noise is subtracted from the errors
KERNEL = Gaussian(0.5)  # (Feng et al. 2019, sec:exp_eval)
MIXTURE = "kloss_mixture"
# The fast ones first, so that a setting says much early.
METHODS = ("kloss", "rg", "fvi", "td0", MIXTURE, "gtd2", "sbeed")
# Multiples of the world's usual temperature; on Puddle
# World 0.3, 1, 3 and the random policy.
_TEMPERATURES = (1.0, 10.0 / 3.0, 10.0, math.inf)
_TELLING = (1.0, 10.0)  # those at which the other factors are changed one at a time
_NOISES = (1.0, 5.0)  # multiples of the world's usual noise
_BOXES = (4.0, 6.0)  # the poles' fastest velocities, radians per second

ScalingName = Literal["unit", "z"]


@dataclass(frozen=True)
class PaperReading:
    """One reading of what the paper leaves open, in one world.

    temperature: of the target policy, infinite for the random one. noise: the world's.
    scaling: of the inputs of networks and kernels. reward_divisor: of the rewards in
    training. fastest: the poles' velocity box.
    """

    world: str
    temperature: float
    noise: float
    scaling: ScalingName
    reward_divisor: float
    fastest: float | None

    @property
    def words(self) -> str:
        """The setting without its world, for people: "T 3, noise 0.05, z-scores,
        rewards/1".
        """
        temperature = f"T {self.temperature:g}"
        if math.isinf(self.temperature):
            temperature = "T random"
        parts = [
            temperature,
            f"noise {self.noise:g}",
            {"unit": "unit square", "z": "z-scores"}[self.scaling],
            f"rewards/{self.reward_divisor:g}",
        ]
        if self.fastest is not None:
            parts.append(f"velocity ±{self.fastest:g}")
        return ", ".join(parts)


class Chapter(NamedTuple):
    """Settings of one world that are run one after the other."""

    world: str
    stage: str


_SMALL_WORLDS = WORLDS[1:]
# The order of the run. "temperature": all other factors as published. "single": one
# other factor changed.
CHAPTERS = (
    Chapter("puddle_world", "temperature"),
    Chapter("puddle_world", "single"),
    *(Chapter(world, "temperature") for world in _SMALL_WORLDS),
    *(Chapter(world, "single") for world in _SMALL_WORLDS),
    Chapter("puddle_world", "factorial"),
    Chapter("mountain_car", "factorial"),
    Chapter("cart_pole", "factorial"),
    Chapter("gymnasium_pole", "factorial"),
)


def temperatures_of(world: str) -> list[float]:
    """The world's temperatures from its usual one to infinity, rounded to four
    digits.
    """
    return [float(f"{TEMPERATURES[world] * factor:.4g}") for factor in _TEMPERATURES]


def settings_of(chapter: Chapter) -> list[PaperReading]:
    """The settings of a chapter; the three stages of a world share none, and together
    are its factorial.
    """
    return [
        setting
        for setting in _factorial(chapter.world)
        if _stage_of(setting) == chapter.stage
    ]


def _factorial(world: str) -> list[PaperReading]:
    """All settings of a world, by temperature; the first of each factor is the
    published one.
    """
    usual = make_world(world)
    scale = usual.reward_scale
    divisors = [scale]
    if scale != 1.0:
        divisors.append(1.0)
    boxes: Sequence[float | None] = (None,)
    if hasattr(usual, "fastest"):
        boxes = _BOXES
    noises = [float(f"{usual.noise * factor:.6g}") for factor in _NOISES]
    scalings: tuple[ScalingName, ...] = ("unit", "z")
    factors = itertools.product(
        temperatures_of(world), noises, scalings, divisors, boxes
    )
    return [
        PaperReading(world, temperature, noise, scaling, divisor, fastest)
        for temperature, noise, scaling, divisor, fastest in factors
    ]


def _stage_of(setting: PaperReading) -> str:
    usual = _factorial(setting.world)[0]
    changed = {
        name
        for name in ("noise", "scaling", "reward_divisor", "fastest")
        if getattr(setting, name) != getattr(usual, name)
    }
    if not changed:
        return "temperature"
    telling = [round(usual.temperature * factor, 10) for factor in _TELLING]
    # On the poles the wider box and z-scores belong together: both move the kernel's
    # bandwidth on velocities.
    is_single = len(changed) == 1 or changed == {"scaling", "fastest"}
    if is_single and round(setting.temperature, 10) in telling:
        return "single"
    return "factorial"


@dataclass(frozen=True)
class ChoiceTraining(TrainingSettings):
    """Training settings with the scaling of the inputs; ``seeds`` counts networks per
    log.
    """

    scaling: ScalingName = "unit"


@dataclass(frozen=True)
class ChoiceCell:
    """A method in a setting, on several logs. problems: equal but for their seeds."""

    problems: tuple[SoftmaxProblem, ...]
    method: str
    objective: Objective
    training: ChoiceTraining

    @property
    def name(self) -> str:
        """Short unique name: world, method and a digest of all settings."""
        return (
            f"choices-{self.problems[0].world}-{self.method}-{digest_of(FORMAT, self)}"
        )


@dataclass(frozen=True, eq=False)
class ChoiceResult:
    """Curves (T, L, G, S) by measure; L learning rates, G logs, S seeds per log, in
    native reward units.

    The fields are those of `CellResult`, with an axis of logs. final_values: the final
    V at P states of each log, its first ones. leading_share: the share of the squared
    error at these states that lies in the kernel's ten leading eigenvectors there.
    process_seconds: processor time of the cell.
    """

    epochs: Int[np.ndarray, " time"]
    learning_rates: Float[np.ndarray, " rate"]
    curve: dict[str, Shaped[np.ndarray, "time rate log seed"]]
    diverged_at: Int[np.ndarray, "rate log seed"]
    held_out: Float[np.ndarray, "rate log seed"]
    paper_noise: Float[np.ndarray, " log"]
    value_variance: Float[np.ndarray, " log"]
    largest_return: Float[np.ndarray, " log"]
    final_values: Float[np.ndarray, "rate log seed state"]
    leading_share: Float[np.ndarray, "rate log seed"]
    process_seconds: float

    def of_log(self, log: int) -> CellResult:
        """The result on one log."""
        return CellResult(
            epochs=self.epochs,
            learning_rates=self.learning_rates,
            curve={name: curve[:, :, log] for name, curve in self.curve.items()},
            diverged_at=self.diverged_at[:, log],
            held_out=self.held_out[:, log],
            paper_noise=float(self.paper_noise[log]),
            value_variance=float(self.value_variance[log]),
            largest_return=float(self.largest_return[log]),
        )

    @property
    def logs(self) -> int:
        """Number G of logs."""
        return len(self.value_variance)

    def shares(self, curve: str) -> Float[np.ndarray, "rate log"]:
        """Final errors as shares of Var V, means over the seeds of a log; NaN if a seed
        diverged.
        """
        finals = [
            self.of_log(log).final(curve).mean(axis=1) for log in range(self.logs)
        ]
        return np.stack(finals, axis=1) / self.value_variance

    def diverged(self) -> Shaped[np.ndarray, "rate log seed"]:
        """Which networks diverged, as in `CellResult`."""
        return np.stack(
            [self.of_log(log).diverged() for log in range(self.logs)], axis=1
        )


class Finished(NamedTuple):
    """A finished cell with its setting."""

    setting: PaperReading
    cell: ChoiceCell
    result: ChoiceResult


def problems_of(scale: Scale, setting: PaperReading) -> tuple[SoftmaxProblem, ...]:
    """The setting's problems, one per log; they do not depend on the scalings of inputs
    and rewards.
    """
    usual = scale.problem(setting.world)
    overrides: Overrides = ()
    if setting.fastest is not None:
        overrides = (("fastest", setting.fastest),)
    first = SoftmaxProblem(
        setting.world,
        noise=setting.noise,
        overrides=overrides,
        rows=usual.rows,
        held_out_rows=usual.held_out_rows,
        truth_repeats=min(usual.truth_repeats, _TRUTH_REPEATS),
        seed=usual.seed,
        temperature=setting.temperature,
    )
    logs = LOGS
    if scale.quick:
        logs = _QUICK_LOGS
    return tuple(replace(first, seed=usual.seed + log) for log in range(logs))


def training_of(scale: Scale, setting: PaperReading) -> ChoiceTraining:
    """The setting's training: the figures' epochs, or half of them outside Puddle World
    if so asked.
    """
    usual = scale.training(setting.world)
    seeds = SEEDS
    if scale.quick:
        seeds = _QUICK_SEEDS
    epochs = usual.epochs
    if scale.half_epochs and setting.world != "puddle_world":
        epochs = max(1, epochs // 2)
    factor = setting.reward_divisor / make_world(setting.world).reward_scale
    return ChoiceTraining(
        learning_rates=usual.learning_rates,
        seeds=seeds,
        epochs=epochs,
        batch_size=usual.batch_size,
        hidden=usual.hidden,
        probe_every=usual.probe_every,
        reward_factor=factor,
        scaling=setting.scaling,
    )


def cell_of(scale: Scale, setting: PaperReading, method: str) -> ChoiceCell:
    """The cell of a method in a setting."""
    problems = problems_of(scale, setting)
    objective = OBJECTIVES.get(method) or KernelLoss(
        KERNEL, mixture_diag_weight(1.0, problems[0].rows)
    )
    return ChoiceCell(problems, method, objective, training_of(scale, setting))


def traits_of(scale: Scale, setting: PaperReading) -> TraitsCell:
    """What is measured of the setting's problems themselves."""
    return TraitsCell(problems_of(scale, setting), setting.scaling)


def exact_of(setting: PaperReading) -> ExactCell:
    """What the losses of the setting are like if training is perfect; the same for all
    scales and seeds.
    """
    problem = problems_of(Scale(), setting)[0]
    return ExactCell(
        SoftmaxProblem(
            problem.world,
            noise=problem.noise,
            overrides=problem.overrides,
            temperature=problem.temperature,
        ),
        setting.scaling,
    )


def published_settings(world: str) -> list[PaperReading]:
    """The settings of a world that differ from the published one in temperature
    alone.
    """
    return settings_of(Chapter(world, "temperature"))


def is_published(setting: PaperReading) -> bool:
    """Whether a setting differs from the published one in temperature alone."""
    published = published_settings(setting.world)[0]
    return replace(setting, temperature=published.temperature) == published


def chapters_of(run: Run) -> list[Chapter]:
    """The chapters to run; a quick run has only the first stage."""
    stages = run.stages
    if run.scale.quick:
        stages = STAGES[:1]
    return [
        chapter
        for chapter in CHAPTERS
        if chapter.world in run.worlds and chapter.stage in stages
    ]


def train_choices(run: Run) -> None:
    """Build, measure and train what is missing, chapter by chapter."""
    for chapter in chapters_of(run):
        settings = settings_of(chapter)
        problems = [problems_of(run.scale, setting) for setting in settings]
        run.work_off(itertools.chain.from_iterable(problems), Problem.write)
        run.work_off(
            [traits_of(run.scale, setting) for setting in settings], write_traits
        )
        cells = [
            cell_of(run.scale, setting, method)
            for setting, method in itertools.product(settings, METHODS)
        ]
        run.work_off(cells, write_choice)


def finished_choices(
    run: Run,
) -> tuple[list[Finished], dict[PaperReading, TraitsResult], list[str]]:
    """Finished cells and traits of all chapters, and what is missing, in words."""
    finished: list[Finished] = []
    traits: dict[PaperReading, TraitsResult] = {}
    missing: list[str] = []
    for setting in itertools.chain.from_iterable(map(settings_of, CHAPTERS)):
        path = run.path(traits_of(run.scale, setting))
        if is_result(path):
            traits[setting] = read_result(path, TraitsResult)
        absent = []
        for method in METHODS:
            cell = cell_of(run.scale, setting, method)
            if is_result(run.path(cell)):
                finished.append(
                    Finished(setting, cell, read_result(run.path(cell), ChoiceResult))
                )
            else:
                absent.append(method)
        if absent:
            if len(absent) == len(METHODS):
                methods = "all methods"
            else:
                methods = ", ".join(absent)
            missing.append(f"{setting.world}: {setting.words}: {methods}")
    return finished, traits, missing


def write_choice(path: Path, cell: ChoiceCell) -> None:
    """Train all networks of a cell on its problems (files in the same folder) and write
    the result.
    """
    problems = [
        Problem.load(path.with_name(f"{settings.name}.npz"), settings)
        for settings in cell.problems
    ]
    write_result(path, vars(train_on_logs(cell, problems)))


def train_on_logs(cell: ChoiceCell, problems: Sequence[Problem]) -> ChoiceResult:
    """Train seeds × learning rates on every log, as one stack that draws each network's
    rows from its log.

    Every log has seeds of its own, so that the means of two logs have nothing in
    common.
    """
    begun = time.process_time()
    settings = cell.training
    rates = settings.learning_rates
    seeds = settings.seeds
    logs = len(problems)
    world = problems[0].world
    scale = world.reward_scale * settings.reward_factor
    scalings = [scaling_of(settings.scaling, problem) for problem in problems]
    tables = [
        as_table(problem.log, world, scale, scaling)
        for problem, scaling in zip(problems, scalings, strict=True)
    ]
    plan = _plan(tables, seeds, rates)
    per_epoch = max(1, len(tables[0]) // settings.batch_size)
    metrics = _MetricsOfLogs(problems, scale, scalings, seeds * len(rates))
    record = fit(
        _joined(tables),
        StackedMLP.initialise((2, *settings.hidden, 1), plan.batch_seeds),
        _copied_every(cell.objective, per_epoch),
        plan,
        FitSettings(
            settings.epochs * per_epoch, settings.batch_size, record_every=per_epoch
        ),
        probe=metrics,
        probe_every=settings.probe_every * per_epoch,
    )
    runs = logs * seeds
    curves = curves_of(record, runs, len(rates), scale)
    diverged_at = diverged_steps(record, runs, len(rates))
    held_out, values = metrics.at_end(record.network)
    # (logs, seeds, rates, states) -> (rates, logs, seeds, states)
    final_values = values.reshape(logs, seeds, len(rates), -1).transpose(2, 0, 1, 3)
    return ChoiceResult(
        epochs=np.asarray(record.probe_steps) // per_epoch,
        learning_rates=np.asarray(rates),
        curve={
            name: curve.reshape(*curve.shape[:2], logs, seeds)
            for name, curve in curves.items()
        },
        diverged_at=diverged_at.reshape(len(rates), logs, seeds),
        held_out=held_out.reshape(logs, seeds, len(rates)).transpose(2, 0, 1),
        paper_noise=np.array(
            [
                np.mean((problem.paper.values - problem.monte_carlo.values) ** 2)
                for problem in problems
            ]
        ),
        value_variance=np.array([problem.monte_carlo.variance for problem in problems]),
        largest_return=np.array(
            [np.abs(problem.log.rewards).max() / (1.0 - GAMMA) for problem in problems]
        ),
        final_values=final_values.astype(np.float32),
        leading_share=np.stack(
            [
                leading_share(final_values[:, log], problem, scaling, KERNEL)
                for log, (problem, scaling) in enumerate(
                    zip(problems, scalings, strict=True)
                )
            ],
            axis=1,
        ),
        process_seconds=time.process_time() - begun,
    )


def _plan(tables: Sequence[Table], seeds: int, rates: tuple[float, ...]) -> ReplicaPlan:
    """Replicas log by log, seed by seed; those of a log draw from its rows of the
    joined table.

    tables: one per log. seeds: of each log. rates: learning rates of each seed.
    """
    logs = range(len(tables))
    ends = np.cumsum([len(table) for table in tables]).tolist()
    row_sets = [
        torch.arange(end - len(table), end)
        for table, end in zip(tables, ends, strict=True)
    ]
    replicas = list(itertools.product(logs, range(seeds), rates))
    return ReplicaPlan(
        learning_rates=tuple(rate for _, _, rate in replicas),
        batch_seeds=tuple(log * seeds + seed for log, seed, _ in replicas),
        row_sets=tuple(row_sets),
        row_set_of=tuple(log for log, _, _ in replicas),
    )


def _joined(tables: Sequence[Table]) -> Table:
    """The rows of all logs, one log after the other."""
    names = [name for name, _ in tables[0].columns()]
    return Table(
        **{
            name: torch.cat([getattr(table, name) for table in tables])
            for name in names
        }
    )


def _copied_every(objective: Objective, per_epoch: int) -> Objective:
    """The objective with FVI's target copied once per epoch of one log, not of the
    joined table.
    """
    if isinstance(objective, FittedIteration) and objective.target == CopyTarget():
        return replace(objective, target=CopyTarget(per_epoch))
    return objective


class _MetricsOfLogs:
    """The probe of a stack whose replicas lie log by log, ``replicas`` of each."""

    def __init__(
        self,
        problems: Sequence[Problem],
        scale: float,
        scalings: Sequence[Scaling],
        replicas: int,
    ) -> None:
        pairs = zip(problems, scalings, strict=True)
        self._metrics = [Metrics(problem, scale, scaling) for problem, scaling in pairs]
        self._replicas = replicas

    def __call__(self, step: int, network: StackedMLP) -> Tensor:
        """Measures (R, measures) of all replicas, each on its own log."""
        return torch.cat(
            [metrics(step, part) for metrics, part in self._parts(network)]
        )

    def at_end(
        self, network: StackedMLP
    ) -> tuple[Float[np.ndarray, " replica"], Float[np.ndarray, "replica state"]]:
        """Kernel losses on held-out tuples, and values at the states of the backups."""
        parts = list(self._parts(network))
        losses = np.concatenate(
            [metrics.held_out_loss(part) for metrics, part in parts]
        )
        return losses, np.concatenate(
            [metrics.values_at_backups(part) for metrics, part in parts]
        )

    def _parts(self, network: StackedMLP) -> Iterator[tuple[Metrics, StackedMLP]]:
        for log, metrics in enumerate(self._metrics):
            rows = slice(log * self._replicas, (log + 1) * self._replicas)
            yield metrics, network.with_flat(network.flat[rows])
