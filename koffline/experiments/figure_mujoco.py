"""figure-mujoco: run what is missing of it, and show Trust-PCL with five critics in six environments.

First page: the mean action's returns against environment steps; second: the sampled policy's; third: the
paper's own grid and learner. Claims are judged by 95 % intervals. (Feng et al. 2019, fig:mujoco_bench,
fig:more_bench)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from koffline.experiments import mujoco_plan as plan
from koffline.experiments import style
from koffline.experiments.cells import Run
from koffline.experiments.claims import claims_table
from koffline.experiments.mujoco_cells import Group, Learned, Place, joined, row_of
from koffline.experiments.results import (
    FAILS,
    HOLDS,
    UNDECIDED,
    Claim,
    Curves,
    Results,
    ReturnRow,
    grouped,
    section,
)
from koffline.experiments.statistics import band, difference

_COLUMNS = 4  # of panels
_TITLES = {"InvertedDoublePendulum": "Inv. Double Pendulum", "InvertedPendulum": "Inverted Pendulum"}
_WHERE = "Section 5.3, fig:mujoco_bench"
_DOUBLE_SAMPLING = "Sections 2 and 3 (double sampling), inside Trust-PCL"
_SENTENCES = {"final": "learns a better policy than", "area": "learns with fewer data than"}
_GRIDS = {"final": "equal settings or grid for all", "paper": "the paper's grid and learner"}
_OURS = ("kloss", "memory", "kloss_slow")
_RIVALS = ("td0", "fvi", "rg")
_PARTS = {
    "final": "Each critic at its best setting of the same grid",
    "paper": "The paper's learner, each critic at its best setting of the paper's grid",
    "noise": "Noise on the transitions",
}
_NOTE = (
    "IQM over all seeds and its 95 % bootstrap interval; “best but one”: mean without the worst seed, as the "
    "paper reports. Final: mean of the last tenth of the evaluations; area: mean height of the learning "
    "curve; sampled: the return of the sampled policy instead of the mean action's."
)
_HEADER = (
    "critic | setting | final return, IQM | best but one | sampled policy, IQM | area | "
    "median steps to threshold | diverged"
)


Runs = Mapping[Group, Learned]


def collect_mujoco(run: Run) -> tuple[dict[str, Any], Curves]:
    """Run the searches, then the parts that use their choices; return everything that is finished."""
    request, folder = run.request or plan.MujocoRequest(quick=run.scale.quick), run.cells_folder
    for searches in (True, False):
        choices, _ = plan.choose_settings(plan.whole_parts(request, folder, plan.SEARCHED, {})[0])
        parts = [part for part in request.parts if (part in plan.SEARCHED) == searches]
        asked = [(part, name) for part in parts for name in request.environments]
        cells = [cell for part, name in asked for cell in plan.part_cells(request, part, name, choices)]
        run.work_off([cell.job(folder) for cell in {cell.name: cell for cell in cells}.values()])
    return finished_parts(request, folder)


def finished_parts(request: plan.MujocoRequest, folder: Any) -> tuple[dict[str, Any], Curves]:
    """Rows, claims and curves of everything that is finished, and the names of what is not."""
    searched, missing = plan.whole_parts(request, folder, plan.SEARCHED, {})
    choices, searches = plan.choose_settings(searched)
    finished, also_missing = plan.whole_parts(request, folder, plan.SEARCHES, choices)
    found: dict[Group, list[Place]] = {}
    for cell, result in finished:
        for row, run in enumerate(cell.runs):
            group = Group(cell.part, cell.environment, cell.noise, run.config.critic)
            found.setdefault(group, []).append((run, result, row))
    learned = {group: joined(runs) for group, runs in found.items()}
    played = [(len(cell.runs), int(result.steps[-1])) for cell, result in (*finished, *searched)]
    extra = {
        "environment_steps": sum(runs * steps for runs, steps in played),
        "runs": sum(runs for runs, _ in played),
        "not_run": [*missing, *also_missing],
    }
    rows = (row_of(g, learned[g], plan.BUDGETS[g.environment].threshold) for g in sorted(learned, key=_place))
    parts = {
        "rows": (),
        "returns": tuple(rows),
        "searches": tuple(searches),
        "claims": tuple(mujoco_claims(learned)),
        "extra": extra,
    }
    curves = {
        f"{group.panel}/{group.critic}": {
            "steps": part.steps,
            "return": part.returns.astype(np.float32),
            "sampled_return": part.sampled.astype(np.float32),
            "length": part.lengths.astype(np.float32),
        }
        for group, part in learned.items()
    }
    return parts, curves


def _place(group: Group) -> tuple[str, int, float, int]:
    """Sort key: the order of the paper's panels."""
    panel = list(plan.BUDGETS).index(group.environment)
    return group.part, panel, group.noise, plan.CRITICS.index(group.critic)


def mujoco_claims(learned: Runs) -> Iterator[Claim]:
    """Claims from the finished runs, one per comparison with a rival."""
    for critic, part in itertools.product(_OURS, _GRIDS):
        ours = [
            group for group in sorted(learned, key=_place) if (group.critic, group.part) == (critic, part)
        ]
        found = [
            claim
            for group in ours
            for rival in _RIVALS
            for score in _SENTENCES
            for claim in _compared(learned, group, rival, score)
        ]
        if found:
            yield _consistently(found, style.LABELS[critic], _GRIDS[part])
            yield from found
    # Double sampling biases the residual gradient where transitions are random, and not the K-loss.
    for group in sorted(learned, key=_place):
        if group.part == "noise" and group.critic in _OURS:
            for rival in _RIVALS:
                yield from _compared(learned, group, rival, "final")


def _compared(learned: Runs, group: Group, rival: str, score: str) -> Iterator[Claim]:
    """Claim that compares a kernel loss with a rival by one score; none if the rival was not run."""
    ours, theirs = learned[group], learned.get(group._replace(critic=rival))
    if theirs is None:
        return
    greedy, sampled = (
        difference(*(getattr(part.scores(curve), score) for part in (ours, theirs)))
        for curve in ("returns", "sampled")
    )
    own, other = style.LABELS[group.critic], style.LABELS[rival]
    sentence, where = f"{own} {_SENTENCES[score]} {other}", _WHERE
    world, grid = group.environment, f" ({_GRIDS.get(group.part)})"
    if group.part == "noise":
        sentence, where = f"{sentence} where transitions are random", _DOUBLE_SAMPLING
        world, grid = f"{world}, noise {group.noise:g}", ""
    words = "final return" if score == "final" else "area under the curve"
    measured = f"{words}, {own} − {other}, IQM of {len(ours.returns)} seeds{grid}"
    cost = greedy.cost(0.0)
    reason = f"by the sampled policy: {sampled} ({sampled.verdict(0.0)}){cost and '; '}{cost}"
    yield Claim(sentence, where, world, measured, *greedy, greedy.verdict(0.0), reason)


def _consistently(found: Sequence[Claim], name: str, grid: str) -> Claim:
    """Claim over all comparisons: a contrary one refutes it, an undecided one leaves it undecided."""
    holds, fails = (sum(claim.verdict == verdict for claim in found) for verdict in (HOLDS, FAILS))
    environments = len({claim.world for claim in found})
    return Claim(
        f"{name} consistently outperforms all the other methods, learning better policy with fewer data",
        _WHERE, "MuJoCo", f"comparisons of {len(found)} that hold ({environments} environments, {grid})",
        float(holds), None, None, FAILS if fails else HOLDS if holds == len(found) else UNDECIDED,
        f"{fails} go the other way",
    )  # fmt: skip


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
    label += ", paper's learner" if part == "paper" else ""
    groups = [Group(part, name, 0.0, "") for name in plan.BUDGETS]
    if part == "final":
        groups += [Group("noise", name, x, "") for name, levels in plan.NOISE_LEVELS.items() for x in levels]
    there = {name.rsplit("/", 1)[0] for name in curves}
    groups = [group for group in groups if group.panel in there]
    if not groups:
        return None
    columns = min(_COLUMNS, len(groups))
    lines = -(-len(groups) // columns)
    with style.house_style():
        figure = Figure(figsize=(3.1 * columns, 2.6 * lines + 0.5), layout="constrained")
        panels = figure.subplots(lines, columns, squeeze=False).ravel()
        shown: set[str] = set()
        for place, (axes, group) in enumerate(zip(panels, groups, strict=False)):  # others stay empty
            noise = f", noise {group.noise:g}" if group.noise else ""
            axes.set_title(
                f"({'abcdefgh'[place]}) {_TITLES.get(group.environment, group.environment)}{noise}"
            )
            shown |= _draw_panel(axes, curves, group, curve)
            if place % columns == 0:
                axes.set_ylabel(label, fontsize=8)
        for axes in panels[len(groups) :]:
            axes.axis("off")
        style.method_legend(figure, sorted(shown), {"solved": {"color": style.SOFT, **style.DOTTED}})
        return figure


def _draw_panel(axes: Axes, curves: Curves, group: Group, curve: str) -> set[str]:
    """Draw interquartile means with bootstrap intervals; return the critics that were drawn."""
    names = {critic: f"{group.panel}/{critic}" for critic in plan.CRITICS}
    found = {critic: curves[name] for critic, name in names.items() if name in curves}
    axes.set_xlabel("thousand environment steps", fontsize=8)
    highest = -np.inf
    for critic, part in found.items():
        x, look = part["steps"] / 1000.0, style.line_look(critic)
        width, order = (1.8, 4) if critic == "kloss" else (1.1, 3)
        mean, low, high = band(np.asarray(part[curve], dtype=np.float64))
        highest = max(highest, float(mean.max()))
        axes.fill_between(x, low, high, color=look["color"], alpha=0.15, lw=0)
        axes.plot(x, mean, **look, ms=3, markevery=max(1, len(x) // 6), lw=width, zorder=order)
    threshold = plan.BUDGETS[group.environment].threshold
    if threshold is not None and highest > 0.5 * threshold:  # a distant level would flatten the curves
        axes.axhline(threshold, color=style.SOFT, **style.DOTTED, zorder=1)
    axes.set_xlim(left=0)
    axes.tick_params(labelsize=8, colors=style.INK)
    return set(found)


def mujoco_tables(results: Results) -> Iterator[str]:
    """Claims, what was run, and returns part by part."""
    yield claims_table(results)
    extra = results.extra
    missing = ", ".join(extra["not_run"]) or "nothing"
    steps = f"{extra['environment_steps'] / 1e6:.3g} million environment steps"
    yield f"## Returns\n\n{_NOTE}\n\nNot run: {missing}.\n\n{extra['runs']} runs, {steps}."
    by_part = grouped(results.returns, "part")
    for part, title in _PARTS.items():
        for found in grouped(by_part.get(part, ()), "environment", "noise").values():
            yield _returns_table(title, found)


def _returns_table(title: str, rows: Sequence[ReturnRow]) -> str:
    first = rows[0]
    noise = f", noise {first.noise:g} per step on every velocity" if first.noise else ""
    about = f"{title}; {first.steps:,} environment steps, {first.seeds} seeds."
    cells = [
        [
            style.LABELS[row.critic],
            row.setting,
            _text(row.final, row.final_low, row.final_high),
            _text(row.final_best),
            _text(row.sampled, row.sampled_low, row.sampled_high),
            _text(row.area, row.area_low, row.area_high),
            f"{'–' if row.reached is None else f'{row.reached:,.0f}'} ({row.reached_seeds}/{row.seeds})",
            f"{row.diverged}/{row.seeds}",
        ]
        for row in rows
    ]
    return section(f"### {first.environment}{noise} ({first.part})", about, _HEADER, cells)


def _text(value: float, low: float | None = None, high: float | None = None) -> str:
    """Text of a return, from fractions to ten thousands: at least three digits, no exponents."""
    ends = (end for end in (value, low, high) if end is not None)
    texts = [f"{end:.0f}" if abs(end) >= 100.0 else f"{end:.3g}" for end in ends]
    return f"{texts[0]} [{texts[1]}, {texts[2]}]" if len(texts) == 3 else texts[0]
