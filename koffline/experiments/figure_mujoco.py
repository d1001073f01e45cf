"""How figure-mujoco is shown: returns against environment steps, four critics, six environments; and tables.

First page: the mean action's returns; second: the sampled policy's; third: the paper's own grid and learner.
(Feng et al. 2019, fig:mujoco_bench, fig:more_bench)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from koffline.experiments.mujoco import panel_of
from koffline.experiments.mujoco_plan import BUDGETS, CRITICS, NOISE_LEVELS
from koffline.experiments.results import Curves, Results, ReturnRow, SearchRow
from koffline.experiments.statistics import band
from koffline.experiments.style import (
    COLOURS,
    INK,
    LABELS,
    MARKERS,
    SOFT,
    house_style,
    method_legend,
    table_lines,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 4
_TITLES = {"InvertedDoublePendulum": "Inv. Double Pendulum", "InvertedPendulum": "Inverted Pendulum"}

_PARTS = {
    "final": "Each critic at its best setting of the same grid",
    "paper": "The paper's learner, each critic at its best setting of the paper's grid",
    "noise": "Noise on the transitions",
}
_SEARCHES = {"search": "The same grid for all critics", "paper-search": "The paper's grid"}
_SHOWN = 3  # settings of a critic in the table of a search
_HEADER = (
    "critic",
    "setting",
    "final return, IQM",
    "best but one",
    "sampled policy, IQM",
    "best but one",
    "area",
    "area, sampled",
    "median steps to threshold",
    "diverged",
)
_BUDGET = ("environment", "steps of a run", "seeds", "steps of a run of the search")
_NOTE = (
    "IQM over all seeds and its 95 % bootstrap interval; “best but one”: mean without the worst seed, as the "
    "paper reports. Final: mean of the last tenth of the evaluations; area: mean height of the learning "
    "curve; sampled: the return of the sampled policy instead of the mean action's."
)


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
        highest = max(highest, float(found.value.max()))
        axes.fill_between(x, found.low, found.high, color=COLOURS[critic], alpha=0.15, lw=0)
        axes.plot(
            x, found.value, color=COLOURS[critic], marker=MARKERS[critic], ms=3,
            markevery=max(1, len(x) // 6), lw=1.8 if ours else 1.1, zorder=4 if ours else 3,
        )  # fmt: skip
    if threshold is not None and highest > 0.5 * threshold:  # far away it would flatten the curves
        axes.axhline(threshold, color=SOFT, ls=(0, (1, 2)), lw=1.0, zorder=1)
    axes.set_xlim(left=0)
    axes.tick_params(labelsize=8, colors=INK)
    return set(groups)


def mujoco_sections(results: Results) -> Iterator[str]:
    """Nothing where the results have no returns."""
    if results.returns:
        yield "\n\n".join(["## Returns", _NOTE, *_what_ran(results)])
    for part, title in _PARTS.items():
        rows = [row for row in results.returns if row.part == part]
        for environment, noise in dict.fromkeys((row.environment, row.noise) for row in rows):
            yield _environment(title, [r for r in rows if (r.environment, r.noise) == (environment, noise)])
    for search, title in _SEARCHES.items():
        rows_found = [row for row in results.searches if row.search == search]
        if rows_found:
            yield _search(title, rows_found)


def _what_ran(results: Results) -> Iterator[str]:
    extra: Any = results.extra
    budgets = extra.get("budgets", {})
    if budgets:
        yield "\n".join(table_lines(_BUDGET, [_budget_cells(name, part) for name, part in budgets.items()]))
    missing = extra.get("not_run", ())
    yield f"Not run: {', '.join(missing)}." if missing else "Everything of the plan was run."
    if extra.get("runs"):
        yield f"{extra['runs']} runs, {extra['environment_steps'] / 1e6:.3g} million environment steps."


def _budget_cells(name: str, budget: Mapping[str, int]) -> list[str]:
    searched = f"{budget['search_steps']:,}" if budget["search_steps"] else "not searched"
    return [name, f"{budget['steps']:,}", str(budget["seeds"]), searched]


def _environment(title: str, rows: Sequence[ReturnRow]) -> str:
    first = rows[0]
    noise = f", noise {first.noise:g} per step on every velocity" if first.noise else ""
    about = f"{title}; {first.steps:,} environment steps, {first.seeds} seeds."
    lines = table_lines(_HEADER, [_cells(row) for row in rows])
    return "\n".join([f"### {first.environment}{noise} ({first.part})", "", about, "", *lines])


def _cells(row: ReturnRow) -> list[str]:
    reached = "–" if row.reached is None else f"{row.reached:,.0f}"
    return [
        LABELS[row.critic],
        row.setting,
        _interval(row.final, row.final_low, row.final_high),
        _number(row.final_best),
        _interval(row.sampled, row.sampled_low, row.sampled_high),
        _number(row.sampled_best),
        _interval(row.area, row.area_low, row.area_high),
        _number(row.sampled_area),
        f"{reached} ({row.reached_seeds}/{row.seeds})",
        f"{row.diverged}/{row.seeds}",
    ]


def _search(title: str, rows: Sequence[SearchRow]) -> str:
    """The best settings of each critic; every one is in the JSON file."""
    cells = []
    for environment, critic in dict.fromkeys((row.environment, row.critic) for row in rows):
        mine = sorted(
            (row for row in rows if (row.environment, row.critic) == (environment, critic)),
            key=lambda row: row.rank,
        )
        cells += [
            [
                environment,
                LABELS[critic],
                f"{row.rank + 1} of {len(mine)}",
                row.setting,
                _number(row.area),
                _number(row.final),
                _number(row.sampled),
            ]
            for row in mine[:_SHOWN]
        ]
    header = ("environment", "critic", "rank by area", "setting", "area", "final return", "final, sampled")
    budget = "; ".join(
        f"{environment}: {row.steps:,} steps, {row.seeds} seeds a setting"
        for environment, row in {row.environment: row for row in rows}.items()
    )
    note = f"{budget}. The seeds of the search are not those of the comparison."
    return "\n".join([f"## Search: {title}", "", note, "", *table_lines(header, cells)])


def _interval(value: float, low: float | None, high: float | None) -> str:
    ends = "" if low is None or high is None else f" [{_number(low)}, {_number(high)}]"
    return _number(value) + ends


def _number(value: float) -> str:
    """Returns go from fractions to ten thousands: three digits at least, no exponents."""
    return f"{value:.0f}" if abs(value) >= 100.0 else f"{value:.3g}"
