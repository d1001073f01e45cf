"""figure-mujoco: from finished cells to settings chosen, rows, curves, and what was not run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from koffline.experiments.mujoco_cells import MujocoCell, MujocoResult
from koffline.experiments.mujoco_plan import BUDGETS, CRITICS, Setting, as_setting, search_settings
from koffline.experiments.results import Curves, ReturnRow, SearchRow
from koffline.experiments.statistics import (
    fill_gaps,
    median_reached,
    rank_settings,
    scores_of,
    spread,
    without_the_worst,
)
from koffline.online.config import OnlineConfig
from koffline.spread import interquartile_mean

Finished = Sequence[tuple[MujocoCell, MujocoResult]]
_SHORT = {"window_length": "d", "learning_rate": "lr", "max_divergence": "ε"}
_NOT_SETTINGS = frozenset({"environment", "environment_options", "critic", "steps", "reward_scale"}) | {
    name for name in vars(OnlineConfig(environment="any")) if name.startswith("evaluation")
}


@dataclass(frozen=True)
class Group:
    """What one curve of the figure shows: a critic on an environment, in a part, at a level of noise."""

    part: str
    environment: str
    noise: float
    critic: str

    @property
    def panel(self) -> str:
        """The panel it is drawn in: the first half of its name in the file of curves."""
        return panel_of(self.part, self.environment, self.noise)


@dataclass(frozen=True, eq=False)
class Learned:
    """All seeds of a group: curves (R, T) at ``steps`` (T,). diverged: runs that stood still."""

    setting: str
    steps: Int[np.ndarray, " time"]
    returns: Float[np.ndarray, "run time"]
    sampled: Float[np.ndarray, "run time"]
    lengths: Float[np.ndarray, "run time"]
    diverged: int


def panel_of(part: str, environment: str, noise: float = 0.0) -> str:
    """Swimmer final, Swimmer paper, Swimmer noise 0.02."""
    return f"{environment} {part} {noise:g}" if part == "noise" else f"{environment} {part}"


def gather(finished: Finished) -> dict[Group, Learned]:
    """The runs of all cells but those of searches, by what they show."""
    found: dict[Group, list[tuple[MujocoResult, int]]] = {}
    for cell, result in finished:
        for place, critic in enumerate(result.critics):
            group = Group(cell.part, cell.environment, cell.noise, critic)
            if not cell.part.endswith("search"):
                found.setdefault(group, []).append((result, place))
    return {group: _learned(runs) for group, runs in found.items()}


def rows_of_returns(learned: Mapping[Group, Learned]) -> list[ReturnRow]:
    """One row per group, in the order of the paper's panels."""
    order = {name: place for place, name in enumerate(BUDGETS)}
    groups = sorted(learned, key=lambda g: (g.part, order[g.environment], g.noise, CRITICS.index(g.critic)))
    return [_row(group, learned[group]) for group in groups]


def curves_of_returns(learned: Mapping[Group, Learned]) -> Curves:
    """``PANEL/CRITIC``: steps (T,), return, sampled_return and length (R, T)."""
    return {
        f"{group.panel}/{group.critic}": {
            "steps": part.steps,
            "return": part.returns.astype(np.float32),
            "sampled_return": part.sampled.astype(np.float32),
            "length": part.lengths.astype(np.float32),
        }
        for group, part in learned.items()
    }


def choose_settings(finished: Finished) -> tuple[dict[tuple[str, str, str], Setting], list[SearchRow]]:
    """The best setting of each critic by the area under the greedy curve, and all of them ranked.

    finished: whole searches only: a best of half a grid would be another's.
    """
    runs: dict[tuple[str, str, str], dict[Setting, list[tuple[MujocoResult, int]]]] = {}
    for cell, result in finished:
        for place, run in enumerate(cell.runs):
            key = (cell.environment, cell.part, run.config.critic)
            runs.setdefault(key, {}).setdefault(_setting_of(run.config, cell.part), []).append(
                (result, place)
            )
    choices: dict[tuple[str, str, str], Setting] = {}
    rows: list[SearchRow] = []
    for key, by_setting in runs.items():
        learned = [_learned(part) for part in by_setting.values()]
        scores = [scores_of(part.steps, part.returns) for part in learned]
        ranking = rank_settings([part.area for part in scores])
        choices[key] = list(by_setting)[ranking[0]]
        for rank, place in enumerate(ranking):
            part, score = learned[place], scores[place]
            sampled = scores_of(part.steps, part.sampled)
            rows.append(
                SearchRow(
                    *key, part.setting, len(part.returns), int(part.steps[-1]), _round(score.area.mean()),
                    _round(score.final.mean()), _round(sampled.final.mean()), rank,
                )
            )  # fmt: skip
    return choices, rows


def costs_of(finished: Finished) -> dict[str, Any]:
    """Seconds, environment steps per second and core, and what the time went to."""
    seconds = sum(result.seconds for _, result in finished)
    steps = sum(int(result.steps[-1]) * len(result.seeds) for _, result in finished)
    shares: dict[str, float] = {}
    for _, result in finished:
        for name, part in result.shares.items():
            shares[name] = shares.get(name, 0.0) + part
    total = max(sum(shares.values()), 1e-9)
    return {
        "training_seconds": seconds,
        "environment_steps": steps,
        "runs": sum(len(result.seeds) for _, result in finished),
        "steps_per_second": steps / max(seconds, 1e-9),
        "shares": {name: part / total for name, part in shares.items()},
    }


def setting_words(config: Mapping[str, Any]) -> str:
    """d 10, lr 0.003, ε 0.001, and whatever else is not the default."""
    default = vars(OnlineConfig(environment="any"))
    words = [f"{short} {config[name]:g}" for name, short in _SHORT.items()]
    for name, value in config.items():
        if name in _SHORT or name in _NOT_SETTINGS or name not in default:
            continue
        usual = list(default[name]) if isinstance(default[name], tuple) else default[name]
        if value != usual:
            words.append(f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}")
    return ", ".join(words)


def _setting_of(config: OnlineConfig, search: str) -> Setting:
    """What a run has of the names that its grid varies."""
    names = {name for setting in search_settings(search, config.critic) for name, _ in setting}
    return as_setting({name: getattr(config, name) for name in names})


def _learned(runs: Sequence[tuple[MujocoResult, int]]) -> Learned:
    first, place = runs[0]
    stacked = {
        name: np.stack([getattr(result, name)[row] for result, row in runs])
        for name in ("returns", "sampled", "lengths")
    }
    return Learned(
        setting_words(first.configs[place]),
        first.steps,
        stacked["returns"],
        fill_gaps(stacked["sampled"]),
        stacked["lengths"],
        sum(result.diverged_at[row] >= 0 for result, row in runs),
    )


def _row(group: Group, part: Learned) -> ReturnRow:
    threshold = BUDGETS[group.environment].threshold
    greedy = scores_of(part.steps, part.returns, threshold)
    sampled = scores_of(part.steps, part.sampled)
    reached = median_reached(greedy.reached)
    return ReturnRow(
        environment=group.environment,
        part=group.part,
        noise=group.noise,
        critic=group.critic,
        setting=part.setting,
        seeds=len(part.returns),
        steps=int(part.steps[-1]),
        **_rounded("final", greedy.final),
        final_best=_round(without_the_worst(greedy.final)),
        **_rounded("sampled", sampled.final),
        sampled_best=_round(without_the_worst(sampled.final)),
        **_rounded("area", greedy.area),
        sampled_area=_round(float(interquartile_mean(sampled.area))),
        length=_round(scores_of(part.steps, part.lengths).final.mean()),
        reached=reached if math.isfinite(reached) else None,
        reached_seeds=int(np.isfinite(greedy.reached).sum()),
        diverged=part.diverged,
    )


def _rounded(name: str, values: np.ndarray) -> dict[str, Any]:
    """The interquartile mean over runs and its interval; None for an end that a single run does not have."""
    numbers = spread(values).named(name)
    return {key: _round(number) if math.isfinite(number) else None for key, number in numbers.items()}


def _round(value: float) -> float:
    """Six digits: files stay small and the same everywhere."""
    return float(f"{value:.6g}")
