"""A diagnosis in a terminal and as a folder with a page: figures of where the Bellman equation fails."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from koffline.ope.bellman_test.witness import Region, WitnessMap
from koffline.ope.diagnosis import Diagnosis
from koffline.ope.findings import Z_NOTE, Profile, describe_action, describe_place
from koffline.report.page import write_page
from koffline.report.plots import (
    ACCENT,
    INK,
    SOFT,
    STYLE,
    WARM,
    list_rows,
    make_figure,
    plot_coverage,
    plot_residuals,
)
from koffline.report.table import describe_log, make_console, make_table, number, print_end, print_record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKER = "diagnosis.json"
_FEWEST = 5.0  # effective rows behind a local mean that is worth a colour
_COLUMNS = 3
_NO_ROWS = "#c4c8cc"
_COLORS = (ACCENT, WARM, "#2f855a", "#6b46c1", "#b7791f", "#627d98")
_SPACING = "distance to the nearest logged row / the log's own spacing"


def write_diagnosis(
    diagnosis: Diagnosis, out: Path, command: str, force: bool = False, run: Mapping[str, Any] | None = None
) -> Path:
    """The folder of a diagnosis, see `write_page`."""
    places = [(region, _describe(region)) for region in diagnosis.regions]
    context = {"command": command, "z_note": Z_NOTE, "places": places}
    return write_page(MARKER, diagnosis, lambda: draw_diagnosis(diagnosis), out, force, run, **context)


def print_diagnosis(diagnosis: Diagnosis, page: Path | None = None) -> None:
    """Test, kernel loss, coverage, places of the largest error; findings, warnings and the report's path."""
    console, test = make_console(), diagnosis.test
    verdict = "rejected" if test.rejects else "not rejected"
    rows = [
        ("test", f"{verdict}   (p = {number(test.p_value)}, {test.method}, level {test.level:g})"),
        ("power", f"{number(test.power)} against {test.alternative_name}"),
        ("found with 80 %", f"an error of {number(test.detectable)} everywhere"),
        ("kernel loss", f"{number(test.kernel_loss)}   ({number(test.kernel_ratio)} × noise alone)"),
        ("coverage", f"{diagnosis.coverage.fraction:.0%} of the policy's actions lie near logged ones"),
        ("value", f"{number(diagnosis.value)} by this model   (γ = {test.gamma:.10g})"),
        ("log's own return", number(diagnosis.behavior_return)),
        ("rows held out", {True: "yes", False: "no", None: "unknown"}[test.held_out]),
        ("log", describe_log(diagnosis)),
        ("seed, time", f"{diagnosis.seed}, {diagnosis.seconds:.1f} s"),
    ]
    print_record(console, f"Is {test.value_function} the value function of {test.policy}?", rows)
    if diagnosis.regions:
        columns = ("state", "action", "rows", "mean residual", "z", "beyond chance")
        places = make_table("Where residuals of one sign gather", *columns)
        for region in diagnosis.regions:
            places.add_row(
                *_describe(region),
                f"{region.size:,}",
                f"{region.mean_residual:+.3g} ± {region.standard_error:.2g}",
                f"{region.z_score:+.1f}",
                "yes" if region.is_significant else "no",
            )
        console.print(places)
        console.print(Z_NOTE, soft_wrap=True, style="dim")
    for sentence in diagnosis.findings:
        console.print(sentence, soft_wrap=True)
    if diagnosis.shown:
        console.print(diagnosis.shown, soft_wrap=True, style="dim")
    print_end(console, diagnosis.warnings, page)


def _describe(region: Region) -> tuple[str, str]:
    """State and action of a place."""
    return describe_place(region.center), describe_action(region.action).removeprefix("action ") or "–"


def draw_diagnosis(diagnosis: Diagnosis) -> dict[str, Figure]:
    """All figures that this diagnosis has, by name."""
    figures, value = {}, "V" if diagnosis.test.kind == "state" else "Q"
    if diagnosis.maps:
        flat = len(diagnosis.maps[0].axes) == 1
        figures["line" if flat else "map"] = plot_lines(diagnosis) if flat else plot_maps(diagnosis)
    if diagnosis.regions:
        figures["regions"] = plot_regions(diagnosis)
    figures["by_value"] = plot_profile(diagnosis.by_value, f"value {value} of the row")
    if diagnosis.by_step is not None:
        figures["by_step"] = plot_profile(diagnosis.by_step, "time step in the episode")
    rows, coverage = diagnosis.shown_test.rows, diagnosis.coverage
    figures["residuals"] = plot_residuals(rows.residuals[rows.weights > 0.0])
    relevant = coverage.weights > 0.0
    figures["coverage"] = plot_coverage(coverage.ratios[relevant], coverage.weights[relevant], _SPACING)
    return figures


def plot_maps(diagnosis: Diagnosis) -> Figure:
    """Kernel-weighted mean residual over two-dimensional states, one panel per action, one scale for all.

    Places without rows are grey (white is zero); dots fill places that noise alone would rarely bring.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    maps = diagnosis.maps
    columns = 2 if len(maps) == 4 else min(_COLUMNS, len(maps))
    rows = -(-len(maps) // columns)
    seen = [one.values.effective_rows >= _FEWEST for one in maps]
    # What 98 % of the places with rows stay below: one corner must not hide all.
    sizes = [np.abs(one.values.mean[some]) for one, some in zip(maps, seen, strict=True) if some.any()]
    limit = max([float(np.quantile(size, 0.98)) for size in sizes] + [1e-12])
    threshold = diagnosis.regions[0].threshold if diagnosis.regions else np.inf
    with mpl.rc_context({**STYLE, "hatch.color": "#52606d", "hatch.linewidth": 0.3}):
        figure = Figure(figsize=(2.2 + 3.1 * columns, 0.7 + 2.9 * rows), layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False).ravel()
        for panel in panels[len(maps) :]:
            panel.set_visible(False)
        for panel, one, some in zip(panels, maps, seen, strict=False):
            mesh = _draw_map(panel, one, some, limit, threshold)
        bar = figure.colorbar(mesh, ax=list(panels[: len(maps)]), shrink=0.9)
        bar.set_label(f"{_residual(diagnosis)} (reward units)")
    return figure


def _draw_map(axes: Any, one: WitnessMap, seen: np.ndarray, limit: float, threshold: float) -> Any:
    colors = np.ma.masked_where(~seen, one.values.mean)
    mesh = axes.pcolormesh(
        *one.axes, colors, cmap="RdBu_r", vmin=-limit, vmax=limit, shading="nearest", rasterized=True
    )
    scores = np.where(seen, np.abs(one.values.z_scores), 0.0)
    if (scores > threshold).any():
        ends = [threshold, scores.max() + 1.0]
        axes.contourf(*one.axes, scores, levels=ends, colors="none", hatches=["..."], zorder=3)
        axes.contour(*one.axes, scores, levels=[threshold], colors=INK, linewidths=1.2)
    axes.set_facecolor(_NO_ROWS)
    axes.set_title(describe_action(one.action) or "all actions", fontsize=10)
    axes.set_xlabel(f"state {one.columns[0]}")
    axes.set_ylabel(f"state {one.columns[1]}")
    axes.grid(visible=False)
    return mesh


def plot_lines(diagnosis: Diagnosis) -> Figure:
    """The same over one-dimensional states, with twice its standard error."""

    def draw(axes: Axes) -> None:
        axes.axhline(0.0, color=INK, lw=0.8)
        for one, color in zip(diagnosis.maps, _COLORS, strict=False):
            (x,), seen = one.axes, one.values.effective_rows >= _FEWEST
            mean, error = (np.where(seen, part, np.nan) for part in one.values[1:3])
            axes.plot(x, mean, color=color, lw=1.6, label=describe_action(one.action) or "all rows")
            axes.fill_between(x, mean - 2 * error, mean + 2 * error, color=color, alpha=0.15, lw=0)
        axes.set_xlabel("state")
        axes.set_ylabel(_residual(diagnosis))
        axes.legend(frameon=False)

    return make_figure(draw, width=7.0)


def plot_regions(diagnosis: Diagnosis) -> Figure:
    """Mean residual ± 2 standard errors of the named places, the strongest on top; pale: may be chance."""
    regions = diagnosis.regions
    actions = [describe_action(region.action) for region in regions]
    labels = [
        f"{describe_place(region.center, most=4)}\n{action}{', ' if action else ''}{region.size:,} rows"
        for region, action in zip(regions, actions, strict=True)
    ]

    def draw(axes: Axes) -> None:
        axes.axvline(0.0, color=INK, lw=0.8)
        for place, region in enumerate(regions):
            color = WARM if region.is_significant else SOFT
            mean, error = region.mean_residual, 2.0 * region.standard_error
            axes.barh(place, mean, height=0.6, color=color, alpha=0.75)
            axes.hlines(place, mean - error, mean + error, color=INK, lw=1.2)
        list_rows(axes, labels, fontsize=8.5)
        axes.set_xlabel(f"{_residual(diagnosis)} (reward units)")

    return make_figure(draw, width=7.6, height=1.2 + 0.55 * len(regions))


def plot_profile(profile: Profile, label: str) -> Figure:
    """Mean residual ± 2 standard errors in bins; the band holds 80 % of the residuals."""

    def draw(axes: Axes) -> None:
        axes.axhline(0.0, color=INK, lw=0.8)
        center, error = profile.center, 2.0 * profile.standard_error
        if len(center) > 1:
            band: dict[str, Any] = {"color": SOFT, "alpha": 0.3, "lw": 0, "label": "80 % of rows"}
            axes.fill_between(center, profile.low, profile.high, **band)
        line: dict[str, Any] = {"fmt": "o-", "color": ACCENT, "ms": 4, "lw": 1.2, "capsize": 2}
        axes.errorbar(center, profile.mean, yerr=error, **line, label="mean ± 2 standard errors")
        axes.set_xlabel(label)
        axes.set_ylabel("Bellman residual")
        axes.legend(frameon=False)

    return make_figure(draw)


def _residual(diagnosis: Diagnosis) -> str:
    """What places show: residuals over the test's window."""
    window = diagnosis.test.window
    return "mean Bellman residual" + (f" over {window} steps" if window > 1 else "")
