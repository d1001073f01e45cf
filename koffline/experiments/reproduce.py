"""`koffline reproduce`: run an experiment's jobs, then write its numbers, curves, figures and table."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from koffline.errors import ConfigError
from koffline.experiments import DESCRIPTIONS, ablation, claims, evaluation, solver_study
from koffline.experiments.cells import Cell, CellResult, Scale, cell_jobs, cell_path, read_cell
from koffline.experiments.figure_mujoco import draw_mujoco, draw_mujoco_paper, draw_mujoco_sampled
from koffline.experiments.figure_toy import draw_toy
from koffline.experiments.mujoco_plan import MujocoRequest
from koffline.experiments.mujoco_run import run_mujoco
from koffline.experiments.results import (
    Claim,
    Curves,
    Results,
    Row,
    read_results,
    write_clock,
    write_curves,
    write_results,
)
from koffline.experiments.style import save_figure
from koffline.experiments.tables import write_table
from koffline.experiments.toy import run_toy
from koffline.fitting import threads
from koffline.jobs import run_jobs
from koffline.store.run_record import start_run
from koffline.store.targets import locked

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SUFFIXES = (".md", ".png", ".svg", ".curves.h5")


@dataclass(frozen=True)
class Run:
    """One call of `koffline reproduce`."""

    name: str
    folder: Path
    scale: Scale
    workers: int = 1
    ray: str | None = None
    command: str = ""
    force: bool = False
    mujoco: MujocoRequest | None = None  # of figure-mujoco: what of it; None is all

    def __post_init__(self) -> None:
        if self.name not in DESCRIPTIONS:
            raise ConfigError(f"there is no experiment '{self.name}'; known are {', '.join(DESCRIPTIONS)}")
        if self.workers < 1:
            raise ConfigError(f"workers is {self.workers}; give a positive number")
        if self.mujoco is not None and self.name != "figure-mujoco":
            raise ConfigError(
                f"{self.name} has no environments, parts or settings to choose; only figure-mujoco has"
            )

    @property
    def cells_folder(self) -> Path:
        """Where finished cells are kept for a resumed run and for other experiments."""
        return self.folder / "cells"


def reproduce(run: Run) -> Results:
    """Run what is missing, write ``NAME.json``, ``.curves.h5``, ``.png``, ``.svg`` and ``.md``.

    A killed run continues where it was. Raises ConfigError where the folder holds the same experiment at
    another scale (unless ``force``).
    """
    with locked(result_path(run.name, run.folder)):
        return _reproduce(run)


def _reproduce(run: Run) -> Results:
    _check_folder(run)
    begun = start_run("reproduce")
    run.cells_folder.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    experiment = EXPERIMENTS[run.name]
    with threads(1):
        parts, curves = experiment.collect(run)
    results = Results(
        name=run.name,
        seconds=time.perf_counter() - started,
        command=run.command,
        versions={package: version(package) for package in ("koffline", "torch", "numpy", "scipy")},
        settings={"quick": run.scale.quick, "seed": run.scale.seed},
        **parts,
    )
    if curves:
        write_curves(curves, run.folder / f"{run.name}.curves.h5")
    experiment.draw_into(results, curves, run.folder)
    write_table(results, run.folder / f"{run.name}.md")
    write_results(results, result_path(run.name, run.folder))  # last: where it is, everything is
    write_clock(results, begun, run.folder)
    return results


def result_path(name: str, folder: Path) -> Path:
    """The JSON file of an experiment."""
    return folder / f"{name}.json"


def run_cells(run: Run, cells: Sequence[Cell]) -> list[tuple[Cell, CellResult]]:
    """Problems first, then the cells; both from their files where they are there."""
    for jobs in cell_jobs(cells, run.cells_folder):
        run_jobs(jobs, workers=run.workers, ray=run.ray)
    return [(cell, read_cell(cell_path(cell, run.cells_folder))) for cell in cells]


def _evaluation(run: Run) -> tuple[dict[str, Any], Curves]:
    worlds = evaluation.WORLDS[run.name]
    finished = run_cells(run, evaluation.evaluation_cells(worlds, run.scale))
    rows = [row for cell, result in finished for row in evaluation.rows_of(cell, result)]
    parts = {"rows": tuple(rows), "correlations": tuple(evaluation.correlations_of(finished))}
    return parts | {"extra": _truths(finished)}, evaluation.curves_of(finished)


def _ablation(run: Run) -> tuple[dict[str, Any], Curves]:
    variants = ablation.ablation_variants(run.scale)
    finished = run_cells(run, [variant.cell for variant in variants])
    rows = [
        row
        for variant, (cell, result) in zip(variants, finished, strict=True)
        for row in evaluation.rows_of(cell, result, variant.group, variant.name)
    ]
    return {"rows": (*rows, *_solver_rows(run))}, {}


def _solver_rows(run: Run) -> list[Row]:
    settings = solver_study.study_settings(run.scale)
    jobs = solver_study.study_jobs(settings, run.cells_folder)
    run_jobs(jobs, workers=run.workers, ray=run.ray)
    found: dict[str, list[dict[str, float]]] = {}
    for part, job in zip(settings, jobs, strict=True):
        found.setdefault(part.problem.world, []).append(solver_study.read_study(job.path))
    return list(solver_study.rows_of_study(found))


def _claims(run: Run) -> tuple[dict[str, Any], Curves]:
    worlds = [world for group in evaluation.WORLDS.values() for world in group]
    finished = run_cells(run, evaluation.evaluation_cells(worlds, run.scale))
    cells = {(cell.problem.world, cell.method): result for cell, result in finished}
    correlations = tuple(evaluation.correlations_of(finished))
    statistics = [v for v in ablation.ablation_variants(run.scale) if v.group == "statistic"]
    errors = {
        (variant.cell.problem.world, variant.name): claims.best_errors(result)
        for variant, (_, result) in zip(
            statistics, run_cells(run, [variant.cell for variant in statistics]), strict=True
        )
    }
    toy, _ = _toy(run)
    found = (
        *claims.toy_claims(toy["rows"], toy["extra"]),
        *claims.evaluation_claims(cells, correlations),
        *claims.statistic_claims(errors),
        *_stored_mujoco_claims(run),
    )
    rows = [row for cell, result in finished for row in evaluation.rows_of(cell, result)]
    extra = {**toy["extra"], **_truths(finished)}
    parts = {"rows": (*toy["rows"], *rows), "correlations": correlations, "claims": found}
    return {**parts, "extra": extra}, {}


def _mujoco(run: Run) -> tuple[dict[str, Any], Curves]:
    request = run.mujoco or MujocoRequest(quick=run.scale.quick)
    return run_mujoco(request, run.cells_folder, run.workers, run.ray)


def _stored_mujoco_claims(run: Run) -> tuple[Claim, ...]:
    """What figure-mujoco found in this folder: hours of learning are not repeated for a table."""
    path = result_path("figure-mujoco", run.folder)
    if path.exists():
        return read_results(path).claims
    return tuple(claims.not_measured())


def _toy(run: Run) -> tuple[dict[str, Any], Curves]:
    return run_toy(run.scale)


def _truths(finished: evaluation.Finished) -> dict[str, Any]:
    """How far the paper's truth is from Monte Carlo, and how long the cells trained, found or new."""
    return {
        "training_seconds": sum(result.seconds for _, result in finished),
        "truths": {
            cell.problem.world: {
                "value_variance": result.value_variance,
                "paper_against_monte_carlo_mse": result.paper_noise,
            }
            for cell, result in finished
        },
    }


def _check_folder(run: Run) -> None:
    path = result_path(run.name, run.folder)
    if run.force:
        return
    if not path.exists():
        strangers = [run.folder / f"{run.name}{suffix}" for suffix in _SUFFIXES]
        found = [str(other) for other in strangers if other.exists()]
        if found and not run.cells_folder.exists():  # an interrupted run of ours has left its cells
            raise ConfigError(f"{found[0]} exists already; choose another --out or replace it with --force")
        return
    there = dict(read_results(path).settings)
    wanted = {"quick": run.scale.quick, "seed": run.scale.seed}
    if there != wanted:
        raise ConfigError(
            f"{path} was run with {_in_words(there)}, this run has {_in_words(wanted)}; "
            "choose another --out or replace it with --force"
        )


def _in_words(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


@dataclass(frozen=True)
class Experiment:
    """How the parts of the results and the curves come about, and how they are drawn.

    pages: further figures, NAME-PAGE; None where there is nothing to show.
    """

    collect: Callable[[Run], tuple[dict[str, Any], Curves]]
    draw: Callable[[Results, Curves], Figure]
    pages: Mapping[str, Callable[[Results, Curves], Figure | None]] = field(default_factory=dict)

    def draw_into(self, results: Results, curves: Curves, folder: Path) -> None:
        """Write ``NAME.png`` and ``NAME.svg``, and further pages."""
        save_figure(self.draw(results, curves), folder / results.name)
        for page, drawn in self.pages.items():
            figure = drawn(results, curves)
            if figure is not None:
                save_figure(figure, folder / f"{results.name}-{page}")


EXPERIMENTS = {
    "figure-toy": Experiment(_toy, draw_toy),
    "figure-puddle": Experiment(_evaluation, evaluation.draw_puddle),
    "figure-bench": Experiment(_evaluation, evaluation.draw_bench),
    "ablation": Experiment(_ablation, ablation.draw_ablation),
    "figure-mujoco": Experiment(
        _mujoco, draw_mujoco, {"sampled": draw_mujoco_sampled, "paper": draw_mujoco_paper}
    ),
    "claims": Experiment(_claims, claims.draw_claims),
}
