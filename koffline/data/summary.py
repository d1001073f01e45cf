"""Summary of a log: plain values for JSON, and lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from koffline.data.disk.log import LazyTransitions
from koffline.data.features import ACTIONS, ENCODINGS, NAMES
from koffline.data.raw import space_to_json
from koffline.data.statistics import LogTally, tally_of
from koffline.data.transitions import Transitions
from koffline.errors import printable
from koffline.jobs import PassSettings

_MOST_LINES = 12


@dataclass(frozen=True, eq=False)
class LogSummary:
    """A log with the statistics of its rows and episodes."""

    log: Transitions | LazyTransitions
    tally: LogTally

    def to_json(self) -> dict[str, Any]:
        """Plain values: rows, episodes, spaces, returns, ends, coverage of the actions, and the source.

        ``time_limit`` is the length that all cut episodes share and none exceeds. ``action_counts`` (n) is
        for discrete actions, ``action_ranges`` (k) for continuous ones. Returns are undiscounted, of whole
        episodes as logged. ``shards`` is the number of files read, where there are several.
        """
        log, tally, shards = self.log, self.tally, len(self.log.shard_names)
        counts, episodes = tally.action_counts, tally.episodes
        return {
            "source": log.metadata.source,
            "sha256": log.sha256,
            "rows": tally.rows,
            "episodes": episodes.lengths.count if episodes else 0,
            "observation_shape": log.observation_shape,
            "observation_dtype": str(log.columns["observations"].dtype),
            "action_space": space_to_json(log.action_space),
            "rewards": tally.rewards.spreads()[0],
            "returns": episodes.returns.spreads()[0] if episodes else None,
            "lengths": episodes.lengths.spreads()[0] if episodes else None,
            "terminated": tally.terminated,
            "truncated": tally.truncated,
            "unfinished": episodes.unfinished if episodes else 0,
            "time_limit": episodes.time_limit if episodes else None,
            "action_counts": None if counts is None else counts.tolist(),
            "action_ranges": None if counts is not None else tally.actions.spreads(),
            "has_log_probabilities": "behavior_log_probabilities" in log.columns,
            "has_weights": "weights" in log.columns,
            "gamma": log.metadata.gamma,
            "extra": dict(log.metadata.extra),
            "notes": log.metadata.notes,
            **({"shards": shards} if shards > 1 else {}),
        }

    def lines(self) -> Iterator[tuple[str, str]]:
        """The summary in words: names and texts."""
        found, features = self.to_json(), self.log.metadata.features
        if "shards" in found:
            yield "shards", f"{found['shards']}"
        yield "rows", f"{found['rows']}"
        yield "episodes", f"{found['episodes']}" if found["episodes"] else "none: every row stands alone"
        yield "observations", f"shape {found['observation_shape']}, {found['observation_dtype']}"
        yield "actions", str(self.log.action_space)
        yield "rewards", _text(found["rewards"])
        ends = f"{found['terminated']} terminated, {found['truncated']} truncated"
        ends += f", {found['unfinished']} without a flag" if found["unfinished"] else ""
        if found["episodes"]:
            yield "returns", f"{_text(found['returns'])} (undiscounted, as logged)"
            yield "episode lengths", _text(found["lengths"])
            limit = found["time_limit"]
            ends += f"; time limit: {f'{limit} steps' if limit else 'none that all cut episodes share'}"
        yield "ends", ends
        yield from _coverage(found)
        for name in ("has_log_probabilities", "has_weights"):
            yield name.removeprefix("has_").replace("_", "-"), "yes" if found[name] else "no"
        if found["gamma"] is not None:
            yield "gamma (hint)", f"{found['gamma']:.10g}"
        if features is not None:
            yield "features", printable(", ".join(features.names))
            for column, encoding in features.encodings.items():
                yield f"{printable(column)}, {encoding.kind}", printable(", ".join(encoding.categories))
        for key, value in found["extra"].items():
            if features is None or key not in (NAMES, ENCODINGS):
                yield printable(str(key)), printable(str(value))
        for note in found["notes"]:
            yield "note", printable(note)
        yield "sha256 of the rows", str(found["sha256"])


def summarise(
    log: Transitions | LazyTransitions, settings: PassSettings | None = None, progress: bool = False
) -> LogSummary:
    """Summarise a log in one pass with bounded memory.

    settings: where the pass over the shards of a log on disk runs. Raises DataError.
    """
    empty = LogTally(log.action_space, log.has_episodes)
    return LogSummary(log, tally_of(log, empty, settings=settings, progress=progress))


def print_summary(summary: LogSummary) -> None:
    """Print to stdout; plain where that is no terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=summary.log.metadata.source, show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in summary.lines():
        table.add_row(name, value)
    Console(highlight=False, markup=False).print(table)


def _coverage(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    names = found["extra"].get(ACTIONS)  # texts of the actions in the original table
    names = [f" ({printable(str(name))})" for name in names] if isinstance(names, list) else []
    lines = [(f"action[{i}]", _text(spread)) for i, spread in enumerate(found["action_ranges"] or ())]
    for i, count in enumerate(found["action_counts"] or ()):
        name = names[i] if i < len(names) else ""
        lines.append((f"action {i}{name}", f"{count} rows ({count / found['rows']:.1%})"))
    yield from lines[:_MOST_LINES]
    if len(lines) > _MOST_LINES:
        yield "…", f"{len(lines) - _MOST_LINES} more"


def _text(spread: Mapping[str, float]) -> str:
    return f"{spread['min']:.6g} … {spread['max']:.6g}, mean {spread['mean']:.6g}"
