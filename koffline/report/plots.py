"""Figures that several results share, and figures of intervals.

Each function returns a figure, or a drawing that can go on any axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from koffline.errors import without_controls
from koffline.figures import drawing
from koffline.ope.results import Interval
from koffline.report.words import CALIBRATED, CERTIFIED, UNCERTAIN, promise

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#1f2933"
ACCENT = "#1769aa"
SOFT = "#9fb3c8"
WARM = "#c2410c"
STYLE: dict[str, object] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#7b8794",
    "axes.labelcolor": INK,
    "axes.titlesize": 10,
    "axes.grid": True,
    "grid.color": "#e4e7eb",
    "axes.axisbelow": True,
    "font.size": 10,
    "legend.frameon": False,
    "figure.dpi": 120,
    "svg.fonttype": "path",
    "svg.hashsalt": "koffline",
    "text.parse_math": False,  # names of users and of files are plain text
}
# Colour, dashes and opacity of an interval by what it promises.
_LINES: dict[str, tuple[str, str | tuple[float, tuple[float, float]], float]] = {
    CALIBRATED: (ACCENT, "-", 0.4),
    CERTIFIED: (WARM, (0.0, (3.0, 1.2)), 0.75),
    UNCERTAIN: (SOFT, (0.0, (3.0, 1.2)), 0.75),
}


@dataclass(frozen=True)
class Drawing:
    """What is drawn on one pair of axes, and the size of a figure of its own.

    draw: draws on the axes. width, height: in inches.
    """

    draw: Callable[[Axes], None]
    width: float = 6.0
    height: float = 3.4
    xlabel: str = ""
    ylabel: str = ""

    def on(self, axes: Axes) -> None:
        """Draw on axes, with a legend of labelled items."""
        axes.set(xlabel=self.xlabel, ylabel=self.ylabel)
        self.draw(axes)
        if axes.get_legend() is None and axes.get_legend_handles_labels()[1]:
            # the "best" place takes a time that depends on the machine
            axes.legend(loc="upper right")

    def figure(self) -> Figure:
        """A figure of it in our style. No global state is changed."""
        with drawing(STYLE):
            from matplotlib.figure import Figure

            figure = Figure(figsize=(self.width, self.height), layout="constrained")
            self.on(figure.add_subplot())
            return figure


def legend_above(axes: Axes) -> None:
    """Put the legend above the axes, where it hides nothing."""
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)


def figure_of(draw: Callable[[], Drawing]) -> Figure:
    """The figure of a drawing that is made now."""
    return draw().figure()


def plot_histogram(
    numbers: np.ndarray,
    mark: float,
    about_mark: str,
    xlabel: str,
    ylabel: str,
    **options: Any,
) -> Figure:
    """A histogram of numbers (N,) with one dashed line.

    mark, about_mark: the line's place and its label. options: of matplotlib's ``hist``.
    """

    def draw(axes: Axes) -> None:
        axes.hist(numbers, color=ACCENT, alpha=0.8, **options)
        axes.axvline(mark, color=WARM, lw=1.2, ls="--", label=about_mark)
        if len(xlabel) > 50:
            axes.xaxis.label.set_fontsize(9)
        else:
            axes.xaxis.label.set_fontsize(10)

    return Drawing(draw, xlabel=xlabel, ylabel=ylabel).figure()


def plot_residuals(residuals: np.ndarray) -> Figure:
    """Histogram of the Bellman residuals of rows, in units of the reward."""
    low, high = np.quantile(residuals, [0.002, 0.998])
    if not high > low:
        low = low - 0.5
        high = high + 0.5
    mean = float(residuals.mean())
    label = "Bellman residual of a row (reward units)"
    figure = plot_histogram(
        np.clip(residuals, low, high), mean, "mean", label, "rows", bins=60
    )
    figure.axes[0].axvline(0.0, color=INK, lw=0.8)
    return figure


def plot_coverage(ratios: np.ndarray, weights: np.ndarray) -> Figure:
    """Histogram of distances of the policy's actions to logged ones, relative to the
    log's own spacing.
    """
    return plot_histogram(
        np.minimum(ratios, 5.0),
        1.0,
        "95 % of the log's own rows are left of this",
        "distance to the nearest logged row / the log's own spacing (5 = 5 or more)",
        "sampled state-actions",
        bins=[0.1 * edge for edge in range(51)],
        weights=weights,
    )


class Line(NamedTuple):
    """A line in a figure of intervals; without a value it is an interval only.

    color: of value and interval; by default the colour of the interval's kind of
    guarantee. is_answer: False for a number on which nothing should rest, a circle.
    """

    name: str
    value: float | None
    interval: Interval | None
    color: str | None = None
    is_answer: bool = True


def draw_intervals(
    lines: Sequence[Line],
    xlabel: str,
    marks: Sequence[tuple[str, float | None]] = (),
    whole: int = 1,
) -> Drawing:
    """One line per entry, the first at the top; marks: names and numbers to compare
    with, as vertical lines.

    The axis shows all values and marks, the first ``whole`` intervals, and the other
    intervals where they fit; an arrow marks an interval that continues. Certified
    intervals are dashed and have another colour than calibrated ones.
    """
    window = _window(lines, [mark for _, mark in marks if mark is not None], whole)

    def draw(axes: Axes) -> None:
        for place, line in enumerate(lines):
            if line.interval is not None:
                _draw_interval(axes, place, line, line.interval, window)
            if line.value is not None:
                color = line.color or ACCENT
                filled = color
                if not line.is_answer:
                    filled = "none"
                axes.plot(line.value, place, "o", color=color, mfc=filled, ms=8)
        for color, (name, mark) in zip((INK, SOFT), marks, strict=False):
            if mark is not None:
                axes.axvline(
                    mark, color=color, lw=1.6, ls="--", label=f"{name} {mark:.4g}"
                )
        axes.set_yticks(
            range(len(lines)), [without_controls(line.name) for line in lines]
        )
        axes.set_ylim(len(lines) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        axes.set_xlim(window)
        promises = {
            promise(line.interval) for line in lines if line.interval and not line.color
        }
        for name, (color, dashes, alpha) in _LINES.items():
            if name in promises:
                axes.plot(
                    [],
                    [],
                    color=color,
                    lw=3.5,
                    ls=dashes,
                    alpha=alpha,
                    label=f"interval, {name}",
                )
        if axes.get_legend_handles_labels()[1]:
            legend_above(axes)

    return Drawing(draw, 7.6, 1.5 + 0.35 * len(lines), xlabel=xlabel)


def _draw_interval(
    axes: Axes, y: int, line: Line, interval: Interval, window: tuple[float, float]
) -> None:
    """Draw an interval at height ``y``; an arrow marks an end outside the window."""
    color, dashes, alpha = _LINES[promise(interval)]
    left = max(interval.low, window[0])
    right = min(interval.high, window[1])
    if left < right:
        width = 5.0
        if line.value is None:
            width = 2.5
        axes.hlines(
            y, left, right, color=line.color or color, lw=width, ls=dashes, alpha=alpha
        )
    if interval.low < window[0]:
        axes.plot(window[0], y, "<", color=INK, ms=5, clip_on=False)
    if interval.high > window[1]:
        axes.plot(window[1], y, ">", color=INK, ms=5, clip_on=False)


def _window(
    lines: Sequence[Line], marks: Sequence[float], whole: int
) -> tuple[float, float]:
    """Limits that show all values and marks, the first ``whole`` intervals and the
    narrower two thirds.
    """
    values = [line.value for line in lines if line.value is not None]
    intervals = [
        line.interval for line in lines if line.value is not None and line.interval
    ]
    by_width = sorted(intervals, key=lambda interval: interval.width)
    narrow = by_width[: (2 * len(intervals) + 2) // 3]
    shown = [*marks, *values]
    for interval in [*narrow, *intervals[:whole]]:
        shown += [interval.low, interval.high]
    if not shown:  # no line has a value
        return 0.0, 1.0
    low = min(shown)
    high = max(shown)
    margin = 0.06 * (high - low) or 0.5 * abs(high) or 1.0
    return low - margin, high + margin
