"""Online training with several seeds: the run directory, its stacks of seeds, the summary."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from koffline.envs.make import make_env, playing
from koffline.errors import ConfigError
from koffline.jobs import Job, run_jobs
from koffline.online.artifacts import MODEL, REPLAY
from koffline.online.config import OnlineConfig, check_whole, load_config
from koffline.online.environments import LocalEnvironments
from koffline.online.group import (
    GroupTask,
    check_tensorboard,
    is_result,
    read_result,
    seed_folder,
    train_group,
)
from koffline.online.summary import OnlineSummary, draw_curves, summarise, write_summary
from koffline.progress import progress_bar
from koffline.store.run_folders import CONFIG, RECORD, open_run, read_record, warn_of_versions, write_record
from koffline.store.run_record import describe_call, digest_of, now, versions

DEFAULT_SEEDS = 6
_KIND = "online"
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
    if config is None and resume is None:
        raise ConfigError("no config; give one, or the folder of a run to go on with")
    if resume is not None and not Path(resume).is_dir():
        raise ConfigError(f"{resume} is no folder of a run; check the path, or begin without --resume")
    if resume is not None and out is not None and Path(out) != Path(resume):
        raise ConfigError(f"resume names {resume} and out {out}; a run goes on in its own folder: give one")
    config = Path(str(resume)) / CONFIG if config is None else config
    config = config if isinstance(config, OnlineConfig) else load_config(config)
    folder = Path(default_folder(config) if (named := resume or out) is None else named)
    groups = _share_out(seed or 0, DEFAULT_SEEDS if seed_count is None else seed_count, workers)
    if resume is not None and (stored := read_record(folder, _KIND)) is not None:
        try:
            groups = [[int(each) for each in group] for group in stored["groups"]]
        except (KeyError, TypeError, ValueError):
            raise ConfigError(
                f"{folder / RECORD} names no seeds; it is damaged: choose another folder"
            ) from None
        seeds = [each for group in groups for each in group]
        if seed not in (None, seeds[0]) or seed_count not in (None, len(seeds)):
            raise ConfigError(
                f"{resume} has the seeds {', '.join(map(str, seeds))}, not those that were asked for; "
                "leave them out, or begin another run"
            )
    if tensorboard:
        check_tensorboard()
    if videos:
        _check_pictures(config)
    LocalEnvironments(config.environment, config.environment_options, 1).close()
    record = _new_record(config, groups)
    with open_run(folder, record, _identity_of, resume is not None), _forgotten_if_empty(folder):
        warn_of_versions(folder, record, _KIND)
        tasks = [
            GroupTask(config, tuple(seeds), folder, _fingerprint_of(record), tensorboard, save_minari)
            for seeds in groups
        ]
        _train_groups(tasks, workers, show_progress)
        summary, clock = summarise(tasks, [read_result(task.result) for task in tasks])
        write_summary(summary, folder)
        draw_curves(summary, folder / "learning_curve.png")
        folders = [seed_folder(folder, each) for each in summary.seeds]
        record = read_record(folder, _KIND) or {}
        if not record.get("finished"):
            write_record(folder, {**record, "finished": now(), **clock})
        models, replays = (
            tuple(path if path.exists() else None for path in paths)
            for paths in zip(*((where / MODEL, where / REPLAY) for where in folders), strict=True)
        )
        if videos:
            _film(config, models, summary.steps)
    return OnlineResult(folder, summary.seeds, summary, models, replays)


def default_folder(config: OnlineConfig) -> Path:
    """runs/InvertedPendulum-v5-kloss."""
    return Path("runs") / f"{config.environment.replace('/', '-').replace(':', '-')}-{config.critic}"


def _share_out(seed: int, seed_count: int, workers: int) -> list[list[int]]:
    """Seeds ``seed``, ``seed`` + 1, …, in as many stacks of about equal size as there are workers."""
    for name, number, least in (("seed", seed, 0), ("seed_count", seed_count, 1), ("workers", workers, 1)):
        check_whole(name, number, least)
    count = min(workers, seed_count)
    ends = [round(place * seed_count / count) for place in range(count + 1)]
    return [list(range(seed + low, seed + high)) for low, high in pairwise(ends)]


def _new_record(config: OnlineConfig, groups: Sequence[Sequence[int]]) -> dict[str, Any]:
    """run.json as the run begins. groups: seeds by stack; initial_log: its digest, if it is a file."""
    log = config.initial_log
    return {
        "format": 1,
        "kind": _KIND,
        "config": config.resolved(),
        "groups": groups,
        "initial_log": digest_of(Path(log)) if log is not None and Path(log).is_file() else log,
        "versions": versions(),
        "call": describe_call("online", [log]),
        "started": now(),
        "finished": None,
    }


def _identity_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """All settings, wherever the log lies that the replay starts from."""
    own = {"the digest of the initial log": record.get("initial_log"), "seeds": record.get("groups")}
    return {name: value for name, value in record["config"].items() if name != "initial_log"} | own


def _fingerprint_of(record: Mapping[str, Any]) -> str:
    identity = {**record["config"], "initial_log": record["initial_log"]}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


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


@contextlib.contextmanager
def _forgotten_if_empty(folder: Path) -> Iterator[None]:
    """A run that failed before its first row or checkpoint leaves the folder to a mended config."""
    try:
        yield
    except Exception:
        if not any(folder.glob("checkpoints/*/*.pt")) and not any(folder.glob("seed_*/*")):
            for path in (folder / RECORD, folder / CONFIG):
                path.unlink(missing_ok=True)
            for path in (*folder.glob("seed_*"), folder / "checkpoints", folder / "tensorboard"):
                shutil.rmtree(path, ignore_errors=True)
        raise


def _check_pictures(config: OnlineConfig) -> None:
    """Raise ConfigError, before any training, where the environment draws no pictures."""
    from koffline.playing import as_picture

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


def _film(config: OnlineConfig, models: Sequence[Path | None], steps: int) -> None:
    """Write videos/step_<steps>.gif beside each model."""
    from koffline.algos.model_files import load
    from koffline.playing import Player, film

    for model in filter(None, models):
        target = model.parent / "videos" / f"step_{steps:09d}.gif"
        target.parent.mkdir(exist_ok=True)
        with contextlib.closing(_open(config)) as env:
            player = Player(load(model), env, config.environment)
            rate = float(env.metadata.get("render_fps") or _SLOWEST)
            with film(target, rate, force=True) as add:
                player.play(config.evaluation_seed, on_frame=add)


def _open(config: OnlineConfig) -> Any:
    return make_env(config.environment, **{**config.environment_options, "render_mode": "rgb_array"})
