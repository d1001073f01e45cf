"""Results in a terminal, and numbers, counts and nested records in words as a page has them too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from koffline.ope.names import CERTIFIED_KINDS
from koffline.ope.results import CALIBRATED, CERTIFIED, Interval, percent

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_WIDTH = 116
_LONGEST_LIST = 8
_READER = "Reader: "


def make_console() -> Console:
    """As wide as the terminal; where there is none, wide enough that no number is broken. No markup."""
    from rich.console import Console

    console = Console(emoji=False, markup=False)
    if console.is_terminal:
        return console
    return Console(width=max(console.width, _WIDTH), emoji=False, markup=False)


def make_table(title: str, *columns: str, **options: Any) -> Table:
    """A table with its title on the left."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", **options)
    for column in columns:
        table.add_column(column)
    return table


def print_record(console: Console, title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Names and values, a line each."""
    table = make_table(title, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def print_labelled(console: Console, label: str, text: str, style: str = "yellow") -> None:
    """One long line behind a coloured label."""
    from rich.text import Text

    console.print(Text.assemble((f"{label}:", style), f" {text}"), soft_wrap=True)


def print_end(console: Console, warnings: Iterable[str], page: Path | None) -> None:
    """Warnings, and the path of the report where there is one."""
    for warning in warnings:
        print_labelled(console, *labelled(warning))
    if page is not None:
        console.print(f"report: {page}", soft_wrap=True)


def describe_interval(interval: Interval | None) -> str:
    """Ends, level and kind."""
    if interval is None:
        return "none; the warnings say why"
    about = f"{percent(interval.level)} {interval.kind}, {promise(interval.kind)}"
    return f"{interval.low:.4g} … {interval.high:.4g}   ({about})"


def number(value: object) -> str:
    """Four significant digits; a dash for what is not there."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def count_of(count: int, noun: str) -> str:
    """``1 episode``, ``2,000 episodes``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def describe_log(found: Any) -> str:
    """Where a result's log came from, and how much it holds."""
    episodes = count_of(found.n_episodes, "episode") if found.n_episodes else "no episodes"
    return f"{found.source or 'in memory'}: {count_of(found.n_transitions, 'transition')}, {episodes}"


def labelled(warning: str) -> tuple[str, str]:
    """``note`` for what the reader of the log has to say, ``warning`` for all else; and the sentence."""
    is_note = warning.startswith(_READER)
    return ("note", warning.removeprefix(_READER)) if is_note else ("warning", warning)


def promise(kind: str) -> str:
    """What a kind of interval promises: ``calibrated`` or ``certified``."""
    return CERTIFIED if kind in CERTIFIED_KINDS else CALIBRATED


def describe_lines(value: Any) -> list[str]:
    """A diagnostic as lines of text: 'key value' for mappings, ends for intervals, a count for long lists."""
    if isinstance(value, bool):
        return ["yes" if value else "no"]
    if isinstance(value, (list, tuple)):
        if any(isinstance(part, (Mapping, list, tuple)) for part in value):
            return [count_of(len(value), "record")]
        if len(value) > _LONGEST_LIST:
            return [count_of(len(value), "value")]
        return [", ".join(number(part) for part in value) or "–"]
    if not isinstance(value, Mapping):
        return [number(value)]
    if not {"low", "high", "kind"} <= set(value):
        return list(_entries(value)) or ["–"]
    level = f"{percent(value['level'])} " if value.get("level") is not None else ""
    return [f"{number(value['low'])} … {number(value['high'])} ({level}{value['kind']})"]


def _entries(record: Mapping[str, Any]) -> Iterator[str]:
    """Lines of a mapping without what is None; those of nested ones carry the outer key."""
    for key, value in record.items():
        if value is None:
            continue
        names_itself = isinstance(value, Mapping) and value.get("kind") == key
        name = "" if names_itself else f"{str(key).replace('_', ' ')} "
        yield from (f"{name}{line}" for line in describe_lines(value))
