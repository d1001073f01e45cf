"""Sweeps: a config under every combination of a grid's values, each with every seed, ranked by a metric.

Each setting with each seed is a training run in a folder of its own. The folder's name ends with a digest of
all that determines the run's numbers: settings, seed, content of log and policy. A finished run is never
trained again, even if another grid contains it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import math
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from koffline.config import parse_assignments
from koffline.errors import ConfigError
from koffline.jobs import Job, JobError, run_jobs
from koffline.store.run_record import start_run
from koffline.store.targets import RECORD, is_free, locked, read_record, write_record
from koffline.train.config import TrainConfig, load_config
from koffline.train.prepare import identity_of, open_data, prepared
from koffline.train.run import DivergedError, train
from koffline.train.sweep_summary import Setting, SweepPlan, SweepSummary, summarise, write_summary
from koffline.untrusted.limits import read_json

_MOST_RUNS = 100_000
_FALLS = ("td_error", "continuous_action_diff")
_ERRORS = "errors.txt"
_OURS = ("runs", _ERRORS, "summary.md", "summary.json", "best.yaml", RECORD)


def make_plan(
    path: str | Path | Mapping[str, Any],
    grid: Sequence[str] = (),
    seeds: int = 1,
    assignments: Sequence[str] = (),
    data: str | Path | None = None,
    metric: str | None = None,
    maximize: bool | None = None,
) -> SweepPlan:
    """Every combination of the values of ``grid`` (``key=1e-3,3e-4`` each) with ``seeds`` seeds.

    Seeds count up from the config's ``train.seed``. metric: an evaluator's name, or a loss; without
    one the return in an environment, else the only evaluator. Errors, losses and distances are better when
    small, unless ``maximize`` says otherwise. All configs are checked here, so that nothing starts where one
    of them is wrong. Raises ConfigError in one line.
    """
    axes = _parse_grid(grid)
    if seeds < 1:
        raise ConfigError(f"seeds is {seeds}; give a positive number")
    runs = seeds * math.prod(len(values) for values in axes.values())
    if runs > _MOST_RUNS:
        raise ConfigError(f"the grid has {runs:,} runs; give fewer values or seeds, at most {_MOST_RUNS:,}")
    lasts = [key.rpartition(".")[2] for key in axes]
    named = {
        key: last if lasts.count(last) == 1 else key.removeprefix("algo.params.")
        for key, last in zip(axes, lasts, strict=True)
    }
    settings = []
    for point in itertools.product(*axes.values()):
        values = dict(zip(axes, point, strict=True))
        laid = [f"{key}={_as_json(value)}" for key, value in values.items()]
        config = load_config(path, (*assignments, *laid), None if "data.source" in axes else data)
        words = (
            (named[key], value if isinstance(value, str) else _as_json(value))
            for key, value in values.items()
        )
        settings.append(Setting(tuple(words), config))
    config = settings[0].config
    name, falls = _choose_metric(config, metric)
    chosen = tuple(range(config.train.seed, config.train.seed + seeds))
    return SweepPlan(tuple(settings), chosen, name, not falls if maximize is None else maximize)


def _parse_grid(grid: Sequence[str]) -> dict[str, list[Any]]:
    """``key=a,b,c`` as the items of a YAML list: commas in brackets or quotes do not separate them."""
    axes: dict[str, list[Any]] = {}
    for text in grid:
        key, _, values = text.partition("=")
        try:
            ((key, axis),) = parse_assignments([f"{key}=[{values}]"]).items()
        except ConfigError:
            axis = []
        if not axis:
            raise ConfigError(f"--grid received '{text}'; write it as key=value,value")
        if key in axes:
            raise ConfigError(f"--grid names {key} twice; give all of its values at once")
        if key == "train.seed":
            raise ConfigError(f"--grid sweeps {key}; say how many with --seeds, the first is the config's")
        axes[key] = axis
    return axes


def _choose_metric(config: TrainConfig, name: str | None) -> tuple[str, bool]:
    """The metric's name, and whether less of it is better."""
    types = {key: settings.type for key, settings in config.evaluators.items()}
    if name is None:
        played = [key for key, kind in types.items() if kind == "environment"] or list(types)
        if len(played) != 1:
            known = ", ".join([*played, "a loss"])
            raise ConfigError(f"the config does not say which metric counts; name it with --metric: {known}")
        name = played[0]
    return name, types.get(name, name) in _FALLS or name.endswith("loss") or name.startswith("time_")


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def run_sweep(
    plan: SweepPlan,
    out: Path,
    workers: int = 1,
    ray: str | None = None,
    device: str = "cpu",
    force: bool = False,
    command: str = "",
) -> SweepSummary:
    """Train what is not finished yet and write the summary; force: delete earlier runs first.

    ``out`` gets runs/NAME (a run directory each), errors.txt where runs failed, summary.json, .md and
    best.yaml. A killed sweep goes on, runs in the middle too; values and seeds may be added or taken away. A
    run that fails is reported and the others go on. Raises KofflineError, before anything is written, for
    what any run would refuse, and for a folder that is no sweep's.
    """
    started = start_run("sweep", inputs_of(plan))
    names = _name_runs(plan, device)
    with locked(out / RECORD):
        is_new = is_free(out, RECORD)
        _take_folder(out, force)
        write_record(out, {**started.finish(), "finished": None})
        runs = [_find_folders(out / "runs", named) for named in names]
        jobs = [
            Job(folder.name, train_run, (config, device), folder / RECORD, _is_finished)
            for found in runs
            for folder, config in found.items()
        ]
        try:
            done = run_jobs(jobs, workers, ray, keep_going=True)
        except ConfigError:  # before any job: raises for missing workers or cluster
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
        write_summary(summary, out, command)
        write_record(out, started.finish(ran=done.ran, found=done.found, seconds=round(done.seconds, 3)))
        return summary


def inputs_of(plan: SweepPlan) -> list[str]:
    """The logs, policies and models that the settings name."""
    return [name for setting in plan.settings for name in setting.config.files()]


def train_run(record: Path, config: TrainConfig, device: str) -> None:
    """Train in the folder of the record, going on where it was; divergence is a result too."""
    with contextlib.redirect_stdout(sys.stderr), _silent(), contextlib.suppress(DivergedError):
        train(config, record.parent, device=device, resume=True)


def _name_runs(plan: SweepPlan, device: str) -> list[dict[str, TrainConfig]]:
    """Check every setting as `train` will; give for each its configs with the seeds, by name of the run."""
    names: list[dict[str, TrainConfig]] = []
    labels: dict[str, str] = {}
    opened = None
    for setting in plan.settings:
        # each setting would log the same warning
        with _silent() if names else contextlib.nullcontext():
            if opened is None or opened[0] != setting.config.data:
                opened = setting.config.data, open_data(setting.config.data)
            with prepared(setting.config, device, opened[1]) as parts:
                digests = parts.record["digests"]
        names.append(dict(_name_run(setting, seed, digests) for seed in plan.seeds))
        label, digest = setting.label, next(iter(names[-1])).rpartition("-")[2]
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


def _take_folder(out: Path, force: bool) -> None:
    """Make the folder or continue in it. Raises ConfigError for a folder that is no sweep's."""
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
    """Runs by folder: an existing folder with the run's digest, even if named otherwise, or a new one."""
    there = {path.name.rpartition("-")[2]: path for path in folder.glob("*-*") if path.is_dir()}
    return {there.get(name.rpartition("-")[2], folder / name): config for name, config in named.items()}


def _read_finished(folder: Path) -> dict[str, Any] | None:
    """The record of a run that has ended with a model or has diverged, else None."""
    try:
        record = read_record(folder) or {}
    except ConfigError:  # damaged, which training reports
        return None
    ended = record.get("diverged") or (record.get("finished") and (folder / record["model"]).exists())
    return record if ended else None


def _is_finished(record: Path) -> bool:
    return _read_finished(record.parent) is not None


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Hide the library's warnings."""
    logger = logging.getLogger("koffline")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
