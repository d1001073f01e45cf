"""Online training with several seeds: the run directory, its stacks of seeds, the summary."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from koffline.envs.make import Copies
from koffline.errors import ConfigError
from koffline.jobs import Job, run_jobs
from koffline.online.config import OnlineConfig, load_config
from koffline.online.group import MODEL, REPLAY, GroupTask, is_result, read_result, seed_folder, train_group
from koffline.online.summary import OnlineSummary, summarise, write_summary
from koffline.progress import progress_bar
from koffline.store.run_record import describe_call, now, versions
from koffline.store.targets import CONFIG, RECORD, open_run, read_record, warn_of_versions, write_record

DEFAULT_SEEDS = 6
_KIND = "online"


@dataclass(frozen=True)
class OnlineResult:
    """Result of a run. models (.d3), replays (HDF5): one path per seed, None for a missing file."""

    out: Path
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
    if resume is not None and not Path(resume).is_dir():
        raise ConfigError(f"{resume} is no folder of a run; check the path, or begin without --resume")
    if resume is not None and out is not None and Path(out) != Path(resume):
        raise ConfigError(f"resume names {resume} and out {out}; a run goes on in its own folder: give one")
    config = Path(str(resume)) / CONFIG if config is None else config
    config = config if isinstance(config, OnlineConfig) else load_config(config)
    folder = Path(default_folder(config) if (named := resume or out) is None else named)
    stored = None if resume is None else read_record(folder, _KIND)
    groups = _share_out(seed, seed_count, workers) if stored is None else _stored_groups(stored, folder)
    seeds = [each for group in groups for each in group]
    if seed not in (None, seeds[0]) or seed_count not in (None, len(seeds)):
        raise ConfigError(
            f"{resume} has the seeds {', '.join(map(str, seeds))}, not those that were asked for; "
            "leave them out, or begin another run"
        )
    Copies(config.env, **config.env_options).close()  # raises the error of a bad setting
    record = {
        "format": 1,
        "kind": _KIND,
        "config": config.resolved(),
        "groups": groups,
        "versions": versions(),
        "call": describe_call("online"),
        "started": now(),
        "finished": None,
    }
    with open_run(folder, record, _identity_of, resume is not None):
        warn_of_versions(folder, record, _KIND)
        record = read_record(folder, _KIND) or record
        digest = hashlib.sha256(json.dumps(record["config"], sort_keys=True).encode()).hexdigest()
        tasks = [GroupTask(config, tuple(group), folder, digest) for group in groups]
        _train_groups(tasks, workers, show_progress)
        summary = summarise(tasks, [read_result(task.result) for task in tasks])
        write_summary(summary, folder)
        if not record.get("finished"):
            clock = {
                "seconds": round(summary.seconds, 3),
                "steps_per_second": round(summary.steps_per_second, 1),
            }
            write_record(folder, {**record, "finished": now(), **clock})
    models, replays = (
        tuple(
            path if path.exists() else None for path in (seed_folder(folder, each) / name for each in seeds)
        )
        for name in (MODEL, REPLAY)
    )
    return OnlineResult(folder, summary, models, replays)


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


def _stored_groups(record: Mapping[str, Any], folder: Path) -> list[list[int]]:
    try:
        return [[int(each) for each in group] for group in record["groups"]]
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"{folder / RECORD} names no seeds; it is damaged: choose another folder") from None


def _identity_of(record: Mapping[str, Any]) -> dict[str, Any]:
    return record["config"] | {"seeds": record.get("groups")}


def _train_groups(tasks: Sequence[GroupTask], workers: int, show_progress: bool) -> None:
    """Train all unfinished stacks to their end."""
    if workers == 1 or len(tasks) == 1:
        for task in tasks:
            if not is_result(task.result):
                title = f"{task.config.env}, {task.config.critic}, {len(task.seeds)} seeds"
                with progress_bar(title, task.config.steps, show_progress) as show:
                    train_group(task.result, task, show)
        return
    jobs = [Job(task.result.parent.name, train_group, (task,), task.result, is_result) for task in tasks]
    with progress_bar(f"{tasks[0].config.env}: groups of seeds", len(jobs), show_progress) as show:
        done = run_jobs(jobs, workers, progress=lambda status: show(status.done), keep_going=True)
    failures = done.failures
    if failures:
        first = failures[0]
        others = f" and {len(failures) - 1} more" if len(failures) > 1 else ""
        raise ConfigError(
            f"{first.name}{others} failed ({first.reason}); mend the cause, then --resume {tasks[0].out}"
        )
