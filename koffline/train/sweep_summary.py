"""What a sweep found: settings ranked by their interquartile mean over seeds; table, files and picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from koffline.errors import ConfigError
from koffline.jobs import JobFailure
from koffline.spread import LEVEL, Spread, spread_of
from koffline.store.files import atomic_file
from koffline.store.run_folders import finite_json, write_config, write_text
from koffline.train.config import TrainConfig
from koffline.train.sweep_plan import SweepPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_SHOWN = 40  # settings on a terminal and in the picture
_FEW_SEEDS = 5


@dataclass(frozen=True)
class Row:
    """The scores of a setting, or of all settings with one value of an axis.

    strata: of each setting one score per finished seed, infinitely bad where it diverged. missing: seeds
    without a score. seconds: of its runs; config: of a setting.
    """

    values: tuple[tuple[str, str], ...]
    strata: tuple[tuple[float, ...], ...]
    missing: int
    seconds: tuple[float, ...] = ()
    config: TrainConfig | None = None

    @property
    def label(self) -> str:
        """All values in one line."""
        return ", ".join(f"{name}={value}" for name, value in self.values) or "the config"

    @property
    def scores(self) -> list[float]:
        """The scores of all strata."""
        return [score for stratum in self.strata for score in stratum]

    @property
    def diverged(self) -> int:
        """Seeds with an infinitely bad score."""
        return sum(map(math.isinf, self.scores))

    @cached_property
    def spread(self) -> Spread:
        """The interquartile mean; for its interval seeds are drawn again within each stratum."""
        return spread_of([np.array(stratum) for stratum in self.strata])


@dataclass(frozen=True)
class SweepSummary:
    """A sweep's outcome. rows: the best setting first, those that lack seeds last; axes: a row per value."""

    plan: SweepPlan
    rows: tuple[Row, ...]
    axes: tuple[tuple[Row, ...], ...]
    failures: tuple[JobFailure, ...]
    warnings: tuple[str, ...]

    @property
    def best(self) -> Row | None:
        """The first setting, where it has all seeds and a finite score."""
        first = self.rows[0]
        return None if first.missing or not math.isfinite(first.spread.iqm) else first

    @property
    def title(self) -> str:
        """The metric, which scores are better, and how many there are."""
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
    runs = [run for found in records for run in found if run is not None]
    known = {name for run in runs for name in run.get("metrics", {})}
    if known and plan.metric not in known:
        names = ", ".join(sorted(name for name in known if not name.startswith("time_")))
        raise ConfigError(
            f"no run has a metric '{plan.metric}'; known are {names}: the runs are kept, name one of these "
            "with --metric"
        )
    rows = []
    for setting, found in zip(plan.settings, records, strict=True):
        done = [{"metrics": {plan.metric: None}, **run} for run in found if run is not None]
        scores = [run["metrics"][plan.metric] for run in done if plan.metric in run["metrics"]]
        scores = [sign * math.inf if score is None else score for score in scores]  # not finite, or diverged
        seconds = tuple(run["seconds"] for run in done if "seconds" in run)
        rows.append(Row(setting.values, (tuple(scores),), len(found) - len(scores), seconds, setting.config))

    def rank(row: Row) -> tuple[bool, bool, float, int, float]:
        """Complete ones first, then by the interquartile mean; the infinitely bad by what did not diverge."""
        finite = sign * _mean([score for score in row.scores if math.isfinite(score)])
        return row.missing > 0, not row.scores, sign * row.spread.iqm, row.diverged, finite

    axes = [_pooled(rows, place) for place in range(len(plan.settings[0].values))]
    axes = [axis for axis in axes if len(axis) > 1]
    warnings = dict.fromkeys(text for run in runs for text in run.get("warnings", ()))
    ranked = tuple(sorted(rows, key=rank))
    return SweepSummary(plan, ranked, tuple(axes) if len(axes) > 1 else (), tuple(failures), tuple(warnings))


def _pooled(rows: Sequence[Row], place: int) -> tuple[Row, ...]:
    """One row for each value of an axis."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault(row.values[place], []).append(row)
    return tuple(
        Row((value,), tuple(row.strata[0] for row in same), sum(row.missing for row in same))
        for value, same in groups.items()
    )


def write_summary(summary: SweepSummary, folder: Path, command: str) -> None:
    """Write best.yaml, summary.png (of several settings), summary.md and, last of all, summary.json.

    The same results give the same files: seconds are for the terminal.
    """
    for name in ("best.yaml", "summary.png"):  # of an earlier command, which may have had another grid
        (folder / name).unlink(missing_ok=True)
    if summary.best is not None and summary.best.config is not None:
        write_config(folder / "best.yaml", summary.best.config.resolved())
    if len(summary.rows) > 1:
        _draw(summary, folder / "summary.png")
    content = {
        "metric": summary.plan.metric,
        "maximize": summary.plan.maximize,
        "interval": LEVEL,
        "runs": len(summary.rows) * len(summary.plan.seeds),
        "seeds": summary.plan.seeds,
        "settings": [_as_plain(row) for row in summary.rows],
        "axes": [_as_plain(row) for axis in summary.axes for row in axis],
        "failures": [{"run": failure.name, "reason": failure.reason} for failure in summary.failures],
        "warnings": summary.warnings,
        "command": command,
    }
    write_text(folder / "summary.md", as_markdown(summary))
    write_text(folder / "summary.json", finite_json(content))


def _as_plain(row: Row) -> dict[str, Any]:
    counts = {"scores": row.scores, "diverged": row.diverged, "missing": row.missing}
    return {"values": dict(row.values), **asdict(row.spread), "mean": _mean(row.scores), **counts}


def print_summary(summary: SweepSummary) -> None:
    """The best settings as a table, and what to mind."""
    from rich.markdown import Markdown

    from koffline.report.page import make_console

    make_console().print(Markdown(as_markdown(summary, _MOST_SHOWN, clock=True)))


def as_markdown(summary: SweepSummary, most: int | None = None, clock: bool = False) -> str:
    """A table of the settings, of each axis where there are several, and what to mind.

    most: settings that are shown; clock: with the seconds of a run, which differ from day to day.
    """
    rows = summary.rows[:most]
    lines = [f"## {summary.title}", "", *_table(rows, clock)]
    if len(summary.rows) > len(rows):
        lines += ["", f"and {len(summary.rows) - len(rows)} settings more in summary.md"]
    for axis in summary.axes:
        lines += ["", f"{axis[0].values[0][0]}, over all settings of the others:", "", *_table(axis)]
    lines += ["", *(f"- {note}" for note in _notes(summary))]
    lines += [f"- failed: {failure.name}: {failure.reason}" for failure in summary.failures]
    return "\n".join([*lines, *(f"- warning: {text}" for text in summary.warnings)]) + "\n"


def _table(rows: Sequence[Row], clock: bool = False) -> list[str]:
    names = [name for name, _ in rows[0].values] or ["setting"]
    numbers = ["IQM", f"{LEVEL:.0%} interval", "mean", "seeds", *(["time"] if clock else [])]
    lines = [[*names, *numbers], [":--"] * len(names) + ["--:"] * len(numbers)]
    for row in rows:
        low, high = _number(row.spread.low), _number(row.spread.high)
        interval = low if low == high and not math.isfinite(row.spread.low) else f"{low} … {high}"
        seeds = str(len(row.scores)) + (f" of {len(row.scores) + row.missing}" if row.missing else "")
        seeds += f", {row.diverged} diverged" if row.diverged else ""
        words = [value for _, value in row.values] or [row.label]
        time = [f"{_number(_mean(row.seconds))} s"] if clock else []
        lines.append([*words, _number(row.spread.iqm), interval, _number(_mean(row.scores)), seeds, *time])
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines]


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4g}" if math.isfinite(value) else "diverged"


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _notes(summary: SweepSummary) -> list[str]:
    """What the numbers are and what they do not say."""
    seeds, best, others = len(summary.plan.seeds), summary.best, summary.rows[1:]
    notes = [
        "IQM: mean of the seeds' last epoch without the lowest and highest quarter; "
        f"interval: {LEVEL:.0%} bootstrap over seeds"
    ]
    if seeds == 1:
        notes.append("one seed gives no interval; use --seeds 5")
    elif seeds < _FEW_SEEDS:
        notes.append(
            f"{seeds} seeds cannot give {LEVEL:.0%}: no interval leaves their range; use --seeds {_FEW_SEEDS}"
        )
    if best is not None and others:
        mine = best.spread  # an interval that is not there (NaN) excludes nothing
        rivals = sum(not (mine.low > o.spread.high or o.spread.low > mine.high) for o in others)
        overlap = f"; the intervals of {rivals} of {len(others)} others overlap its own"
        notes.append(f"best: {best.label} (best.yaml)" + (overlap if rivals and seeds > 1 else ""))
    if any(row.diverged for row in summary.rows):
        notes.append("a run that diverged counts as infinitely bad")
    if any(row.missing for row in summary.rows):
        notes.append("settings without all of their seeds come last; the same command runs what is missing")
    return notes


def _draw(summary: SweepSummary, path: Path) -> None:
    """Each seed a dot, their interquartile mean a diamond on its interval, the best setting on top."""
    from koffline.report.plots import ACCENT, WARM, make_figure

    rows = summary.rows[:_MOST_SHOWN]

    def draw(axes: Axes) -> None:
        colors = [WARM if row is summary.best else ACCENT for row in rows]
        for place, (row, color) in enumerate(zip(rows, colors, strict=True)):
            scores = [score for score in row.scores if math.isfinite(score)]
            # Below the interval, which would hide them.
            axes.plot(scores, [place + 0.22] * len(scores), "o", color=color, alpha=0.5, ms=4.5, mew=0)
            if math.isfinite(row.spread.iqm):
                axes.plot(row.spread.iqm, place, "D", color=color, ms=6, mec="white", zorder=3)
        limits = axes.get_xlim()  # an infinite interval goes on to the edge
        for place, (row, color) in enumerate(zip(rows, colors, strict=True)):
            axes.hlines(place, *np.clip([row.spread.low, row.spread.high], *limits), color=color, lw=2.2)
        axes.set_xlim(limits)
        axes.set_yticks(range(len(rows)), [label(row) for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(f"{summary.title}, last epoch")
        title = f"Seeds, their interquartile mean and {LEVEL:.0%} interval"
        more = len(summary.rows) - len(rows)
        axes.set_title(title + (f"; {more} more in summary.md" if more else ""), fontsize=9)

    def label(row: Row) -> str:
        words = row.label if len(row.label) <= 60 else f"{row.label[:59]}…"
        words += f", {row.diverged} diverged" if row.diverged else ""
        words += f", {row.missing} missing" if row.missing else ""
        return words.replace("$", r"\$")  # dollar signs would be read as mathematics

    figure = make_figure(draw, width=7.5, height=1.3 + 0.32 * len(rows))
    with atomic_file(path, force=True) as temporary:
        figure.savefig(temporary, format="png", dpi=160, metadata={"Software": None})
