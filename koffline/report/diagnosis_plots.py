"""Figures of a diagnosis: where the Bellman equation fails, in space, by value and over time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from koffline.ope.bellman_test.witness import WitnessMap, WitnessValues
from koffline.ope.diagnose.diagnosis import Diagnosis
from koffline.ope.diagnose.findings import describe_action, describe_place
from koffline.ope.diagnose.profiles import Profile
from koffline.report.plots import ACCENT, INK, SOFT, STYLE, WARM, make_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FEWEST = 5.0  # effective rows behind a local mean that is worth a colour
_COLUMNS = 3
_NO_ROWS = "#c4c8cc"
_COLORS = (ACCENT, WARM, "#2f855a", "#6b46c1", "#b7791f", "#627d98")


def draw_diagnosis(diagnosis: Diagnosis) -> dict[str, Figure]:
    """All figures that this diagnosis has, by name."""
    figures = {}
    if diagnosis.maps:
        figures["map"] = plot_maps(diagnosis)
    if diagnosis.lines:
        figures["line"] = plot_lines(diagnosis)
    if diagnosis.regions:
        figures["regions"] = plot_regions(diagnosis)
    figures["by_value"] = plot_profile(diagnosis.by_value, "value Q of the row")
    if diagnosis.test.kind == "state":
        figures["by_value"] = plot_profile(diagnosis.by_value, "value V of the row")
    if diagnosis.by_step is not None:
        figures["by_step"] = plot_profile(diagnosis.by_step, "time step in the episode")
    figures["residuals"] = plot_residuals(diagnosis)
    figures["coverage"] = plot_coverage(diagnosis)
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
    limit = max(max(_largest(one.values) for one in maps), 1e-12)
    threshold = diagnosis.regions[0].threshold if diagnosis.regions else np.inf
    with mpl.rc_context({**STYLE, "hatch.color": "#52606d", "hatch.linewidth": 0.3}):
        figure = Figure(figsize=(2.2 + 3.1 * columns, 0.7 + 2.9 * rows), layout="constrained")
        panels = np.atleast_1d(figure.subplots(rows, columns, squeeze=False).ravel())
        for panel in panels[len(maps) :]:
            panel.set_visible(False)
        for panel, one in zip(panels, maps, strict=False):
            mesh = _draw_map(panel, one, limit, threshold)
        bar = figure.colorbar(mesh, ax=list(panels[: len(maps)]), shrink=0.9)
        bar.set_label(f"mean Bellman residual{_over(diagnosis)} (reward units)")
    return figure


def plot_lines(diagnosis: Diagnosis) -> Figure:
    """The same over one-dimensional states, with twice its standard error."""

    def draw(axes: Axes) -> None:
        axes.axhline(0.0, color=INK, lw=0.8)
        for number, line in enumerate(diagnosis.lines):
            color = _COLORS[number % len(_COLORS)]
            seen = line.values.effective_rows >= _FEWEST
            mean = np.where(seen, line.values.mean, np.nan)
            error = np.where(seen, line.values.standard_error, np.nan)
            label = "all rows" if line.action is None else describe_action(line.action)
            axes.plot(line.x, mean, color=color, lw=1.6, label=label)
            axes.fill_between(line.x, mean - 2 * error, mean + 2 * error, color=color, alpha=0.15, lw=0)
        axes.set_xlabel("state")
        axes.set_ylabel(f"mean Bellman residual{_over(diagnosis)}")
        axes.legend(frameon=False)

    return make_figure(draw, width=7.0)


def plot_regions(diagnosis: Diagnosis) -> Figure:
    """Mean residual ± 2 standard errors of the named places, the strongest on top; pale: may be chance."""
    regions = diagnosis.regions

    def draw(axes: Axes) -> None:
        axes.axvline(0.0, color=INK, lw=0.8)
        for place, region in enumerate(regions):
            color = WARM if region.is_significant else SOFT
            mean, error = region.mean_residual, 2.0 * region.standard_error
            axes.barh(place, mean, height=0.6, color=color, alpha=0.75)
            axes.hlines(place, mean - error, mean + error, color=INK, lw=1.2)
        axes.set_yticks(range(len(regions)), [_region_label(region) for region in regions], fontsize=8.5)
        axes.set_ylim(len(regions) - 0.4, -0.6)
        axes.set_xlabel(f"mean Bellman residual{_over(diagnosis)} (reward units)")
        axes.grid(visible=False, axis="y")

    return make_figure(draw, width=7.6, height=1.2 + 0.55 * len(regions))


def plot_profile(profile: Profile, label: str) -> Figure:
    """Mean residual ± 2 standard errors in bins; the band holds 80 % of the residuals."""

    def draw(axes: Axes) -> None:
        axes.axhline(0.0, color=INK, lw=0.8)
        if len(profile.center) > 1:
            axes.fill_between(
                profile.center, profile.low, profile.high, color=SOFT, alpha=0.3, lw=0, label="80 % of rows"
            )
        axes.errorbar(
            profile.center,
            profile.mean,
            yerr=2.0 * profile.standard_error,
            fmt="o-",
            color=ACCENT,
            ms=4,
            lw=1.2,
            capsize=2,
            label="mean ± 2 standard errors",
        )
        axes.set_xlabel(label)
        axes.set_ylabel("Bellman residual")
        axes.legend(frameon=False)

    return make_figure(draw)


def plot_residuals(diagnosis: Diagnosis) -> Figure:
    """Histogram of the residuals."""
    rows = diagnosis.residuals
    kept = rows.residuals[rows.weights > 0.0]

    def draw(axes: Axes) -> None:
        low, high = np.quantile(kept, [0.002, 0.998])
        if not high > low:
            low, high = low - 0.5, high + 0.5
        axes.hist(np.clip(kept, low, high), bins=60, color=ACCENT, alpha=0.8)
        axes.axvline(0.0, color=INK, lw=0.8)
        axes.axvline(float(kept.mean()), color=WARM, lw=1.2, ls="--", label="mean")
        axes.set_xlabel("Bellman residual of a row (reward units)")
        axes.set_ylabel("rows")
        axes.legend(frameon=False)

    return make_figure(draw)


def plot_coverage(diagnosis: Diagnosis) -> Figure:
    """How far the policy's actions are from logged ones, relative to the log's own spacing."""
    coverage = diagnosis.coverage
    relevant = coverage.weights > 0.0

    def draw(axes: Axes) -> None:
        axes.hist(
            np.minimum(coverage.ratios[relevant], 5.0),
            bins=[0.1 * edge for edge in range(51)],
            weights=coverage.weights[relevant],
            color=ACCENT,
            alpha=0.8,
        )
        axes.axvline(1.0, color=WARM, lw=1.2, ls="--", label="95 % of the log's own rows are left of this")
        axes.set_xlabel(
            "distance to the nearest logged row / the log's own spacing (5 = 5 or more)", fontsize=9
        )
        axes.set_ylabel("sampled state-actions")
        axes.legend(frameon=False)

    return make_figure(draw)


def _draw_map(axes: Any, one: WitnessMap, limit: float, threshold: float) -> Any:
    seen = one.values.effective_rows >= _FEWEST
    colors = np.ma.masked_where(~seen, one.values.mean)
    mesh = axes.pcolormesh(
        one.x, one.y, colors, cmap="RdBu_r", vmin=-limit, vmax=limit, shading="nearest", rasterized=True
    )
    scores = np.where(seen, np.abs(one.values.z_scores), 0.0)
    if (scores > threshold).any():
        ends = [threshold, scores.max() + 1.0]
        axes.contourf(one.x, one.y, scores, levels=ends, colors="none", hatches=["..."], zorder=3)
        axes.contour(one.x, one.y, scores, levels=[threshold], colors=INK, linewidths=1.2)
    axes.set_facecolor(_NO_ROWS)
    axes.set_title("all actions" if one.action is None else describe_action(one.action), fontsize=10)
    axes.set_xlabel(f"state {one.columns[0]}")
    axes.set_ylabel(f"state {one.columns[1]}")
    axes.grid(visible=False)
    return mesh


def _over(diagnosis: Diagnosis) -> str:
    """Places show residuals over the test's window."""
    window = diagnosis.test.window
    return f" over {window} steps" if window > 1 else ""


def _largest(values: WitnessValues) -> float:
    """|mean| that 98 % of places with rows stay below, so that one corner does not hide all; 0 without."""
    seen = values.effective_rows >= _FEWEST
    return float(np.quantile(np.abs(values.mean[seen]), 0.98)) if seen.any() else 0.0


def _region_label(region: Any) -> str:
    action = describe_action(region.action)
    where = describe_place(region.center, most=4)
    return f"{where}\n{action + ', ' if action else ''}{region.size:,} rows"
