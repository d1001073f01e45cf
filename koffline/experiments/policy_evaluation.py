"""figure-puddle and figure-bench: six methods on the paper's worlds, three learning rates, ten seeds.

(Feng et al. 2019, fig:pol_demo, fig:pol_bench)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from koffline.experiments.cells import Cell, CellResult
from koffline.experiments.comparisons import spearman_over_seeds
from koffline.experiments.methods import METHODS
from koffline.experiments.results import Correlation, Row
from koffline.experiments.settings import Scale
from koffline.experiments.summaries import (
    TRUTHS,
    MeanInterval,
    best_rate_by_truth,
    best_rate_without_truth,
    diverged_seeds,
    final_values,
)

WORLDS = {"figure-puddle": ("puddle_world",), "figure-bench": ("cart_pole", "mountain_car")}
LOSSES = {"kloss": "kloss", "l2": "rg"}  # and the method that minimises it
LOSS_CURVES = {"kloss": "kernel_loss", "l2": "l2_loss"}
ERRORS = {"mse": "mse_monte_carlo", "bellman_error": "bellman_error"}

Finished = Sequence[tuple[Cell, CellResult]]


def evaluation_cells(worlds: Sequence[str], scale: Scale) -> list[Cell]:
    """One cell per world and method, the slow ones first."""
    order = ("sbeed", "gtd2", "kloss", "rg", "td0", "fvi")
    return [
        Cell(scale.problem(world), method, METHODS[method], scale.training(world))
        for method in order
        for world in worlds
    ]


def rows_of(
    cell: Cell, result: CellResult, group: str | None = None, variant: str | None = None
) -> Iterator[Row]:
    """One row per learning rate and truth."""
    bellman = final_values(result, "bellman_error")
    diverged = diverged_seeds(result)
    without_truth = best_rate_without_truth(result)
    for truth, curve in TRUTHS.items():
        errors, by_truth = final_values(result, curve), best_rate_by_truth(result, truth)
        for index, rate in enumerate(result.learning_rates.tolist()):
            error, residual = MeanInterval.of_seeds(errors[index]), MeanInterval.of_seeds(bellman[index])
            yield Row(
                world=cell.problem.world,
                method=cell.method,
                learning_rate=rate,
                seeds=cell.training.seeds,
                truth=truth,
                mse=error.mean,
                mse_low=error.low,
                mse_high=error.high,
                bellman_error=residual.mean,
                bellman_error_low=residual.low,
                bellman_error_high=residual.high,
                diverged=int(diverged[index].sum()),
                diverged_at=tuple(None if step < 0 else step for step in result.diverged_at[index].tolist()),
                best_by_truth=index == by_truth,
                best_without_truth=index == without_truth,
                held_out_loss=float(result.held_out[index].mean()),
                value_variance=result.value_variance,
                epochs=cell.training.epochs,
                group=group,
                variant=variant,
            )


def curves_of(finished: Finished) -> dict[str, dict[str, np.ndarray]]:
    """The group of every cell for `results.write_curves`."""
    return {
        f"{cell.problem.world}/{cell.method}": {
            "epochs": result.epochs,
            "learning_rates": result.learning_rates,
            "seeds": np.arange(cell.training.seeds),
            "diverged_at": result.diverged_at,
            "held_out_loss": result.held_out,
            "value_variance": np.asarray(result.value_variance),
            **result.curves,
        }
        for cell, result in finished
    }


def correlations_of(finished: Finished) -> list[Correlation]:
    """Each loss with each error along training, all learning rates pooled."""
    found = []
    for world in dict.fromkeys(cell.problem.world for cell, _ in finished):
        by_method = {cell.method: result for cell, result in finished if cell.problem.world == world}
        for loss, trained in LOSSES.items():
            for networks, methods in (("own", (trained,)), ("both", tuple(LOSSES.values()))):
                results = [by_method[method] for method in methods]
                for error, error_curve in ERRORS.items():
                    x, y = (_points(results, curve) for curve in (LOSS_CURVES[loss], error_curve))
                    rank = spearman_over_seeds(x, y)
                    points = int(np.isfinite(x * y).sum())
                    numbers = (rank.value, rank.low, rank.high, points)
                    found.append(Correlation(world, loss, error, networks, *numbers))
    return found


def _points(results: Sequence[CellResult], curve: str) -> np.ndarray:
    """All records of all rates and runs, (points, seeds)."""
    return np.concatenate([r.curves[curve].reshape(-1, r.curves[curve].shape[-1]) for r in results])
