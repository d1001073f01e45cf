"""figure-mujoco: from finished cells to settings chosen, rows, curves, claims (by 95 % intervals)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from koffline.experiments import mujoco_cells as stacks
from koffline.experiments import mujoco_plan as plan
from koffline.experiments.results import FAILS, HOLDS, UNDECIDED, Claim, Curves, ReturnRow, SearchRow
from koffline.experiments.statistics import Scores, difference, scores_of
from koffline.experiments.style import LABELS
from koffline.online.config import OnlineConfig
from koffline.spread import interquartile_mean, spread_of

_WHERE = "Section 5.3, fig:mujoco_bench"
_GRIDS = {"final": "equal settings or grid for all", "paper": "the paper's grid and learner"}
_RIVALS = tuple(critic for critic in plan.CRITICS if critic != "kloss")
_SHORT = {"window_length": "d", "learning_rate": "lr", "max_divergence": "ε"}
_NOT_SETTINGS = {"environment", "environment_options", "critic", "steps", "reward_scale"}
Finished = list[tuple[stacks.MujocoCell, stacks.MujocoResult]]


class Group(NamedTuple):
    """What one curve of the figure shows."""

    part: str
    environment: str
    noise: float
    critic: str

    @property
    def panel(self) -> str:
        """Swimmer final, Swimmer paper, Swimmer noise 0.02: the first half of its name in the curves."""
        return f"{self.environment} {self.part}" + (f" {self.noise:g}" if self.part == "noise" else "")


@dataclass(frozen=True, eq=False)
class Learned:
    """All seeds of a group: curves (R, T) at ``steps`` (T,)."""

    setting: str
    steps: Int[np.ndarray, " time"]
    returns: Float[np.ndarray, "run time"]
    sampled: Float[np.ndarray, "run time"]
    lengths: Float[np.ndarray, "run time"]
    diverged: int  # runs that stood still

    def scores(self, curve: str, threshold: float | None = None) -> Scores:
        """Of a curve."""
        return scores_of(self.steps, getattr(self, curve), threshold)


Runs = Mapping[Group, Learned]


def finished_parts(request: plan.MujocoRequest, folder: Path) -> tuple[dict[str, Any], Curves]:
    """Rows, claims and curves of everything that is finished, and the names of what is not."""
    searched, missing = whole_parts(request, folder, plan.SEARCHED, {})
    choices, searches = choose_settings(searched)
    finished, also_missing = whole_parts(request, folder, plan.SEARCHES, choices)
    learned = gather(finished)
    budgets = {
        name: {
            "steps": request.steps_of(name),
            "seeds": request.seeds(name),
            "search_steps": request.search_steps(name),
        }
        for name in plan.BUDGETS
    }
    extra = {**_costs([*finished, *searched]), "not_run": [*missing, *also_missing], "budgets": budgets}
    parts = {
        "rows": (),
        "returns": tuple(rows_of_returns(learned)),
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


def whole_parts(
    request: plan.MujocoRequest, folder: Path, parts: Iterable[str], choices: plan.Choices
) -> tuple[Finished, list[str]]:
    """The cells of the parts that are finished as a whole, also without any, and the names of the others."""
    finished: Finished = []
    missing = []
    for part, environment in ((part, environment) for part in parts for environment in plan.BUDGETS):
        cells = plan.part_cells(request, part, environment, choices)
        if all(stacks.is_mujoco(cell, folder) for cell in cells):
            finished += [(cell, stacks.read_mujoco(stacks.mujoco_path(cell, folder))) for cell in cells]
        else:
            missing.append(f"{part} of {environment}")
    return finished, missing


def gather(finished: Finished) -> dict[Group, Learned]:
    """The runs of all cells, by what they show."""
    found: dict[Group, list[tuple[stacks.MujocoResult, int]]] = {}
    for cell, result in finished:
        for place, critic in enumerate(result.critics):
            group = Group(cell.part, cell.environment, cell.noise, critic)
            found.setdefault(group, []).append((result, place))
    return {group: _learned(runs) for group, runs in found.items()}


def _learned(runs: Sequence[tuple[stacks.MujocoResult, int]]) -> Learned:
    first, place = runs[0]
    returns, sampled, lengths = (
        np.stack([getattr(result, name)[row] for result, row in runs])
        for name in ("returns", "sampled", "lengths")
    )
    for curve in sampled:  # NaN where no training episode had ended yet becomes the run's first number
        good = np.flatnonzero(np.isfinite(curve))
        curve[~np.isfinite(curve)] = curve[good[0]] if len(good) else 0.0
    diverged = sum(int(result.diverged_at[row] >= 0) for result, row in runs)
    return Learned(setting_words(first.configs[place]), first.steps, returns, sampled, lengths, diverged)


def setting_words(config: Mapping[str, Any]) -> str:
    """d 10, lr 0.003, ε 0.001, and whatever else is not the default."""
    usual = OnlineConfig(environment="any").resolved()
    words = [f"{short} {config[name]:g}" for name, short in _SHORT.items()]
    for name, value in config.items():
        is_said = name in _SHORT or name in _NOT_SETTINGS or name.startswith("evaluation")
        if not is_said and name in usual and value != usual[name]:
            words.append(f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}")
    return ", ".join(words)


def choose_settings(
    finished: Finished,
) -> tuple[dict[tuple[str, str, str], plan.Setting], list[SearchRow]]:
    """The best setting of each critic by the area under the greedy curve, and all of them ranked."""
    runs: dict[tuple[str, str, str], dict[plan.Setting, list[tuple[stacks.MujocoResult, int]]]] = {}
    for cell, result in finished:
        for place, run in enumerate(cell.runs):
            critic = run.config.critic
            # What a run has of the names that its grid varies.
            names = {name for setting in plan.search_settings(cell.part, critic) for name, _ in setting}
            setting = plan.as_setting({name: getattr(run.config, name) for name in names})
            by_setting = runs.setdefault((cell.environment, cell.part, critic), {})
            by_setting.setdefault(setting, []).append((result, place))
    choices, rows = {}, []
    for key, by_setting in runs.items():
        learned = {setting: _learned(part) for setting, part in by_setting.items()}
        # Of equals the first.
        ranking = sorted(learned, key=lambda s: -float(interquartile_mean(learned[s].scores("returns").area)))
        choices[key] = ranking[0]
        for rank, part in enumerate(learned[setting] for setting in ranking):
            greedy, sampled = part.scores("returns"), part.scores("sampled")
            area, final, drawn = (_round(part.mean()) for part in (greedy.area, greedy.final, sampled.final))
            runs_of = (part.setting, len(part.returns), int(part.steps[-1]))
            rows.append(SearchRow(*key, *runs_of, area, final, drawn, rank))
    return choices, rows


def _costs(finished: Finished) -> dict[str, Any]:
    """Seconds, environment steps per second and core, and what the time went to."""
    seconds = sum(result.seconds for _, result in finished)
    steps = sum(int(result.steps[-1]) * len(result.seeds) for _, result in finished)
    shares: Counter[str] = Counter()
    for _, result in finished:
        shares.update(result.shares)
    total = max(sum(shares.values()), 1e-9)
    return {
        "training_seconds": seconds,
        "environment_steps": steps,
        "runs": sum(len(result.seeds) for _, result in finished),
        "steps_per_second": steps / max(seconds, 1e-9),
        "shares": {name: part / total for name, part in shares.items()},
    }


def rows_of_returns(learned: Runs) -> list[ReturnRow]:
    """One row per group, in the order of the paper's panels."""

    def place(group: Group) -> tuple[str, int, float, int]:
        panel = list(plan.BUDGETS).index(group.environment)
        return group.part, panel, group.noise, plan.CRITICS.index(group.critic)

    return [_row(group, learned[group]) for group in sorted(learned, key=place)]


def _row(group: Group, part: Learned) -> ReturnRow:
    greedy = part.scores("returns", plan.BUDGETS[group.environment].threshold)
    sampled = part.scores("sampled")
    reached = float(np.sort(greedy.reached)[len(greedy.reached) // 2])  # ∞ where half never did
    return ReturnRow(
        **group._asdict(),
        setting=part.setting,
        seeds=len(part.returns),
        steps=int(part.steps[-1]),
        **_spread("final", greedy.final),
        final_best=_without_the_worst(greedy.final),
        **_spread("sampled", sampled.final),
        sampled_best=_without_the_worst(sampled.final),
        **_spread("area", greedy.area),
        sampled_area=_round(float(interquartile_mean(sampled.area))),
        length=_round(part.scores("lengths").final.mean()),
        reached=reached if math.isfinite(reached) else None,
        reached_seeds=int(np.isfinite(greedy.reached).sum()),
        diverged=part.diverged,
    )


def _spread(name: str, values: np.ndarray) -> dict[str, Any]:
    """The interquartile mean over runs and its interval; None for an end that a single run does not have."""
    found = spread_of([values])
    ends = {name: found.iqm, f"{name}_low": found.low, f"{name}_high": found.high}
    return {key: _round(end) if math.isfinite(end) else None for key, end in ends.items()}


def _without_the_worst(values: np.ndarray) -> float:
    """Mean of all runs but the worst: the paper's best 5 of 6. (Feng et al. 2019, Training Details)"""
    return _round(np.sort(values)[min(1, len(values) - 1) :].mean())


def _round(value: float) -> float:
    """Six digits: files stay small and the same everywhere."""
    return float(f"{value:.6g}")


def mujoco_claims(learned: Runs) -> Iterator[Claim]:
    """Everything that the finished runs can say."""
    for part, grid in _GRIDS.items():
        found = [
            claim for environment in plan.BUDGETS for claim in _against_rivals(learned, part, environment)
        ]
        if found:
            yield _consistently(found, grid)
            yield from found
    # Double sampling biases the residual gradient where transitions are random, and not the K-loss.
    for group in learned:
        if (group.part, group.critic) == ("noise", "kloss"):
            where = "Sections 2 and 3 (double sampling), inside Trust-PCL"
            world = f"{group.environment}, noise {group.noise:g}"
            for rival in _RIVALS:
                better = f"K-loss learns a better policy than {LABELS[rival]} where transitions are random"
                yield from _compared(learned, group, rival, "final", better, where, world, "")


def _against_rivals(learned: Runs, part: str, environment: str) -> Iterator[Claim]:
    """Better policies (final return) with fewer data (area under the curve), rival by rival."""
    group, grid = Group(part, environment, 0.0, "kloss"), f" ({_GRIDS[part]})"
    for rival in _RIVALS:
        label = LABELS[rival]
        better, faster = (
            f"K-loss learns a better policy than {label}",
            f"K-loss learns with fewer data than {label}",
        )
        yield from _compared(learned, group, rival, "final", better, _WHERE, environment, grid)
        yield from _compared(learned, group, rival, "area", faster, _WHERE, environment, grid)


def _compared(
    learned: Runs, group: Group, rival: str, score: str, sentence: str, where: str, world: str, grid: str
) -> Iterator[Claim]:
    """K-loss beside a rival by one score; nothing where one of them has not been run."""
    ours, theirs = learned.get(group), learned.get(group._replace(critic=rival))
    if ours is None or theirs is None:
        return
    greedy, sampled = (
        difference(*(getattr(part.scores(curve), score) for part in (ours, theirs)))
        for curve in ("returns", "sampled")
    )
    words = "final return" if score == "final" else "area under the curve"
    measured = f"{words}, K-loss − {LABELS[rival]}, IQM of {len(ours.returns)} seeds{grid}"
    reason = f"by the sampled policy: {sampled} ({sampled.verdict(0.0)})"
    ends = (greedy.value, greedy.low, greedy.high)
    yield Claim(sentence, where, world, measured, *ends, greedy.verdict(0.0), reason)


def _consistently(found: Sequence[Claim], grid: str) -> Claim:
    """One that goes the other way refutes it, one that is undecided leaves it open."""
    holds, fails = (sum(claim.verdict == verdict for claim in found) for verdict in (HOLDS, FAILS))
    environments = len({claim.world for claim in found})
    return Claim(
        "K-loss consistently outperforms all the other methods, learning better policy with fewer data",
        _WHERE, "MuJoCo", f"comparisons of {len(found)} that hold ({environments} environments, {grid})",
        float(holds), None, None, FAILS if fails else HOLDS if holds == len(found) else UNDECIDED,
        f"{fails} go the other way",
    )  # fmt: skip
