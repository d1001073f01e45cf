"""Figures of intervals: dependence on the assumed norm, and the evidence of coverage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from koffline.ope.interval import percent
from koffline.ope.intervals.sensitivity import NormSensitivity
from koffline.report.plots import ACCENT, INK, SOFT, WARM, make_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {
    "kernel-calibrated": ACCENT,
    "bootstrap-pivot": "#0f766e",
    "kernel-simultaneous": "#7c3aed",
    "kernel-certified": WARM,
    "kernel-certified-iid": "#b45309",
    "dual": "#be185d",
}


def plot_norm_sensitivity(record: NormSensitivity, truth: float | None = None) -> Figure:
    """Both ends of the interval against ρ, the ρ in use and the norm of the fit marked."""

    def draw(axes: Axes) -> None:
        axes.set_xscale("log")
        axes.fill_between(record.norms, record.lows, record.highs, color=ACCENT, alpha=0.18, lw=0)
        axes.plot(record.norms, record.lows, color=ACCENT, lw=1.6)
        axes.plot(
            record.norms, record.highs, color=ACCENT, lw=1.6, label=f"{record.kind} {percent(record.level)}"
        )
        axes.axhline(record.value, color=INK, lw=1.0, label="fitted value")
        axes.axvline(record.chosen, color=WARM, lw=1.4, ls="--", label="ρ in use")
        axes.axvline(record.fitted, color=SOFT, lw=1.4, ls=":", label="norm of the fit")
        infeasible = record.norms[~np.isfinite(record.lows)]
        if len(infeasible):
            axes.axvspan(record.norms[0], infeasible[-1], color=SOFT, alpha=0.25, lw=0)
            axes.text(0.02, 0.05, "cannot explain the log", transform=axes.transAxes, fontsize=8, color=INK)
        if truth is not None:
            axes.axhline(truth, color=WARM, lw=1.4, label="truth")
        axes.set_xlim(record.norms[0], record.norms[-1])
        axes.set_xlabel("assumed norm bound ρ")
        axes.set_ylabel("value")
        axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))

    return make_figure(draw, width=7.2)


def plot_coverage_evidence(rows: Sequence[dict[str, Any]]) -> Figure:
    """Coverage (with binomial intervals) and relative width against rows, a pair of panels per problem.

    rows: records of ``scripts/bench/interval_coverage.py``.
    """
    names = list(dict.fromkeys((row["problem"], row["features"]) for row in rows))

    def draw(whole: Axes) -> None:
        from matplotlib.lines import Line2D

        figure = whole.figure
        whole.remove()
        axes = figure.subplots(len(names), 2, squeeze=False, sharex=True)
        for row in axes[1:]:
            row[1].sharey(axes[0][1])  # widths compare across problems
        for (left, right), name in zip(axes, names, strict=True):
            mine = [row for row in rows if (row["problem"], row["features"]) == name]
            _draw_coverage(left, mine)
            _draw_width(right, mine)
            left.set_title(f"{name[0]}, {name[1]} features: coverage", loc="left", fontsize=9)
            right.set_title("median width / |truth|", loc="left", fontsize=9)
        for bottom in axes[-1]:
            bottom.set_xlabel("rows")
        kinds = list(dict.fromkeys(row["kind"] for row in rows))
        handles = [Line2D([], [], color=_COLOURS.get(kind, INK), marker="o", ms=4) for kind in kinds]
        figure.legend(handles, kinds, loc="outside upper center", ncols=3, fontsize=8, frameon=False)

    return make_figure(draw, width=8.4, height=2.1 * len(names) + 0.8)


def _draw_coverage(axes: Axes, rows: list[dict[str, Any]]) -> None:
    axes.axhspan(0.93, 0.97, color=SOFT, alpha=0.3, lw=0)
    axes.axhline(0.95, color=INK, lw=0.8)
    for shift, (kind, mine) in enumerate(_by_kind(rows)):
        counts = np.array([row["rows"] for row in mine]) * 1.05**shift
        shares = np.array([row["coverage"] for row in mine])
        error = np.abs(np.array([(row["coverage_low"], row["coverage_high"]) for row in mine]).T - shares)
        axes.errorbar(counts, shares, error, fmt="o-", ms=3.5, lw=1.0, color=_COLOURS.get(kind, INK))
    axes.set_xscale("log")
    axes.set_ylim(min(0.88, *(row["coverage_low"] for row in rows)) - 0.01, 1.01)


def _draw_width(axes: Axes, rows: list[dict[str, Any]]) -> None:
    for kind, mine in _by_kind(rows):
        made = [row for row in mine if row["median_width"] is not None]
        widths = [row["median_width"] / abs(row["truth"]) for row in made]
        axes.plot([row["rows"] for row in made], widths, "o-", ms=3.5, lw=1.0, color=_COLOURS.get(kind, INK))
    axes.set_xscale("log")
    axes.set_yscale("log")


def _by_kind(rows: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    kinds = dict.fromkeys(row["kind"] for row in rows)
    return [
        (kind, sorted((row for row in rows if row["kind"] == kind), key=lambda row: row["rows"]))
        for kind in kinds
    ]
