"""The summary of a sweep as files and on a terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from koffline.data.files import atomic_file
from koffline.spread import LEVEL, Spread
from koffline.train.sweep_summary import SettingSummary, SweepSummary

_SHOWN = 30  # settings on a terminal
_FEW_SEEDS = 5


def write_summary(summary: SweepSummary, folder: Path, extra: Mapping[str, Any]) -> None:
    """Write summary.md, summary.png (of several settings), best.yaml and, last of all, summary.json.

    The same results give the same files: seconds are for run.json and the terminal.
    """
    _write(folder / "summary.md", as_markdown(summary))
    if len(summary.settings) > 1:
        from koffline.train.sweep_figure import draw_summary

        draw_summary(summary, folder / "summary.png")
    if summary.best is not None:
        content = summary.best.setting.config.resolved()
        _write(folder / "best.yaml", yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    else:
        (folder / "best.yaml").unlink(missing_ok=True)
    _write(folder / "summary.json", json.dumps({**as_plain(summary), **extra}, indent=2) + "\n")


def as_plain(summary: SweepSummary) -> dict[str, Any]:
    """The summary as JSON holds it: null where a number is not finite."""
    return {
        "metric": summary.metric.name,
        "maximize": summary.metric.maximize,
        "interval": LEVEL,
        "runs": summary.runs,
        "seeds": list(summary.seeds),
        "settings": [
            {
                "values": dict(part.setting.values),
                **_plain_spread(part.spread),
                "mean": _plain(_mean(part.values)),
                "scores": [_plain(value) for value in part.values],
                "diverged": part.diverged,
                "missing": part.missing,
            }
            for part in summary.settings
        ],
        "axes": [
            {"axis": part.axis, "value": part.value, "settings": part.settings, **_plain_spread(part.spread)}
            for part in summary.axes
        ],
        "failures": [{"run": failure.name, "reason": failure.reason} for failure in summary.failures],
        "warnings": list(summary.warnings),
    }


def as_markdown(summary: SweepSummary) -> str:
    """A table of the settings, one of the axes where there are several, and what to mind."""
    rows = [row[:-1] for row in _rows(summary)]  # without the time
    lines = [f"# {_title(summary)}", "", *_markdown_table(_head(summary)[:-1], rows)]
    if summary.axes:
        rows = [[part.axis, part.value, str(part.settings), *_cells(part.spread)] for part in summary.axes]
        head = ["axis", "value", "settings", "IQM", _interval_name()]
        lines += ["", "Over all settings of the other axes:", "", *_markdown_table(head, rows)]
    lines += ["", *(f"- {note}" for note in notes(summary))]
    lines += [f"- failed: {failure.name}: {failure.reason}" for failure in summary.failures]
    return "\n".join(lines) + "\n"


def print_summary(summary: SweepSummary) -> None:
    """The best settings as a table, and what to mind."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    table = Table(title=escape(_title(summary)), title_justify="left")
    swept = max(1, len(summary.settings[0].setting.values))
    for place, name in enumerate(_head(summary)):
        table.add_column(escape(name), justify="left" if place < swept else "right", overflow="fold")
    for row in _rows(summary)[:_SHOWN]:
        table.add_row(*(escape(cell) for cell in row))
    console.print(table)
    if len(summary.settings) > _SHOWN:
        console.print(f"and {len(summary.settings) - _SHOWN} settings more in summary.md")
    for note in notes(summary):
        console.print(escape(note), soft_wrap=True, highlight=False)
    for warning in summary.warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}", soft_wrap=True, highlight=False)


def notes(summary: SweepSummary) -> list[str]:
    """What the numbers are and what they do not say."""
    seeds = len(summary.seeds)
    found = [
        "IQM: mean of the seeds' last epoch without the lowest and highest quarter; "
        f"interval: {LEVEL:.0%} bootstrap over seeds"
    ]
    if seeds == 1:
        found.append("one seed gives no interval; use --seeds 5")
    elif seeds < _FEW_SEEDS:
        found.append(
            f"{seeds} seeds cannot give {LEVEL:.0%}: no interval leaves their range; use --seeds {_FEW_SEEDS}"
        )
    if summary.best is not None and len(summary.settings) > 1:
        others = f"{summary.rivals} of {len(summary.settings) - 1}"
        found.append(
            f"best: {summary.best.setting.label} (best.yaml)"
            + (f"; the intervals of {others} others overlap its own" if summary.rivals and seeds > 1 else "")
        )
    if any(part.diverged for part in summary.settings):
        found.append("a run that diverged counts as infinitely bad")
    if any(part.missing for part in summary.settings):
        found.append("settings without all of their seeds come last; the same command runs what is missing")
    return found


def _title(summary: SweepSummary) -> str:
    better = "more" if summary.metric.maximize else "less"
    seeds = len(summary.seeds)
    return f"{summary.metric.name} ({better} is better), {seeds} seed{'s' if seeds > 1 else ''}"


def _head(summary: SweepSummary) -> list[str]:
    names = [name for name, _ in summary.settings[0].setting.values] or ["setting"]
    return [*names, "IQM", _interval_name(), "mean", "seeds", "time"]


def _rows(summary: SweepSummary) -> list[list[str]]:
    return [_row(part) for part in summary.settings]


def _row(part: SettingSummary) -> list[str]:
    values = [value for _, value in part.setting.values] or [part.setting.label]
    seeds = str(len(part.values)) + (f" of {len(part.values) + part.missing}" if part.missing else "")
    seeds += f", {part.diverged} diverged" if part.diverged else ""
    seconds = "–" if math.isnan(part.seconds) else f"{part.seconds:.1f} s"
    return [*values, *_cells(part.spread), number(_mean(part.values)), seeds, seconds]


def _interval_name() -> str:
    return f"{LEVEL:.0%} interval"


def _cells(spread: Spread) -> list[str]:
    ends = [number(spread.low), number(spread.high)]
    interval = ends[0] if ends[0] == ends[1] and not math.isfinite(spread.low) else " … ".join(ends)
    return [number(spread.iqm), interval]


def number(value: float) -> str:
    """Four digits; words for what is no number."""
    if math.isnan(value):
        return "–"
    return f"{value:.4g}" if math.isfinite(value) else "diverged"


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _plain_spread(spread: Spread) -> dict[str, float | None]:
    return {"iqm": _plain(spread.iqm), "low": _plain(spread.low), "high": _plain(spread.high)}


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines]


def _write(path: Path, text: str) -> None:
    with atomic_file(path, force=True) as temporary:
        temporary.write_text(text, encoding="utf-8")
