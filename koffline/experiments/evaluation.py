"""figure-puddle and figure-bench: six methods on the paper's worlds, three learning rates, ten seeds.

Drawn are errors against epochs, and what the two losses tell about the errors. A method has the curve of its
best learning rate: by Monte Carlo for the solid line and the Bellman error, by the paper's grid for the thin
dashed line. (Feng et al. 2019, fig:pol_demo, fig:pol_bench)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from koffline.dual_objectives import DualObjective, GradientTD2, SaddlePoint
from koffline.experiments.cells import (
    TRUTHS,
    Cell,
    CellResult,
    Scale,
    best_rate_by_truth,
    best_rate_without_truth,
    diverged_seeds,
    final_values,
)
from koffline.experiments.results import Correlation, Curves, Results, Row
from koffline.experiments.statistics import mean_over_seeds, spearman_over_seeds
from koffline.experiments.style import (
    COLOURS,
    INK,
    LOSSES,
    METHODS,
    SOFT,
    WORLD_NAMES,
    Band,
    draw_curve,
    house_style,
    log_limits,
    mark_beyond,
    mark_divergences,
    method_legend,
    tidy_log_ticks,
)
from koffline.kernels import Gaussian
from koffline.objectives import FittedIteration, KernelLoss, Objective, ResidualGradient, TemporalDifference

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


OBJECTIVES: dict[str, Objective | DualObjective] = {
    "td0": TemporalDifference(),
    "fvi": FittedIteration(),
    "rg": ResidualGradient(),
    "gtd2": GradientTD2(),
    "sbeed": SaddlePoint(),
    "kloss": KernelLoss(Gaussian(0.5)),  # (Feng et al. 2019, sec:exp_eval)
}
WORLDS = {"figure-puddle": ("puddle_world",), "figure-bench": ("cart_pole", "mountain_car")}
MINIMISERS = {"kloss": "kloss", "l2": "rg"}  # of each loss: the method that minimises it
LOSS_CURVES = {"kloss": "kernel_loss", "l2": "l2_loss"}
ERRORS = {"mse": "mse_monte_carlo", "bellman_error": "bellman_error"}

Finished = Sequence[tuple[Cell, CellResult]]
# Errors of an unstable run may be a billion: the axes end at this many times the variance of V.
_WIDEST = 30.0
_MOST_POINTS = 1500
_PAPER = (0, (4, 2))


def evaluation_cells(worlds: Sequence[str], scale: Scale) -> list[Cell]:
    """One cell per world and method, the slow ones first."""
    order = ("sbeed", "gtd2", "kloss", "rg", "td0", "fvi")
    return [
        Cell(scale.problem(world), method, OBJECTIVES[method], scale.training(world))
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
            error, residual = mean_over_seeds(errors[index]), mean_over_seeds(bellman[index])
            yield Row(
                world=cell.problem.world,
                method=cell.method,
                learning_rate=rate,
                seeds=cell.training.seeds,
                truth=truth,
                **error.named("mse"),
                **residual.named("bellman_error"),
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
        for loss, trained in MINIMISERS.items():
            for networks, methods in (("own", (trained,)), ("both", tuple(MINIMISERS.values()))):
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


def draw_puddle(results: Results, curves: Curves) -> Figure:
    """Panels a–d of the paper's figure on Puddle World."""
    with house_style():
        figure, (mse, bellman, with_mse, with_bellman) = _four_panels()
        _draw_mse(mse, results, curves, "puddle_world")
        _draw_bellman(bellman, results, curves, "puddle_world")
        _draw_scatter(with_mse, results, curves, "puddle_world", "mse")
        _draw_scatter(with_bellman, results, curves, "puddle_world", "bellman_error")
        mse.set_title("(a) MSE")
        bellman.set_title("(b) Bellman error")
        with_mse.set_title("(c) L2 / K-loss vs MSE")
        with_bellman.set_title("(d) L2 / K-loss vs Bellman error")
        _legend(figure, results, curves)
        return figure


def draw_bench(results: Results, curves: Curves) -> Figure:
    """Panels a–d of the paper's figure on CartPole and Mountain Car."""
    with house_style():
        figure, panels = _four_panels()
        for world, (mse, bellman), names in (
            ("cart_pole", panels[:2], "ab"),
            ("mountain_car", panels[2:], "cd"),
        ):
            _draw_mse(mse, results, curves, world)
            _draw_bellman(bellman, results, curves, world)
            mse.set_title(f"({names[0]}) {WORLD_NAMES[world]} MSE")
            bellman.set_title(f"({names[1]}) {WORLD_NAMES[world]} Bellman error")
        _legend(figure, results, curves)
        return figure


def best_rate(results: Results, curves: Curves, world: str, method: str, truth: str) -> int:
    """Index of the learning rate that the results call the best by a truth."""
    row = next(iter(results.select(world=world, method=method, truth=truth, best_by_truth=True)))
    return int(np.argmin(np.abs(curves[f"{world}/{method}"]["learning_rates"] - row.learning_rate)))


def _four_panels() -> tuple[Figure, np.ndarray]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15.0, 3.9), layout="constrained")
    return figure, figure.subplots(1, 4)


def _methods(curves: Curves, world: str) -> list[str]:
    return [method for method in METHODS if f"{world}/{method}" in curves]


def _draw_mse(axes: Axes, results: Results, curves: Curves, world: str) -> None:
    """Errors against both truths; the dotted level is the error of the best constant."""
    variances = [row.value_variance for row in results.select(world=world) if row.value_variance]
    most = _WIDEST * variances[0] if variances else np.inf
    _draw_errors(axes, results, curves, world, "mse_monte_carlo", most)
    for method in _methods(curves, world):
        group = curves[f"{world}/{method}"]
        values = group["mse_paper"][:, best_rate(results, curves, world, method, "paper")]
        mean = Band.over_seeds(values).mean
        whole = np.isfinite(values).all(axis=1) & (mean > 0.0)
        shown = np.where(whole, mean, np.nan)
        axes.plot(group["epochs"], shown, color=COLOURS[method], ls=_PAPER, lw=0.8, zorder=2)
        if np.isfinite(shown).any():
            low, high = axes.get_ylim()
            axes.set_ylim(min(low, 0.9 * float(np.nanmin(shown))), high)
            tidy_log_ticks(axes.yaxis)
    if variances:
        axes.axhline(variances[0], color=INK, ls=(0, (1, 2)), lw=1.0, zorder=1)
    axes.set_ylabel("$\\|V - V^\\pi\\|^2$ per state")


def _draw_bellman(axes: Axes, results: Results, curves: Curves, world: str) -> None:
    _draw_errors(axes, results, curves, world, "bellman_error", np.inf)
    axes.set_ylabel("$\\|\\mathcal{B}V - V\\|^2$ per state")


def _draw_errors(axes: Axes, results: Results, curves: Curves, world: str, name: str, most: float) -> None:
    """One curve per method at its best rate, the axis around them, crosses where seeds diverged."""
    shown = {
        method: (
            curves[f"{world}/{method}"]["epochs"],
            curves[f"{world}/{method}"][name][:, best_rate(results, curves, world, method, "monte_carlo")],
        )
        for method in _methods(curves, world)
    }
    means = [Band.over_seeds(values).mean for _, values in shown.values()]
    if not np.isfinite(most) and means:
        most = 30.0 * float(np.nanmedian(np.concatenate([mean[:1] for mean in means])))
    for method, (epochs, values) in shown.items():
        draw_curve(axes, method, epochs, values, most)
    log_limits(axes, means, most)
    for method, (epochs, values) in shown.items():
        mark_divergences(axes, method, epochs, values)
        mark_beyond(axes, method, epochs, values)
    axes.set_xlim(left=0)
    axes.set_xlabel("epoch")


def _draw_scatter(axes: Axes, results: Results, curves: Curves, world: str, error: str) -> None:
    """Each loss of the networks that its own method passed through (all rates and seeds) and their error."""
    for loss, method in MINIMISERS.items():
        group = curves.get(f"{world}/{method}")
        if group is None:
            continue
        x, y = np.ravel(group[ERRORS[error]]), np.ravel(group[LOSS_CURVES[loss]])
        good = np.isfinite(x) & np.isfinite(y) & (x > 0.0) & (y > 0.0)
        step = max(1, int(good.sum()) // _MOST_POINTS)
        wanted = (world, loss, error, "own")
        found = [c for c in results.correlations if (c.world, c.loss, c.error, c.networks) == wanted]
        rank = f", ρ = {found[0].spearman:.2f} [{found[0].low:.2f}, {found[0].high:.2f}]" if found else ""
        axes.plot(
            x[good][::step], y[good][::step], ".", color=COLOURS[method], ms=3.5, alpha=0.45, mew=0,
            label=LOSSES[loss] + rank, rasterized=True,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("MSE" if error == "mse" else "Bellman error")
    axes.set_ylabel("loss on all tuples")
    legend = axes.legend(
        loc="upper left", frameon=True, framealpha=0.85, edgecolor="none", fontsize=8, markerscale=3
    )
    for handle in legend.legend_handles:
        if handle is not None:
            handle.set_alpha(1.0)
    # Room for the legend above the points.
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.22)
    tidy_log_ticks(axes.xaxis)
    tidy_log_ticks(axes.yaxis)


def _legend(figure: Figure, results: Results, curves: Curves) -> None:
    worlds = {group.partition("/")[0] for group in curves}
    methods = [method for method in METHODS if any(f"{world}/{method}" in curves for world in worlds)]
    others = {
        "truth of the paper's grid": {"color": SOFT, "ls": _PAPER, "lw": 1.0},
        "best constant": {"color": INK, "ls": (0, (1, 2)), "lw": 1.0},
        "seeds diverged": {"color": SOFT, "marker": "X", "ls": "", "ms": 7},
    }
    method_legend(figure, methods, others)
