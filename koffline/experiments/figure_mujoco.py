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
from koffline.experiments.result_files import (
    Claim,
    Collected,
    Curves,
    Results,
    ReturnRow,
    grouped,
)
from koffline.experiments.seed_statistics import (
    FAILS,
    HOLDS,
    TIED,
    UNDECIDED,
    SeedInterval,
    difference,
)
from koffline.experiments.statements import group_verdict
from koffline.online.config import OnlineConfig
from koffline.spread import interquartile_mean, spread_of

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
    "paper": "The paper's settings, each critic at its best of the paper's grid",
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


# Two critics are level if no difference above this share of the larger return is left.
_LEVEL_SHARE = 0.1


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
        if self.part == "noise":
            return f"{self.environment} noise {self.noise:g}"
        return f"{self.environment} {self.part}"


Learned = Mapping[Group, MujocoResult]  # in the paper's order


def collect_mujoco(run: Run) -> Collected:
    """Run the searches, then the parts that use the best settings; return everything
    that is finished.
    """
    chosen: mujoco.Choices = {}
    for stage in (mujoco.SEARCHED, tuple(mujoco.SEARCHES)):
        parts = [part for part in stage if part in run.parts]
        cells: list[mujoco.MujocoCell] = []
        for part, environment in itertools.product(parts, run.environments):
            cells += mujoco.part_cells(part, environment, chosen, run.scale.quick)
        run.work_off(cells, mujoco.write_mujoco)
        chosen = best_settings(finished_cells(run, mujoco.SEARCHED, {})[0])
    return finished_parts(run)


def finished_parts(run: Run) -> Collected:
    """Rows, claims and curves of everything finished, and the names of what was not
    run.
    """
    searched, missing = finished_cells(run, mujoco.SEARCHED, {})
    finished, also_missing = finished_cells(
        run, mujoco.SEARCHES, best_settings(searched)
    )
    configs: dict[Group, OnlineConfig] = {}  # of the first run
    runs_of: dict[Group, list[tuple[MujocoResult, int]]] = {}
    for cell, result in finished:
        for row, online_run in enumerate(cell.runs):
            config = online_run.config
            group = Group(cell.part, cell.environment, cell.noise, config.critic)
            configs.setdefault(group, config)
            runs_of.setdefault(group, []).append((result, row))
    order = [*mujoco.BUDGETS, *mujoco.CRITICS]
    groups = sorted(
        runs_of,
        key=lambda g: (
            g.part,
            order.index(g.environment),
            g.noise,
            order.index(g.critic),
        ),
    )
    learned = {group: _joined(runs_of[group]) for group in groups}
    runs_and_steps = [
        (len(cell.runs), int(result.steps[-1]))
        for cell, result in (*finished, *searched)
    ]
    extra = {
        "environment_steps": sum(runs * steps for runs, steps in runs_and_steps),
        "runs": sum(runs for runs, _ in runs_and_steps),
        "not_run": [*missing, *also_missing],
    }
    returns = tuple(
        _row(group, configs[group], part) for group, part in learned.items()
    )
    parts = {
        "rows": (),
        "returns": returns,
        "claims": tuple(mujoco_claims(learned)),
        "extra": extra,
    }
    curves = {}
    for group, part in learned.items():
        curve = {"steps": part.steps}
        for field, name in mujoco.CURVES.items():
            curve[name] = getattr(part, field).astype(np.float32)
        curves[f"{group.panel}/{group.critic}"] = curve
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
        name: SeedInterval(*map(_six_digits, astuple(spread_of(s))))
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
        if name in _SHORT or name in _NOT_SETTINGS or name.startswith("evaluation"):
            continue
        if value == usual.get(name, value):
            continue
        if isinstance(value, float):
            words.append(f"{name} {value:.3g}")
        else:
            words.append(f"{name} {value}")
    return ", ".join(words)


def mujoco_claims(learned: Learned) -> Iterator[Claim]:
    """Claims from the finished runs, one per comparison with another critic."""
    for critic, part in itertools.product(_OURS, _GRIDS):
        groups = [
            group for group in learned if (group.critic, group.part) == (critic, part)
        ]
        claims = [
            claim
            for group in groups
            for claim in _compared(learned, group, tuple(_SENTENCES))
        ]
        if claims:
            yield _consistently(claims, style.LABELS[critic], _GRIDS[part])
            yield from claims
    # Double sampling biases the residual gradient where
    # transitions are random, and not the K-loss.
    for group in learned:
        if group.part == "noise" and group.critic in _OURS:
            yield from _compared(learned, group, ("final",))


def _compared(learned: Learned, group: Group, scores: Sequence[str]) -> Iterator[Claim]:
    """Claims comparing a kernel loss with each other critic, by the given scores; a
    part has all of them.
    """
    ours = learned[group]
    name = style.LABELS[group.critic]
    condition = ""
    where = _WHERE
    world = group.environment
    if group.part == "noise":
        grid = ""
        condition = " where transitions are random"
        where = _DOUBLE_SAMPLING
        world += f", noise {group.noise:g}"
    else:
        grid = f" ({_GRIDS[group.part]})"
    for rival, score in itertools.product(_RIVALS, scores):
        theirs = learned[group._replace(critic=rival)]
        our_score = getattr(ours, score)  # of a curve, by seed
        their_score = getattr(theirs, score)
        greedy = difference(our_score("returns"), their_score("returns"))
        sampled = difference(our_score("sampled"), their_score("sampled"))
        other = style.LABELS[rival]
        words = "area under the curve"
        if score == "final":
            words = "final return"
        reason = (
            f"by the sampled policy: {style.interval_text(sampled)}"
            f" ({sampled.verdict(0.0)})"
        )
        margin = _LEVEL_SHARE * max(
            abs(float(interquartile_mean(our_score("returns")))),
            abs(float(interquartile_mean(their_score("returns")))),
        )
        yield Claim(
            sentence=f"{name} {_SENTENCES[score]} {other}{condition}",
            where=where,
            world=world,
            measured=(
                f"{words}, {name} − {other}, IQM of {len(ours.returns)} seeds{grid}"
            ),
            number=greedy,
            verdict=greedy.judged(0.0, -margin, margin),
            reason=reason,
        )


def _consistently(claims: Sequence[Claim], name: str, grid: str) -> Claim:
    """Claim over all comparisons: false if one fails, undecided if none fails and one
    is undecided, level if the others are.

    claims: the comparisons. name: our critic's. grid: of the search, in words.
    """
    holds = sum(claim.verdict == HOLDS for claim in claims)
    fails = sum(claim.verdict == FAILS for claim in claims)
    environments = len({claim.world for claim in claims})
    verdict = group_verdict([claim.verdict for claim in claims])
    return Claim(
        f"{name} consistently outperforms all the other methods, learning better policy"
        " with fewer data",
        _WHERE,
        "MuJoCo",
        f"comparisons of {len(claims)} that hold ({environments} environments, {grid})",
        SeedInterval(float(holds)),
        verdict,
        f"{fails} go the other way",
    )


def draw_mujoco(
    _: Results, curves: Curves, part: str = "final", curve: str = "return"
) -> Figure | None:
    """Panels in the paper's order, noise last; None if nothing of the part was run.

    part: "final" or "paper" (the grid in which each critic's best setting was found).
    curve: "return" (of the mean action) or "sampled_return".
    """
    label = "return of the sampled policy"
    if curve == "return":
        label = "return of the mean action"
    if part == "paper":
        label += ", paper's settings"
    groups = [Group(part, name, 0.0, "") for name in mujoco.BUDGETS]
    if part == "final":
        for name, levels in mujoco.NOISE_LEVELS.items():
            groups += [Group("noise", name, level, "") for level in levels]
    shown: dict[Group, dict[str, Mapping[str, np.ndarray]]] = {}
    for group, critic in itertools.product(groups, mujoco.CRITICS):
        learned = curves.get(f"{group.panel}/{critic}")
        if learned:
            shown.setdefault(group, {})[critic] = learned
    if not shown:
        return None
    columns = min(4, len(shown))
    lines = -(-len(shown) // 4)
    figure = Figure(figsize=(3.1 * columns, 2.6 * lines + 0.5), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).ravel()
    for place, (axes, (group, by_critic)) in enumerate(
        zip(panels, shown.items(), strict=False)
    ):
        title = _TITLES.get(group.environment, group.environment)
        if group.noise:
            title += f", noise {group.noise:g}"
        axes.set_title(f"({'abcdefgh'[place]}) {title}")
        series = {
            critic: (np.asarray(learned["steps"]), np.asarray(learned[curve]))
            for critic, learned in by_critic.items()
        }
        style.draw_returns(axes, series, mujoco.BUDGETS[group.environment].threshold)
        if place % columns == 0:
            axes.set_ylabel(label, fontsize=8)
    for axes in panels[len(shown) :]:
        axes.axis("off")
    critics = set(itertools.chain.from_iterable(shown.values()))
    style.method_legend(
        figure, sorted(critics), {"solved": {"color": style.SOFT, **style.DOTTED}}
    )
    return figure


MUJOCO_PAGES = {
    "sampled": partial(draw_mujoco, curve="sampled_return"),
    "paper": partial(draw_mujoco, part="paper"),
}


def mujoco_tables(results: Results) -> Iterator[str]:
    """What was run, the final returns of each part, and how the kernel losses
    compare.
    """
    extra = results.extra
    missing = ", ".join(extra["not_run"]) or "nothing"
    steps = f"{extra['environment_steps'] / 1e6:.3g} million environment steps"
    yield (
        f"{extra['runs']} runs, {steps}. Not run: {missing}. Settings, areas, returns"
        " of the sampled policy, steps to the threshold and every comparison are in [the"
        " appendix](figure-mujoco.appendix.md)."
    )
    by_part = grouped(results.returns, "part")
    for part, title in _PARTS.items():
        if part in by_part:
            yield _finals_table(title, by_part[part])
    yield _comparisons_table(results.claims)


def _finals_table(title: str, rows: Sequence[ReturnRow]) -> str:
    """Final returns of a part, a line per environment and a column per critic."""
    critics = [
        critic for critic in mujoco.CRITICS if any(row.critic == critic for row in rows)
    ]
    lines = []
    for group in grouped(rows, "environment", "noise").values():
        first = group[0]
        name = f"{first.environment} ({first.steps:,} steps)"
        if first.noise:
            name = f"{first.environment}, noise {first.noise:g} ({first.steps:,} steps)"
        by_critic = {row.critic: row for row in group}
        cells = [name]
        for critic in critics:
            text = "–"
            if critic in by_critic:
                text = style.interval_text(by_critic[critic].final, _text)
            cells.append(text)
        lines.append(cells)
    seeds = rows[0].seeds
    note = (
        f"Final return of the mean action, interquartile mean of {seeds} seeds with its"
        " 95 % bootstrap interval."
    )
    header = " | ".join(("environment", *(style.LABELS[critic] for critic in critics)))
    return style.section(f"## {title}", note, header, lines)


def _comparisons_table(claims: Sequence[Claim]) -> str:
    """How many comparisons of each kernel loss hold, by grid and rival."""
    lines = []
    for critic, words in itertools.product(_OURS, _GRIDS.values()):
        for rival in _RIVALS:
            pair = f"{style.LABELS[critic]} − {style.LABELS[rival]},"
            chosen = [
                claim
                for claim in claims
                if f", {pair}" in claim.measured
                and claim.measured.endswith(f"({words})")
            ]
            if not chosen:
                continue
            verdicts = [claim.verdict for claim in chosen]
            counts = [
                str(verdicts.count(kind)) for kind in (HOLDS, TIED, UNDECIDED, FAILS)
            ]
            lines.append([style.LABELS[critic], style.LABELS[rival], words, *counts])
    note = (
        "Differences of interquartile means, final return and area under the learning"
        " curve, an environment each. Ahead or behind: the interval excludes zero."
        " Level: it allows no difference above a tenth of the larger return, as between"
        " critics that hold the maximum."
    )
    header = "kernel loss | against | grid | ahead | level | undecided | behind"
    return style.section("## Kernel losses against the others", note, header, lines)


def mujoco_appendix(results: Results) -> Iterator[str]:
    """Every comparison, and all returns of each part with their settings."""
    yield claims_table(results)
    yield f"## Returns\n\n{_NOTE}"
    by_part = grouped(results.returns, "part")
    for part, title in _PARTS.items():
        for rows in grouped(by_part.get(part, ()), "environment", "noise").values():
            first = rows[0]
            cells = []
            noise = ""
            if first.noise:
                noise = f", noise {first.noise:g} per step on every velocity"
            about = f"{title}; {first.steps:,} environment steps, {first.seeds} seeds."
            for row in rows:
                returns = (
                    row.final,
                    SeedInterval(row.final_best),
                    row.sampled,
                    row.area,
                )
                numbers = [style.interval_text(score, _text) for score in returns]
                when = "–"
                if row.reached is not None:
                    when = f"{row.reached:,.0f}"
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
