"""Pictures of metrics: several runs in one pair of axes, or all metrics of a run in a grid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from koffline.errors import ConfigError
from koffline.runs.metrics import Metric, moving_average

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#1f2933"
# Okabe and Ito's palette, safe for colour-blind readers; further lines repeat it in other strokes.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4d4d4d")
_STROKES = ("-", "--", ":", "-.")
_TITLE_WIDTH = 32  # letters
_LEGEND_INSIDE = 6  # lines; a longer legend stands beside the axes
STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#7b8794",
    "axes.labelcolor": INK,
    "axes.titlesize": 10,
    "axes.grid": True,
    "grid.color": "#e4e7eb",
    "axes.axisbelow": True,
    "font.size": 9,
    "legend.frameon": False,
    "figure.dpi": 120,
    "svg.hashsalt": "koffline",
}


@dataclass(frozen=True)
class PlotOptions:
    """d3rlpy's options of plot. labels: one per metric, or none; limits: (low, high)."""

    window: int = 1
    show_steps: bool = False
    show_max: bool = False
    labels: tuple[str, ...] = ()
    xlim: tuple[float, float] | None = None
    ylim: tuple[float, float] | None = None
    title: str | None = None
    ylabel: str | None = None

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ConfigError(f"--window is {self.window}; give 1 (no smoothing) or more")
        for name, limits in (("xlim", self.xlim), ("ylim", self.ylim)):
            if limits and not (math.isfinite(limits[0]) and limits[0] < limits[1] < math.inf):
                raise ConfigError(f"--{name} is {limits[0]:g} {limits[1]:g}; give the lower end first")


def draw_metrics(figure: Figure, metrics: Sequence[Metric], options: PlotOptions) -> None:
    """One line per metric. Raises ConfigError for another number of labels."""
    labels = line_labels(options, [metric.path for metric in metrics])
    axes = figure.add_subplot()
    for index, (metric, label) in enumerate(zip(metrics, labels, strict=True)):
        look = {
            "color": _COLOURS[index % len(_COLOURS)],
            "ls": _STROKES[index // len(_COLOURS) % len(_STROKES)],
        }
        _draw_line(axes, metric, options, label, look)
    finite = [value for metric in metrics for value in metric.finite]
    if options.show_max and finite:
        axes.axhline(max(finite), color=INK, ls="--", lw=1.0)
    if not finite:
        _say_nothing_finite(axes)
    names = {metric.name for metric in metrics}
    axes.set_xlabel("steps" if options.show_steps else "epochs")
    axes.set_ylabel(options.ylabel or (names.pop() if len(names) == 1 else "value"))
    axes.set_title(options.title or "", loc="left")
    _finish(axes, options)
    if len(metrics) > _LEGEND_INSIDE:
        figure.legend(loc="outside right upper")
    else:
        axes.legend()


def draw_grid(figure: Figure, metrics: Sequence[Metric], title: str | None = None) -> None:
    """A panel for each metric."""
    columns = math.ceil(math.sqrt(len(metrics)))
    rows = math.ceil(len(metrics) / columns)
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes, metric in zip(panels.flat, metrics, strict=False):
        _draw_line(axes, metric, PlotOptions(), None, {"color": _COLOURS[0]})
        if metric.low is not None and metric.high is not None:
            axes.fill_between(metric.epochs, metric.low, metric.high, color=_COLOURS[0], alpha=0.15, lw=0)
        if not len(metric.finite):
            _say_nothing_finite(axes)
        axes.set_title(_wrapped(metric.name), loc="left")
        axes.set_xlabel("epochs")
        _finish(axes, PlotOptions())
    for axes in panels.flat[len(metrics) :]:
        axes.remove()
    if title:
        figure.suptitle(title)


def grid_size(count: int) -> tuple[float, float]:
    """Inches of a grid of panels."""
    columns = math.ceil(math.sqrt(count))
    return max(5.0, 3.4 * columns), max(3.4, 2.5 * math.ceil(count / columns))


def line_labels(options: PlotOptions, paths: Sequence[Path]) -> tuple[str, ...]:
    """The labels asked for, or names of the files. Raises ConfigError for another number than of files."""
    if options.labels and len(options.labels) != len(paths):
        raise ConfigError(
            f"there are {len(options.labels)} --label and {len(paths)} files; give one for each, or none"
        )
    return options.labels or short_names(paths)


def short_names(paths: Sequence[Path]) -> tuple[str, ...]:
    """The last parts of each path, two or as many as tell the paths apart."""
    deepest = max(len(path.parts) for path in paths)
    for length in range(2, deepest + 1):
        names = tuple("/".join(path.parts[-length:]) for path in paths)
        if len(set(names)) == len(set(paths)):
            return names
    return tuple(str(path) for path in paths)


def _draw_line(
    axes: Axes, metric: Metric, options: PlotOptions, label: str | None, look: dict[str, Any]
) -> None:
    x = metric.steps if options.show_steps else metric.epochs
    if label is not None and not len(metric.finite):
        label = f"{label} (no finite value)"
    y = moving_average(metric.values, options.window)
    axes.plot(x, y, label=label, lw=1.6, **look)
    # Rows without a finite value belong to the run too: the x-axis shows how far it went.
    axes.update_datalim(np.column_stack([x, np.zeros(len(x))]), updatey=False)
    alone = _without_neighbours(np.isfinite(y))  # a line through them would not be seen
    axes.plot(x[alone], y[alone], "o", ms=4, color=look["color"])


def _without_neighbours(there: np.ndarray) -> np.ndarray:
    padded = np.concatenate([[False], there, [False]])
    return there & ~padded[:-2] & ~padded[2:]


def _say_nothing_finite(axes: Axes) -> None:
    axes.annotate(
        "no finite value", (0.5, 0.5), xycoords="axes fraction", ha="center", va="center", color=INK
    )
    axes.set_yticks([])


def _finish(axes: Axes, options: PlotOptions) -> None:
    from matplotlib.ticker import MaxNLocator

    low, high = axes.dataLim.intervalx
    if low == high:
        axes.set_xlim(low - 0.5, high + 0.5)  # one epoch: its own number is the only tick
    else:
        axes.set_xlim(low - 0.03 * (high - low), high + 0.03 * (high - low))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    if options.xlim:
        axes.set_xlim(*options.xlim)
    if options.ylim:
        axes.set_ylim(*options.ylim)


def _wrapped(name: str) -> str:
    """A long name (gradients are named by their whole path) on several lines, broken behind its dots."""
    lines = [""]
    for part in name.replace(".", ".\0").split("\0"):
        if lines[-1] and len(lines[-1]) + len(part) > _TITLE_WIDTH:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)
