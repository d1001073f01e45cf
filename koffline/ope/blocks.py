"""Rows in blocks, so that memory does not grow with the log."""

from __future__ import annotations

from collections.abc import Iterator

from koffline.replicas import StackedMLP

_MOST_ROWS = 4096
_MOST_NUMBERS = 1 << 23  # in one array of a block: 64 MB in float64


def row_blocks(network: StackedMLP, rows: int, draws: int = 1) -> Iterator[slice]:
    """Slices that cover ``rows``, narrow enough for hidden layers and last-layer features of all replicas.

    ``draws``: how many inputs each row has.
    """
    *widths, outputs = network.sizes
    per_row = network.replicas * max(draws * max(widths), (widths[-1] + 1) * outputs)
    size = max(1, min(_MOST_ROWS, _MOST_NUMBERS // per_row))
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))
