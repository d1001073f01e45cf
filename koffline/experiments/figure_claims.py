"""claims: every measured sentence as a line of a forest plot, coloured by its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import shorten
from typing import TYPE_CHECKING

import numpy as np

from koffline.experiments.figure_style import INK, SOFT, WORLD_NAMES, house_style
from koffline.experiments.results import Claim, Curves, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_VERDICTS = {"holds": ("#0072B2", "o"), "does not hold": ("#D55E00", "X"), "undecided": ("#7F7F7F", "D")}
_NARROWEST, _WIDEST = 0.05, 100.0


def draw_claims(results: Results, curves: Curves) -> Figure:
    """Ratios of errors on a logarithmic axis: right of 1 the K-loss (or V) has the smaller error."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    ratios = [claim for claim in results.claims if is_ratio(claim)]
    others = [claim for claim in results.claims if not is_ratio(claim)]
    with house_style():
        height = 0.27 * (len(ratios) + len(others)) + 1.6
        figure = Figure(figsize=(12.5, height), layout="constrained")
        panels = figure.subplots(2, 1, height_ratios=(len(ratios) + 1.0, len(others) + 1.0))
        _draw_ratios(panels[0], ratios)
        _draw_others(panels[1], others)
        handles = [
            Line2D([], [], color=colour, marker=marker, ls="", ms=6, label=verdict)
            for verdict, (colour, marker) in _VERDICTS.items()
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
        return figure


def is_ratio(claim: Claim) -> bool:
    """Whether the measurement is a ratio of two errors."""
    return claim.measured.count("MSE of") == 2


def _draw_ratios(axes: Axes, claims: Sequence[Claim]) -> None:
    for line, claim in enumerate(claims):
        colour, marker = _VERDICTS[claim.verdict]
        low, value, high = (
            float(np.clip(_WIDEST if end is None else end, _NARROWEST, _WIDEST))
            for end in (claim.low, claim.value, claim.high)
        )
        axes.plot([low, high], [line, line], color=colour, lw=2.0, alpha=0.5)
        axes.plot(value, line, marker, color=colour, ms=6)
    axes.set_xscale("log")
    axes.set_xlim(_NARROWEST / 1.2, _WIDEST * 1.2)
    axes.axvline(1.0, color=INK, lw=0.9)
    axes.set_xlabel("ratio of mean squared errors, 95 % interval over seeds; right of 1 as the paper says")
    _label_lines(axes, [f"{WORLD_NAMES.get(c.world, c.world)}: {c.measured}" for c in claims])


def _draw_others(axes: Axes, claims: Sequence[Claim]) -> None:
    for line, claim in enumerate(claims):
        colour, marker = _VERDICTS[claim.verdict]
        axes.plot(0.0, line, marker, color=colour, ms=6)
        axes.text(0.03, line, in_numbers(claim), va="center", color=INK, fontsize=8)
    axes.set_xlim(-0.02, 1.0)
    axes.set_xticks([])
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_color(SOFT)
    _label_lines(axes, [f"{WORLD_NAMES.get(c.world, c.world)}: {c.sentence}" for c in claims])


def _label_lines(axes: Axes, texts: Sequence[str]) -> None:
    axes.set_yticks(range(len(texts)), [shorten(text, 62, placeholder=" …") for text in texts], fontsize=8)
    axes.set_ylim(len(texts) - 0.4, -0.6)


def in_numbers(claim: Claim) -> str:
    """The measurement in words: 0.93 [0.9, 0.95], what was measured."""
    if claim.value is None:
        return claim.measured
    interval = "" if claim.low is None or claim.high is None else f" [{claim.low:.3g}, {claim.high:.3g}]"
    return f"{claim.value:.3g}{interval}   {shorten(claim.measured, 90, placeholder=' …')}"
