"""Which rows of a replay buffer were filled, and which of them is the oldest.

A buffer has room for a fixed number of rows. Until it is full, the rows above the last
one hold zeros; then the newest row replaces the oldest one. Many tools save all of the
room. Two things tell which rows are a log:

- **Counters beside the arrays**: ``pos`` and ``full`` (Stable-Baselines3), ``ptr`` and
  ``size`` (TD3, Spinning Up), ``_pointer`` and ``_size`` (CORL), ``_index`` and
  ``_size`` (Tianshou).
- **Zeros**: a long tail of rows that are zero in every array, next observations and
  flags too, if no other row is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from koffline.errors import counted
from koffline.untrusted.arrays import OpenArrays

_PLACES = ("pos", "ptr", "pointer", "_pointer", "_index")
_SIZES = ("size", "_size")
_FULL = "full"
_FEWEST_ZEROS = 10  # fewer rows of zeros may have happened
_AT_ONCE = 4096  # rows of zeros that are looked for together


@dataclass(frozen=True)
class FilledRows:
    """The filled rows of arrays with room for ``room`` of them: ``size`` rows, of which
    the one in place ``first`` is the oldest. ``note``: what it is known by.
    """

    room: int
    size: int
    first: int = 0
    note: str = ""

    @property
    def is_all(self) -> bool:
        """Whether all rows are filled, the oldest first."""
        return self.size == self.room and self.first == 0

    @property
    def notes(self) -> tuple[str, ...]:
        """The note, if there is one."""
        if self.note:
            return (self.note,)
        return ()

    def of(self, array: Any) -> Any:
        """The filled rows of an array (room, …), the oldest first; for the first rows
        of an array in a file, a view that is read by slices.
        """
        if self.is_all:
            return array
        if isinstance(array, np.ndarray):
            return np.roll(array[: self.size], -self.first, axis=0)
        return _FirstRows(array, self.size)


class _FirstRows:
    """The first rows of an array in a file, read by slices."""

    def __init__(self, array: Any, size: int) -> None:
        self._array = array
        self.dtype: np.dtype = array.dtype
        self.shape: tuple[int, ...] = (size, *array.shape[1:])
        self.size = int(np.prod(self.shape))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(len(self))
        return np.asarray(self._array[start:stop])


def filled_rows(file: OpenArrays, arrays: Mapping[str, Any]) -> FilledRows:
    """Which rows of arrays are filled.

    file: that holds them. arrays: all that have one row per step, by name, in memory or
    to be read by slices.
    """
    room = min((len(array) for array in arrays.values()), default=0)
    counters = _counters(file)
    place = next((counters[key] for key in _PLACES if key in counters), None)
    size = next((counters[key] for key in _SIZES if key in counters), None)
    if _FULL in counters and place is not None:
        size = place
        if counters[_FULL]:
            size = room
    if place is not None and size is not None and 0 < size <= room:
        first = 0
        if size == room:
            first = place % room
        return FilledRows(room, size, first, _note(room - size, "its counters say so"))
    n_zeros = _zeros_at_end(arrays, room)
    if n_zeros < _FEWEST_ZEROS or n_zeros == room:
        return FilledRows(room, room)
    return FilledRows(
        room, room - n_zeros, note=_note(n_zeros, "they are 0 in every array")
    )


def _note(n_unfilled: int, reason: str) -> str:
    if not n_unfilled:
        return ""
    rows = counted(n_unfilled, "row")
    return f"{rows} at the end were left out: never filled in the buffer ({reason})"


def _counters(file: OpenArrays) -> dict[str, int]:
    """The counters of a buffer among the arrays of a file, by name."""
    counters = {}
    for key in {*_PLACES, *_SIZES, _FULL}.intersection(file.datasets):
        header = file.dataset(key)
        is_one = header.shape in ((), (1,))
        is_counter = header.dtype.kind in "iu" and key != _FULL
        is_flag = header.dtype.kind in "biu" and key == _FULL
        if not is_one or not (is_counter or is_flag):
            continue
        (value,) = np.asarray(file.arrays([key])[key]).reshape(-1).tolist()
        if value >= 0:
            counters[key] = int(value)
    return counters


def _zeros_at_end(arrays: Mapping[str, Any], room: int) -> int:
    """The number of rows at the end that are zero in every array; 0 where other rows
    are, too, or where arrays hold texts.
    """
    if any(array.dtype.kind not in "biuf" for array in arrays.values()):
        return 0
    n_zeros = 0
    at_once = 1  # the last row alone tells of most logs that they have none
    while n_zeros < room:
        stop = room - n_zeros
        start = max(0, stop - at_once)
        is_zero = _are_zero(arrays, start, stop)
        if not is_zero.all():
            n_zeros += int(np.argmin(is_zero[::-1]))
            break
        n_zeros += stop - start
        at_once = _AT_ONCE
    if n_zeros < _FEWEST_ZEROS:
        return n_zeros
    filled = room - n_zeros
    for start in range(0, filled, _AT_ONCE):
        if _are_zero(arrays, start, min(start + _AT_ONCE, filled)).any():
            return 0
    return n_zeros


def _are_zero(arrays: Mapping[str, Any], start: int, stop: int) -> np.ndarray:
    """Whether each row from start to stop is zero in every array."""
    is_zero = np.ones(stop - start, dtype=np.bool_)
    for array in arrays.values():
        rows = np.asarray(array[start:stop]).reshape(stop - start, -1)
        is_zero &= (rows == 0).all(axis=1)
    return is_zero
