"""A log's summary as a table for people."""

from __future__ import annotations

from collections.abc import Iterator

from koffline.data.spaces import Continuous
from koffline.data.summary import LogSummary, Spread
from koffline.errors import printable

_MOST_LINES = 12


def print_summary(summary: LogSummary, shards: int = 1) -> None:
    """Print to stdout; plain where that is no terminal. shards: files that the rows are in."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=summary.source, show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    if shards > 1:
        table.add_row("shards", f"{shards}")
    for name, value in _lines(summary):
        table.add_row(name, value)
    Console(highlight=False, markup=False).print(table)


def _lines(summary: LogSummary) -> Iterator[tuple[str, str]]:
    yield "rows", f"{summary.rows}"
    yield "episodes", f"{summary.episodes}" if summary.episodes else "none: every row stands alone"
    yield "observations", f"shape {summary.observation_shape}, {summary.observation_dtype}"
    yield "actions", str(summary.action_space)
    yield "rewards", _text(summary.rewards)
    if summary.returns is not None and summary.lengths is not None:
        yield "returns", f"{_text(summary.returns)} (undiscounted, as logged)"
        yield "episode lengths", _text(summary.lengths)
    ends = f"{summary.terminated} terminated, {summary.truncated} truncated"
    yield "ends", ends + (f", {summary.unfinished} without a flag" if summary.unfinished else "")
    if summary.episodes:
        limit = summary.time_limit
        yield "time limit", f"{limit} steps" if limit else "none that all cut episodes share"
    yield from _coverage(summary)
    yield "behaviour log-probabilities", "yes" if summary.has_log_probabilities else "no"
    yield "weights", "yes" if summary.has_weights else "no"
    if summary.gamma is not None:
        yield "gamma (hint)", f"{summary.gamma:.10g}"
    for key, value in summary.extra.items():
        yield printable(str(key)), printable(str(value))
    for note in summary.notes:
        yield "note", printable(note)
    yield "sha256 of the rows", summary.sha256 or "unknown: shards were left out"


def _coverage(summary: LogSummary) -> Iterator[tuple[str, str]]:
    if summary.action_counts is not None:
        total = len(summary.action_counts)
        shown = enumerate(summary.action_counts[:_MOST_LINES])
        counts = [(_action_name(summary, a), f"{c} rows ({c / summary.rows:.1%})") for a, c in shown]
    else:
        assert summary.action_ranges is not None
        assert isinstance(summary.action_space, Continuous)
        counts = [(f"action[{i}]", _text(spread)) for i, spread in enumerate(summary.action_ranges)]
        total = len(counts)
    yield from counts[:_MOST_LINES]
    if total > _MOST_LINES:
        yield "…", f"{total - _MOST_LINES} more"


def _action_name(summary: LogSummary, action: int) -> str:
    """With the value that the table had, where the log remembers it."""
    names = summary.extra.get("action_names")
    if not isinstance(names, list) or action >= len(names):
        return f"action {action}"
    return f"action {action} ({printable(str(names[action]))})"


def _text(spread: Spread) -> str:
    return f"{spread.min:.6g} … {spread.max:.6g}, mean {spread.mean:.6g}"
