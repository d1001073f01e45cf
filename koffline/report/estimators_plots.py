"""The forest plot of a table of estimates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from koffline.ope.estimators.table import EstimateTable
from koffline.ope.interval import Interval
from koffline.report.plots import ACCENT, INK, LINES, SOFT, make_figure
from koffline.report.words import promise

DEFAULT_ESTIMATOR = "kloss"

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_forest(table: EstimateTable, truth: float | None = None) -> Figure:
    """One line per estimator with its interval, one per bound; the log's own return and the truth.

    The axis holds all estimates, the default estimator's interval and what fits of the others: an arrow says
    that one goes on. Certified intervals are dashed and of another colour than calibrated ones.
    """
    rows = [row for row in table.rows if row.estimate is not None]
    bounds = [row for row in table.bounds if row.interval is not None]
    low, high = _window(table, truth)

    def draw(axes: Axes) -> None:
        for place, row in enumerate(rows):
            assert row.estimate is not None  # selected above
            if row.estimate.interval is not None:
                _draw_interval(axes, place, row.estimate.interval, (low, high), 5)
            axes.plot(row.estimate.value, place, "o", color=ACCENT, ms=7)
        for place, bound in enumerate(bounds, start=len(rows)):
            assert bound.interval is not None  # selected above
            _draw_interval(axes, place, bound.interval, (low, high), 2.5)
        behaviour = table.diagnostics.get("behavior_return")
        if behaviour is not None:
            axes.axvline(behaviour, color=SOFT, lw=1.2, ls=":", label=f"the log's own return {behaviour:.4g}")
        if truth is not None:
            axes.axvline(truth, color=INK, lw=1.6, ls="--", label=f"truth {truth:.4g}")
        labels = [row.name for row in rows] + [bound.kind for bound in bounds]
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(len(labels) - 0.4, -0.6)
        axes.set_xlim(low, high)
        axes.set_xlabel(f"expected discounted return (γ = {table.gamma:.10g})")
        axes.grid(visible=False, axis="y")
        if bounds and rows:
            axes.axhline(len(rows) - 0.5, color="#cbd2d9", lw=0.8)
        drawn = [row.estimate.interval for row in rows if row.estimate and row.estimate.interval]
        _name_promises(axes, [*drawn, *(bound.interval for bound in bounds if bound.interval)])
        if axes.get_legend_handles_labels()[1]:
            axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)

    return make_figure(draw, width=7.6, height=1.5 + 0.3 * (len(rows) + len(bounds)))


def _draw_interval(
    axes: Axes, place: int, interval: Interval, window: tuple[float, float], width: float
) -> None:
    color, dashes, alpha = LINES[promise(interval.kind)]
    left, right = max(interval.low, window[0]), min(interval.high, window[1])
    if left < right:
        axes.hlines(place, left, right, color=color, lw=width, ls=dashes, alpha=alpha)
    for end, edge, marker in ((interval.low, window[0], "<"), (interval.high, window[1], ">")):
        if (marker == "<") == (end < edge) and end != edge:
            axes.plot(edge, place, marker, color=INK, ms=5, clip_on=False)


def _name_promises(axes: Axes, intervals: list[Interval]) -> None:
    """Entries of the legend for the promises that are drawn."""
    made = {promise(interval.kind) for interval in intervals}
    for name, (color, dashes, alpha) in LINES.items():
        if name in made:
            axes.plot([], [], color=color, lw=3.5, ls=dashes, alpha=alpha, label=f"{name} interval")


def _window(table: EstimateTable, truth: float | None) -> tuple[float, float]:
    """Limits that show every estimate, the truth, the default's interval and the narrower two thirds."""
    found = [row.estimate for row in table.rows if row.estimate is not None]
    shown = [estimate.value for estimate in found]
    shown += [number for number in (truth, table.diagnostics.get("behavior_return")) if number is not None]
    intervals = sorted(
        (estimate.interval for estimate in found if estimate.interval is not None), key=lambda i: i.width
    )
    default = [row.estimate.interval for row in table.rows if row.name == DEFAULT_ESTIMATOR and row.estimate]
    always = [interval for interval in default if interval is not None]
    for interval in [*intervals[: (2 * len(intervals) + 2) // 3], *always]:
        shown += [interval.low, interval.high]
    low, high = min(shown), max(shown)
    margin = 0.06 * (high - low) or 0.5 * abs(high) or 1.0
    return low - margin, high + margin
