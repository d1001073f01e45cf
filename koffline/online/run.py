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
from koffline.online.group import GroupTask, is_result, read_result, train_group
from koffline.online.summary import OnlineSummary, summarise, write_summary
from koffline.progress import progress_bar
from koffline.store.run_record import describe_call, now, versions
from koffline.store.targets import CONFIG, open_run, read_record, warn_of_versions, write_record

DEFAULT_SEEDS = 6
_KIND = "online"


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
        "format": 1,
        "kind": _KIND,
        "config": settings,
        "groups": groups,
        "versions": versions(),
        "call": describe_call("online"),
        "started": now(),
        "finished": None,
    }
    with open_run(folder, record, _identity_of, resume is not None):
        warn_of_versions(folder, record, _KIND)
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        tasks = [GroupTask(config, tuple(group), folder, digest) for group in groups]
        _train_groups(tasks, workers, show_progress)
        summary = summarise(tasks, [read_result(task.result) for task in tasks])
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
