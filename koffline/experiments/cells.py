"""One cell of a benchmark: a method on a problem, with all learning rates and seeds
trained at once.

A cell's result is one file, written atomically and named by a digest of everything it
depends on. A cell whose file exists is not computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped

from koffline.experiments import ENVIRONMENTS, PARTS, STAGES, WORLDS
from koffline.experiments.benchmark import (
    FORMAT,
    GAMMA,
    MEASURES,
    Metrics,
    Problem,
    ProblemSettings,
    as_table,
)
from koffline.experiments.result_files import (
    digest_of,
    is_result,
    read_result,
    write_result,
)
from koffline.fitting import FitRecord, FitSettings, fit
from koffline.jobs import Job, run_jobs
from koffline.objectives import Objective
from koffline.replicas import ReplicaPlan, StackedMLP

# number of records averaged into a seed's final number, to reduce noise
LAST_RECORDS = 5
EPOCHS = {
    "puddle_world": 2000,
    "cart_pole": 2000,
    "gymnasium_pole": 2000,
    "mountain_car": 3000,
}
# (Feng et al. 2019, sec:exp_eval)
TRUTHS = {"paper": "mse_paper", "monte_carlo": "mse_monte_carlo"}
_FAR = 10.0
# divisor of the epochs, and seeds
_QUICK_SHARE = 20
_QUICK_SEEDS = 3


@dataclass(frozen=True)
class TrainingSettings:
    """Learning rates, seeds, epochs, batch and network as the paper states them;
    rewards, of whose scale it says nothing, are divided by ``reward_factor`` times the
    world's.
    """

    learning_rates: tuple[float, ...] = (0.003, 0.001, 0.0003)
    seeds: int = 10
    epochs: int = 2000
    batch_size: int = 150
    hidden: tuple[int, ...] = (80,)
    probe_every: int = 20  # epochs
    reward_factor: float = 1.0


@dataclass(frozen=True)
class Scale:
    """Full: the paper's epochs and ten seeds. Quick: a twentieth of the epochs, three
    seeds.

    half_epochs: half the epochs on the poles and Mountain Car, in the experiment
    `choices` only.
    """

    quick: bool = False
    seed: int = 0
    half_epochs: bool = False

    def problem(self, world: str) -> ProblemSettings:
        """The world's problem; a quick run uses fewer rollouts for the true values."""
        truth_repeats = 200
        if self.quick:
            truth_repeats = 20
        return ProblemSettings(world, truth_repeats=truth_repeats, seed=self.seed)

    def training(self, world: str) -> TrainingSettings:
        """The paper's settings for the world."""
        if self.quick:
            return TrainingSettings(
                epochs=EPOCHS[world] // _QUICK_SHARE, seeds=_QUICK_SEEDS, probe_every=5
            )
        return TrainingSettings(epochs=EPOCHS[world])


@dataclass(frozen=True)
class Cell:
    """A method on a problem."""

    problem: ProblemSettings
    method: str
    objective: Objective
    training: TrainingSettings = field(default_factory=TrainingSettings)

    @property
    def name(self) -> str:
        """Short unique name: world, method and a digest of all settings."""
        return f"{self.problem.world}-{self.method}-{digest_of(FORMAT, self)}"


@dataclass(frozen=True, eq=False)
class CellResult:
    """Curves (T, L, S) by measure at ``epochs`` (T,); L learning rates, S seeds, in
    native reward units.

    objective: mean training loss since the last record. diverged_at (L, S): step at
    which a number became non-finite; −1 if none did. held_out (L, S): final kernel loss
    on held-out tuples.
    """

    epochs: Int[np.ndarray, " time"]
    learning_rates: Float[np.ndarray, " rate"]
    curve: dict[str, Shaped[np.ndarray, "time rate seed"]]
    diverged_at: Int[np.ndarray, "rate seed"]
    held_out: Float[np.ndarray, "rate seed"]
    paper_noise: float  # mean squared difference of the two truths
    value_variance: float
    largest_return: float  # largest |V| that the log's rewards allow: max |r| / (1 − γ)

    def final(self, curve: str) -> Float[np.ndarray, "rate seed"]:
        """Mean of the last records of a curve, per learning rate and seed; NaN if the
        seed diverged.
        """
        return self.curve[curve][-LAST_RECORDS:].mean(axis=0, dtype=np.float64)

    def best_by_truth(self, truth: str) -> int:
        """Index of the learning rate with the smallest mean error against a truth (the
        paper's rule).

        Rates with a diverged seed rank last.
        (Feng et al. 2019, sec:exp_eval)
        """
        return _smallest(self.final(TRUTHS[truth]))

    def best_without_truth(self) -> int:
        """Index of the learning rate with the smallest kernel loss on held-out
        tuples.
        """
        return _smallest(self.held_out)

    def best_errors(self) -> Float[np.ndarray, " seed"]:
        """Errors against Monte Carlo at the best learning rate."""
        return self.final(TRUTHS["monte_carlo"])[self.best_by_truth("monte_carlo")]

    def diverged(self) -> Shaped[np.ndarray, "rate seed"]:
        """Whether a number became non-finite, or |V| exceeded ten times the largest
        possible return.
        """
        largest = np.nan_to_num(
            self.curve["largest_value"], nan=0.0, posinf=np.inf
        ).max(axis=0)
        return (self.diverged_at >= 0) | (largest > _FAR * self.largest_return)


Finished = Sequence[tuple[Cell, CellResult]]


def _smallest(errors: Shaped[np.ndarray, "rate seed"]) -> int:
    means = errors.mean(axis=1)
    return int(np.where(np.isfinite(means), means, np.inf).argmin())


@runtime_checkable
class Named(Protocol):
    """A cell or a problem: settings whose result has a file of their name."""

    @property
    def name(self) -> str:
        """Short unique name."""


Part = TypeVar("Part", bound=Named)


@dataclass(frozen=True)
class Run:
    """One call of `koffline reproduce`.

    environments, parts: those of figure-mujoco to run. worlds, stages: those of choices
    to run. only_finished: train nothing in choices, show what is finished.
    """

    name: str
    folder: Path
    scale: Scale
    workers: int = 1
    ray: str | None = None
    command: str = ""
    force: bool = False
    environments: tuple[str, ...] = ENVIRONMENTS
    parts: tuple[str, ...] = PARTS
    worlds: tuple[str, ...] = WORLDS
    stages: tuple[str, ...] = STAGES
    only_finished: bool = False
    show_progress: bool = True

    @property
    def cells_folder(self) -> Path:
        """Folder of finished cells, used by resumed runs and by other experiments."""
        return self.folder / "cells"

    def path(self, part: Named) -> Path:
        """Path of the result of a cell or of a problem."""
        return self.cells_folder / f"{part.name}.npz"

    def work_off(
        self, parts: Iterable[Part], write: Callable[[Path, Part], None]
    ) -> None:
        """Write the cells or problems whose files are missing."""
        distinct = {self.path(part): part for part in parts}.items()
        jobs = [
            Job(path.stem.rpartition("-")[0], write, (part,), path, is_result)
            for path, part in distinct
        ]
        run_jobs(jobs, self.workers, self.ray, self.show_progress)

    def train(self, cells: Sequence[Cell]) -> Finished:
        """Build the missing problems, train the missing cells, and read the results of
        all cells.

        Raises ConfigError if a file is damaged.
        """
        self.work_off([cell.problem for cell in cells], Problem.write)
        self.work_off(cells, write_cell)
        return [(cell, read_result(self.path(cell), CellResult)) for cell in cells]


def write_cell(path: Path, cell: Cell) -> None:
    """Train all replicas of a cell on its problem (file in the same folder) and write
    the result.
    """
    problem = Problem.load(path.with_name(f"{cell.problem.name}.npz"), cell.problem)
    write_result(path, vars(_train(cell, problem)))


def _train(cell: Cell, problem: Problem) -> CellResult:
    settings = cell.training
    scale = problem.world.reward_scale * cell.training.reward_factor
    plan = ReplicaPlan.grid(range(settings.seeds), settings.learning_rates)
    table = as_table(problem.log, problem.world, scale)
    metrics = Metrics(problem, scale)
    per_epoch = max(1, len(table) // settings.batch_size)
    record = fit(
        table,
        StackedMLP.initialise((2, *settings.hidden, 1), plan.batch_seeds),
        cell.objective,
        plan,
        FitSettings(
            settings.epochs * per_epoch, settings.batch_size, record_every=per_epoch
        ),
        probe=metrics,
        probe_every=settings.probe_every * per_epoch,
    )
    seeds = settings.seeds
    rates = len(settings.learning_rates)
    return CellResult(
        epochs=np.asarray(record.probe_steps) // per_epoch,
        learning_rates=np.asarray(settings.learning_rates),
        curve=curves_of(record, seeds, rates, scale),
        diverged_at=diverged_steps(record, seeds, rates),
        held_out=metrics.held_out_loss(record.network).reshape(seeds, rates).T,
        paper_noise=float(
            np.mean((problem.paper.values - problem.monte_carlo.values) ** 2)
        ),
        value_variance=problem.monte_carlo.variance,
        largest_return=float(np.abs(problem.log.rewards).max()) / (1.0 - GAMMA),
    )


def curves_of(
    record: FitRecord, seeds: int, rates: int, scale: float
) -> dict[str, Float[np.ndarray, "time rate seed"]]:
    """Curves of `MEASURES` and of the training objective, for replicas ordered seed by
    seed.

    scale: divisor of the rewards in training; the objective is given in native reward
    units.
    """
    seen = (
        torch.stack(record.probes)
        .numpy()
        .reshape(-1, seeds, rates, len(MEASURES))
        .transpose(3, 0, 2, 1)
    )
    curves = dict(zip(MEASURES, seen.astype(np.float32), strict=True))
    ends = np.searchsorted(record.loss_steps, record.probe_steps, side="right")
    means = [part.mean(axis=0) for part in np.split(record.losses.numpy(), ends)[:-1]]
    objective = (
        np.stack(means).reshape(-1, seeds, rates).transpose(0, 2, 1).astype(np.float32)
    )
    return {**curves, "objective": objective * np.float32(scale**2)}


def diverged_steps(
    record: FitRecord, seeds: int, rates: int
) -> Int[np.ndarray, "rate seed"]:
    """Step (L, S) at which a number became non-finite, −1 if none did.

    record: of L · S replicas, ordered seed by seed. seeds: S. rates: L.
    """
    steps = np.full(seeds * rates, -1)
    for replica, step in enumerate(record.diverged_at):
        if step is not None:
            steps[replica] = step
    return steps.reshape(seeds, rates).T
