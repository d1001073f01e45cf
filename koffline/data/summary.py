"""Summary of a log as one record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from koffline.data.features import ACTIONS, ENCODINGS, NAMES, Features
from koffline.data.raw import space_to_json
from koffline.data.spaces import ActionSpace
from koffline.data.statistics import LogTally, Spread, shard_names, tally_shard
from koffline.data.transitions import Transitions
from koffline.errors import printable

if TYPE_CHECKING:
    from koffline.data.disk.log import LazyTransitions
    from koffline.jobs import PassSettings


@dataclass(frozen=True, kw_only=True)
class LogSummary:
    """Rows, episodes, spaces, returns, ends, coverage of the actions, and where it all comes from.

    ``time_limit`` is the length that all cut episodes share and none exceeds. ``action_counts`` (n) is for
    discrete actions, ``action_ranges`` (k) for continuous ones. Returns are undiscounted, of whole episodes
    as logged. ``shards`` is the number of files read, which does not change the log.
    """

    source: str | None
    sha256: str | None
    rows: int
    episodes: int = 0
    observation_shape: tuple[int, ...]
    observation_dtype: str
    action_space: ActionSpace
    rewards: Spread
    returns: Spread | None = None
    lengths: Spread | None = None
    terminated: int
    truncated: int
    unfinished: int = 0
    time_limit: int | None = None
    action_counts: tuple[int, ...] | None
    action_ranges: tuple[Spread, ...] | None
    has_log_probabilities: bool
    has_weights: bool
    gamma: float | None
    extra: Mapping[str, Any]
    notes: tuple[str, ...]
    shards: int = field(default=1, compare=False)

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        said = {"action_space": space_to_json(self.action_space), "extra": dict(self.extra)}
        content = {**asdict(self), **said}
        return content if self.shards > 1 else {k: v for k, v in content.items() if k != "shards"}


def summarise(
    log: Transitions | LazyTransitions, settings: PassSettings | None = None, progress: bool = False
) -> LogSummary:
    """Summarise a log in one pass with bounded memory.

    settings: where the pass over the shards of a log on disk runs. Raises DataError.
    """
    from koffline.jobs import PassSettings

    names, tally = shard_names(log), LogTally(log.action_space, log.has_episodes)
    passes = settings or PassSettings()
    shared = (log, None, False)
    for one in passes.map(tally_shard, range(len(names)), shared, lambda shard: names[shard], progress):
        tally.merge(one)
    counts = tally.action_counts
    whole: dict[str, Any] = {}
    if tally.episodes is not None:
        returns, lengths = tally.episodes.returns.spreads()[0], tally.episodes.lengths.spreads()[0]
        whole = {"returns": returns, "lengths": lengths, "episodes": tally.episodes.lengths.count}
        whole |= {name: getattr(tally.episodes, name) for name in ("unfinished", "time_limit")}
    return LogSummary(
        source=log.metadata.source,
        sha256=log.sha256,
        rows=tally.rows,
        observation_shape=log.observation_shape,
        observation_dtype=str(log.columns["observations"].dtype),
        action_space=log.action_space,
        rewards=tally.rewards.spreads()[0],
        terminated=tally.terminated,
        truncated=tally.truncated,
        action_counts=None if counts is None else tuple(counts.tolist()),
        action_ranges=None if counts is not None else tally.actions.spreads(),
        has_log_probabilities="behavior_log_probabilities" in log.columns,
        has_weights="weights" in log.columns,
        gamma=log.metadata.gamma,
        extra=log.metadata.extra,
        notes=log.metadata.notes,
        shards=len(names),
        **whole,
    )


_MOST_LINES = 12


def print_summary(summary: LogSummary) -> None:
    """Print to stdout; plain where that is no terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=summary.source, show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    if summary.shards > 1:
        table.add_row("shards", f"{summary.shards}")
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
    features = Features.from_extra(summary.extra)
    if features is not None:
        yield "features", printable(", ".join(features.names))
    for column, encoding in features.encodings.items() if features is not None else ():
        yield f"{printable(column)}, {encoding.kind}", printable(", ".join(encoding.categories))
    said = () if features is None else (NAMES, ENCODINGS)
    for key, value in ((key, value) for key, value in summary.extra.items() if key not in said):
        yield printable(str(key)), printable(str(value))
    for note in summary.notes:
        yield "note", printable(note)
    yield "sha256 of the rows", str(summary.sha256)


def _coverage(summary: LogSummary) -> Iterator[tuple[str, str]]:
    names = summary.extra.get(ACTIONS)  # texts of the actions in the original table
    names = [f" ({printable(str(name))})" for name in names] if isinstance(names, list) else []
    lines = [(f"action[{i}]", _text(spread)) for i, spread in enumerate(summary.action_ranges or ())]
    for i, count in enumerate(summary.action_counts or ()):
        name = names[i] if i < len(names) else ""
        lines.append((f"action {i}{name}", f"{count} rows ({count / summary.rows:.1%})"))
    yield from lines[:_MOST_LINES]
    if len(lines) > _MOST_LINES:
        yield "…", f"{len(lines) - _MOST_LINES} more"


def _text(spread: Spread) -> str:
    return f"{spread.min:.6g} … {spread.max:.6g}, mean {spread.mean:.6g}"
