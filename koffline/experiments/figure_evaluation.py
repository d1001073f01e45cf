"""figure-puddle and figure-bench: errors against epochs, and what the two losses tell about the errors.

A method's curve is that of its best learning rate: by Monte Carlo for the solid line and the Bellman error,
by the paper's grid for the thin dashed line. (Feng et al. 2019, fig:pol_demo, fig:pol_bench)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from koffline.experiments.figure_style import (
    COLOURS,
    INK,
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
from koffline.experiments.results import Curves, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Errors of an unstable run may be a billion: the axes end at this many times the variance of V.
_WIDEST = 30.0
_MOST_POINTS = 1500
_PAPER = (0, (4, 2))
_LOSSES = (("kloss", "kernel_loss", "K-loss", "kloss"), ("l2", "l2_loss", "L2 loss", "rg"))


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
    for loss, curve, label, method in _LOSSES:
        group = curves.get(f"{world}/{method}")
        if group is None:
            continue
        x, y = np.ravel(group["mse_monte_carlo" if error == "mse" else error]), np.ravel(group[curve])
        good = np.isfinite(x) & np.isfinite(y) & (x > 0.0) & (y > 0.0)
        step = max(1, int(good.sum()) // _MOST_POINTS)
        wanted = (world, loss, error, "own")
        found = [c for c in results.correlations if (c.world, c.loss, c.error, c.networks) == wanted]
        rank = f", ρ = {found[0].spearman:.2f} [{found[0].low:.2f}, {found[0].high:.2f}]" if found else ""
        axes.plot(
            x[good][::step], y[good][::step], ".", color=COLOURS[method], ms=3.5, alpha=0.45, mew=0,
            label=label + rank, rasterized=True,
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
