"""figure-mujoco: run what is missing of it, and draw Trust-PCL with four critics in six environments.

First page: the mean action's returns against environment steps; second: the sampled policy's; third: the
paper's own grid and learner. (Feng et al. 2019, fig:mujoco_bench, fig:more_bench)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from koffline.experiments import mujoco_plan as plan
from koffline.experiments import style
from koffline.experiments.cells import Run
from koffline.experiments.mujoco_cells import mujoco_jobs
from koffline.experiments.mujoco_results import Group, choose_settings, finished_parts, whole_parts
from koffline.experiments.results import Curves, Results
from koffline.experiments.statistics import band

_COLUMNS = 4
_TITLES = {"InvertedDoublePendulum": "Inv. Double Pendulum", "InvertedPendulum": "Inverted Pendulum"}


def collect_mujoco(run: Run) -> tuple[dict[str, Any], Curves]:
    """Searches first, then what uses their choices; then what is finished, whatever was asked for."""
    request, folder = run.request or plan.MujocoRequest(quick=run.scale.quick), run.cells_folder
    for searches in (True, False):
        choices, _ = choose_settings(whole_parts(request, folder, plan.SEARCHED, {})[0])
        parts = [part for part in request.parts if (part in plan.SEARCHED) == searches]
        asked = [(part, name) for part in parts for name in request.environments]
        cells = [cell for part, name in asked for cell in plan.part_cells(request, part, name, choices)]
        run.work_off(mujoco_jobs(cells, folder))
    return finished_parts(request, folder)


def draw_mujoco(
    results: Results, curves: Curves, part: str = "final", curve: str = "return"
) -> Figure | None:
    """Panels in the paper's order, the noise behind; None where nothing of the part was run.

    part: final or paper, whose grid it is that each critic has its best setting of. curve: return (of the
    mean action) or sampled_return.
    """
    if part == "paper" and not any(group.split("/")[0].endswith(" paper") for group in curves):
        return None
    label = "return of the mean action" if curve == "return" else "return of the sampled policy"
    label += ", the paper's setting" if part == "paper" else ""
    groups = [Group(part, name, 0.0, "") for name in plan.BUDGETS]
    if part == "final":
        groups += [
            Group("noise", name, level, "") for name, levels in plan.NOISE_LEVELS.items() for level in levels
        ]
    lines = -(-len(groups) // _COLUMNS)
    with style.house_style():
        figure = Figure(figsize=(3.1 * _COLUMNS, 2.6 * lines + 0.5), layout="constrained")
        panels = figure.subplots(lines, _COLUMNS, squeeze=False).ravel()
        shown: set[str] = set()
        for place, (axes, group) in enumerate(zip(panels, groups, strict=False)):  # the last stay empty
            noise = f", noise {group.noise:g}" if group.noise else ""
            title = _TITLES.get(group.environment, group.environment)
            axes.set_title(f"({chr(ord('a') + place)}) {title}{noise}")
            threshold = plan.BUDGETS[group.environment].threshold
            shown |= _draw_panel(axes, curves, group.panel, curve, threshold)
            if place % _COLUMNS == 0:
                axes.set_ylabel(label, fontsize=8)
        for axes in panels[len(groups) :]:
            axes.axis("off")
        style.method_legend(figure, sorted(shown), {"solved": {"color": style.SOFT, **style.DOTTED}})
        return figure


def _draw_panel(axes: Axes, curves: Curves, panel: str, curve: str, threshold: float | None) -> set[str]:
    """Interquartile means with bootstrap intervals; the critics that were there."""
    groups = {critic: curves[f"{panel}/{critic}"] for critic in plan.CRITICS if f"{panel}/{critic}" in curves}
    axes.set_xlabel("thousand environment steps", fontsize=8)
    if not groups:
        axes.text(0.5, 0.5, "not run", ha="center", va="center", color=style.SOFT, transform=axes.transAxes)
        axes.set_xticks([])
        axes.set_yticks([])
        return set()
    highest = -np.inf
    for critic, group in groups.items():
        x, look = group["steps"] / 1000.0, style.line_look(critic)
        width, order = (1.8, 4) if critic == "kloss" else (1.1, 3)
        found = band(np.asarray(group[curve], dtype=np.float64))
        highest = max(highest, float(found.value.max()))
        axes.fill_between(x, found.low, found.high, color=look["color"], alpha=0.15, lw=0)
        every = max(1, len(x) // 6)
        axes.plot(x, found.value, **look, ms=3, markevery=every, lw=width, zorder=order)
    if threshold is not None and highest > 0.5 * threshold:  # far away it would flatten the curves
        axes.axhline(threshold, color=style.SOFT, **style.DOTTED, zorder=1)
    axes.set_xlim(left=0)
    axes.tick_params(labelsize=8, colors=style.INK)
    return set(groups)
