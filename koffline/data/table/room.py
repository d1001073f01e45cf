"""The memory that rows of a table may take while they are read: a stated figure, not a ratio."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from koffline.data.table.values import plain_bytes
from koffline.untrusted.limits import Refused, memory_allowance, shown_bytes

# Bytes that reading takes for each byte of the columns: as stored, in order, as rows that follow, checked.
COPIES = 6
IN_PIECES = "convert it in pieces (`koffline data convert … --shard-rows N`)"


@dataclass
class Room:
    """What rows that stay in memory together take, against ``memory_allowance``.

    A number counts ``itemsize`` bytes at least, which it takes in the log. Without ``remedy`` batches are let
    go one by one.
    """

    itemsize: int
    remedy: str | None
    taken: int = 0
    allowed: int = field(default_factory=memory_allowance)

    def declare(self, total: int, at_once: int) -> None:
        """Check a file before its rows are read: bytes of its columns, and of parts decoded in one go.

        Raises Refused.
        """
        if at_once > self.allowed:
            self._refuse(f"parts of it take {shown_bytes(at_once)} at once", "write it in smaller row groups")
        if self.remedy is not None:
            self._check(self.taken + total)

    def take(self, batch: Any) -> None:
        """Count the rows of a batch. Raises Refused where they do not fit."""
        size = sum(plain_bytes(column, self.itemsize) for column in batch.columns)
        self.taken = size + (self.taken if self.remedy is not None else 0)
        self._check(self.taken)

    def _check(self, held: int) -> None:
        if held * COPIES > self.allowed:
            needed = shown_bytes(held * COPIES)
            self._refuse(f"its rows need {needed} of memory to be read", self.remedy or "write shorter rows")

    def _refuse(self, what: str, remedy: str) -> None:
        limit = shown_bytes(self.allowed)
        raise Refused(f"{what}, allowed are {limit}; {remedy}, or allow more bytes (KOFFLINE_MAX_BYTES)")
