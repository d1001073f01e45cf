"""Figures of an estimate. Each function draws one picture and returns the figure; nothing is shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from koffline.ope.estimate import Estimate, Evidence
from koffline.ope.interval import CALIBRATED, CERTIFIED
from koffline.report.words import promise

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, ACCENT, SOFT, WARM = "#1f2933", "#1769aa", "#9fb3c8", "#c2410c"
# Colour, dashes and opacity of an interval by what it promises.
LINES: dict[str, tuple[str, str | tuple[float, tuple[float, float]], float]] = {
    CALIBRATED: (ACCENT, "-", 0.4),
    CERTIFIED: (WARM, (0.0, (3.0, 1.2)), 0.75),
}
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


def plot_estimate(estimate: Estimate, truth: float | None = None) -> Figure:
    """The estimate with its interval beside the log's own return, the replicas, and the truth when known."""
    behaviour = estimate.diagnostics.get("behavior_return")
    replicas = estimate.evidence.replica_values if estimate.evidence is not None else np.empty(0)
    roles = estimate.evidence.replica_roles if estimate.evidence is not None else ()

    def draw(axes: Axes) -> None:
        if estimate.interval is not None:
            color, dashes, alpha = LINES[promise(estimate.interval.kind)]
            ends = estimate.interval.low, estimate.interval.high
            axes.hlines(1.0, *ends, color=color, lw=5, ls=dashes, alpha=alpha)
        axes.plot(estimate.value, 1.0, "o", color=ACCENT, ms=9, label="this policy")
        names = [f"policy\n({estimate.estimator})"]
        resampled = np.array([role == "resampled" for role in roles], dtype=bool)
        if resampled.any():
            axes.plot(replicas[resampled], np.full(resampled.sum(), 0.78), "|", color=ACCENT, ms=9)
        if behaviour is not None:
            spread = 1.96 * (estimate.diagnostics.get("behavior_return_se") or 0.0)
            axes.hlines(0.0, behaviour - spread, behaviour + spread, color=SOFT, lw=5, alpha=0.6)
            axes.plot(behaviour, 0.0, "s", color="#627d98", ms=8)
            names.append("the log's own\nreturn")
        if truth is not None:
            axes.axvline(truth, color=WARM, lw=1.6, ls="--")
            axes.annotate(f" truth {truth:.4g}", (truth, 1.32), color=WARM, va="center")
        axes.set_yticks([1.0, 0.0][: len(names)], names)
        axes.set_ylim(-0.5, 1.5)
        axes.set_xlabel(f"expected discounted return (γ = {estimate.gamma:.10g})")
        axes.grid(visible=False, axis="y")

    return make_figure(draw, width=7.0, height=2.4)


def plot_objective(evidence: Evidence) -> Figure:
    """The training objective of every replica against gradient steps."""

    def draw(axes: Axes) -> None:
        _curves(axes, evidence, evidence.objective)
        if np.nanmin(evidence.objective) > 0.0:
            axes.set_yscale("log")
        axes.set_ylabel("mini-batch objective")

    return make_figure(draw)


def plot_values(evidence: Evidence, value: float, truth: float | None = None) -> Figure:
    """The estimate that each replica would give against gradient steps, and the final one."""

    def draw(axes: Axes) -> None:
        _curves(axes, evidence, evidence.values)
        axes.axhline(value, color=ACCENT, lw=1.2, ls=":", label="final estimate")
        if truth is not None:
            axes.axhline(truth, color=WARM, lw=1.2, ls="--", label="truth")
        axes.set_ylabel("estimate of the value")
        axes.legend(frameon=False)

    return make_figure(draw)


def plot_residuals(evidence: Evidence) -> Figure:
    """Histogram of the Bellman residuals over the log's rows, in units of the reward."""

    def draw(axes: Axes) -> None:
        low, high = np.quantile(evidence.residuals, [0.002, 0.998])
        if not high > low:
            low, high = low - 0.5, high + 0.5
        axes.hist(np.clip(evidence.residuals, low, high), bins=60, color=ACCENT, alpha=0.8)
        axes.axvline(0.0, color=INK, lw=0.8)
        axes.axvline(float(evidence.residuals.mean()), color=WARM, lw=1.2, ls="--", label="mean")
        axes.set_xlabel("Bellman residual of a row (reward units)")
        axes.set_ylabel("rows")
        axes.legend(frameon=False)

    return make_figure(draw)


def plot_initial_values(evidence: Evidence, value: float) -> Figure:
    """Histogram of V over the initial states; their mean is the estimate."""

    def draw(axes: Axes) -> None:
        axes.hist(evidence.initial_values, bins=40, color=ACCENT, alpha=0.8)
        axes.axvline(value, color=WARM, lw=1.2, ls="--", label="mean = the estimate")
        axes.set_xlabel("V(s) of an initial state")
        axes.set_ylabel("initial states")
        axes.legend(frameon=False)

    return make_figure(draw)


def plot_coverage(evidence: Evidence) -> Figure:
    """How far the policy's actions are from logged ones, relative to the log's own spacing."""

    def draw(axes: Axes) -> None:
        support = np.minimum(evidence.action_support, 5.0)
        axes.hist(
            support,
            bins=[0.1 * edge for edge in range(51)],
            weights=evidence.support_weights,
            color=ACCENT,
            alpha=0.8,
        )
        axes.axvline(1.0, color=WARM, lw=1.2, ls="--", label="95 % of the log's own rows are left of this")
        axes.set_xlabel(evidence.support_label + " (5 = 5 or more)")
        axes.set_ylabel("sampled state-actions")
        axes.legend(frameon=False)

    return make_figure(draw)


def _curves(axes: Axes, evidence: Evidence, curves: np.ndarray) -> None:
    """Thin lines, one per replica: those of the whole log in front."""
    for line, role in zip(curves, evidence.replica_roles, strict=True):
        front = role == "full"
        axes.plot(
            evidence.steps, line, color=ACCENT if front else SOFT, lw=1.5 if front else 0.8, zorder=2 + front
        )
    axes.plot([], [], color=ACCENT, lw=1.5, label="trained on the whole log")
    if "resampled" in evidence.replica_roles:
        axes.plot([], [], color=SOFT, lw=0.8, label="trained on resampled episodes")
    axes.set_xlabel("gradient steps")
