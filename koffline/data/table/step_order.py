"""The order of the inspected rows by episode and time, as far as columns tell, for
tests on the data.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import polars as pl


@dataclass(frozen=True)
class Steps:
    """Rows in the order of episodes and times.

    order: (N,) their numbers in the table. is_last: (N,) in this order, whether a row
    is the last one of its episode. last_rows: (N,) the same in the order of the table,
    also for rows at the time of the last one, which may repeat it. has_ids: whether a
    column tells episodes apart.
    """

    order: np.ndarray
    is_last: np.ndarray
    last_rows: np.ndarray
    has_ids: bool

    @classmethod
    def of_ids(cls, ids: pl.Series, times: pl.Series | None) -> Steps:
        """Rows (N,) of episodes with these ids; without times, in the order of the
        table.
        """
        row = pl.int_range(len(ids), eager=True)
        time = row
        if times is not None:
            time = times.rank("dense")
        frame = pl.DataFrame({"id": ids.rank("dense"), "row": row, "time": time})
        by_time = pl.arg_sort_by("id", "time", "row", nulls_last=True)
        order = frame.select(by_time).to_series().to_numpy()
        codes = frame["id"].fill_null(0).to_numpy()[order]
        is_last = np.append(codes[1:] != codes[:-1], True)
        is_latest = pl.col("time") == pl.col("time").max().over("id")
        at_end = frame.select(is_latest.fill_null(False)).to_series().to_numpy()
        return cls(order, is_last, at_end, has_ids=True)

    @classmethod
    def of_flags(cls, ends: np.ndarray) -> Steps:
        """Rows in the table's order, whose episodes end where ``ends`` (N,) is set."""
        is_last = ends.copy()
        is_last[-1] = True
        return cls(np.arange(len(ends)), is_last, is_last, has_ids=False)

    @functools.cached_property
    def first_rows(self) -> np.ndarray:
        """Whether (N,) a row, in the order of the table, is the first one of its
        episode.
        """
        is_first = np.empty(len(self.order), dtype=np.bool_)
        is_first[self.order] = np.append(True, self.is_last[:-1])
        return is_first

    @functools.cached_property
    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows that have a next row in their episode, and these next rows, by their
        numbers in the table.
        """
        inside = np.flatnonzero(~self.is_last[:-1])
        return self.order[inside], self.order[inside + 1]

    @functools.cached_property
    def firsts(self) -> np.ndarray:
        """Places (E,) in the order of the steps at which episodes begin."""
        return np.append(0, np.flatnonzero(self.is_last)[:-1] + 1)

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """Number of rows of each episode."""
        ends = np.flatnonzero(self.is_last) + 1
        return np.diff(ends, prepend=0)

    @functools.cached_property
    def episodes(self) -> np.ndarray:
        """Number (N,) of the episode of each row, in the order of the steps."""
        return np.append(0, np.cumsum(self.is_last)[:-1])
