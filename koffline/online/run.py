"""Online training with several seeds: the run directory, its stacks of seeds, the summary over the seeds.

The summary has interquartile means, the paper's best 5 of 6, the speed and the learning curve.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from koffline.envs.make import Copies
from koffline.errors import ConfigError
from koffline.jobs import Job, run_jobs
from koffline.online.config import OnlineConfig, load_config
from koffline.online.group import COLUMNS, GroupResult, GroupTask, is_result, read_result, train_group
from koffline.progress import progress_bar
from koffline.spread import LEVEL, Spread, spread_of
from koffline.store import CONFIG, open_run, read_record, write_record
from koffline.store.files import atomic_file, finite_json, write_text
from koffline.store.run_record import now, start_run, versions

DEFAULT_SEEDS = 6
_KIND = "online"
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


@dataclass(frozen=True)
class OnlineResult:
    """Result of a run: its folder, with a folder of files for each seed, and the summary over the seeds."""

    out: Path
    summary: OnlineSummary


def train(
    config: OnlineConfig | Mapping[str, Any] | str | Path | None = None,
    out: str | Path | None = None,
    seed_count: int | None = None,
    *,
    seed: int | None = None,
    resume: str | Path | None = None,
    workers: int = 1,
    show_progress: bool = False,
) -> OnlineResult:
    """Train Trust-PCL in its environment with ``seed_count`` seeds (6) from ``seed`` (0) on.

    config: settings, or a YAML file or mapping of those that differ from the defaults; with ``resume`` it may
    be left out. out: the run's folder, default runs/ENVIRONMENT-CRITIC; an existing one is refused. resume:
    the folder of a run to go on with from its last checkpoint, to the bit; a finished one is only reported.
    workers: processes, each a stack of its share of the seeds.

    Raises ConfigError in one line. A seed that diverges is marked in the summary, the others go on.
    """
    if config is None and resume is None:
        raise ConfigError("no config; give one, or the folder of a run to go on with")
    if resume is not None and out is not None and Path(out) != Path(resume):
        raise ConfigError(f"resume names {resume} and out {out}; a run goes on in its own folder: give one")
    config = Path(str(resume)) / CONFIG if config is None else config
    config = config if isinstance(config, OnlineConfig) else load_config(config)
    folder = Path(resume or out or default_folder(config))
    stored = None if resume is None else read_record(folder, _KIND)
    groups = stored["groups"] if stored else _share_out(seed, seed_count, workers)
    seeds = [each for group in groups for each in group]
    if seed not in (None, seeds[0]) or seed_count not in (None, len(seeds)):
        raise ConfigError(
            f"{resume} has the seeds {', '.join(map(str, seeds))}, not those that were asked for; "
            "leave them out, or begin another run"
        )
    Copies(config.env, **config.env_options).close()  # raises the error of a bad setting
    settings = config.resolved()
    record = {
        **start_run(_KIND),
        "config": settings,
        "groups": groups,
        "versions": versions(),
    }
    with open_run(folder, record, _identity_of, resume is not None):
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        tasks = [GroupTask(config, tuple(group), folder, digest) for group in groups]
        _train_groups(tasks, workers, show_progress)
        summary = summarise(config, [read_result(task.result) for task in tasks])
        write_summary(summary, folder)
        record |= stored or {}
        if not record["finished"]:
            seconds, speed = round(summary.seconds, 3), round(summary.steps_per_second, 1)
            write_record(folder, {**record, "finished": now(), "seconds": seconds, "steps_per_second": speed})
    return OnlineResult(folder, summary)


def default_folder(config: OnlineConfig) -> Path:
    """Default output folder, for example runs/InvertedPendulum-v5-kloss."""
    return Path("runs") / f"{config.env.replace('/', '-').replace(':', '-')}-{config.critic}"


def _share_out(seed: int | None, seed_count: int | None, workers: int) -> list[list[int]]:
    """Split the seeds ``seed``, ``seed`` + 1, … into stacks of about equal size, one per worker."""
    first, number = seed or 0, DEFAULT_SEEDS if seed_count is None else seed_count
    if first < 0 or number < 1 or workers < 1:
        raise ConfigError(
            f"seed is {first}, seed_count {number}, workers {workers}; give at least 0, 1 and 1"
        )
    count = min(workers, number)
    ends = [first + round(place * number / count) for place in range(count + 1)]
    return [list(range(low, high)) for low, high in pairwise(ends)]


def _identity_of(record: Mapping[str, Any]) -> dict[str, Any]:
    return record["config"] | {"seeds": record.get("groups")}


def _train_groups(tasks: Sequence[GroupTask], workers: int, show_progress: bool) -> None:
    """Train all unfinished stacks to their end."""
    jobs = [Job(task.result.parent.name, train_group, (task,), task.result, is_result) for task in tasks]
    title = f"{tasks[0].config.env}, {tasks[0].config.critic}"
    if workers > 1 and len(jobs) > 1:
        with progress_bar(f"{title}: groups of seeds", len(jobs), show_progress) as show:
            run_jobs(jobs, workers, progress=lambda status: show(status.done))
        return
    for job, task in zip(jobs, tasks, strict=True):
        if not job.done:
            name = f"{title}, {len(task.seeds)} seeds"
            with progress_bar(name, task.config.steps, show_progress) as show:
                train_group(job.path, task, show)


def summarise(config: OnlineConfig, results: Sequence[GroupResult]) -> OnlineSummary:
    """Summarise the evaluations of all seeds; a diverged one has −∞ from then on."""
    tables = {seed: rows for result in results for seed, rows in result.evaluations.items()}
    diverged = {seed: step for result in results for seed, step in result.diverged.items()}
    points, last = (
        [int(row["step"]) for row in max(tables.values(), key=len)],
        max(diverged.values(), default=0),
    )
    if not points or (len(diverged) == len(tables) and last > points[-1]):
        points.append(last)  # up to where the last seed diverged
    filled = np.full((len(COLUMNS), len(points), len(tables)), -math.inf)
    for place, rows in enumerate(tables.values()):
        for point, row in enumerate(rows):
            filled[:, point, place] = [row[name] for name in COLUMNS]
    seconds = max(result.seconds for result in results)
    taken = sum(len(result.evaluations) * result.steps for result in results)
    return OnlineSummary(
        env=config.env,
        critic=config.critic,
        seeds=tuple(tables),
        steps=max(result.steps for result in results),
        points=tuple(points),
        curves={name: tuple(map(_score, part)) for name, part in zip(COLUMNS, filled, strict=True)},
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
