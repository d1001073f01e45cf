"""ablation: one panel per world and group of variants; errors as shares of the variance of V."""

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
)
from koffline.experiments.results import Curves, Results, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TITLES = {
    "bandwidth": "bandwidth",
    "kernel": "kernel",
    "statistic": "weight of the diagonal",
    "batch_size": "batch size",
    "reward_scale": "reward scale",
    "offset": "output offset",
    "noise": "transition noise",
    "reward": "reward of the pole",
}
_WIDEST = 10.0  # shares of the variance; what is worse stands at the edge
_SHORT = {
    "inverse_multiquadric": "inv. multiq.",
    "residual gradient": "1 (RG)",
    "scaled_by_10_more": "scaled ×0.1",
}


def draw_ablation(results: Results, curves: Curves) -> Figure:
    """Small multiples: worlds down, groups across; against Monte Carlo at the best learning rate."""
    from matplotlib.figure import Figure

    rows = results.select(truth="monte_carlo", best_by_truth=True)
    worlds = [world for world in WORLD_NAMES if any(row.world == world for row in rows)]
    groups = list(dict.fromkeys(row.group for row in rows if row.group is not None))
    with house_style():
        figure = Figure(figsize=(2.05 * len(groups) + 0.6, 2.3 * len(worlds) + 0.7), layout="constrained")
        panels = figure.subplots(len(worlds), len(groups), squeeze=False, sharey=True)
        for line, world in zip(panels, worlds, strict=True):
            for axes, group in zip(line, groups, strict=True):
                chosen = _of(rows, world, group)
                if not chosen:
                    axes.axis("off")
                    continue
                _draw_group(axes, chosen)
                if not any(_of(rows, above, group) for above in worlds[: worlds.index(world)]):
                    axes.set_title(_TITLES.get(group, group.replace("_", " ")))
                if any(_of(rows, below, group) for below in worlds[worlds.index(world) + 1 :]):
                    axes.set_xticklabels([])  # the panels below have the same variants
            line[0].set_ylabel(f"{WORLD_NAMES[world]}\nMSE / Var V")
        panels[0, 0].set_yscale("log")
        _set_limits(panels[0, 0], rows)
        methods = list(dict.fromkeys(row.method for row in rows))
        method_legend(figure, methods, {"best constant": {"color": INK, "ls": (0, (1, 2)), "lw": 1.0}})
        return figure


def _of(rows: Sequence[Row], world: str, group: str) -> list[Row]:
    return [row for row in rows if (row.world, row.group) == (world, group)]


def _draw_group(axes: Axes, rows: Sequence[Row]) -> None:
    """Errors with intervals over the variants, one line of points per method."""
    names = list(dict.fromkeys(_variant(row) for row in rows))
    methods = [method for method in METHODS if any(row.method == method for row in rows)]
    for number, method in enumerate(methods):
        # Methods at the same variant stand side by side.
        shift = 0.22 * (number - (len(methods) - 1) / 2)
        for row in rows:
            if row.method == method:
                _draw_point(axes, row, names.index(_variant(row)) + shift)
    axes.axhline(1.0, color=INK, ls=(0, (1, 2)), lw=1.0, zorder=1)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_xticks(
        range(len(names)),
        [_SHORT.get(name, name) for name in names],
        rotation=40,
        ha="right",
        rotation_mode="anchor",
    )
    axes.tick_params(axis="x", labelsize=7.5, length=2)


def _draw_point(axes: Axes, row: Row, x: float) -> None:
    """A point with its interval; an open one at the upper edge for what diverged or lies beyond the axis."""
    colour, marker = COLOURS[row.method], MARKERS[row.method]
    share = _shares(row)
    if share is None or share[0] > _WIDEST:
        axes.plot(x, 0.97, marker, color=colour, mfc="white", ms=5, transform=axes.get_xaxis_transform())
        text = f"{row.diverged}/{row.seeds}" if share is None else f"{share[0]:.0f}"
        axes.annotate(
            text, (x, 0.97), xycoords=axes.get_xaxis_transform(), xytext=(0, -5), textcoords="offset points",
            ha="center", va="top", fontsize=6.5, color=colour,
        )  # fmt: skip
        return
    mean, low, high = share
    axes.plot(
        [x, x], [max(low, 1e-6), max(high, 1e-6)], color=colour, lw=1.6, alpha=0.45, solid_capstyle="butt"
    )
    axes.plot(x, max(mean, 1e-6), marker, color=colour, ms=4.5)


def _set_limits(axes: Axes, rows: Sequence[Row]) -> None:
    means = [share[0] for row in rows if (share := _shares(row)) is not None and share[0] > 0.0]
    low = min(means, default=0.01)
    axes.set_ylim(0.5 * low, _WIDEST)


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
