"""Online training with several seeds: the run folder, its stacks of seeds, the summary
over seeds.

The summary has interquartile means, the paper's best 5 of 6, the speed and the learning
curve.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from koffline import figures
from koffline.envs.make import Copies
from koffline.errors import ConfigError, without_controls
from koffline.jobs import Job, PassSettings, run_jobs
from koffline.json_types import JsonObject
from koffline.online.config import OnlineConfig, load_config
from koffline.online.group import (
    COLUMNS,
    EVALUATION,
    GroupResult,
    read_result,
    result_path,
    train_group,
)
from koffline.progress import progress_bar
from koffline.spread import LEVEL, Spread, spread_of
from koffline.store import CONFIG, open_run, read_record, write_record
from koffline.store.files import atomic_file, finite_json, write_text
from koffline.store.run_record import now, start_run, versions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT_SEEDS = 6
_MOST_SEEDS = 10_000
Seeds = tuple[int, ...]
_KIND = "online"
_COLOUR = "#0072B2"


@dataclass(frozen=True)
class Score:
    """One number per seed, −∞ if it diverged. best: mean without the worst seed."""

    per_seed: tuple[float, ...]
    spread: Spread
    best: float


@dataclass(frozen=True)
class OnlineResult:
    """A finished run over its seeds; ``out`` has a folder for each seed.

    steps: environment steps per seed. points: steps of the evaluations; curves: scores
    at these points, by column of evaluation.csv: return and length of the mean action,
    return of sampled actions. diverged: step by seed. steps_per_second: of all seeds
    together. widened: by seed, the step by which the policy's standard deviation had
    grown while its returns fell.
    """

    out: Path
    config: OnlineConfig
    seeds: Seeds
    steps: int
    points: tuple[int, ...]
    curves: Mapping[str, tuple[Score, ...]]
    diverged: Mapping[int, int]
    seconds: float
    steps_per_second: float
    widened: Mapping[int, int] = field(default_factory=dict)

    @property
    def last(self) -> dict[str, Score]:
        """Return, sampled return and length in the last evaluation."""
        return {
            name: self.curves[name][-1]
            for name in ("return", "sampled_return", "length")
        }

    @property
    def best_name(self) -> str:
        """Name of the mean without the worst seed: best_5_of_6 for six seeds."""
        return f"best_{max(1, len(self.seeds) - 1)}_of_{len(self.seeds)}"


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
    """Train Trust-PCL in its environment with ``seed_count`` seeds (6), starting from
    ``seed`` (0).

    config: settings, or a YAML file or mapping of those that differ from the defaults;
    optional with ``resume``. out: the run's folder, by default runs/ENVIRONMENT-CRITIC;
    an existing folder is refused. resume: the folder of a run to continue from its last
    checkpoint, exactly; a finished run is only reported. workers: number of processes,
    each with a stack of its share of the seeds.

    Raises ConfigError in one line. A seed that diverges is marked in the summary, and
    the others go on.
    """
    if config is None and resume is None:
        raise ConfigError("no config; give one, or the folder of a run to go on with")
    if resume is not None and out is not None and Path(out) != Path(resume):
        raise ConfigError(
            f"resume names {resume} and out {out}; a run goes on in its own folder:"
            " give one"
        )
    if config is None:
        config = Path(str(resume)) / CONFIG
    if not isinstance(config, OnlineConfig):
        config = load_config(config)
    folder = Path(resume or out or default_folder(config))
    stored = None
    if resume is not None:
        stored = read_record(folder, _KIND)
    if stored:
        groups = stored["groups"]
    else:
        groups = _share_out(seed, seed_count, workers)
    seeds = list(itertools.chain.from_iterable(groups))
    config.check_fits(max(map(len, groups)))
    if seed not in (None, seeds[0]) or seed_count not in (None, len(seeds)):
        raise ConfigError(
            f"{resume} has the seeds {', '.join(map(str, seeds))}, not those that were"
            " asked for; leave them out, or begin another run"
        )
    # raises the error of a bad setting
    Copies(config.env, **config.env_options).close()
    record = start_run(
        _KIND, config=config.resolved(), groups=groups, versions=versions()
    )
    with open_run(
        folder,
        record,
        lambda r: r["config"] | {"seeds": r.get("groups")},
        resume is not None,
    ):
        paths = {tuple(group): result_path(folder, group) for group in groups}
        _train_all(config, paths, workers, show_progress)
        results = {group: read_result(path) for group, path in paths.items()}
        finished = {group: part for group, part in results.items() if part}
        result = summarise(folder, config, finished)
        write_summary(result)
        record |= stored or {}
        if not record["finished"]:
            outcome = {
                "finished": now(),
                "seconds": round(result.seconds, 3),
                "steps_per_second": round(result.steps_per_second, 1),
            }
            write_record(folder, {**record, **outcome})
    return result


def default_folder(config: OnlineConfig) -> Path:
    """Default output folder, for example runs/InvertedPendulum-v5-kloss."""
    environment = config.env.replace("/", "-").replace(":", "-")
    return Path("runs") / f"{environment}-{config.critic}"


def _share_out(
    seed: int | None, seed_count: int | None, workers: int
) -> list[list[int]]:
    """Split the seeds ``seed``, ``seed`` + 1, … into stacks of about equal size, one
    per worker.
    """
    first = seed or 0
    number = DEFAULT_SEEDS
    if seed_count is not None:
        number = seed_count
    if first < 0 or number < 1:
        raise ConfigError(
            f"seed is {first}, seed_count {number}; give at least 0 and 1"
        )
    if number > _MOST_SEEDS:
        raise ConfigError(
            f"seed_count is {number} (--seeds); give at most {_MOST_SEEDS}"
        )
    stacks = np.array_split(
        np.arange(first, first + number), min(PassSettings(workers).workers, number)
    )
    return [stack.tolist() for stack in stacks]


def _train_all(
    config: OnlineConfig, paths: Mapping[Seeds, Path], workers: int, show_progress: bool
) -> None:
    """Train all unfinished stacks to their end; paths: of their results."""
    jobs = [
        Job(p.parent.name, train_group, (config, seeds), p, read_result)
        for seeds, p in paths.items()
    ]
    title = f"{config.env}, {config.critic}"
    if workers > 1 and len(jobs) > 1:
        with progress_bar(
            f"{title}: groups of seeds", len(jobs), show_progress
        ) as show:
            run_jobs(jobs, workers, progress=lambda done, *_: show(done))
        return
    for job, seeds in zip(jobs, paths, strict=True):
        if not job.done:
            with progress_bar(
                f"{title}, {len(seeds)} seeds", config.steps, show_progress
            ) as show:
                train_group(job.path, config, seeds, show)


def summarise(
    out: Path, config: OnlineConfig, results: Mapping[Seeds, GroupResult]
) -> OnlineResult:
    """Summarise the evaluations of all stacks by seed; a seed has −∞ from its
    divergence on.

    out: the run's folder, kept in the result. results: by the seeds of each stack.
    """
    tables = {
        seed: result.logs.get(f"seed_{seed}/{EVALUATION}", [])
        for seeds, result in results.items()
        for seed in seeds
    }
    diverged = {
        seed: step
        for result in results.values()
        for seed, step in result.diverged.items()
    }
    points = [int(row["step"]) for row in max(tables.values(), key=len)]
    last = max(diverged.values(), default=0)
    if not points or (len(diverged) == len(tables) and last > points[-1]):
        points.append(last)  # extend to the step where the last seed diverged
    filled = np.full((len(COLUMNS), len(points), len(tables)), -math.inf)
    for place, rows in enumerate(tables.values()):
        for point, row in enumerate(rows):
            filled[:, point, place] = [row[name] for name in COLUMNS]
    seconds = max(result.seconds for result in results.values())
    taken = sum(len(seeds) * result.steps for seeds, result in results.items())
    return OnlineResult(
        out=out,
        config=config,
        seeds=tuple(tables),
        steps=max(result.steps for result in results.values()),
        points=tuple(points),
        curves={
            name: tuple(map(_score, part))
            for name, part in zip(COLUMNS, filled, strict=True)
        },
        diverged=diverged,
        seconds=seconds,
        steps_per_second=taken / max(seconds, 1e-9),
        widened={
            seed: step
            for result in results.values()
            for seed, step in result.widened.items()
        },
    )


def write_summary(result: OnlineResult) -> None:
    """Write summary.json, with null for non-finite numbers, and learning_curve.png."""
    scores: dict[str, JsonObject] = {
        name: {
            "iqm": score.spread.iqm,
            "interval": [score.spread.low, score.spread.high],
            result.best_name: score.best,
            "per_seed": dict(zip(result.seeds, score.per_seed, strict=True)),
        }
        for name, score in result.last.items()
    }
    content = {
        "env": result.config.env,
        "critic": result.config.critic,
        "seeds": result.seeds,
        "steps": result.steps,
        **{
            name: number
            for name, number in scores["return"].items()
            if name != "per_seed"
        },
        "level": LEVEL,
        **scores,
        "diverged": result.diverged,
        "widened": result.widened,
    }
    write_text(result.out / "summary.json", finite_json(content))
    _draw_curves(result)


def _score(values: Float[np.ndarray, " seed"]) -> Score:
    cleaned = np.where(np.isnan(values), -math.inf, values)
    kept = np.sort(cleaned)[-max(1, len(values) - 1) :]
    return Score(tuple(map(float, cleaned)), spread_of(cleaned), float(kept.mean()))


def _draw_curves(result: OnlineResult) -> None:
    """Draw the learning curve; the same summary gives the same bytes."""

    def png(figure: Figure) -> bytes:
        content = io.BytesIO()
        figure.savefig(content, format="png", dpi=160, metadata={"Software": None})
        return content.getvalue()

    image = figures.saved(
        "learning_curve", partial(_curves, result), png, {"text.parse_math": False}
    )
    if image is not None:
        with atomic_file(result.out / "learning_curve.png", force=True) as temporary:
            temporary.write_bytes(image)


def _curves(result: OnlineResult) -> Figure:
    """The learning curves, of the mean action and of sampled actions."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 3.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    shown = {
        "mean action": result.curves["return"],
        "sampled actions": result.curves["sampled_return"],
    }
    for axes, (title, scores) in zip(panels, shown.items(), strict=True):
        lines = np.array(
            [[s.spread.low, s.spread.iqm, s.spread.high, *s.per_seed] for s in scores]
        )
        low, middle, high, *seeds = np.where(np.isfinite(lines), lines, np.nan).T
        look: Any = {"color": _COLOUR}
        if len(scores) == 1:
            look["marker"] = "o"
        axes.plot(result.points, np.transpose(seeds), **look, lw=0.7, alpha=0.35, ms=3)
        axes.fill_between(result.points, low, high, color=_COLOUR, alpha=0.18, lw=0)
        axes.plot(result.points, middle, **look, lw=1.8, ms=4)
        axes.grid(color="#e4e7eb")
        axes.set_title(title, loc="left", fontsize=9)
        axes.set_xlabel("environment steps per seed")
    panels[0].set_ylabel("return of an episode")
    title = f"{result.config.env}, {result.config.critic}: {len(result.seeds)} seeds"
    if len(result.seeds) > 1:
        title += f", interquartile mean and {LEVEL:.0%} interval"
    if result.diverged:
        title += f"; {len(result.diverged)} diverged"
    figure.suptitle(without_controls(title), fontsize=9, x=0.01, ha="left")
    return figure
