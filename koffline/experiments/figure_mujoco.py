"""figure-mujoco: returns of the mean action against environment steps, four critics, six environments.

Second page: the sampled policy's returns; third: the paper's own grid and learner.
(Feng et al. 2019, fig:mujoco_bench, fig:more_bench)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from koffline.experiments.figure_style import COLOURS, INK, MARKERS, SOFT, house_style, method_legend
from koffline.experiments.mujoco import panel_of
from koffline.experiments.mujoco_plan import BUDGETS, CRITICS, NOISE_LEVELS
from koffline.experiments.mujoco_statistics import band
from koffline.experiments.results import Curves, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 4
_TITLES = {"InvertedDoublePendulum": "Inv. Double Pendulum", "InvertedPendulum": "Inverted Pendulum"}


def draw_mujoco(results: Results, curves: Curves) -> Figure:
    """Greedy returns, each critic at its best setting of the same grid; noise ablation last."""
    return _draw(curves, "final", "return", "return of the mean action")


def draw_mujoco_sampled(results: Results, curves: Curves) -> Figure:
    """The same runs by the sampled policy's returns."""
    return _draw(curves, "final", "sampled_return", "return of the sampled policy")


def draw_mujoco_paper(results: Results, curves: Curves) -> Figure | None:
    """Greedy returns with the paper's learner, each critic at the best setting of the paper's grid."""
    if not any(group.split("/")[0].endswith(" paper") for group in curves):
        return None
    return _draw(curves, "paper", "return", "return of the mean action, the paper's setting")


def _draw(curves: Curves, part: str, curve: str, label: str) -> Figure:
    from matplotlib.figure import Figure

    panels = _panels(part)
    lines = -(-len(panels) // _COLUMNS)
    with house_style():
        figure = Figure(figsize=(3.1 * _COLUMNS, 2.6 * lines + 0.5), layout="constrained")
        grid = figure.subplots(lines, _COLUMNS, squeeze=False)
        shown: set[str] = set()
        for place, (axes, (panel, title, threshold)) in enumerate(
            zip(grid.ravel(), panels.values(), strict=False)  # the last panels stay empty
        ):
            axes.set_title(f"({chr(ord('a') + place)}) {title}")
            shown |= _draw_panel(axes, curves, panel, curve, threshold)
            if place % _COLUMNS == 0:
                axes.set_ylabel(label, fontsize=8)
        for axes in grid.ravel()[len(panels) :]:
            axes.axis("off")
        extra = {"solved": {"color": SOFT, "ls": (0, (1, 2)), "lw": 1.0}}
        method_legend(figure, sorted(shown), extra)
        return figure


def _panels(part: str) -> dict[str, tuple[str, str, float | None]]:
    """Panel, title and threshold, in the paper's order; the noise behind."""
    found = {
        name: (panel_of(part, name), _TITLES.get(name, name), budget.threshold)
        for name, budget in BUDGETS.items()
    }
    if part == "final":
        for name, levels in NOISE_LEVELS.items():
            for level in levels:
                panel = panel_of("noise", name, level)
                found[panel] = (panel, f"{_TITLES.get(name, name)}, noise {level:g}", BUDGETS[name].threshold)
    return found


def _draw_panel(axes: Axes, curves: Curves, panel: str, curve: str, threshold: float | None) -> set[str]:
    """Interquartile means with bootstrap intervals; the critics that were there."""
    groups = {critic: curves[f"{panel}/{critic}"] for critic in CRITICS if f"{panel}/{critic}" in curves}
    axes.set_xlabel("thousand environment steps", fontsize=8)
    if not groups:
        axes.text(0.5, 0.5, "not run", ha="center", va="center", color=SOFT, transform=axes.transAxes)
        axes.set_xticks([])
        axes.set_yticks([])
        return set()
    highest = -np.inf
    for critic, group in groups.items():
        x, ours = group["steps"] / 1000.0, critic == "kloss"
        found = band(np.asarray(group[curve], dtype=np.float64))
        highest = max(highest, float(found.mean.max()))
        axes.fill_between(x, found.low, found.high, color=COLOURS[critic], alpha=0.15, lw=0)
        axes.plot(
            x, found.mean, color=COLOURS[critic], marker=MARKERS[critic], ms=3,
            markevery=max(1, len(x) // 6), lw=1.8 if ours else 1.1, zorder=4 if ours else 3,
        )  # fmt: skip
    if threshold is not None and highest > 0.5 * threshold:  # far away it would flatten the curves
        axes.axhline(threshold, color=SOFT, ls=(0, (1, 2)), lw=1.0, zorder=1)
    axes.set_xlim(left=0)
    axes.tick_params(labelsize=8, colors=INK)
    return set(groups)
