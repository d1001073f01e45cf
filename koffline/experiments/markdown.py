"""Markdown of the tables: lines, numbers, intervals."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence


def table_lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a Markdown table; a bar inside a cell would end it."""
    for line in (header, ["---"] * len(header), *rows):
        yield "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in line) + " |"


def interval_text(value: float | None, low: float | None, high: float | None) -> str:
    """0.12 [0.1, 0.14]; without the ends where there is a single seed, 'not finite' after a divergence."""
    if value is None or math.isnan(value):
        return "not finite"
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return number_text(value)
    return f"{number_text(value)} [{number_text(low)}, {number_text(high)}]"


def number_text(value: float | None) -> str:
    """Three digits; a dash where there is none."""
    if value is None or math.isnan(value):
        return "–"
    return "∞" if math.isinf(value) else f"{value:.3g}"
