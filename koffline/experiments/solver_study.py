"""The exact solvers on the benchmark's worlds: what rules without truth choose, beside the oracle's choice.

Every candidate of the default grid (features, bandwidth, ridge) is fitted on a log by the closed form. The
oracle takes the one with the smallest error against Monte Carlo; the rules see the log alone. "linear kernel"
is LSTD on the same features (Feng et al. 2019, cor:same_as_td), "networks" variable projection as it comes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from koffline.batches import Table
from koffline.experiments.cells import Run, Scale
from koffline.experiments.problem import Problem, ProblemSettings, build_problem
from koffline.experiments.results import Row, grouped
from koffline.experiments.statistics import mean_over_seeds
from koffline.fitting import threads
from koffline.jobs import Job
from koffline.kernels import Gaussian, InverseMultiquadric, median_bandwidth
from koffline.solvers import CandidateGrid, solve, solve_lstd
from koffline.solvers.linear import LinearResidual, accumulate_forms
from koffline.solvers.quadratic import RidgePath
from koffline.solvers.selection import (
    default_grid,
    held_out_loss,
    lstd_tournament,
    make_folds,
    predict_held_out,
)
from koffline.store.files import atomic_file

WORLDS = ("puddle_world", "cart_pole", "mountain_car")
SOLVERS = {
    "tournament": "LSTD tournament",
    "held_out": "held-out loss",
    "oracle": "oracle",
    "lstd_oracle": "linear kernel, oracle",
    "networks": "networks",
}
_FOLDS, _NAME = 5, "solvers-v1"


def study_rows(run: Run) -> Iterator[Row]:
    """One row per world and variant from the errors of its logs, measured where they are not there yet."""
    problems, folder = study_problems(run.scale), run.cells_folder
    run.work_off(
        [
            Job(f"exact solvers on {p.world}", write_study, (p,), study_path(p, folder), _is_study)
            for p in problems
        ]
    )
    for world, parts in grouped(problems, "world").items():
        errors = [read_study(study_path(part, folder)) for part in parts]
        for key, name in SOLVERS.items():
            yield Row(
                world=world,
                method="kloss",
                learning_rate=0.0,
                seeds=len(errors),
                truth="monte_carlo",
                **mean_over_seeds(np.array([part[key] for part in errors])).named("mse"),
                bellman_error=None,
                best_by_truth=True,
                best_without_truth="oracle" not in name,
                value_variance=float(np.mean([part["value_variance"] for part in errors])),
                group="solver",
                variant=name,
            )


def study_problems(scale: Scale) -> list[ProblemSettings]:
    """Three logs per world (one when quick)."""
    repeats, seeds = (20, 1) if scale.quick else (100, 3)
    return [
        replace(scale.problem(world), truth_repeats=repeats, seed=scale.seed + seed)
        for world in WORLDS
        for seed in range(seeds)
    ]


def study_path(problem: ProblemSettings, folder: Path) -> Path:
    """Where the errors of a log are kept."""
    size = f"{problem.rows}-{problem.truth_repeats}-{_FOLDS}"
    return folder / f"{_NAME}-{problem.world}-{size}-seed{problem.seed}.json"


def write_study(path: Path, problem: ProblemSettings) -> None:
    """Measure a log and write the errors of all variants."""
    with threads(1):
        errors = measure(build_problem(problem))
    with atomic_file(path, force=True) as temporary:
        temporary.write_text(json.dumps(errors) + "\n", encoding="utf-8")


def read_study(path: Path) -> dict[str, float]:
    """What `write_study` wrote."""
    return {name: float(value) for name, value in json.loads(path.read_text(encoding="utf-8")).items()}


def _is_study(path: Path) -> bool:
    """Whether all errors are there."""
    try:
        return set(read_study(path)) == {*SOLVERS, "value_variance"}
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def measure(problem: Problem, folds: int = _FOLDS) -> dict[str, float]:
    """Mean squared errors against Monte Carlo in native units, per variant, and the variance of V."""
    scale, seed, truth = problem.world.reward_scale, problem.settings.seed, problem.monte_carlo
    table = problem.log.table(problem.world, scale).to("cpu", torch.float64)
    assert table.kernel_inputs is not None

    def error(values: Tensor) -> float:
        return float(np.mean((values.numpy() * scale - truth.values) ** 2)) - truth.noise

    grid = default_grid(table.kernel_inputs)
    generator = torch.Generator().manual_seed(seed)
    held_out = predict_held_out(table, grid, make_folds(len(table), folds, generator), generator)
    judge = InverseMultiquadric(0.1 * median_bandwidth(table.kernel_inputs))
    errors = [error(values) for values in _candidate_values(table, grid)]
    lstd = (solve_lstd(table, part, ridge=ridge) for part in grid.feature_maps for ridge in grid.ridges)
    return {
        "tournament": errors[int(lstd_tournament(held_out).argmin())],
        "held_out": errors[int(held_out_loss(held_out, judge, generator).argmin())],
        "oracle": min(errors),
        "lstd_oracle": min(error(fit.values(table.inputs)) for fit in lstd),
        "networks": error(solve(table, "variable-projection", seed=seed).values(table.inputs)[0]),
        "value_variance": truth.variance,
    }


def _candidate_values(table: Table, grid: CandidateGrid) -> Iterator[Tensor]:
    """Values (N,) at the log's states of every candidate, in the grid's order, fitted with exact kernels."""
    for features in grid.feature_maps:
        residual = LinearResidual(table, features)
        now = torch.cat([residual.now(rows) for rows in residual.blocks()])
        for bandwidth in grid.bandwidths:
            path = RidgePath(accumulate_forms(residual, Gaussian(bandwidth)).loss(), residual.free)
            yield from (now @ path.solve(ridge).weights for ridge in grid.ridges)
