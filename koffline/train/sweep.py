"""A sweep: every setting with every seed, each a training run of its own, and what they add up to."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from koffline.data.files import atomic_file
from koffline.data.sources import open_transitions
from koffline.data.spaces import Bounds, Discrete
from koffline.data.transitions import Transitions
from koffline.errors import ConfigError, nearest_name
from koffline.jobs import Job, JobError, JobFailure, Report, run_jobs
from koffline.run_record import FILE as RUN
from koffline.run_record import StartedRun, start_run
from koffline.targets import locked
from koffline.train.config import TrainConfig
from koffline.train.sweep_plan import SweepPlan, SweepRun, deciding
from koffline.train.sweep_run import (
    RunResult,
    files_of,
    is_archive,
    is_result,
    read_result,
    train_packed,
    train_run,
    unpack_runs,
)
from koffline.train.sweep_summary import FailedRun, Metric, SweepSummary, summarise
from koffline.train.sweep_tables import write_summary
from koffline.untrusted.limits import read_json

RECORD = "sweep.json"
_FORMAT = 1
_OURS = ("runs", "packed", "errors", "summary.md", "summary.json", "summary.png", "best.yaml", RUN, RECORD)


@dataclass(frozen=True)
class SweepSettings:
    """Where and how a sweep runs. ray: local, auto or an address; force: begin again in a sweep's folder."""

    out: Path
    workers: int = 1
    ray: str | None = None
    device: str = "cpu"
    force: bool = False
    progress: bool | Report = True
    command: str = ""


def run_sweep(plan: SweepPlan, metric: Metric, settings: SweepSettings) -> SweepSummary:
    """Train what has no result yet and write the summary.

    ``out`` gets runs/NAME (a run directory each) and runs/NAME.json (its result), errors/NAME.txt for runs
    that failed, summary.json, .md, .png, and best.yaml. A killed sweep goes on, runs in the middle too; more
    values or seeds may be added later. A run that fails is reported and the others go on. Raises ConfigError
    for a folder of another sweep (unless ``force``), and for a log that cannot be read.
    """
    out = settings.out
    started = start_run("sweep", inputs_of(plan))
    _check_metric(plan, metric, settings.device)
    with locked(out / RECORD):
        return _sweep(plan, metric, settings, started)


def _sweep(plan: SweepPlan, metric: Metric, settings: SweepSettings, started: StartedRun) -> SweepSummary:
    out = settings.out
    _open_folder(out, _identity(plan, settings.device), settings.force)
    unpack_runs(out / "packed", out / "runs")
    jobs = [_make_job(run, settings) for run in plan.runs]
    try:
        done = run_jobs(jobs, settings.workers, settings.ray, settings.progress, keep_going=True)
    except ConfigError:  # before any job: no such cluster, no workers
        _free(out)
        raise
    unpack_runs(out / "packed", out / "runs")
    shutil.rmtree(out / "packed", ignore_errors=True)
    _write_errors(out / "errors", plan, done.failures)
    results = _read_results(plan, out / "runs")
    if not results and done.failures:
        _give_up(out, done.failures)
    failures = [FailedRun(failure.name, failure.reason) for failure in done.failures]
    summary = summarise(plan, results, metric, failures)
    write_summary(summary, out, {"command": settings.command})
    _write_run(out / RUN, started.finish(ran=done.ran, found=done.found, **_clock(summary, done.seconds)))
    return summary


def _clock(summary: SweepSummary, seconds: float) -> dict[str, Any]:
    """Seconds of this process, and of each setting the mean over its seeds."""
    means = {part.setting.label: part.seconds for part in summary.settings}
    rounded = {label: round(mean, 3) if np.isfinite(mean) else None for label, mean in means.items()}
    return {"seconds": round(seconds, 3), "seconds_per_run": rounded}


def _write_run(path: Path, record: Mapping[str, Any]) -> None:
    with atomic_file(path, force=True) as temporary:
        temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def inputs_of(plan: SweepPlan) -> list[str | None]:
    """The logs and policies of all settings."""
    configs = [setting.config for setting in plan.settings]
    bases = [getattr(part, "base", None) for config in configs for part in config.evaluators.values()]
    return [*(c.data.source for c in configs), *(c.algo.policy for c in configs), *bases]


def _make_job(run: SweepRun, settings: SweepSettings) -> Job:
    """On Ray the whole run comes back in one archive, unless its result is here already."""
    result = settings.out / "runs" / f"{run.name}.json"
    if settings.ray is None or is_result(result):
        return Job(run.name, train_run, (run.name, run.config, settings.device), result, is_result)
    files = files_of(run.config)
    originals = tuple(str(file.path) for file in files)
    arguments = (run.name, run.config, settings.device, originals, *files)
    return Job(run.name, train_packed, arguments, settings.out / "packed" / f"{run.name}.zip", is_archive)


def _read_results(plan: SweepPlan, folder: Path) -> dict[str, RunResult]:
    paths = {run.name: folder / f"{run.name}.json" for run in plan.runs}
    return {name: read_result(path) for name, path in paths.items() if is_result(path)}


def _write_errors(folder: Path, plan: SweepPlan, failures: tuple[JobFailure, ...]) -> None:
    """A file per failed run; those of runs that have come through since are removed."""
    for run in plan.runs:
        (folder / f"{run.name}.txt").unlink(missing_ok=True)
    for failure in failures:
        folder.mkdir(exist_ok=True)
        text = f"{failure.reason}\n\n{failure.trace}".rstrip() + "\n"
        (folder / f"{failure.name}.txt").write_text(text, encoding="utf-8")
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _give_up(out: Path, failures: tuple[JobFailure, ...]) -> NoReturn:
    """Where every run failed the folder is free for a mended config."""
    _free(out)
    first = failures[0]
    raise JobError(f"every run failed, {first.name} first: {first.reason}", first.trace)


def _free(out: Path) -> None:
    """Undo the taking of a folder in which no run has come to a checkpoint or a result."""
    if any((out / "runs").glob("*/checkpoint.pt")) or any((out / "runs").glob("*.json")):
        return
    for name in ("runs", "packed"):
        shutil.rmtree(out / name, ignore_errors=True)
    (out / RECORD).unlink(missing_ok=True)
    if not any(out.iterdir()):
        out.rmdir()


def _identity(plan: SweepPlan, device: str) -> dict[str, Any]:
    """What the runs of a folder have in common, and the digests of logs and policies. Raises KofflineError.

    Each algorithm is made once, so that what does not fit the log is said before anything is written.
    """
    from koffline.algos.from_config import check_actions, make_algorithm
    from koffline.algos.quiet import quiet

    swept = {axis.key for axis in plan.axes}
    logs: dict[str, Transitions] = {}
    digests = {}
    for config in (setting.config for setting in plan.settings):
        data, policy = config.data, config.algo.policy
        if data.source not in logs:
            logs[data.source] = log = _open_log(config)
            digests[f"log {data.source}" if "data.source" in swept else "log"] = log.sha256
        with quiet():
            algo = make_algorithm(config.algo.type, config.algo.params, device, policy)
            check_actions(algo, logs[data.source], config.algo.type)
        if policy is not None:
            name = f"policy {policy}" if "algo.policy" in swept else "policy"
            digests[name] = hashlib.sha256(Path(policy).read_bytes()).hexdigest()
    return {"config": deciding(plan.base), "digests": digests}


def _check_metric(plan: SweepPlan, metric: Metric, device: str) -> None:
    """Raise ConfigError for a metric that no run will have: one step of one algorithm says which exist."""
    from koffline.algos import from_config
    from koffline.algos.evaluators import own_randomness
    from koffline.algos.quiet import quiet

    config = plan.settings[0].config
    if metric.name in config.evaluators or metric.name.startswith("time_"):
        return
    log, algo_config = _open_log(config), config.algo
    with quiet(), own_randomness(0):
        algo = from_config.make_algorithm(algo_config.type, algo_config.params, device, algo_config.policy)
        from_config.check_actions(algo, log, algo_config.type)
        buffer = from_config.make_buffer(algo, log, np.random.default_rng(0))
        from_config.build_networks(algo, buffer, algo_config.type)
        try:
            losses = list(algo.update(buffer.sample_transition_batch(algo.batch_size)))
        except (AssertionError, AttributeError, RuntimeError, ValueError):
            return  # an algorithm that prepares itself in `fit` only; the summary will say it
    if metric.name not in losses:
        known = [*config.evaluators, *losses]
        raise ConfigError(f"no run will have a metric '{metric.name}'; {nearest_name(metric.name, known)}")


def _open_log(config: TrainConfig) -> Transitions:
    data = config.data
    bounds = None if data.continuous is None else Bounds(*data.continuous)
    return open_transitions(data.source, Discrete(data.discrete) if data.discrete else bounds)


def _open_folder(out: Path, identity: Mapping[str, Any], force: bool) -> None:
    """Take the folder, or raise ConfigError before anything is written."""
    found = _read_record(out)
    if found is not None and force:
        for name in _OURS:
            path = out / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        found = None
    if found is not None:
        _check_same(out, found["config"], identity["config"], missing_matters=True)
        _check_same(out, found["digests"], identity["digests"], missing_matters=False)
        identity = {**identity, "digests": {**found["digests"], **identity["digests"]}}
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{out} cannot be created ({error.strerror or error}); choose another") from None
    with atomic_file(out / RECORD, force=True) as temporary:
        temporary.write_text(json.dumps({"format": _FORMAT, **identity}, indent=2) + "\n", encoding="utf-8")


def _check_same(
    out: Path, found: Mapping[str, Any], wanted: Mapping[str, Any], missing_matters: bool
) -> None:
    """The grid and the seeds of a sweep may grow; what lies below them may not change."""
    for key in sorted({*found, *wanted}, key=lambda key: (key != "algo.type", key)):
        if key in found and key in wanted:
            same = found[key] == wanted[key]
        else:
            same = not missing_matters
        if not same:
            what = key if missing_matters else f"the digest of the {key}"
            raise ConfigError(
                f"{out} is another sweep: {what} is {_shown(found.get(key))} there and "
                f"{_shown(wanted.get(key))} here; choose another --out or begin again with --force"
            )


def _read_record(out: Path) -> dict[str, Any] | None:
    """The identity of the sweep in a folder; None for a new folder. Raises ConfigError for another's."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file; name a folder for the sweep")
    try:
        record = read_json(out / RECORD)
        return {"config": dict(record["config"]), "digests": dict(record["digests"])}
    except FileNotFoundError:
        # Where every run has failed only the reasons are left.
        if out.exists() and any(not p.name.startswith(".") and p.name != "errors" for p in out.iterdir()):
            raise ConfigError(f"{out} holds something that is not a sweep; choose another --out") from None
        return None
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{out / RECORD} is damaged; choose another --out") from None


def _shown(value: Any) -> str:
    text = "not set" if value is None else str(value)
    return text if len(text) <= 20 else f"{text[:12]}…"
