"""Sweeps: a config with every combination of a grid's values and every seed, ranked by
a metric.

A run's folder name ends with a digest of everything that determines its numbers:
settings, seed, contents of log and policy. It is therefore trained once, whatever the
grid. Settings are ranked by their interquartile mean over seeds.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, starmap
from pathlib import Path
from time import perf_counter

import numpy as np

from koffline.errors import ConfigError, KofflineError, counted
from koffline.jobs import Job, PassSettings, run_jobs
from koffline.json_types import JsonObject
from koffline.spread import LEVEL, Spread, spread_of
from koffline.store import (
    RECORD,
    Record,
    is_free,
    locked,
    read_record,
    write_config,
    write_record,
)
from koffline.store.files import finite_json, write_text
from koffline.store.run_record import now, start_run
from koffline.train.config import Setting, SweepPlan, TrainConfig
from koffline.train.prepare import identity_of, open_data, prepared
from koffline.train.run import DivergedError, train
from koffline.untrusted.limits import read_json

_FEWEST = 5
_OURS = (f"runs/*-{'[0-9a-f]' * 10}", "summary.md", "summary.json", "best.yaml", RECORD)


@dataclass(frozen=True)
class SettingScores(Spread):
    """Scores of a setting, one per finished seed; ``diverged`` of them are infinite.
    missing: other seeds.
    """

    setting: Setting
    scores: tuple[float, ...]
    diverged: int
    missing: int


@dataclass(frozen=True)
class SweepSummary:
    """Result of a sweep. rows: the best setting first, settings without all seeds last;
    failures: by run.
    """

    plan: SweepPlan
    rows: tuple[SettingScores, ...]
    failures: Mapping[str, KofflineError]

    @property
    def best(self) -> SettingScores | None:
        """The first setting, if it has all seeds and a finite score; else None."""
        first = self.rows[0]
        if first.missing or not math.isfinite(first.iqm):
            return None
        return first


def run_sweep(
    plan: SweepPlan,
    out: Path,
    workers: int = 1,
    ray: str | None = None,
    device: str = "cpu",
    force: bool = False,
    command: str = "",
    show_progress: bool = True,
) -> SweepSummary:
    """Train all unfinished runs and write the summary; force: delete earlier runs
    first.

    ``out`` gets runs/NAME (a run folder each), summary.json, .md and best.yaml. A
    killed sweep is continued; values and seeds may be added or removed. If a run fails,
    it is reported and the others go on. Raises KofflineError, before anything is
    written, if any run would be refused, the cluster does not answer, or the folder is
    no sweep's.
    """
    started = start_run("sweep", plan.inputs)
    names = _name_runs(plan, device)
    with PassSettings(workers, ray).kept(), locked(out / RECORD):
        _take_folder(out, force)
        write_record(out, started)
        # an existing run has the same digest, even if it is named otherwise
        place = out / "runs"
        there = {
            path.name.rpartition("-")[2]: path
            for path in place.glob("*-*")
            if path.is_dir()
        }

        def job_of(name: str, config: TrainConfig) -> Job:
            folder = there.get(name.rpartition("-")[2], place / name)
            return Job(
                name=folder.name,
                call=train_run,
                arguments=(config, device),
                path=folder / RECORD,
                is_valid=_read_finished,
            )

        by_setting = [list(starmap(job_of, named.items())) for named in names]
        jobs = list(chain.from_iterable(by_setting))
        already_done = sum(job.done for job in jobs)
        began = perf_counter()
        failures = run_jobs(jobs, workers, ray, show_progress, keep_going=True)
        records = [[_read_finished(job.path) for job in same] for same in by_setting]
        summary = summarise(plan, records, failures)
        write_summary(summary, out, command)
        counts = {
            "ran": len(jobs) - already_done - len(failures),
            "found": already_done,
        }
        seconds = round(perf_counter() - began, 3)
        write_record(out, {**started, **counts, "seconds": seconds, "finished": now()})
        return summary


def train_run(record: Path, config: TrainConfig, device: str) -> None:
    """Train in the record's folder, resuming if possible; divergence counts as a
    result.
    """
    with (
        contextlib.redirect_stdout(sys.stderr),
        _silent(),
        contextlib.suppress(DivergedError),
    ):
        train(config, record.parent, device=device, resume=True)


def _name_runs(plan: SweepPlan, device: str) -> list[dict[str, TrainConfig]]:
    """Check every setting as `train` does; return for each its configs by seed, under
    the run's name.
    """
    names: list[dict[str, TrainConfig]] = []
    labels: dict[str, str] = {}
    opened = None
    for setting in plan.settings:
        context: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if names:  # each setting would log the same warning
            context = _silent()
        with context:
            if opened is None or opened[0] != setting.config.data:
                opened = setting.config.data, open_data(setting.config.data)
            with prepared(setting.config, device, opened[1]) as parts:
                digests = parts.record["digests"]
        names.append(dict(_name_run(setting, seed, digests) for seed in plan.seeds))
        label = setting.label
        digest = next(iter(names[-1])).rpartition("-")[2]
        if digest in labels:
            raise ConfigError(
                f"--grid gives the same run twice ({labels[digest]} and {label});"
                " drop one"
            )
        labels[digest] = label
    return names


def _name_run(
    setting: Setting, seed: int, digests: Mapping[str, str]
) -> tuple[str, TrainConfig]:
    """Name and config of a setting's run with this seed.

    The name ends in a digest of all that decides the result: settings, seed and
    ``digests``, those of log and policy.
    """
    train = setting.config.train.model_copy(update={"seed": seed})
    config = setting.config.model_copy(update={"train": train})
    decides = json.dumps(
        identity_of({"config": config.resolved(), "digests": digests}), sort_keys=True
    )
    words = "-".join(
        [*(f"{name}={value}" for name, value in setting.values.items()), f"seed{seed}"]
    )
    readable = re.sub(r"[^A-Za-z0-9_.=+-]+", "_", words)[-80:].lstrip(".-_")
    return f"{readable}-{hashlib.sha256(decides.encode()).hexdigest()[:10]}", config


def _take_folder(out: Path, force: bool) -> None:
    """Create or continue the folder. Raises ConfigError if it is no sweep's."""
    kind = None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        kind = read_json(out / RECORD)["kind"]
    if not is_free(out) and kind != "sweep":
        raise ConfigError(
            f"{out} holds something that is not a sweep; choose another --out"
        )
    if force:
        for pattern in _OURS:
            for path in list(out.glob(pattern)):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
    out.mkdir(parents=True, exist_ok=True)


def _read_finished(path: Path) -> JsonObject | None:
    """The record of a run that has ended with a model or has diverged; None for any
    other.
    """
    try:
        record = read_record(path.parent) or {}
    except ConfigError:  # damaged, which training reports
        return None
    ended = record.get("diverged") or (
        record.get("finished") and path.with_name(record["model"]).exists()
    )
    if ended:
        return record
    return None


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


def summarise(
    plan: SweepPlan,
    records: Sequence[Sequence[Record | None]],
    failures: Mapping[str, KofflineError],
) -> SweepSummary:
    """Rank the settings. records: run.json of each setting and seed, None if the run is
    not finished.

    Raises ConfigError if no run has the metric.
    """
    sign = 1.0
    if plan.maximize:
        sign = -1.0
    known: set[str] = set()
    for run in chain.from_iterable(records):
        if run:
            known.update(run.get("metrics", {}))
    if known and plan.metric not in known:
        names = ", ".join(
            sorted(name for name in known if not name.startswith("time_"))
        )
        raise ConfigError(
            f"no run has a metric '{plan.metric}'; the runs are kept, --metric takes"
            f" {names}"
        )
    rows = []
    for setting, runs in zip(plan.settings, records, strict=True):
        scores = []
        for run in runs:
            if run is None:
                continue
            metrics = run.get("metrics", {plan.metric: None})
            if plan.metric in metrics:
                score = metrics[plan.metric]
                if score is None:  # not finite, or diverged
                    score = sign * math.inf
                scores.append(score)
        rows.append(
            SettingScores(
                **vars(spread_of(np.array(scores))),
                setting=setting,
                scores=tuple(scores),
                diverged=sum(map(math.isinf, scores)),
                missing=len(runs) - len(scores),
            )
        )
    # Complete settings first, then by interquartile mean.
    rows.sort(
        key=lambda row: (row.missing > 0, not row.scores, sign * row.iqm, row.diverged)
    )
    return SweepSummary(plan, tuple(rows), failures)


def write_summary(summary: SweepSummary, folder: Path, command: str) -> None:
    """Write best.yaml, summary.md and, at the end, summary.json."""
    (folder / "best.yaml").unlink(missing_ok=True)
    if summary.best is not None:
        write_config(folder / "best.yaml", summary.best.setting.config.resolved())
    plan = summary.plan
    settings = []
    for row in summary.rows:
        numbers = {
            name: value for name, value in vars(row).items() if name != "setting"
        }
        settings.append({"values": row.setting.values, **numbers})
    content = {
        "metric": plan.metric,
        "maximize": plan.maximize,
        "seeds": plan.seeds,
        "interval": LEVEL,
        "settings": settings,
        "failures": [
            {"run": name, "reason": str(error), "trace": getattr(error, "trace", "")}
            for name, error in summary.failures.items()
        ],
        "command": command,
    }
    write_text(folder / "summary.md", as_markdown(summary))
    write_text(folder / "summary.json", finite_json(content))


def as_markdown(summary: SweepSummary) -> str:
    """Markdown table of the settings, with notes."""
    plan = summary.plan
    rows = summary.rows
    names = [*rows[0].setting.values] or ["setting"]
    lines = [
        [*names, "IQM", f"{LEVEL:.0%} interval", "seeds"],
        [":--"] * len(names) + ["--:"] * 3,
    ]
    for row in rows:
        low = _number(row.low)
        high = _number(row.high)
        if low == high and not math.isfinite(row.low):
            interval = low
        else:
            interval = f"{low} … {high}"
        seeds = str(len(row.scores))
        if row.missing:
            seeds += f" of {len(row.scores) + row.missing}"
        if row.diverged:
            seeds += f", {row.diverged} diverged"
        words = [*row.setting.values.values()] or [row.setting.label]
        lines.append([*words, _number(row.iqm), interval, seeds])
    table = [
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |"
        for line in lines
    ]
    failed = [f"failed: {name}: {error}" for name, error in summary.failures.items()]
    notes = [f"- {note}" for note in (*_notes(summary), *failed)]
    better = "less"
    if plan.maximize:
        better = "more"
    seeds = counted(len(plan.seeds), "seed")
    title = f"## {plan.metric} ({better} is better), {seeds}"
    return "\n".join([title, "", *table, "", *notes]) + "\n"


def _number(value: float) -> str:
    if math.isnan(value):
        return "–"
    if math.isfinite(value):
        return f"{value:.4g}"
    return "diverged"


def _notes(summary: SweepSummary) -> list[str]:
    """Notes on the meaning and limits of the numbers."""
    seeds = len(summary.plan.seeds)
    best = summary.best
    rows = summary.rows
    few = seeds < _FEWEST
    is_partial = any(row.missing for row in rows)
    notes: list[str] = []
    notes.append(
        "IQM: mean of the seeds' last epoch without lowest and highest quarter;"
        " interval: bootstrap"
    )
    if few:
        notes.append(
            f"{seeds} seeds cannot give {LEVEL:.0%}: no interval leaves their range;"
            f" use --seeds {_FEWEST}"
        )
    if len(rows) > 1 and best is not None:
        notes.append(f"best: {rows[0].setting.label} (best.yaml)")
    if any(row.diverged for row in rows):
        notes.append("a run that diverged counts as infinitely bad")
    if is_partial:
        notes.append(
            "settings without all of their seeds come last; the same command runs what"
            " is missing"
        )
    return notes
