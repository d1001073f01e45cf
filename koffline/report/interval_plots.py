"""The figure of an interval's dependence on the assumed norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from koffline.ope.interval import percent
from koffline.ope.intervals.sensitivity import NormSensitivity
from koffline.report.plots import ACCENT, INK, SOFT, WARM, make_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
