"""The exact solvers on the benchmark's worlds: what rules without truth choose, beside the oracle's choice.

Every candidate of the default grid (features, bandwidth, ridge) is fitted on a log by the closed form. The
oracle takes the one with the smallest error against Monte Carlo; the rules see the log alone. "linear kernel"
is LSTD on the same features (Feng et al. 2019, cor:same_as_td), "networks" variable projection as it comes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from koffline.batches import Table
from koffline.experiments.cells import Scale
from koffline.experiments.problem import Problem, ProblemSettings, build_problem
from koffline.experiments.results import Row
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
GROUP = "solver"
VARIANTS = {
    "tournament": "LSTD tournament",
    "held_out": "held-out loss",
    "oracle": "oracle",
    "lstd_oracle": "linear kernel, oracle",
    "networks": "networks",
}
_FORMAT = 1


@dataclass(frozen=True)
class StudySettings:
    """A log of its own for every seed; the rules work on ``folds`` folds of it."""

    problem: ProblemSettings
    folds: int = 5


def study_settings(scale: Scale) -> list[StudySettings]:
    """Three logs per world (one when quick)."""
    seeds = 1 if scale.quick else 3
    return [
        StudySettings(
            replace(scale.problem(world), truth_repeats=20 if scale.quick else 100, seed=scale.seed + s)
        )
        for world in WORLDS
        for s in range(seeds)
    ]


def study_jobs(settings: Sequence[StudySettings], folder: Path) -> list[Job]:
    """One job per log."""
    return [
        Job(f"exact solvers on {s.problem.world}", write_study, (s,), study_path(s, folder), _is_study)
        for s in settings
    ]


def study_path(settings: StudySettings, folder: Path) -> Path:
    """Where the errors of a log are kept."""
    problem = settings.problem
    size = f"{problem.rows}-{problem.truth_repeats}-{settings.folds}"
    return folder / f"solvers-v{_FORMAT}-{problem.world}-{size}-seed{problem.seed}.json"


def write_study(path: Path, settings: StudySettings) -> None:
    """Measure a log and write the errors of all variants."""
    with threads(1):
        errors = measure(build_problem(settings.problem), settings.folds)
    with atomic_file(path, force=True) as temporary:
        temporary.write_text(json.dumps(errors) + "\n", encoding="utf-8")


def measure(problem: Problem, folds: int) -> dict[str, float]:
    """Mean squared errors against Monte Carlo in native units, per variant, and the variance of V."""
    scale, seed = problem.world.reward_scale, problem.settings.seed
    table = problem.log.table(problem.world, scale).to("cpu", torch.float64)
    assert table.kernel_inputs is not None
    truth = problem.monte_carlo

    def error(values: Tensor) -> float:
        return float(np.mean((values.numpy() * scale - truth.values) ** 2)) - truth.noise

    grid = default_grid(table.kernel_inputs)
    generator = torch.Generator().manual_seed(seed)
    held_out = predict_held_out(table, grid, make_folds(len(table), folds, generator), generator)
    judge = InverseMultiquadric(0.1 * median_bandwidth(table.kernel_inputs))
    errors = [error(values) for values in _candidate_values(table, grid)]
    lstd = [
        solve_lstd(table, features, ridge=ridge) for features in grid.feature_maps for ridge in grid.ridges
    ]
    return {
        "tournament": errors[int(lstd_tournament(held_out).argmin())],
        "held_out": errors[int(held_out_loss(held_out, judge, generator).argmin())],
        "oracle": min(errors),
        "lstd_oracle": min(error(fit.values(table.inputs)) for fit in lstd),
        "networks": error(solve(table, "variable-projection", seed=seed).values(table.inputs)[0]),
        "value_variance": truth.variance,
    }


def rows_of_study(found: Mapping[str, Sequence[Mapping[str, float]]]) -> Iterator[Row]:
    """One row per world and variant from the errors of its logs."""
    for world, errors in found.items():
        for key, name in VARIANTS.items():
            mean = mean_over_seeds(np.array([part[key] for part in errors]))
            yield Row(
                world=world,
                method="kloss",
                learning_rate=0.0,
                seeds=len(errors),
                truth="monte_carlo",
                **mean.named("mse"),
                bellman_error=None,
                best_by_truth=True,
                best_without_truth="oracle" not in name,
                value_variance=float(np.mean([part["value_variance"] for part in errors])),
                group=GROUP,
                variant=name,
            )


def read_study(path: Path) -> dict[str, float]:
    """What `write_study` wrote."""
    return {name: float(value) for name, value in json.loads(path.read_text(encoding="utf-8")).items()}


def _candidate_values(table: Table, grid: CandidateGrid) -> Iterator[Tensor]:
    """Values (N,) at the log's states of every candidate, in the grid's order, fitted with exact kernels."""
    for features in grid.feature_maps:
        residual = LinearResidual(table, features)
        now = torch.cat([residual.now(rows) for rows in residual.blocks()])
        for bandwidth in grid.bandwidths:
            path = RidgePath(accumulate_forms(residual, Gaussian(bandwidth)).loss(), residual.free)
            yield from (now @ path.solve(ridge).weights for ridge in grid.ridges)


def _is_study(path: Path) -> bool:
    """Whether all errors are there."""
    try:
        return set(read_study(path)) == {*VARIANTS, "value_variance"}
    except (OSError, ValueError, AttributeError, TypeError):
        return False
