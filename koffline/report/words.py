"""Numbers, counts and nested records in words, the same on a page and in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from koffline.ope.interval import CALIBRATED, CERTIFIED, percent
from koffline.ope.names import CERTIFIED_KINDS

_LONGEST_LIST = 8
_READER = "Reader: "


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


def labelled(warning: str) -> tuple[str, str]:
    """``note`` for what the reader of the log has to say, ``warning`` for all else; and the sentence."""
    note = warning.startswith(_READER)
    return ("note", warning.removeprefix(_READER)) if note else ("warning", warning)


def promise(kind: str) -> str:
    """What a kind of interval promises: ``calibrated`` or ``certified``."""
    return CERTIFIED if kind in CERTIFIED_KINDS else CALIBRATED


def describe_lines(value: Any) -> list[str]:
    """A diagnostic as lines of text: 'key value' for mappings, ends for intervals, a count for long lists."""
    if _is_interval(value):
        return [_interval(value)]
    if isinstance(value, Mapping):
        return list(_entries(value)) or ["–"]
    if isinstance(value, (list, tuple)):
        return [_sequence(value)]
    if isinstance(value, bool):
        return ["yes" if value else "no"]
    return [number(value)]


def _entries(record: Mapping[str, Any]) -> Iterator[str]:
    """Lines of a mapping without what is None; those of nested ones carry the outer key."""
    for key, value in record.items():
        if value is None:
            continue
        if _is_interval(value) and value["kind"] == key:
            yield _interval(value)
            continue
        name = str(key).replace("_", " ")
        for line in describe_lines(value):
            yield f"{name} {line}"


def _is_interval(value: Any) -> bool:
    return isinstance(value, Mapping) and {"low", "high", "kind"} <= set(value)


def _interval(record: Mapping[str, Any]) -> str:
    level = f"{percent(record['level'])} " if record.get("level") is not None else ""
    return f"{number(record['low'])} … {number(record['high'])} ({level}{record['kind']})"


def _sequence(values: list[Any] | tuple[Any, ...]) -> str:
    """Short lists of plain values as they are, others as a count."""
    if any(isinstance(value, (Mapping, list, tuple)) for value in values):
        return count_of(len(values), "record")
    if len(values) <= _LONGEST_LIST:
        return ", ".join(number(value) for value in values) or "–"
    return count_of(len(values), "value")
