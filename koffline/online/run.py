"""Online training with several seeds: the run directory, its stacks of seeds, the summary."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from koffline.envs.make import make_env, playing
from koffline.errors import ConfigError
from koffline.jobs import Job, run_jobs
from koffline.online.artifacts import MODEL, REPLAY
from koffline.online.config import OnlineConfig, load_config
from koffline.online.environments import LocalEnvironments
from koffline.online.folder import (
    CONFIG,
    CURVES,
    RECORD,
    Plan,
    make_plan,
    open_folder,
    read_record,
    seed_folder,
    stored_groups,
    write_record,
)
from koffline.online.group import GroupTask, is_result, read_result, train_group
from koffline.online.logs import check_tensorboard
from koffline.online.summary import OnlineSummary, clock_of, draw_curves, summarise, write_summary
from koffline.progress import progress_bar
from koffline.store.run_record import now, versions
from koffline.store.targets import LOCK

DEFAULT_SEEDS = 6
_SLOWEST = 30.0  # frames per second of an environment that does not say
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class OnlineResult:
    """A finished run. models (.d3) and replays (HDF5) of the seeds in order, None where there is none."""

    out: Path
    seeds: tuple[int, ...]
    summary: OnlineSummary
    models: tuple[Path | None, ...]
    replays: tuple[Path | None, ...]


def train(
    config: OnlineConfig | Mapping[str, Any] | str | Path | None = None,
    out: str | Path | None = None,
    seed_count: int | None = None,
    *,
    seed: int | None = None,
    resume: str | Path | None = None,
    workers: int = 1,
    videos: bool = False,
    tensorboard: bool = False,
    save_minari: bool = False,
    show_progress: bool = False,
) -> OnlineResult:
    """Train Trust-PCL in its environment with ``seed_count`` seeds (6) from ``seed`` (0) on.

    config: settings, or a YAML file or mapping of those that differ from the defaults; with ``resume`` it may
    be left out. out: the run's folder, default runs/ENVIRONMENT-CRITIC; an existing one is refused. resume:
    the folder of a run to go on with from its last checkpoint, to the bit; a finished one is only reported.
    workers: processes, each a stack of its share of the seeds. videos: one per seed, of the trained policy in
    the evaluation's first episode. save_minari: each replay also as a Minari dataset, seed_<k>/minari.

    Raises ConfigError in one line. A seed that diverges is marked in the summary, the others go on.
    """
    plan, folder = _plan(config, out, resume, seed, seed_count, workers)
    if tensorboard:
        check_tensorboard()
    if videos:
        check_pictures(plan.config)
    LocalEnvironments(plan.config.environment, plan.config.environment_options, 1).close()
    with open_folder(folder, plan, versions(), resume is not None), _forgotten_if_empty(folder):
        _warn_of_versions(folder)
        tasks = [
            GroupTask(plan.config, seeds, folder, plan.fingerprint, tensorboard, save_minari)
            for seeds in plan.groups
        ]
        _train_groups(tasks, workers, show_progress)
        results = [read_result(task.result) for task in tasks]
        summary = summarise(plan, folder, results)
        write_summary(summary, folder)
        draw_curves(summary, folder / CURVES)
        record = read_record(folder) or {}
        if not record.get("finished"):
            write_record(folder, {**record, "finished": now(), **clock_of(summary)})
        result = _result(folder, summary)
        if videos:
            film(plan.config, result.models, summary.steps)
    return result


def default_folder(config: OnlineConfig) -> Path:
    """runs/InvertedPendulum-v5-kloss."""
    return Path("runs") / f"{config.environment.replace('/', '-').replace(':', '-')}-{config.critic}"


def _plan(
    config: OnlineConfig | Mapping[str, Any] | str | Path | None,
    out: str | Path | None,
    resume: str | Path | None,
    seed: int | None,
    seed_count: int | None,
    workers: int,
) -> tuple[Plan, Path]:
    """What is to be done where. A run that goes on keeps the seeds that it has. Raises ConfigError."""
    if config is None and resume is None:
        raise ConfigError("no config; give one, or the folder of a run to go on with")
    if resume is not None and out is not None and Path(out) != Path(resume):
        raise ConfigError(f"resume names {resume} and out {out}; a run goes on in its own folder: give one")
    stored = None
    if resume is not None:
        if not Path(resume).is_dir():
            raise ConfigError(f"{resume} is no folder of a run; check the path, or begin without --resume")
        stored = stored_groups(Path(resume))
        config = config if config is not None else Path(resume) / CONFIG
    made = config if isinstance(config, OnlineConfig) else load_config(config)  # type: ignore[arg-type]
    plan = make_plan(made, seed or 0, DEFAULT_SEEDS if seed_count is None else seed_count, workers)
    if stored is not None:
        kept = Plan(made, stored)
        if (seed is not None and seed != kept.seeds[0]) or (
            seed_count is not None and seed_count != len(kept.seeds)
        ):
            raise ConfigError(
                f"{resume} has the seeds {', '.join(map(str, kept.seeds))}, not those that were asked for; "
                "leave them out, or begin another run"
            )
        plan = kept
    folder = resume if resume is not None else out
    return plan, default_folder(made) if folder is None else Path(folder)


def _train_groups(tasks: Sequence[GroupTask], workers: int, show_progress: bool) -> None:
    """All stacks to their end; those that are finished are left alone."""
    if workers == 1 or len(tasks) == 1:
        for task in tasks:
            if not is_result(task.result):
                title = f"{task.config.environment}, {task.config.critic}, {len(task.seeds)} seeds"
                with progress_bar(title, task.config.steps, show_progress) as show:
                    train_group(task.result, task, show)
        return
    jobs = [Job(task.result.parent.name, train_group, (task,), task.result, is_result) for task in tasks]
    failures = run_jobs(jobs, workers, progress=show_progress, keep_going=True).failures
    if failures:
        first = failures[0]
        others = f" and {len(failures) - 1} more" if len(failures) > 1 else ""
        raise ConfigError(
            f"{first.name}{others} failed ({first.reason}); mend the cause, then --resume {tasks[0].out}"
        )


def _result(folder: Path, summary: OnlineSummary) -> OnlineResult:
    def found(name: str) -> tuple[Path | None, ...]:
        paths = [seed_folder(folder, seed) / name for seed in summary.seeds]
        return tuple(path if path.exists() else None for path in paths)

    return OnlineResult(folder, summary.seeds, summary, found(MODEL), found(REPLAY))


def _warn_of_versions(folder: Path) -> None:
    if (read_record(folder) or {}).get("versions") != versions():
        _LOG.warning("%s was begun with other versions; the numbers may differ in the last digits", folder)


@contextlib.contextmanager
def _forgotten_if_empty(folder: Path) -> Iterator[None]:
    """A run that failed before its first row or checkpoint leaves the folder to a mended config."""
    try:
        yield
    except Exception:
        known = {RECORD, CONFIG, f".{RECORD}{LOCK}", "checkpoints", "tensorboard"}
        others = [path for path in folder.iterdir() if path.name not in known]
        trained = list(folder.glob("checkpoints/*/*.pt"))
        if not trained and all(path.is_dir() and not any(path.iterdir()) for path in others):
            for path in (folder / RECORD, folder / CONFIG):
                path.unlink(missing_ok=True)
            for path in (*others, folder / "checkpoints", folder / "tensorboard"):
                shutil.rmtree(path, ignore_errors=True)
        raise


def check_pictures(config: OnlineConfig) -> None:
    """Raise ConfigError, before any training, where the environment draws no pictures."""
    from koffline.runs.playing import as_picture

    try:
        with warnings.catch_warnings(), contextlib.closing(_open(config)) as env:
            warnings.simplefilter("ignore")  # glfw's about a screen that is not there
            with playing(config.environment, "render"):
                env.reset(seed=config.evaluation_seed)
                as_picture(env.render())
    except ConfigError as error:
        reason = str(error).rpartition(";")[0] or str(error)
        raise ConfigError(
            f"no videos: {reason}; without a screen set MUJOCO_GL=egl or osmesa, or leave out --videos"
        ) from error


def film(config: OnlineConfig, models: Sequence[Path | None], steps: int) -> list[Path]:
    """Write videos/step_<steps>.mp4 (GIF without imageio-ffmpeg) beside each model; their paths.

    Raises ConfigError where the environment draws no pictures.
    """
    from koffline.algos.loading import load
    from koffline.runs.playing import Player, video

    format_ = "gif" if importlib.util.find_spec("imageio_ffmpeg") is None else "mp4"
    made = []
    for model in models:
        if model is None:
            continue
        with contextlib.closing(_open(config)) as env:
            player = Player(load(model), env, config.environment)
            target = model.parent / "videos" / f"step_{steps:09d}.{format_}"
            target.parent.mkdir(exist_ok=True)
            rate = float(env.metadata.get("render_fps") or _SLOWEST)
            with video(target, format_, rate, force=True) as add:
                player.play(config.evaluation_seed, on_frame=add)
        made.append(target)
    return made


def _open(config: OnlineConfig) -> Any:
    return make_env(config.environment, **{**config.environment_options, "render_mode": "rgb_array"})


__all__ = ["DEFAULT_SEEDS", "OnlineResult", "default_folder", "train"]
