"""The settings of a sweep in a picture: every seed a dot, their interquartile mean and its interval."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from koffline.data.files import atomic_file
from koffline.spread import LEVEL
from koffline.train.sweep_summary import SettingSummary, SweepSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BEST, _OTHER, _INK = "#D55E00", "#0072B2", "#1f2933"  # Okabe and Ito's palette
_MOST = 40  # settings that a page holds
_LONGEST = 60  # letters of a label


def draw_summary(summary: SweepSummary, path: Path) -> None:
    """Write the picture, the best setting on top; the same summary gives the same bytes."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    parts = summary.settings[:_MOST]
    style: dict[Any, Any] = {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
    }
    with mpl.rc_context(style):
        figure = Figure(figsize=(7.5, 1.3 + 0.32 * len(parts)), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        colours = [_BEST if part is summary.best else _OTHER for part in parts]
        for place, part in enumerate(parts):
            _draw_setting(axes, place, part, colours[place])
        axes.set_xlim(axes.get_xlim())  # what follows hangs on its ends
        for place, part in enumerate(parts):
            _draw_divergence(axes, place, part, colours[place], summary.metric.maximize)
        _finish(figure, axes, summary, parts)
        with atomic_file(path, force=True) as temporary:
            figure.savefig(temporary, format="png", dpi=160, metadata={"Software": None})


def _draw_setting(axes: Axes, place: int, part: SettingSummary, colour: str) -> None:
    scores = np.asarray([value for value in part.values if math.isfinite(value)])
    # Below the interval, which would hide them.
    axes.plot(scores, np.full(len(scores), place + 0.22), "o", color=colour, alpha=0.5, ms=4.5, mew=0)
    spread = part.spread
    if math.isfinite(spread.low) and math.isfinite(spread.high):
        axes.plot([spread.low, spread.high], [place, place], color=colour, lw=2.2, solid_capstyle="round")
    if math.isfinite(spread.iqm):
        axes.plot(spread.iqm, place, "D", color=colour, ms=6, mec="white", mew=0.8, zorder=3)


def _draw_divergence(axes: Axes, place: int, part: SettingSummary, colour: str, maximize: bool) -> None:
    """A cross at the bad end for what is infinitely bad, and a dotted line to it from what is finite."""
    if not part.diverged:
        return
    edge = axes.get_xlim()[0 if maximize else 1]
    spread = part.spread
    worst, other = (spread.low, spread.high) if maximize else (spread.high, spread.low)
    finite = [value for value in (spread.iqm, other) if math.isfinite(value)]
    if math.isinf(worst) and finite:
        axes.plot([edge, finite[0]], [place, place], color=colour, lw=1.4, ls=":")
        axes.plot([finite[0], finite[-1]], [place, place], color=colour, lw=2.2)
    height = place if math.isinf(spread.iqm) else place + 0.22
    axes.plot(edge, height, "X", color=colour, ms=8, mec="white", mew=0.7, clip_on=False, zorder=4)


def _finish(figure: Figure, axes: Axes, summary: SweepSummary, parts: tuple[SettingSummary, ...]) -> None:
    axes.set_yticks(range(len(parts)), [_label(part) for part in parts])
    axes.set_ylim(len(parts) - 0.4, -0.6)
    axes.grid(axis="x", color="#e4e7eb", lw=0.6)
    axes.tick_params(axis="y", length=0)
    better = "more" if summary.metric.maximize else "less"
    axes.set_xlabel(f"{summary.metric.name} of the last epoch ({better} is better)", color=_INK)
    left = len(summary.settings) - len(parts)
    if not any(math.isfinite(value) for part in parts for value in part.values):
        axes.set_xticks([])
    title = f"Interquartile mean and {LEVEL:.0%} interval of {len(summary.seeds)} seeds, a dot each"
    if len(summary.seeds) == 1:
        title = "One seed of each setting"
    title += "; a cross: diverged" if any(part.diverged for part in parts) else ""
    title += f"; {left} more in summary.md" if left else ""
    figure.suptitle(title, fontsize=9, x=0.01, ha="left", color=_INK)


def _label(part: SettingSummary) -> str:
    label = part.setting.label
    label = label if len(label) <= _LONGEST else f"{label[: _LONGEST - 1]}…"
    marks = [f"{part.diverged} diverged"] if part.diverged else []
    marks += [f"{part.missing} missing"] if part.missing else []
    # Dollar signs would be read as mathematics.
    return label.replace("$", r"\$") + (f" ({', '.join(marks)})" if marks else "")
