"""Summary of an online run over its seeds: interquartile means, the paper's best 5 of 6, speed, curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from koffline.errors import ConfigError
from koffline.online.group import COLUMNS, EVALUATION, GroupResult, GroupTask
from koffline.spread import LEVEL, Spread, spread_of
from koffline.store.files import atomic_file, finite_json, write_text

_COLOUR = "#0072B2"


@dataclass(frozen=True)
class Score:
    """One number per seed, −∞ if it diverged. best: mean without the worst seed."""

    per_seed: tuple[float, ...]
    spread: Spread
    best: float

    def as_json(self, best: str) -> dict[str, Any]:
        """Plain values for JSON. best: name of the mean without the worst seed."""
        return {"iqm": self.spread.iqm, "interval": [self.spread.low, self.spread.high], best: self.best}


@dataclass(frozen=True)
class OnlineSummary:
    """A finished run over its seeds.

    steps: environment steps per seed. points: the steps of the evaluations; curves: a score at each of them,
    by the columns of evaluation.csv: the mean action's return and length, the return of the policy's own
    draws. diverged: seed to step. steps_per_second: of all seeds together.
    """

    env: str
    critic: str
    seeds: tuple[int, ...]
    steps: int
    points: tuple[int, ...]
    curves: Mapping[str, tuple[Score, ...]]
    diverged: Mapping[int, int]
    seconds: float
    steps_per_second: float

    @property
    def last(self) -> tuple[Score, Score, Score]:
        """Return, sampled return and length in the last evaluation."""
        return self.curves["return"][-1], self.curves["sampled_return"][-1], self.curves["length"][-1]

    @property
    def best_name(self) -> str:
        """Name of the mean without the worst seed: best_5_of_6 for six seeds."""
        return f"best_{max(1, len(self.seeds) - 1)}_of_{len(self.seeds)}"


def summarise(tasks: Sequence[GroupTask], results: Sequence[GroupResult]) -> OnlineSummary:
    """Summarise the evaluations of all seeds.

    Raises ConfigError if a seed has no evaluations, or other ones than the other seeds.
    """
    folders = {seed: folder for task in tasks for seed, folder in zip(task.seeds, task.folders, strict=True)}
    diverged = {seed: step for result in results for seed, step in result.diverged.items()}
    points, numbers = _read_curves(folders, diverged)
    seconds = max(result.seconds for result in results)
    taken = sum(len(task.seeds) * result.steps for task, result in zip(tasks, results, strict=True))
    return OnlineSummary(
        env=tasks[0].config.env,
        critic=tasks[0].config.critic,
        seeds=tuple(folders),
        steps=max(result.steps for result in results),
        points=points,
        curves={name: tuple(map(_score, part.T)) for name, part in numbers.items()},
        diverged=diverged,
        seconds=seconds,
        steps_per_second=taken / max(seconds, 1e-9),
    )


def write_summary(summary: OnlineSummary, out: Path) -> None:
    """Write summary.json, with null for non-finite numbers, and learning_curve.png."""
    best = summary.best_name
    scores = dict(zip(("return", "sampled_return", "length"), summary.last, strict=True))
    content = {
        "env": summary.env,
        "critic": summary.critic,
        "seeds": summary.seeds,
        "steps": summary.steps,
        **scores["return"].as_json(best),
        "level": LEVEL,
        **{
            name: {**score.as_json(best), "per_seed": dict(zip(summary.seeds, score.per_seed, strict=True))}
            for name, score in scores.items()
        },
        "diverged": summary.diverged,
    }
    write_text(out / "summary.json", finite_json(content))
    _draw_curves(summary, out / "learning_curve.png")


def _read_curves(
    folders: Mapping[int, Path], diverged: Mapping[int, int]
) -> tuple[tuple[int, ...], dict[str, Float[np.ndarray, "seed point"]]]:
    """Steps of the evaluations, and each column for all seeds; a diverged seed has −∞ from then on."""
    tables = []
    for path in (folder / EVALUATION for folder in folders.values()):
        lines = path.read_text(encoding="utf-8").splitlines()[1:] if path.exists() else []
        cells = np.array([line.split(",") for line in lines], dtype=np.float64)
        tables.append(cells.reshape(-1, 1 + len(COLUMNS)))
    steps, end = max(tables, key=len)[:, 0], max(diverged.values(), default=0)
    if not len(steps) or (set(folders) <= set(diverged) and end > steps[-1]):
        steps = np.append(steps, float(end))  # up to where the last seed diverged
    filled = np.full((len(COLUMNS), len(tables), len(steps)), -math.inf)
    for place, (seed, table) in enumerate(zip(folders, tables, strict=True)):
        if len(table) < len(steps) and seed not in diverged:
            raise ConfigError(f"{folders[seed] / EVALUATION} lacks evaluations; it was edited: train again")
        filled[:, place, : len(table)] = table[:, 1:].T
    return tuple(map(int, steps)), dict(zip(COLUMNS, filled, strict=True))


def _score(values: Float[np.ndarray, " seed"]) -> Score:
    cleaned = np.where(np.isnan(values), -math.inf, values)
    kept = np.sort(cleaned)[-max(1, len(values) - 1) :]
    return Score(tuple(map(float, cleaned)), spread_of(cleaned), float(kept.mean()))


def _draw_curves(summary: OnlineSummary, path: Path) -> None:
    """Draw the learning curve; the same summary gives the same bytes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 3.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    shown = {"mean action": summary.curves["return"], "sampled actions": summary.curves["sampled_return"]}
    for axes, (title, scores) in zip(panels, shown.items(), strict=True):
        lines = np.array([[s.spread.low, s.spread.iqm, s.spread.high, *s.per_seed] for s in scores])
        low, middle, high, *seeds = np.where(np.isfinite(lines), lines, np.nan).T
        look: Any = {"color": _COLOUR, "marker": "o" if len(scores) == 1 else ""}
        axes.plot(summary.points, np.transpose(seeds), **look, lw=0.7, alpha=0.35, ms=3)
        axes.fill_between(summary.points, low, high, color=_COLOUR, alpha=0.18, lw=0)
        axes.plot(summary.points, middle, **look, lw=1.8, ms=4)
        axes.grid(color="#e4e7eb")
        axes.set_title(title, loc="left", fontsize=9)
        axes.set_xlabel("environment steps per seed")
    panels[0].set_ylabel("return of an episode")
    title = f"{summary.env}, {summary.critic}: {len(summary.seeds)} seeds"
    if len(summary.seeds) > 1:
        title += f", interquartile mean and {LEVEL:.0%} interval"
    if summary.diverged:
        title += f"; {len(summary.diverged)} diverged"
    figure.suptitle(title.replace("$", r"\$"), fontsize=9, x=0.01, ha="left")
    with atomic_file(path, force=True) as temporary:
        figure.savefig(temporary, format="png", dpi=160, metadata={"Software": None})
