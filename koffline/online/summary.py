"""What the seeds of an online run add up to: interquartile means, the paper's best 5 of 6, speed, curves."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from koffline.errors import ConfigError
from koffline.online.folder import SUMMARY, Plan, seed_folder
from koffline.online.group import PARTS, GroupResult
from koffline.online.logs import EVALUATION, EVALUATION_HEADER, read_rows
from koffline.spread import LEVEL, Spread, spread_of
from koffline.store.files import atomic_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOUR, _INK = "#0072B2", "#1f2933"  # Okabe and Ito's blue
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e7eb",
    "axes.axisbelow": True,
}
_COLUMNS = EVALUATION_HEADER.split(",")[1:]


@dataclass(frozen=True)
class Score:
    """One number per seed, −∞ where it diverged; best: mean of all seeds but the worst one."""

    per_seed: tuple[float, ...]
    spread: Spread
    best: float


@dataclass(frozen=True)
class Point:
    """All seeds at one evaluation."""

    step: int
    mean_action: Score
    sampled: Score


@dataclass(frozen=True)
class OnlineSummary:
    """A finished run over its seeds.

    steps: environment steps per seed. final: return of the mean action in the last evaluation; sampled:
    return of the policy's own draws there; average: of ``final`` over all evaluations, the area under the
    curve. diverged: seed to step. steps_per_second: of all seeds together; shares: of the seconds.
    """

    environment: str
    critic: str
    seeds: tuple[int, ...]
    steps: int
    final: Score
    sampled: Score
    length: Score
    average: Score
    curve: tuple[Point, ...]
    diverged: Mapping[int, int]
    seconds: float
    steps_per_second: float
    shares: Mapping[str, float]

    @property
    def best_name(self) -> str:
        """As the paper counts: best 5 of 6."""
        return best_name(len(self.seeds))


def best_name(count: int) -> str:
    """best_5_of_6 for six seeds."""
    return f"best_{max(1, count - 1)}_of_{count}"


def summarise(plan: Plan, out: Path, results: Sequence[GroupResult]) -> OnlineSummary:
    """Read the seeds' evaluations. Raises ConfigError where a seed has none, or others than its fellows."""
    diverged = {seed: step for result in results for seed, step in result.diverged.items()}
    steps, numbers = _read_curves(out, plan.seeds, diverged)
    seconds = max(result.seconds for result in results)
    taken = max(result.steps for result in results)
    total = sum(len(seeds) * result.steps for seeds, result in zip(plan.groups, results, strict=True))
    last = {name: _score(numbers[name][:, -1]) for name in _COLUMNS}
    points = [
        Point(
            int(step),
            _score(numbers["return"][:, place]),
            _score(numbers["sampled_return"][:, place]),
        )
        for place, step in enumerate(steps)
    ]
    return OnlineSummary(
        environment=plan.config.environment,
        critic=plan.config.critic,
        seeds=plan.seeds,
        steps=taken,
        final=last["return"],
        sampled=last["sampled_return"],
        length=last["length"],
        average=_score(numbers["return"].mean(axis=1)),
        curve=tuple(points),
        diverged=diverged,
        seconds=seconds,
        steps_per_second=total / max(seconds, 1e-9),
        shares=_shares(results),
    )


def write_summary(summary: OnlineSummary, out: Path) -> Path:
    """summary.json; what is not finite is null. The clock's part is for run.json: `clock_of`."""
    best = summary.best_name
    content = {
        "environment": summary.environment,
        "critic": summary.critic,
        "seeds": list(summary.seeds),
        "steps": summary.steps,
        **_as_json(summary.final, best),
        "level": LEVEL,
        "return": _with_seeds(summary.final, summary.seeds, best),
        "sampled_return": _with_seeds(summary.sampled, summary.seeds, best),
        "length": _with_seeds(summary.length, summary.seeds, best),
        "average_return": _with_seeds(summary.average, summary.seeds, best),
        "diverged": {str(seed): step for seed, step in summary.diverged.items()},
        "curve": [
            {
                "step": point.step,
                "return": _as_json(point.mean_action, best),
                "sampled_return": _as_json(point.sampled, best),
            }
            for point in summary.curve
        ],
    }
    path = out / SUMMARY
    with atomic_file(path, force=True) as temporary:
        temporary.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return path


def clock_of(summary: OnlineSummary) -> dict[str, Any]:
    """What differs from one day to the next: seconds, steps per second, and the parts' shares."""
    return {
        "seconds": round(summary.seconds, 3),
        "steps_per_second": round(summary.steps_per_second, 1),
        "shares": {name: round(share, 4) for name, share in summary.shares.items()},
    }


def _read_curves(
    out: Path, seeds: Sequence[int], diverged: Mapping[int, int]
) -> tuple[list[float], dict[str, Float[np.ndarray, "seed point"]]]:
    """Steps, and each column for all seeds; a seed that diverged is infinitely bad from then on."""
    rows = [read_rows(seed_folder(out, seed) / EVALUATION) for seed in seeds]
    steps = [row[0] for row in max(rows, key=len)] or [float(max(diverged.values(), default=0))]
    filled = np.full((len(_COLUMNS), len(seeds), len(steps)), -math.inf)
    for place, (seed, found) in enumerate(zip(seeds, rows, strict=True)):
        path = seed_folder(out, seed) / EVALUATION
        if [row[0] for row in found] != steps[: len(found)] or any(len(row) != 4 for row in found):
            raise ConfigError(
                f"{path} has other steps than its fellows; it was edited: train again elsewhere"
            )
        if len(found) < len(steps) and seed not in diverged:
            raise ConfigError(f"{path} lacks evaluations; it was edited: train again elsewhere")
        if found:
            filled[:, place, : len(found)] = np.asarray(found)[:, 1:].T
    return steps, dict(zip(_COLUMNS, filled, strict=True))


def _score(values: Float[np.ndarray, " seed"]) -> Score:
    kept = np.sort(np.where(np.isnan(values), -math.inf, values))[-max(1, len(values) - 1) :]
    cleaned = np.where(np.isnan(values), -math.inf, values)
    return Score(tuple(map(float, cleaned)), spread_of([cleaned]), float(kept.mean()))


def _shares(results: Sequence[GroupResult]) -> dict[str, float]:
    """Of the seconds of all processes; the rest is files and Python."""
    total = max(sum(result.seconds for result in results), 1e-9)
    shares = {name: sum(result.parts[name] for result in results) / total for name in PARTS}
    return {**shares, "other": max(0.0, 1.0 - sum(shares.values()))}


def _as_json(score: Score, best: str) -> dict[str, Any]:
    spread = score.spread
    return {
        "iqm": _finite(spread.iqm),
        "interval": [_finite(spread.low), _finite(spread.high)],
        best: _finite(score.best),
    }


def _with_seeds(score: Score, seeds: Sequence[int], best: str) -> dict[str, Any]:
    per_seed = {str(seed): _finite(value) for seed, value in zip(seeds, score.per_seed, strict=True)}
    return {**_as_json(score, best), "per_seed": per_seed}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def draw_curves(summary: OnlineSummary, path: Path) -> None:
    """Write the picture as PNG; the same summary gives the same bytes."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(8.0, 3.2), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2, sharey=True)
        steps = np.asarray([point.step for point in summary.curve], dtype=float)
        _draw(left, steps, [point.mean_action for point in summary.curve], "mean action")
        _draw(right, steps, [point.sampled for point in summary.curve], "sampled actions")
        left.set_ylabel("return of an episode")
        title = f"{summary.environment}, {summary.critic}: {len(summary.seeds)} seeds"
        if len(summary.seeds) > 1:
            title += f", interquartile mean and {LEVEL:.0%} interval"
        if summary.diverged:
            title += f"; {len(summary.diverged)} diverged"
        figure.suptitle(title.replace("$", r"\$"), fontsize=9, x=0.01, ha="left", color=_INK)
        with atomic_file(path, force=True) as temporary:
            figure.savefig(temporary, format="png", dpi=160, metadata={"Software": None})


def _draw(axes: Axes, steps: np.ndarray, scores: list[Score], title: str) -> None:
    seeds = _or_nan(np.asarray([score.per_seed for score in scores]))
    low, middle, high = (
        _or_nan(np.asarray([getattr(score.spread, name) for score in scores]))
        for name in ("low", "iqm", "high")
    )
    marker = "o" if len(steps) == 1 else ""
    axes.plot(steps, seeds, color=_COLOUR, lw=0.7, alpha=0.35, marker=marker, ms=3)
    axes.fill_between(steps, low, high, color=_COLOUR, alpha=0.18, lw=0)
    axes.plot(steps, middle, color=_COLOUR, lw=1.8, marker=marker, ms=4)
    axes.set_title(title, loc="left", fontsize=9, color=_INK)
    axes.set_xlabel("environment steps per seed", color=_INK)


def _or_nan(values: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(values), values, np.nan)
