"""Figures of results: the house style, and what several of them show. Each function returns a figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from koffline.ope.estimate import Evidence

INK, ACCENT, SOFT, WARM = "#1f2933", "#1769aa", "#9fb3c8", "#c2410c"
STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#7b8794",
    "axes.labelcolor": INK,
    "axes.grid": True,
    "grid.color": "#e4e7eb",
    "axes.axisbelow": True,
    "font.size": 10,
    "figure.dpi": 120,
    "svg.hashsalt": "koffline",
    "svg.fonttype": "path",
}


def make_figure(draw: Callable[[Axes], None], width: float = 6.0, height: float = 3.4) -> Figure:
    """One pair of axes in the house style; no global state of matplotlib is touched."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure.add_subplot())
        return figure


def list_rows(axes: Axes, labels: Sequence[str], **font: Any) -> None:
    """One labelled row per entry, the first on top."""
    axes.set_yticks(range(len(labels)), labels, **font)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")


def plot_histogram(
    numbers: np.ndarray, mark: float, about_mark: str, xlabel: str, ylabel: str, **options: Any
) -> Figure:
    """A histogram with one dashed line. options: of matplotlib's ``hist``."""

    def draw(axes: Axes) -> None:
        axes.hist(numbers, color=ACCENT, alpha=0.8, **options)
        axes.axvline(mark, color=WARM, lw=1.2, ls="--", label=about_mark)
        axes.set_xlabel(xlabel, fontsize=9 if len(xlabel) > 50 else 10)
        axes.set_ylabel(ylabel)
        axes.legend(frameon=False)

    return make_figure(draw)


def plot_residuals(residuals: np.ndarray) -> Figure:
    """Histogram of the Bellman residuals of rows, in units of the reward."""
    low, high = np.quantile(residuals, [0.002, 0.998])
    if not high > low:
        low, high = low - 0.5, high + 0.5
    mean, label = float(residuals.mean()), "Bellman residual of a row (reward units)"
    return plot_histogram(np.clip(residuals, low, high), mean, "mean", label, "rows", bins=60)


def plot_coverage(ratios: np.ndarray, weights: np.ndarray, label: str) -> Figure:
    """How far the policy's actions are from logged ones, relative to the log's own spacing."""
    return plot_histogram(
        np.minimum(ratios, 5.0),
        1.0,
        "95 % of the log's own rows are left of this",
        f"{label} (5 = 5 or more)",
        "sampled state-actions",
        bins=[0.1 * edge for edge in range(51)],
        weights=weights,
    )


def plot_curves(
    evidence: Evidence, curves: np.ndarray, ylabel: str, levels: Sequence[tuple[str, float, str]] = ()
) -> Figure:
    """A line per replica against gradient steps, those of the whole log in front.

    levels: label, height and colour of lines across; without any, positive curves are drawn on a log scale.
    """

    def draw(axes: Axes) -> None:
        for line, role in zip(curves, evidence.replica_roles, strict=True):
            front = role == "full"
            color, width = (ACCENT, 1.5) if front else (SOFT, 0.8)
            axes.plot(evidence.steps, line, color=color, lw=width, zorder=2 + front)
        axes.plot([], [], color=ACCENT, lw=1.5, label="trained on the whole log")
        if "resampled" in evidence.replica_roles:
            axes.plot([], [], color=SOFT, lw=0.8, label="trained on resampled episodes")
        for label, level, color in levels:
            axes.axhline(level, color=color, lw=1.2, ls="--", label=label)
        axes.set_xlabel("gradient steps")
        axes.set_ylabel(ylabel)
        if levels:
            axes.legend(frameon=False)
        elif np.nanmin(curves) > 0.0:
            axes.set_yscale("log")

    return make_figure(draw)
