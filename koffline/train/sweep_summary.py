"""Summary of a sweep: settings ranked by their interquartile mean over seeds; table and files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from koffline.errors import ConfigError
from koffline.jobs import JobFailure
from koffline.spread import LEVEL, Spread, spread_of
from koffline.store.files import finite_json, write_text
from koffline.store.targets import write_config
from koffline.train.config import TrainConfig

_MOST_SHOWN = 40  # most settings shown on a terminal
_FEW_SEEDS = 5


@dataclass(frozen=True)
class Setting:
    """One point of the grid. values: the short name of each swept key, and its value in words."""

    values: tuple[tuple[str, str], ...]
    config: TrainConfig

    @property
    def label(self) -> str:
        """All values in one line."""
        return ", ".join(f"{name}={value}" for name, value in self.values) or "the config"


@dataclass(frozen=True)
class SweepPlan:
    """Settings and seeds of a sweep, and the metric of its ranking. maximize: larger is better."""

    settings: tuple[Setting, ...]
    seeds: tuple[int, ...]
    metric: str
    maximize: bool


@dataclass(frozen=True)
class Row:
    """Scores of a setting, one per finished seed; diverged seeds are infinitely bad. missing: other seeds."""

    setting: Setting
    scores: tuple[float, ...]
    missing: int

    @property
    def diverged(self) -> int:
        """Seeds with an infinitely bad score."""
        return sum(map(math.isinf, self.scores))

    @property
    def mean(self) -> float:
        """Mean score; NaN without a score."""
        return _mean(self.scores)

    @cached_property
    def spread(self) -> Spread:
        """The interquartile mean and its bootstrap interval."""
        return spread_of(np.array(self.scores))


@dataclass(frozen=True)
class SweepSummary:
    """A sweep's outcome. rows: the best setting first, those that lack seeds last."""

    plan: SweepPlan
    rows: tuple[Row, ...]
    failures: tuple[JobFailure, ...]

    @property
    def best(self) -> Row | None:
        """The first setting, where it has all seeds and a finite score."""
        first = self.rows[0]
        return None if first.missing or not math.isfinite(first.spread.iqm) else first

    @property
    def title(self) -> str:
        """Title of the table: the metric, its direction, and the number of settings."""
        better, seeds = "more" if self.plan.maximize else "less", len(self.plan.seeds)
        return f"{self.plan.metric} ({better} is better), {seeds} seed{'s' if seeds > 1 else ''}"


def summarise(
    plan: SweepPlan,
    records: Sequence[Sequence[Mapping[str, Any] | None]],
    failures: Sequence[JobFailure] = (),
) -> SweepSummary:
    """Rank the settings. records: run.json of each setting and seed, None where the run is not finished.

    Raises ConfigError where no run has the metric.
    """
    sign = -1.0 if plan.maximize else 1.0
    known = {name for found in records for run in found if run for name in run.get("metrics", {})}
    if known and plan.metric not in known:
        names = ", ".join(sorted(name for name in known if not name.startswith("time_")))
        raise ConfigError(
            f"no run has a metric '{plan.metric}'; known are {names}: the runs are kept, name one of these "
            "with --metric"
        )
    rows = []
    for setting, found in zip(plan.settings, records, strict=True):
        done = [run.get("metrics", {plan.metric: None}) for run in found if run is not None]
        scores = [metrics[plan.metric] for metrics in done if plan.metric in metrics]
        kept = tuple(sign * math.inf if s is None else s for s in scores)  # not finite, or diverged
        rows.append(Row(setting, kept, len(found) - len(kept)))

    def rank(row: Row) -> tuple[bool, bool, float, int, float]:
        """Sort key: complete settings first, then by interquartile mean; infinite ones by finite scores."""
        finite = sign * _mean([score for score in row.scores if math.isfinite(score)])
        return row.missing > 0, not row.scores, sign * row.spread.iqm, row.diverged, finite

    return SweepSummary(plan, tuple(sorted(rows, key=rank)), tuple(failures))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def write_summary(summary: SweepSummary, folder: Path, command: str) -> None:
    """Write best.yaml, summary.md and, last of all, summary.json."""
    (folder / "best.yaml").unlink(missing_ok=True)
    if summary.best is not None:
        write_config(folder / "best.yaml", summary.best.setting.config.resolved())
    plan = summary.plan
    content = {
        "metric": plan.metric,
        "maximize": plan.maximize,
        "seeds": plan.seeds,
        "interval": LEVEL,
        "settings": [
            {
                "values": dict(row.setting.values),
                **asdict(row.spread),
                "mean": row.mean,
                "scores": row.scores,
                "diverged": row.diverged,
                "missing": row.missing,
            }
            for row in summary.rows
        ],
        "failures": [{"run": failure.name, "reason": failure.reason} for failure in summary.failures],
        "command": command,
    }
    write_text(folder / "summary.md", as_markdown(summary))
    write_text(folder / "summary.json", finite_json(content))


def print_summary(summary: SweepSummary) -> None:
    """The best settings as a table, and what to mind."""
    from rich.markdown import Markdown

    from koffline.report import make_console

    make_console().print(Markdown(as_markdown(summary, _MOST_SHOWN)))


def as_markdown(summary: SweepSummary, most: int | None = None) -> str:
    """Markdown table of the settings, at most ``most`` of them, with notes."""
    rows = summary.rows[:most]
    names = [name for name, _ in rows[0].setting.values] or ["setting"]
    lines = [[*names, "IQM", f"{LEVEL:.0%} interval", "mean", "seeds"]]
    lines.append([":--"] * len(names) + ["--:"] * 4)
    for row in rows:
        low, high = _number(row.spread.low), _number(row.spread.high)
        interval = low if low == high and not math.isfinite(row.spread.low) else f"{low} … {high}"
        seeds = str(len(row.scores)) + (f" of {len(row.scores) + row.missing}" if row.missing else "")
        seeds += f", {row.diverged} diverged" if row.diverged else ""
        words = [value for _, value in row.setting.values] or [row.setting.label]
        lines.append([*words, _number(row.spread.iqm), interval, _number(row.mean), seeds])
    table = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines]
    if len(summary.rows) > len(rows):
        table += ["", f"and {len(summary.rows) - len(rows)} settings more in summary.md"]
    notes = [f"- {note}" for note in _notes(summary)]
    failed = [f"- failed: {failure.name}: {failure.reason}" for failure in summary.failures]
    return "\n".join([f"## {summary.title}", "", *table, "", *notes, *failed]) + "\n"


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4g}" if math.isfinite(value) else "diverged"


def _notes(summary: SweepSummary) -> list[str]:
    """Notes on the meaning and limits of the numbers."""
    seeds, best, others = len(summary.plan.seeds), summary.best, summary.rows[1:]
    notes = [
        "IQM: mean of the seeds' last epoch without the lowest and highest quarter; "
        f"interval: {LEVEL:.0%} bootstrap over seeds"
    ]
    if seeds < _FEW_SEEDS:
        notes.append(
            f"{seeds} seeds cannot give {LEVEL:.0%}: no interval leaves their range; use --seeds {_FEW_SEEDS}"
        )
    if best is not None and others:
        mine = best.spread  # a missing interval (NaN) excludes nothing
        rivals = sum(not (mine.low > o.spread.high or o.spread.low > mine.high) for o in others)
        overlap = f"; the intervals of {rivals} of {len(others)} others overlap its own"
        notes.append(f"best: {best.setting.label} (best.yaml)" + (overlap if rivals and seeds > 1 else ""))
    if any(row.diverged for row in summary.rows):
        notes.append("a run that diverged counts as infinitely bad")
    if any(row.missing for row in summary.rows):
        notes.append("settings without all of their seeds come last; the same command runs what is missing")
    return notes
