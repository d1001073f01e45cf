"""Common figures of results, and figures of intervals. Each function returns a figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from koffline.ope.results import CALIBRATED, CERTIFIED, Estimate, EstimateTable, Evidence, Interval
from koffline.report.words import UNCERTAIN, promise, return_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#1f2933"
ACCENT, SOFT, WARM = "#1769aa", "#9fb3c8", "#c2410c"
STYLE: dict[Any, Any] = {
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
}
DEFAULT_ESTIMATOR = "kloss"
# Colour, dashes and opacity of an interval by what it promises.
_LINES: dict[str, tuple[str, str | tuple[float, tuple[float, float]], float]] = {
    CALIBRATED: (ACCENT, "-", 0.4),
    CERTIFIED: (WARM, (0.0, (3.0, 1.2)), 0.75),
    UNCERTAIN: (SOFT, (0.0, (3.0, 1.2)), 0.75),
}


def make_figure(
    draw: Callable[[Axes], None], width: float = 6.0, height: float = 3.4, xlabel: str = "", ylabel: str = ""
) -> Figure:
    """One pair of axes in the house style, with a legend of what has a label. No global state is touched."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.add_subplot(xlabel=xlabel, ylabel=ylabel)
        draw(axes)
        if axes.get_legend() is None and axes.get_legend_handles_labels()[1]:
            axes.legend()
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
        axes.xaxis.label.set_fontsize(9 if len(xlabel) > 50 else 10)

    return make_figure(draw, xlabel=xlabel, ylabel=ylabel)


def plot_residuals(residuals: np.ndarray) -> Figure:
    """Histogram of the Bellman residuals of rows, in units of the reward."""
    low, high = np.quantile(residuals, [0.002, 0.998])
    if not high > low:
        low, high = low - 0.5, high + 0.5
    mean, label = float(residuals.mean()), "Bellman residual of a row (reward units)"
    figure = plot_histogram(np.clip(residuals, low, high), mean, "mean", label, "rows", bins=60)
    figure.axes[0].axvline(0.0, color=INK, lw=0.8)
    return figure


def plot_coverage(ratios: np.ndarray, weights: np.ndarray, label: str) -> Figure:
    """Histogram of distances of the policy's actions to logged ones, relative to the log's own spacing."""
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
        if not levels and np.nanmin(curves) > 0.0:
            axes.set_yscale("log")

    return make_figure(draw, xlabel="gradient steps", ylabel=ylabel)


def plot_estimate(estimate: Estimate, truth: float | None = None) -> Figure:
    """The estimate with its interval beside the policy that wrote the log, the replicas, and the known truth.

    Where nothing is known of that policy the mean return of its episodes is shown, and said to be cut.
    """
    uplift, evidence, found = estimate.uplift, estimate.evidence, estimate.diagnostics
    logged, spread = found.get("logged_return"), 1.96 * (found.get("logged_return_se") or 0.0)

    def draw(axes: Axes) -> None:
        if estimate.interval is not None:
            _draw_interval(axes, 1.0, estimate.interval, (-np.inf, np.inf), 5)
        axes.plot(estimate.value, 1.0, "o", color=ACCENT, ms=9)
        if evidence is not None:
            resampled = evidence.replica_values[np.array(evidence.replica_roles) == "resampled"]
            axes.plot(resampled, np.full(len(resampled), 0.78), "|", color=ACCENT, ms=9)
        names = [f"policy\n({estimate.estimator})"]
        if uplift is not None:
            if uplift.behavior_interval is not None:
                _draw_interval(axes, 0.0, uplift.behavior_interval, (-np.inf, np.inf), 5)
            axes.plot(uplift.behavior_value, 0.0, "s", color="#627d98", ms=8)
            names.append("the policy that\nwrote the log")
        elif logged is not None:
            axes.hlines(0.0, logged - spread, logged + spread, color=SOFT, lw=5, alpha=0.6)
            axes.plot(logged, 0.0, "s", color="#627d98", ms=8)
            names.append(
                "logged return,\ncut where\nlogging stopped" if found["beyond_cuts"] else "logged return"
            )
        if truth is not None:
            axes.axvline(truth, color=WARM, lw=1.6, ls="--")
            axes.annotate(f" truth {truth:.4g}", (truth, 1.32), color=WARM, va="center")
        axes.set_yticks([1.0, 0.0][: len(names)], names)
        axes.set_ylim(-0.5, 1.5)
        axes.grid(visible=False, axis="y")

    return make_figure(draw, 7.0, 2.4, xlabel=return_words(estimate))


def plot_forest(table: EstimateTable, truth: float | None = None) -> Figure:
    """One line per estimator with its interval, one per bound; the policy that wrote the log and the truth.

    The axis holds all estimates, the default estimator's interval and what fits of the others: an arrow says
    that one goes on. Certified intervals are dashed and of another colour than calibrated ones.
    """
    points = [(row.name, row.estimate.value, row.estimate.interval) for row in table.rows if row.estimate]
    bounds = [(bound.kind, None, bound.interval) for bound in table.bounds if bound.interval]
    behaviour = next(
        (row.estimate.uplift.behavior_value for row in table.rows if row.estimate and row.estimate.uplift),
        None,
    )
    window = _window(points, [number for number in (truth, behaviour) if number is not None])

    def draw(axes: Axes) -> None:
        for place, (_, value, interval) in enumerate([*points, *bounds]):
            if interval is not None:
                _draw_interval(axes, place, interval, window, 2.5 if value is None else 5)
            if value is not None:
                axes.plot(value, place, "o", color=ACCENT, ms=7)
        if behaviour is not None:
            axes.axvline(
                behaviour, color=SOFT, lw=1.2, ls=":", label=f"the policy that wrote the log {behaviour:.4g}"
            )
        if truth is not None:
            axes.axvline(truth, color=INK, lw=1.6, ls="--", label=f"truth {truth:.4g}")
        list_rows(axes, [name for name, *_ in [*points, *bounds]])
        axes.set_xlim(window)
        if bounds and points:
            axes.axhline(len(points) - 0.5, color="#cbd2d9", lw=0.8)
        made = {promise(interval) for *_, interval in [*points, *bounds] if interval}
        for name, (color, dashes, alpha) in _LINES.items():
            if name in made:
                axes.plot([], [], color=color, lw=3.5, ls=dashes, alpha=alpha, label=f"{name} interval")
        if axes.get_legend_handles_labels()[1]:
            axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)

    height = 1.5 + 0.3 * (len(points) + len(bounds))
    return make_figure(draw, 7.6, height, xlabel=return_words(table))


def _draw_interval(
    axes: Axes, place: float, interval: Interval, window: tuple[float, float], width: float
) -> None:
    color, dashes, alpha = _LINES[promise(interval)]
    left, right = max(interval.low, window[0]), min(interval.high, window[1])
    if left < right:
        axes.hlines(place, left, right, color=color, lw=width, ls=dashes, alpha=alpha)
    if interval.low < window[0]:
        axes.plot(window[0], place, "<", color=INK, ms=5, clip_on=False)
    if interval.high > window[1]:
        axes.plot(window[1], place, ">", color=INK, ms=5, clip_on=False)


def _window(points: list[tuple[str, float, Interval | None]], others: list[float]) -> tuple[float, float]:
    """Limits that show every estimate, the truth, the default's interval and the narrower two thirds."""
    intervals = sorted((interval for *_, interval in points if interval), key=lambda interval: interval.width)
    always = [interval for name, _, interval in points if name == DEFAULT_ESTIMATOR and interval]
    shown = [value for _, value, _ in points] + others
    for interval in [*intervals[: (2 * len(intervals) + 2) // 3], *always]:
        shown += [interval.low, interval.high]
    low, high = min(shown), max(shown)
    margin = 0.06 * (high - low) or 0.5 * abs(high) or 1.0
    return low - margin, high + margin
