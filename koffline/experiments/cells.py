"""One cell of a benchmark: a method on a problem, all its learning rates and seeds trained at once.

A cell's result is one file, written whole or not at all and named by a digest of everything it depends on;
a cell whose file is there is not computed again. While it runs, a checkpoint beside the file lets a killed
run continue where it was.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped

from koffline.batches import ReplicaPlan
from koffline.dual_objectives import DualObjective
from koffline.errors import ConfigError
from koffline.experiments.problem import Problem, ProblemSettings, build_problem
from koffline.experiments.value_networks import NAMES, Metrics, held_out_kernel_loss, offset_networks
from koffline.fitting import Checkpointing, FitSettings, Progress, fit
from koffline.jobs import Job
from koffline.objectives import Objective
from koffline.replicas import StackedMLP
from koffline.store.files import atomic_file
from koffline.untrusted.arrays import read_arrays

FORMAT = 2  # of the files; part of the digest
LAST_RECORDS = 5  # averaged into the final number of a seed: a single record of a noisy curve is luck
_FAR = 10.0

EPOCHS = {"puddle_world": 2000, "cart_pole": 2000, "mountain_car": 3000}  # (Feng et al. 2019, sec:exp_eval)
_QUICK_SHARE = 20  # of the epochs
_QUICK_SEEDS = 3
TRUTHS = {"paper": "mse_paper", "monte_carlo": "mse_monte_carlo"}
_NUMBERS = ("paper_noise", "value_variance", "largest_return", "seconds")
_COLUMNS = ("epochs", "learning_rates", "diverged_at", "held_out")


@dataclass(frozen=True)
class TrainingSettings:
    """The paper's, but for the reward scale: rewards are divided by the world's times ``reward_factor``.

    offset: the network gets a learned output offset b/(1−γ) of its own (slower: any torch module).
    (Feng et al. 2019, sec:exp_eval)
    """

    learning_rates: tuple[float, ...] = (0.003, 0.001, 0.0003)
    seeds: int = 10
    epochs: int = 2000
    batch_size: int = 150
    hidden: tuple[int, ...] = (80,)
    probe_every: int = 20  # epochs
    reward_factor: float = 1.0
    offset: bool = False

    def __post_init__(self) -> None:
        if min(self.seeds, self.epochs, self.batch_size, self.probe_every) < 1 or not self.learning_rates:
            raise ConfigError(f"{self} cannot be trained; give positive numbers and a learning rate")


@dataclass(frozen=True)
class Scale:
    """Full: the paper's epochs and ten seeds. Quick: a twentieth of the epochs, three seeds."""

    quick: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}; give a number that is not negative")

    def problem(self, world: str) -> ProblemSettings:
        """The world's problem; fewer rollouts for the truth of a quick run."""
        return ProblemSettings(world, truth_repeats=20 if self.quick else 200, seed=self.seed)

    def training(self, world: str) -> TrainingSettings:
        """The paper's settings for the world."""
        whole = TrainingSettings(epochs=EPOCHS[world])
        if not self.quick:
            return whole
        return replace(whole, epochs=EPOCHS[world] // _QUICK_SHARE, seeds=_QUICK_SEEDS, probe_every=5)


@dataclass(frozen=True)
class Cell:
    """A method on a problem."""

    problem: ProblemSettings
    method: str
    objective: Objective | DualObjective
    training: TrainingSettings = field(default_factory=TrainingSettings)

    @property
    def name(self) -> str:
        """Short and unique: world, method and a digest of all settings."""
        digest = hashlib.sha256(repr((FORMAT, self)).encode()).hexdigest()[:12]
        return f"{self.problem.world}-{self.method}-{digest}"


@dataclass(frozen=True, eq=False)
class CellResult:
    """Curves (T, L, S) at ``epochs`` (T,) for L learning rates and S seeds, in native reward units.

    objective: mean training loss since the last record. diverged_at (L, S): step at which a number stopped
    being finite, −1 where none did. held_out (L, S): kernel loss of unseen tuples at the end.
    """

    epochs: Int[np.ndarray, " time"]
    learning_rates: Float[np.ndarray, " rate"]
    curves: dict[str, Shaped[np.ndarray, "time rate seed"]]
    diverged_at: Int[np.ndarray, "rate seed"]
    held_out: Float[np.ndarray, "rate seed"]
    paper_noise: float  # mean squared difference of the two truths
    value_variance: float
    largest_return: float  # largest |V| that the log's rewards allow: max |r| / (1 − γ)
    seconds: float


def problem_path(settings: ProblemSettings, folder: Path) -> Path:
    """Where the arrays of a problem are kept."""
    digest = hashlib.sha256(repr((FORMAT, settings)).encode()).hexdigest()[:12]
    return folder / f"problem-{settings.world}-{digest}.npz"


def cell_path(cell: Cell, folder: Path) -> Path:
    """Where the result of a cell is kept."""
    return folder / f"{cell.name}.npz"


def cell_jobs(cells: Sequence[Cell], folder: Path) -> tuple[list[Job], list[Job]]:
    """Jobs that build the problems of the cells, and those that train the cells."""
    settings = dict.fromkeys(cell.problem for cell in cells)
    problems = [
        Job(f"truth of {s.world}", write_problem, (s,), problem_path(s, folder), _is_archive)
        for s in settings
    ]
    training = [
        Job(
            f"{cell.method} on {cell.problem.world}",
            write_cell,
            (cell,),
            cell_path(cell, folder),
            _is_archive,
        )
        for cell in dict.fromkeys(cells)
    ]
    return problems, training


def write_problem(path: Path, settings: ProblemSettings) -> None:
    """Build a problem and write it."""
    problem = build_problem(settings)
    with atomic_file(path, force=True) as temporary:
        problem.save(temporary)


def write_cell(path: Path, cell: Cell, progress: Progress | None = None) -> None:
    """Train all replicas of a cell and write the result; the problem's file is made where it is missing."""
    store = problem_path(cell.problem, path.parent)
    if not _is_archive(store):
        write_problem(store, cell.problem)
    with reading_result(store):
        problem = Problem.load(store, cell.problem)
    checkpoint = path.with_suffix(".partial")
    result = _train(cell, problem, checkpoint, progress)
    arrays = {f"curve.{name}": curve for name, curve in result.curves.items()}
    arrays |= {name: np.asarray(part) for name, part in vars(result).items() if name != "curves"}
    arrays["name"] = np.asarray(cell.name)
    with atomic_file(path, force=True) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    checkpoint.unlink(missing_ok=True)


def read_cell(path: Path) -> CellResult:
    """The result of a cell. Raises ConfigError for a file that is damaged."""
    with reading_result(path):
        arrays = read_arrays(path)
        curves = {name[6:]: array for name, array in arrays.items() if name.startswith("curve.")}
        parts: dict[str, Any] = {name: float(arrays[name]) for name in _NUMBERS}
        parts |= {name: arrays[name] for name in _COLUMNS}
        return CellResult(curves=curves, **parts)


def _train(cell: Cell, problem: Problem, checkpoint: Path, progress: Progress | None) -> CellResult:
    settings, scale = cell.training, problem.world.reward_scale * cell.training.reward_factor
    plan = ReplicaPlan.grid(range(settings.seeds), settings.learning_rates)
    table = problem.log.table(problem.world, scale)
    per_epoch = max(1, len(table) // settings.batch_size)
    metrics = Metrics(problem, scale)
    network: Any = (
        offset_networks(settings.hidden, plan.batch_seeds)
        if settings.offset
        else StackedMLP.initialise((2, *settings.hidden, 1), plan.batch_seeds)
    )
    every = settings.probe_every * per_epoch
    steps = settings.epochs * per_epoch
    record = fit(
        table,
        network,
        cell.objective,
        plan,
        FitSettings(steps=steps, batch_size=settings.batch_size, record_every=per_epoch),
        probe=metrics,
        probe_every=every,
        progress=progress,
        checkpoint=Checkpointing(checkpoint, every=max(every, 5000)),
    )
    grid = (settings.seeds, len(settings.learning_rates))
    seen = torch.stack(record.probes).numpy().reshape(-1, *grid, len(NAMES)).transpose(0, 2, 1, 3)
    curves = {name: seen[..., index].astype(np.float32) for index, name in enumerate(NAMES)}
    curves["objective"] = _objective_curve(record.losses.numpy(), record.loss_steps, record.probe_steps, grid)
    curves["objective"] *= np.float32(scale**2)
    bound = float(np.abs(problem.log.rewards).max()) / (1.0 - 0.98)
    diverged = [-1 if step is None else step for step in record.diverged_at]
    held_out = held_out_kernel_loss(problem, record.network, scale)
    return CellResult(
        epochs=np.asarray(record.probe_steps) // per_epoch,
        learning_rates=np.asarray(settings.learning_rates),
        curves=curves,
        diverged_at=np.asarray(diverged).reshape(grid).T,
        held_out=held_out.reshape(grid).T,
        paper_noise=float(np.mean((problem.paper.values - problem.monte_carlo.values) ** 2)),
        value_variance=problem.monte_carlo.variance,
        largest_return=bound,
        seconds=record.seconds,
    )


def _objective_curve(
    losses: np.ndarray, loss_steps: tuple[int, ...], probe_steps: tuple[int, ...], grid: tuple[int, int]
) -> np.ndarray:
    """Mean of the losses recorded since the last probe, (T, L, S)."""
    ends = np.searchsorted(loss_steps, probe_steps, side="right")
    starts = np.concatenate([[0], ends[:-1]])
    means = [losses[start:end].mean(axis=0) for start, end in zip(starts, ends, strict=True)]
    return np.stack(means).reshape(-1, *grid).transpose(0, 2, 1).astype(np.float32)


@contextlib.contextmanager
def reading_result(path: Path) -> Iterator[None]:
    """Whatever is wrong with a file of results is a ConfigError."""
    try:
        yield
    except Exception as error:  # numpy and zipfile raise many kinds; all mean that the file is not ours
        raise ConfigError(
            f"{path} is damaged or of another version ({type(error).__name__}); delete it and run again"
        ) from None


def _is_archive(path: Path) -> bool:
    """Whether a whole .npz of that name lies there; half a file or another's is computed again."""
    try:
        arrays = read_arrays(path, ("name",))
    except Exception:  # numpy and zipfile raise many kinds; all mean that the file is not ours
        return False
    return "name" not in arrays or str(arrays["name"]) == path.stem


def final_values(result: CellResult, curve: str) -> Float[np.ndarray, "rate seed"]:
    """Mean of the last records of a curve, per learning rate and seed; NaN after a divergence."""
    return result.curves[curve][-LAST_RECORDS:].mean(axis=0, dtype=np.float64)


def best_rate_by_truth(result: CellResult, truth: str) -> int:
    """Index of the learning rate with the smallest mean error against a truth: the paper's rule.

    Rates with a diverged seed lose against any other. (Feng et al. 2019, sec:exp_eval)
    """
    return _smallest(final_values(result, TRUTHS[truth]).mean(axis=1))


def best_rate_without_truth(result: CellResult) -> int:
    """Index of the learning rate with the smallest kernel loss on tuples that were kept aside."""
    return _smallest(result.held_out.mean(axis=1))


def diverged_seeds(result: CellResult) -> Shaped[np.ndarray, "rate seed"]:
    """Whether a number stopped being finite, or V grew to ten times any return that the rewards allow."""
    with np.errstate(invalid="ignore"):
        beyond = np.nanmax(
            np.where(np.isnan(result.curves["largest_value"]), 0.0, result.curves["largest_value"]), axis=0
        )
    return (result.diverged_at >= 0) | (beyond > _FAR * result.largest_return)


def _smallest(means: Shaped[np.ndarray, " rate"]) -> int:
    return int(np.where(np.isfinite(means), means, np.inf).argmin())
