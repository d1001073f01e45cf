"""A benchmark's summary as a table on the screen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def percent_table(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """Rows as a markdown table: floats in percent, a dash for None.

    columns: titles by key. Behind them stands how many of ``intervals`` intervals
    ``covered`` the truth.
    """
    titles = [*columns.values(), "intervals that hold"]
    lines = [_line(titles), _line(["---"] * len(titles))]
    for row in rows:
        cells = [_cell(row[key]) for key in columns]
        lines.append(_line([*cells, f"{row['covered']} of {row['intervals']}"]))
    return "\n".join(lines)


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.1%}"
    return str(value)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
