"""A diagnosis on a terminal and as a folder with a page; figures of where the Bellman
equation fails.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from koffline.errors import printable
from koffline.figures import drawing
from koffline.ope.bellman_test.witness import Region, ResidualProfile
from koffline.ope.diagnosis import Diagnosis, describe_action, describe_place
from koffline.report import Context, Report, plots, print_table
from koffline.report.plots import ACCENT, INK, SOFT
from koffline.report.words import describe_log, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console

_Z_NOTE = (
    "z is not mean residual / ±: it belongs to the kernel-weighted mean at the place,"
    " in which near rows count more; the mean residual is the average over the rows"
    " within one bandwidth (of that action, where actions are discrete)."
)
_FEWEST = 5.0  # least effective rows of a local mean that is coloured
_COLUMNS = 3
_NO_ROWS = "#c4c8cc"


def report_diagnosis(diagnosis: Diagnosis) -> Report:
    """The report of a diagnosis."""
    rows = diagnosis.shown_test.rows
    coverage = diagnosis.coverage
    relevant = coverage.weights > 0.0
    figures = {}
    if diagnosis.maps:
        figures["map"] = partial(_plot_maps, diagnosis)
    drawing = partial(_draw_profile, diagnosis.by_value, "value Q of the row")
    figures["by_value"] = partial(plots.figure_of, drawing)
    if diagnosis.by_step is not None:
        by_step = partial(_draw_profile, diagnosis.by_step, "time step in the episode")
        figures["by_step"] = partial(plots.figure_of, by_step)
    figures["residuals"] = partial(
        plots.plot_residuals, rows.residuals[rows.weights > 0.0]
    )
    figures["coverage"] = partial(
        plots.plot_coverage, coverage.ratios[relevant], coverage.weights[relevant]
    )
    note = _Z_NOTE
    features = rows.transitions.metadata.features
    if features:
        actions = [f"action {i}: {name}" for i, name in enumerate(features.actions)]
        note = printable(f"state: {', '.join((*features.names, *actions))}. ") + note
    context = {
        "z_note": note,
        "facts": _facts(diagnosis),
        "columns": ("state", "action", "rows", "mean residual", "z", "beyond chance"),
        "places": [_cells(region) for region in diagnosis.regions],
    }
    return Report(
        marker="diagnosis.json",
        result=diagnosis,
        figures=figures,
        show=partial(_show, diagnosis, context),
        top_figure="by_value",
        drawing=drawing,
        context=context,
    )


def _facts(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """Names and texts of test, kernel loss, coverage and value."""
    test = diagnosis.test
    verdict = "not rejected"
    if test.rejects:
        verdict = "rejected"
    held_out = "unknown (--trained-on LOG tells)"
    if test.held_out is not None:
        held_out = number(test.held_out)
    return [
        ("test", f"{verdict}   (p = {number(test.p_value)}, level {test.level:g})"),
        (
            "power",
            (
                f"{number(test.power)} against an error of {test.alternative:.3g}"
                " everywhere"
            ),
        ),
        ("found with 80 %", f"an error of {number(test.detectable)} everywhere"),
        (
            "kernel loss",
            f"{number(test.kernel_loss)}   ({number(test.kernel_ratio)} × noise alone)",
        ),
        (
            "residuals",
            (
                f"mean {number(test.mean_residual)}, root mean square"
                f" {number(test.rms_residual)}"
            ),
        ),
        (
            "coverage",
            (
                f"{diagnosis.coverage.fraction:.0%} of the policy's actions lie near"
                " logged ones"
            ),
        ),
        (
            "value",
            f"{number(diagnosis.value)} by this model   ({diagnosis.discounting})",
        ),
        (
            "logged return",
            (
                f"{number(diagnosis.logged_return)} (discounted, up to each episode's"
                " last row)"
            ),
        ),
        ("rows held out", held_out),
        ("log", describe_log(diagnosis)),
    ]


def _show(diagnosis: Diagnosis, context: Context, console: Console) -> None:
    """Print facts, places of the largest error and findings."""
    test = diagnosis.test
    rows = [
        *context["facts"],
        ("seed, time", f"{diagnosis.seed}, {diagnosis.seconds:.1f} s"),
    ]
    print_table(
        console,
        f"Is {test.value_function} the value function of {test.policy}?",
        (),
        rows,
    )
    if diagnosis.regions:
        print_table(
            console,
            "Where residuals of one sign gather",
            context["columns"],
            context["places"],
        )
        console.print(context["z_note"], soft_wrap=True, style="dim")
    for sentence in diagnosis.findings:
        console.print(sentence, soft_wrap=True)
    if diagnosis.shown:
        console.print(diagnosis.shown, soft_wrap=True, style="dim")


def _cells(region: Region) -> list[str]:
    """Cells of the line on a place, by the columns of the report's context."""
    return [
        describe_place(region.center),
        describe_action(region.action),
        f"{region.size:,}",
        f"{region.mean_residual:+.3g} ± {region.standard_error:.2g}",
        f"{region.z_score:+.1f}",
        number(bool(region.is_significant)),
    ]


def _plot_maps(diagnosis: Diagnosis) -> Figure:
    """Kernel-weighted mean residual over two-dimensional states, one panel per action,
    one common scale.

    Places without rows are grey (white is zero); dots mark places where noise alone
    would rarely reach such values.
    """
    maps = diagnosis.maps
    columns = min(_COLUMNS, len(maps))
    rows = -(-len(maps) // columns)
    has_rows = [panel_map.values.effective_rows >= _FEWEST for panel_map in maps]
    # Limit of the colours: the 98 % quantile, so that one corner does not dominate.
    limit = 1e-12
    for panel_map, coloured in zip(maps, has_rows, strict=True):
        if coloured.any():
            sizes = np.abs(panel_map.values.mean[coloured])
            limit = max(limit, float(np.quantile(sizes, 0.98)))
    threshold = np.inf
    if diagnosis.regions:
        threshold = diagnosis.regions[0].threshold
    colors: dict[str, Any] = {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit}
    with drawing({**plots.STYLE, "hatch.color": "#52606d", "hatch.linewidth": 0.3}):
        from matplotlib.figure import Figure

        figure = Figure(
            figsize=(2.2 + 3.1 * columns, 0.7 + 2.9 * rows), layout="constrained"
        )
        for place, (panel_map, coloured) in enumerate(
            zip(maps, has_rows, strict=True), start=1
        ):
            panel = figure.add_subplot(rows, columns, place, facecolor=_NO_ROWS)
            shown = np.ma.masked_where(~coloured, panel_map.values.mean)
            mesh = panel.pcolormesh(
                *panel_map.axes, shown, shading="nearest", rasterized=True, **colors
            )
            scores = np.where(coloured, np.abs(panel_map.values.z_scores), 0.0)
            if (scores > threshold).any():
                ends = [threshold, scores.max() + 1.0]
                panel.contourf(
                    *panel_map.axes,
                    scores,
                    levels=ends,
                    colors="none",
                    hatches=["..."],
                    zorder=3,
                )
                panel.contour(
                    *panel_map.axes,
                    scores,
                    levels=[threshold],
                    colors=INK,
                    linewidths=1.2,
                )
            panel.set_title(f"action {describe_action(panel_map.action)}", fontsize=10)
            panel.set(xlabel="state 0", ylabel="state 1")
            panel.grid(visible=False)
        figure.colorbar(
            mesh,
            ax=figure.axes,
            shrink=0.9,
            label="mean Bellman residual (reward units)",
        )
    return figure


def _draw_profile(profile: ResidualProfile, label: str) -> plots.Drawing:
    """Mean residual ± 2 standard errors in bins; the band holds 80 % of the
    residuals.
    """

    def draw(axes: Axes) -> None:
        axes.axhline(0.0, color=INK, lw=0.8)
        center = profile.center
        error = 2.0 * profile.standard_error
        if len(center) > 1:
            axes.fill_between(
                center,
                profile.low,
                profile.high,
                color=SOFT,
                alpha=0.3,
                lw=0,
                label="80 % of rows",
            )
        axes.errorbar(
            center,
            profile.mean,
            yerr=error,
            fmt="o-",
            color=ACCENT,
            ms=4,
            lw=1.2,
            capsize=2,
            label="mean ± 2 standard errors",
        )
        plots.legend_above(axes)

    return plots.Drawing(draw, xlabel=label, ylabel="Bellman residual")
