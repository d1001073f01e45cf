"""Running a sweep: each setting with each seed is a training run, and its folder the record that it is done.

A run is known by the digest of all that decides its numbers: settings, seed, content of log and policy. It
ends the folder's name, and a finished folder is never trained again, whichever grid asks for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

from koffline.errors import ConfigError, nearest_name
from koffline.jobs import Job, JobError, Report, run_jobs
from koffline.store.run_folders import RECORD, read_record, write_record
from koffline.store.run_record import is_free, start_run
from koffline.store.targets import locked
from koffline.train.config import TrainConfig
from koffline.train.data import open_data
from koffline.train.run import DivergedError, Parts, identity_of, prepared, train
from koffline.train.sweep_plan import Setting, SweepPlan
from koffline.train.sweep_summary import SweepSummary, summarise, write_summary
from koffline.untrusted.limits import read_json

_ERRORS = "errors.txt"
_OURS = ("runs", _ERRORS, "summary.md", "summary.json", "summary.png", "best.yaml", RECORD)


@dataclass(frozen=True)
class SweepSettings:
    """Where and how a sweep runs. ray: local, auto or an address; force: delete its earlier runs first."""

    out: Path
    workers: int = 1
    ray: str | None = None
    device: str = "cpu"
    force: bool = False
    progress: bool | Report = True
    command: str = ""


def run_sweep(plan: SweepPlan, settings: SweepSettings) -> SweepSummary:
    """Train what is not finished yet and write the summary.

    ``out`` gets runs/NAME (a run directory each), errors.txt where runs failed, summary.json, .md, .png, and
    best.yaml. A killed sweep goes on, runs in the middle too; values and seeds may be added or taken away. A
    run that fails is reported and the others go on. Raises KofflineError, before anything is written, for
    what any run would refuse, and for a folder that is no sweep's.
    """
    started = start_run("sweep", inputs_of(plan))
    names = _name_runs(plan, settings.device)
    out = settings.out
    with locked(out / RECORD):
        is_new = is_free(out, RECORD)
        _take_folder(out, settings.force)
        write_record(out, {**started.finish(), "finished": None})
        try:
            runs = [_find_folders(out / "runs", named) for named in names]
            jobs = [
                Job(folder.name, train_run, (config, settings.device), folder / RECORD, _is_finished)
                for found in runs
                for folder, config in found.items()
            ]
            done = run_jobs(jobs, settings.workers, settings.ray, settings.progress, keep_going=True)
        except ConfigError:  # before any job: no workers, no such cluster
            if is_new:
                shutil.rmtree(out)
            raise
        (out / _ERRORS).unlink(missing_ok=True)
        if done.failures:
            parts = [f"{failure.name}: {failure.reason}\n\n{failure.trace}" for failure in done.failures]
            (out / _ERRORS).write_text("\n".join(parts), encoding="utf-8")
        records = [[_read_finished(folder) for folder in found] for found in runs]
        if done.failures and not any(map(any, records)):
            first = done.failures[0]
            raise JobError(f"every run failed, {first.name} first: {first.reason}", first.trace)
        summary = summarise(plan, records, done.failures)
        write_summary(summary, out, settings.command)
        write_record(out, started.finish(ran=done.ran, found=done.found, seconds=round(done.seconds, 3)))
        return summary


def inputs_of(plan: SweepPlan) -> list[str]:
    """The logs, policies and models that the settings name."""
    return [name for setting in plan.settings for name in setting.config.files()]


def train_run(record: Path, config: TrainConfig, device: str) -> None:
    """Train in the folder of the record, going on where it was; divergence is a result too."""
    with contextlib.redirect_stdout(sys.stderr), _kept_warnings() as kept, contextlib.suppress(DivergedError):
        train(config, record.parent, device=device, resume=True)
    if kept:
        warnings = dict.fromkeys(" ".join(warning.getMessage().split()) for warning in kept)
        write_record(record.parent, {**(read_record(record.parent) or {}), "warnings": list(warnings)})


def _name_runs(plan: SweepPlan, device: str) -> list[dict[str, TrainConfig]]:
    """Check every setting as `train` will; give for each its configs with the seeds, by name of the run."""
    names: list[dict[str, TrainConfig]] = []
    labels: dict[str, str] = {}
    opened = None
    with _kept_warnings():  # the runs will say them
        for setting in plan.settings:
            if opened is None or opened[0] != setting.config.data:
                opened = setting.config.data, open_data(setting.config.data)
            with prepared(setting.config, device, opened[1]) as parts:
                if not names:
                    _check_metric(plan.metric, parts)
                names.append(dict(_name_run(setting, seed, parts.record["digests"]) for seed in plan.seeds))
            label = ", ".join(f"{name}={value}" for name, value in setting.values)
            digest = next(iter(names[-1])).rpartition("-")[2]
            if digest in labels:
                raise ConfigError(
                    f"--grid gives the same run twice ({labels[digest]} and {label}); leave one out"
                )
            labels[digest] = label
    return names


def _name_run(setting: Setting, seed: int, digests: Mapping[str, str]) -> tuple[str, TrainConfig]:
    train = setting.config.train.model_copy(update={"seed": seed})
    config = setting.config.model_copy(update={"train": train})
    decides = json.dumps(identity_of({"config": config.resolved(), "digests": digests}), sort_keys=True)
    words = "-".join([*(f"{name}={value}" for name, value in setting.values), f"seed{seed}"])
    readable = re.sub(r"[^A-Za-z0-9_.=+-]+", "_", words)[-80:].lstrip(".-_")
    return f"{readable}-{hashlib.sha256(decides.encode()).hexdigest()[:10]}", config


def _check_metric(name: str, parts: Parts) -> None:
    """Raise ConfigError for a metric that no run will have; one step of the algorithm tells its losses."""
    if name in parts.evaluators or name.startswith("time_"):
        return
    try:
        losses = parts.algo.update(parts.buffer.sample_transition_batch(parts.algo.batch_size))
    except (AssertionError, AttributeError, RuntimeError, ValueError):
        return  # an algorithm that prepares itself in `fit` only; the summary will say it
    if name not in losses:
        remedy = nearest_name(name, [*parts.evaluators, *losses])
        raise ConfigError(f"no run will have a metric '{name}'; {remedy}")


def _take_folder(out: Path, force: bool) -> None:
    """Make the folder or go on in it; one that is no sweep's is left alone. Raises ConfigError."""
    if not is_free(out, RECORD):
        try:
            is_ours = read_json(out / RECORD)["kind"] == "sweep"
        except (OSError, ValueError, KeyError, TypeError):
            is_ours = False
        if not is_ours:
            raise ConfigError(f"{out} holds something that is not a sweep; choose another --out")
    for path in (out / name for name in _OURS if force):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)


def _find_folders(folder: Path, named: Mapping[str, TrainConfig]) -> dict[Path, TrainConfig]:
    """The runs by their folders: those of their digest, where they have begun, also under other words."""
    there = {path.name.rpartition("-")[2]: path for path in folder.glob("*-*") if path.is_dir()}
    return {there.get(name.rpartition("-")[2], folder / name): config for name, config in named.items()}


def _read_finished(folder: Path) -> dict[str, Any] | None:
    """The record of a run that has ended with a model or has diverged, else None."""
    try:
        record = read_record(folder) or {}
    except ConfigError:  # damaged, which training will say
        return None
    ended = record.get("diverged") or (record.get("finished") and (folder / record["model"]).exists())
    return record if ended else None


def _is_finished(record: Path) -> bool:
    return _read_finished(record.parent) is not None


@contextlib.contextmanager
def _kept_warnings() -> Iterator[list[logging.LogRecord]]:
    """Warnings of the library go into a list: fifty runs would repeat them fifty times."""
    logger, keeper = logging.getLogger("koffline"), BufferingHandler(capacity=sys.maxsize)
    keeper.setLevel(logging.WARNING)
    before = logger.propagate
    logger.addHandler(keeper)
    logger.propagate = False
    try:
        yield keeper.buffer
    finally:
        logger.removeHandler(keeper)
        logger.propagate = before
