"""figure-mujoco: run what is missing, and show Trust-PCL with six critics in six
environments.

First page: returns of the mean action by environment steps. Second: returns of the
sampled policy. Third: the paper's own grid and learner. Claims are judged by 95 %
intervals. (Feng et al. 2019, fig:mujoco_bench)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from koffline.experiments import mujoco, style
from koffline.experiments.cells import Run
from koffline.experiments.claims import claims_table
from koffline.experiments.mujoco import MujocoResult, best_settings, finished_cells
from koffline.experiments.results import Claim, Curves, Results, ReturnRow, grouped
from koffline.experiments.statistics import (
    FAILS,
    HOLDS,
    UNDECIDED,
    Interval,
    difference,
)
from koffline.online.config import OnlineConfig, OnlineRun
from koffline.spread import spread_of

_SHORT = {"window_length": "d", "learning_rate": "lr", "kl_coef": "τ"}
_NOT_SETTINGS = ("env", "env_options", "critic", "steps", "reward_scale")
_TITLES = {
    "InvertedDoublePendulum": "Inv. Double Pendulum",
    "InvertedPendulum": "Inverted Pendulum",
}
_WHERE = "Section 5.3, fig:mujoco_bench"
_DOUBLE_SAMPLING = "Sections 2 and 3 (double sampling), inside Trust-PCL"
_SENTENCES = {
    "final": "learns a better policy than",
    "area": "learns with fewer data than",
}
_GRIDS = {
    "final": "equal settings or grid for all",
    "paper": "the paper's grid and learner",
}
_OURS = ("kloss", "memory", "kloss_slow")
_RIVALS = ("td0", "fvi", "rg")
_PARTS = {
    "final": "Each critic at its best setting of the same grid",
    "paper": "The paper's learner, each critic at its best setting of the paper's grid",
    "noise": "Noise on the transitions",
}
_NOTE = (
    "IQM over all seeds and its 95 % bootstrap interval; “best but one”: mean without"
    " the worst seed, as the paper reports. Final: mean of the last tenth of the"
    " evaluations; area: mean height of the learning curve; sampled: the return of the"
    " sampled policy instead of the mean action's."
)
_HEADER = (
    "critic | setting | final return, IQM | best but one | sampled policy, IQM | area |"
    " median steps to threshold | diverged"
)


class Group(NamedTuple):
    """Key of one curve of the figure."""

    part: str
    environment: str
    noise: float
    critic: str

    @property
    def panel(self) -> str:
        """Panel of the curve: "Swimmer final", "Swimmer paper", "Swimmer noise
        0.02".
        """
        return f"{self.environment} {self.part}" + (
            f" {self.noise:g}" if self.part == "noise" else ""
        )


Learned = Mapping[Group, MujocoResult]  # in the paper's order


def collect_mujoco(run: Run) -> tuple[dict[str, Any], Curves]:
    """Run the searches, then the parts that use the best settings; return everything
    that is finished.
    """
    chosen: mujoco.Choices = {}
    for whole in (mujoco.SEARCHED, tuple(mujoco.SEARCHES)):
        asked = itertools.product(
            (part for part in whole if part in run.parts), run.environments
        )
        cells = [
            cell
            for where in asked
            for cell in mujoco.part_cells(*where, chosen, run.scale.quick)
        ]
        run.work_off(cells, mujoco.write_mujoco)
        chosen = best_settings(finished_cells(run, mujoco.SEARCHED, {})[0])
    return finished_parts(run)


def finished_parts(run: Run) -> tuple[dict[str, Any], Curves]:
    """Rows, claims and curves of everything finished, and the names of what was not
    run.
    """
    searched, missing = finished_cells(run, mujoco.SEARCHED, {})
    finished, also_missing = finished_cells(
        run, mujoco.SEARCHES, best_settings(searched)
    )
    found: dict[Group, list[tuple[OnlineRun, MujocoResult, int]]] = {}
    for cell, result in finished:
        for row, one in enumerate(cell.runs):
            group = Group(cell.part, cell.environment, cell.noise, one.config.critic)
            found.setdefault(group, []).append((one, result, row))
    order = [*mujoco.BUDGETS, *mujoco.CRITICS]
    groups = sorted(
        found,
        key=lambda g: (
            g.part,
            order.index(g.environment),
            g.noise,
            order.index(g.critic),
        ),
    )
    learned = {group: _joined([one[1:] for one in found[group]]) for group in groups}
    played = [
        (len(cell.runs), int(result.steps[-1]))
        for cell, result in (*finished, *searched)
    ]
    extra = {
        "environment_steps": sum(runs * steps for runs, steps in played),
        "runs": sum(runs for runs, _ in played),
        "not_run": [*missing, *also_missing],
    }
    returns = tuple(
        _row(group, found[group][0][0].config, part) for group, part in learned.items()
    )
    parts = {
        "rows": (),
        "returns": returns,
        "claims": tuple(mujoco_claims(learned)),
        "extra": extra,
    }
    curves = {
        f"{group.panel}/{group.critic}": {
            "steps": part.steps,
            **{
                name: getattr(part, own).astype(np.float32)
                for own, name in mujoco.CURVES.items()
            },
        }
        for group, part in learned.items()
    }
    return parts, curves


def _joined(runs: Sequence[tuple[MujocoResult, int]]) -> MujocoResult:
    """Stack the curves of several runs, given as (result, index of the run in it)."""
    names = [name for name in vars(runs[0][0]) if name != "steps"]
    parts = {
        name: np.stack([getattr(result, name)[row] for result, row in runs])
        for name in names
    }
    # NaN before the first finished episode becomes the run's first number
    for curve in parts["sampled"]:
        good = np.flatnonzero(np.isfinite(curve))
        if len(good):
            curve[~np.isfinite(curve)] = curve[good[0]]
        else:
            curve[~np.isfinite(curve)] = 0.0
    return MujocoResult(runs[0][0].steps, **parts)


def _row(group: Group, config: OnlineConfig, learned: MujocoResult) -> ReturnRow:
    """The results row of one curve."""
    reached = learned.reached(mujoco.BUDGETS[group.environment].threshold)
    scores = {
        "final": learned.final(),
        "sampled": learned.final("sampled"),
        "area": learned.area(),
    }
    # (Feng et al. 2019, Training Details)
    best = np.sort(scores["final"])[min(1, len(learned.returns) - 1) :]
    spreads: Any = {
        name: Interval(*map(_six_digits, astuple(spread_of(s))))
        for name, s in scores.items()
    }
    return ReturnRow(
        **group._asdict(),
        setting=setting_words(config),
        seeds=len(learned.returns),
        steps=int(learned.steps[-1]),
        **spreads,
        final_best=_six_digits(best.mean()),
        # ∞: half never reached it
        reached=_six_digits(np.sort(reached)[len(reached) // 2]),
        reached_seeds=int(np.isfinite(reached).sum()),
        diverged=int((learned.diverged_at >= 0).sum()),
    )


def _six_digits(value: float) -> float | None:
    """Round to six digits, for small files that are equal on all machines; None if not
    finite.
    """
    if np.isfinite(value):
        return float(f"{value:.6g}")
    return None


def setting_words(config: OnlineConfig) -> str:
    """A setting as text: "d 10, lr 0.003, τ 0.01" and all other values that differ from
    the defaults.
    """
    mine = mujoco.learned_by(config)
    usual = mujoco.learned_by(OnlineConfig(env="default"))
    words = [f"{short} {mine[name]:g}" for name, short in _SHORT.items()]
    for name, value in mine.items():
        is_said = (
            name in _SHORT or name in _NOT_SETTINGS or name.startswith("evaluation")
        )
        if not is_said and value != usual.get(name, value):
            words.append(
                f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
            )
    return ", ".join(words)


def mujoco_claims(learned: Learned) -> Iterator[Claim]:
    """Claims from the finished runs, one per comparison with another critic."""
    for critic, part in itertools.product(_OURS, _GRIDS):
        groups = [
            group for group in learned if (group.critic, group.part) == (critic, part)
        ]
        found = [
            claim
            for group in groups
            for claim in _compared(learned, group, tuple(_SENTENCES))
        ]
        if found:
            yield _consistently(found, style.LABELS[critic], _GRIDS[part])
            yield from found
    # Double sampling biases the residual gradient where transitions are random, and not
    # the K-loss.
    for group in learned:
        if group.part == "noise" and group.critic in _OURS:
            yield from _compared(learned, group, ("final",))


def _compared(learned: Learned, group: Group, scores: Sequence[str]) -> Iterator[Claim]:
    """Claims comparing a kernel loss with each other critic, by the given scores; a
    part has all of them.
    """
    own = style.LABELS[group.critic]
    ours = learned[group]
    is_noisy = group.part == "noise"
    for rival, score in itertools.product(_RIVALS, scores):
        theirs = learned[group._replace(critic=rival)]
        greedy, sampled = (
            difference(*(getattr(part, score)(curve) for part in (ours, theirs)))
            for curve in ("returns", "sampled")
        )
        other = style.LABELS[rival]
        cost = greedy.cost(0.0)
        drawn = style.interval_text(sampled)
        if score == "final":
            words = "final return"
        else:
            words = "area under the curve"
        grid = "" if is_noisy else f" ({_GRIDS[group.part]})"
        yield Claim(
            f"{own} {_SENTENCES[score]}"
            f" {other}{' where transitions are random' if is_noisy else ''}",
            _DOUBLE_SAMPLING if is_noisy else _WHERE,
            (
                f"{group.environment}, noise {group.noise:g}"
                if is_noisy
                else group.environment
            ),
            f"{words}, {own} − {other}, IQM of {len(ours.returns)} seeds{grid}",
            greedy,
            greedy.verdict(0.0),
            f"by the sampled policy: {drawn}"
            f" ({sampled.verdict(0.0)}){cost and '; '}{cost}",
        )


def _consistently(found: Sequence[Claim], name: str, grid: str) -> Claim:
    """Claim over all comparisons: false if one fails, undecided if none fails and one
    is undecided.
    """
    holds, fails = (
        sum(claim.verdict == verdict for claim in found) for verdict in (HOLDS, FAILS)
    )
    environments = len({claim.world for claim in found})
    return Claim(
        f"{name} consistently outperforms all the other methods, learning better policy"
        " with fewer data",
        _WHERE,
        "MuJoCo",
        f"comparisons of {len(found)} that hold ({environments} environments, {grid})",
        Interval(float(holds)),
        FAILS if fails else HOLDS if holds == len(found) else UNDECIDED,
        f"{fails} go the other way",
    )


def draw_mujoco(
    _: Results, curves: Curves, part: str = "final", curve: str = "return"
) -> Figure | None:
    """Panels in the paper's order, noise last; None if nothing of the part was run.

    part: "final" or "paper" (the grid in which each critic's best setting was found).
    curve: "return" (of the mean action) or "sampled_return".
    """
    label = f"return of the {'mean action' if curve == 'return' else 'sampled policy'}"
    label += ", paper's learner" if part == "paper" else ""
    groups = [Group(part, name, 0.0, "") for name in mujoco.BUDGETS]
    noises = mujoco.NOISE_LEVELS.items() if part == "final" else ()
    groups += [
        Group("noise", name, level, "") for name, levels in noises for level in levels
    ]
    shown: dict[Group, dict[str, Any]] = {}
    for group, critic in itertools.product(groups, mujoco.CRITICS):
        found = curves.get(f"{group.panel}/{critic}")
        if found:
            shown.setdefault(group, {})[critic] = found
    if not shown:
        return None
    columns = min(4, len(shown))
    lines = -(-len(shown) // 4)
    figure = Figure(figsize=(3.1 * columns, 2.6 * lines + 0.5), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).ravel()
    for place, (axes, (group, found)) in enumerate(
        zip(panels, shown.items(), strict=False)
    ):
        noise = f", noise {group.noise:g}" if group.noise else ""
        title = _TITLES.get(group.environment, group.environment)
        axes.set_title(f"({'abcdefgh'[place]}) {title}{noise}")
        series = {
            c: (np.asarray(part["steps"]), np.asarray(part[curve]))
            for c, part in found.items()
        }
        style.draw_returns(axes, series, mujoco.BUDGETS[group.environment].threshold)
        if place % columns == 0:
            axes.set_ylabel(label, fontsize=8)
    for axes in panels[len(shown) :]:
        axes.axis("off")
    critics = {critic for found in shown.values() for critic in found}
    style.method_legend(
        figure, sorted(critics), {"solved": {"color": style.SOFT, **style.DOTTED}}
    )
    return figure


MUJOCO_PAGES = {
    "sampled": partial(draw_mujoco, curve="sampled_return"),
    "paper": partial(draw_mujoco, part="paper"),
}


def mujoco_tables(results: Results) -> Iterator[str]:
    """Claims, what was run, and the returns of each part."""
    yield claims_table(results)
    extra = results.extra
    missing = ", ".join(extra["not_run"]) or "nothing"
    steps = f"{extra['environment_steps'] / 1e6:.3g} million environment steps"
    yield (
        f"## Returns\n\n{_NOTE}\n\nNot run: {missing}.\n\n{extra['runs']} runs,"
        f" {steps}."
    )
    by_part = grouped(results.returns, "part")
    for part, title in _PARTS.items():
        for found in grouped(by_part.get(part, ()), "environment", "noise").values():
            first = found[0]
            cells = []
            if first.noise:
                noise = f", noise {first.noise:g} per step on every velocity"
            else:
                noise = ""
            about = f"{title}; {first.steps:,} environment steps, {first.seeds} seeds."
            for row in found:
                returns = (row.final, Interval(row.final_best), row.sampled, row.area)
                numbers = [style.interval_text(each, _text) for each in returns]
                when = "–" if row.reached is None else f"{row.reached:,.0f}"
                counts = (
                    f"{when} ({row.reached_seeds}/{row.seeds})",
                    f"{row.diverged}/{row.seeds}",
                )
                cells.append([style.LABELS[row.critic], row.setting, *numbers, *counts])
            yield style.section(
                f"### {first.environment}{noise} ({first.part})", about, _HEADER, cells
            )


def _text(number: float) -> str:
    """A return as text, from fractions to ten thousands: at least three digits, no
    exponent.
    """
    if abs(number) >= 100.0:
        return f"{number:.0f}"
    return f"{number:.3g}"
