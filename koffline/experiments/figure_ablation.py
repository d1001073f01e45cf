"""ablation: one panel per group of variants and world; errors as shares of the variance of V."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from koffline.experiments.figure_style import (
    COLOURS,
    INK,
    MARKERS,
    METHODS,
    WORLD_NAMES,
    house_style,
    method_legend,
    tidy_log_ticks,
)
from koffline.experiments.results import Curves, Results, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TITLES = {
    "statistic": "weight of the diagonal",
    "offset": "output offset",
    "gtd2_rate": "second learning rate of GTD2",
    "noise": "transition noise",
    "reward": "reward of the pole",
    "solver": "exact solver, chosen by",
}
_NAMES = {
    "residual gradient": "1 (residual gradient)",
    "scaled_by_10_more": "scaled by 10 more",
    "inverse_multiquadric": "inverse multiquadric",
}
_WIDEST = 10.0  # shares of the variance; what is worse stands at the edge


def draw_ablation(results: Results, curves: Curves) -> Figure:
    """Small multiples: groups down, worlds across; against Monte Carlo at the best learning rate."""
    from matplotlib.figure import Figure

    rows = results.select(truth="monte_carlo", best_by_truth=True)
    worlds = [world for world in WORLD_NAMES if any(row.world == world for row in rows)]
    groups = {group: _variants(rows, group) for group in dict.fromkeys(row.group for row in rows)}
    lines = [_height(rows, group, len(names)) for group, names in groups.items()]
    with house_style():
        figure = Figure(figsize=(3.3 * len(worlds) + 1.6, 0.185 * sum(lines) + 1.0), layout="constrained")
        panels = figure.subplots(
            len(groups), len(worlds), squeeze=False, sharex="col", sharey="row", height_ratios=lines
        )
        for line, (group, names) in zip(panels, groups.items(), strict=True):
            for axes, world in zip(line, worlds, strict=True):
                chosen = [row for row in rows if (row.world, row.group) == (world, group)]
                _draw_group(axes, chosen, names)
            line[0].set_title(_TITLES.get(str(group), str(group).replace("_", " ")), fontsize=9)
            line[0].set_yticks(range(len(names)), [_NAMES.get(name, name) for name in names], fontsize=8)
            line[0].set_ylim(len(names) - 0.4, -0.6)
        for column, world in zip(panels.T, worlds, strict=True):
            column[0].set_title(WORLD_NAMES[world], loc="center", fontweight="bold")
            axes = column[-1]
            _set_limits(axes, [row for row in rows if row.world == world])
            axes.set_xlabel("MSE / Var V")
        methods = list(dict.fromkeys(row.method for row in rows))
        method_legend(figure, methods, {"best constant": {"color": INK, "ls": (0, (1, 2)), "lw": 1.0}})
        return figure


def _variants(rows: Sequence[Row], group: str | None) -> list[str]:
    return list(dict.fromkeys(_variant(row) for row in rows if row.group == group))


def _height(rows: Sequence[Row], group: str | None, variants: int) -> float:
    """Lines of text that a group needs, its title included."""
    methods = {row.method for row in rows if row.group == group}
    return 1.2 + variants * (1.0 + 0.35 * (len(methods) - 1))


def _draw_group(axes: Axes, rows: Sequence[Row], names: Sequence[str]) -> None:
    """Errors with intervals, one line per variant; a panel without rows stays empty."""
    if not rows:
        axes.grid(visible=False)
        axes.tick_params(which="both", left=False, bottom=False)
        axes.spines[["left", "bottom"]].set_visible(False)
        return
    methods = [method for method in METHODS if any(row.method == method for row in rows)]
    axes.axvline(1.0, color=INK, ls=(0, (1, 2)), lw=1.0, zorder=1)
    for row in rows:
        # Methods at the same variant stand one below the other.
        shift = 0.24 * (methods.index(row.method) - (len(methods) - 1) / 2)
        _draw_point(axes, row, names.index(_variant(row)) + shift)


def _draw_point(axes: Axes, row: Row, y: float) -> None:
    """A point with its interval; an open one at the right edge for what diverged or lies beyond the axis."""
    colour, marker = COLOURS[row.method], MARKERS[row.method]
    share = _shares(row)
    if share is None or share[0] > _WIDEST:
        text = f"{row.diverged}/{row.seeds} diverged" if share is None else f"{share[0]:.0f}"
        place = axes.get_yaxis_transform()
        axes.plot(0.97, y, marker, color=colour, mfc="white", ms=5, transform=place)
        axes.annotate(
            text, (0.97, y), xycoords=place, xytext=(-6, 0), textcoords="offset points",
            ha="right", va="center", fontsize=7, color=colour,
        )  # fmt: skip
        return
    mean, low, high = (max(end, 1e-6) for end in share)  # intervals may reach below zero
    axes.plot([low, high], [y, y], color=colour, lw=1.6, alpha=0.45, solid_capstyle="butt")
    axes.plot(mean, y, marker, color=colour, ms=4.5)


def _set_limits(axes: Axes, rows: Sequence[Row]) -> None:
    """A logarithmic axis per world, from half the smallest error."""
    means = [share[0] for row in rows if (share := _shares(row)) is not None and share[0] > 0.0]
    axes.set_xscale("log")
    axes.set_xlim(0.5 * min(means, default=0.1), _WIDEST)
    tidy_log_ticks(axes.xaxis)


def _shares(row: Row) -> tuple[float, float, float] | None:
    """Error, lower and upper end as shares of the variance of V; None without a finite error."""
    if row.mse is None or not np.isfinite(row.mse) or not row.value_variance:
        return None
    low = row.mse if row.mse_low is None or not np.isfinite(row.mse_low) else row.mse_low
    high = row.mse if row.mse_high is None or not np.isfinite(row.mse_high) else row.mse_high
    return row.mse / row.value_variance, low / row.value_variance, high / row.value_variance


def _variant(row: Row) -> str:
    """The name of the variant without the method that groups of several methods put behind it."""
    return (row.variant or "").removesuffix(f" {row.method}")
