"""The learning curve of a run: every seed a thin line, their interquartile mean and its interval."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from koffline.online.summary import OnlineSummary, Score
from koffline.spread import LEVEL
from koffline.store.files import atomic_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOUR, _INK = "#0072B2", "#1f2933"  # Okabe and Ito's blue
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e7eb",
    "axes.axisbelow": True,
}


def draw_curves(summary: OnlineSummary, path: Path) -> None:
    """Write the picture as PNG; the same summary gives the same bytes."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(8.0, 3.2), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2, sharey=True)
        steps = np.asarray([point.step for point in summary.curve], dtype=float)
        _draw(left, steps, [point.mean_action for point in summary.curve], "mean action")
        _draw(right, steps, [point.sampled for point in summary.curve], "sampled actions")
        left.set_ylabel("return of an episode")
        title = f"{summary.environment}, {summary.critic}: {len(summary.seeds)} seeds"
        if len(summary.seeds) > 1:
            title += f", interquartile mean and {LEVEL:.0%} interval"
        if summary.diverged:
            title += f"; {len(summary.diverged)} diverged"
        figure.suptitle(title.replace("$", r"\$"), fontsize=9, x=0.01, ha="left", color=_INK)
        with atomic_file(path, force=True) as temporary:
            figure.savefig(temporary, format="png", dpi=160, metadata={"Software": None})


def _draw(axes: Axes, steps: np.ndarray, scores: list[Score], title: str) -> None:
    seeds = _finite(np.asarray([score.per_seed for score in scores]))
    low, middle, high = (
        _finite(np.asarray([getattr(score.spread, name) for score in scores]))
        for name in ("low", "iqm", "high")
    )
    marker = "o" if len(steps) == 1 else ""
    axes.plot(steps, seeds, color=_COLOUR, lw=0.7, alpha=0.35, marker=marker, ms=3)
    axes.fill_between(steps, low, high, color=_COLOUR, alpha=0.18, lw=0)
    axes.plot(steps, middle, color=_COLOUR, lw=1.8, marker=marker, ms=4)
    axes.set_title(title, loc="left", fontsize=9, color=_INK)
    axes.set_xlabel("environment steps per seed", color=_INK)


def _finite(values: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(values), values, np.nan)
