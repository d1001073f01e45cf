"""Policy evaluation as in figure-puddle and figure-bench: six methods on the paper's worlds, three learning
rates, ten seeds.

The figures show errors by epoch, and how the two losses relate to the errors. Each
method is drawn at its best learning rate: chosen by Monte Carlo for solid lines and the
Bellman error, by the paper's grid for thin dashed lines.
(Feng et al. 2019, fig:pol_demo, fig:pol_bench)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from koffline import objectives
from koffline.experiments import style
from koffline.experiments.cells import TRUTHS, Cell, CellResult, Finished, Run, Scale
from koffline.experiments.result_files import (
    Collected,
    Correlation,
    Curves,
    ErrorRow,
    Fields,
    Results,
    grouped,
    steps_or_none,
)
from koffline.experiments.seed_statistics import mean_over_seeds, spearman_over_seeds
from koffline.kernels import Gaussian

OBJECTIVES: dict[str, objectives.Objective] = {
    "td0": objectives.TemporalDifference(),
    "fvi": objectives.FittedIteration(),
    "rg": objectives.ResidualGradient(),
    "gtd2": objectives.GradientTD2(),
    "sbeed": objectives.SaddlePoint(),
    "kloss": objectives.KernelLoss(Gaussian(0.5)),  # (Feng et al. 2019, sec:exp_eval)
}
WORLDS = {
    "figure-puddle": ("puddle_world",),
    "figure-bench": ("cart_pole", "gymnasium_pole", "mountain_car"),
}
# Name and curve; for a loss also the method that minimises it.
LOSSES = {
    "kloss": ("K-loss", "kernel_loss", "kloss"),
    "l2": ("L2 loss", "l2_loss", "rg"),
}
ERRORS = {
    "mse": ("MSE", "mse_monte_carlo"),
    "bellman_error": ("Bellman error", "bellman_error"),
}
_SLOW_FIRST = ("sbeed", "gtd2", "kloss", "rg", "td0", "fvi")
# Errors of an unstable run may be a billion: the axes end at this many times the
# variance of V.
_WIDEST = 30.0
_MOST_POINTS = 1500
_PAPER = (0, (4, 2))
_HEADER = (
    "method | best rate | MSE, Monte Carlo | rate without truth | its MSE | best rate,"
    " paper's grid | MSE, paper's grid | Bellman error | diverged at best rate |"
    " diverged at any rate"
)


def collect_evaluation(run: Run) -> Collected:
    """The parts of the results, and the curves."""
    finished = run.train(evaluation_cells(WORLDS[run.name], run.scale))
    return parts_of(finished), {
        f"{cell.problem.world}/{cell.method}": {
            "epochs": result.epochs,
            "learning_rates": result.learning_rates,
            "seeds": np.arange(cell.training.seeds),
            "diverged_at": result.diverged_at,
            "held_out_loss": result.held_out,
            "value_variance": np.asarray(result.value_variance),
            **result.curve,
        }
        for cell, result in finished
    }


def evaluation_cells(worlds: Sequence[str], scale: Scale) -> list[Cell]:
    """One cell per world and method, slow methods first."""
    return [
        Cell(scale.problem(world), method, OBJECTIVES[method], scale.training(world))
        for method, world in itertools.product(_SLOW_FIRST, worlds)
    ]


def parts_of(finished: Finished) -> Fields:
    """Rows, correlations, and the squared difference between the paper's truth and
    Monte Carlo.
    """
    truths = {
        cell.problem.world: {
            "value_variance": result.value_variance,
            "paper_against_monte_carlo_mse": result.paper_noise,
        }
        for cell, result in finished
    }
    return {
        "rows": tuple(
            row for cell, result in finished for row in rows_of(cell, result)
        ),
        "correlations": tuple(correlations_of(finished)),
        "extra": {"truths": truths},
    }


def rows_of(cell: Cell, result: CellResult, **ablated: Any) -> Iterator[ErrorRow]:
    """One row per learning rate and truth. ablated: group and variant in an
    ablation.
    """
    bellman = result.final("bellman_error")
    diverged = result.diverged()
    blind = result.best_without_truth()
    for truth, curve in TRUTHS.items():
        errors = result.final(curve)
        by_truth = result.best_by_truth(truth)
        for index, rate in enumerate(result.learning_rates.tolist()):
            yield ErrorRow(
                world=cell.problem.world,
                method=cell.method,
                learning_rate=rate,
                seeds=cell.training.seeds,
                truth=truth,
                mse=mean_over_seeds(errors[index]),
                bellman_error=mean_over_seeds(bellman[index]),
                diverged=int(diverged[index].sum()),
                diverged_at=steps_or_none(result.diverged_at[index]),
                best_by_truth=index == by_truth,
                best_without_truth=index == blind,
                held_out_loss=float(result.held_out[index].mean()),
                value_variance=result.value_variance,
                epochs=cell.training.epochs,
                **ablated,
            )


def correlations_of(finished: Finished) -> Iterator[Correlation]:
    """Rank correlations of each loss with each error during training, pooled over
    learning rates.
    """
    for world in dict.fromkeys(cell.problem.world for cell, _ in finished):
        by_method = {
            cell.method: result.curve
            for cell, result in finished
            if cell.problem.world == world
        }

        def points(
            methods: Sequence[str],
            curve: str,
            by_method: Curves = by_method,
        ) -> np.ndarray:
            """All records of all rates and runs, (points, seeds)."""
            curves = [by_method[method][curve] for method in methods]
            return np.concatenate(
                [curve.reshape(-1, curve.shape[-1]) for curve in curves]
            )

        both = tuple(method for *_, method in LOSSES.values())
        for (loss, (_, curve, trained_by)), kind in itertools.product(
            LOSSES.items(), ("own", "both")
        ):
            methods = both
            if kind == "own":
                methods = (trained_by,)
            for error, (_, error_curve) in ERRORS.items():
                x = points(methods, curve)
                y = points(methods, error_curve)
                rank = spearman_over_seeds(x, y)
                count = int(np.isfinite(x * y).sum())
                yield Correlation(world, loss, error, kind, rank, count)


def draw_row(
    panels: Sequence[Axes], results: Results, curves: Curves, world: str
) -> None:
    """Panels a–d of the paper's figure on Puddle World, in four axes.

    world: as rows and curves name it.
    """
    mse, bellman, left, right = panels
    _draw_mse(mse, results, curves, world, "(a)")
    _draw_bellman(bellman, results, curves, world, "(b)")
    for axes, letter, error in ((left, "c", "mse"), (right, "d", "bellman_error")):
        _draw_scatter(axes, results, curves, world, error)
        axes.set_title(f"({letter}) L2 / K-loss vs {ERRORS[error][0]}")


def draw_bench(results: Results, curves: Curves) -> Figure:
    """Panels a–d of the paper's figure (CartPole, Mountain Car), with Gymnasium's pole
    between them.
    """
    figure = Figure(figsize=(13.0, 7.2), layout="constrained")
    worlds = WORLDS["figure-bench"]
    panels = figure.subplots(2, len(worlds), squeeze=False).T
    for world, pair, letters in zip(worlds, panels, ("ab", "ef", "cd"), strict=False):
        name = style.WORLD_NAMES[world]
        _draw_mse(pair[0], results, curves, world, f"({letters[0]}) {name}")
        _draw_bellman(pair[1], results, curves, world, f"({letters[1]}) {name}")
    draw_legend(figure, curves)
    return figure


def _at_best(
    results: Results, curves: Curves, world: str, curve: str, truth: str = "monte_carlo"
) -> style.Series:
    """Epochs (T,) and the curve (T, S) of each method, at its best learning rate by the
    given truth. S: seeds, or logs with the mean of their networks.
    """
    series = {}
    for method in style.METHODS:
        group = curves.get(f"{world}/{method}")
        if group:
            row = results.select(
                world=world, method=method, truth=truth, best_by_truth=True
            )[0]
            rate = np.argmin(np.abs(group["learning_rates"] - row.learning_rate))
            values = group[curve][:, rate]
            if values.ndim > len(("time", "seed")):  # networks of several logs
                values = values.mean(axis=-1)
            series[method] = (group["epochs"], values)
    return series


def _draw_mse(
    axes: Axes, results: Results, curves: Curves, world: str, title: str
) -> None:
    """Draw the errors against both truths; dotted line: error of the best constant."""
    variance = results.extra["truths"][world]["value_variance"]
    style.draw_errors(
        axes, _at_best(results, curves, world, "mse_monte_carlo"), _WIDEST * variance
    )
    for method, (epochs, values) in _at_best(
        results, curves, world, "mse_paper", "paper"
    ).items():
        mean = mean_over_seeds(values).value
        shown = np.where(mean > 0.0, mean, np.nan)
        axes.plot(
            epochs, shown, color=style.COLOURS[method], ls=_PAPER, lw=0.8, zorder=2
        )
        axes.set_ylim(
            min(axes.get_ylim()[0], 0.9 * float(np.nanmin(shown, initial=np.inf)))
        )
    axes.axhline(variance, color=style.INK, **style.DOTTED, zorder=1)
    axes.set(
        title=f"{title} MSE", xlabel="epoch", ylabel="$\\|V - V^\\pi\\|^2$ per state"
    )


def _draw_bellman(
    axes: Axes, results: Results, curves: Curves, world: str, title: str
) -> None:
    """Draw the Bellman errors by epoch; the axis ends at a multiple of their start."""
    shown = _at_best(results, curves, world, "bellman_error")
    starts = [mean_over_seeds(values[:1]).value for _, values in shown.values()]
    style.draw_errors(axes, shown, _WIDEST * float(np.nanmedian(starts)))
    axes.set(
        title=f"{title} Bellman error",
        xlabel="epoch",
        ylabel="$\\|\\mathcal{B}V - V\\|^2$ per state",
    )


def _draw_scatter(
    axes: Axes, results: Results, curves: Curves, world: str, error: str
) -> None:
    """Scatter each loss against the error, for all networks of the method that
    minimises this loss.
    """
    ranks = {(c.world, c.loss, c.error, c.networks): c for c in results.correlations}
    name, error_curve = ERRORS[error]
    for loss, (loss_name, curve, method) in LOSSES.items():
        group = curves.get(f"{world}/{method}")
        if group:
            x = np.ravel(group[error_curve])
            y = np.ravel(group[curve])
            good = np.isfinite(x) & np.isfinite(y) & (x > 0.0) & (y > 0.0)
            step = max(1, int(good.sum()) // _MOST_POINTS)
            rank = ranks[world, loss, error, "own"].spearman
            label = (
                f"{loss_name}, ρ = {rank.value:.2f} [{rank.low:.2f}, {rank.high:.2f}]"
            )
            look: Any = {
                "color": style.COLOURS[method],
                "ms": 3.5,
                "alpha": 0.45,
                "mew": 0,
            }
            axes.plot(
                x[good][::step],
                y[good][::step],
                ".",
                **look,
                label=label,
                rasterized=True,
            )
    axes.set(xscale="log", yscale="log", xlabel=name, ylabel="loss on all tuples")
    low, high = axes.get_ylim()
    # room for the legend above the points
    axes.set_ylim(low, high * (high / low) ** 0.22)
    style.tidy_log_ticks(axes.xaxis)
    axes.legend(
        loc="upper left", frameon=True, edgecolor="none", fontsize=8, markerscale=3
    )


def draw_legend(figure: Figure, curves: Curves) -> None:
    """One legend for all panels of errors."""
    methods = [group.partition("/")[2] for group in curves]
    lines = {
        "truth of the paper's grid": {"color": style.SOFT, "ls": _PAPER, "lw": 1.0},
        "best constant": {"color": style.INK, **style.DOTTED},
        "seeds diverged": {"color": style.SOFT, "marker": "X", "ls": "", "ms": 7},
    }
    style.method_legend(figure, methods, lines)


def evaluation_tables(results: Results) -> Iterator[str]:
    """Errors of the methods against both truths, at the learning rates chosen by both
    rules; correlations.
    """
    for world, rows in grouped(results.rows, "world").items():
        if world == "chain":  # rows of figure-toy, among the claims
            continue
        truth = results.extra["truths"][world]
        variance = truth["value_variance"]
        gap = truth["paper_against_monte_carlo_mse"]
        note = (
            "Mean squares over the training states in native reward units, mean and 95"
            " % interval over seeds. The best constant has MSE"
            f" {style.number_text(variance)} (the variance of V). The paper's grid"
            f" itself is off by MSE {style.number_text(gap)} against Monte Carlo."
        )
        by_method = grouped(rows, "method")
        lines = [
            _method_cells(m, by_method[m]) for m in style.METHODS if m in by_method
        ]
        yield style.section(f"## {style.place_words(world)}", note, _HEADER, lines)
    networks = {"own": "the method trained by it", "both": "K-loss and RG"}
    lines = []
    for correlation in results.correlations:
        lines.append(
            [
                style.place_words(correlation.world),
                LOSSES[correlation.loss][0],
                ERRORS[correlation.error][0],
                networks[correlation.networks],
                style.interval_text(correlation.spearman),
                str(correlation.points),
            ]
        )
    header = "world | loss | with | networks of | Spearman | points"
    yield style.section("## What the losses tell about the errors", "", header, lines)


def _method_cells(method: str, rows: Sequence[ErrorRow]) -> list[str]:
    by_truth = grouped(rows, "truth")
    mine = by_truth["monte_carlo"]
    best = next(row for row in mine if row.best_by_truth)
    blind = next(row for row in mine if row.best_without_truth)
    by_grid = next(row for row in by_truth["paper"] if row.best_by_truth)
    cells = [style.LABELS[method]]
    for row in (best, blind, by_grid):
        cells += [f"{row.learning_rate:g}", style.interval_text(row.mse)]
    cells += [style.interval_text(best.bellman_error), f"{best.diverged}/{best.seeds}"]
    return [
        *cells,
        f"{sum(row.diverged for row in mine)}/{sum(row.seeds for row in mine)}",
    ]
